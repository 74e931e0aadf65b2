//! What the tests share: the repository's small models and the golden files.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::{Path, PathBuf};

use carat_bundle::text::{SpecialToken, TextAssets};
use carat_import::vocab::{VocabData, to_tokenizer_json};
use carat_text::Tokenizer;
use serde::Deserialize;

/// A text, its ids and what they decode to.
#[derive(Debug, Deserialize)]
pub(crate) struct Case {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    #[serde(default)]
    pub(crate) decoded: String,
}

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The text side of the repository's dense model.
pub(crate) fn dense() -> TextAssets {
    carat_import::open(&repository().join("models/wren-dense"))
        .unwrap()
        .text
}

/// The text side of the repository's ternary model, from GGUF.
pub(crate) fn ternary() -> TextAssets {
    carat_import::open(&repository().join("models/wren-ternary-tq2_0.gguf"))
        .unwrap()
        .text
}

/// A small SentencePiece vocabulary and its golden cases.
#[derive(Debug, Deserialize)]
pub(crate) struct Pieces {
    tokens: Vec<String>,
    scores: Vec<f32>,
    token_types: Vec<i32>,
    unk_id: u32,
    bos_id: u32,
    eos_id: u32,
    pub(crate) cases: Vec<Case>,
}

impl Pieces {
    pub(crate) fn load(name: &str) -> Self {
        serde_json::from_slice(&golden(name)).unwrap()
    }

    pub(crate) fn vocab(&self, model: &str) -> VocabData {
        VocabData {
            model: model.into(),
            tokens: self.tokens.clone(),
            scores: self.scores.clone(),
            token_types: self.token_types.clone(),
            unk_id: Some(self.unk_id),
            bos_id: Some(self.bos_id),
            eos_id: Some(self.eos_id),
            ..VocabData::default()
        }
    }
}

/// The text side of a converted vocabulary.
pub(crate) fn assets(vocab: &VocabData) -> TextAssets {
    let mut assets = TextAssets {
        tokenizer_json: Some(to_tokenizer_json(vocab).unwrap()),
        ..TextAssets::default()
    };
    let special = |id: Option<u32>| {
        id.map(|id| SpecialToken {
            content: vocab.tokens[id as usize].clone(),
            id: Some(id),
        })
    };
    assets.config.bos = special(vocab.bos_id);
    assets.config.eos = special(vocab.eos_id);
    assets
}

pub(crate) fn sentencepiece_bpe() -> Tokenizer {
    let vocab = Pieces::load("sentencepiece_bpe.json").vocab("llama");
    Tokenizer::from_assets(&assets(&vocab)).unwrap()
}
