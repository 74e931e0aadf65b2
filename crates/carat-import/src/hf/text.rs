//! Tokenizer, template and stop ids of an HF folder.

use std::path::{Path, PathBuf};

use carat_bundle::text::{SamplingDefaults, SpecialToken, TextAssets, TextConfig};
use serde_json::{Map, Value};

use super::{read_bounded, read_json};
use crate::ImportError;

/// `model_max_length` at or above this means "unknown" (writers put 1e30 there).
const NO_BOUND: f64 = 1e9;

/// Reads whatever text files the folder has; `config` is its `config.json`.
pub(super) fn assets(folder: &Path, config: &Value) -> Result<TextAssets, ImportError> {
    let tokenizer = folder.join("tokenizer.json");
    let tokenizer_json = if tokenizer.is_file() {
        Some(read_bounded(&tokenizer)?)
    } else {
        None
    };
    let mut text = TextConfig::default();
    // Earlier files win over later ones, field by field.
    if let Some((path, json)) = object(folder, "tokenizer_config.json")? {
        tokenizer_config(&path, &json, &mut text)?;
    }
    if let Some((path, json)) = object(folder, "special_tokens_map.json")? {
        specials(&path, &json, None, &mut text)?;
    }
    template_files(folder, &mut text)?;
    if let Some((path, json)) = object(folder, "generation_config.json")? {
        text.generation_eos_ids = ids(&path, "eos_token_id", json.get("eos_token_id"))?;
        text.sampling = sampling(&path, &json)?;
    }
    let path = folder.join("config.json");
    let nested = config
        .get("text_config")
        .and_then(|t| t.get("eos_token_id"));
    let eos = config
        .get("eos_token_id")
        .filter(|v| !v.is_null())
        .or(nested);
    text.config_eos_ids = ids(&path, "eos_token_id", eos)?;
    Ok(TextAssets {
        tokenizer_json,
        config: text,
    })
}

/// A JSON file's path and top-level object.
type JsonFile = (PathBuf, Map<String, Value>);

fn object(folder: &Path, name: &str) -> Result<Option<JsonFile>, ImportError> {
    let path = folder.join(name);
    if !path.is_file() {
        return Ok(None);
    }
    match read_json(&path)? {
        Value::Object(map) => Ok(Some((path, map))),
        _ => Err(ImportError::checkpoint(
            &path,
            "expected an object at the top",
        )),
    }
}

fn tokenizer_config(
    path: &Path,
    json: &Map<String, Value>,
    text: &mut TextConfig,
) -> Result<(), ImportError> {
    specials(path, json, json.get("added_tokens_decoder"), text)?;
    let flag = |key: &str| match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(b)) => Ok(Some(*b)),
        Some(_) => Err(ImportError::key(path, key, "expected true or false")),
    };
    text.add_bos = flag("add_bos_token")?;
    text.add_eos = flag("add_eos_token")?;
    text.model_max_length = json
        .get("model_max_length")
        .and_then(Value::as_f64)
        .filter(|n| (1.0..NO_BOUND).contains(n))
        .map(|n| n as usize);
    if let Some(value) = json.get("chat_template").filter(|v| !v.is_null()) {
        named_templates(path, value, text)?;
    }
    Ok(())
}

/// A template as one string, or several by name of which `default` is the one.
fn named_templates(path: &Path, value: &Value, text: &mut TextConfig) -> Result<(), ImportError> {
    let wrong = || {
        ImportError::key(
            path,
            "chat_template",
            "expected a string, or a list of objects with name and template",
        )
    };
    match value {
        Value::String(s) => text.chat_template = Some(s.clone()),
        Value::Array(list) => {
            for entry in list {
                let get = |key: &str| entry.get(key).and_then(Value::as_str);
                let (Some(name), Some(template)) = (get("name"), get("template")) else {
                    return Err(wrong());
                };
                add_template(text, name, template);
            }
        }
        Value::Object(map) => {
            for (name, template) in map {
                add_template(text, name, template.as_str().ok_or_else(wrong)?);
            }
        }
        _ => return Err(wrong()),
    }
    Ok(())
}

fn add_template(text: &mut TextConfig, name: &str, template: &str) {
    if name == "default" {
        text.chat_template = Some(template.to_owned());
    } else {
        text.named_templates
            .insert(name.to_owned(), template.to_owned());
    }
}

/// Template files win over the field in `tokenizer_config.json`.
fn template_files(folder: &Path, text: &mut TextConfig) -> Result<(), ImportError> {
    if let Some((path, json)) = object(folder, "chat_template.json")?
        && let Some(value) = json.get("chat_template")
    {
        named_templates(&path, value, text)?;
    }
    let jinja = |path: &Path| {
        String::from_utf8(read_bounded(path)?)
            .map_err(|_| ImportError::checkpoint(path, "is not valid UTF-8"))
    };
    let further = folder.join("additional_chat_templates");
    if further.is_dir() {
        let entries = std::fs::read_dir(&further).map_err(|e| ImportError::io(&further, e))?;
        for entry in entries {
            let path = entry.map_err(|e| ImportError::io(&further, e))?.path();
            let stem = path.file_stem().and_then(|s| s.to_str());
            if let Some(stem) = stem.filter(|_| path.extension().is_some_and(|e| e == "jinja")) {
                text.named_templates.insert(stem.to_owned(), jinja(&path)?);
            }
        }
    }
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        text.chat_template = Some(jinja(&path)?);
    }
    Ok(())
}

/// Special tokens, as text or as an object with `content`; ids from the table of
/// added tokens.
fn specials(
    path: &Path,
    json: &Map<String, Value>,
    decoder: Option<&Value>,
    text: &mut TextConfig,
) -> Result<(), ImportError> {
    let id_of = |content: &str| {
        let (id, _) = decoder?
            .as_object()?
            .iter()
            .find(|(_, t)| t.get("content").and_then(Value::as_str) == Some(content))?;
        id.parse().ok()
    };
    let token = |key: &str, slot: &mut Option<SpecialToken>| {
        let content = match json.get(key) {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::String(s)) => Some(s.as_str()),
            Some(v) => v.get("content").and_then(Value::as_str),
        };
        let content = content.ok_or_else(|| {
            ImportError::key(path, key, "expected a string or an object with content")
        })?;
        if slot.is_none() {
            *slot = Some(SpecialToken {
                content: content.to_owned(),
                id: id_of(content),
            });
        }
        Ok(())
    };
    token("bos_token", &mut text.bos)?;
    token("eos_token", &mut text.eos)?;
    token("pad_token", &mut text.pad)?;
    token("unk_token", &mut text.unk)
}

/// One id or a list of them.
fn ids(path: &Path, key: &str, value: Option<&Value>) -> Result<Vec<u32>, ImportError> {
    let one = |v: &Value| {
        v.as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| {
                ImportError::key(
                    path,
                    key,
                    format!("expected a token id or a list, found {v}"),
                )
            })
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(v) => Ok(vec![one(v)?]),
    }
}

fn sampling(path: &Path, json: &Map<String, Value>) -> Result<SamplingDefaults, ImportError> {
    let present = |key: &str| json.get(key).filter(|v| !v.is_null());
    let number = |key: &str| match present(key) {
        None => Ok(None),
        Some(v) => match v.as_f64() {
            Some(n) if n.is_finite() && n >= 0.0 => Ok(Some(n as f32)),
            _ => Err(ImportError::key(
                path,
                key,
                format!("expected a number from 0 up, found {v}"),
            )),
        },
    };
    let sampling = SamplingDefaults {
        do_sample: present("do_sample").and_then(Value::as_bool),
        temperature: number("temperature")?,
        top_k: number("top_k")?.map(|k| k as u32),
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        repetition_penalty: number("repetition_penalty")?,
    };
    sampling
        .validate()
        .map_err(|e| ImportError::key(path, e.field, e.problem()))?;
    Ok(sampling)
}
