//! What decoder families have in common: sizes, and one spec built from them.

use carat_bundle::spec::{
    Activation, AttentionSpec, EmbeddingSpec, FfnSpec, HeadSpec, LayerSpec, MixerSpec, ModelSpec,
    NormSpec, RopeScaling, RopeSpec,
};

use crate::{
    ImportError,
    ggml::Meta,
    hf::{Config, Ropes, read_ropes},
};

/// Most layers that are believed; the spec's own check is the same.
const MAX_LAYERS: usize = 1 << 12;

/// Sizes of a decoder with grouped-query attention and a gated feed-forward.
pub(super) struct Base {
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) max_context: usize,
    pub(super) head_dim: usize,
    pub(super) eps: f32,
    pub(super) tied: bool,
    /// Per layer: query heads, key/value heads, inner width.
    pub(super) layers: Vec<(usize, usize, usize)>,
}

/// Values that a family's configuration class has for keys a file leaves out.
/// Sizes without one are required.
#[derive(Default)]
pub(super) struct Defaults {
    pub(super) vocab_size: Option<usize>,
    pub(super) heads: Option<usize>,
    /// Without one, there are as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// Without one, it is the hidden size over the query heads.
    pub(super) head_dim: Option<usize>,
    pub(super) max_context: Option<usize>,
    pub(super) eps: Option<f64>,
    pub(super) tied: bool,
}

impl Base {
    /// Reads the sizes from `config.json`.
    pub(super) fn hf(cfg: &Config<'_>, defaults: &Defaults) -> Result<Base, ImportError> {
        let size = |key: &str, default: Option<usize>| cfg.need(key, cfg.size(key)?.or(default));
        let hidden_size = size("hidden_size", None)?;
        let heads = size("num_attention_heads", defaults.heads)?;
        let kv_heads = cfg.size("num_key_value_heads")?.or(defaults.kv_heads);
        let head_dim = match cfg.size("head_dim")?.or(defaults.head_dim) {
            Some(d) => d,
            None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                return Err(cfg.error(
                    "num_attention_heads",
                    format!("expected a divisor of hidden_size {hidden_size}, found {heads}"),
                ));
            }
        };
        let count = size("num_hidden_layers", None)?;
        if count > MAX_LAYERS {
            return Err(cfg.error(
                "num_hidden_layers",
                format!("expected at most {MAX_LAYERS}, found {count}"),
            ));
        }
        let layer = (
            heads,
            kv_heads.unwrap_or(heads),
            size("intermediate_size", None)?,
        );
        let eps = cfg.number("rms_norm_eps")?.or(defaults.eps);
        Ok(Base {
            vocab_size: size("vocab_size", defaults.vocab_size)?,
            hidden_size,
            max_context: size("max_position_embeddings", defaults.max_context)?,
            head_dim,
            eps: cfg.need("rms_norm_eps", eps)? as f32,
            tied: cfg.flag("tie_word_embeddings")?.unwrap_or(defaults.tied),
            layers: vec![layer; count],
        })
    }

    /// Reads the sizes from GGUF metadata.
    pub(super) fn gguf(meta: &Meta<'_>) -> Result<Base, ImportError> {
        let count = meta.need_size("block_count")?;
        if count > MAX_LAYERS {
            return Err(meta.error(
                "block_count",
                format!("expected at most {MAX_LAYERS}, found {count}"),
            ));
        }
        let hidden_size = meta.need_size("embedding_length")?;
        let heads = meta.per_layer("attention.head_count", count)?;
        let heads = meta.need("attention.head_count", heads)?;
        let kv_heads = meta
            .per_layer("attention.head_count_kv", count)?
            .unwrap_or_else(|| heads.clone());
        let inner = meta.per_layer("feed_forward_length", count)?;
        let inner = meta.need("feed_forward_length", inner)?;
        let first = heads.first().copied().unwrap_or(0);
        let head_dim = match meta.size("attention.key_length")? {
            Some(d) => d,
            None if first > 0 && hidden_size.is_multiple_of(first) => hidden_size / first,
            None => {
                return Err(meta.error(
                    "attention.head_count",
                    format!("expected a divisor of embedding_length {hidden_size}, found {first}"),
                ));
            }
        };
        if let Some(v) = meta.size("attention.value_length")?
            && v != head_dim
        {
            return Err(meta.error(
                "attention.value_length",
                format!("expected the head width {head_dim}, found {v}"),
            ));
        }
        let vocab_size = meta.vocab_size()?;
        let eps = meta.number("attention.layer_norm_rms_epsilon")?;
        Ok(Base {
            vocab_size,
            hidden_size,
            max_context: meta.need_size("context_length")?,
            head_dim,
            eps: meta.need("attention.layer_norm_rms_epsilon", eps)? as f32,
            tied: !meta.has_tensor("output.weight"),
            layers: heads
                .into_iter()
                .zip(kv_heads)
                .zip(inner)
                .map(|((h, k), f)| (h, k, f))
                .collect(),
        })
    }

    /// A norm whose stored gain is the gain.
    pub(super) fn norm(&self) -> NormSpec {
        NormSpec {
            eps: self.eps,
            weight_offset: 0.0,
        }
    }

    /// The common decoder: one norm before each branch, SiLU, no biases, the
    /// first rope everywhere. Families change what differs.
    pub(super) fn spec(&self, ropes: Vec<RopeSpec>) -> ModelSpec {
        let layers = self
            .layers
            .iter()
            .map(|&(heads, kv_heads, intermediate_size)| LayerSpec {
                mixer_norm: self.norm(),
                mixer: MixerSpec::Attention(AttentionSpec {
                    heads,
                    kv_heads,
                    head_dim: self.head_dim,
                    qkv_bias: false,
                    out_bias: false,
                    qk_norm: None,
                    rope: Some(0),
                    window: None,
                    scale: (self.head_dim as f64).powf(-0.5) as f32,
                    logit_softcap: None,
                }),
                post_mixer_norm: None,
                ffn_norm: self.norm(),
                ffn: FfnSpec::Gated {
                    intermediate_size,
                    activation: Activation::Silu,
                    bias: false,
                },
                post_ffn_norm: None,
                residual_scale: 1.0,
            })
            .collect();
        ModelSpec {
            hidden_size: self.hidden_size,
            vocab_size: self.vocab_size,
            max_context: self.max_context,
            embedding: EmbeddingSpec { scale: 1.0 },
            layers,
            final_norm: self.norm(),
            head: HeadSpec {
                tied: self.tied,
                scale: 1.0,
                softcap: None,
            },
            ropes,
        }
    }

    /// The one rope of an HF checkpoint whose layers all share it.
    pub(super) fn hf_rope(&self, cfg: &Config<'_>) -> Result<RopeSpec, ImportError> {
        match read_ropes(cfg, self.head_dim, self.max_context)? {
            Ropes::Uniform(rope) => Ok(rope),
            Ropes::PerLayerType { .. } => Err(cfg.error(
                "rope_parameters",
                "expected one set of parameters, found one for each layer type",
            )),
        }
    }

    /// The rope of a GGUF file: base, width and the scaling that metadata or a
    /// `rope_freqs` tensor describe.
    pub(super) fn gguf_rope(&self, meta: &Meta<'_>) -> Result<RopeSpec, ImportError> {
        let rotary_dim = meta.size("rope.dimension_count")?.unwrap_or(self.head_dim);
        let theta = meta.number("rope.freq_base")?.unwrap_or(10_000.0);
        let kind = meta.text("rope.scaling.type")?;
        let factor = match meta.number("rope.scaling.factor")? {
            Some(f) => Some(f),
            // The older name of the same number.
            None => meta.number("rope.scale_linear")?,
        };
        let scaling = match kind.unwrap_or("none") {
            "none" if kind.is_none() && factor.is_some_and(|f| f != 0.0 && f != 1.0) => {
                RopeScaling::Linear {
                    factor: factor.unwrap_or(1.0),
                }
            }
            "none" => RopeScaling::None,
            "linear" => RopeScaling::Linear {
                factor: meta.need("rope.scaling.factor", factor)?,
            },
            "longrope" => self.gguf_longrope(meta)?,
            other => {
                return Err(meta.error(
                    "rope.scaling.type",
                    format!("expected one of none, linear, longrope, found {other:?}"),
                ));
            }
        };
        let scaling = match (scaling, meta.factors("rope_freqs.weight")?) {
            (scaling, None) => scaling,
            (RopeScaling::None, Some(factors)) => RopeScaling::Factors { factors },
            (_, Some(_)) => {
                return Err(meta.error(
                    "rope.scaling.type",
                    "expected no scaling beside tensor \"rope_freqs.weight\"",
                ));
            }
        };
        Ok(RopeSpec {
            rotary_dim,
            theta,
            scaling,
        })
    }

    fn gguf_longrope(&self, meta: &Meta<'_>) -> Result<RopeScaling, ImportError> {
        let original = meta.size("rope.scaling.original_context_length")?;
        Ok(RopeScaling::LongRope {
            short_factors: meta.need_factors("rope_factors_short.weight")?,
            long_factors: meta.need_factors("rope_factors_long.weight")?,
            original_max_context: original.unwrap_or(self.max_context),
            attention_factor: meta.number("rope.scaling.attn_factor")?.unwrap_or(1.0) as f32,
        })
    }
}

/// Refuses activations other than SiLU.
pub(super) fn require_silu(cfg: &Config<'_>) -> Result<(), ImportError> {
    cfg.only("hidden_act", &["silu".into()])
}

/// Applies `change` to the attention of every layer; `usize` is its index.
pub(super) fn each_attention(
    spec: &mut ModelSpec,
    mut change: impl FnMut(usize, &mut AttentionSpec),
) {
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        let MixerSpec::Attention(a) = &mut layer.mixer;
        change(i, a);
    }
}

/// Which layers have a sliding window, by `layer_types` or else by `rule`.
pub(super) fn sliding_layers(
    cfg: &Config<'_>,
    count: usize,
    rule: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, ImportError> {
    let Some(types) = cfg.texts("layer_types")? else {
        return Ok((0..count).map(rule).collect());
    };
    if types.len() != count {
        return Err(cfg.error(
            "layer_types",
            format!("expected {count} entries, found {}", types.len()),
        ));
    }
    types
        .into_iter()
        .map(|t| match t {
            "full_attention" => Ok(false),
            "sliding_attention" => Ok(true),
            other => Err(cfg.error(
                "layer_types",
                format!("expected full_attention or sliding_attention, found {other:?}"),
            )),
        })
        .collect()
}
