//! `tojson` with the spelling of Python's `json.dumps`, not escaped for HTML.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::python::float_repr;

/// Deepest nesting written; data from outside is parsed with a bound below it.
const MAX_DEPTH: usize = 200;

struct Style {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// The filter: `value | tojson(ensure_ascii=false, indent=none, separators=none,
/// sort_keys=false)`.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    ensure_ascii: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = match ensure_ascii {
        Some(e) => e,
        None => kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(v) if v.is_none() || v.is_undefined() => None,
        Some(v) => Some(match v.as_str() {
            Some(s) => s.to_owned(),
            None => " ".repeat(indent_width(&v)?),
        }),
    };
    let separators = kwargs
        .get::<Option<Value>>("separators")?
        .filter(|v| !v.is_none());
    let (item_separator, key_separator) = match separators {
        Some(pair) => {
            let part = |i: usize| {
                pair.get_item_by_index(i)?
                    .as_str()
                    .map(str::to_owned)
                    .ok_or_else(|| invalid("tojson: separators must be two strings"))
            };
            (part(0)?, part(1)?)
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style {
        ensure_ascii,
        indent,
        item_separator,
        key_separator,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    write(state, &mut out, value, &style, 0)?;
    Ok(Value::from(out))
}

fn indent_width(value: &Value) -> Result<usize, Error> {
    usize::try_from(value.clone())
        .ok()
        .filter(|n| *n <= 64)
        .ok_or_else(|| invalid("tojson: indent must be a number from 0 to 64"))
}

fn invalid(detail: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

fn write(
    state: &State,
    out: &mut String,
    value: &Value,
    style: &Style,
    depth: usize,
) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid("tojson: value is nested too deeply"));
    }
    let before = out.len();
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_string(out, value.as_str().unwrap_or(""), style.ensure_ascii),
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            let mut items = Vec::with_capacity(keys.len());
            for key in keys {
                let item = value.get_item(&key)?;
                items.push((Some(key_text(&key)?), item));
            }
            write_items(state, out, &items, ('{', '}'), style, depth)?;
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<_> = value.try_iter()?.map(|v| (None, v)).collect();
            write_items(state, out, &items, ('[', ']'), style, depth)?;
        }
        kind => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("tojson: {kind} is not JSON"),
            ));
        }
    }
    // One unit of fuel per 64 bytes, as the engine charges for strings.
    state.consume_fuel(1 + (out.len() - before) as u64 / 64)
}

fn write_items(
    state: &State,
    out: &mut String,
    items: &[(Option<String>, Value)],
    (open, close): (char, char),
    style: &Style,
    depth: usize,
) -> Result<(), Error> {
    out.push(open);
    let newline = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    };
    for (i, (key, item)) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(&style.item_separator);
        }
        newline(out, depth + 1);
        if let Some(key) = key {
            write_string(out, key, style.ensure_ascii);
            out.push_str(&style.key_separator);
        }
        write(state, out, item, style, depth + 1)?;
    }
    if !items.is_empty() {
        newline(out, depth);
    }
    out.push(close);
    Ok(())
}

/// A key as `json.dumps` writes it: numbers, booleans and none become strings.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or("").to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Number => {
            let mut out = String::new();
            write_number(&mut out, key);
            out
        }
        _ => {
            return Err(invalid(
                "tojson: keys must be strings, numbers, booleans or none",
            ));
        }
    })
}

fn write_number(out: &mut String, value: &Value) {
    match f64::try_from(value.clone()) {
        Ok(f) if !value.is_integer() => out.push_str(&match f {
            f if f.is_nan() => "NaN".to_owned(),
            f if f.is_infinite() => if f > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
            f => float_repr(f),
        }),
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

fn write_string(out: &mut String, s: &str, ensure_ascii: bool) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            // Python writes DEL raw unless asked for ASCII, where it is ASCII too.
            c => out.push(c),
        }
    }
    out.push('"');
}
