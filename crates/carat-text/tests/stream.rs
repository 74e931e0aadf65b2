//! The chunks of a stream add up to the full decode, whatever the ids.

mod common;

use std::sync::LazyLock;

use carat_bundle::text::TextAssets;
use carat_text::{AddSpecial, StreamDecoder, Tokenizer};
use proptest::prelude::*;

static BYTES: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_assets(&common::dense()).unwrap());
static PIECES: LazyLock<Tokenizer> = LazyLock::new(common::sentencepiece_bpe);
static UNIGRAM: LazyLock<Tokenizer> = LazyLock::new(|| {
    let vocab = common::Pieces::load("sentencepiece_unigram.json").vocab("t5");
    Tokenizer::from_assets(&common::assets(&vocab)).unwrap()
});

/// Streams the ids; checks every prefix against the full decode and returns the
/// text, the number of chunks and the longest wait in tokens.
fn stream(tokenizer: &Tokenizer, ids: &[u32], skip: bool) -> (String, usize) {
    let mut decoder = StreamDecoder::new(tokenizer, skip);
    let full = tokenizer.decode(ids, skip).unwrap();
    let mut text = String::new();
    let mut chunks = 0;
    for id in ids {
        if let Some(chunk) = decoder.push(*id).unwrap() {
            assert!(!chunk.is_empty());
            text.push_str(&chunk);
            chunks += 1;
            assert!(full.starts_with(&text), "{text:?} is no prefix of {full:?}");
        }
    }
    text.extend(decoder.flush().unwrap());
    assert_eq!(text, full);
    // The decoder is as new after a flush.
    assert_eq!(decoder.flush().unwrap(), None);
    (text, chunks)
}

const TEXTS: [&str; 6] = [
    "The quick brown fox.\nJumps over\n\nthe lazy dog.\n",
    "👨‍👩‍👧‍👦🇫🇷👍🏽 你好，世界！ 日本語 हिन्दी\nالعربية",
    "  leading and trailing  ",
    "a\u{fffd}b\u{fffd}\u{fffd}",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ½ ²\t\r\n\r\n",
    "",
];

#[test]
fn texts_stream_as_they_are() {
    for tokenizer in [&*BYTES, &*PIECES, &*UNIGRAM] {
        for text in TEXTS {
            let long = text.repeat(40);
            for text in [text, &long] {
                let ids = tokenizer.encode(text, AddSpecial::No).unwrap();
                let (out, _) = stream(tokenizer, &ids, false);
                if !std::ptr::eq(tokenizer, &*UNIGRAM) {
                    assert_eq!(out, text);
                }
            }
        }
    }
}

#[test]
fn plain_text_flows_token_by_token() {
    // Nothing is held back that is certain: a chunk for each token.
    let text = "the king and the fox went to the old house by the sea\n".repeat(30);
    for tokenizer in [&*BYTES, &*PIECES] {
        let ids = tokenizer.encode(&text, AddSpecial::No).unwrap();
        let bytes = |t: &str| t.starts_with("<0x");
        let certain = ids
            .iter()
            .filter(|id| !bytes(&tokenizer.id_to_token(**id).unwrap()))
            .count();
        let (_, chunks) = stream(tokenizer, &ids, true);
        // The space mark at the very beginning decodes to nothing.
        assert!(chunks + 1 >= certain, "{chunks} of {certain}");
    }
}

#[test]
fn a_character_is_never_split() {
    let ids = BYTES.encode("🙂🙃é", AddSpecial::No).unwrap();
    assert!(ids.len() > 3, "the vocabulary writes these in bytes");
    let mut decoder = StreamDecoder::new(&BYTES, false);
    let mut chunks = Vec::new();
    for id in ids {
        chunks.extend(decoder.push(id).unwrap());
    }
    chunks.extend(decoder.flush().unwrap());
    assert_eq!(chunks, ["🙂", "🙃", "é"]);
}

#[test]
fn an_unfinished_character_comes_out_at_the_flush() {
    let mut ids = BYTES.encode("a🙂", AddSpecial::No).unwrap();
    ids.pop();
    let mut decoder = StreamDecoder::new(&BYTES, false);
    let mut text = String::new();
    for id in ids {
        text.extend(decoder.push(id).unwrap());
    }
    assert_eq!(text, "a");
    assert_eq!(decoder.flush().unwrap().as_deref(), Some("\u{fffd}"));
}

#[test]
fn one_bad_byte_spoils_its_run_and_nothing_before_it() {
    let byte = |b: u8| PIECES.token_to_id(&format!("<0x{b:02X}>")).unwrap();
    let a = PIECES.token_to_id("▁the").unwrap();
    // "A" as a byte, then a byte that is no UTF-8: the whole run is replaced.
    let ids = [a, byte(0x41), byte(0xff), a, byte(0x42), a];
    assert_eq!(
        PIECES.decode(&ids, false).unwrap(),
        "the\u{fffd}\u{fffd} theB the"
    );
    stream(&PIECES, &ids, false);
}

#[test]
fn special_tokens_are_skipped_or_shown() {
    let ids = BYTES
        .encode("<|im_start|>assistant\nHi<|im_end|>", AddSpecial::No)
        .unwrap();
    assert_eq!(stream(&BYTES, &ids, true).0, "assistant\nHi");
    assert_eq!(
        stream(&BYTES, &ids, false).0,
        "<|im_start|>assistant\nHi<|im_end|>"
    );
}

#[test]
fn decoders_that_cannot_be_cut_wait_for_the_flush() {
    let json = r#"{"decoder":{"type":"WordPiece","prefix":"","cleanup":true},"model":{"type":"BPE","vocab":{"do":0,"n't":1,".":2},"merges":[]}}"#;
    let tokenizer = Tokenizer::from_assets(&TextAssets {
        tokenizer_json: Some(json.into()),
        ..TextAssets::default()
    })
    .unwrap();
    let (text, chunks) = stream(&tokenizer, &[0, 1, 2, 0, 2], false);
    assert_eq!(text, tokenizer.decode(&[0, 1, 2, 0, 2], false).unwrap());
    assert_eq!(chunks, 0);
}

#[test]
fn long_streams_cost_time_in_proportion() {
    // 40,000 tokens: decoding all of them for each would be 800 million.
    let ids: Vec<u32> = BYTES
        .encode(
            &"All the world's a stage, 你好 🙂.\n".repeat(2_000),
            AddSpecial::No,
        )
        .unwrap();
    assert!(ids.len() > 20_000);
    let start = std::time::Instant::now();
    stream_quietly(&BYTES, &ids);
    let elapsed = start.elapsed();
    assert!(elapsed.as_secs() < 30, "{elapsed:?}");
}

fn stream_quietly(tokenizer: &Tokenizer, ids: &[u32]) {
    let mut decoder = StreamDecoder::new(tokenizer, false);
    let mut text = String::new();
    for id in ids {
        text.extend(decoder.push(*id).unwrap());
    }
    text.extend(decoder.flush().unwrap());
    assert_eq!(text, tokenizer.decode(ids, false).unwrap());
}

/// Ids of a vocabulary with some that are not in it, biased to bytes and specials.
fn ids(size: u32, special: std::ops::Range<u32>) -> impl Strategy<Value = Vec<u32>> {
    let id = prop_oneof![
        6 => 0..size,
        4 => special,
        1 => size..size + 3,
    ];
    prop::collection::vec(id, 0..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_ids_of_bytes(ids in ids(2056, 2051..2056), skip: bool) {
        stream(&BYTES, &ids, skip);
    }

    #[test]
    fn random_single_bytes(ids in prop::collection::vec(0u32..256, 0..300), skip: bool) {
        // The first 256 ids are the bytes themselves: mostly broken UTF-8.
        stream(&BYTES, &ids, skip);
    }

    #[test]
    fn random_ids_of_pieces(ids in ids(1200, 0..262), skip: bool) {
        stream(&PIECES, &ids, skip);
    }

    #[test]
    fn random_ids_of_unigram(ids in ids(700, 0..262), skip: bool) {
        stream(&UNIGRAM, &ids, skip);
    }

    #[test]
    fn random_texts(text in "[a-z \\n🙂你é\u{300}]{0,300}") {
        for tokenizer in [&*BYTES, &*PIECES] {
            let ids = tokenizer.encode(&text, AddSpecial::No).unwrap();
            prop_assert_eq!(stream(tokenizer, &ids, false).0, text.clone());
        }
    }
}
