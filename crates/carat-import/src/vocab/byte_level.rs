//! Byte-level BPE (`gpt2`).

use serde_json::json;

use super::pre::Pre;
use super::{Vocab, VocabError, json};

pub(super) fn convert(vocab: &Vocab<'_>) -> Result<Vec<u8>, VocabError> {
    let data = vocab.data;
    let pre = Pre::named(data.pre.as_deref()).ok_or_else(|| VocabError::Pre {
        name: data.pre.clone().unwrap_or_default(),
        known: Pre::names(),
    })?;
    let mut merges = Vec::with_capacity(data.merges.len());
    for (index, merge) in data.merges.iter().enumerate() {
        merges.push(split(vocab, merge).map_err(|problem| VocabError::Entry {
            key: "merges",
            index,
            problem,
        })?);
    }
    let model = json::Bpe {
        kind: "BPE",
        dropout: None,
        unk_token: None,
        continuing_subword_prefix: None,
        end_of_word_suffix: None,
        fuse_unk: false,
        byte_fallback: false,
        ignore_merges: pre.ignore_merges,
        vocab: &data.tokens,
        merges,
    };
    let mut file = json::File::new(vocab.added(|_, _| false), model);
    file.normalizer = pre.normalizer();
    file.pre_tokenizer = pre.pre_tokenizer(data.add_space_prefix.unwrap_or(false));
    file.post_processor = vocab.post_processor(
        data.add_bos.unwrap_or(pre.add_bos),
        data.add_eos.unwrap_or(false),
    );
    file.decoder = json!({
        "type": "ByteLevel",
        "add_prefix_space": true,
        "trim_offsets": true,
        "use_regex": true,
    });
    file.write()
}

/// The two halves of a merge. A half may itself begin with a space, so the
/// separator is the first space after the first character.
fn split<'a>(vocab: &Vocab<'a>, merge: &'a str) -> Result<(&'a str, &'a str), String> {
    let first = merge.chars().next().map_or(0, char::len_utf8);
    let at = merge[first..]
        .find(' ')
        .map(|at| at + first)
        .ok_or_else(|| format!("{merge:?} is not two tokens with a space between"))?;
    let (left, right) = (&merge[..at], &merge[at + 1..]);
    for token in [left, right] {
        if !vocab.ids.contains_key(token) {
            return Err(format!("{token:?} is not a token"));
        }
    }
    let joined = [left, right].concat();
    if !vocab.ids.contains_key(joined.as_str()) {
        return Err(format!("{joined:?} is not a token"));
    }
    Ok((left, right))
}
