//! What a checkpoint's declarations say about how it wants to be used.

use carat_bundle::text::{TextAssets, is_turn_end};

use crate::reply::THINKING_TAGS;

/// A thinking model is never given fewer new tokens than this: a shorter cap cuts
/// the thought off before the answer begins.
pub const THINKING_MIN_CAP: usize = 4096;

/// Whether the model thinks aloud before it answers: one of its templates opens
/// a thinking block or takes the switch for it.
pub fn is_thinking_model(assets: &TextAssets) -> bool {
    let config = &assets.config;
    config
        .chat_template
        .iter()
        .chain(config.named_templates.values())
        .any(|t| t.contains("enable_thinking") || THINKING_TAGS.iter().any(|(o, _)| t.contains(o)))
}

/// The cap on new tokens: what was asked for, raised to [`THINKING_MIN_CAP`] for
/// a model that is going to think.
pub fn generation_cap(requested: usize, thinks: bool) -> usize {
    if thinks {
        requested.max(THINKING_MIN_CAP)
    } else {
        requested
    }
}

/// Whether the model was made to chat: it has a chat template, or its
/// end-of-sequence token closes a turn, or its name says so.
pub fn is_instruct(assets: &TextAssets, name: Option<&str>) -> bool {
    let config = &assets.config;
    config.chat_template.is_some()
        || !config.named_templates.is_empty()
        || config.eos.as_ref().is_some_and(|t| closes_turn(&t.content))
        || name.is_some_and(named_instruct)
}

/// Whether a token ends a turn rather than a document.
fn closes_turn(token: &str) -> bool {
    is_turn_end(token) && !token.contains("text")
}

/// `…-Instruct`, `…-chat`, `…-it`: as whole words of the last path component.
fn named_instruct(name: &str) -> bool {
    let name = name.trim_end_matches(['/', '\\']);
    let base = name.rsplit(['/', '\\']).next().unwrap_or(name);
    base.to_ascii_lowercase()
        .split(|c: char| !c.is_ascii_alphanumeric())
        .any(|word| matches!(word, "instruct" | "chat" | "it" | "assistant" | "thinking"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use carat_bundle::text::SpecialToken;

    fn assets(template: Option<&str>, eos: &str) -> TextAssets {
        let mut a = TextAssets::default();
        a.config.chat_template = template.map(str::to_owned);
        a.config.eos = Some(SpecialToken {
            content: eos.to_owned(),
            id: None,
        });
        a
    }

    #[test]
    fn instruct_by_template_turn_end_or_name() {
        let base = assets(None, "<|endoftext|>");
        assert!(!is_instruct(&base, Some("org/some-135M")));
        assert!(!is_instruct(&base, Some("org/italic-orbit")));
        assert!(is_instruct(&base, Some("org/Some-135M-Instruct")));
        assert!(is_instruct(&base, Some("models/some-270m-it/")));
        assert!(is_instruct(&assets(None, "<|im_end|>"), None));
        assert!(is_instruct(&assets(Some("{{ x }}"), "</s>"), None));
    }

    #[test]
    fn thinking_by_template() {
        assert!(is_thinking_model(&assets(
            Some("{% if enable_thinking %}"),
            ""
        )));
        assert!(is_thinking_model(&assets(Some("{{ '<think>\\n' }}"), "")));
        // Templates of answer-only models still cut old thoughts off.
        assert!(!is_thinking_model(&assets(
            Some("{{ c.split('</think>')[-1] }}"),
            ""
        )));
        assert_eq!(generation_cap(256, true), THINKING_MIN_CAP);
        assert_eq!(generation_cap(8000, true), 8000);
        assert_eq!(generation_cap(256, false), 256);
    }
}
