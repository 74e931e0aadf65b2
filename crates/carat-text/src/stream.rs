//! Ids in one at a time, text out as soon as it is certain.
//!
//! Decoding everything again for each token costs a time that grows with the
//! square of the answer. The stream decodes only a *tail*: text that can no longer
//! change is folded away, and a few of its last tokens stay as an *anchor* so that
//! the decoder sees the tail in context (some strip the very first space).
//!
//! A chunk is emitted only once no later token can change it:
//!
//! * byte-level vocabularies: a trailing U+FFFD may be the first bytes of a
//!   character, so it waits;
//! * vocabularies with byte tokens: a run of them is decoded as a whole (one bad
//!   byte spoils the run), so the run waits for its end;
//! * decoders that cannot be cut at all: everything waits for the flush.
//!
//! The first fold is checked against a full decode before anything after it is
//! emitted, and again each time the answer has doubled. Should one disagree, the
//! stream goes on with full decodes.

use crate::error::TextError;
use crate::outline::Joining;
use crate::reply::is_reply_mark;
use crate::tokenizer::Tokenizer;

/// A tail longer than this is folded at the next sound place. Long enough to
/// make folds rare, short enough that a tail decodes in microseconds.
const FOLD_TOKENS: usize = 64;

const REPLACEMENT: char = '\u{fffd}';

/// Turns a stream of ids into chunks of text.
///
/// Chunks concatenated with the final [`flush`](Self::flush) are exactly
/// [`Tokenizer::decode`] of all ids (of those that are not left out).
#[derive(Debug)]
pub struct StreamDecoder<'t> {
    tokenizer: &'t Tokenizer,
    skip_special: bool,
    /// Leave out special tokens but those that mark thoughts and calls.
    for_reply: bool,
    /// All ids that contribute text.
    ids: Vec<u32>,
    /// `ids[anchor..tail]` is decoded for context only; `ids[tail..]` is the tail.
    anchor: usize,
    tail: usize,
    /// Text of the anchor alone, in bytes.
    anchor_bytes: usize,
    /// Bytes of text before the tail.
    stable_bytes: usize,
    /// Bytes already handed out.
    emitted: usize,
    /// Ids at the last audit; 0 before the first.
    audited: usize,
    /// An audit failed: decode everything, always.
    whole: bool,
    /// Text handed out, kept only where everything is decoded always.
    emitted_text: String,
}

impl<'t> StreamDecoder<'t> {
    /// A new stream. `skip_special` leaves special tokens out of the text.
    pub fn new(tokenizer: &'t Tokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            for_reply: false,
            ids: Vec::new(),
            anchor: 0,
            tail: 0,
            anchor_bytes: 0,
            stable_bytes: 0,
            emitted: 0,
            audited: 0,
            whole: false,
            emitted_text: String::new(),
        }
    }

    /// A new stream whose text [`parse_reply`](crate::parse_reply) can take apart:
    /// special tokens are left out, but not those that mark thoughts and calls
    /// (see [`is_reply_mark`]).
    pub fn for_reply(tokenizer: &'t Tokenizer) -> Self {
        Self {
            for_reply: true,
            ..Self::new(tokenizer, false)
        }
    }

    /// Takes the next id. Returns text that became certain, if any.
    ///
    /// # Errors
    ///
    /// [`TextError::Decode`] where the file's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
        if !self.tokenizer.contributes(id, self.skip_special) {
            return Ok(None);
        }
        if self.for_reply
            && self.tokenizer.is_special(id)
            && !self
                .tokenizer
                .id_to_token(id)
                .is_some_and(|t| is_reply_mark(&t))
        {
            return Ok(None);
        }
        self.ids.push(id);
        match self.tokenizer.joining() {
            Joining::Opaque => return Ok(None),
            Joining::Pieces { byte_runs: true } if self.tokenizer.is_byte_token(id) => {
                return Ok(None);
            }
            _ => {}
        }
        self.advance()
    }

    /// Ends the stream: the text still held back, if any. The decoder is then
    /// ready for another stream.
    ///
    /// # Errors
    ///
    /// [`TextError::Decode`] where the file's decoder fails.
    pub fn flush(&mut self) -> Result<Option<String>, TextError> {
        let rest = if self.whole || self.tokenizer.joining() == Joining::Opaque {
            let full = self.decode(0)?;
            full.strip_prefix(self.emitted_text.as_str())
                .map(str::to_owned)
        } else {
            let text = self.tail_text()?;
            let from = self.emitted.saturating_sub(self.stable_bytes);
            text.get(from..).map(str::to_owned)
        };
        *self = Self {
            for_reply: self.for_reply,
            ..Self::new(self.tokenizer, self.skip_special)
        };
        Ok(rest.filter(|r| !r.is_empty()))
    }

    fn decode(&self, from: usize) -> Result<String, TextError> {
        self.tokenizer.decode(&self.ids[from..], self.skip_special)
    }

    /// Text of the tail, decoded behind its anchor.
    fn tail_text(&self) -> Result<String, TextError> {
        let mut text = self.decode(self.anchor)?;
        if self.anchor_bytes > 0 {
            text.drain(..self.anchor_bytes.min(text.len()));
        }
        Ok(text)
    }

    fn advance(&mut self) -> Result<Option<String>, TextError> {
        if self.whole {
            return self.advance_whole();
        }
        let text = self.tail_text()?;
        // Before anything after a fold goes out, see that the fold was sound.
        if self.tail > 0 && self.ids.len() >= 2 * self.audited {
            let full = self.decode(0)?;
            let sound = full.len() == self.stable_bytes + text.len() && full.ends_with(&text);
            if !sound {
                self.whole = true;
                // What went out so far came from decodes that began at the first
                // id or passed an audit, so it is a prefix of the full text.
                self.emitted_text = full.get(..self.emitted).unwrap_or("").to_owned();
                return self.advance_whole();
            }
            self.audited = self.ids.len();
        }
        let certain = self.certain(&text);
        let from = self.emitted - self.stable_bytes;
        let chunk = text.get(from..certain).unwrap_or("").to_owned();
        self.emitted += chunk.len();
        if certain == text.len()
            && (text.ends_with('\n') || self.ids.len() - self.tail > FOLD_TOKENS)
        {
            self.fold(&text)?;
        }
        Ok(Some(chunk).filter(|c| !c.is_empty()))
    }

    /// Length of the part of `text` that no later token can change.
    fn certain(&self, text: &str) -> usize {
        match self.tokenizer.joining() {
            Joining::Bytes => text.strip_suffix(REPLACEMENT).unwrap_or(text).len(),
            _ => text.len(),
        }
    }

    /// Moves the tail into the stable text and picks a new anchor: the fewest last
    /// tokens that decode to something, and so have used up whatever the decoder
    /// does to the beginning of a text.
    fn fold(&mut self, text: &str) -> Result<(), TextError> {
        let end = self.ids.len();
        for anchor in (self.anchor..end).rev() {
            let anchor_text = self.decode(anchor)?;
            // For bytes the anchor must begin and end on whole characters.
            let whole =
                self.tokenizer.joining() != Joining::Bytes || !anchor_text.contains(REPLACEMENT);
            if !anchor_text.is_empty() && whole {
                self.anchor = anchor;
                self.anchor_bytes = anchor_text.len();
                self.tail = end;
                self.stable_bytes += text.len();
                return Ok(());
            }
            if end - anchor > FOLD_TOKENS {
                break;
            }
        }
        Ok(())
    }

    fn advance_whole(&mut self) -> Result<Option<String>, TextError> {
        let full = self.decode(0)?;
        let certain = self.certain(&full);
        let chunk = full
            .get(..certain)
            .and_then(|c| c.strip_prefix(self.emitted_text.as_str()))
            .unwrap_or("");
        self.emitted_text.push_str(chunk);
        Ok(Some(chunk.to_owned()).filter(|c| !c.is_empty()))
    }
}
