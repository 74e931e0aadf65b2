//! Text files of HF folders, in the forms in which they are published.

mod common;

use std::{fs, path::Path};

use carat_bundle::text::{SpecialToken, TextAssets};
use carat_import::open;
use carat_tensor::DType;
use common::SMALL;
use serde_json::{Value, json};

fn write(dir: &Path, name: &str, json: &Value) {
    fs::write(dir.join(name), json.to_string()).unwrap();
}

fn import(files: &[(&str, Value)]) -> Result<TextAssets, String> {
    let dir = tempfile::tempdir().unwrap();
    SMALL.write_hf(dir.path(), DType::F32);
    for (name, json) in files {
        match json {
            Value::String(raw) => fs::write(dir.path().join(name), raw).unwrap(),
            json => write(dir.path(), name, json),
        }
    }
    let path = dir.path().display().to_string();
    open(dir.path())
        .map(|c| c.text)
        .map_err(|e| e.to_string().replace(&path, "DIR"))
}

fn token(content: &str, id: Option<u32>) -> Option<SpecialToken> {
    Some(SpecialToken {
        content: content.to_owned(),
        id,
    })
}

#[test]
fn special_tokens_as_text_or_object() {
    let text = import(&[
        (
            "tokenizer_config.json",
            json!({
                "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": false},
                "eos_token": "</s>",
                "unk_token": null,
                "add_bos_token": true,
                "added_tokens_decoder": {"1": {"content": "<s>"}, "4": {"content": "</s>"}},
                "model_max_length": 1e30,
            }),
        ),
        (
            "special_tokens_map.json",
            json!({"eos_token": "other", "pad_token": {"content": "<pad>"}, "unk_token": "<unk>"}),
        ),
    ])
    .unwrap();
    let c = text.config;
    assert_eq!(c.bos, token("<s>", Some(1)));
    // The first file wins; the second fills what it leaves open.
    assert_eq!(c.eos, token("</s>", Some(4)));
    assert_eq!(c.pad, token("<pad>", None));
    assert_eq!(c.unk, token("<unk>", None));
    assert_eq!((c.add_bos, c.add_eos), (Some(true), None));
    // A number that only says "unknown".
    assert_eq!(c.model_max_length, None);
}

#[test]
fn templates_by_name_and_by_file() {
    let list = json!({"chat_template": [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
    ]});
    let c = import(&[("tokenizer_config.json", list.clone())])
        .unwrap()
        .config;
    assert_eq!(c.chat_template.as_deref(), Some("D"));
    assert_eq!(c.named_templates["tool_use"], "T");
    let c = import(&[
        ("tokenizer_config.json", list.clone()),
        ("chat_template.json", json!({"chat_template": "J"})),
    ])
    .unwrap()
    .config;
    assert_eq!(c.chat_template.as_deref(), Some("J"));
    let c = import(&[
        ("tokenizer_config.json", list),
        ("chat_template.json", json!({"chat_template": "J"})),
        ("chat_template.jinja", json!("{{ file }}")),
    ])
    .unwrap()
    .config;
    assert_eq!(c.chat_template.as_deref(), Some("{{ file }}"));
    assert_eq!(c.named_templates["tool_use"], "T");
    let wrong = import(&[("tokenizer_config.json", json!({"chat_template": [1]}))]);
    assert_eq!(
        wrong.unwrap_err(),
        "DIR/tokenizer_config.json: chat_template: expected a string, or a list of objects with \
         name and template"
    );
}

#[test]
fn stop_ids_and_sampling() {
    let text = import(&[(
        "generation_config.json",
        json!({"eos_token_id": [2, 3], "do_sample": true, "temperature": 0.6, "top_k": 20,
            "top_p": 0.95, "repetition_penalty": 1.05, "transformers_version": "4.51.0"}),
    )])
    .unwrap();
    assert_eq!(text.config.generation_eos_ids, [2, 3]);
    let s = text.config.sampling;
    assert_eq!(
        (s.do_sample, s.temperature, s.top_k),
        (Some(true), Some(0.6), Some(20))
    );
    assert_eq!(
        (s.top_p, s.min_p, s.repetition_penalty),
        (Some(0.95), None, Some(1.05))
    );
    let one = import(&[("generation_config.json", json!({"eos_token_id": 4}))]).unwrap();
    assert_eq!(one.config.generation_eos_ids, [4]);
}

#[test]
fn malformed_text_files() {
    for (name, json, expected) in [
        (
            "generation_config.json",
            json!({"eos_token_id": "x"}),
            "eos_token_id: expected a token id or a list, found \"x\"",
        ),
        (
            "generation_config.json",
            json!({"eos_token_id": [-1]}),
            "eos_token_id: expected a token id or a list, found -1",
        ),
        (
            "generation_config.json",
            json!({"temperature": -0.5}),
            "temperature: expected a number from 0 up, found -0.5",
        ),
        (
            "generation_config.json",
            json!([]),
            "expected an object at the top",
        ),
        (
            "tokenizer_config.json",
            json!({"bos_token": 1}),
            "bos_token: expected a string or an object with content",
        ),
        (
            "tokenizer_config.json",
            json!({"add_bos_token": "yes"}),
            "add_bos_token: expected true or false",
        ),
        (
            "tokenizer_config.json",
            json!("{\"bos_token\": "),
            "EOF while parsing a value at line 1 column 14",
        ),
    ] {
        assert_eq!(
            import(&[(name, json)]).unwrap_err(),
            format!("DIR/{name}: {expected}")
        );
    }
}
