//! A first look at `tokenizer.json` before the pipeline is built from it.
//!
//! The vocabulary and merges are skipped over; what is read is the small rest,
//! to refuse files whose parts could blow up and to know how the decoder joins
//! tokens, which decides how a stream may be cut.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// Largest accepted `tokenizer.json`: five times the largest published one.
pub(crate) const MAX_FILE_BYTES: usize = 192 << 20;
/// Parts (normalizers, splitters, decoders) in one pipeline, nested ones counted.
const MAX_PARTS: usize = 64;
/// Longest regular expression, in bytes; published ones stay under 2 KB.
const MAX_PATTERN_BYTES: usize = 16 << 10;
/// How much longer than the input the normalized text may become. A space
/// replaced by a three-byte mark is 3, prepending is 4; chains multiply.
const MAX_GROWTH: u64 = 256;

/// The part of `tokenizer.json` that is not vocabulary.
#[derive(Debug, Deserialize)]
pub(crate) struct Outline {
    #[serde(default)]
    pub(crate) added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: ModelOutline,
}

#[derive(Debug, Deserialize)]
pub(crate) struct AddedToken {
    pub(crate) id: u32,
    pub(crate) content: String,
}

#[derive(Debug, Deserialize)]
struct ModelOutline {
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(rename = "vocab")]
    _vocab: IgnoredAny,
}

/// How decoded tokens join, as far as cutting a stream is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joining {
    /// Tokens are bytes; the text is their lossy UTF-8.
    Bytes,
    /// Tokens are text; a run of byte tokens is decoded as a whole.
    Pieces {
        /// Whether there are byte tokens.
        byte_runs: bool,
    },
    /// What a token adds may depend on later ones in ways not modelled here.
    Opaque,
}

impl Outline {
    /// Reads the outline and checks it against the limits.
    pub(crate) fn read(json: &[u8]) -> Result<Self, String> {
        if json.len() > MAX_FILE_BYTES {
            return Err(format!(
                "has {} bytes, the limit is {MAX_FILE_BYTES}",
                json.len()
            ));
        }
        let outline: Outline = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        outline.check()?;
        Ok(outline)
    }

    fn check(&self) -> Result<(), String> {
        if let Some(p) = self.model.dropout.filter(|p| *p != 0.0) {
            return Err(format!(
                "model.dropout is {p}: encoding would be random, expected 0 or null"
            ));
        }
        let mut parts = 0;
        let mut growth = 1u64;
        for (field, value) in [
            ("normalizer", &self.normalizer),
            ("pre_tokenizer", &self.pre_tokenizer),
            ("post_processor", &self.post_processor),
            ("decoder", &self.decoder),
        ] {
            for part in flatten(value) {
                parts += 1;
                if parts > MAX_PARTS {
                    return Err(format!("has more than {MAX_PARTS} pipeline parts"));
                }
                check_part(field, part)?;
                growth = growth.saturating_mul(part_growth(part));
                if growth > MAX_GROWTH {
                    return Err(format!(
                        "{field}: its replacements could make text more than {MAX_GROWTH} times longer"
                    ));
                }
            }
        }
        Ok(())
    }

    /// How the decoder joins tokens.
    pub(crate) fn joining(&self) -> Joining {
        if self.decoder.is_null() {
            // Tokens joined by spaces: what one adds never depends on later ones.
            return Joining::Pieces { byte_runs: false };
        }
        let mut fused = false;
        let mut byte_runs = false;
        let mut bytes = false;
        for part in flatten(&self.decoder) {
            if bytes {
                return Joining::Opaque;
            }
            match kind(part) {
                "ByteLevel" if !fused && !byte_runs => bytes = true,
                "ByteFallback" if !fused => byte_runs = true,
                "Fuse" => fused = true,
                "Metaspace" => {}
                "Replace" => {
                    // On fused text a pattern could match across tokens; one
                    // character can not.
                    let one_char = part["pattern"]["String"]
                        .as_str()
                        .is_some_and(|s| s.chars().count() == 1);
                    if fused && !one_char {
                        return Joining::Opaque;
                    }
                }
                "Strip" => {
                    if fused && part["stop"].as_u64() != Some(0) {
                        return Joining::Opaque;
                    }
                }
                _ => return Joining::Opaque,
            }
        }
        if bytes {
            Joining::Bytes
        } else {
            Joining::Pieces { byte_runs }
        }
    }
}

fn kind(part: &Value) -> &str {
    part["type"].as_str().unwrap_or("")
}

/// The parts of a pipeline field, sequences unrolled. Depth is bounded by the
/// JSON parser.
fn flatten(value: &Value) -> Vec<&Value> {
    let mut out = Vec::new();
    let mut stack = vec![value];
    while let Some(v) = stack.pop() {
        if v.is_null() {
            continue;
        }
        let nested = ["normalizers", "pretokenizers", "processors", "decoders"]
            .iter()
            .find_map(|k| v.get(k).and_then(Value::as_array));
        match nested {
            Some(list) if kind(v) == "Sequence" => stack.extend(list.iter().rev()),
            _ => out.push(v),
        }
        if out.len() > MAX_PARTS {
            break;
        }
    }
    out
}

fn check_part(field: &str, part: &Value) -> Result<(), String> {
    if let Some(regex) = part["pattern"]["Regex"].as_str()
        && regex.len() > MAX_PATTERN_BYTES
    {
        return Err(format!(
            "{field}: a pattern has {} bytes, the limit is {MAX_PATTERN_BYTES}",
            regex.len()
        ));
    }
    if kind(part) == "FixedLength" && part["length"].as_u64() == Some(0) {
        return Err(format!("{field}: FixedLength has length 0"));
    }
    Ok(())
}

/// An upper bound on how much longer a part can make its input.
fn part_growth(part: &Value) -> u64 {
    let added = |key: &str| part[key].as_str().map_or(0, |s| s.len() as u64);
    match kind(part) {
        "Replace" => {
            let pattern = part["pattern"]["String"]
                .as_str()
                .map_or(1, |s| s.len().max(1) as u64);
            // An empty match may sit beside every byte that is kept.
            let kept = u64::from(part["pattern"]["String"].as_str().is_none());
            (added("content").div_ceil(pattern) + kept).max(1)
        }
        "Prepend" => added("prepend") + 1,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn outline(fields: Value) -> Result<Outline, String> {
        let mut v = json!({"model": {"type": "BPE", "vocab": {}, "merges": []}});
        for (k, f) in fields.as_object().unwrap() {
            v[k] = f.clone();
        }
        Outline::read(v.to_string().as_bytes())
    }

    #[test]
    fn doubling_chains_are_refused() {
        let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let chain =
            |n| json!({"normalizer": {"type": "Sequence", "normalizers": vec![double.clone(); n]}});
        assert!(outline(chain(8)).is_ok());
        let e = outline(chain(9)).unwrap_err();
        assert!(e.contains("256 times longer"), "{e}");
    }

    #[test]
    fn random_encoding_is_refused() {
        let e = outline(json!({"model": {"dropout": 0.1, "vocab": {}}})).unwrap_err();
        assert!(e.contains("dropout"), "{e}");
    }

    #[test]
    fn too_many_parts_are_refused() {
        let parts = vec![json!({"type": "NFC"}); MAX_PARTS + 1];
        let e = outline(json!({"normalizer": {"type": "Sequence", "normalizers": parts}}));
        assert!(e.unwrap_err().contains("pipeline parts"));
    }

    #[test]
    fn joining_of_the_usual_decoders() {
        let of = |d: Value| outline(json!({"decoder": d})).unwrap().joining();
        assert_eq!(of(json!({"type": "ByteLevel"})), Joining::Bytes);
        let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let fallback = json!({"type": "ByteFallback"});
        let fuse = json!({"type": "Fuse"});
        let seq = |d: Vec<&Value>| of(json!({"type": "Sequence", "decoders": d}));
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        assert_eq!(
            seq(vec![&replace, &fallback, &fuse, &strip]),
            Joining::Pieces { byte_runs: true }
        );
        assert_eq!(
            seq(vec![&fallback, &fuse, &replace]),
            Joining::Pieces { byte_runs: true }
        );
        let wide = json!({"type": "Replace", "pattern": {"String": " ."}, "content": "."});
        assert_eq!(seq(vec![&fuse, &wide]), Joining::Opaque);
        let strip_end = json!({"type": "Strip", "content": " ", "start": 0, "stop": 1});
        assert_eq!(seq(vec![&fuse, &strip_end]), Joining::Opaque);
        assert_eq!(of(json!({"type": "WordPiece"})), Joining::Opaque);
        assert_eq!(of(Value::Null), Joining::Pieces { byte_runs: false });
    }
}
