//! Manifests that lie: each is refused by name, none panics.

mod common;

use std::path::{Path, PathBuf};

use carat_bundle::{Bundle, Manifest, fuzzing};
use common::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn valid() -> Value {
    let dir = tempfile::tempdir().unwrap();
    let m = convert_tiny(&dir.path().join("b")).manifest;
    serde_json::to_value(m).unwrap()
}

fn parse(v: &Value) -> Result<Manifest, String> {
    Manifest::parse(&serde_json::to_vec(v).unwrap()).map_err(|e| e.to_string())
}

#[test]
fn each_lie_is_named() {
    let valid = valid();
    parse(&valid).unwrap();
    let end = valid["weights"]["bytes"].clone();
    let first_offset = valid["tensors"][1]["offset"].clone();
    let zeros = "0".repeat(64);
    type Lie<'a> = (&'a str, Value, &'a [&'a str]);
    let lies: Vec<Lie<'_>> = vec![
        (
            "/schema",
            json!("other"),
            &["schema", "carat.bundle", "other"],
        ),
        (
            "/version",
            json!(2),
            &["version", "reads version 1", "found 2"],
        ),
        ("/version", json!(-1), &["invalid value", "-1"]),
        ("/spec/hidden_size", json!(0), &["spec.hidden_size"]),
        ("/spec/vocab_size", json!(u64::MAX), &["spec.vocab_size"]),
        ("/spec/layers", json!([]), &["spec.layers"]),
        (
            "/spec/layers/0/mixer/rope",
            json!(7),
            &["spec.layers.0.mixer.rope"],
        ),
        (
            "/spec/layers/0/mixer/kind",
            json!("magic"),
            &["unknown variant", "magic"],
        ),
        (
            "/spec/final_norm/eps",
            json!(0.0),
            &["spec.final_norm.eps", "is outside"],
        ),
        (
            "/spec/final_norm/eps",
            json!(-1.0),
            &["spec.final_norm.eps", "is outside"],
        ),
        (
            "/spec/final_norm/eps",
            json!(9.3e18),
            &["spec.final_norm.eps", "is outside"],
        ),
        (
            "/spec/layers/0/mixer/qk_norm/eps",
            json!(0),
            &["spec.layers.0.mixer.qk_norm.eps", "is outside"],
        ),
        (
            "/spec/embedding/scale",
            json!(0.0),
            &["spec.embedding.scale", "is outside"],
        ),
        (
            "/spec/embedding/scale",
            json!(-1.0),
            &["spec.embedding.scale", "is outside"],
        ),
        (
            "/spec/embedding/scale",
            json!(1e30),
            &["spec.embedding.scale", "is outside"],
        ),
        (
            "/spec/head/scale",
            json!(0),
            &["spec.head.scale", "is outside"],
        ),
        (
            "/spec/head/softcap",
            json!(0),
            &["spec.head.softcap", "is outside"],
        ),
        (
            "/spec/head/softcap",
            json!(-5),
            &["spec.head.softcap", "is outside"],
        ),
        (
            "/spec/layers/0/mixer/scale",
            json!(0.0),
            &["spec.layers.0.mixer.scale", "is outside"],
        ),
        (
            "/spec/layers/0/mixer/scale",
            json!(-0.125),
            &["spec.layers.0.mixer.scale", "is outside"],
        ),
        (
            "/spec/layers/0/mixer/logit_softcap",
            json!(0),
            &["spec.layers.0.mixer.logit_softcap", "is outside"],
        ),
        (
            "/spec/layers/0/mixer/window",
            json!(0),
            &["spec.layers.0.mixer.window", "is outside"],
        ),
        (
            "/spec/layers/0/mixer/window",
            json!(9000000000u64),
            &["spec.layers.0.mixer.window", "is outside"],
        ),
        (
            "/spec/layers/0/residual_scale",
            json!(0),
            &["spec.layers.0.residual_scale", "is outside"],
        ),
        (
            "/spec/layers/0/mixer_norm/weight_offset",
            json!(2.5),
            &["spec.layers.0.mixer_norm.weight_offset", "is outside"],
        ),
        (
            "/spec/ropes/0/theta",
            json!(0),
            &["spec.ropes.0.theta", "is outside"],
        ),
        (
            "/spec/ropes/0/theta",
            json!(-10000),
            &["spec.ropes.0.theta", "is outside"],
        ),
        (
            "/spec/ropes/0/theta",
            json!(1e300),
            &["spec.ropes.0.theta", "is outside"],
        ),
        (
            "/text/sampling/temperature",
            json!(-1.0),
            &["text.sampling.temperature", "is outside"],
        ),
        (
            "/text/sampling/temperature",
            json!(1e9),
            &["text.sampling.temperature", "is outside"],
        ),
        (
            "/text/sampling/top_p",
            json!(1.5),
            &["text.sampling.top_p", "is outside"],
        ),
        (
            "/text/sampling/top_p",
            json!(0),
            &["text.sampling.top_p", "is outside"],
        ),
        (
            "/text/sampling/min_p",
            json!(1.5),
            &["text.sampling.min_p", "is outside"],
        ),
        (
            "/text/sampling/min_p",
            json!(-0.1),
            &["text.sampling.min_p", "is outside"],
        ),
        (
            "/text/sampling/repetition_penalty",
            json!(0),
            &["text.sampling.repetition_penalty", "is outside"],
        ),
        (
            "/text/sampling/repetition_penalty",
            json!(-2),
            &["text.sampling.repetition_penalty", "is outside"],
        ),
        ("/compression", json!(" "), &["compression"]),
        ("/compression", json!(null), &["null"]),
        ("/activation/group", json!(0), &["activation.group"]),
        ("/activation/group", json!(48), &["activation.group", "48"]),
        ("/source/name", json!("../x"), &["source.name", "../x"]),
        ("/source/name", json!("C:\\x"), &["source.name"]),
        ("/source/digest", json!("xyz"), &["source.digest"]),
        ("/text/chat_template", json!("x"), &["text.chat_template"]),
        (
            "/weights/blake3",
            json!(zeros.to_uppercase() + "A"),
            &["weights.blake3"],
        ),
        ("/weights/bytes", json!(1), &["weights.bytes"]),
        ("/weights/bytes", json!(u64::MAX), &["weights.bytes"]),
        ("/weights/bytes", json!(0), &["outside weights.bin of 0"]),
        (
            "/weights/segments",
            json!([]),
            &["weights.segments", "embed"],
        ),
        (
            "/weights/segments/1/offset",
            json!(256),
            &["weights.segments.1.offset", "multiple"],
        ),
        (
            "/weights/segments/1/offset",
            json!(0),
            &["weights.segments.1.offset", "overlaps"],
        ),
        (
            "/weights/segments/1/name",
            json!("layers.9"),
            &["weights.segments.1.name"],
        ),
        (
            "/weights/segments/2/bytes",
            json!(3),
            &["weights.segments.2.bytes", "found 3"],
        ),
        ("/tensors/0/name", json!("x"), &["tensors.0.name", "\"x\""]),
        (
            "/tensors/2/name",
            json!("embed.weight"),
            &["tensors.2.name", "twice"],
        ),
        (
            "/tensors/0/role",
            json!("head"),
            &["tensors.0.role", "embed.weight"],
        ),
        ("/tensors/0/role", json!("boss"), &["boss"]),
        (
            "/tensors/0/dtype",
            json!("Q8_0"),
            &["tensors.0.bytes", "embed.weight"],
        ),
        // As long as Q4_0: only the recipe tells.
        (
            "/tensors/0/dtype",
            json!("Q4_K"),
            &["recipe.tensors.0.stored", "Q4_K"],
        ),
        (
            "/tensors/0/dtype",
            json!("IQ2_XS"),
            &["tensors.0.dtype", "embed.weight"],
        ),
        ("/tensors/0/dtype", json!("Q9_9"), &["Q9_9"]),
        (
            "/tensors/0/dtype",
            json!("Q2_K"),
            &["tensors.0.dtype", "no packed layout"],
        ),
        (
            "/tensors/1/dtype",
            json!("F16"),
            &["tensors.1.dtype", "F32"],
        ),
        (
            "/tensors/0/shape",
            json!([256, 40]),
            &["tensors.0.shape", "[40, 256]"],
        ),
        (
            "/tensors/0/shape",
            json!([u64::MAX, u64::MAX]),
            &["tensors.0.shape"],
        ),
        ("/tensors/0/shape", json!([]), &["tensors.0.shape"]),
        (
            "/tensors/0/layout",
            json!("row_major"),
            &["tensors.0.layout"],
        ),
        (
            "/tensors/0/segment",
            json!("layers.0"),
            &["tensors.0.segment"],
        ),
        (
            "/tensors/0/bytes",
            json!(1),
            &["tensors.0.bytes", "found 1"],
        ),
        ("/tensors/0/bytes", json!(u64::MAX), &["tensors.0.bytes"]),
        ("/tensors/0/blake3", json!(""), &["tensors.0.blake3"]),
        (
            "/tensors/1/offset",
            json!(8),
            &["tensors.1.offset", "multiple of 256"],
        ),
        (
            "/tensors/2/offset",
            first_offset,
            &["tensors.2.offset", "overlaps"],
        ),
        (
            "/tensors/2/offset",
            json!(0),
            &["tensors.2.offset", "overlaps"],
        ),
        (
            "/tensors/2/offset",
            end,
            &["tensors.2.offset", "outside weights.bin"],
        ),
        (
            "/tensors/2/offset",
            json!(u64::MAX - 255),
            &["tensors.2.offset", "outside"],
        ),
        (
            "/files/0/path",
            json!("../../etc/passwd"),
            &["files.0.path", "passwd"],
        ),
        ("/files/0/path", json!("/etc/passwd"), &["files.0.path"]),
        ("/files/0/path", json!("tokenizer/../x"), &["files.0.path"]),
        ("/files/0/path", json!("tokenizer/.."), &["files.0.path"]),
        ("/files/0/path", json!("tokenizer\\x"), &["files.0.path"]),
        ("/files/0/path", json!("tokenizer/ü"), &["files.0.path"]),
        (
            "/files/1/path",
            json!("tokenizer/tokenizer.json"),
            &["files.1.path", "twice"],
        ),
        ("/files/0/bytes", json!(u64::MAX), &["files.0.bytes"]),
        ("/files/0/blake3", json!("0"), &["files.0.blake3"]),
        (
            "/recipe/tensors/3/name",
            json!("y"),
            &["recipe.tensors.3.name"],
        ),
        (
            "/recipe/tensors/0/stored",
            json!("Q8_0"),
            &["recipe.tensors.0.stored"],
        ),
        ("/recipe/tensors", json!([]), &["recipe.tensors"]),
        ("/size_report/weights", json!(1), &["size_report"]),
        (
            "/size_report/bits_per_weight",
            json!(1.58),
            &["size_report"],
        ),
        (
            "/tensors",
            json!([]),
            &["tensors", "embed.weight", "missing"],
        ),
    ];
    for (at, lie, expected) in lies {
        let mut v = valid.clone();
        *v.pointer_mut(at).unwrap_or_else(|| panic!("{at}")) = lie.clone();
        let e = parse(&v).expect_err(at);
        assert!(
            expected.iter().all(|p| e.contains(p)),
            "{at} = {lie}: {e:?} should name {expected:?}"
        );
    }
}

#[test]
fn fields_may_not_be_added_or_dropped() {
    let valid = valid();
    for at in [
        "",
        "/producer",
        "/spec",
        "/spec/layers/0",
        "/spec/layers/0/mixer",
        "/spec/layers/0/ffn",
        "/spec/ropes/0",
        "/text",
        "/text/sampling",
        "/source",
        "/source/declared",
        "/activation",
        "/weights",
        "/weights/segments/0",
        "/tensors/0",
        "/files/0",
        "/recipe",
        "/recipe/tensors/0",
        "/size_report",
        "/size_report/formats/0",
    ] {
        let mut v = valid.clone();
        let object = v.pointer_mut(at).unwrap().as_object_mut().unwrap();
        object.insert("surprise".into(), json!(1));
        let e = parse(&v).expect_err(at);
        assert!(e.contains("surprise"), "{at}: {e}");
    }
    for key in valid.as_object().unwrap().keys() {
        let mut v = valid.clone();
        v.as_object_mut().unwrap().remove(key);
        let e = parse(&v).expect_err(key);
        assert!(e.contains(key.as_str()), "{key}: {e}");
    }
}

#[test]
fn bytes_that_are_no_manifest_are_refused() {
    for (bytes, expected) in [
        (&b""[..], "EOF"),
        (b"\xff{}", "UTF-8 at byte 0"),
        (b"[]", "invalid"),
        (b"{}", "schema"),
        (
            b"{\"schema\":\"carat.bundle\",\"version\":1}",
            "missing field",
        ),
    ] {
        let e = Manifest::parse(bytes).unwrap_err().to_string();
        assert!(e.contains(expected), "{e}");
    }
    let deep = format!(
        "{{\"schema\":\"carat.bundle\",\"version\":1,\"x\":{}}}",
        "[".repeat(1 << 20)
    );
    Manifest::parse(deep.as_bytes()).unwrap_err();
    let long = vec![b' '; (64 << 20) + 1];
    let e = Manifest::parse(&long).unwrap_err().to_string();
    assert!(e.contains("at most"), "{e}");
    let twice = "{\"schema\":\"carat.bundle\",\"version\":1,\"version\":1}";
    let e = Manifest::parse(twice.as_bytes()).unwrap_err().to_string();
    assert!(e.contains("duplicate field"), "{e}");
    // A message does not grow with the input.
    let huge = json!({"schema": "x".repeat(1 << 20), "version": 1});
    assert!(parse(&huge).unwrap_err().len() < 1000);
}

#[test]
fn a_folder_that_is_no_bundle_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    let fails = |expected: &[&str]| {
        let e = Bundle::open(&b).unwrap_err().to_string();
        assert!(expected.iter().all(|p| e.contains(p)), "{e}");
    };
    fails(&["manifest.json"]);
    std::fs::create_dir(&b).unwrap();
    fails(&["is not a bundle", "manifest.json"]);
    std::fs::create_dir(b.join("manifest.json")).unwrap();
    fails(&["manifest.json", "is a folder"]);
    std::fs::remove_dir_all(&b).unwrap();

    convert_tiny(&b);
    let weights = b.join("weights.bin");
    let whole = std::fs::read(&weights).unwrap();
    for cut in [0, 1, whole.len() - 1] {
        std::fs::write(&weights, &whole[..cut]).unwrap();
        fails(&["weights.bin", &format!("found {cut}")]);
    }
    std::fs::remove_file(&weights).unwrap();
    fails(&["weights.bin"]);
    std::fs::write(&weights, &whole).unwrap();
    std::fs::write(b.join("recipe.toml"), b"x = 1").unwrap();
    let e = Bundle::open(&b).unwrap().recipe().unwrap_err().to_string();
    assert!(e.contains("recipe.toml"), "{e}");
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/manifest")
}

/// The seeds: a valid manifest and one of each kind of lie. Run with
/// `CARAT_UPDATE=1` to write them anew.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut valid = valid();
    // The seeds need not be written anew with each release.
    valid["producer"]["version"] = json!("0.0.0");
    let with = |at: &str, v: Value| {
        let mut m = valid.clone();
        *m.pointer_mut(at).unwrap() = v;
        serde_json::to_vec(&m).unwrap()
    };
    vec![
        ("valid.json", serde_json::to_vec(&valid).unwrap()),
        ("version.json", with("/version", json!(2))),
        ("overlap.json", with("/tensors/2/offset", json!(0))),
        (
            "outside.json",
            with("/tensors/2/offset", json!(u64::MAX - 255)),
        ),
        (
            "huge-shape.json",
            with("/tensors/0/shape", json!([u64::MAX, 256])),
        ),
        ("huge-vocab.json", with("/spec/vocab_size", json!(u64::MAX))),
        ("traversal.json", with("/files/0/path", json!("../../x"))),
        ("twice.json", with("/tensors/2/name", json!("embed.weight"))),
        ("no-tensors.json", with("/tensors", json!([]))),
        ("deep.json", "[".repeat(4096).into_bytes()),
        ("not-utf8.json", b"{\"schema\":\"\xff\"}".to_vec()),
    ]
}

#[test]
fn the_corpus_is_current_and_replays() {
    if std::env::var_os("CARAT_UPDATE").is_some() {
        std::fs::create_dir_all(corpus()).unwrap();
        for (name, bytes) in seeds() {
            std::fs::write(corpus().join(name), bytes).unwrap();
        }
    }
    for (name, bytes) in seeds() {
        let stored = std::fs::read(corpus().join(name)).expect(name);
        assert!(stored == bytes, "{name} is stale: run with CARAT_UPDATE=1");
    }
    // Whatever a fuzzer has added is replayed too.
    let mut accepted = 0;
    for entry in std::fs::read_dir(corpus()).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        fuzzing::manifest(&bytes);
        fuzzing::records(&bytes);
        accepted += usize::from(Manifest::parse(&bytes).is_ok());
    }
    assert!(accepted >= 1);
}

fn valid_bytes() -> &'static [u8] {
    static VALID: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    VALID.get_or_init(|| serde_json::to_vec(&valid()).unwrap())
}

/// Every number of a JSON value, by pointer.
fn numbers(v: &Value, at: String, out: &mut Vec<String>) {
    match v {
        Value::Number(_) => out.push(at),
        Value::Array(a) => {
            for (i, v) in a.iter().enumerate() {
                numbers(v, format!("{at}/{i}"), out);
            }
        }
        Value::Object(o) => {
            for (k, v) in o {
                numbers(v, format!("{at}/{k}"), out);
            }
        }
        _ => {}
    }
}

proptest! {
    #[test]
    fn damaged_bytes_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
        keep in any::<bool>(),
    ) {
        let mut bytes = valid_bytes().to_vec();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if !keep {
            bytes.truncate(cut.index(bytes.len()));
        }
        fuzzing::manifest(&bytes);
        fuzzing::records(&bytes);
    }

    #[test]
    fn any_number_may_be_anything(
        at in any::<prop::sample::Index>(),
        value in prop_oneof![
            any::<u64>().prop_map(|n| json!(n)),
            any::<i64>().prop_map(|n| json!(n)),
            any::<f64>().prop_map(|n| json!(n)),
            Just(json!(u64::MAX)),
            Just(json!(1u64 << 63)),
            Just(json!(0)),
        ],
    ) {
        let mut v: Value = serde_json::from_slice(valid_bytes()).unwrap();
        let mut all = Vec::new();
        numbers(&v, String::new(), &mut all);
        *v.pointer_mut(&all[at.index(all.len())]).unwrap() = value;
        fuzzing::manifest(&serde_json::to_vec(&v).unwrap());
    }
}
