//! HF folders that are incomplete, contradictory or malicious. Each one must be
//! refused with a message that names the culprit.

mod common;

use std::{fs, path::Path};

use carat_import::{Checkpoint, ImportError, WeightKind, open};
use carat_tensor::DType;
use common::{SMALL, Tensor, safetensors_bytes, write_config, write_safetensors};
use serde_json::{Value, json};

/// The message, without the temporary folder's path.
fn text(folder: &Path, result: Result<Checkpoint, ImportError>) -> String {
    result
        .unwrap_err()
        .to_string()
        .replace(&folder.display().to_string(), "DIR")
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    SMALL.write_hf(dir.path(), DType::F32);
    dir
}

/// The small model with its tensors changed.
fn with_tensors(change: impl Fn(&mut Vec<Tensor>)) -> String {
    let dir = folder();
    let mut tensors = SMALL.tensors();
    change(&mut tensors);
    write_safetensors(&dir.path().join("model.safetensors"), &tensors, DType::F32);
    text(dir.path(), open(dir.path()))
}

fn with_config(change: impl Fn(&mut Value)) -> Result<Checkpoint, String> {
    let dir = folder();
    let mut config = SMALL.config();
    change(&mut config);
    write_config(dir.path(), &config);
    let result = open(dir.path());
    result.map_err(|e| text(dir.path(), Err(e)))
}

#[test]
fn the_small_model_itself_is_fine() {
    let dir = folder();
    let c = open(dir.path()).unwrap();
    assert_eq!(c.origin.weights, WeightKind::Dense);
    assert_eq!(c.text.tokenizer_json, None);
    assert!(c.origin.notes.is_empty());
}

#[test]
fn paths_that_are_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("nothing");
    assert!(text(dir.path(), open(&missing)).starts_with("DIR/nothing: No such file"));
    assert_eq!(
        text(dir.path(), open(dir.path())),
        "DIR: not a checkpoint: expected config.json and safetensors, or a .gguf file"
    );
    write_config(dir.path(), &SMALL.config());
    assert_eq!(
        text(dir.path(), open(dir.path())),
        "DIR: no weights: expected model.safetensors or model.safetensors.index.json"
    );
    let file = dir.path().join("model.safetensors");
    fs::write(&file, b"").unwrap();
    assert_eq!(
        text(dir.path(), open(&file)),
        "DIR/model.safetensors: expected the folder with config.json, found a single safetensors file"
    );
    fs::write(dir.path().join("config.json"), b"{\"model_type\": ").unwrap();
    assert_eq!(
        text(dir.path(), open(dir.path())),
        "DIR/config.json: EOF while parsing a value at line 1 column 15"
    );
}

#[test]
fn config_contradicting_tensors() {
    let wide = with_config(|c| c["hidden_size"] = json!(16)).unwrap_err();
    assert_eq!(
        wide,
        "DIR: tensor \"model.embed_tokens.weight\": expected shape [5, 16], found [5, 8]"
    );
    let deep = with_config(|c| c["num_hidden_layers"] = json!(2)).unwrap_err();
    assert_eq!(
        deep,
        "DIR: tensor \"model.layers.1.input_layernorm.weight\" is missing (expected shape [8])"
    );
    let heads = with_config(|c| c["num_key_value_heads"] = json!(2)).unwrap_err();
    assert_eq!(
        heads,
        "DIR: tensor \"model.layers.0.self_attn.k_proj.weight\": expected shape [8, 8], found [4, 8]"
    );
    let family = with_config(|c| c["attention_bias"] = json!(true)).unwrap_err();
    assert_eq!(
        family,
        "DIR: tensor \"model.layers.0.self_attn.q_proj.bias\" is missing (expected shape [8])"
    );
}

#[test]
fn missing_and_unexpected_tensors() {
    assert_eq!(
        with_tensors(|t| t.retain(|t| t.canonical != "final_norm.weight")),
        "DIR: tensor \"model.norm.weight\" is missing (expected shape [8])"
    );
    let extra = |names: &'static [&'static str]| {
        with_tensors(move |t| {
            for name in names {
                t.push(Tensor {
                    canonical: String::new(),
                    hf: (*name).to_owned(),
                    gguf: String::new(),
                    shape: vec![1],
                    values: vec![0.0],
                    linear: false,
                    permuted: false,
                });
            }
        })
    };
    assert_eq!(
        extra(&["model.layers.0.self_attn.q_norm.weight"]),
        "DIR: unexpected tensor \"model.layers.0.self_attn.q_norm.weight\""
    );
    assert_eq!(
        extra(&["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]),
        "DIR: unexpected tensors \"a\", \"b\", \"c\", \"d\", \"e\", \"f\", \"g\", \"h\" and 2 more"
    );
    // Old files carry the rotary frequencies, which follow from the config.
    let dir = folder();
    let mut tensors = SMALL.tensors();
    let inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq";
    tensors[0].canonical.clear();
    let data: Vec<_> = tensors
        .iter()
        .map(|t| {
            (
                t.hf.clone(),
                t.shape.clone(),
                common::encode(DType::F32, &t.values),
            )
        })
        .chain([(inv_freq.to_owned(), vec![2], vec![0; 8])])
        .collect();
    let file = dir.path().join("model.safetensors");
    fs::write(file, safetensors_bytes(&data, DType::F32)).unwrap();
    let skipped = open(dir.path()).unwrap().origin.skipped;
    assert_eq!(skipped.len(), 1);
    assert_eq!(skipped[0].name, inv_freq);
    assert!(skipped[0].reason.contains("computed"), "{skipped:?}");
}

#[test]
fn a_tied_head_may_only_be_a_copy() {
    let tied = |same: bool| {
        let dir = folder();
        let mut config = SMALL.config();
        config["tie_word_embeddings"] = json!(true);
        write_config(dir.path(), &config);
        let mut tensors = SMALL.tensors();
        if same {
            let embed = tensors[0].values.clone();
            tensors.last_mut().unwrap().values = embed;
        }
        write_safetensors(&dir.path().join("model.safetensors"), &tensors, DType::F32);
        open(dir.path()).map_err(|e| text(dir.path(), Err(e)))
    };
    assert_eq!(
        tied(false).unwrap_err(),
        "DIR: tensor \"lm_head.weight\": expected a copy of \"model.embed_tokens.weight\", since \
         tie_word_embeddings is true"
    );
    let c = tied(true).unwrap();
    assert!(c.tensors.info("head.weight").is_none());
    assert_eq!(c.origin.skipped.len(), 1);
    assert!(c.origin.skipped[0].reason.contains("a copy of"));
    let untied = with_tensors(|t| {
        t.pop();
    });
    assert_eq!(
        untied,
        "DIR: tensor \"lm_head.weight\" is missing (expected shape [5, 8])"
    );
}

/// A safetensors file from a header in JSON and `data` bytes.
fn raw_safetensors(header: &[u8], data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header);
    out.resize(out.len() + data, 0);
    out
}

fn with_file(bytes: &[u8]) -> String {
    let dir = folder();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    text(dir.path(), open(dir.path()))
}

#[test]
fn malformed_safetensors() {
    const AT: &str = "DIR/model.safetensors: safetensors header: ";
    let header = |t: &str| raw_safetensors(t.as_bytes(), 8);
    for (name, bytes) in [
        ("empty", vec![]),
        ("header length of 2^63", (1u64 << 63).to_le_bytes().to_vec()),
        ("header past the end", 100u64.to_le_bytes().to_vec()),
        ("not UTF-8", raw_safetensors(b"{\"\xff\": 1}", 0)),
        ("not JSON", header("{")),
        (
            "length beyond the data",
            header(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#),
        ),
        (
            "shape against offsets",
            header(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#),
        ),
        (
            "overlap",
            header(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#,
            ),
        ),
        (
            "gap",
            header(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#),
        ),
        (
            "reversed",
            header(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#),
        ),
        (
            "overflow",
            header(
                r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}"#,
            ),
        ),
        (
            "unknown dtype",
            header(r#"{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,8]}}"#),
        ),
    ] {
        let found = with_file(&bytes);
        assert!(found.starts_with(AT), "{name}: {found}");
    }
}

#[test]
fn safetensors_truncated_at_every_length() {
    let data: Vec<_> = SMALL
        .tensors()
        .into_iter()
        .map(|t| (t.hf, t.shape, common::encode(DType::F32, &t.values)))
        .collect();
    let whole = safetensors_bytes(&data, DType::F32);
    for n in (0..whole.len()).step_by(7) {
        let found = with_file(&whole[..n]);
        assert!(found.contains("safetensors header: "), "{n}: {found}");
    }
}

#[test]
fn element_types_that_are_not_floats() {
    let mut tensors: Vec<_> = SMALL
        .tensors()
        .into_iter()
        .map(|t| (t.hf, t.shape, common::encode(DType::F32, &t.values)))
        .collect();
    tensors.sort();
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, shape, bytes) in &tensors {
        let dtype = if name.ends_with("v_proj.weight") {
            "I32"
        } else {
            "F32"
        };
        let end = data.len() + bytes.len();
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [data.len(), end]}),
        );
        data.extend(bytes);
    }
    let mut file = raw_safetensors(Value::Object(header).to_string().as_bytes(), 0);
    file.extend(data);
    assert_eq!(
        with_file(&file),
        "DIR: tensor \"model.layers.0.self_attn.v_proj.weight\": expected F32, F16 or BF16 \
         elements, found I32"
    );
}

/// The small model in two shards; `index` may change what the index claims.
fn sharded(index: impl Fn(&mut serde_json::Map<String, Value>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &SMALL.config());
    let all = SMALL.tensors();
    let (a, b) = all.split_at(4);
    let mut map = serde_json::Map::new();
    for (shard, tensors) in [("m-1.safetensors", a), ("m-2.safetensors", b)] {
        write_safetensors(&dir.path().join(shard), tensors, DType::F32);
        for t in tensors {
            map.insert(t.hf.clone(), json!(shard));
        }
    }
    index(&mut map);
    let json = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(
        dir.path().join("model.safetensors.index.json"),
        json.to_string(),
    )
    .unwrap();
    dir
}

fn sharded_error(index: impl Fn(&mut serde_json::Map<String, Value>)) -> String {
    let dir = sharded(index);
    text(dir.path(), open(dir.path()))
}

#[test]
fn shards() {
    const EMBED: &str = "model.embed_tokens.weight";
    let dir = sharded(|_| {});
    let c = open(dir.path()).unwrap();
    let single = folder();
    let s = open(single.path()).unwrap();
    for name in c.tensors.names() {
        assert_eq!(
            c.tensors.read(&name).unwrap(),
            s.tensors.read(&name).unwrap()
        );
    }
    assert_eq!(c.origin.files.len(), 4);

    fs::remove_file(dir.path().join("m-2.safetensors")).unwrap();
    assert_eq!(
        text(dir.path(), open(dir.path())),
        "DIR/m-2.safetensors: shard is missing, model.safetensors.index.json lists it"
    );
    assert_eq!(
        sharded_error(|m| m[EMBED] = json!("m-2.safetensors")),
        format!(
            "DIR/m-1.safetensors: tensor \"{EMBED}\": model.safetensors.index.json lists it in \
             m-2.safetensors"
        )
    );
    assert_eq!(
        sharded_error(|m| {
            m.remove(EMBED);
        }),
        format!(
            "DIR/m-1.safetensors: tensor \"{EMBED}\": model.safetensors.index.json does not list it"
        )
    );
    assert_eq!(
        sharded_error(|m| {
            m.insert("ghost".into(), json!("m-1.safetensors"));
        }),
        "DIR/m-1.safetensors: tensor \"ghost\": model.safetensors.index.json lists it in this \
         shard, which does not hold it"
    );
    assert_eq!(
        sharded_error(|m| m[EMBED] = json!(7)),
        format!("DIR/model.safetensors.index.json: weight_map.{EMBED}: expected a file name")
    );
}

#[test]
fn shards_outside_the_folder() {
    for name in [
        "../m-1.safetensors",
        "/etc/m-1.safetensors",
        "sub/m-1.safetensors",
        "..\\m-1.safetensors",
        "c:m-1.safetensors",
        ".hidden.safetensors",
        "m-1.bin",
        "",
    ] {
        let found = sharded_error(|m| m["model.norm.weight"] = json!(name));
        assert_eq!(
            found,
            format!(
                "DIR/model.safetensors.index.json: weight_map.model.norm.weight: expected a plain \
                 .safetensors file name, found {name:?}"
            )
        );
    }
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &SMALL.config());
    fs::write(dir.path().join("model.safetensors.index.json"), b"{}").unwrap();
    assert_eq!(
        text(dir.path(), open(dir.path())),
        "DIR/model.safetensors.index.json: weight_map: expected an object of tensor names and shards"
    );
}

#[test]
fn online_ternary_quantization_means_a_latent_master() {
    let c = with_config(|c| {
        c["quantization_config"] = json!({"quant_method": "bitnet", "linear_class": "autobitlinear",
            "quantization_mode": "online", "use_rms_norm": false});
    })
    .unwrap();
    assert_eq!(c.origin.weights, WeightKind::TernaryLatent);
    assert!(c.origin.notes[0].contains("latent master"));
}
