//! Thinking and tool calls inside an answer.
//!
//! Models mark both in text, in a handful of dialects. The parser is tolerant: it
//! never fails, and what it does not understand stays in the content.

use serde_json::{Map, Value};

/// Tags around a thought, opening and closing.
pub(crate) const THINKING_TAGS: [(&str, &str); 4] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
];

/// Tags of calls that vocabularies have as tokens.
const CALL_TAGS: [&str; 5] = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
];

/// Whether a token is one of the marks that [`parse_reply`] looks for, or the
/// beginning of one. Many vocabularies have them as special tokens: a decode that
/// skips these too leaves an answer that cannot be taken apart.
pub fn is_reply_mark(token: &str) -> bool {
    let opened = THINKING_TAGS.iter().any(|(opening, closing)| {
        // `<|channel>` of `<|channel>thought`.
        let first = opening.find('>').map_or(*opening, |at| &opening[..=at]);
        token == first || token == *opening || token == *closing
    });
    opened || CALL_TAGS.contains(&token)
}

/// An answer taken apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    /// The thought, trimmed; `None` without one. An empty block is an empty string.
    pub thinking: Option<String>,
    /// What is said to the user, trimmed.
    pub content: String,
    /// Calls, in order.
    pub tool_calls: Vec<ToolCall>,
    /// The thought never ended: the answer was cut off by the token cap.
    pub thinking_truncated: bool,
}

/// A call of a tool that the model asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// Its arguments, as a rule an object.
    pub arguments: Value,
}

/// What is known about how the answer was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyOptions {
    /// The prompt ended inside an open thinking block
    /// (see [`ChatTemplate::opens_thinking`](crate::ChatTemplate::opens_thinking)).
    pub thinking_open: bool,
    /// An answer that is nothing but `{"name": …, "parameters": …}` is a call. Set
    /// it only where tools were offered: it could be a plain JSON answer.
    pub bare_json_calls: bool,
}

impl Default for ReplyOptions {
    fn default() -> Self {
        Self {
            thinking_open: false,
            bare_json_calls: true,
        }
    }
}

/// Takes an answer apart with the default options.
pub fn parse_reply(text: &str) -> Reply {
    parse_reply_with(text, &ReplyOptions::default())
}

/// Takes an answer apart. Thoughts are `<think>…</think>` and its relatives, also
/// when the opening tag was already in the prompt; calls are
/// `<tool_call>{json}</tool_call>`, `<tool_call><function=…>…`,
/// `[TOOL_CALLS][…]` and bare JSON.
pub fn parse_reply_with(text: &str, options: &ReplyOptions) -> Reply {
    let (thinking, thinking_truncated, rest) = split_thinking(text, options.thinking_open);
    let mut reply = Reply {
        thinking: thinking.map(|t| t.trim().to_owned()),
        thinking_truncated,
        ..Reply::default()
    };
    let content = take_tagged_calls(rest, &mut reply.tool_calls);
    let content = take_listed_calls(&content, &mut reply.tool_calls);
    let content = content.trim();
    if options.bare_json_calls
        && reply.tool_calls.is_empty()
        && let Some(calls) = bare_calls(content)
    {
        reply.tool_calls = calls;
    } else {
        reply.content = content.to_owned();
    }
    reply
}

/// The thought, whether it was cut off, and what follows.
fn split_thinking(text: &str, open: bool) -> (Option<&str>, bool, &str) {
    let start = text.trim_start();
    for (opening, closing) in THINKING_TAGS {
        if let Some(thought) = start.strip_prefix(opening) {
            return match thought.split_once(closing) {
                Some((thought, rest)) => (Some(thought), false, rest),
                None => (Some(thought), true, ""),
            };
        }
    }
    // The opening tag was in the prompt: everything up to the first closing tag.
    let first = THINKING_TAGS
        .iter()
        .filter_map(|(opening, closing)| {
            let at = text.find(closing)?;
            // A whole block in mid-answer is the answer quoting one.
            let quoted = !open && text[..at].contains(opening);
            (!quoted).then_some((at, closing.len()))
        })
        .min();
    match first {
        Some((at, len)) => (Some(&text[..at]), false, &text[at + len..]),
        None if open => (Some(text), true, ""),
        None => (None, false, text),
    }
}

/// Cuts `<tool_call>…</tool_call>` blocks out. A block that is no call stays.
fn take_tagged_calls(text: &str, calls: &mut Vec<ToolCall>) -> String {
    const OPEN: &str = "<tool_call>";
    const CLOSE: &str = "</tool_call>";
    let mut content = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(OPEN) {
        let after = &rest[at + OPEN.len()..];
        // The last block may lack its end when the closing tag is a stop.
        let (body, next) = after.split_once(CLOSE).unwrap_or((after, ""));
        let parsed = json_calls(body.trim()).or_else(|| xml_call(body).map(|c| vec![c]));
        match parsed {
            Some(parsed) => {
                content.push_str(&rest[..at]);
                calls.extend(parsed);
                rest = next;
            }
            None => {
                content.push_str(&rest[..at + OPEN.len()]);
                rest = after;
            }
        }
    }
    content.push_str(rest);
    content
}

/// Cuts `[TOOL_CALLS] [{…}]` or `[TOOL_CALLS]name[ARGS]{…}` off the end.
fn take_listed_calls(text: &str, calls: &mut Vec<ToolCall>) -> String {
    const MARK: &str = "[TOOL_CALLS]";
    let Some(at) = text.find(MARK) else {
        return text.to_owned();
    };
    let mut found = Vec::new();
    for segment in text[at..]
        .split(MARK)
        .map(str::trim)
        .filter(|s| !s.is_empty())
    {
        if let Some(parsed) = json_calls(segment) {
            found.extend(parsed);
        } else if let Some((name, arguments)) = named_call(segment) {
            found.push(ToolCall { name, arguments });
        } else {
            return text.to_owned();
        }
    }
    calls.extend(found);
    text[..at].to_owned()
}

/// `name[ARGS]{…}` or `name{…}`.
fn named_call(segment: &str) -> Option<(String, Value)> {
    let brace = segment.find('{')?;
    let name = segment[..brace].trim();
    let name = name.strip_suffix("[ARGS]").unwrap_or(name);
    let name = name.split("[CALL_ID]").next().unwrap_or(name).trim();
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || !name.chars().all(plain) {
        return None;
    }
    let arguments: Value = serde_json::from_str(segment[brace..].trim()).ok()?;
    Some((name.to_owned(), arguments))
}

/// A call or a list of calls as JSON, and nothing else.
fn json_calls(text: &str) -> Option<Vec<ToolCall>> {
    match serde_json::from_str(text).ok()? {
        Value::Array(items) if !items.is_empty() => items.into_iter().map(call_of).collect(),
        value @ Value::Object(_) => Some(vec![call_of(value)?]),
        _ => None,
    }
}

fn call_of(value: Value) -> Option<ToolCall> {
    let Value::Object(mut object) = value else {
        return None;
    };
    // `{"type": "function", "function": {"name": …}}`
    if let Some(Value::Object(inner)) = object.get_mut("function") {
        object = std::mem::take(inner);
    }
    let Some(Value::String(name)) = object.remove("name") else {
        return None;
    };
    let arguments = object
        .remove("arguments")
        .or_else(|| object.remove("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => Value::Object(Map::new()),
        // Arguments as JSON inside a string.
        Some(Value::String(s)) => serde_json::from_str(&s).unwrap_or(Value::String(s)),
        Some(other) => other,
    };
    Some(ToolCall { name, arguments })
}

/// `<function=name><parameter=key>value</parameter>…</function>`.
fn xml_call(body: &str) -> Option<ToolCall> {
    let (name, mut rest) = body.trim().strip_prefix("<function=")?.split_once('>')?;
    let mut arguments = Map::new();
    while let Some((_, after)) = rest.split_once("<parameter=") {
        let (key, after) = after.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        // Only what can be nothing but JSON is read as JSON; the rest is text.
        let value = match serde_json::from_str(value) {
            Ok(v @ (Value::Object(_) | Value::Array(_) | Value::Number(_) | Value::Bool(_))) => v,
            _ => Value::String(value.to_owned()),
        };
        arguments.insert(key.trim().to_owned(), value);
        rest = after;
    }
    Some(ToolCall {
        name: name.trim().to_owned(),
        arguments: Value::Object(arguments),
    })
}

/// The whole answer is a call: an object with a name and an argument object, or
/// several of them separated by `;` or newlines.
fn bare_calls(content: &str) -> Option<Vec<ToolCall>> {
    let content = content
        .strip_prefix("<|python_tag|>")
        .unwrap_or(content)
        .trim();
    if !content.starts_with(['{', '[']) {
        return None;
    }
    let mut calls = Vec::new();
    let mut stream = serde_json::Deserializer::from_str(content).into_iter::<Value>();
    let mut at = 0;
    loop {
        match stream.next() {
            None => break,
            Some(Err(_)) => return None,
            Some(Ok(value)) => {
                let items = match value {
                    Value::Array(items) if !items.is_empty() => items,
                    other => vec![other],
                };
                for item in items {
                    // A bare object counts only with an argument object.
                    let has_arguments = item.get("parameters").is_some_and(Value::is_object)
                        || item.get("arguments").is_some_and(Value::is_object);
                    calls.push(call_of(item).filter(|_| has_arguments)?);
                }
                at += stream.byte_offset();
                let rest = content.get(at..)?;
                let next = rest.trim_start_matches(|c: char| c == ';' || c.is_whitespace());
                at += rest.len() - next.len();
                stream = serde_json::Deserializer::from_str(next).into_iter::<Value>();
            }
        }
    }
    (!calls.is_empty()).then_some(calls)
}
