//! `config.json`, key by key, with a record of what was read.

use std::{cell::RefCell, collections::BTreeSet, path::Path, rc::Rc};

use serde_json::{Map, Value};

use crate::ImportError;

/// Keys that say nothing about the arithmetic of inference: training settings,
/// defaults of generation, bookkeeping of the tool that wrote the file. Keys
/// that text handling reads (special token ids) are listed too.
const IGNORABLE: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_from_model_config",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "head_dropout",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "use_cache",
];

/// An object of `config.json`. Reading a key marks it; [`finish`](Config::finish)
/// fails on keys that nobody read and that are not known to be ignorable.
pub(crate) struct Config<'a> {
    path: &'a Path,
    /// Names of the objects around this one, with a trailing dot.
    prefix: String,
    map: &'a Map<String, Value>,
    read: RefCell<BTreeSet<&'a str>>,
    /// Keys that the caller declared ignorable.
    allowed: &'a [String],
    notes: Rc<RefCell<Vec<String>>>,
}

impl<'a> Config<'a> {
    pub(crate) fn new(
        path: &'a Path,
        value: &'a Value,
        allowed: &'a [String],
    ) -> Result<Config<'a>, ImportError> {
        let map = value.as_object().ok_or_else(|| {
            ImportError::checkpoint(path, format!("expected an object, found {}", kind(value)))
        })?;
        Ok(Config {
            path,
            prefix: String::new(),
            map,
            read: RefCell::default(),
            allowed,
            notes: Rc::default(),
        })
    }

    /// Something that the user should know about the import.
    pub(crate) fn note(&self, text: impl Into<String>) {
        self.notes.borrow_mut().push(text.into());
    }

    pub(crate) fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut self.notes.borrow_mut())
    }

    /// The value of a key; `null` counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        let (k, v) = self.map.get_key_value(key)?;
        self.read.borrow_mut().insert(k);
        (!v.is_null()).then_some(v)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    pub(crate) fn error(&self, key: &str, problem: impl Into<String>) -> ImportError {
        ImportError::key(self.path, format!("{}{key}", self.prefix), problem)
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ImportError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => convert(v)
                .map(Some)
                .ok_or_else(|| self.error(key, format!("expected {expected}, found {}", kind(v)))),
        }
    }

    /// A required value.
    pub(crate) fn need<T>(&self, key: &str, value: Option<T>) -> Result<T, ImportError> {
        value.ok_or_else(|| self.error(key, "expected a value, found none"))
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ImportError> {
        self.typed(key, "a whole number", |v| {
            v.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ImportError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ImportError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ImportError> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, ImportError> {
        self.typed(key, "a list of numbers", |v| {
            v.as_array()?.iter().map(Value::as_f64).collect()
        })
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ImportError> {
        self.typed(key, "a list of strings", |v| {
            v.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Config<'a>>, ImportError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Config {
            path: self.path,
            prefix: format!("{}{key}.", self.prefix),
            map,
            read: RefCell::default(),
            allowed: self.allowed,
            notes: Rc::clone(&self.notes),
        }))
    }

    /// Reads keys that would change the arithmetic if they had another value.
    pub(crate) fn only(&self, key: &str, allowed: &[Value]) -> Result<(), ImportError> {
        match self.get(key) {
            None => Ok(()),
            Some(v) if allowed.contains(v) => Ok(()),
            Some(v) => {
                let list: Vec<String> = allowed.iter().map(Value::to_string).collect();
                Err(self.error(
                    key,
                    format!("only {} is supported, found {v}", list.join(" or ")),
                ))
            }
        }
    }

    /// Marks a key as understood and without effect.
    pub(crate) fn skip(&self, key: &str) {
        self.get(key);
    }

    /// Fails on keys that were not read and are not ignorable.
    pub(crate) fn finish(&self) -> Result<(), ImportError> {
        let read = self.read.borrow();
        let mut unknown = Vec::new();
        for key in self.map.keys() {
            let full = format!("{}{key}", self.prefix);
            if read.contains(key.as_str()) || IGNORABLE.contains(&key.as_str()) {
                continue;
            }
            if self.allowed.contains(&full) {
                self.note(format!("key {full} was ignored on request"));
            } else {
                unknown.push(full);
            }
        }
        if unknown.is_empty() {
            return Ok(());
        }
        unknown.sort();
        Err(ImportError::UnknownKeys {
            path: self.path.to_owned(),
            keys: unknown,
        })
    }
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(s) if s.len() <= 40 => format!("{s:?}"),
        Value::String(_) => "a string".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}
