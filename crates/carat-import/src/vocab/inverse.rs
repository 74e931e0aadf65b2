//! `tokenizer.json` as a GGUF vocabulary.
//!
//! The way back is taken only where it ends at the same place: a vocabulary is made
//! from the parts that GGUF has words for, converted to `tokenizer.json` as at import,
//! and compared with the original.

use std::collections::BTreeMap;

use carat_bundle::text::{SpecialToken, TextConfig};
use serde_json::Value;

use super::{VocabData, VocabError, byte_of, pre::Pre, to_tokenizer_json};

fn unlike(part: impl Into<String>) -> VocabError {
    VocabError::Inverse { part: part.into() }
}

/// The vocabulary of a `tokenizer.json`, with entries for all `rows` of the embedding:
/// readers of GGUF expect one for each.
///
/// # Errors
///
/// [`VocabError::Inverse`] names the part that GGUF has no words for.
pub fn from_tokenizer_json(
    json: &[u8],
    config: &TextConfig,
    rows: usize,
) -> Result<VocabData, VocabError> {
    let file: Value = serde_json::from_slice(json)?;
    let model = &file["model"];
    if model["type"] != "BPE" {
        return Err(unlike(format!("a model of type {}", model["type"])));
    }
    let mut texts: BTreeMap<usize, String> = BTreeMap::new();
    let entries = model["vocab"]
        .as_object()
        .ok_or_else(|| unlike("no vocabulary"))?;
    for (text, id) in entries {
        let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
        texts.insert(
            id.ok_or_else(|| unlike("an id that is no number"))?,
            text.clone(),
        );
    }
    let added = added(&file)?;
    for (id, (text, _)) in &added {
        texts.insert(*id, text.clone());
    }
    let most = texts.last_key_value().map_or(0, |(id, _)| id + 1);
    if most > rows {
        return Err(unlike(format!(
            "{most} ids for {rows} rows of the embedding"
        )));
    }
    let byte_level = pre_of(&file);
    let pieces = byte_level.is_none();
    let unknown = model["unk_token"].as_str();
    let mut tokens = Vec::with_capacity(rows);
    let mut token_types = Vec::with_capacity(rows);
    for id in 0..rows {
        let (text, kind) = match (texts.remove(&id), added.get(&id)) {
            // What other converters call rows without a token.
            (None, _) => (format!("[PAD{id}]"), 5),
            (Some(text), _) if pieces && unknown == Some(&text) => (text, 2),
            (Some(text), Some((_, true))) => (text, 3),
            (Some(text), Some((_, false))) => (text, 4),
            (Some(text), None) if pieces && byte_of(&text).is_some() => (text, 6),
            (Some(text), None) => (text, 1),
        };
        tokens.push(text);
        token_types.push(kind);
    }
    let merges = merges(model)?;
    let mut data = VocabData {
        tokens,
        token_types,
        ..VocabData::default()
    };
    let id_of = |token: &Option<SpecialToken>| -> Option<u32> {
        let token = token.as_ref()?;
        let found = || data.tokens.iter().position(|t| *t == token.content);
        token
            .id
            .or_else(|| found().and_then(|id| u32::try_from(id).ok()))
    };
    (data.bos_id, data.eos_id) = (id_of(&config.bos), id_of(&config.eos));
    (data.unk_id, data.pad_id) = (id_of(&config.unk), id_of(&config.pad));
    let ends = config
        .config_eos_ids
        .iter()
        .chain(&config.generation_eos_ids);
    let mut others: Vec<u32> = Vec::new();
    for id in ends.copied().filter(|id| Some(*id) != data.eos_id) {
        if !others.contains(&id) {
            others.push(id);
        }
    }
    (data.eot_id, data.eom_id) = (others.first().copied(), others.get(1).copied());
    if others.len() > 2 {
        return Err(unlike(format!("{} ends of sequence", others.len() + 1)));
    }
    let (bos, eos) = around(&file["post_processor"])?;
    // What the configuration says goes before the file.
    data.add_bos = Some(config.add_bos.unwrap_or(bos.is_some()));
    data.add_eos = Some(config.add_eos.unwrap_or(eos.is_some()));
    if bos.is_some() {
        data.bos_id = bos;
    }
    if eos.is_some() {
        data.eos_id = eos;
    }
    match byte_level {
        Some((pre, space)) => {
            data.model = "gpt2".into();
            data.pre = Some(pre.name().to_owned());
            data.add_space_prefix = space.then_some(true);
            data.merges = merges.iter().map(|(l, r)| format!("{l} {r}")).collect();
        }
        None => {
            data.model = "llama".into();
            data.add_space_prefix = Some(has_prepend(&file["normalizer"]));
            data.scores = scores(&data.tokens, &merges);
        }
    }
    compare(&file, &to_tokenizer_json(&data)?)?;
    Ok(data)
}

/// Added tokens by id: text, and whether they are special.
fn added(file: &Value) -> Result<BTreeMap<usize, (String, bool)>, VocabError> {
    let mut out = BTreeMap::new();
    for token in file["added_tokens"].as_array().into_iter().flatten() {
        let id = token["id"].as_u64().and_then(|id| usize::try_from(id).ok());
        let (Some(id), Some(text)) = (id, token["content"].as_str()) else {
            return Err(unlike("an added token without id or text"));
        };
        for flag in ["single_word", "lstrip", "rstrip"] {
            if token[flag].as_bool().unwrap_or(false) {
                return Err(unlike(format!("{flag} of the added token {text:?}")));
            }
        }
        let special = token["special"].as_bool().unwrap_or(false);
        out.insert(id, (text.to_owned(), special));
    }
    Ok(out)
}

fn merges(model: &Value) -> Result<Vec<(String, String)>, VocabError> {
    let list = model["merges"].as_array().into_iter().flatten();
    let pair = |merge: &Value| -> Option<(String, String)> {
        if let Some(text) = merge.as_str() {
            let (left, right) = text.split_once(' ')?;
            return Some((left.into(), right.into()));
        }
        let [left, right] = merge.as_array()?.as_slice() else {
            return None;
        };
        Some((left.as_str()?.into(), right.as_str()?.into()))
    };
    let pairs: Option<Vec<_>> = list.map(pair).collect();
    pairs.ok_or_else(|| unlike("a merge that is no pair"))
}

/// Scores that give the merges back: the earlier a piece is merged, the higher.
fn scores(tokens: &[String], merges: &[(String, String)]) -> Vec<f32> {
    let mut ranks = std::collections::HashMap::new();
    for (left, right) in merges {
        let next = ranks.len();
        ranks.entry([left.as_str(), right].concat()).or_insert(next);
    }
    // Below 2^24, so that fp32 tells all of them apart.
    let score = |token: &String| -(*ranks.get(token).unwrap_or(&ranks.len()) as f32);
    tokens.iter().map(score).collect()
}

/// The byte-level pre-tokenizer of a file, and whether it puts a space in front.
fn pre_of(file: &Value) -> Option<(&'static Pre, bool)> {
    let found = plain(&file["pre_tokenizer"]);
    let ignore = file["model"]["ignore_merges"].as_bool().unwrap_or(false);
    Pre::all()
        .flat_map(|pre| [(pre, false), (pre, true)])
        .find(|(pre, space)| {
            plain(&pre.pre_tokenizer(*space)) == found
                && plain(&pre.normalizer()) == plain(&file["normalizer"])
                && pre.ignore_merges == ignore
        })
}

fn has_prepend(normalizer: &Value) -> bool {
    let text = plain(normalizer).to_string();
    text.contains("\"Prepend\"")
}

/// Ids that the post-processor puts before and behind a text.
fn around(post: &Value) -> Result<(Option<u32>, Option<u32>), VocabError> {
    let post = plain(post);
    if post.is_null() || post["type"] == "ByteLevel" {
        return Ok((None, None));
    }
    // A sequence of a byte-level step, which only moves offsets, and a template.
    let steps = match post["processors"].as_array() {
        Some(steps) => steps.clone(),
        None => vec![post],
    };
    let mut templates = steps.iter().filter(|s| s["type"] != "ByteLevel");
    let (Some(template), None) = (templates.next(), templates.next()) else {
        return Err(unlike("its post-processor"));
    };
    let single = template["single"]
        .as_array()
        .filter(|_| template["type"] == "TemplateProcessing");
    let single = single.ok_or_else(|| unlike("its post-processor"))?;
    let id = |step: &Value| -> Option<u32> {
        let name = step["SpecialToken"]["id"].as_str()?;
        let ids = template["special_tokens"][name]["ids"].as_array()?;
        match ids.as_slice() {
            [id] => u32::try_from(id.as_u64()?).ok(),
            _ => None,
        }
    };
    let text = |step: &Value| !step["Sequence"].is_null();
    match single.as_slice() {
        [a] if text(a) => Ok((None, None)),
        [a, b] if text(b) && id(a).is_some() => Ok((id(a), None)),
        [a, b] if text(a) && id(b).is_some() => Ok((None, id(b))),
        [a, b, c] if text(b) && id(a).is_some() && id(c).is_some() => Ok((id(a), id(c))),
        _ => Err(unlike("its post-processor")),
    }
}

/// A step without what does not change ids: offsets, defaults, a sequence of one.
fn plain(step: &Value) -> Value {
    let Some(map) = step.as_object() else {
        return step.clone();
    };
    for list in ["normalizers", "pretokenizers", "processors", "decoders"] {
        if let Some([only]) = map.get(list).and_then(Value::as_array).map(Vec::as_slice) {
            return plain(only);
        }
    }
    let ignored = |key: &&String| !matches!(key.as_str(), "trim_offsets" | "prepend_scheme");
    let mut out = serde_json::Map::new();
    for key in map.keys().filter(ignored) {
        let value = &map[key];
        let value = match value.as_array() {
            Some(list) => list.iter().map(plain).collect(),
            None => plain(value),
        };
        out.insert(key.clone(), value);
    }
    Value::Object(out)
}

/// Whether two files give the same ids.
fn compare(original: &Value, made: &[u8]) -> Result<(), VocabError> {
    let made: Value = serde_json::from_slice(made)?;
    for part in ["normalizer", "pre_tokenizer"] {
        if plain(&original[part]) != plain(&made[part]) {
            return Err(unlike(format!("its {part}")));
        }
    }
    for part in [
        "byte_fallback",
        "ignore_merges",
        "continuing_subword_prefix",
        "end_of_word_suffix",
    ] {
        let value = |file: &Value| match &file["model"][part] {
            Value::Null => Value::Bool(false),
            Value::String(s) if s.is_empty() => Value::Bool(false),
            other => other.clone(),
        };
        if value(original) != value(&made) {
            return Err(unlike(format!("its model's {part}")));
        }
    }
    if merges(&original["model"])? != merges(&made["model"])? {
        return Err(unlike("the order of its merges"));
    }
    if added(original)? != added(&made)? {
        return Err(unlike("its added tokens"));
    }
    Ok(())
}
