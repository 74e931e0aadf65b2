//! `carat pull`.

use std::process::ExitCode;

use carat_hub::{PullOptions, default_models_dir, default_token, pinned, pull};
use serde_json::json;

use crate::{
    args::Pull,
    failure::{Failure, OrInput as _, Outcome},
    output::{self, bytes},
    progress::Bar,
};

struct BarProgress(Bar);

impl carat_hub::Progress for BarProgress {
    fn begin(&self, what: &str, total: Option<u64>) {
        self.0.start(what, total, true);
    }

    fn advance(&self, bytes: u64) {
        self.0.advance(bytes);
    }

    fn end(&self) {
        self.0.finish();
    }
}

pub(crate) fn run(args: &Pull) -> Outcome {
    let Some(name) = &args.name else {
        return list(args.json);
    };
    let models_dir = default_models_dir().ok_or_else(|| {
        Failure::input(anyhow::anyhow!("there is no folder to keep models in"))
            .hint("set CARAT_MODELS to a folder")
    })?;
    let progress = BarProgress(Bar::new());
    let options = PullOptions {
        models_dir,
        hub_endpoint: None,
        token: default_token(),
        progress: &progress,
    };
    let pulled = pull(name, &options).map_err(|e| {
        let hint = e.hint();
        Failure::input(e).maybe_hint(hint)
    })?;
    if args.json {
        output::json(&json!({
            "schema": "carat.pull",
            "version": 1,
            "name": pulled.name,
            "path": pulled.path,
            "already_there": pulled.already_there,
            "revision": pulled.revision,
        }))
        .or_input()?;
    } else {
        let state = if pulled.already_there {
            "already there"
        } else {
            "pulled"
        };
        output::note(&format!(
            "{}: {state}, {}",
            pulled.name,
            pulled.path.display()
        ));
        output::note(&format!("try: carat run {} \"Hello!\"", pulled.name));
    }
    Ok(ExitCode::SUCCESS)
}

fn list(as_json: bool) -> Outcome {
    if as_json {
        let models: Vec<_> = pinned()
            .iter()
            .map(|p| json!({ "name": p.name, "description": p.description, "licence": p.licence, "bytes": p.bytes }))
            .collect();
        output::json(&json!({ "schema": "carat.pinned", "version": 1, "models": models }))
            .or_input()?;
    } else {
        for p in pinned() {
            output::line(&format!(
                "{:<22}{:>10}  {} ({})",
                p.name,
                bytes(p.bytes),
                p.description,
                p.licence
            ))
            .or_input()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
