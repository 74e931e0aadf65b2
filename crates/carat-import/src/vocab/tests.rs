use super::*;

fn vocab(model: &str, tokens: &[&str]) -> VocabData {
    VocabData {
        model: model.into(),
        tokens: tokens.iter().map(|t| (*t).to_owned()).collect(),
        ..VocabData::default()
    }
}

fn parsed(data: &VocabData) -> serde_json::Value {
    serde_json::from_slice(&to_tokenizer_json(data).unwrap()).unwrap()
}

#[test]
fn unknown_names_list_the_known_ones() {
    let e = to_tokenizer_json(&vocab("rwkv", &["a"]))
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("\"rwkv\"") && e.contains("gpt2, llama and t5"),
        "{e}"
    );
    let mut v = vocab("gpt2", &["a"]);
    v.pre = Some("mystery".into());
    let e = to_tokenizer_json(&v).unwrap_err().to_string();
    assert!(
        e.contains("\"mystery\"") && e.contains("qwen2, ") && e.contains("tekken"),
        "{e}"
    );
}

#[test]
fn lists_must_go_together() {
    let mut v = vocab("llama", &["a", "b"]);
    v.scores = vec![0.0];
    let e = to_tokenizer_json(&v).unwrap_err().to_string();
    assert_eq!(e, "tokenizer.ggml.scores: expected 2 entries, found 1");
    v.scores = vec![0.0, f32::NAN];
    let e = to_tokenizer_json(&v).unwrap_err().to_string();
    assert_eq!(e, "tokenizer.ggml.scores: entry 1: NaN is not a number");
    v.scores.clear();
    assert!(matches!(
        to_tokenizer_json(&v),
        Err(VocabError::Length { key: "scores", .. })
    ));
    v.token_types = vec![1, 9];
    let e = to_tokenizer_json(&v).unwrap_err().to_string();
    assert_eq!(
        e,
        "tokenizer.ggml.token_type: entry 1: expected a kind from 1 to 6, found 9"
    );
}

#[test]
fn hostile_vocabularies_are_errors() {
    assert!(matches!(
        to_tokenizer_json(&vocab("gpt2", &[])),
        Err(VocabError::Empty)
    ));
    let e = to_tokenizer_json(&vocab("gpt2", &["a", "b", "a"]))
        .unwrap_err()
        .to_string();
    assert_eq!(e, "tokenizer.ggml.tokens: ids 0 and 2 are both \"a\"");
    let mut v = vocab("gpt2", &["a"]);
    v.eos_id = Some(1);
    let e = to_tokenizer_json(&v).unwrap_err().to_string();
    assert_eq!(
        e,
        "tokenizer.ggml.eos_token_id: expected an id below 1, found 1"
    );
    let mut v = vocab("gpt2", &["a", "b"]);
    for (merge, problem) in [
        ("", "\"\" is not two tokens"),
        ("ab", "\"ab\" is not two tokens"),
        ("é", "\"é\" is not two tokens"),
        ("a c", "\"c\" is not a token"),
        ("a b", "\"ab\" is not a token"),
    ] {
        v.merges = vec![merge.into()];
        let e = to_tokenizer_json(&v).unwrap_err().to_string();
        assert!(e.contains("merges: entry 0") && e.contains(problem), "{e}");
    }
    let mut v = vocab("llama", &["a"]);
    v.tokens.push("x".repeat(10_000));
    v.scores = vec![0.0; 2];
    let e = to_tokenizer_json(&v).unwrap_err().to_string();
    assert!(e.contains("10000 characters"), "{e}");
}

#[test]
fn kinds_become_added_tokens() {
    let mut v = vocab("gpt2", &["a", "<|end|>", "<tag>", "!", "<|eos|>", "u"]);
    v.pre = Some("gpt-2".into());
    v.token_types = vec![1, 3, 4, 1, 1, 5];
    v.pad_id = Some(3);
    v.eos_id = Some(4);
    let j = parsed(&v);
    let added: Vec<_> = j["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| (t["id"].as_u64().unwrap(), t["special"].as_bool().unwrap()))
        .collect();
    // "!" stays ordinary text although it is the padding id; the end token that is
    // typed normal is still a mark.
    assert_eq!(added, [(1, true), (2, false), (4, true)]);
}

#[test]
fn merges_follow_the_scores() {
    let mut v = vocab(
        "llama",
        &["<unk>", "a", "b", "c", "ab", "bc", "abc", "<0x61>", "ca"],
    );
    v.scores = vec![0.0, -10.0, -11.0, -12.0, -3.0, -2.0, -4.0, 0.0, -1.0];
    v.token_types = vec![2, 1, 1, 1, 1, 1, 1, 6, 5];
    let j = parsed(&v);
    let merges: Vec<(String, String)> =
        serde_json::from_value(j["model"]["merges"].clone()).unwrap();
    let merges: Vec<_> = merges
        .iter()
        .map(|(l, r)| (l.as_str(), r.as_str()))
        .collect();
    // Unused "ca" has none; of the two ways to "abc" the longer left half is first.
    assert_eq!(merges, [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]);
    assert_eq!(j["model"]["byte_fallback"], false);
    assert_eq!(j["model"]["unk_token"], "<unk>");
}

#[test]
fn space_prefix_is_prepended_and_stripped() {
    let mut v = vocab("llama", &["<unk>", "▁", "a"]);
    v.scores = vec![0.0; 3];
    let j = parsed(&v);
    assert_eq!(j["normalizer"]["normalizers"][0]["type"], "Prepend");
    assert_eq!(j["decoder"]["decoders"][2]["type"], "Strip");
    v.add_space_prefix = Some(false);
    let j = parsed(&v);
    assert_eq!(j["normalizer"]["type"], "Replace");
    assert_eq!(j["decoder"]["decoders"].as_array().unwrap().len(), 2);
}

#[test]
fn special_tokens_around_text() {
    let mut v = vocab("llama", &["<unk>", "<s>", "</s>", "a"]);
    v.scores = vec![0.0; 4];
    v.bos_id = Some(1);
    v.eos_id = Some(2);
    let single = |v: &VocabData| parsed(v)["post_processor"]["single"].clone();
    assert_eq!(single(&v).as_array().unwrap().len(), 2);
    v.add_eos = Some(true);
    assert_eq!(single(&v).as_array().unwrap().len(), 3);
    v.add_bos = Some(false);
    v.add_eos = Some(false);
    assert!(parsed(&v)["post_processor"].is_null());
}

#[test]
fn turn_ends_are_special_however_they_are_typed() {
    for kind in [1, 4] {
        let mut v = vocab("gpt2", &["a", "<|endoftext|>", "<|im_end|>", "<b>", "<eot"]);
        v.token_types = vec![1, 3, kind, 1, 1];
        v.eos_id = Some(1);
        let added = parsed(&v)["added_tokens"].clone();
        let added: Vec<(&str, bool)> = added
            .as_array()
            .unwrap()
            .iter()
            .map(|t| (t["content"].as_str().unwrap(), t["special"] == true))
            .collect();
        // What merely begins like a mark, or is no end, stays text.
        assert_eq!(added, [("<|endoftext|>", true), ("<|im_end|>", true)]);
    }
}

/// What is read from a file is written as a vocabulary that is read the same.
#[test]
fn vocabularies_go_there_and_back() {
    let mut bytes = vocab("gpt2", &["a", "b", "ab", "<|end|>", "<tag>", "<|start|>"]);
    bytes.pre = Some("qwen2".into());
    bytes.merges = vec!["a b".into()];
    bytes.token_types = vec![1, 1, 1, 3, 4, 3];
    bytes.eos_id = Some(3);
    bytes.bos_id = Some(5);
    bytes.add_bos = Some(true);
    let mut pieces = vocab(
        "llama",
        &["<unk>", "<s>", "▁", "a", "b", "▁a", "ab", "▁ab", "</s>"],
    );
    pieces.scores = vec![0.0, 0.0, -5.0, -6.0, -7.0, -1.0, -2.0, -3.0, 0.0];
    pieces.token_types = vec![2, 3, 1, 1, 1, 1, 1, 1, 3];
    pieces.unk_id = Some(0);
    pieces.bos_id = Some(1);
    pieces.eos_id = Some(8);
    for data in [bytes, pieces] {
        let json = to_tokenizer_json(&data).unwrap();
        let token = |id: Option<u32>| {
            id.map(|id| carat_bundle::text::SpecialToken {
                content: data.tokens[id as usize].clone(),
                id: Some(id),
            })
        };
        let config = carat_bundle::text::TextConfig {
            bos: token(data.bos_id),
            eos: token(data.eos_id),
            unk: token(data.unk_id),
            config_eos_ids: data.eos_id.into_iter().collect(),
            ..Default::default()
        };
        let rows = data.tokens.len();
        let back = from_tokenizer_json(&json, &config, rows).unwrap();
        let (found, expected) = (to_tokenizer_json(&back).unwrap(), parsed(&data));
        let found: serde_json::Value = serde_json::from_slice(&found).unwrap();
        assert_eq!(found, expected);
        // Rows without a token get one that no text has.
        let padded = from_tokenizer_json(&json, &config, rows + 2).unwrap();
        assert_eq!(padded.tokens[rows + 1], format!("[PAD{}]", rows + 1));
        assert_eq!(padded.token_types[rows], 5);
        let fewer = from_tokenizer_json(&json, &config, rows - 1).unwrap_err();
        assert!(
            fewer.to_string().contains("rows of the embedding"),
            "{fewer}"
        );
        for (part, change) in [
            ("pre_tokenizer", serde_json::json!({"type": "Whitespace"})),
            ("normalizer", serde_json::json!({"type": "Lowercase"})),
            (
                "post_processor",
                serde_json::json!({"type": "BertProcessing"}),
            ),
        ] {
            let mut other = expected.clone();
            other[part] = change;
            let other = serde_json::to_vec(&other).unwrap();
            let refused = from_tokenizer_json(&other, &config, rows).unwrap_err();
            assert!(
                matches!(
                    refused,
                    VocabError::Inverse { .. } | VocabError::Length { .. }
                ),
                "{part}: {refused}"
            );
        }
    }
}
