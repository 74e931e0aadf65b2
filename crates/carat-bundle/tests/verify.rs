//! Damage is found, undeclared change is a DIFF, a wrong declaration a FAIL.

mod common;

use std::path::Path;

use carat_bundle::{
    Bundle, ConvertOptions, VerifyOptions, VerifyReport, convert,
    declare::{Deviation, SourceDeclarations},
    manifest::{ActivationContract, WeightsKind},
    spec::ModelSpec,
    text::TextAssets,
    verify,
    verify::{Against, Status, set_recipe_status},
};
use carat_tensor::DType;
use common::*;
use serde_json::{Value, json};

fn run(dir: &Path) -> VerifyReport {
    verify(dir, &VerifyOptions::default())
}

fn status(report: &VerifyReport, name: &str) -> Status {
    let Some(check) = report.check(name) else {
        panic!("no check {name:?} in\n{report}");
    };
    check.status
}

/// Edits the manifest of a bundle as text.
fn edit(dir: &Path, file: &str, from: &str, to: &str) {
    let path = dir.join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from:?} is not in {file}");
    std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn a_fresh_bundle_passes_and_what_was_not_checked_is_not_ok() {
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    convert_tiny(&b);
    let report = run(&b);
    assert!(report.passed(), "{report}");
    for name in [
        "manifest",
        "tensors",
        "weights",
        "alignment",
        "tokenizer",
        "compression",
        "weights kind",
        "eos",
        "bos",
        "chat_template",
        "context",
        "formats",
    ] {
        assert_eq!(status(&report, name), Status::Ok, "{report}");
    }
    // Without the source at hand it was not looked at.
    assert_eq!(status(&report, "source"), Status::Skipped);
    assert_eq!(status(&report, "recipe"), Status::Info);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["checks"][0]["status"], "ok");
}

#[test]
fn any_flipped_byte_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    let m = convert_tiny(&b).manifest;
    let path = b.join("weights.bin");
    let whole = std::fs::read(&path).unwrap();
    let k = m
        .tensors
        .iter()
        .find(|t| t.name == "layers.0.attn.k.weight")
        .unwrap();
    let gap =
        m.tensors.iter().zip(&m.tensors[1..]).find_map(|(a, b)| {
            (a.offset + a.bytes < b.offset).then(|| (a.offset + a.bytes) as usize)
        });
    for (at, name, detail) in [
        (0, "tensors", "embed.weight"),
        (
            (k.offset + k.bytes - 1) as usize,
            "tensors",
            "layers.0.attn.k.weight",
        ),
        (gap.unwrap(), "alignment", "between tensors"),
        (whole.len() - 1, "alignment", "between tensors"),
    ] {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x10;
        std::fs::write(&path, &flipped).unwrap();
        let report = run(&b);
        assert_eq!(status(&report, "weights"), Status::Fail);
        assert_eq!(status(&report, name), Status::Fail, "{report}");
        assert!(
            report.check(name).unwrap().detail.contains(detail),
            "{report}"
        );
        assert!(!report.passed());
    }
}

/// Rewrites a tensor's bytes and every digest that covers them, as somebody who
/// wants the damage to pass would.
fn forge(dir: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let m = Bundle::open(dir).unwrap().manifest().clone();
    let t = m.tensors.iter().find(|t| t.name == tensor).unwrap();
    let path = dir.join("weights.bin");
    let mut weights = std::fs::read(&path).unwrap();
    let range = t.offset as usize..(t.offset + t.bytes) as usize;
    change(&mut weights[range.clone()]);
    let hex = |b: &[u8]| blake3::hash(b).to_hex().to_string();
    edit(dir, "manifest.json", &t.blake3, &hex(&weights[range]));
    edit(dir, "manifest.json", &m.weights.blake3, &hex(&weights));
    std::fs::write(&path, &weights).unwrap();
}

#[test]
fn padding_rows_and_undefined_codes_are_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(1);
    let source = MemorySource::random(&spec, DType::TQ2_0, DType::F32);
    let make = |name: &str| {
        let b = dir.path().join(name);
        let options = ConvertOptions::default();
        convert(
            &source,
            &spec,
            &text(),
            origin(WeightsKind::Ternary),
            &options,
            &b,
        )
        .unwrap();
        assert!(run(&b).passed());
        b
    };
    // The last of three panels of `embed.weight` has 8 rows and 8 of padding;
    // its scales come last, two bytes a row.
    let b = make("padding");
    forge(&b, "embed.weight", |bytes| {
        let end = bytes.len();
        // One block per row: the panel is one chunk, padded to 64 bytes.
        let fields = end - (end / 3) + 1024;
        bytes[fields + 2 * 15] = 1;
    });
    let report = run(&b);
    assert_eq!(status(&report, "tensors"), Status::Fail, "{report}");
    assert!(
        report
            .check("tensors")
            .unwrap()
            .detail
            .contains("padding after row 40"),
        "{report}"
    );

    let b = make("code");
    forge(&b, "layers.0.attn.q.weight", |bytes| bytes[0] |= 3);
    let report = run(&b);
    assert_eq!(status(&report, "tensors"), Status::Fail, "{report}");
    assert!(
        report.check("tensors").unwrap().detail.contains("code 3"),
        "{report}"
    );
}

#[test]
fn claims_in_words_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    convert_tiny(&b);
    let pristine = contents(&b);
    let restore = || {
        for (name, bytes) in &pristine {
            std::fs::write(b.join(name), bytes).unwrap();
        }
    };
    for (file, from, to, check) in [
        (
            "manifest.json",
            "keep: Q4_0 9",
            "keep: Q8_0 9",
            "compression",
        ),
        (
            "manifest.json",
            "\"weights\": \"quantized\"",
            "\"weights\": \"ternary\"",
            "weights kind",
        ),
        ("recipe.toml", "keep", "int8lin", "recipe"),
        (
            "recipe.toml",
            "tool_version = \"",
            "tool_version = \"9",
            "recipe",
        ),
        ("recipe.toml", "\"unverified\"", "\"verified\"", "recipe"),
        ("recipe.toml", "status", "state", "recipe"),
        ("verify.toml", "version = 1", "version = 2", "verify.toml"),
        (
            "verify.toml",
            "version = 1",
            "version = 1\nextra = 2",
            "verify.toml",
        ),
        ("tokenizer/tokenizer.json", "<end>", "<END>", "tokenizer"),
        (
            "tokenizer/chat_template.jinja",
            "content",
            "Content",
            "tokenizer",
        ),
    ] {
        edit(&b, file, from, to);
        let report = run(&b);
        assert_eq!(
            status(&report, check),
            Status::Fail,
            "{file} {to}\n{report}"
        );
        restore();
    }
    assert!(run(&b).passed());
    std::fs::remove_file(b.join("verify.toml")).unwrap();
    assert_eq!(status(&run(&b), "verify.toml"), Status::Fail);
    restore();
    std::fs::write(b.join("stray.bin"), b"x").unwrap();
    assert_eq!(status(&run(&b), "files"), Status::Info);
    let report = run(&dir.path().join("nowhere"));
    assert_eq!(status(&report, "manifest"), Status::Fail);
}

#[test]
fn a_recipe_is_verified_by_a_transcript() {
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    convert_tiny(&b);
    let bundle = Bundle::open(&b).unwrap();
    assert!(set_recipe_status(&bundle, Some("gate.json")).is_err());
    assert!(set_recipe_status(&bundle, Some("../manifest.json")).is_err());
    std::fs::write(b.join("gates/gate.json"), b"{}").unwrap();
    set_recipe_status(&bundle, Some("gate.json")).unwrap();
    assert_eq!(status(&run(&b), "recipe"), Status::Ok);
    bundle
        .recipe()
        .unwrap()
        .require_verified(&b, false)
        .unwrap();
    std::fs::remove_file(b.join("gates/gate.json")).unwrap();
    assert_eq!(status(&run(&b), "recipe"), Status::Fail);
    set_recipe_status(&bundle, None).unwrap();
    assert_eq!(status(&run(&b), "recipe"), Status::Info);
}

/// Verifies against the source of [`convert_tiny`], with changes to what it holds.
fn against(
    dir: &Path,
    declared: &SourceDeclarations,
    digest: Option<&str>,
    change: impl FnOnce(&mut ModelSpec, &mut TextAssets),
) -> VerifyReport {
    let (mut spec, mut text) = (spec(1), text());
    change(&mut spec, &mut text);
    let against = Against {
        declared,
        digest,
        spec: &spec,
        text: &text,
        record: &origin(WeightsKind::Quantized),
        skipped: &[],
        activation: ActivationContract::default(),
    };
    let options = VerifyOptions {
        against: Some(against),
        threads: 1,
    };
    verify(dir, &options)
}

/// A change of one scalar anywhere in a manifest is found without the source, and
/// named with both values with it, also where somebody has put the digest right.
#[test]
fn a_changed_manifest_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    let made = convert_tiny(&b);
    let declared = made.manifest.source.declared.clone().unwrap();
    let valid = std::fs::read(b.join("manifest.json")).unwrap();
    let record = std::fs::read_to_string(b.join("recipe.toml")).unwrap();
    let layer = "spec.layers.0";
    let changes: Vec<(String, Value)> = vec![
        (format!("{layer}.mixer.scale"), json!(0.13)),
        (format!("{layer}.mixer.logit_softcap"), json!(50.0)),
        (format!("{layer}.mixer.window"), json!(64)),
        (format!("{layer}.mixer.qk_norm.eps"), json!(0.001)),
        (format!("{layer}.residual_scale"), json!(0.5)),
        (format!("{layer}.mixer_norm.weight_offset"), json!(1.0)),
        (format!("{layer}.ffn.activation"), json!("gelu_tanh")),
        ("spec.ropes.0.theta".into(), json!(10000.0)),
        ("spec.final_norm.eps".into(), json!(0.00001)),
        ("spec.head.softcap".into(), json!(30.0)),
        ("spec.head.scale".into(), json!(1.0)),
        ("spec.embedding.scale".into(), json!(1.0)),
        ("text.eos".into(), json!(null)),
        ("text.pad".into(), json!({ "content": "<pad>", "id": 3 })),
        ("text.add_bos".into(), json!(true)),
        ("text.sampling.temperature".into(), json!(0.7)),
        ("source.architecture".into(), json!("other")),
        ("source.permuted_qk".into(), json!(true)),
        ("activation.default".into(), json!("f32")),
    ];
    for (path, value) in changes {
        let mut manifest: Value = serde_json::from_slice(&valid).unwrap();
        let pointer = format!("/{}", path.replace('.', "/"));
        let old = manifest.pointer(&pointer).unwrap().clone();
        assert_ne!(old, value, "{path}");
        *manifest.pointer_mut(&pointer).unwrap() = value.clone();
        let bytes = serde_json::to_vec_pretty(&manifest).unwrap();
        std::fs::write(b.join("manifest.json"), &bytes).unwrap();
        std::fs::write(b.join("recipe.toml"), &record).unwrap();
        let report = run(&b);
        assert_eq!(status(&report, "record"), Status::Fail, "{path}\n{report}");

        let digest = blake3::hash(&bytes).to_hex();
        let forged = record.replace(&made.digest, &digest);
        assert_ne!(forged, record);
        std::fs::write(b.join("recipe.toml"), forged).unwrap();
        assert_eq!(status(&run(&b), "record"), Status::Ok);
        let report = against(&b, &declared, Some(&tiny_digest()), |_, _| {});
        let facts = report.checks.iter().filter(|c| c.name == "facts");
        let found: Vec<_> = facts.map(|c| (c.status, c.detail.clone())).collect();
        let named = found.iter().any(|(status, detail)| {
            *status == Status::Diff
                && detail.starts_with(&path)
                && detail.contains("bundle ")
                && detail.contains(", source ")
        });
        assert!(named, "{path}: {found:?}");
    }
    std::fs::write(b.join("manifest.json"), &valid).unwrap();
    std::fs::write(b.join("recipe.toml"), &record).unwrap();
    let report = against(&b, &declared, Some(&tiny_digest()), |_, _| {});
    assert_eq!(status(&report, "facts"), Status::Ok, "{report}");
    assert!(report.passed(), "{report}");
    let report = against(&b, &declared, Some(&tiny_digest()), |spec, _| {
        spec.embedding.scale = 0.125;
    });
    let detail = &report.check("facts").unwrap().detail;
    assert_eq!(detail, "spec.embedding.scale: bundle 12.0, source 0.125");

    // Without what the source declared, nothing could be compared.
    let mut manifest: Value = serde_json::from_slice(&valid).unwrap();
    manifest["source"]["declared"] = json!(null);
    std::fs::write(b.join("manifest.json"), manifest.to_string()).unwrap();
    let report = run(&b);
    for name in ["record", "source"] {
        assert_eq!(status(&report, name), Status::Fail, "{report}");
    }
}

/// Weights that are no numbers are found although every digest fits.
#[test]
fn weights_that_are_no_numbers_fail() {
    let dir = tempfile::tempdir().unwrap();
    for (name, place) in [("first", 0), ("last", 2)] {
        let b = dir.path().join(name);
        convert_tiny(&b);
        forge(&b, "head.weight", |bytes| {
            // Of the panel's one row of four chunks, the scale of the first row: 16
            // lanes of 8 bytes a pair of blocks come before it.
            let panel = bytes.len() / 3 * place;
            bytes[panel + 512..][..2].copy_from_slice(&[0, 0x7e]);
        });
        let report = run(&b);
        let found = report.check("tensors").unwrap();
        assert_eq!(found.status, Status::Fail, "{report}");
        let row = format!("row {}, column 0: Q4_0 weight is NaN", 16 * place);
        assert!(found.detail.contains(&row), "{report}");
    }
    let b = dir.path().join("norm");
    convert_tiny(&b);
    forge(&b, "final_norm.weight", |bytes| {
        bytes[8..12].copy_from_slice(&f32::INFINITY.to_le_bytes());
    });
    let report = run(&b);
    let detail = &report.check("tensors").unwrap().detail;
    assert!(
        detail.contains("\"final_norm.weight\": row 0, column 2: F32 weight is inf"),
        "{report}"
    );
}

/// Converts with changes against what the source declares.
fn with_changes(
    target: &Path,
    change: impl FnOnce(&mut SourceDeclarations),
    options: &ConvertOptions<'_>,
) -> VerifyReport {
    let spec = spec(1);
    let source = MemorySource::random(&spec, DType::Q4_0, DType::F16);
    let mut declared = SourceDeclarations::of(&spec, &text(), "Q4_0 9".into());
    change(&mut declared);
    let mut record = origin(WeightsKind::Quantized);
    record.declared = Some(declared.clone());
    convert(&source, &spec, &text(), record, options, target).unwrap();
    let report = against(target, &declared, Some(&tiny_digest()), |_, _| {});
    assert_eq!(status(&report, "source"), Status::Ok);
    report
}

#[test]
fn deviations_must_be_declared_and_true() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let none = ConvertOptions::default();
    type Change = fn(&mut SourceDeclarations);
    let changes: [(&str, Change); 4] = [
        ("eos", |d| d.eos = vec![2]),
        ("bos", |d| d.bos = None),
        ("chat_template", |d| d.chat_template = Some("0".repeat(64))),
        ("context", |d| d.context = 4096),
    ];
    for (field, change) in changes {
        let report = with_changes(&path(field), change, &none);
        assert_eq!(status(&report, field), Status::Diff, "{report}");
        assert_eq!(report.count(Status::Diff), 1, "{report}");
        assert!(!report.passed());
    }
    // What breaks is no mere difference.
    let report = with_changes(&path("longer"), |d| d.context = 1024, &none);
    assert_eq!(status(&report, "context"), Status::Fail);

    // The same change, declared.
    let mut declared = ConvertOptions::default();
    declared.deviations.eos = Some(Deviation {
        source: vec![2],
        bundle: vec![2, 39],
        reason: "turns end with <end>".into(),
    });
    let report = with_changes(&path("declared"), |d| d.eos = vec![2], &declared);
    assert_eq!(status(&report, "eos"), Status::Ok, "{report}");
    assert!(report.passed());
    // Declared with another value, and declared without a difference.
    let report = with_changes(&path("other"), |d| d.eos = vec![3], &declared);
    assert_eq!(status(&report, "eos"), Status::Fail);
    let report = with_changes(&path("same"), |_| {}, &declared);
    assert_eq!(status(&report, "eos"), Status::Fail);
}

#[test]
fn another_source_is_not_taken_for_the_recorded_one() {
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    let m = convert_tiny(&b).manifest;
    let same = m.source.declared.unwrap();
    let mut other = same.clone();
    other.context = 9000;
    let digest = tiny_digest();
    let check = |declared: &SourceDeclarations, digest: Option<&str>| {
        let report = against(&b, declared, digest, |_, _| {});
        report.check("source").unwrap().clone()
    };
    assert_eq!(check(&other, Some(&digest)).status, Status::Fail);
    assert_eq!(check(&same, Some(&digest)).status, Status::Ok);
    // The same declarations with other weights, as a fine-tune has them.
    let tuned = blake3::hash(b"tuned").to_hex().to_string();
    let found = check(&same, Some(&tuned));
    assert_eq!(found.status, Status::Fail);
    assert!(found.detail.contains(&digest) && found.detail.contains(&tuned));
    // What was not compared is not called equal.
    assert_eq!(check(&same, None).status, Status::Info);
}

#[test]
fn stop_ids_that_do_not_exist_fail() {
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    let spec = spec(1);
    let source = MemorySource::random(&spec, DType::Q4_0, DType::F16);
    let mut text = text();
    text.config.config_eos_ids = vec![VOCAB as u32];
    let options = ConvertOptions::default();
    convert(
        &source,
        &spec,
        &text,
        origin(WeightsKind::Quantized),
        &options,
        &b,
    )
    .unwrap();
    let report = run(&b);
    assert_eq!(status(&report, "eos"), Status::Fail, "{report}");
}
