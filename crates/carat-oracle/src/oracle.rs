use std::ops::Deref;

use carat_bundle::source::TensorSource;
use carat_bundle::spec::{ModelSpec, TensorRole};

use crate::OracleError;
use crate::linear::Matrix;
use crate::weights::{LayerWeights, Loader};

/// How an oracle works: nothing here but the capacity changes a result.
#[derive(Clone, Debug)]
pub struct OracleOptions {
    /// Longest sequence, in tokens. It also chooses the set of rotary
    /// frequencies where a model has several, so it must be that of the engine
    /// that is compared.
    pub capacity: usize,
    /// Decoded weights are kept in memory if all layers and the head together
    /// are at most this large in fp32; else they are streamed in every pass, one
    /// layer at a time.
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

/// The fp32 reference of one model. See the crate's documentation.
pub struct Oracle<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) loader: Loader<'a>,
    pub(crate) capacity: usize,
    /// Frequencies of each of the spec's ropes at this capacity.
    pub(crate) inv_freq: Vec<Vec<f32>>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) cache: CachePrecision,
    resident: Option<Resident>,
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
struct Resident {
    layers: Vec<LayerWeights>,
    head: Matrix,
}

/// A layer's weights, kept or decoded for the occasion.
pub(crate) enum Layer<'w> {
    Resident(&'w LayerWeights),
    Streamed(Box<LayerWeights>),
}

impl Deref for Layer<'_> {
    type Target = LayerWeights;

    fn deref(&self) -> &LayerWeights {
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
        spec.validate()?;
        if options.capacity == 0 {
            return Err(OracleError::NoCapacity);
        }
        let loader = Loader {
            source,
            threads: options.threads.max(1),
        };
        let tensors = spec.tensors();
        loader.check(&tensors)?;

        // The embedding counts where it is the head; else its rows are decoded one by one.
        let resident_bytes = tensors
            .iter()
            .filter(|t| t.role != TensorRole::Embedding || spec.head.tied)
            .map(|t| t.shape.elements().unwrap_or(usize::MAX).saturating_mul(4))
            .fold(0usize, usize::saturating_add);
        let resident = if resident_bytes <= options.resident_bytes {
            Some(Resident {
                layers: (0..spec.layers.len())
                    .map(|i| loader.layer(spec, i))
                    .collect::<Result<_, _>>()?,
                head: loader.head(spec)?,
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
            cache: CachePrecision::F32,
            resident,
        })
    }

    /// The same oracle with another precision of keys and values.
    pub fn with_cache(mut self, cache: CachePrecision) -> Self {
        self.cache = cache;
        self
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
                self.loader.layer(self.spec, index)?,
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

    /// Logits of normed final hidden rows: `[rows, vocab_size]`.
    pub(crate) fn head(&self, hidden: &[f32]) -> Result<Vec<f32>, OracleError> {
        let head = &self.spec.head;
        let mut logits = match &self.resident {
            Some(resident) => resident.head.multiply(self.loader.threads, hidden),
            None => self.loader.stream_head(self.spec, hidden)?,
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
