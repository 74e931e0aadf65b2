//! The Jinja environment: the settings, filters and functions of the Hugging Face
//! renderer, and the bounds of a sandbox.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Serde};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter};
use serde_json::Map;

use super::clock::Moment;
use super::{json, python};
use crate::error::TextError;

/// Largest template source; the largest published ones are near 20 KB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Templates in one checkpoint.
const MAX_TEMPLATES: usize = 64;
/// Instructions (and 64-byte units of text) that one rendering may cost. A
/// conversation of a thousand messages costs the published templates some
/// 100,000.
const FUEL: u64 = 1_000_000;
/// Nested macro calls. Templates recurse over JSON schemas, a few levels deep.
const RECURSION: usize = 64;
/// Stack of the rendering thread. A template can nest values about as deep as it
/// has fuel for, 150,000 levels; comparing and dropping them takes some 300 bytes
/// of stack each. Only touched pages count.
const STACK_BYTES: usize = 256 << 20;
/// Longest rendering. Fuel covers nearly everything a template can do, but the
/// engine joins lists without paying for it, and a list joined with itself forty
/// times has no end. (The thread is then left behind: there is no way to stop it.)
const DEADLINE: Duration = Duration::from_secs(10);
/// Largest rendered prompt.
const MAX_OUTPUT_BYTES: usize = 32 << 20;

/// What `raise_exception` was called with.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Compiles templates by name.
pub(super) fn build(sources: &BTreeMap<String, String>) -> Result<Environment<'static>, TextError> {
    let bad = |name: &str, problem: String| TextError::BadTemplate {
        name: name.to_owned(),
        problem,
    };
    if sources.len() > MAX_TEMPLATES {
        return Err(bad(
            "",
            format!("{} templates, the limit is {MAX_TEMPLATES}", sources.len()),
        ));
    }
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|e| bad("", e.to_string()))?;
    env.set_syntax(syntax);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION);
    env.set_unknown_method_callback(python::method);
    env.set_formatter(|out, state, value| {
        if python::prints_differently(value) {
            let text = python::str_of(state, value)?;
            out.write_str(&text).map_err(|_| write_failure())
        } else {
            escape_formatter(out, state, value)
        }
    });
    env.add_filter("tojson", json::tojson);
    env.add_filter("string", string_filter);
    env.add_function("raise_exception", raise_exception);
    for (name, source) in sources {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(bad(
                name,
                format!(
                    "has {} bytes, the limit is {MAX_SOURCE_BYTES}",
                    source.len()
                ),
            ));
        }
        env.add_template_owned(name.clone(), without_generation_tags(source))
            .map_err(|e| bad(name, describe(&e)))?;
    }
    Ok(env)
}

/// Renders a template on a thread of its own, for its stack and its deadline.
pub(super) fn render(
    env: &Arc<Environment<'static>>,
    name: &str,
    context: Map<String, serde_json::Value>,
    now: Moment,
) -> Result<String, TextError> {
    let failed = |problem: String| TextError::Render {
        name: name.to_owned(),
        problem,
    };
    let text = {
        let (env, name) = (Arc::clone(env), name.to_owned());
        within(DEADLINE, move || render_here(&env, &name, &context, now)).map_err(failed)??
    };
    if text.len() > MAX_OUTPUT_BYTES {
        return Err(failed(format!(
            "rendered {} bytes, the limit is {MAX_OUTPUT_BYTES}",
            text.len()
        )));
    }
    Ok(text)
}

fn render_here(
    env: &Environment<'static>,
    name: &str,
    context: &Map<String, serde_json::Value>,
    now: Moment,
) -> Result<String, TextError> {
    let failed = |e: Error| match raised(&e) {
        Some(message) => TextError::TemplateRaised { message },
        None => TextError::Render {
            name: name.to_owned(),
            problem: describe(&e),
        },
    };
    // The clock is an argument of the rendering, not of the environment.
    let clock = Value::from_function(move |format: &str| {
        now.format(format)
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, e))
    });
    let context = Value::from(Serde(context));
    let context = minijinja::context! { strftime_now => clock, ..context };
    let template = env.get_template(name).map_err(failed)?;
    template.render(context).map_err(failed)
}

/// Runs `f` on a thread with a large stack; an error if it does not end in time.
fn within<T: Send + 'static>(
    deadline: Duration,
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new()
        .name("chat template".into())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            // Nobody listens any more after the deadline.
            let _ = sender.send(f());
        })
        .map_err(|e| format!("no thread to render on: {e}"))?;
    receiver.recv_timeout(deadline).map_err(|e| match e {
        mpsc::RecvTimeoutError::Timeout => format!("took longer than {deadline:?}"),
        mpsc::RecvTimeoutError::Disconnected => "the template engine gave up".to_owned(),
    })
}

fn write_failure() -> Error {
    Error::new(ErrorKind::WriteFailure, "could not write the rendered text")
}

fn string_filter(state: &State, value: &Value) -> Result<Value, Error> {
    Ok(Value::from(python::str_of(state, value)?))
}

fn raise_exception(state: &State, args: Rest<Value>) -> Result<Value, Error> {
    let message = match args.first() {
        Some(value) => python::str_of(state, value)?,
        None => String::new(),
    };
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(e) = source {
        if let Some(Raised(message)) = e.downcast_ref::<Raised>() {
            return Some(message.clone());
        }
        source = e.source();
    }
    None
}

/// The error and its causes in one line.
fn describe(error: &Error) -> String {
    let mut out = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(e) = source {
        out.push_str(": ");
        out.push_str(&e.to_string());
        source = e.source();
    }
    out
}

/// Replaces `{% generation %}` blocks, which mark the assistant's words for
/// training and print their body, by plain scopes with the same whitespace
/// control.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        // Inside a comment nothing is a tag, and nothing printed either.
        let inner = tag[2..].trim_start_matches(['-', '+']);
        let marker = &tag[2..tag.len() - inner.len()];
        let word = inner.trim_start();
        let replaced = [("endgeneration", "endwith"), ("generation", "with")]
            .into_iter()
            .find_map(|(name, by)| {
                let after = word.strip_prefix(name)?.trim_start();
                let close = after.trim_start_matches(['-', '+']);
                close.starts_with("%}").then_some((by, after))
            });
        match replaced {
            Some((by, after)) => {
                out.push_str("{%");
                out.push_str(marker);
                out.push(' ');
                out.push_str(by);
                out.push(' ');
                rest = after;
            }
            None => {
                out.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_too_long_or_panics_is_an_error() {
        assert_eq!(within(DEADLINE, || 5), Ok(5));
        let slow = within(Duration::from_millis(20), || {
            thread::sleep(Duration::from_secs(2));
        });
        assert_eq!(slow.unwrap_err(), "took longer than 20ms");
        let broken: Result<(), _> = within(DEADLINE, || panic!("on purpose"));
        assert_eq!(broken.unwrap_err(), "the template engine gave up");
    }

    #[test]
    fn generation_tags_become_scopes() {
        assert_eq!(
            without_generation_tags(
                "a{%- generation -%} b {% endgeneration %}c{% if generation %}"
            ),
            "a{%- with -%} b {% with %}c{% if generation %}".replace("{% with %}", "{% endwith %}")
        );
        assert_eq!(without_generation_tags("{%"), "{%");
        assert_eq!(without_generation_tags("{% generation"), "{% generation");
        assert_eq!(without_generation_tags("{%-+é"), "{%-+é");
    }
}
