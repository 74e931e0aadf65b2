//! A vocabulary of any size that encodes any text.
//!
//! SentencePiece's layout: three special pieces, 256 bytes, then the space mark,
//! the printable characters of ASCII, and all strings of lower-case letters with
//! or without a space mark before them, shortest first. Each has a worse score
//! than the one before, so text falls into the shorter pieces first and from
//! those into the longer ones that exist.

use crate::gguf::{Array, Value, Writer};

const UNKNOWN: &str = "<unk>";
const BEGIN: &str = "<s>";
const END: &str = "</s>";
/// The format's kinds of pieces.
const NORMAL: i32 = 1;
const KIND_UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

const SPACE: char = '▁';

/// Fewest pieces: the special ones, the bytes and the characters.
#[cfg(test)]
pub(super) const FEWEST: usize = 3 + 256 + 1 + 94;

/// The text of the pieces, in order of ids.
fn pieces() -> impl Iterator<Item = String> {
    let special = [UNKNOWN, BEGIN, END].map(str::to_owned).into_iter();
    let bytes = (0..=255u8).map(|b| format!("<0x{b:02X}>"));
    let characters = std::iter::once(SPACE)
        .chain('!'..='~')
        .map(|c| c.to_string());
    special
        .chain(bytes)
        .chain(characters)
        .chain((2u32..).flat_map(words))
}

/// Strings of this many characters, 27 for the first and 26 for each other.
fn words(characters: u32) -> impl Iterator<Item = String> {
    let rest = 26usize.pow(characters - 1);
    (0..27 * rest).map(move |n| {
        let letter = |digit: usize| char::from(b'a' + (digit % 26) as u8);
        let first = match n / rest {
            0 => SPACE,
            digit => letter(digit - 1),
        };
        let others = (0..characters - 1).rev();
        std::iter::once(first)
            .chain(others.map(|place| letter(n / 26usize.pow(place))))
            .collect()
    })
}

/// Sets the metadata of a vocabulary of `count` pieces.
pub(super) fn declare(writer: &mut Writer, count: usize) {
    let tokens: Vec<String> = pieces().take(count).collect();
    let scored = |id: usize| if id < 259 { 0.0 } else { -((id - 259) as f32) };
    let kind = |id: usize| match id {
        0 => KIND_UNKNOWN,
        1 | 2 => CONTROL,
        3..259 => BYTE,
        _ => NORMAL,
    };
    let scores = (0..tokens.len()).map(scored).collect();
    let kinds = (0..tokens.len()).map(kind).collect();
    writer
        .set("tokenizer.ggml.model", "llama")
        .set("tokenizer.ggml.pre", "default")
        .set("tokenizer.ggml.tokens", tokens)
        .set("tokenizer.ggml.scores", Value::Array(Array::F32(scores)))
        .set("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)))
        .set("tokenizer.ggml.bos_token_id", 1)
        .set("tokenizer.ggml.eos_token_id", 2)
        .set("tokenizer.ggml.unknown_token_id", 0)
        .set("tokenizer.ggml.add_bos_token", true)
        .set("tokenizer.ggml.add_eos_token", false);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn pieces_are_distinct_and_in_order_of_length() {
        let some: Vec<String> = pieces().take(200_000).collect();
        let distinct: HashSet<&String> = some.iter().collect();
        assert_eq!(distinct.len(), some.len());
        assert_eq!(some[..4], ["<unk>", "<s>", "</s>", "<0x00>"]);
        assert_eq!(some[258..261], ["<0xFF>", "▁", "!"]);
        assert_eq!(some[FEWEST - 1], "~");
        assert_eq!(some[FEWEST..FEWEST + 2], ["▁a", "▁b"]);
        assert_eq!(some[FEWEST + 27 * 26 - 1..][..2], ["zz", "▁aa"]);
        assert_eq!(some[FEWEST + 27 * 26 + 27 * 676], "▁aaa");
    }
}
