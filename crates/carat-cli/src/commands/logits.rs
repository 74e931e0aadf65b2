//! `carat logits`.

use std::{collections::HashMap, ops::ControlFlow, process::ExitCode};

use carat_engine::{EngineOptions, Schedule};
use carat_oracle::{NoTaps, OracleError, Rows};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::{read_ids, write_whole};
use crate::{
    args::{EngineKind, Logits, RowsKind},
    failure::{Failure, OrInput as _, Outcome},
    memory::Request,
    model::{Model, no_steps, require_context},
    output,
    progress::{Bar, Spinner},
};

pub(crate) fn run(args: &Logits) -> Outcome {
    let steps = [
        ("--chunk", args.chunk.is_some()),
        ("--schedule", args.schedule.is_some()),
    ];
    no_steps(&args.model, &steps)?;
    let schedule = match (&args.schedule, args.chunk) {
        (Some(text), _) => Schedule::parse(text)?,
        (None, Some(chunk)) => Schedule::every(chunk)?,
        (None, None) => Schedule::every(EngineOptions::DEFAULT_CHUNK)?,
    };
    let model = Model::for_engine(&args.model)?;
    let vocab = model.spec.vocab_size;
    let ids = read_ids(&args.ids, vocab)?;
    let context = model.context(&args.model);
    require_context(ids.len(), context)?;
    let all_rows = args.rows == RowsKind::All;
    let kept_rows = if all_rows { ids.len() } else { 1 };
    let (logits, backend) = if args.model.engine == EngineKind::Oracle {
        let _busy = Spinner::start("the oracle is at work");
        let oracle = model.oracle(&args.model, context, ids.len(), kept_rows)?;
        let rows = match args.rows {
            RowsKind::All => Rows::All,
            RowsKind::Last => Rows::Last,
        };
        let mut logits = Vec::with_capacity(kept_rows.saturating_mul(vocab));
        oracle.forward_with(&[&ids], rows, &mut NoTaps, &mut |row| {
            if let Some(index) = row.logits.iter().position(|v| !v.is_finite()) {
                let value = row.logits[index];
                return Err(OracleError::NotFinite { index, value });
            }
            logits.extend_from_slice(row.logits);
            Ok(())
        })?;
        (logits, "oracle fp32".to_owned())
    } else {
        let request = Request {
            all_rows,
            kept_rows,
            ..Request::new(ids.len(), context, schedule.largest())
        };
        let mut engine = model.engine(&args.model, &request)?;
        let backend = engine.backend().describe();
        let bar = Bar::new();
        bar.start("computing", Some(ids.len() as u64), false);
        let logits = match args.rows {
            RowsKind::All => engine.logits_with(&ids, context, &schedule, &mut |done| {
                bar.set(done as u64);
            })?,
            RowsKind::Last => {
                let mut sequence = engine.open(context)?;
                let mut each = |done| {
                    bar.set(done as u64);
                    ControlFlow::Continue(())
                };
                let last = engine.prefill_with(&mut sequence, &ids, &schedule, &mut each)?;
                last.unwrap_or_default().to_vec()
            }
        };
        (logits, backend)
    };
    let rows = logits.len() / vocab;
    let mut bytes = Vec::with_capacity(logits.len() * size_of::<f32>());
    for x in &logits {
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    // The file holds them once more.
    drop(logits);
    let view = TensorView::new(Dtype::F32, vec![rows, vocab], &bytes).map_err(Failure::internal)?;
    let file = safetensors::serialize(HashMap::from([("logits", view)]), None)
        .map_err(Failure::internal)?;
    write_whole(&args.out, &file)?;
    if args.model.json {
        output::json(&json!({
            "schema": "carat.logits",
            "version": 1,
            "out": args.out,
            "rows": rows,
            "vocab": vocab,
            "context": context,
            "backend": backend,
        }))
        .or_input()?;
    } else {
        output::note(&format!(
            "{rows} rows of {vocab} logits in {} ({backend})",
            args.out.display()
        ));
    }
    Ok(ExitCode::SUCCESS)
}
