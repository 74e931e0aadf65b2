//! `carat synth`.

use std::{path::Path, process::ExitCode, time::Instant};

use carat_import::synth::{ModelShape, SHAPES, SynthError, Synthesis};
use serde_json::json;

use crate::{
    args::Synth,
    failure::{Failure, OrInput as _, Outcome},
    interrupt,
    model::threads,
    output::{self, bytes},
    progress::Bar,
};

/// 128 + SIGINT, as shells expect.
const INTERRUPTED: u8 = 130;

pub(crate) fn run(args: &Synth) -> Outcome {
    let target = args.file.as_ref().or(args.out_file.as_ref());
    let (Some(name), Some(target)) = (&args.shape, target) else {
        return list(args.json);
    };
    let shape = ModelShape::named(name).ok_or_else(|| {
        Failure::input(anyhow::anyhow!("{name}: no such shape"))
            .hint(format!("known: {}", known().join(", ")))
    })?;
    let threads = threads(args.threads)?;
    let layers = args.layers.unwrap_or(shape.layers);
    let synthesis = Synthesis::new(shape, layers, args.seed).map_err(failure)?;
    check_target(target, args.force)?;

    let started = Instant::now();
    interrupt::listen();
    let bar = Bar::new();
    bar.start("writing", Some(synthesis.tensor_bytes()), true);
    let written = synthesis.write(target, threads, |made| {
        bar.advance(made);
        !interrupt::pressed()
    });
    bar.finish();
    if let Err(SynthError::Stopped { .. }) = written {
        output::note("stopped; nothing was kept");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    written.map_err(failure)?;
    let seconds = started.elapsed().as_secs_f64();

    let tensors = synthesis.tensors().count();
    let file_bytes = synthesis.file_bytes().map_err(failure)?;
    if args.json {
        output::json(&json!({
            "schema": "carat.synth",
            "version": 1,
            "file": target,
            "shape": shape.name,
            "layers": layers,
            "seed": args.seed,
            "parameters": synthesis.parameters(),
            "tensors": tensors,
            "tensor_bytes": synthesis.tensor_bytes(),
            "file_bytes": file_bytes,
            "threads": threads,
            "seconds": seconds,
        }))
        .or_input()?;
    } else {
        let lines = [
            format!("{} -> {}", shape.name, target.display()),
            format!(
                "layers   {layers} of {}, seed {}, random weights",
                shape.layers, args.seed
            ),
            format!(
                "tensors  {tensors} with {} parameters in {}",
                synthesis.parameters(),
                bytes(synthesis.tensor_bytes())
            ),
            format!("file     {} in {seconds:.1} s", bytes(file_bytes)),
        ];
        for line in lines {
            output::line(&line).or_input()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn known() -> Vec<&'static str> {
    SHAPES.iter().map(|s| s.name).collect()
}

fn list(json: bool) -> Outcome {
    if json {
        let shapes = SHAPES.iter().map(|s| {
            json!({
                "name": s.name,
                "about": s.about,
                "layers": s.layers,
                "vocab_size": s.vocab_size,
            })
        });
        output::json(&json!({
            "schema": "carat.shapes",
            "version": 1,
            "shapes": shapes.collect::<Vec<_>>(),
        }))
        .or_input()?;
    } else {
        for s in SHAPES {
            output::line(&format!("{:14} {}", s.name, s.about)).or_input()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The name must end as commands that open it expect, and nothing is lost.
fn check_target(target: &Path, force: bool) -> Outcome<()> {
    let shown = target.display();
    if target.extension().is_none_or(|e| e != "gguf") {
        return Err(Failure::input(anyhow::anyhow!(
            "{shown}: expected a name that ends in .gguf"
        )));
    }
    if target.is_dir() {
        return Err(Failure::input(anyhow::anyhow!("{shown}: is a folder")));
    }
    if target.exists() && !force {
        return Err(Failure::input(anyhow::anyhow!("{shown}: exists already"))
            .hint("choose another name; --force replaces the file"));
    }
    Ok(())
}

fn failure(error: SynthError) -> Failure {
    let hint = match error {
        SynthError::Stage(error) => return error.into(),
        SynthError::Write { .. } => {
            Some("nothing was kept; free some space or choose another folder")
        }
        _ => None,
    };
    Failure::input(error).maybe_hint(hint.map(str::to_owned))
}
