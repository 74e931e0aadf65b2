//! Conversations as templates see them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::TextError;

/// One message of a conversation: a JSON object with at least a `role`. Templates
/// see exactly the fields that it has, in their order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Message(Map<String, Value>);

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let mut map = Map::new();
        map.insert("role".into(), Value::String(role.into()));
        map.insert("content".into(), Value::String(content.into()));
        Self(map)
    }

    /// A message from its JSON fields.
    pub fn from_fields(fields: Map<String, Value>) -> Self {
        Self(fields)
    }

    /// Adds or replaces a field, such as `tool_calls`.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: Value) -> Self {
        self.0.insert(key.into(), value);
        self
    }

    /// All fields.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }

    /// `role`, empty where it is missing.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or("")
    }

    /// The text of the content: the string itself, or the text parts joined.
    /// `None` without content, or where a part is no text.
    pub fn text(&self) -> Option<String> {
        match self.0.get("content")? {
            Value::String(s) => Some(s.clone()),
            Value::Array(parts) => joined(parts),
            _ => None,
        }
    }
}

/// What a prompt is rendered from.
#[derive(Clone, Debug, Default)]
pub struct RenderInput<'a> {
    /// The conversation so far.
    pub messages: &'a [Message],
    /// Tools on offer: a list of JSON function descriptions.
    pub tools: Option<&'a Value>,
    /// End with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// The template's thinking switch; `None` leaves it undefined.
    pub enable_thinking: Option<bool>,
    /// Further variables, such as `date_string`.
    pub extra: Map<String, Value>,
    /// The time for templates that print a date, in seconds since 1970 (UTC);
    /// `None` is now.
    pub now: Option<i64>,
}

/// Text parts joined; `None` if one of the parts is no text.
fn joined(parts: &[Value]) -> Option<String> {
    parts
        .iter()
        .map(|p| match p {
            Value::String(s) => Some(s.as_str()),
            part => part.get("text").and_then(Value::as_str),
        })
        .collect()
}

/// Whether a template looks into content that is given in parts. One that does
/// not would print the list itself.
pub(super) fn reads_parts(source: &str) -> bool {
    ["'text'", "\"text\"", ".text", "is iterable", "is sequence"]
        .iter()
        .any(|s| source.contains(s))
}

/// The messages as one JSON list. Content in text parts is joined for templates
/// that take only strings.
pub(super) fn values(messages: &[Message], parts: bool) -> Result<Value, TextError> {
    let mut out = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let bad = |problem: &str| TextError::BadMessage {
            index,
            problem: problem.to_owned(),
        };
        if !message.0.get("role").is_some_and(Value::is_string) {
            return Err(bad("has no \"role\" string"));
        }
        let mut fields = message.0.clone();
        if !parts && let Some(Value::Array(list)) = fields.get("content") {
            let text = joined(list).ok_or_else(|| {
                bad("has parts other than text, but the template takes only text")
            })?;
            fields.insert("content".into(), Value::String(text));
        }
        out.push(Value::Object(fields));
    }
    Ok(Value::Array(out))
}
