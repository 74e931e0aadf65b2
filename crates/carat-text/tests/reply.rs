//! Thinking and tool calls in the dialects that models speak.

use carat_text::{Reply, ReplyOptions, ToolCall, parse_reply, parse_reply_with};
use proptest::prelude::*;
use serde_json::json;

fn call(name: &str, arguments: serde_json::Value) -> ToolCall {
    ToolCall {
        name: name.into(),
        arguments,
    }
}

#[test]
fn thoughts() {
    for (text, thinking, content, truncated) in [
        ("Paris.", None, "Paris.", false),
        (
            "<think>\nHm.\n</think>\n\nParis.",
            Some("Hm."),
            "Paris.",
            false,
        ),
        ("<think>\n\n</think>\n\nParis.", Some(""), "Paris.", false),
        ("\n<think>Hm", Some("Hm"), "", true),
        // The opening tag was in the prompt.
        ("Hm.\n</think>\nParis.", Some("Hm."), "Paris.", false),
        ("[THINK]Hm[/THINK]Paris.", Some("Hm"), "Paris.", false),
        (
            "<|channel>thought\nHm<channel|>Paris.",
            Some("Hm"),
            "Paris.",
            false,
        ),
        // An answer about the tags is no thought.
        (
            "Use <think> and </think>.",
            None,
            "Use <think> and </think>.",
            false,
        ),
        ("", None, "", false),
    ] {
        let r = parse_reply(text);
        assert_eq!(
            (
                r.thinking.as_deref(),
                r.content.as_str(),
                r.thinking_truncated
            ),
            (thinking, content, truncated),
            "{text:?}"
        );
        assert!(r.tool_calls.is_empty());
    }
    let open = ReplyOptions {
        thinking_open: true,
        ..ReplyOptions::default()
    };
    let r = parse_reply_with("still thinking", &open);
    assert_eq!(r.thinking.as_deref(), Some("still thinking"));
    assert!(r.thinking_truncated && r.content.is_empty());
    let r = parse_reply_with("a <think> b</think>c", &open);
    assert_eq!(
        (r.thinking.as_deref(), r.content.as_str()),
        (Some("a <think> b"), "c")
    );
}

#[test]
fn tagged_calls() {
    let r = parse_reply(
        "<think>t</think>\nLooking.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n<tool_call>{\"name\": \"g\"}</tool_call>",
    );
    assert_eq!(r.thinking.as_deref(), Some("t"));
    assert_eq!(r.content, "Looking.");
    assert_eq!(
        r.tool_calls,
        [call("f", json!({"x": 1})), call("g", json!({}))]
    );
    // Without its closing tag (a stop), with arguments as a string, nested.
    let r = parse_reply(
        "<tool_call>{\"function\": {\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 2}\"}}",
    );
    assert_eq!(r.tool_calls, [call("f", json!({"x": 2}))]);
    // Malformed: it stays in the content, and the next one is still found.
    let r = parse_reply("<tool_call>{oops</tool_call> and <tool_call>{\"name\":\"g\"}</tool_call>");
    assert_eq!(r.content, "<tool_call>{oops</tool_call> and");
    assert_eq!(r.tool_calls, [call("g", json!({}))]);
    let r = parse_reply(
        "<tool_call>\n<function=run>\n<parameter=code>\nprint(\"1 < 2\")\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    );
    assert_eq!(
        r.tool_calls,
        [call("run", json!({"code": "print(\"1 < 2\")", "n": 3}))]
    );
}

#[test]
fn listed_calls() {
    let r = parse_reply(
        "Sure. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
    );
    assert_eq!(r.content, "Sure.");
    assert_eq!(
        r.tool_calls,
        [call("f", json!({"x": 1})), call("g", json!({}))]
    );
    let r = parse_reply("[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g{}");
    assert_eq!(
        r.tool_calls,
        [call("f", json!({"x": 1})), call("g", json!({}))]
    );
    let r = parse_reply("[TOOL_CALLS] nonsense");
    assert_eq!(r.content, "[TOOL_CALLS] nonsense");
}

#[test]
fn bare_calls() {
    for text in [
        "{\"name\": \"f\", \"parameters\": {\"x\": 1}}",
        "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"x\": 1}}",
        "[{\"name\": \"f\", \"arguments\": {\"x\": 1}}]",
    ] {
        let r = parse_reply(text);
        assert_eq!(r.tool_calls, [call("f", json!({"x": 1}))], "{text}");
        assert_eq!(r.content, "");
    }
    let two = "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}";
    assert_eq!(parse_reply(two).tool_calls.len(), 2);
    for text in [
        "{\"name\": \"Ann\", \"age\": 3}",
        "{\"name\": \"f\", \"parameters\": {}} and so on",
        "{",
        "[]",
        "[1]",
    ] {
        let r = parse_reply(text);
        assert!(r.tool_calls.is_empty(), "{text}");
        assert_eq!(r.content, text);
    }
    let off = ReplyOptions {
        bare_json_calls: false,
        ..ReplyOptions::default()
    };
    assert!(parse_reply_with(two, &off).tool_calls.is_empty());
}

proptest! {
    #[test]
    fn never_panics(parts in prop::collection::vec(prop_oneof![
        Just("<think>"), Just("</think>"), Just("<tool_call>"), Just("</tool_call>"),
        Just("[TOOL_CALLS]"), Just("[ARGS]"), Just("{\"name\":\"f\",\"arguments\":{}}"),
        Just("<function=f>"), Just("<parameter=x>"), Just("</parameter>"), Just("{"), Just("}"),
        Just("[THINK]"), Just("é🙂"), Just("\n"), Just(" "), Just(";"), Just("a"),
    ], 0..20), open: bool) {
        let text = parts.concat();
        let options = ReplyOptions { thinking_open: open, ..ReplyOptions::default() };
        let r: Reply = parse_reply_with(&text, &options);
        prop_assert!(r.content.len() <= text.len());
    }
}
