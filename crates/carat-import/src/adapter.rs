//! Low-rank adapters: what fine-tuning adds to a checkpoint's matrices.
//!
//! An adapter is a folder as PEFT writes it, `adapter_config.json` and
//! `adapter_model.safetensors`. Merging adds `scale * B · A` to each matrix it
//! names, in fp32, with `A` `[rank, columns]`, `B` `[rows, rank]` and
//! `scale = lora_alpha / r` (`lora_alpha / √r` with `use_rslora`). What an adapter
//! may contain besides is an error, not a silent loss.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use carat_bundle::{
    manifest::is_matrix,
    source::{SourceError, TensorInfo, TensorSource},
    spec::ModelSpec,
};
use carat_tensor::{DType, formats};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::{ImportError, export::hf_name};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Longest adapter that is read.
const MAX_BYTES: u64 = 8 << 30;
/// Largest rank.
const MAX_RANK: usize = 4096;

/// Settings that change nothing at run time, or whose neutral value is checked.
const NEUTRAL: [(&str, &[&str]); 9] = [
    ("bias", &["none"]),
    ("use_dora", &["false"]),
    ("fan_in_fan_out", &["false"]),
    ("modules_to_save", &["null", "[]"]),
    ("rank_pattern", &["null", "{}"]),
    ("alpha_pattern", &["null", "{}"]),
    ("lora_bias", &["false"]),
    ("trainable_token_indices", &["null", "[]"]),
    ("target_parameters", &["null", "[]"]),
];

/// The two factors of a change, in fp32.
struct Factors {
    /// `[rank, columns]`
    a: Vec<f32>,
    /// `[rows, rank]`
    b: Vec<f32>,
    rank: usize,
}

/// An adapter for one model.
pub struct Adapter {
    /// What to call it: the folder's name.
    pub name: String,
    /// BLAKE3 of its weights, 64 hex digits.
    pub digest: String,
    scale: f32,
    factors: BTreeMap<String, Factors>,
}

impl Adapter {
    /// Reads an adapter and matches it with the matrices of a model.
    ///
    /// # Errors
    ///
    /// When a file is missing or malformed, when the adapter changes what is no
    /// matrix of the model, or asks for more than adding products.
    pub fn open(folder: &Path, spec: &ModelSpec) -> Result<Adapter, ImportError> {
        let config_path = folder.join(CONFIG);
        let config = crate::hf::read_json(&config_path)?;
        let scale = scale(&config_path, &config)?;
        let path = folder.join(WEIGHTS);
        let io = |e: std::io::Error| ImportError::key(&path, "file", e.to_string());
        let length = std::fs::metadata(&path).map_err(io)?.len();
        if length > MAX_BYTES {
            let problem = format!("{length} bytes, expected at most {MAX_BYTES}");
            return Err(ImportError::key(&path, "file", problem));
        }
        let bytes = std::fs::read(&path).map_err(io)?;
        let file = SafeTensors::deserialize(&bytes)
            .map_err(|e| ImportError::key(&path, "header", e.to_string()))?;
        let mut targets = BTreeMap::new();
        for decl in spec.tensors().into_iter().filter(|d| is_matrix(d.role)) {
            let name = hf_name(spec, &decl.name);
            let stem = name.strip_suffix(".weight").unwrap_or(&name).to_owned();
            targets.insert(format!("base_model.model.{stem}"), decl);
        }
        let mut factors = BTreeMap::new();
        for (name, _) in file.iter() {
            let fault = |problem: String| ImportError::tensor(&path, name, problem);
            let (stem, is_a) = match (
                name.strip_suffix(".lora_A.weight"),
                name.strip_suffix(".lora_B.weight"),
            ) {
                (Some(stem), _) => (stem, true),
                (_, Some(stem)) => (stem, false),
                _ => return Err(fault("is no factor of a low-rank adapter".into())),
            };
            let decl = targets
                .get(stem)
                .ok_or_else(|| fault("changes no matrix of this model".into()))?;
            if !is_a {
                continue;
            }
            let other = format!("{stem}.lora_B.weight");
            let (a, b) = (matrix(&path, &file, name)?, matrix(&path, &file, &other)?);
            let rank = a.rows;
            if b.columns != rank
                || [b.rows, a.columns][..] != *decl.shape.dims()
                || !(1..=MAX_RANK).contains(&rank)
            {
                return Err(fault(format!(
                    "factors [{}, {}] and [{}, {}] do not fit {}",
                    b.rows, b.columns, a.rows, a.columns, decl.shape
                )));
            }
            let pair = Factors {
                a: a.values,
                b: b.values,
                rank,
            };
            factors.insert(decl.name.clone(), pair);
        }
        // Every B was seen with its A, or its A is missing.
        if 2 * factors.len() != file.len() {
            return Err(ImportError::key(
                &path,
                "tensors",
                "a factor has no partner",
            ));
        }
        if factors.is_empty() {
            return Err(ImportError::key(&path, "tensors", "the adapter is empty"));
        }
        let name = folder
            .canonicalize()
            .unwrap_or_else(|_| PathBuf::from(folder));
        Ok(Adapter {
            name: name
                .file_name()
                .map_or_else(|| "adapter".into(), |n| n.to_string_lossy().into_owned()),
            digest: blake3::hash(&bytes).to_hex().to_string(),
            scale,
            factors,
        })
    }

    /// Matrices that it changes.
    pub fn matrices(&self) -> usize {
        self.factors.len()
    }
}

/// The factor on `B · A`.
fn scale(path: &Path, config: &Value) -> Result<f32, ImportError> {
    let expect = |key: &str, expected: &str| {
        ImportError::key(
            path,
            key,
            format!("expected {expected}, found {}", config[key]),
        )
    };
    if config["peft_type"] != "LORA" {
        return Err(expect("peft_type", "\"LORA\""));
    }
    for (key, neutral) in NEUTRAL {
        let found = match &config[key] {
            // Left out.
            Value::Null => continue,
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        if !neutral.contains(&found.as_str()) {
            return Err(expect(key, neutral[0]));
        }
    }
    let number = |key: &str| {
        let found = config[key].as_f64();
        found
            .filter(|n| n.is_finite() && *n > 0.0)
            .ok_or_else(|| expect(key, "a number above zero"))
    };
    let (rank, alpha) = (number("r")?, number("lora_alpha")?);
    Ok(match config["use_rslora"].as_bool() {
        Some(true) => (alpha / rank.sqrt()) as f32,
        _ => (alpha / rank) as f32,
    })
}

struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f32>,
}

fn matrix(path: &Path, file: &SafeTensors<'_>, name: &str) -> Result<Matrix, ImportError> {
    let fault = |problem: String| ImportError::tensor(path, name, problem);
    let view = file.tensor(name).map_err(|e| fault(e.to_string()))?;
    let dtype = match view.dtype() {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        other => return Err(fault(format!("{other:?} is no format of a factor"))),
    };
    let [rows, columns] = *view.shape() else {
        return Err(fault("is not a matrix".into()));
    };
    let mut values = vec![0.0; rows * columns];
    formats::decode(dtype, view.data(), &mut values).map_err(|e| fault(e.to_string()))?;
    if values.iter().any(|v| !v.is_finite()) {
        return Err(fault("a value is not finite".into()));
    }
    Ok(Matrix {
        rows,
        columns,
        values,
    })
}

/// A source with an adapter merged into it: the matrices it changes are F32.
pub struct Merged<'a> {
    /// The model.
    pub source: &'a dyn TensorSource,
    /// What is added to it.
    pub adapter: &'a Adapter,
}

impl TensorSource for Merged<'_> {
    fn origin(&self) -> &str {
        self.source.origin()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let info = self.source.info(name)?;
        Some(match self.adapter.factors.contains_key(name) {
            true => TensorInfo {
                dtype: DType::F32,
                ..info
            },
            false => info,
        })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        merged(self.source, self.adapter, name)
    }
}

/// The same as a source that owns both.
pub struct Adapted {
    /// The model.
    pub source: Box<dyn TensorSource>,
    /// What is added to it.
    pub adapter: Adapter,
}

impl Adapted {
    fn merged(&self) -> Merged<'_> {
        Merged {
            source: self.source.as_ref(),
            adapter: &self.adapter,
        }
    }
}

impl TensorSource for Adapted {
    fn origin(&self) -> &str {
        self.source.origin()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.merged().info(name)
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        merged(self.source.as_ref(), &self.adapter, name)
    }
}

/// A tensor of `source` with what `adapter` adds to it.
fn merged<'s>(
    source: &'s dyn TensorSource,
    adapter: &Adapter,
    name: &str,
) -> Result<Cow<'s, [u8]>, SourceError> {
    let bytes = source.read(name)?;
    let (Some(factors), Some(info)) = (adapter.factors.get(name), source.info(name)) else {
        return Ok(bytes);
    };
    let malformed = |problem: String| SourceError::Malformed {
        origin: source.origin().to_owned(),
        name: name.to_owned(),
        problem,
    };
    let columns = info.shape.columns();
    let row = info
        .dtype
        .row_bytes(columns)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| malformed("a row is not whole blocks".into()))?;
    let mut out = Vec::with_capacity(factors.b.len() / factors.rank * columns * 4);
    let mut values = vec![0.0; columns];
    for (row, b) in bytes.chunks(row).zip(factors.b.chunks(factors.rank)) {
        formats::decode(info.dtype, row, &mut values).map_err(|e| malformed(e.to_string()))?;
        for (b, a) in b.iter().zip(factors.a.chunks(columns)) {
            let factor = adapter.scale * b;
            for (w, a) in values.iter_mut().zip(a) {
                *w += factor * a;
            }
        }
        out.extend(values.iter().flat_map(|w| w.to_le_bytes()));
    }
    Ok(Cow::Owned(out))
}
