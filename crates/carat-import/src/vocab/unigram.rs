//! SentencePiece Unigram (`t5`).

use serde_json::{Value, json};

use super::{Kind, Vocab, VocabError, json};

const SPACE: &str = "▁";

pub(super) fn convert(vocab: &Vocab<'_>) -> Result<Vec<u8>, VocabError> {
    let data = vocab.data;
    if data.scores.is_empty() {
        return Err(VocabError::Length {
            key: "scores",
            expected: data.tokens.len(),
            found: 0,
        });
    }
    let unk = data.unk_id.or_else(|| {
        vocab
            .kinds
            .iter()
            .position(|k| *k == Kind::Unknown)
            .map(|i| i as u32)
    });
    let model = json::Unigram {
        kind: "Unigram",
        unk_id: unk,
        vocab: data
            .tokens
            .iter()
            .map(String::as_str)
            .zip(data.scores.iter().map(|s| f64::from(*s)))
            .collect(),
        byte_fallback: vocab.has_all_bytes(),
    };
    let mut file = json::File::new(vocab.added(|_, _| false), model);
    let mut normalizers: Vec<Value> = Vec::new();
    if !data.precompiled_charsmap.is_empty() {
        normalizers.push(json!({
            "type": "Precompiled",
            "precompiled_charsmap": base64(&data.precompiled_charsmap),
        }));
    }
    if data.remove_extra_whitespaces.unwrap_or(true) {
        // Spaces only: other whitespace is text.
        normalizers
            .push(json!({"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""}));
        normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}));
    }
    file.normalizer = json!({"type": "Sequence", "normalizers": normalizers});
    let scheme = if data.add_space_prefix.unwrap_or(true) {
        "always"
    } else {
        "never"
    };
    let metaspace = json!({
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": scheme,
        "split": true,
    });
    file.pre_tokenizer = metaspace.clone();
    file.decoder = metaspace;
    file.post_processor =
        vocab.post_processor(data.add_bos.unwrap_or(false), data.add_eos.unwrap_or(true));
    file.write()
}

/// Standard base64 with padding.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = chunk
            .iter()
            .enumerate()
            .fold(0u32, |g, (i, b)| g | u32::from(*b) << (16 - 8 * i));
        for i in 0..4 {
            if i <= chunk.len() {
                out.push(ALPHABET[(group >> (18 - 6 * i) & 63) as usize] as char);
            } else {
                out.push('=');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_of_the_standard_examples() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }
}
