//! A bundle's spec, text and origin against those of its source, field by field.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::{
    Bundle,
    declare::Deviations,
    manifest::{ActivationContract, SkippedTensor, SourceRecord, TOKENIZER_FILE, bounded},
    spec::ModelSpec,
    text::TextAssets,
    verify::{Against, Status, VerifyReport},
};

/// Differences that are listed one by one.
const MAX_LISTED: usize = 64;

/// Spec, text and origin of the bundle against those of the source, field by
/// field: whatever fields there are, none is left out.
pub(crate) fn check_facts(
    bundle: &Bundle,
    text: &TextAssets,
    against: &Against<'_>,
    declared: &Deviations,
    report: &mut VerifyReport,
) {
    let m = bundle.manifest();
    let facts = |spec, text: &TextAssets, record, skipped, activation| {
        facts(spec, text, record, skipped, activation).map_err(|e| e.to_string())
    };
    let found = facts(&m.spec, text, &m.source, &m.skipped, m.activation);
    let expected = facts(
        against.spec,
        against.text,
        against.record,
        against.skipped,
        against.activation,
    );
    let (found, expected) = match (found, expected) {
        (Ok(found), Ok(expected)) => (found, expected),
        (Err(e), _) | (_, Err(e)) => return report.add("facts", Status::Fail, e),
    };
    let mut differences = Vec::new();
    compare("", &found, &expected, &mut differences);
    // What has a check of its own, or is declared and judged there.
    let judged = |path: &str| {
        let within = |field: &str| path.starts_with(field);
        path == "spec.max_context"
            || declared.bos.is_some() && within("text.bos")
            || declared.eos.is_some()
                && ["text.eos", "text.generation_eos_ids", "text.config_eos_ids"]
                    .into_iter()
                    .any(within)
    };
    differences.retain(|(path, _)| !judged(path));
    if differences.is_empty() {
        let detail = "spec, text and origin are those of the source, field by field";
        return report.add("facts", Status::Ok, detail);
    }
    let more = differences.len().saturating_sub(MAX_LISTED);
    for (path, difference) in differences.into_iter().take(MAX_LISTED) {
        report.add("facts", Status::Diff, format!("{path}: {difference}"));
    }
    if more > 0 {
        report.add("facts", Status::Diff, format!("{more} more fields differ"));
    }
}

/// All that bundle and source must have in common, as JSON.
fn facts(
    spec: &ModelSpec,
    text: &TextAssets,
    record: &SourceRecord,
    skipped: &[SkippedTensor],
    activation: ActivationContract,
) -> Result<Value, serde_json::Error> {
    let digest = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
    let mut config = text.config.clone();
    // The template has a check of its own, by its digest.
    config.chat_template = None;
    let record = SourceRecord {
        name: String::new(),
        digest: None,
        declared: None,
        ..record.clone()
    };
    // Through text, where an fp32 has the digits that a person would write.
    let json = serde_json::to_string(&(spec, config, record, skipped, activation))?;
    let Value::Array(parts) = serde_json::from_str(&json)? else {
        unreachable!("invariant: a tuple is written as an array");
    };
    let names = ["spec", "text", "source", "skipped", "activation"];
    let mut all: Map<String, Value> = names.map(String::from).into_iter().zip(parts).collect();
    all.insert(
        TOKENIZER_FILE.into(),
        text.tokenizer_json.as_deref().map(digest).into(),
    );
    Ok(Value::Object(all))
}

/// Collects the paths at which two values differ, and both values there.
fn compare(path: &str, bundle: &Value, source: &Value, out: &mut Vec<(String, String)>) {
    let below = |key: &str| match path {
        "" => key.to_string(),
        _ => format!("{path}.{key}"),
    };
    match (bundle, source) {
        (Value::Object(b), Value::Object(s)) => {
            let keys: BTreeSet<&String> = b.keys().chain(s.keys()).collect();
            for key in keys {
                let value = |map: &Map<String, Value>| map.get(key).cloned().unwrap_or_default();
                compare(&below(key), &value(b), &value(s), out);
            }
        }
        (Value::Array(b), Value::Array(s)) if b.len() == s.len() => {
            for (i, (b, s)) in b.iter().zip(s).enumerate() {
                compare(&below(&i.to_string()), b, s, out);
            }
        }
        _ if bundle == source => {}
        _ => {
            let show = |v: &Value| bounded(&v.to_string());
            let difference = format!("bundle {}, source {}", show(bundle), show(source));
            out.push((path.to_string(), difference));
        }
    }
}
