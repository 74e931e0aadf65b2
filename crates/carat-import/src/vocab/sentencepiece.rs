//! SentencePiece BPE (`llama`).
//!
//! SentencePiece has no merges: it joins the neighbours whose concatenation is the
//! piece with the best score, the leftmost first. A list of merges in the order of
//! the scores does the same: of all pairs present, the pipeline joins the one that
//! comes first in the list.

use std::cmp::Ordering;

use serde_json::json;

use super::{Kind, Vocab, VocabError, byte_of, json};

/// Longest piece that is split into all its pairs, in characters. SentencePiece
/// trains pieces of at most 16 by default; runs of spaces reach 32.
const MAX_PIECE_CHARS: usize = 512;

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
    let byte_fallback = vocab.has_all_bytes();
    // Id 0 is what the format's readers assume where a file is silent.
    let unk = data
        .unk_id
        .or_else(|| {
            vocab
                .kinds
                .iter()
                .position(|k| *k == Kind::Unknown)
                .map(|i| i as u32)
        })
        .unwrap_or(0);
    let model = json::Bpe {
        kind: "BPE",
        dropout: None,
        unk_token: Some(vocab.token(unk)),
        continuing_subword_prefix: None,
        end_of_word_suffix: None,
        fuse_unk: true,
        byte_fallback,
        ignore_merges: false,
        vocab: &data.tokens,
        merges: merges(vocab)?,
    };
    let space_prefix = data.add_space_prefix.unwrap_or(true);
    // User-defined pieces are cut out of the normalized text, before any merge.
    // One that contains the space mark can only be found there. (Behind a
    // prepended space the pipeline would change the piece itself, so such
    // vocabularies reach it by merges.)
    let in_normalized = |content: &str| content.contains(SPACE);
    let mut added =
        vocab.added(|content, kind| kind == Kind::UserDefined && in_normalized(content));
    if space_prefix {
        added.retain(|a| a.special || !in_normalized(a.content));
    }
    let mut file = json::File::new(added, model);
    let to_mark = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let mut decoders =
        vec![json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "})];
    if byte_fallback {
        decoders.push(json!({"type": "ByteFallback"}));
    }
    decoders.push(json!({"type": "Fuse"}));
    file.normalizer = if space_prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        let prepend = json!({"type": "Prepend", "prepend": SPACE});
        json!({"type": "Sequence", "normalizers": [prepend, to_mark]})
    } else {
        to_mark
    };
    file.decoder = json!({"type": "Sequence", "decoders": decoders});
    file.post_processor =
        vocab.post_processor(data.add_bos.unwrap_or(true), data.add_eos.unwrap_or(false));
    file.write()
}

/// All pairs of pieces whose concatenation is a piece, best first.
fn merges<'a>(vocab: &Vocab<'a>) -> Result<Vec<(&'a str, &'a str)>, VocabError> {
    struct Merge<'a> {
        left: &'a str,
        right: &'a str,
        score: f32,
        /// Characters of the halves, then their ids.
        order: (usize, usize, u32, u32),
    }
    let data = vocab.data;
    // Control, unknown, unused and byte pieces never come out of text by merging.
    let mergeable = |id: u32| {
        matches!(vocab.kinds[id as usize], Kind::Normal | Kind::UserDefined)
            && (vocab.kinds[id as usize] == Kind::UserDefined || byte_of(vocab.token(id)).is_none())
    };
    let mut out = Vec::with_capacity(data.tokens.len() * 2);
    for (id, piece) in data.tokens.iter().enumerate() {
        if !mergeable(id as u32) {
            continue;
        }
        let chars = piece.chars().count();
        if chars > MAX_PIECE_CHARS {
            return Err(VocabError::Entry {
                key: "tokens",
                index: id,
                problem: format!("has {chars} characters, the limit is {MAX_PIECE_CHARS}"),
            });
        }
        for (nth, (at, _)) in piece.char_indices().enumerate().skip(1) {
            let (left, right) = piece.split_at(at);
            let (Some(&l), Some(&r)) = (vocab.ids.get(left), vocab.ids.get(right)) else {
                continue;
            };
            if mergeable(l) && mergeable(r) {
                out.push(Merge {
                    left,
                    right,
                    score: data.scores[id],
                    order: (nth, chars - nth, l, r),
                });
            }
        }
    }
    // Pieces have distinct scores as a rule. Among equals (user-defined runs, or
    // the ways to build one piece) the longer left half wins, as in the published
    // conversions, then the longer right half, then the lower ids.
    out.sort_by(|a, b| {
        let longer = |m: &Merge<'_>| (m.order.0, m.order.1);
        b.score
            .partial_cmp(&a.score)
            .unwrap_or(Ordering::Equal)
            .then_with(|| longer(b).cmp(&longer(a)))
            .then_with(|| (a.order.2, a.order.3).cmp(&(b.order.2, b.order.3)))
    });
    Ok(out.into_iter().map(|m| (m.left, m.right)).collect())
}
