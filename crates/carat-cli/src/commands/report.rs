//! `carat report`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use carat_bundle::{Bundle, manifest::GATES_DIR};
use carat_fidelity::{
    Transcript,
    report::{Report, Speed, card, html},
};
use carat_text::Tokenizer;
use serde_json::{Value, json};

use super::{read_json, write_whole};
use crate::{
    args,
    failure::{Failure, OrInput as _, Outcome},
    output,
};

pub(crate) fn run(args: &args::Report) -> Outcome {
    let bundle = Bundle::open(&args.bundle)?;
    let text = bundle.text()?;
    let tokenizer = match text.tokenizer_json {
        Some(_) => Some(Tokenizer::from_assets(&text)?),
        None => None,
    };
    let decode = |ids: &[u32]| match tokenizer.as_ref().map(|t| t.decode(ids, false)) {
        Some(Ok(text)) => text,
        // What the tokenizer has no text for is shown as it is.
        _ => format!("{ids:?}"),
    };
    let manifest = bundle.manifest();
    let transcripts = transcripts(&bundle)?;
    let report = Report {
        name: manifest.name.clone(),
        digest: bundle.digest().to_owned(),
        source: format!(
            "{} ({})",
            manifest.source.name, manifest.source.architecture
        ),
        compression: manifest.compression.clone(),
        activation: format!("{:?}", manifest.activation.default).to_lowercase(),
        bytes: manifest.size_report.stored_bytes,
        weights: manifest.size_report.weights,
        bits_per_weight: manifest.size_report.bits_per_weight,
        speeds: args
            .bench
            .iter()
            .map(|path| speed(path, bundle.digest()))
            .collect::<Outcome<_>>()?,
        transcripts,
        decode: Some(&decode),
    };
    let gates = bundle.path().join(GATES_DIR);
    let place = |given: &Option<PathBuf>, name: &str| match given {
        Some(path) => path.clone(),
        None => gates.join(name),
    };
    let page = place(&args.out, "report.html");
    let markdown = place(&args.card, "card.md");
    write_whole(&page, html(&report).as_bytes())?;
    write_whole(&markdown, card(&report).as_bytes())?;
    if args.json {
        output::json(&json!({
            "schema": "carat.report",
            "version": 1,
            "page": page,
            "card": markdown,
            "verdicts": report.transcripts.iter().map(|t| json!({
                "fixture": t.fixture.name,
                "verdict": t.verdict,
            })).collect::<Vec<_>>(),
        }))
        .or_input()?;
    } else {
        output::line(&format!("{}\n{}", page.display(), markdown.display())).or_input()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The bundle's transcripts, the standard one first; those of an earlier bundle in the
/// same place are left out.
fn transcripts(bundle: &Bundle) -> Outcome<Vec<Transcript>> {
    let folder = bundle.path().join(GATES_DIR);
    let mut paths: Vec<PathBuf> = match std::fs::read_dir(&folder) {
        Ok(entries) => entries.filter_map(|e| Some(e.ok()?.path())).collect(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => vec![],
        Err(e) => return Err(Failure::input(anyhow::anyhow!("{}: {e}", folder.display()))),
    };
    paths.retain(|p| p.extension().is_some_and(|e| e == "json"));
    paths.sort_by_key(|p| (p.file_stem().is_none_or(|n| n != "standard"), p.clone()));
    let mut out = Vec::new();
    for path in paths {
        let transcript = Transcript::read(&path)?;
        if transcript.candidate.digest.as_deref() == Some(bundle.digest()) {
            out.push(transcript);
        } else {
            output::note(&format!("note: {} is of another bundle", path.display()));
        }
    }
    Ok(out)
}

/// A record of `carat bench --json` of this very bundle.
fn speed(path: &Path, digest: &str) -> Outcome<Speed> {
    let value: Value = read_json(path)?;
    let wrong = |problem: &str| {
        Failure::input(anyhow::anyhow!("{}: {problem}", path.display()))
            .hint("carat bench BUNDLE --json writes one")
    };
    if value["schema"] != "carat.bench" {
        return Err(wrong("is not a record of carat bench"));
    }
    if value["bundle_digest"] != digest {
        return Err(wrong("is a record of another bundle"));
    }
    let record = &value["record"];
    let words = |v: &Value| v.as_str().unwrap_or("?").to_owned();
    Ok(Speed {
        machine: format!(
            "{}, {}",
            words(&value["machine"]["cpu"]),
            words(&record["info"]["backend"])
        ),
        prompt_tps: record["prompt_tps"]["median"].as_f64(),
        decode_tps: record["decode_tps"]["median"].as_f64(),
        workload: format!(
            "{} prompt, {} new tokens",
            value["protocol"]["prompt_tokens"], value["protocol"]["new_tokens"]
        ),
    })
}
