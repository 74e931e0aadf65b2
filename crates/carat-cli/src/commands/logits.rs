//! `carat logits`.

use std::{collections::HashMap, process::ExitCode};

use carat_engine::Schedule;
use carat_oracle::{Oracle, OracleOptions, Rows};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::{read_ids, write_whole};
use crate::{
    args::{EngineKind, Logits, RowsKind},
    failure::{Failure, OrInput as _, Outcome},
    model::Model,
    output,
};

pub(crate) fn run(args: &Logits) -> Outcome {
    let model = Model::for_engine(&args.model)?;
    let vocab = model.spec.vocab_size;
    let ids = read_ids(&args.ids, vocab)?;
    let context = model.context(&args.model, ids.len());
    if ids.len() > context {
        return Err(Failure::input(anyhow::anyhow!(
            "{}: {} ids do not fit in a context of {context}",
            args.ids.display(),
            ids.len()
        ))
        .hint("give fewer ids or raise --ctx"));
    }
    let (logits, backend) = if args.model.engine == EngineKind::Oracle {
        let oracle =
            Oracle::new(&model.spec, model.tensors(), OracleOptions::new(context)).or_input()?;
        let rows = match args.rows {
            RowsKind::All => Rows::All,
            RowsKind::Last => Rows::Last,
        };
        let out = oracle.forward(&[&ids], rows).or_input()?;
        (
            out.into_iter().flat_map(|l| l.data).collect(),
            "oracle fp32".to_owned(),
        )
    } else {
        let mut engine = model.engine(&args.model, args.chunk, ids.len())?;
        let schedule = match (&args.schedule, args.chunk) {
            (Some(text), _) => Schedule::parse(text)?,
            (None, Some(chunk)) => Schedule::every(chunk)?,
            (None, None) => engine.schedule(),
        };
        let backend = engine.backend().describe();
        let logits = match args.rows {
            RowsKind::All => engine.logits(&ids, context, &schedule)?,
            RowsKind::Last => {
                let mut sequence = engine.open(context)?;
                engine.prefill(&mut sequence, &ids, &schedule)?.to_vec()
            }
        };
        (logits, backend)
    };
    let rows = logits.len() / vocab;
    let bytes: Vec<u8> = logits.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
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
