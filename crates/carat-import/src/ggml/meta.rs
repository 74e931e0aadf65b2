//! Metadata of one architecture, key by key, with a record of what was read.

use std::{cell::RefCell, collections::BTreeSet, path::Path};

use crate::{
    ImportError,
    gguf::{Array, Gguf, Value},
    source::RawTensors,
};

/// Keys below the architecture's prefix that do not change the arithmetic.
const IGNORABLE: &[&str] = &["rope.scaling.finetuned", "tensor_data_layout", "vocab_size"];

/// The metadata below `<architecture>.` and the tensors that carry settings.
/// Reading a key or a tensor marks it; [`finish`](Meta::finish) fails on keys
/// that nobody read. Keys outside the prefix describe the file, not the model.
pub(crate) struct Meta<'a> {
    path: &'a Path,
    gguf: &'a Gguf,
    architecture: &'a str,
    tensors: &'a RawTensors,
    read: RefCell<BTreeSet<String>>,
    consumed: RefCell<BTreeSet<String>>,
}

impl<'a> Meta<'a> {
    pub(crate) fn new(
        path: &'a Path,
        gguf: &'a Gguf,
        architecture: &'a str,
        tensors: &'a RawTensors,
    ) -> Meta<'a> {
        Meta {
            path,
            gguf,
            architecture,
            tensors,
            read: RefCell::default(),
            consumed: RefCell::default(),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        let full = format!("{}.{key}", self.architecture);
        let value = self.gguf.get(&full);
        self.read.borrow_mut().insert(full);
        value
    }

    pub(crate) fn error(&self, key: &str, problem: impl Into<String>) -> ImportError {
        ImportError::key(self.path, format!("{}.{key}", self.architecture), problem)
    }

    /// A required value.
    pub(crate) fn need<T>(&self, key: &str, value: Option<T>) -> Result<T, ImportError> {
        value.ok_or_else(|| self.error(key, "expected a value, found none"))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ImportError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => convert(v).map(Some).ok_or_else(|| {
                self.error(key, format!("expected {expected}, found {}", describe(v)))
            }),
        }
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ImportError> {
        self.typed(key, "a whole number", as_size)
    }

    pub(crate) fn need_size(&self, key: &str) -> Result<usize, ImportError> {
        self.need(key, self.size(key)?)
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ImportError> {
        self.typed(key, "a floating-point number", Value::as_f64)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ImportError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A size that may differ from layer to layer: one number or an array.
    pub(crate) fn per_layer(
        &self,
        key: &str,
        layers: usize,
    ) -> Result<Option<Vec<usize>>, ImportError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let Some(array) = value.as_array() else {
            return Ok(self.size(key)?.map(|n| vec![n; layers]));
        };
        if array.len() != layers {
            return Err(self.error(
                key,
                format!("expected one value or {layers}, found {}", array.len()),
            ));
        }
        let values: Option<Vec<usize>> = (0..layers)
            .map(|i| array.get(i).as_ref().and_then(as_size))
            .collect();
        values
            .map(Some)
            .ok_or_else(|| self.error(key, "expected whole numbers in the array"))
    }

    /// Refuses a feature that the key switches on.
    pub(crate) fn only_zero(&self, key: &str) -> Result<(), ImportError> {
        match self.size(key)? {
            None | Some(0) => Ok(()),
            Some(n) => Err(self.error(key, format!("only 0 is supported, found {n}"))),
        }
    }

    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.tensors.0.contains_key(name)
    }

    /// The values of a tensor that carries settings, and not weights.
    pub(crate) fn factors(&self, name: &str) -> Result<Option<Vec<f32>>, ImportError> {
        let Some(stored) = self.tensors.0.get(name) else {
            return Ok(None);
        };
        self.consumed.borrow_mut().insert(name.to_owned());
        let values = stored
            .floats()
            .filter(|_| stored.shape.dims().len() == 1)
            .ok_or_else(|| {
                let found = match &stored.dtype {
                    Ok(d) => d.name(),
                    Err(other) => other.as_str(),
                };
                ImportError::tensor(
                    self.path,
                    name,
                    format!(
                        "expected a list of floating-point factors, found {found} of shape {}",
                        stored.shape
                    ),
                )
            })?;
        Ok(Some(values))
    }

    pub(crate) fn need_factors(&self, name: &str) -> Result<Vec<f32>, ImportError> {
        self.factors(name)?.ok_or_else(|| {
            ImportError::tensor(self.path, name, "expected rotary factors, found none")
        })
    }

    /// Rows of the embedding. A tokenizer may know fewer ids (tables are padded
    /// when they are made), never more.
    pub(crate) fn vocab_size(&self) -> Result<usize, ImportError> {
        const TABLE: &str = "token_embd.weight";
        let Some(table) = self.tensors.0.get(TABLE) else {
            return Err(ImportError::tensor(self.path, TABLE, "is missing"));
        };
        let rows = match table.shape.dims() {
            [rows, _] => *rows,
            _ => {
                return Err(ImportError::tensor(
                    self.path,
                    TABLE,
                    format!("expected a matrix, found shape {}", table.shape),
                ));
            }
        };
        if let Some(declared) = self.size("vocab_size")?
            && declared != rows
        {
            return Err(self.error(
                "vocab_size",
                format!("expected the {rows} rows of tensor {TABLE:?}, found {declared}"),
            ));
        }
        let tokens = self
            .gguf
            .get("tokenizer.ggml.tokens")
            .and_then(Value::as_array)
            .map_or(0, Array::len);
        if tokens > rows {
            return Err(ImportError::key(
                self.path,
                "tokenizer.ggml.tokens",
                format!("expected at most the {rows} rows of tensor {TABLE:?}, found {tokens}"),
            ));
        }
        Ok(rows)
    }

    /// Fails on keys of the architecture that were not read and are not
    /// ignorable; returns the tensors read as settings and notes for the user.
    pub(crate) fn finish(
        self,
        allowed: &[String],
    ) -> Result<(BTreeSet<String>, Vec<String>), ImportError> {
        let read = self.read.into_inner();
        let prefix = format!("{}.", self.architecture);
        let mut unknown = Vec::new();
        let mut notes = Vec::new();
        for (key, _) in self.gguf.metadata() {
            let Some(rest) = key.strip_prefix(&prefix) else {
                continue;
            };
            if read.contains(key) || IGNORABLE.contains(&rest) {
                continue;
            }
            if allowed.contains(key) {
                notes.push(format!("key {key} was ignored on request"));
            } else {
                unknown.push(key.clone());
            }
        }
        if unknown.is_empty() {
            return Ok((self.consumed.into_inner(), notes));
        }
        unknown.sort();
        Err(ImportError::UnknownKeys {
            path: self.path.to_owned(),
            keys: unknown,
        })
    }
}

fn as_size(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok())
}

fn describe(value: &Value) -> String {
    match value {
        Value::String(s) if s.len() <= 40 => format!("{s:?}"),
        Value::String(_) | Value::Array(_) => value.type_name().to_owned(),
        other => format!("{other:?}"),
    }
}
