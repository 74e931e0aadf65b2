//! Quantizing with a text in view: what a matrix's inputs look like decides which
//! errors matter.
//!
//! A [`Calibrated`] quantizer walks the text through the model layer by layer as a
//! conversion asks for that layer's tensors, keeps statistics of the layer's inputs
//! (never the inputs), and drops them with the layer. By the recipe's
//! [`Calibration`]:
//!
//! * the mean square of each column's inputs weighs errors where errors are compared
//!   (clip searches, palettes): an importance matrix;
//! * `scales: awq` multiplies columns by powers of their inputs' mean magnitude (Lin et
//!   al., 2023, arXiv:2306.00978), `scales: smoothquant` balances the largest inputs
//!   and weights for int8 activations (Xiao et al., 2022, arXiv:2211.10438); both are
//!   folded into what comes before, so nothing is added to the model;
//! * `rounding: gptq` chooses codes so that later columns make good the errors of
//!   earlier ones (GPTQ), and then each anew given all others (sweeps).
//!
//! Nothing depends on threads. Memory is that of the oracle with one layer, the layer's
//! Gram matrices (4 bytes for each pair of inputs of a matrix), and for GPTQ a
//! factorization in f64 and its fp32 result (12 bytes for each pair).

mod factor;
mod fold;
mod round;
mod scale;
mod stats;
mod sweep;

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Mutex, PoisonError},
};

use carat_bundle::{
    convert::Quantize,
    manifest::{Form, Layout, is_matrix},
    source::{SourceError, TensorInfo, TensorSource},
    spec::{ModelSpec, TensorDecl},
};
use carat_oracle::{Oracle, TapPoint, Walk};
use carat_tensor::{DType, formats};

use crate::{
    Quantizer, Treatment,
    matrix::{Method, Source, quantize},
    recipe::schema::{Calibration, CodeChoice, InputScales},
};
use fold::{Pair, Producer, Scales};
use stats::{Collector, Stats};

/// A quantizer that has seen a text.
pub struct Calibrated<'a> {
    quantizer: Quantizer,
    settings: Calibration,
    spec: &'a ModelSpec,
    source: &'a dyn TensorSource,
    /// Vectors that folding changes.
    folded: HashSet<String>,
    work: Mutex<Work<'a>>,
}

/// Where the walk is, and what is known of the layer before it.
struct Work<'a> {
    walk: Walk<'a>,
    /// The layer that is known.
    ready: Option<usize>,
    stats: BTreeMap<TapPoint, Stats>,
    scales: HashMap<String, Scales>,
    /// The layer's tensors as quantized, in fp32.
    made: HashMap<String, Vec<u8>>,
}

impl<'a> Calibrated<'a> {
    /// Calibrates `quantizer` as `settings` say, on sequences that `oracle` reads:
    /// on the spec and the source that are to be converted.
    ///
    /// # Errors
    ///
    /// If there is no sequence, or one that is none of this model.
    pub fn new(
        quantizer: Quantizer,
        settings: &Calibration,
        oracle: &'a Oracle<'a>,
        source: &'a dyn TensorSource,
        sequences: &[&[u32]],
    ) -> Result<Calibrated<'a>, carat_oracle::OracleError> {
        let spec = oracle.spec();
        let mut out = Calibrated {
            quantizer,
            settings: settings.clone(),
            spec,
            source,
            folded: HashSet::new(),
            work: Mutex::new(Work {
                walk: Walk::new(oracle, sequences)?,
                ready: None,
                stats: BTreeMap::new(),
                scales: HashMap::new(),
                made: HashMap::new(),
            }),
        };
        for index in 0..=spec.layers.len() {
            for pair in out.pairs(index) {
                out.folded.extend(pair.producer.names());
            }
        }
        Ok(out)
    }

    /// The pairs that are folded at a layer.
    fn pairs(&self, index: usize) -> Vec<Pair> {
        match self.settings.scales {
            InputScales::None => vec![],
            _ => fold::pairs(self.spec, index, |name| self.method(name).is_some()),
        }
    }

    fn method(&self, name: &str) -> Option<Method> {
        match self.quantizer.treatment_of(name)? {
            Treatment::Quantize(method) => Some(method),
            _ => None,
        }
    }

    /// Reads a matrix in fp32.
    fn read(&self, name: &str) -> Result<(usize, Vec<f32>), String> {
        let info = self.source.info(name).ok_or("is missing")?;
        let data = self.source.read(name).map_err(|e| e.to_string())?;
        Ok((info.shape.columns(), decode(info.dtype, &data)?))
    }

    /// Whether a matrix is on its grid already and keeps it.
    fn keeps(&self, name: &str) -> Result<bool, String> {
        let (Some(method), Some(info)) = (self.method(name), self.source.info(name)) else {
            return Ok(false);
        };
        let [rows, columns] = *info.shape.dims() else {
            return Ok(false);
        };
        let data = self.source.read(name).map_err(|e| e.to_string())?;
        let source = Source {
            dtype: info.dtype,
            rows,
            columns,
            data: &data,
        };
        Ok(self.quantizer.on_grid(name, &method, source).is_some())
    }

    /// Walks to a layer and learns what its inputs look like.
    fn prepare(&self, work: &mut Work<'a>, index: usize) -> Result<(), String> {
        if work.ready == Some(index) {
            return Ok(());
        }
        if index < work.walk.layer() {
            let walked = work.walk.layer();
            return Err(format!("layer {index} comes after layer {walked}"));
        }
        work.stats.clear();
        work.scales.clear();
        while work.walk.layer() < index {
            let made = std::mem::take(&mut work.made);
            let layer = Changed {
                source: self.source,
                made,
            };
            work.walk.advance(&layer).map_err(|e| e.to_string())?;
        }
        let prefix = match index == self.spec.layers.len() {
            true => "head.".to_owned(),
            false => format!("layers.{index}."),
        };
        let mut wanted = BTreeMap::new();
        for decl in self.spec.tensors() {
            if decl.name.starts_with(&prefix)
                && self.method(&decl.name).is_some()
                && let Some(point) = fold::point_of(&decl.name)
            {
                wanted.insert(point, self.settings.rounding == CodeChoice::Gptq);
            }
        }
        if !wanted.is_empty() {
            let mut collector = Collector::new(wanted, work.walk.tokens());
            let observed = work.walk.observe(&mut collector);
            observed.map_err(|e| e.to_string())?;
            work.stats = collector.taken;
        }
        for pair in self.pairs(index) {
            let Some(stats) = work.stats.get(&pair.point) else {
                continue;
            };
            // Scales would take a matrix off the grid that it was trained for.
            let made = match &pair.producer {
                Producer::Rows { name, .. } => Some(name),
                Producer::Norm { .. } => None,
            };
            let mut kept = false;
            for name in pair.consumers.iter().chain(made) {
                kept |= self.keeps(name)?;
            }
            if kept {
                continue;
            }
            let mut matrices = Vec::new();
            for name in &pair.consumers {
                let method = self.method(name).ok_or("is not quantized")?;
                let (columns, weights) = self.read(name)?;
                matrices.push(scale::Weights {
                    method,
                    columns,
                    weights,
                });
            }
            if let Some(found) = scale::choose(&self.settings, &pair, stats, &matrices)? {
                fold::place(&pair, &found, &mut work.scales);
            }
        }
        work.ready = Some(index);
        Ok(())
    }

    /// Layer of a tensor; the number of layers for what comes behind them.
    fn layer_of(&self, name: &str) -> Option<usize> {
        match name {
            "final_norm.weight" | "head.weight" => Some(self.spec.layers.len()),
            _ => name
                .strip_prefix("layers.")?
                .split_once('.')?
                .0
                .parse()
                .ok(),
        }
    }

    fn quantized(
        &self,
        work: &Work<'_>,
        decl: &TensorDecl,
        method: &Method,
        mut weights: Vec<f32>,
    ) -> Result<carat_tensor::GridMatrix, String> {
        let [rows, columns] = *decl.shape.dims() else {
            return Err("is not a matrix".into());
        };
        let scales = work.scales.get(&decl.name);
        if let Some(scales) = scales {
            scales.apply(&mut weights, columns);
        }
        let stats = fold::point_of(&decl.name).and_then(|point| work.stats.get(&point));
        let of_columns = scales.and_then(|s| s.columns.as_deref());
        let mut importance = stats.and_then(Stats::importance);
        if let (Some(importance), Some(scales)) = (&mut importance, of_columns) {
            // Inputs are divided by the scales.
            importance
                .iter_mut()
                .zip(scales)
                .for_each(|(m, s)| *m /= s * s);
        }
        let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        let source = Source {
            dtype: DType::F32,
            rows,
            columns,
            data: &bytes,
        };
        let mut matrix =
            quantize(method, source, importance.as_deref()).map_err(|e| e.to_string())?;
        drop(bytes);
        let gram = stats.and_then(|stats| stats.gram.as_deref());
        let damping = f64::from(self.settings.damping);
        if let Some(gram) = gram
            && let Some(factor) =
                factor::factor(gram, columns, of_columns, damping, self.settings.act_order)
        {
            round::round(method, &mut matrix, &weights, &factor);
            drop(factor);
            if self.settings.sweeps > 0
                && let Some(metric) = sweep::Metric::new(gram, columns, of_columns, damping)
            {
                let sweeps = self.settings.sweeps.into();
                sweep::sweep(method, &mut matrix, &weights, &metric, sweeps);
            }
        }
        Ok(matrix)
    }
}

impl Quantize for Calibrated<'_> {
    fn name(&self) -> &str {
        self.quantizer.name()
    }

    fn text(&self) -> Option<&str> {
        self.quantizer.text()
    }

    fn form(&self, decl: &TensorDecl, source: DType) -> Result<Option<(Form, String)>, String> {
        if !is_matrix(decl.role) && self.folded.contains(&decl.name) {
            let reason = "vector, divided by the scales of what reads it";
            return Ok(Some((Form::Block(DType::F32), reason.into())));
        }
        self.quantizer.form(decl, source)
    }

    fn grid_layout(&self) -> Layout {
        self.quantizer.grid_layout()
    }

    fn apply(&self, decl: &TensorDecl, source: DType, data: &[u8]) -> Result<Vec<u8>, String> {
        let Some(index) = self.layer_of(&decl.name) else {
            return self.quantizer.apply(decl, source, data);
        };
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let work = &mut *work;
        self.quantizer.install(|| {
            self.prepare(work, index)?;
            if !is_matrix(decl.role) {
                let mut values = decode(source, data)?;
                if let Some(scales) = work.scales.get(&decl.name) {
                    scales.apply(&mut values, 1);
                }
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                work.made.insert(decl.name.clone(), bytes.clone());
                return Ok(bytes);
            }
            let Some(method) = self.method(&decl.name) else {
                return self.quantizer.apply(decl, source, data);
            };
            let [rows, columns] = *decl.shape.dims() else {
                return Err("is not a matrix".into());
            };
            let stored = Source {
                dtype: source,
                rows,
                columns,
                data,
            };
            let matrix = match self.quantizer.on_grid(&decl.name, &method, stored) {
                Some(matrix) => matrix,
                None => self.quantized(work, decl, &method, decode(source, data)?)?,
            };
            let mut row = vec![0.0; matrix.columns];
            let mut made = Vec::with_capacity(matrix.codes.len() * size_of::<f32>());
            for index in 0..matrix.rows {
                matrix.decode_row(index, &mut row);
                made.extend(row.iter().flat_map(|w| w.to_le_bytes()));
            }
            work.made.insert(decl.name.clone(), made);
            self.quantizer.store(&matrix)
        })
    }
}

fn decode(dtype: DType, data: &[u8]) -> Result<Vec<f32>, String> {
    let mut out = vec![0.0; data.len() / dtype.block_bytes() * dtype.block_len()];
    formats::decode(dtype, data, &mut out).map_err(|e| e.to_string())?;
    Ok(out)
}

/// A source some of whose tensors have been made anew, in fp32.
struct Changed<'a> {
    source: &'a dyn TensorSource,
    made: HashMap<String, Vec<u8>>,
}

impl TensorSource for Changed<'_> {
    fn origin(&self) -> &str {
        self.source.origin()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let info = self.source.info(name)?;
        Some(match self.made.contains_key(name) {
            true => TensorInfo {
                dtype: DType::F32,
                ..info
            },
            false => info,
        })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        match self.made.get(name) {
            Some(bytes) => Ok(bytes.into()),
            None => self.source.read(name),
        }
    }
}
