use std::ops::Deref;
use std::sync::Arc;

use carat_bundle::source::TensorSource;
use carat_bundle::spec::{FfnSpec, ModelSpec, TensorDecl, TensorRole};

use crate::OracleError;
use crate::forward::{LOGITS_PER_CHUNK, ROWS_PER_CHUNK};
use crate::linear::{Linear, PANEL};
use crate::rounding::Imitation;
use crate::weights::{LayerWeights, Loader, attention, head_name};

/// How an oracle works: nothing here but the capacity changes a result.
#[derive(Clone, Debug)]
pub struct OracleOptions {
    /// Longest sequence, in tokens. It also chooses the set of rotary
    /// frequencies where a model has several, so it must be that of the engine
    /// that is compared.
    pub capacity: usize,
    /// Decoded weights are kept in memory if all layers and the head together
    /// are at most this large in fp32; else they are decoded in every pass, some rows
    /// of a matrix at a time.
    pub resident_bytes: usize,
    /// Threads to work on.
    pub threads: usize,
}

impl OracleOptions {
    /// Sequences of up to `capacity` tokens, 2 GiB of resident weights, as many
    /// threads as the system offers.
    pub fn new(capacity: usize) -> OracleOptions {
        OracleOptions {
            capacity,
            resident_bytes: 2 << 30,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
        }
    }
}

/// Bytes that work with an oracle takes at most, but for some MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OracleMemory {
    /// Weights: all of them decoded, or a layer as stored and panels of it decoded.
    pub weights: u64,
    /// Keys and values.
    pub cache: u64,
    /// Activations and logits of a pass.
    pub scratch: u64,
}

impl OracleOptions {
    /// What work on `tokens` tokens at a time takes.
    pub fn memory(&self, spec: &ModelSpec, tokens: usize) -> OracleMemory {
        let floats = |n: usize| (n as u64).saturating_mul(size_of::<f32>() as u64);
        let tensors = spec.tensors();
        let all = decoded_bytes(spec, &tensors);
        let weights = if all <= self.resident_bytes {
            all as u64
        } else {
            let layer = |i: usize| {
                let prefix = format!("layers.{i}.");
                let of_layer = tensors.iter().filter(|t| t.name.starts_with(&prefix));
                of_layer.map(tensor_bytes).fold(0, usize::saturating_add)
            };
            let largest = (0..spec.layers.len()).map(layer).max().unwrap_or(0);
            // A source that has to make a layer's bytes makes no more than fp32 would
            // take; each thread has a panel as decoded and as transposed.
            let columns = tensors.iter().map(|t| t.shape.columns()).max().unwrap_or(0);
            let panels = self.threads.max(1).saturating_mul(2 * PANEL);
            (largest as u64).saturating_add(floats(panels.saturating_mul(columns)))
        };
        let (mut kv, mut widest) = (0usize, 0usize);
        for layer in &spec.layers {
            let a = attention(layer);
            let FfnSpec::Gated {
                intermediate_size: inner,
                ..
            } = layer.ffn;
            kv += 2 * a.kv_heads * a.head_dim;
            widest = widest
                .max(2 * (a.heads + a.kv_heads) * a.head_dim)
                .max(2 * inner);
        }
        let rotary: usize = spec.ropes.iter().map(|r| r.rotary_dim).sum();
        let rows = tokens.min(ROWS_PER_CHUNK);
        // The residual stream and rotary tables for all, the rest for a chunk; logits
        // of as many rows as are computed at a time.
        let scratch = floats(tokens.saturating_mul(spec.hidden_size + rotary))
            .saturating_add(floats(rows.saturating_mul(2 * spec.hidden_size + widest)))
            .saturating_add(floats(
                LOGITS_PER_CHUNK.min(tokens.saturating_mul(spec.vocab_size)),
            ));
        OracleMemory {
            weights,
            // Growing vectors may hold twice what is in them.
            cache: floats(tokens.saturating_mul(2 * kv)),
            scratch,
        }
    }
}

fn tensor_bytes(tensor: &TensorDecl) -> usize {
    let elements = tensor.shape.elements().unwrap_or(usize::MAX);
    elements.saturating_mul(size_of::<f32>())
}

/// Bytes of all weights that a pass multiplies with, in fp32. The embedding
/// counts where it is the head; else its rows are decoded one by one.
fn decoded_bytes(spec: &ModelSpec, tensors: &[TensorDecl]) -> usize {
    tensors
        .iter()
        .filter(|t| t.role != TensorRole::Embedding || spec.head.tied)
        .map(tensor_bytes)
        .fold(0, usize::saturating_add)
}

/// The fp32 reference of one model. See the crate's documentation.
pub struct Oracle<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) loader: Loader<'a>,
    pub(crate) capacity: usize,
    /// Frequencies of each of the spec's ropes at this capacity.
    pub(crate) inv_freq: Vec<Vec<f32>>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) cache: CachePrecision,
    resident: Option<Resident<'a>>,
}

/// How keys and values are kept between being made and being used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePrecision {
    /// As they are: the reference.
    #[default]
    F32,
    /// Rounded to fp16, as engines that store them so do. What such an engine
    /// differs by beyond this is not its cache's doing.
    F16,
}

impl CachePrecision {
    /// Rounds values on their way into a cache; those beyond the range of fp16
    /// become its largest.
    pub(crate) fn round(self, values: &mut [f32]) {
        if self == CachePrecision::F16 {
            for v in values {
                let max = half::f16::MAX.to_f32();
                *v = half::f16::from_f32(v.clamp(-max, max)).to_f32();
            }
        }
    }
}

/// All weights that a pass multiplies with.
struct Resident<'a> {
    layers: Vec<Arc<LayerWeights<'a>>>,
    head: Arc<Linear<'a>>,
}

/// A layer's weights, kept decoded or read for the occasion.
pub(crate) enum Layer<'w> {
    Resident(&'w LayerWeights<'w>),
    Streamed(Box<LayerWeights<'w>>),
}

impl<'w> Deref for Layer<'w> {
    type Target = LayerWeights<'w>;

    fn deref(&self) -> &LayerWeights<'w> {
        match self {
            Layer::Resident(weights) => weights,
            Layer::Streamed(weights) => weights,
        }
    }
}

impl<'a> Oracle<'a> {
    /// Opens the model that `spec` describes on the weights of `source`.
    ///
    /// # Errors
    ///
    /// If the spec is invalid, a tensor is missing or of another shape, the capacity is 0, or (when
    /// weights are kept in memory) a tensor cannot be decoded.
    pub fn new(
        spec: &'a ModelSpec,
        source: &'a dyn TensorSource,
        options: OracleOptions,
    ) -> Result<Oracle<'a>, OracleError> {
        Oracle::imitating(spec, source, options, Imitation::NONE)
    }

    /// The oracle with another machine's roundings: no reference, but what that machine
    /// would make of these weights.
    ///
    /// # Errors
    ///
    /// Those of [`Oracle::new`].
    pub fn imitating(
        spec: &'a ModelSpec,
        source: &'a dyn TensorSource,
        options: OracleOptions,
        machine: Imitation<'a>,
    ) -> Result<Oracle<'a>, OracleError> {
        spec.validate()?;
        if options.capacity == 0 {
            return Err(OracleError::NoCapacity);
        }
        let loader = Loader {
            source,
            threads: options.threads.max(1),
            inputs: machine.inputs,
        };
        let tensors = spec.tensors();
        loader.check(&tensors)?;

        let resident = if decoded_bytes(spec, &tensors) <= options.resident_bytes {
            Some(Resident {
                layers: (0..spec.layers.len())
                    .map(|i| loader.layer(spec, i, true).map(Arc::new))
                    .collect::<Result<_, _>>()?,
                head: Arc::new(loader.head(spec, true)?),
            })
        } else {
            None
        };
        Ok(Oracle {
            spec,
            loader,
            capacity: options.capacity,
            inv_freq: spec
                .ropes
                .iter()
                .map(|rope| rope.inv_freq(options.capacity))
                .collect(),
            final_norm: loader.final_norm(spec)?,
            cache: machine.cache,
            resident,
        })
    }

    /// The same oracle with another precision of keys and values.
    pub fn with_cache(mut self, cache: CachePrecision) -> Self {
        self.cache = cache;
        self
    }

    /// The same model on another source, which differs from this oracle's in the tensors
    /// that `changed` names; decoded weights of other layers are shared.
    ///
    /// # Errors
    ///
    /// Those of [`Oracle::new`].
    pub fn on<'b>(
        &self,
        source: &'b dyn TensorSource,
        changed: &dyn Fn(&str) -> bool,
    ) -> Result<Oracle<'b>, OracleError>
    where
        'a: 'b,
    {
        let loader = Loader {
            source,
            ..self.loader
        };
        let tensors = self.spec.tensors();
        loader.check(&tensors)?;
        let in_layer = |i: usize| {
            let prefix = format!("layers.{i}.");
            let mut names = tensors.iter().map(|t| &t.name);
            names.any(|name| name.starts_with(&prefix) && changed(name))
        };
        let layer = |(i, old): (usize, &Arc<LayerWeights<'a>>)| {
            let old: Arc<LayerWeights<'b>> = old.clone();
            match in_layer(i) {
                true => loader.layer(self.spec, i, true).map(Arc::new),
                false => Ok(old),
            }
        };
        let resident = match &self.resident {
            None => None,
            Some(resident) => {
                let head: Arc<Linear<'b>> = resident.head.clone();
                let layers = resident.layers.iter().enumerate().map(layer);
                Some(Resident {
                    layers: layers.collect::<Result<_, _>>()?,
                    head: match changed(head_name(self.spec)) {
                        true => Arc::new(loader.head(self.spec, true)?),
                        false => head,
                    },
                })
            }
        };
        Ok(Oracle {
            spec: self.spec,
            loader,
            capacity: self.capacity,
            inv_freq: self.inv_freq.clone(),
            final_norm: loader.final_norm(self.spec)?,
            cache: self.cache,
            resident,
        })
    }

    /// The model.
    pub fn spec(&self) -> &'a ModelSpec {
        self.spec
    }

    /// Longest sequence, in tokens.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether decoded weights are kept in memory.
    pub fn is_resident(&self) -> bool {
        self.resident.is_some()
    }

    pub(crate) fn layer(&self, index: usize) -> Result<Layer<'_>, OracleError> {
        match &self.resident {
            Some(resident) => Ok(Layer::Resident(&resident.layers[index])),
            None => Ok(Layer::Streamed(Box::new(
                self.loader.layer(self.spec, index, false)?,
            ))),
        }
    }

    /// Embedding rows, scaled: `[ids, hidden_size]`.
    pub(crate) fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, OracleError> {
        let mut x = self.loader.embed(self.spec, ids)?;
        for v in &mut x {
            *v *= self.spec.embedding.scale;
        }
        Ok(x)
    }

    /// Logits (`[rows, vocab_size]`) of normed final hidden rows
    /// ([`TapPoint::FinalHidden`](crate::TapPoint), `[rows, hidden_size]`).
    ///
    /// # Errors
    ///
    /// If the head is streamed and cannot be read.
    pub fn head(&self, hidden: &[f32]) -> Result<Vec<f32>, OracleError> {
        let head = &self.spec.head;
        let mut logits = match &self.resident {
            Some(resident) => resident.head.apply(self.loader.threads, hidden),
            None => {
                let head = self.loader.head(self.spec, false)?;
                head.apply(self.loader.threads, hidden)
            }
        };
        for v in &mut logits {
            *v *= head.scale;
            if let Some(cap) = head.softcap {
                *v = cap * (*v / cap).tanh();
            }
        }
        Ok(logits)
    }
}
