//! Tokenizer, template and stop ids from GGUF metadata.

use std::path::Path;

use carat_bundle::{
    spec::ModelSpec,
    text::{SpecialToken, TextAssets, TextConfig},
};

use crate::{
    ImportError,
    gguf::{Array, Gguf, Value},
    source::file_name,
    vocab::{self, VocabData, VocabError},
};

const PREFIX: &str = "tokenizer.ggml.";
const TEMPLATE: &str = "tokenizer.chat_template";

/// Text assets of a file; empty where it has no vocabulary.
pub(super) fn assets(
    path: &Path,
    gguf: &Gguf,
    notes: &mut Vec<String>,
) -> Result<TextAssets, ImportError> {
    let mut config = templates(path, gguf)?;
    let keys = Keys { path, gguf };
    let Some(model) = keys.text("model")? else {
        return Ok(TextAssets {
            tokenizer_json: None,
            config,
        });
    };
    if matches!(model, "none" | "no_vocab") {
        return Ok(TextAssets {
            tokenizer_json: None,
            config,
        });
    }
    let data = vocabulary(&keys, model)?;
    let token = |id: Option<u32>| -> Option<SpecialToken> {
        let content = data.tokens.get(usize::try_from(id?).ok()?)?;
        Some(SpecialToken {
            content: content.clone(),
            id,
        })
    };
    config.bos = token(data.bos_id);
    config.eos = token(data.eos_id);
    config.unk = token(data.unk_id);
    config.pad = token(keys.id("padding_token_id", data.tokens.len())?);
    config.add_bos = data.add_bos;
    config.add_eos = data.add_eos;
    for id in [data.eos_id, data.eot_id, data.eom_id]
        .into_iter()
        .flatten()
    {
        if !config.config_eos_ids.contains(&id) {
            config.config_eos_ids.push(id);
        }
    }
    let tokenizer_json = match vocab::to_tokenizer_json(&data) {
        Ok(json) => Some(json),
        Err(source) => {
            // The weights are usable with ids; a command that needs text says so.
            notes.push(format!("the vocabulary could not be converted: {source}"));
            config.tokenizer_problem = Some(format!("{}: {source}", file_name(path)));
            None
        }
    };
    Ok(TextAssets {
        tokenizer_json,
        config,
    })
}

fn templates(path: &Path, gguf: &Gguf) -> Result<TextConfig, ImportError> {
    let mut config = TextConfig::default();
    for (key, value) in gguf.metadata() {
        let Some(rest) = key.strip_prefix(TEMPLATE) else {
            continue;
        };
        let source = || {
            value.as_str().map(str::to_owned).ok_or_else(|| {
                ImportError::key(
                    path,
                    key,
                    format!("expected a string, found {}", value.type_name()),
                )
            })
        };
        if rest.is_empty() {
            config.chat_template = Some(source()?);
        } else if let Some(name) = rest.strip_prefix('.') {
            config.named_templates.insert(name.to_owned(), source()?);
        }
    }
    Ok(config)
}

fn vocabulary(keys: &Keys<'_>, model: &str) -> Result<VocabData, ImportError> {
    let strings = |key: &str| -> Result<Option<Vec<String>>, ImportError> {
        keys.array(key, "strings", |a| a.as_strings().map(<[String]>::to_vec))
    };
    let tokens = strings("tokens")?
        .ok_or_else(|| keys.error("tokens", "expected an array, found nothing"))?;
    let n = tokens.len();
    let same_length = |key: &str, found: Option<usize>| match found {
        Some(found) if found != n => Err(keys.error(
            key,
            format!("expected one entry for each of {n} tokens, found {found}"),
        )),
        _ => Ok(()),
    };
    let scores = keys.array("scores", "float32s", |a| a.as_f32s().map(<[f32]>::to_vec))?;
    same_length("scores", scores.as_ref().map(Vec::len))?;
    let token_types = keys.array("token_type", "int32s", |a| match a {
        Array::I32(v) => Some(v.clone()),
        Array::U32(v) => v.iter().map(|&t| i32::try_from(t).ok()).collect(),
        _ => None,
    })?;
    same_length("token_type", token_types.as_ref().map(Vec::len))?;
    Ok(VocabData {
        model: model.to_owned(),
        pre: keys.text("pre")?.map(str::to_owned),
        tokens,
        scores: scores.unwrap_or_default(),
        token_types: token_types.unwrap_or_default(),
        merges: strings("merges")?.unwrap_or_default(),
        bos_id: keys.id("bos_token_id", n)?,
        eos_id: keys.id("eos_token_id", n)?,
        unk_id: keys.id("unknown_token_id", n)?,
        pad_id: keys.id("padding_token_id", n)?,
        eot_id: keys.id("eot_token_id", n)?,
        eom_id: keys.id("eom_token_id", n)?,
        add_bos: keys.flag("add_bos_token")?,
        add_eos: keys.flag("add_eos_token")?,
        add_space_prefix: keys.flag("add_space_prefix")?,
        remove_extra_whitespaces: keys.flag("remove_extra_whitespaces")?,
        precompiled_charsmap: keys
            .array("precompiled_charsmap", "bytes", |a| match a {
                Array::U8(v) => Some(v.clone()),
                Array::I8(v) => Some(v.iter().map(|&b| b as u8).collect()),
                _ => None,
            })?
            .unwrap_or_default(),
    })
}

/// Metadata that are read back as these assets.
pub(super) fn metadata(
    assets: &TextAssets,
    spec: &ModelSpec,
) -> Result<Vec<(String, Value)>, VocabError> {
    let mut out = Vec::new();
    if let Some(json) = &assets.tokenizer_json {
        let data = vocab::from_tokenizer_json(json, &assets.config, spec.vocab_size)?;
        let mut set = |key: &str, value: Value| out.push((format!("{PREFIX}{key}"), value));
        set("model", Value::String(data.model));
        if let Some(pre) = data.pre {
            set("pre", Value::String(pre));
        }
        set("tokens", Value::Array(Array::String(data.tokens)));
        if !data.scores.is_empty() {
            set("scores", Value::Array(Array::F32(data.scores)));
        }
        set("token_type", Value::Array(Array::I32(data.token_types)));
        if !data.merges.is_empty() {
            set("merges", Value::Array(Array::String(data.merges)));
        }
        for (key, id) in [
            ("bos_token_id", data.bos_id),
            ("eos_token_id", data.eos_id),
            ("eot_token_id", data.eot_id),
            ("eom_token_id", data.eom_id),
            ("unknown_token_id", data.unk_id),
            ("padding_token_id", data.pad_id),
        ] {
            if let Some(id) = id {
                set(key, Value::U32(id));
            }
        }
        for (key, flag) in [
            ("add_bos_token", data.add_bos),
            ("add_eos_token", data.add_eos),
            ("add_space_prefix", data.add_space_prefix),
        ] {
            if let Some(flag) = flag {
                set(key, Value::Bool(flag));
            }
        }
    }
    let config = &assets.config;
    if let Some(template) = &config.chat_template {
        out.push((TEMPLATE.to_owned(), template.as_str().into()));
    }
    for (name, template) in &config.named_templates {
        out.push((format!("{TEMPLATE}.{name}"), template.as_str().into()));
    }
    Ok(out)
}

struct Keys<'a> {
    path: &'a Path,
    gguf: &'a Gguf,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.gguf.get(&format!("{PREFIX}{key}"))
    }

    fn error(&self, key: &str, problem: impl Into<String>) -> ImportError {
        ImportError::key(self.path, format!("{PREFIX}{key}"), problem)
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ImportError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => convert(v).map(Some).ok_or_else(|| {
                self.error(key, format!("expected {expected}, found {}", v.type_name()))
            }),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ImportError> {
        self.typed(key, "a string", Value::as_str)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ImportError> {
        self.typed(key, "a boolean", Value::as_bool)
    }

    fn array<T>(
        &self,
        key: &str,
        of: &str,
        convert: impl Fn(&'a Array) -> Option<T>,
    ) -> Result<Option<T>, ImportError> {
        self.typed(key, &format!("an array of {of}"), |v| {
            v.as_array().and_then(&convert)
        })
    }

    /// A token id below `tokens`. Files write -1 (or its unsigned twin) for none.
    fn id(&self, key: &str, tokens: usize) -> Result<Option<u32>, ImportError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        if matches!(
            value,
            Value::I32(-1) | Value::I64(-1) | Value::U32(u32::MAX)
        ) {
            return Ok(None);
        }
        match value.as_u64() {
            Some(id) if id < tokens as u64 => Ok(Some(id as u32)),
            Some(id) => Err(self.error(
                key,
                format!("expected an id below the {tokens} tokens, found {id}"),
            )),
            None => Err(self.error(
                key,
                format!("expected a token id, found {}", value.type_name()),
            )),
        }
    }
}
