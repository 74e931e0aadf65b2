//! The stop set is the union of all declarations.

mod common;

use carat_bundle::text::SpecialToken;
use carat_text::{
    ChatTemplate, StopFinding, StopReason, StopSet, Tokenizer, check_stops, is_instruct,
    is_thinking_model,
};

#[test]
fn the_shipped_models_declare_the_wrong_end_and_still_stop() {
    for assets in [common::dense(), common::ternary()] {
        let tokenizer = Tokenizer::from_assets(&assets).unwrap();
        let stops = StopSet::from_assets(&tokenizer, &assets);
        assert_eq!(
            stops.ids().iter().copied().collect::<Vec<_>>(),
            [2051, 2053]
        );
        assert!(stops.reasons(2051).contains(&StopReason::Tokenizer));
        assert!(stops.reasons(2053).contains(&StopReason::TurnEnd));
        assert!(!stops.reasons(2053).contains(&StopReason::Tokenizer));
        let template = ChatTemplate::require(&assets, None).unwrap();
        let findings = check_stops(&template, &tokenizer, &stops);
        assert_eq!(
            findings,
            [StopFinding::DeclaredEosUnused {
                declared: "<|endoftext|>".into(),
                turn_ends: vec!["<|im_end|>".into()],
            }]
        );
        assert!(is_instruct(&assets, None));
        assert!(is_thinking_model(&assets));
    }
    let dense = common::dense();
    let tokenizer = Tokenizer::from_assets(&dense).unwrap();
    let stops = StopSet::from_assets(&tokenizer, &dense);
    assert!(stops.reasons(2053).contains(&StopReason::GenerationConfig));
}

#[test]
fn a_model_that_cannot_stop_is_found_out() {
    let assets = common::dense();
    let tokenizer = Tokenizer::from_assets(&assets).unwrap();
    let template = ChatTemplate::require(&assets, None).unwrap();
    let mut only_eos = StopSet::default();
    only_eos.add_id(2051, StopReason::Tokenizer);
    only_eos.add_id(70_000, StopReason::Config);
    let findings = check_stops(&template, &tokenizer, &only_eos);
    assert!(matches!(findings[0], StopFinding::UnknownId { id: 70_000 }));
    assert!(
        matches!(&findings[1], StopFinding::NoStopAfterAnswer { tail } if tail == "<|im_end|>\n"),
        "{findings:?}"
    );
    // A stop string will do.
    only_eos.add_string("<|im_end|>");
    let findings = check_stops(&template, &tokenizer, &only_eos);
    assert!(matches!(findings[1], StopFinding::DeclaredEosUnused { .. }));
}

#[test]
fn a_fitting_declaration_has_no_findings() {
    let mut assets = common::dense();
    assets.config.eos = Some(SpecialToken {
        content: "<|im_end|>".into(),
        id: None,
    });
    let tokenizer = Tokenizer::from_assets(&assets).unwrap();
    let stops = StopSet::from_assets(&tokenizer, &assets);
    let template = ChatTemplate::require(&assets, None).unwrap();
    assert_eq!(check_stops(&template, &tokenizer, &stops), []);
}

#[test]
fn a_declared_end_of_several_tokens_is_a_stop_string() {
    let mut assets = common::dense();
    assets.config.eos = Some(SpecialToken {
        content: "\n\nUser:".into(),
        id: None,
    });
    let tokenizer = Tokenizer::from_assets(&assets).unwrap();
    let stops = StopSet::from_assets(&tokenizer, &assets);
    assert_eq!(stops.strings(), ["\n\nUser:"]);
}

#[test]
fn a_template_that_fails_is_reported() {
    let mut assets = common::dense();
    assets.config.chat_template = Some("{{ raise_exception('never') }}".into());
    let tokenizer = Tokenizer::from_assets(&assets).unwrap();
    let stops = StopSet::from_assets(&tokenizer, &assets);
    let template = ChatTemplate::require(&assets, None).unwrap();
    let findings = check_stops(&template, &tokenizer, &stops);
    assert!(
        matches!(&findings[..], [StopFinding::NotRendered { problem }] if problem.contains("never"))
    );
}

/// A tokenizer.json whose added tokens are called special only where `special`.
fn with_added(assets: &mut carat_bundle::text::TextAssets, special: bool, tokens: &[&str]) {
    let mut json: serde_json::Value =
        serde_json::from_slice(assets.tokenizer_json.as_deref().unwrap()).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (i, token) in tokens.iter().enumerate() {
        match added.iter_mut().find(|t| t["content"] == *token) {
            Some(known) => known["special"] = special.into(),
            None => added.push(serde_json::json!({
                "id": 2056 + i, "content": token, "special": special,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            })),
        }
    }
    assets.tokenizer_json = Some(json.to_string().into_bytes());
}

#[test]
fn turn_ends_that_are_not_called_special_still_stop() {
    let mut assets = common::dense();
    with_added(&mut assets, false, &["<|im_end|>"]);
    assets.config.generation_eos_ids.clear();
    assets.config.config_eos_ids.clear();
    let tokenizer = Tokenizer::from_assets(&assets).unwrap();
    assert!(!tokenizer.is_special(2053));
    let stops = StopSet::from_assets(&tokenizer, &assets);
    assert_eq!(stops.reasons(2053), [StopReason::TurnEnd]);
    // `<think>` is an added token too, and no end.
    assert!(!stops.contains(2054));
}

#[test]
fn marks_of_thoughts_and_calls_survive_where_they_are_special() {
    let mut assets = common::dense();
    let marks = ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"];
    with_added(&mut assets, true, &marks);
    let tokenizer = Tokenizer::from_assets(&assets).unwrap();
    assert!(tokenizer.is_special(2056));
    let text = "[THINK]Hm.[/THINK]Wait.<|im_start|>[TOOL_CALLS]clock[ARGS]{}";
    let ids = tokenizer.encode(text, carat_text::AddSpecial::No).unwrap();
    let read = |ids: &[u32]| {
        let mut stream = carat_text::StreamDecoder::for_reply(&tokenizer);
        let mut out = String::new();
        for id in ids {
            out.extend(stream.push(*id).unwrap());
        }
        out.extend(stream.flush().unwrap());
        carat_text::parse_reply(&out)
    };
    let reply = read(&ids);
    assert_eq!(reply.thinking.as_deref(), Some("Hm."));
    assert_eq!(reply.content, "Wait.", "no other special token is shown");
    assert_eq!(reply.tool_calls.len(), 1);
    assert_eq!(reply.tool_calls[0].name, "clock");
    // Cut off inside the thought.
    assert!(read(&ids[..2]).thinking_truncated);
}
