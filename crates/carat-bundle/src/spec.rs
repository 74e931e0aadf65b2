//! A model as data.
//!
//! Importers translate a checkpoint's configuration into a [`ModelSpec`]; the
//! oracle, the plan and the engines know models only through it. Nothing here
//! names a family: a family is a particular choice of these fields.
//!
//! The forward pass that a spec denotes, for one token at position `t`:
//!
//! ```text
//! x = embed[id] * embedding.scale
//! for layer in layers:
//!     y = mixer(norm(x))            ; y = post_mixer_norm(y) if present
//!     x = x + residual_scale * y
//!     y = ffn(norm(x))              ; y = post_ffn_norm(y) if present
//!     x = x + residual_scale * y
//! logits = softcap(head.scale * (head · final_norm(x)))
//! ```

use carat_tensor::Shape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A whole causal language model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// True vocabulary size: ids at or above it do not exist.
    pub vocab_size: usize,
    /// Longest context, in tokens, that the checkpoint declares.
    pub max_context: usize,
    /// Input embedding.
    pub embedding: EmbeddingSpec,
    /// Decoder layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Norm before the head.
    pub final_norm: NormSpec,
    /// Output projection.
    pub head: HeadSpec,
    /// Rotary position embeddings that layers refer to by index.
    pub ropes: Vec<RopeSpec>,
}

/// Input embedding: `x = table[id] * scale`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingSpec {
    /// Factor on each row, as the reference computes it (already rounded to the
    /// checkpoint's dtype where the reference rounds it).
    pub scale: f32,
}

/// Output projection: `logits = softcap(scale * (W · h))`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeadSpec {
    /// The head is the embedding table; there is no tensor `head.weight`.
    pub tied: bool,
    /// Factor on the logits.
    pub scale: f32,
    /// `c * tanh(x / c)` on the logits.
    pub softcap: Option<f32>,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// Norm on the mixer's input.
    pub mixer_norm: NormSpec,
    /// How tokens see each other.
    pub mixer: MixerSpec,
    /// Norm on the mixer's output, before the residual is added.
    pub post_mixer_norm: Option<NormSpec>,
    /// Norm on the feed-forward's input.
    pub ffn_norm: NormSpec,
    /// The feed-forward.
    pub ffn: FfnSpec,
    /// Norm on the feed-forward's output, before the residual is added.
    pub post_ffn_norm: Option<NormSpec>,
    /// Factor on both branches when they are added to the residual.
    pub residual_scale: f32,
}

/// How tokens of a sequence see each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum MixerSpec {
    /// Softmax attention over a KV cache.
    Attention(AttentionSpec),
}

/// Grouped-query softmax attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head (even).
    pub head_dim: usize,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Per-head norm on queries and keys, before rotation.
    pub qk_norm: Option<NormSpec>,
    /// Index into [`ModelSpec::ropes`]; `None` is no position embedding.
    pub rope: Option<usize>,
    /// A token sees itself and the `window - 1` before it; `None` sees all.
    pub window: Option<usize>,
    /// Factor on `q · k`.
    pub scale: f32,
    /// `c * tanh(x / c)` on the scaled scores.
    pub logit_softcap: Option<f32>,
}

/// The feed-forward of a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FfnSpec {
    /// `down · (act(gate · x) * (up · x))`.
    Gated {
        /// Inner width.
        intermediate_size: usize,
        /// Activation on the gate.
        activation: Activation,
        /// Whether all three projections have a bias.
        bias: bool,
    },
}

/// Pointwise activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
}

/// RMS norm: `x / sqrt(mean(x²) + eps) * (weight + weight_offset)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NormSpec {
    /// Added to the mean square.
    pub eps: f32,
    /// Added to the stored gain (1 where the checkpoint stores `gain - 1`).
    pub weight_offset: f32,
}

/// Rotary position embedding, rotate-half layout: element `i` pairs with
/// `i + rotary_dim / 2`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Leading elements of a head that rotate (even); the rest pass through.
    pub rotary_dim: usize,
    /// Base: `inv_freq[i] = theta^(-2i / rotary_dim)`, kept in fp32.
    pub theta: f64,
    /// How frequencies stretch to longer contexts.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// Not stretched.
    None,
    /// `inv_freq / factor`.
    Linear {
        /// Stretch factor.
        factor: f64,
    },
    /// In bands of wavelength: long ones divided by `factor`, short ones kept,
    /// the band between interpolated smoothly.
    FrequencyBands {
        /// Stretch factor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_context / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context of the original training, in tokens.
        original_max_context: usize,
    },
    /// A divisor per frequency, from the file (`inv_freq[i] / factors[i]`).
    Factors {
        /// `rotary_dim / 2` divisors.
        factors: Vec<f32>,
    },
    /// Two sets of divisors; which one applies is decided by the capacity a
    /// sequence is opened with, never in mid-stream. Sines and cosines are
    /// multiplied by `attention_factor`, whichever set applies.
    LongRope {
        /// Divisors while the capacity is at most `original_max_context`.
        short_factors: Vec<f32>,
        /// Divisors beyond.
        long_factors: Vec<f32>,
        /// Context of the original training, in tokens.
        original_max_context: usize,
        /// Factor on sine and cosine.
        attention_factor: f32,
    },
}

/// A tensor that a [`ModelSpec`] needs, by canonical name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDecl {
    /// Canonical name, such as `layers.0.attn.q.weight`.
    pub name: String,
    /// Row-major shape; a projection is `[outputs, inputs]`.
    pub shape: Shape,
    /// What it is for, which decides how it may be stored.
    pub role: TensorRole,
}

/// What a tensor is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TensorRole {
    /// Input embedding (and head, if tied).
    Embedding,
    /// Output projection.
    Head,
    /// A matrix multiplied with activations.
    Linear,
    /// A norm's gain.
    Norm,
    /// A projection's bias.
    Bias,
}

/// Why a spec is not a model.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum SpecError {
    /// A field has a value that no model can have.
    #[error("model spec: {field}: {problem}")]
    Invalid {
        /// Path of the field, such as `layers.3.mixer.head_dim`.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
}

fn invalid(field: impl Into<String>, problem: impl Into<String>) -> SpecError {
    SpecError::Invalid {
        field: field.into(),
        problem: problem.into(),
    }
}

impl ModelSpec {
    /// Every tensor the model needs, in a fixed order: embedding, layers, final
    /// norm, head. A loader accepts exactly this list.
    pub fn tensors(&self) -> Vec<TensorDecl> {
        let h = self.hidden_size;
        let mut out = Vec::new();
        let mut push = |name: String, shape: Vec<usize>, role| {
            out.push(TensorDecl {
                name,
                shape: Shape(shape),
                role,
            });
        };
        push(
            "embed.weight".into(),
            vec![self.vocab_size, h],
            TensorRole::Embedding,
        );
        for (i, layer) in self.layers.iter().enumerate() {
            let p = format!("layers.{i}");
            push(format!("{p}.mixer_norm.weight"), vec![h], TensorRole::Norm);
            match &layer.mixer {
                MixerSpec::Attention(a) => {
                    let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
                    for (n, rows, cols, bias) in [
                        ("q", q, h, a.qkv_bias),
                        ("k", kv, h, a.qkv_bias),
                        ("v", kv, h, a.qkv_bias),
                        ("o", h, q, a.out_bias),
                    ] {
                        push(
                            format!("{p}.attn.{n}.weight"),
                            vec![rows, cols],
                            TensorRole::Linear,
                        );
                        if bias {
                            push(format!("{p}.attn.{n}.bias"), vec![rows], TensorRole::Bias);
                        }
                    }
                    if a.qk_norm.is_some() {
                        push(
                            format!("{p}.attn.q_norm.weight"),
                            vec![a.head_dim],
                            TensorRole::Norm,
                        );
                        push(
                            format!("{p}.attn.k_norm.weight"),
                            vec![a.head_dim],
                            TensorRole::Norm,
                        );
                    }
                }
            }
            if layer.post_mixer_norm.is_some() {
                push(
                    format!("{p}.post_mixer_norm.weight"),
                    vec![h],
                    TensorRole::Norm,
                );
            }
            push(format!("{p}.ffn_norm.weight"), vec![h], TensorRole::Norm);
            match &layer.ffn {
                FfnSpec::Gated {
                    intermediate_size: f,
                    bias,
                    ..
                } => {
                    for (n, rows, cols) in [("gate", *f, h), ("up", *f, h), ("down", h, *f)] {
                        push(
                            format!("{p}.ffn.{n}.weight"),
                            vec![rows, cols],
                            TensorRole::Linear,
                        );
                        if *bias {
                            push(format!("{p}.ffn.{n}.bias"), vec![rows], TensorRole::Bias);
                        }
                    }
                }
            }
            if layer.post_ffn_norm.is_some() {
                push(
                    format!("{p}.post_ffn_norm.weight"),
                    vec![h],
                    TensorRole::Norm,
                );
            }
        }
        push("final_norm.weight".into(), vec![h], TensorRole::Norm);
        if !self.head.tied {
            push(
                "head.weight".into(),
                vec![self.vocab_size, h],
                TensorRole::Head,
            );
        }
        out
    }

    /// Checks what the types cannot: sizes and scalars in range, divisibility,
    /// references. Import, bundles, plan and oracle all ask here.
    ///
    /// # Errors
    /// Names the field, its value and the allowed range.
    pub fn validate(&self) -> Result<(), SpecError> {
        // Caps far above any published model: they bound what a hostile file can make us allocate.
        const MAX_DIM: usize = 1 << 20;
        const MAX_LAYERS: usize = 1 << 12;
        const MAX_CONTEXT: usize = 1 << 26;
        let size = |field: &str, v: usize, max: usize| {
            if v == 0 || v > max {
                Err(invalid(field, format!("{v} is outside 1..={max}")))
            } else {
                Ok(())
            }
        };
        // NaN lies in no range.
        let within = |field: &str, v: f64, min: f64, max: f64| {
            if (min..=max).contains(&v) {
                Ok(())
            } else {
                Err(invalid(field, format!("{v} is outside {min}..={max}")))
            }
        };
        // Published factors lie between 1/128 and 100; what is far beyond is a
        // damaged file, and leaves fp32 within a few layers.
        let scalar = |field: &str, v: f64| within(field, v, 1e-6, 1e6);
        let norm = |field: &str, n: &NormSpec| {
            let offset = f64::from(n.weight_offset);
            within(&format!("{field}.weight_offset"), offset, 0.0, 1.0)?;
            // Published ones lie between 1e-12 and 1e-5. Zero divides by zero.
            within(&format!("{field}.eps"), f64::from(n.eps), 1e-15, 1.0)
        };
        size("hidden_size", self.hidden_size, MAX_DIM)?;
        size("vocab_size", self.vocab_size, 1 << 24)?;
        size("max_context", self.max_context, MAX_CONTEXT)?;
        size("layers", self.layers.len(), MAX_LAYERS)?;
        scalar("embedding.scale", f64::from(self.embedding.scale))?;
        scalar("head.scale", f64::from(self.head.scale))?;
        if let Some(c) = self.head.softcap {
            scalar("head.softcap", f64::from(c))?;
        }
        norm("final_norm", &self.final_norm)?;
        for (i, rope) in self.ropes.iter().enumerate() {
            let f = format!("ropes.{i}");
            size(&format!("{f}.rotary_dim"), rope.rotary_dim, MAX_DIM)?;
            if !rope.rotary_dim.is_multiple_of(2) {
                return Err(invalid(format!("{f}.rotary_dim"), "is odd"));
            }
            within(&format!("{f}.theta"), rope.theta, 1.0, 1e12)?;
            let pairs = rope.rotary_dim / 2;
            let factors = |name: &str, v: &[f32]| {
                let field = format!("{f}.scaling.{name}");
                if v.len() != pairs {
                    return Err(invalid(
                        field,
                        format!("has {} values, expected {pairs}", v.len()),
                    ));
                }
                v.iter().try_for_each(|&x| scalar(&field, f64::from(x)))
            };
            match &rope.scaling {
                RopeScaling::None => {}
                RopeScaling::Linear { factor } => scalar(&format!("{f}.scaling.factor"), *factor)?,
                RopeScaling::FrequencyBands {
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_context,
                } => {
                    scalar(&format!("{f}.scaling.factor"), *factor)?;
                    scalar(&format!("{f}.scaling.low_freq_factor"), *low_freq_factor)?;
                    scalar(&format!("{f}.scaling.high_freq_factor"), *high_freq_factor)?;
                    size(
                        &format!("{f}.scaling.original_max_context"),
                        *original_max_context,
                        MAX_CONTEXT,
                    )?;
                    if high_freq_factor <= low_freq_factor {
                        return Err(invalid(
                            format!("{f}.scaling.high_freq_factor"),
                            format!(
                                "{high_freq_factor} is not above low_freq_factor {low_freq_factor}"
                            ),
                        ));
                    }
                }
                RopeScaling::Factors { factors: v } => factors("factors", v)?,
                RopeScaling::LongRope {
                    short_factors,
                    long_factors,
                    original_max_context,
                    attention_factor,
                } => {
                    factors("short_factors", short_factors)?;
                    factors("long_factors", long_factors)?;
                    size(
                        &format!("{f}.scaling.original_max_context"),
                        *original_max_context,
                        MAX_CONTEXT,
                    )?;
                    scalar(
                        &format!("{f}.scaling.attention_factor"),
                        f64::from(*attention_factor),
                    )?;
                }
            }
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let f = format!("layers.{i}");
            scalar(
                &format!("{f}.residual_scale"),
                f64::from(layer.residual_scale),
            )?;
            norm(&format!("{f}.mixer_norm"), &layer.mixer_norm)?;
            norm(&format!("{f}.ffn_norm"), &layer.ffn_norm)?;
            for (name, n) in [
                ("post_mixer_norm", &layer.post_mixer_norm),
                ("post_ffn_norm", &layer.post_ffn_norm),
            ] {
                if let Some(n) = n {
                    norm(&format!("{f}.{name}"), n)?;
                }
            }
            match &layer.mixer {
                MixerSpec::Attention(a) => {
                    let f = format!("{f}.mixer");
                    size(&format!("{f}.heads"), a.heads, 1 << 12)?;
                    size(&format!("{f}.kv_heads"), a.kv_heads, 1 << 12)?;
                    size(&format!("{f}.head_dim"), a.head_dim, 1 << 12)?;
                    if !a.heads.is_multiple_of(a.kv_heads) {
                        return Err(invalid(
                            format!("{f}.kv_heads"),
                            format!("{} does not divide heads {}", a.kv_heads, a.heads),
                        ));
                    }
                    if !a.head_dim.is_multiple_of(2) {
                        return Err(invalid(
                            format!("{f}.head_dim"),
                            format!("{} is odd", a.head_dim),
                        ));
                    }
                    scalar(&format!("{f}.scale"), f64::from(a.scale))?;
                    if let Some(n) = &a.qk_norm {
                        norm(&format!("{f}.qk_norm"), n)?;
                    }
                    if let Some(c) = a.logit_softcap {
                        scalar(&format!("{f}.logit_softcap"), f64::from(c))?;
                    }
                    if let Some(window) = a.window {
                        size(&format!("{f}.window"), window, MAX_CONTEXT)?;
                    }
                    if let Some(r) = a.rope {
                        let rope = self.ropes.get(r).ok_or_else(|| {
                            invalid(
                                format!("{f}.rope"),
                                format!("{r} is not one of {} ropes", self.ropes.len()),
                            )
                        })?;
                        if rope.rotary_dim > a.head_dim {
                            return Err(invalid(
                                format!("{f}.rope"),
                                format!("rotates {} of {} elements", rope.rotary_dim, a.head_dim),
                            ));
                        }
                    }
                }
            }
            match &layer.ffn {
                FfnSpec::Gated {
                    intermediate_size, ..
                } => {
                    size(
                        &format!("{f}.ffn.intermediate_size"),
                        *intermediate_size,
                        MAX_DIM,
                    )?;
                }
            }
        }
        Ok(())
    }
}

impl RopeSpec {
    /// Frequencies of the pairs in fp32 (computed in f64, rounded once) for a
    /// sequence opened with `capacity` tokens: `rotary_dim / 2` values.
    pub fn inv_freq(&self, capacity: usize) -> Vec<f32> {
        let base = |i: usize| self.theta.powf(-(2.0 * i as f64) / self.rotary_dim as f64);
        let pairs = self.rotary_dim / 2;
        match &self.scaling {
            RopeScaling::None => (0..pairs).map(|i| base(i) as f32).collect(),
            RopeScaling::Linear { factor } => {
                (0..pairs).map(|i| (base(i) / factor) as f32).collect()
            }
            RopeScaling::FrequencyBands {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_context,
            } => {
                let original = *original_max_context as f64;
                (0..pairs)
                    .map(|i| {
                        let f = base(i);
                        let wavelength = 2.0 * std::f64::consts::PI / f;
                        let stretched = f / factor;
                        let out = if wavelength > original / low_freq_factor {
                            stretched
                        } else if wavelength < original / high_freq_factor {
                            f
                        } else {
                            let smooth = (original / wavelength - low_freq_factor)
                                / (high_freq_factor - low_freq_factor);
                            (1.0 - smooth) * stretched + smooth * f
                        };
                        out as f32
                    })
                    .collect()
            }
            RopeScaling::Factors { factors } => (0..pairs)
                .map(|i| (base(i) / f64::from(factors[i])) as f32)
                .collect(),
            RopeScaling::LongRope {
                short_factors,
                long_factors,
                original_max_context,
                ..
            } => {
                let set = if capacity > *original_max_context {
                    long_factors
                } else {
                    short_factors
                };
                (0..pairs)
                    .map(|i| (base(i) / f64::from(set[i])) as f32)
                    .collect()
            }
        }
    }

    /// Factor on sine and cosine.
    pub fn attention_factor(&self) -> f32 {
        match &self.scaling {
            RopeScaling::LongRope {
                attention_factor, ..
            } => *attention_factor,
            _ => 1.0,
        }
    }
}

impl AttentionSpec {
    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}
