//! Bodies of the fuzz targets; ordinary tests replay their corpora.

use carat_bundle::text::{SpecialToken, TextAssets};

use crate::{AddSpecial, ChatTemplate, Message, RenderInput, StreamDecoder, Tokenizer};

/// Any bytes as `tokenizer.json`: either an error or a tokenizer that encodes and
/// decodes without a panic, and whose stream adds up to its full decode.
pub fn tokenizer(data: &[u8]) {
    let mut assets = TextAssets {
        tokenizer_json: Some(data.to_vec()),
        ..TextAssets::default()
    };
    assets.config.eos = Some(SpecialToken {
        content: "</s>".into(),
        id: None,
    });
    let Ok(tokenizer) = Tokenizer::from_assets(&assets) else {
        return;
    };
    for text in ["", "Hello, world! 123\n\n  日本語 🙂</s>", "\u{0}a\u{fffd}"] {
        let Ok(ids) = tokenizer.encode(text, AddSpecial::Yes) else {
            continue;
        };
        let _ = tokenizer.encode_plain(text, AddSpecial::No);
        let Ok(full) = tokenizer.decode(&ids, false) else {
            continue;
        };
        let mut stream = StreamDecoder::new(&tokenizer, false);
        let mut out = String::new();
        for id in ids {
            match stream.push(id) {
                Ok(chunk) => out.extend(chunk),
                Err(_) => return,
            }
        }
        if let Ok(rest) = stream.flush() {
            out.extend(rest);
            assert_eq!(out, full, "the stream differs from the full decode");
        }
    }
}

/// Any text as a chat template: an error or a text, within the limits.
pub fn template(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else {
        return;
    };
    let mut assets = TextAssets::default();
    assets.config.chat_template = Some(source.to_owned());
    let Ok(Some(template)) = ChatTemplate::from_assets(&assets) else {
        return;
    };
    let tools = serde_json::json!([{"type": "function", "function": {"name": "f",
        "description": "d", "parameters": {"type": "object", "properties": {}}}}]);
    let messages = [
        Message::new("system", "s"),
        Message::new("user", "u <x> & \"y\""),
        Message::new("assistant", "<think>t</think>a"),
        Message::new("user", "v"),
    ];
    for tools in [None, Some(&tools)] {
        let _ = template.render(&RenderInput {
            messages: &messages,
            tools,
            add_generation_prompt: true,
            enable_thinking: Some(false),
            ..RenderInput::default()
        });
    }
}
