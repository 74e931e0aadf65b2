//! GGUF vocabularies as `tokenizer.json`.
//!
//! A GGUF file stores a tokenizer as a list of tokens and a few flags; the rest is
//! convention. Converting it once, at import, leaves one text path at run time:
//! whatever a checkpoint came from, its text side is a `tokenizer.json`.
//!
//! Three kinds are known: byte-level BPE (`gpt2`), whose merges are in the file and
//! whose pre-tokenizer has a name; SentencePiece BPE (`llama`), whose merges follow
//! from the scores; and SentencePiece Unigram (`t5`).

mod byte_level;
mod inverse;
mod json;
mod pre;
mod sentencepiece;
mod unigram;

use std::collections::HashMap;

use carat_bundle::text::is_turn_end;
pub use inverse::from_tokenizer_json;

/// The vocabulary of a GGUF file: its `tokenizer.ggml.*` metadata.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VocabData {
    /// `model`: `llama` (SentencePiece BPE), `gpt2` (byte-level BPE), `t5`, ….
    pub model: String,
    /// `pre`: name of the pre-tokenizer.
    pub pre: Option<String>,
    /// Texts by id.
    pub tokens: Vec<String>,
    /// Scores by id; empty if there are none.
    pub scores: Vec<f32>,
    /// Kinds by id (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
    /// 6 byte); empty if there are none.
    pub token_types: Vec<i32>,
    /// Merges, two texts with a space between, best first.
    pub merges: Vec<String>,
    /// Beginning of sequence.
    pub bos_id: Option<u32>,
    /// End of sequence.
    pub eos_id: Option<u32>,
    /// Unknown.
    pub unk_id: Option<u32>,
    /// Padding.
    pub pad_id: Option<u32>,
    /// End of turn.
    pub eot_id: Option<u32>,
    /// End of message.
    pub eom_id: Option<u32>,
    /// `add_bos_token`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `remove_extra_whitespaces`.
    pub remove_extra_whitespaces: Option<bool>,
    /// `precompiled_charsmap`: SentencePiece's compiled normalization; empty if
    /// there is none.
    pub precompiled_charsmap: Vec<u8>,
}

/// Why a vocabulary cannot be converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VocabError {
    /// The kind of vocabulary is not known.
    #[error("tokenizer.ggml.model: unknown vocabulary {0:?}, known are gpt2, llama and t5")]
    Model(String),
    /// The pre-tokenizer is not known.
    #[error("tokenizer.ggml.pre: unknown pre-tokenizer {name:?}, known are {}", known.join(", "))]
    Pre {
        /// The name in the file.
        name: String,
        /// All that are known.
        known: Vec<&'static str>,
    },
    /// The vocabulary is empty.
    #[error("tokenizer.ggml.tokens: no tokens")]
    Empty,
    /// More tokens than any vocabulary has.
    #[error("tokenizer.ggml.tokens: {found} tokens, the limit is {limit}")]
    TooLarge {
        /// Tokens in the file.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// Two ids have the same text.
    #[error("tokenizer.ggml.tokens: ids {first} and {second} are both {token:?}")]
    Duplicate {
        /// The text.
        token: String,
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
    },
    /// A list does not go with the tokens.
    #[error("tokenizer.ggml.{key}: expected {expected} entries, found {found}")]
    Length {
        /// Metadata key.
        key: &'static str,
        /// Number of tokens.
        expected: usize,
        /// Length of the list.
        found: usize,
    },
    /// A special id is not one.
    #[error("tokenizer.ggml.{key}: expected an id below {tokens}, found {id}")]
    Id {
        /// Metadata key.
        key: &'static str,
        /// The id.
        id: u32,
        /// Number of tokens.
        tokens: usize,
    },
    /// A value that no vocabulary has.
    #[error("tokenizer.ggml.{key}: entry {index}: {problem}")]
    Entry {
        /// Metadata key.
        key: &'static str,
        /// Position in the list.
        index: usize,
        /// What is wrong.
        problem: String,
    },
    /// A tokenizer that GGUF has no words for.
    #[error("tokenizer.json: GGUF has no words for {part}")]
    Inverse {
        /// The part that would be lost.
        part: String,
    },
    /// The JSON could not be written, or is none.
    #[error("tokenizer.json: {0}")]
    Json(#[from] serde_json::Error),
}

/// Most tokens of a vocabulary; the largest published ones have 262,144.
const MAX_TOKENS: usize = 1 << 22;

/// Kinds of tokens, as SentencePiece numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// Writes the vocabulary as `tokenizer.json`.
///
/// # Errors
///
/// [`VocabError`] names the metadata key and the entry.
pub fn to_tokenizer_json(data: &VocabData) -> Result<Vec<u8>, VocabError> {
    let vocab = Vocab::new(data)?;
    match data.model.as_str() {
        "gpt2" => byte_level::convert(&vocab),
        "llama" => sentencepiece::convert(&vocab),
        "t5" => unigram::convert(&vocab),
        other => Err(VocabError::Model(other.to_owned())),
    }
}

/// A checked vocabulary.
struct Vocab<'a> {
    data: &'a VocabData,
    ids: HashMap<&'a str, u32>,
    kinds: Vec<Kind>,
}

impl<'a> Vocab<'a> {
    fn new(data: &'a VocabData) -> Result<Self, VocabError> {
        let n = data.tokens.len();
        if n == 0 {
            return Err(VocabError::Empty);
        }
        if n > MAX_TOKENS {
            return Err(VocabError::TooLarge {
                found: n,
                limit: MAX_TOKENS,
            });
        }
        for (key, len) in [
            ("scores", data.scores.len()),
            ("token_type", data.token_types.len()),
        ] {
            if len != 0 && len != n {
                return Err(VocabError::Length {
                    key,
                    expected: n,
                    found: len,
                });
            }
        }
        if let Some((index, score)) = data.scores.iter().enumerate().find(|(_, s)| s.is_nan()) {
            return Err(VocabError::Entry {
                key: "scores",
                index,
                problem: format!("{score} is not a number"),
            });
        }
        for (key, id) in [
            ("bos_token_id", data.bos_id),
            ("eos_token_id", data.eos_id),
            ("unknown_token_id", data.unk_id),
            ("padding_token_id", data.pad_id),
            ("eot_token_id", data.eot_id),
            ("eom_token_id", data.eom_id),
        ] {
            if let Some(id) = id.filter(|id| *id as usize >= n) {
                return Err(VocabError::Id { key, id, tokens: n });
            }
        }
        let mut ids = HashMap::with_capacity(n);
        for (id, token) in data.tokens.iter().enumerate() {
            let id = id as u32;
            if let Some(first) = ids.insert(token.as_str(), id) {
                return Err(VocabError::Duplicate {
                    token: token.clone(),
                    first,
                    second: id,
                });
            }
        }
        let kinds = kinds(data)?;
        Ok(Self { data, ids, kinds })
    }

    fn token(&self, id: u32) -> &'a str {
        &self.data.tokens[id as usize]
    }

    /// Whether the vocabulary can write every byte as `<0x00>` to `<0xFF>`.
    fn has_all_bytes(&self) -> bool {
        (0..=255u8).all(|b| self.ids.contains_key(format!("<0x{b:02X}>").as_str()))
    }

    /// The added tokens: control tokens are special, user-defined ones are not.
    /// `normalized` says which are matched after normalization.
    fn added(&self, normalized: impl Fn(&str, Kind) -> bool) -> Vec<json::Added<'a>> {
        self.kinds
            .iter()
            .enumerate()
            .filter(|(_, kind)| matches!(kind, Kind::Unknown | Kind::Control | Kind::UserDefined))
            .map(|(id, kind)| {
                let content = self.data.tokens[id].as_str();
                json::Added {
                    id: id as u32,
                    content,
                    single_word: false,
                    lstrip: false,
                    rstrip: false,
                    normalized: normalized(content, *kind),
                    special: *kind != Kind::UserDefined,
                }
            })
            // The pipeline has no use for an empty added token.
            .filter(|added| !added.content.is_empty())
            .collect()
    }

    /// The post-processor that puts special tokens around a text.
    fn post_processor(&self, add_bos: bool, add_eos: bool) -> serde_json::Value {
        let bos = self.data.bos_id.filter(|_| add_bos);
        let eos = self.data.eos_id.filter(|_| add_eos);
        json::template(
            bos.map(|id| (id, self.token(id))),
            eos.map(|id| (id, self.token(id))),
        )
    }
}

fn kinds(data: &VocabData) -> Result<Vec<Kind>, VocabError> {
    let n = data.tokens.len();
    let special = [
        data.bos_id,
        data.eos_id,
        data.eot_id,
        data.eom_id,
        data.pad_id,
    ];
    if data.token_types.is_empty() {
        // Old files: the declared special tokens are all that is known.
        let mut kinds = vec![Kind::Normal; n];
        if data.model != "gpt2" {
            for (kind, token) in kinds.iter_mut().zip(&data.tokens) {
                if byte_of(token).is_some() {
                    *kind = Kind::Byte;
                }
            }
        }
        for id in special.into_iter().flatten() {
            kinds[id as usize] = Kind::Control;
        }
        if let Some(id) = data.unk_id {
            kinds[id as usize] = Kind::Unknown;
        }
        return Ok(kinds);
    }
    let mut kinds = Vec::with_capacity(n);
    for (index, kind) in data.token_types.iter().enumerate() {
        kinds.push(match kind {
            1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            other => {
                return Err(VocabError::Entry {
                    key: "token_type",
                    index,
                    problem: format!("expected a kind from 1 to 6, found {other}"),
                });
            }
        });
    }
    // Some files type their end tokens as normal. Only what looks like a mark is
    // corrected: a padding id may name an ordinary token such as "!". Ends of a
    // turn are corrected whether declared or not: as normal tokens a rendered chat
    // would spell them out, and no answer would end.
    let turn_ends = (0..).zip(&data.tokens);
    let turn_ends = turn_ends.filter_map(|(id, token)| is_turn_end(token).then_some(id));
    for id in special.into_iter().flatten().chain(turn_ends) {
        let token = &data.tokens[id as usize];
        let bracketed = |open, close| token.starts_with(open) && token.ends_with(close);
        let marked = (bracketed('<', '>') || bracketed('[', ']')) && token.len() > 2;
        if marked && matches!(kinds[id as usize], Kind::Normal | Kind::UserDefined) {
            kinds[id as usize] = Kind::Control;
        }
    }
    Ok(kinds)
}

/// The byte of a token like `<0xE2>`.
fn byte_of(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
        .then(|| u8::from_str_radix(hex, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests;
