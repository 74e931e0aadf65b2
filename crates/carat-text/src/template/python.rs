//! Values printed as Python prints them, and a few of its string methods.

use std::fmt::Write as _;

use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

const MAX_DEPTH: usize = 200;

/// `repr` of a finite or special float: the shortest digits that read back,
/// scientific below 1e-4 and from 1e16 on.
pub(super) fn float_repr(f: f64) -> String {
    if f.is_nan() {
        return "nan".to_owned();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{f:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if f != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}e{sign}{:02}", exponent.abs())
    } else {
        let plain = format!("{f}");
        if plain.contains('.') {
            plain
        } else {
            format!("{plain}.0")
        }
    }
}

/// `str(value)`. Each element costs fuel: values that share parts print far
/// longer than they are.
pub(super) fn str_of(state: &State, value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_str().unwrap_or("").to_owned()),
        _ => {
            let mut out = String::new();
            write_repr(state, &mut out, value, 0)?;
            Ok(out)
        }
    }
}

/// Whether Python prints the value otherwise than the engine does.
pub(super) fn prints_differently(value: &Value) -> bool {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Map | ValueKind::Seq => true,
        ValueKind::Number => !value.is_integer(),
        _ => false,
    }
}

fn write_repr(state: &State, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    let before = out.len();
    if depth > MAX_DEPTH {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "value is nested too deeply to print",
        ));
    }
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(f) => out.push_str(&float_repr(f)),
            Err(_) => {
                let _ = write!(out, "{value}");
            }
        },
        ValueKind::String => write_string(out, value.as_str().unwrap_or("")),
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() {
                ('(', ')')
            } else {
                ('[', ']')
            };
            out.push(open);
            let mut count = 0;
            for item in value.try_iter()? {
                if count > 0 {
                    out.push_str(", ");
                }
                write_repr(state, out, &item, depth + 1)?;
                count += 1;
            }
            if value.is_tuple() && count == 1 {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                write_repr(state, out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(state, out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    state.consume_fuel(1 + (out.len() - before) as u64 / 64)
}

/// `repr` of a string: single quotes unless only double ones avoid escapes.
fn write_string(out: &mut String, s: &str) {
    let quote = if s.contains('\'') && !s.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || c as u32 == 0x7f => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Whether a format string asks for a field so wide (or nested, so that the width
/// is a value) that it is not for printing: the engine pays for a field only after
/// it was made.
fn wide_format(format: &str) -> bool {
    format.split('{').skip(1).any(|field| {
        let spec = field.split_once('}').map_or(field, |(spec, _)| spec);
        let nested = spec.contains(':') && !field.contains('}');
        let digits = spec.bytes().fold((0usize, 0usize), |(run, most), b| {
            let run = if b.is_ascii_digit() { run + 1 } else { 0 };
            (run, most.max(run))
        });
        nested || digits.1 > 4
    })
}

/// Python methods on strings that the engine's own compatibility layer lacks.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(s) = value.as_str() else {
        return unknown_method_callback(state, value, name, args);
    };
    match name {
        "format" if wide_format(s) => Err(Error::new(
            ErrorKind::InvalidOperation,
            "format: widths and precisions above 9999 are not supported",
        )),
        "removeprefix" => {
            let (affix,): (&str,) = from_args(args)?;
            Ok(Value::from(s.strip_prefix(affix).unwrap_or(s)))
        }
        "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            Ok(Value::from(s.strip_suffix(affix).unwrap_or(s)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            if separator.is_empty() {
                return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
            }
            let last = name == "rpartition";
            let found = if last {
                s.rsplit_once(separator)
            } else {
                s.split_once(separator)
            };
            let parts = match found {
                Some((head, tail)) => [head, separator, tail],
                None if last => ["", "", s],
                None => [s, "", ""],
            };
            let parts: Vec<Value> = parts.into_iter().map(Value::from).collect();
            Ok(Value::from(Tuple::from(parts)))
        }
        "rsplit" if !args.is_empty() => {
            let (separator, most): (&str, Option<i64>) = from_args(args)?;
            if separator.is_empty() {
                return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
            }
            let mut parts: Vec<&str> = match most.map(usize::try_from) {
                Some(Ok(n)) => s.rsplitn(n.saturating_add(1), separator).collect(),
                _ => s.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_prints_them() {
        for (f, s) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5, "-2.5"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float_repr(f), s);
        }
    }
}
