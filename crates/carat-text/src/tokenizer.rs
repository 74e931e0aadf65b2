//! Text to ids and back.

use std::collections::HashSet;
use std::fmt;
use std::sync::OnceLock;

use carat_bundle::text::{SpecialToken, TextAssets, TextConfig};
use tokenizers::{AddedVocabulary, Model as _, PreTokenizer as _};

use crate::error::TextError;
use crate::guard::fenced;
use crate::outline::{Joining, Outline};

/// Longest text encoded in one call. A pattern's worst case grows with the
/// square of the text on some inputs, so the bound is what keeps one request
/// from holding a thread for minutes.
const MAX_TEXT_BYTES: usize = 16 << 20;

/// Longest run of whitespace. The pattern engine gives up a search after a million
/// steps, and silently: a run is searched to its end and back, so half of that is
/// where ids would begin to differ from the published tokenizer's.
const MAX_SPACES: usize = 500_000;

/// Whether special tokens are put around the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddSpecial {
    /// As the checkpoint declares for raw text: usually a beginning-of-sequence
    /// token in front, or nothing.
    Yes,
    /// Nothing is added. For text that already carries its special tokens, such
    /// as a rendered chat.
    No,
}

/// A checkpoint's tokenizer.
///
/// Special tokens that occur in the text are recognised, as in the published
/// pipelines; [`Tokenizer::encode_plain`] is for text that must not be able to
/// forge them.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The added vocabulary with special tokens ignored; made on first use.
    plain: OnceLock<AddedVocabulary>,
    joining: Joining,
    special_ids: HashSet<u32>,
    /// One past the largest id.
    size: usize,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Ids put in front of and behind raw text.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.size)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds the tokenizer of a checkpoint.
    ///
    /// # Errors
    ///
    /// [`TextError::MissingTokenizer`] without one,
    /// [`TextError::UnusableVocabulary`] where the importer could make none of the
    /// checkpoint's vocabulary, [`TextError::BadTokenizer`] for a file that is malformed, beyond the limits, or gives an added token
    /// another id than it states, [`TextError::UnknownSpecial`] and
    /// [`TextError::UndeclaredSpecial`] where the configuration asks for a
    /// beginning or end token that is not there.
    pub fn from_assets(assets: &TextAssets) -> Result<Self, TextError> {
        let json = match (&assets.tokenizer_json, &assets.config.tokenizer_problem) {
            (Some(json), _) => json,
            (None, Some(problem)) => {
                return Err(TextError::UnusableVocabulary {
                    problem: problem.clone(),
                });
            }
            (None, None) => return Err(TextError::MissingTokenizer),
        };
        Self::from_json(json, &assets.config)
    }

    fn from_json(json: &[u8], config: &TextConfig) -> Result<Self, TextError> {
        let bad = |problem: String| TextError::BadTokenizer { problem };
        let outline = Outline::read(json).map_err(bad)?;
        let mut inner = fenced(|| tokenizers::Tokenizer::from_bytes(json))
            .map_err(bad)?
            .map_err(|e| bad(e.to_string()))?;
        // Batching aids of a training set-up; ids must be all and only the text's.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|e| bad(e.to_string()))?;

        let mut size = inner.get_vocab_size(false);
        for (_, id) in inner.get_model().get_vocab() {
            size = size.max(id as usize + 1);
        }
        for token in &outline.added_tokens {
            match inner.token_to_id(&token.content) {
                Some(id) if id == token.id => size = size.max(id as usize + 1),
                Some(id) => {
                    return Err(bad(format!(
                        "added token {:?} states id {}, but its id is {id}",
                        token.content, token.id
                    )));
                }
                None => {
                    return Err(bad(format!(
                        "added token {:?} (id {}) is empty or unusable",
                        token.content, token.id
                    )));
                }
            }
        }
        let special_ids = inner
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, t)| t.special)
            .map(|(id, _)| *id)
            .collect();
        let mut out = Self {
            joining: outline.joining(),
            plain: OnceLock::new(),
            special_ids,
            size,
            bos: None,
            eos: None,
            prefix: Vec::new(),
            suffix: Vec::new(),
            inner,
        };
        out.bos = out.resolve("bos", config.bos.as_ref(), config.add_bos)?;
        out.eos = out.resolve("eos", config.eos.as_ref(), config.add_eos)?;
        out.learn_affixes(config)?;
        Ok(out)
    }

    /// The id of a declared special token. One that is declared but not in the
    /// vocabulary only matters if it is to be added.
    fn resolve(
        &self,
        role: &'static str,
        token: Option<&SpecialToken>,
        add: Option<bool>,
    ) -> Result<Option<u32>, TextError> {
        let Some(token) = token else {
            return match add {
                Some(true) => Err(TextError::UndeclaredSpecial { role }),
                _ => Ok(None),
            };
        };
        let id = self.inner.token_to_id(&token.content).or(token.id);
        match id {
            None if add == Some(true) => Err(TextError::UnknownSpecial {
                role,
                content: token.content.clone(),
            }),
            id => Ok(id),
        }
    }

    /// Finds what the file's post-processor puts around a text, and lets the
    /// configuration's flags overrule it.
    fn learn_affixes(&mut self, config: &TextConfig) -> Result<(), TextError> {
        // Any text that the vocabulary can write will do: a post-processor of
        // one sequence only adds affixes.
        let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
        for probe in ["a", "0", "e", ".", "the"] {
            let Ok(body) = self.encode_raw(probe, false) else {
                continue;
            };
            if body.is_empty() {
                continue;
            }
            let all = self.encode_raw(probe, true)?;
            if let Some(at) = all.windows(body.len()).position(|w| w == body) {
                prefix = all[..at].to_vec();
                suffix = all[at + body.len()..].to_vec();
                break;
            }
        }
        if let (Some(add), Some(bos)) = (config.add_bos, self.bos) {
            prefix.retain(|id| *id != bos);
            if add {
                prefix.insert(0, bos);
            }
        }
        if let (Some(add), Some(eos)) = (config.add_eos, self.eos) {
            suffix.retain(|id| *id != eos);
            if add {
                suffix.push(eos);
            }
        }
        self.prefix = prefix;
        self.suffix = suffix;
        Ok(())
    }

    fn encode_raw(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        let problem = |problem: String| TextError::Encode { problem };
        let encoding = fenced(|| self.inner.encode_fast(text, special))
            .map_err(problem)?
            .map_err(|e| problem(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes text. Special tokens written in it are recognised.
    ///
    /// # Errors
    ///
    /// [`TextError::TextTooLong`] above 16 MiB, [`TextError::Encode`] where the
    /// vocabulary has no way to write the text or half a million spaces stand in
    /// a row.
    pub fn encode(&self, text: &str, special: AddSpecial) -> Result<Vec<u32>, TextError> {
        check_length(text)?;
        let body = self.encode_raw(text, false)?;
        Ok(self.around(body, special))
    }

    /// Encodes text in which special tokens are ordinary characters, so that
    /// what a user types cannot end a turn or open another role. Added tokens
    /// that are not special (runs of spaces, markup) are recognised as always.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode`].
    pub fn encode_plain(&self, text: &str, special: AddSpecial) -> Result<Vec<u32>, TextError> {
        check_length(text)?;
        let problem = |problem: String| TextError::Encode { problem };
        let plain = self.plain.get_or_init(|| {
            let mut added = self.inner.get_added_vocabulary().clone();
            added.set_encode_special_tokens(true);
            added
        });
        let encoding = fenced(|| {
            let mut pieces = plain.extract_and_normalize(self.inner.get_normalizer(), text);
            if let Some(splitter) = self.inner.get_pre_tokenizer() {
                splitter.pre_tokenize(&mut pieces)?;
            }
            pieces.tokenize(|piece| self.inner.get_model().tokenize(piece.get()))?;
            pieces.into_encoding(None, 0, tokenizers::OffsetType::None)
        })
        .map_err(problem)?
        .map_err(|e| problem(e.to_string()))?;
        Ok(self.around(encoding.get_ids().to_vec(), special))
    }

    fn around(&self, body: Vec<u32>, special: AddSpecial) -> Vec<u32> {
        match special {
            AddSpecial::No => body,
            AddSpecial::Yes => [&self.prefix[..], &body, &self.suffix].concat(),
        }
    }

    /// Decodes ids. Ids without a token add nothing; bytes that are no UTF-8
    /// become U+FFFD.
    ///
    /// # Errors
    ///
    /// [`TextError::Decode`] where the file's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let problem = |problem: String| TextError::Decode { problem };
        fenced(|| self.inner.decode(ids, skip_special))
            .map_err(problem)?
            .map_err(|e| problem(e.to_string()))
    }

    /// One past the largest id. A model's table may be larger (padding rows).
    pub fn vocab_size(&self) -> usize {
        self.size
    }

    /// The id of a token by its exact text in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token's text as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Beginning-of-sequence id, where one is declared.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// End-of-sequence id that the tokenizer declares. It is only one of the ends
    /// of an answer: see [`StopSet`](crate::StopSet).
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether a token is special: skipped by a decode that skips specials.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Ids of all special tokens, ascending.
    pub fn special_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = self.special_ids.iter().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Ids of all added tokens, special or not, ascending.
    pub fn added_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = self
            .inner
            .get_added_tokens_decoder()
            .keys()
            .copied()
            .collect();
        ids.sort_unstable();
        ids
    }

    /// The bytes a token stands for; `None` for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.inner.id_to_token(id)?;
        if self.inner.get_added_tokens_decoder().contains_key(&id) {
            return Some(token.into_bytes());
        }
        Some(match self.joining {
            Joining::Bytes => byte_level(&token).unwrap_or_else(|| token.into_bytes()),
            _ => match byte_token(&token) {
                Some(byte) => vec![byte],
                None => token.replace('▁', " ").into_bytes(),
            },
        })
    }

    /// Refuses ids that the model has no row for.
    ///
    /// # Errors
    ///
    /// [`TextError::IdBeyondVocabulary`] names the first.
    pub fn check_ids(&self, ids: &[u32], vocab_size: usize) -> Result<(), TextError> {
        match ids.iter().find(|id| **id as usize >= vocab_size) {
            None => Ok(()),
            Some(&id) => Err(TextError::IdBeyondVocabulary {
                id,
                token: self.id_to_token(id).unwrap_or_default(),
                vocab_size,
            }),
        }
    }

    /// How the decoder joins tokens.
    pub(crate) fn joining(&self) -> Joining {
        self.joining
    }

    /// Whether an id contributes to a decode at all.
    pub(crate) fn contributes(&self, id: u32, skip_special: bool) -> bool {
        !(skip_special && self.special_ids.contains(&id)) && self.inner.id_to_token(id).is_some()
    }

    /// Whether a token is one byte of a run, such as `<0xE2>`.
    pub(crate) fn is_byte_token(&self, id: u32) -> bool {
        self.inner
            .id_to_token(id)
            .is_some_and(|t| byte_token(&t).is_some())
    }
}

fn check_length(text: &str) -> Result<(), TextError> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(TextError::TextTooLong {
            bytes: text.len(),
            limit: MAX_TEXT_BYTES,
        });
    }
    if text.len() > MAX_SPACES {
        let longest = text
            .split(|c: char| !c.is_whitespace())
            .map(str::len)
            .max()
            .unwrap_or(0);
        if longest > MAX_SPACES {
            return Err(TextError::Encode {
                problem: format!(
                    "{longest} bytes of whitespace in a row, the limit is {MAX_SPACES}"
                ),
            });
        }
    }
    Ok(())
}

/// The byte of a token like `<0xE2>`, read as leniently as the decoder reads it.
fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 {
        u8::from_str_radix(hex, 16).ok()
    } else {
        None
    }
}

/// The bytes of a token in the byte-level alphabet: printable Latin-1 characters
/// stand for themselves, the other 68 bytes for U+0100 onwards in order.
fn byte_level(token: &str) -> Option<Vec<u8>> {
    token
        .chars()
        .map(|c| {
            let c = c as u32;
            match c {
                0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(c as u8),
                0x100..=0x120 => Some((c - 0x100) as u8),
                0x121..=0x142 => Some((c - 0x121 + 0x7f) as u8),
                0x143 => Some(0xad),
                _ => None,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for c in (0u32..0x200).filter_map(char::from_u32) {
            if let Some(bytes) = byte_level(&c.to_string()) {
                assert_eq!(bytes.len(), 1);
                assert!(
                    !std::mem::replace(&mut seen[bytes[0] as usize], true),
                    "{c:?}"
                );
            }
        }
        assert!(seen.iter().all(|s| *s));
        assert_eq!(byte_level("Ġ"), Some(vec![b' ']));
        assert_eq!(byte_level("Ċ"), Some(vec![b'\n']));
        assert_eq!(byte_level("▁"), None);
    }

    #[test]
    fn byte_tokens() {
        assert_eq!(byte_token("<0xE2>"), Some(0xe2));
        assert_eq!(byte_token("<0x0a>"), Some(10));
        assert_eq!(byte_token("<0xé>"), None);
        assert_eq!(byte_token("<0xE2F>"), None);
        assert_eq!(byte_token("xE2"), None);
    }
}
