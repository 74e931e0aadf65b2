//! Models in memory and other things that several test programs use.

#![allow(dead_code)] // each test program uses its share

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;

use carat_bundle::source::{SourceError, TensorInfo, TensorSource};
use carat_bundle::spec::*;
use carat_tensor::{DType, Shape};

/// Tensors in memory.
#[derive(Clone, Default)]
pub(crate) struct Memory(pub(crate) BTreeMap<String, (TensorInfo, Vec<u8>)>);

impl Memory {
    pub(crate) fn insert(&mut self, name: &str, dtype: DType, shape: Shape, bytes: Vec<u8>) {
        self.0
            .insert(name.to_owned(), (TensorInfo { dtype, shape }, bytes));
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        let (_, bytes) = &self.0[name];
        bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }
}

impl TensorSource for Memory {
    fn origin(&self) -> &str {
        "memory"
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.0.get(name).map(|(info, _)| info.clone())
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        match self.0.get(name) {
            Some((_, bytes)) => Ok(Cow::Borrowed(bytes)),
            None => Err(SourceError::Missing {
                origin: "memory".to_owned(),
                name: name.to_owned(),
            }),
        }
    }
}

/// Uniform in -1..1, the same on every machine.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn ids(&mut self, n: usize, vocab: usize) -> Vec<u32> {
        (0..n)
            .map(|_| (self.bits() % vocab as u64) as u32)
            .collect()
    }
}

/// Random fp32 weights for a spec: projections keep the scale of their input,
/// gains are around 1 after their offset.
pub(crate) fn weights(spec: &ModelSpec, seed: u64) -> Memory {
    let mut noise = Noise::new(seed);
    let mut memory = Memory::default();
    for decl in spec.tensors() {
        let n = decl.shape.elements().unwrap();
        let (center, width) = match decl.role {
            TensorRole::Norm => (
                if decl.name.contains("ffn_norm") {
                    0.5
                } else {
                    1.0
                },
                0.3,
            ),
            TensorRole::Bias => (0.0, 0.3),
            // Uniform in ±w has variance w²/3: this keeps a unit input at unit variance.
            TensorRole::Linear | TensorRole::Head => {
                (0.0, (3.0 / decl.shape.columns() as f32).sqrt())
            }
            TensorRole::Embedding => (0.0, 1.0),
        };
        let bytes = (0..n)
            .flat_map(|_| (center + width * noise.unit()).to_le_bytes())
            .collect();
        memory.insert(&decl.name, DType::F32, decl.shape, bytes);
    }
    memory
}

/// Every feature of the spec at once, in a small model of two unlike layers.
pub(crate) fn everything() -> ModelSpec {
    let norm = |eps, weight_offset| NormSpec { eps, weight_offset };
    let layer = |attention, activation, bias, post: bool| LayerSpec {
        mixer_norm: norm(1e-5, 0.25),
        mixer: MixerSpec::Attention(attention),
        post_mixer_norm: post.then(|| norm(1e-3, 0.0)),
        ffn_norm: norm(1e-6, 0.5),
        ffn: FfnSpec::Gated {
            intermediate_size: 56,
            activation,
            bias,
        },
        post_ffn_norm: post.then(|| norm(1e-2, 0.1)),
        residual_scale: 0.7,
    };
    ModelSpec {
        hidden_size: 40,
        vocab_size: 93,
        max_context: 64,
        embedding: EmbeddingSpec { scale: 1.5 },
        layers: vec![
            layer(
                AttentionSpec {
                    heads: 4,
                    kv_heads: 2,
                    head_dim: 12,
                    qkv_bias: true,
                    out_bias: false,
                    qk_norm: None,
                    rope: Some(0),
                    window: Some(6),
                    scale: 0.3,
                    logit_softcap: Some(2.0),
                },
                Activation::Silu,
                false,
                true,
            ),
            layer(
                AttentionSpec {
                    heads: 3,
                    kv_heads: 1,
                    head_dim: 16,
                    qkv_bias: false,
                    out_bias: true,
                    qk_norm: Some(norm(1e-6, 0.0)),
                    rope: Some(1),
                    window: None,
                    scale: 0.25,
                    logit_softcap: None,
                },
                Activation::GeluTanh,
                true,
                false,
            ),
        ],
        final_norm: norm(1e-5, 0.0),
        head: HeadSpec {
            tied: false,
            scale: 0.8,
            softcap: Some(3.0),
        },
        ropes: vec![
            RopeSpec {
                rotary_dim: 8,
                theta: 100.0,
                scaling: RopeScaling::None,
            },
            RopeSpec {
                rotary_dim: 16,
                theta: 500.0,
                scaling: RopeScaling::LongRope {
                    short_factors: vec![1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                    long_factors: vec![1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
                    original_max_context: 40,
                    attention_factor: 1.2,
                },
            },
        ],
    }
}

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}
