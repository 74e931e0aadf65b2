//! `carat cache`.

use std::process::ExitCode;

use carat_bundle::cache::Cache;
use serde_json::json;

use crate::{
    args::{self, CacheAction},
    failure::{OrInput as _, Outcome},
    output::{self, bytes},
};

pub(crate) fn run(args: &args::Cache) -> Outcome {
    let cache = Cache::open_default().or_input()?;
    match args.action {
        CacheAction::List { json } => {
            let entries = cache.list().or_input()?;
            if json {
                let entries: Vec<_> = entries
                    .iter()
                    .map(|e| json!({ "key": e.key, "name": e.name, "path": e.path, "bytes": e.bytes }))
                    .collect();
                output::json(&json!({ "schema": "carat.cache", "version": 1, "entries": entries }))
                    .or_input()?;
            } else {
                for entry in &entries {
                    let name = entry.name.as_deref().unwrap_or("damaged");
                    output::line(&format!(
                        "{:>10}  {name}  {}",
                        bytes(entry.bytes),
                        entry.path.display()
                    ))
                    .or_input()?;
                }
                output::note(&format!(
                    "{} models, {}",
                    entries.len(),
                    bytes(entries.iter().map(|e| e.bytes).sum())
                ));
            }
        }
        CacheAction::Clear => {
            let freed = cache.clear().or_input()?;
            output::note(&format!("freed {}", bytes(freed)));
        }
    }
    Ok(ExitCode::SUCCESS)
}
