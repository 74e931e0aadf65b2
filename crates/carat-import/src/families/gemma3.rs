//! Gemma 3 text: gains stored less one, four norms a layer, scaled embedding,
//! layers with a sliding window between layers that see everything, each kind
//! with its own rope.

use carat_bundle::spec::{
    Activation, FfnSpec, MixerSpec, ModelSpec, NormSpec, RopeScaling, RopeSpec,
};
use carat_tensor::DType;

use super::{
    Described, GgufFamily, HfFamily,
    base::{Base, Defaults, each_attention, sliding_layers},
    names,
};
use crate::{
    ImportError,
    ggml::Meta,
    gguf::Value,
    hf::{Config, Ropes, read_ropes},
};

pub(super) const HF: HfFamily = HfFamily {
    types: &["gemma3_text", "gemma3"],
    sub_config: Some("text_config"),
    describe: hf,
    names: &names::HF_SANDWICH,
};

pub(super) const GGUF: GgufFamily = GgufFamily {
    architecture: "gemma3",
    describe: gguf,
    extras,
    names: &names::GGUF,
};

/// One layer in this many sees everything, where the file does not say.
const PATTERN: usize = 6;
/// Base of the layers with a window, where the file does not say.
const LOCAL_THETA: f64 = 10_000.0;

fn hf(cfg: &Config<'_>, embedding: DType) -> Result<ModelSpec, ImportError> {
    let base = Base::hf(
        cfg,
        &Defaults {
            vocab_size: Some(262_208),
            heads: Some(8),
            kv_heads: Some(4),
            head_dim: Some(256),
            max_context: Some(131_072),
            eps: Some(1e-6),
            tied: true,
        },
    )?;
    cfg.only("hidden_activation", &["gelu_pytorch_tanh".into()])?;
    cfg.only("hidden_act", &["gelu_pytorch_tanh".into()])?;
    cfg.only("attention_bias", &[false.into()])?;
    cfg.only("use_bidirectional_attention", &[false.into()])?;
    let pattern = cfg.size("sliding_window_pattern")?;
    let pattern = pattern.or(cfg.size("_sliding_window_pattern")?);
    let pattern = pattern.unwrap_or(PATTERN).max(1);
    let window = cfg.size("sliding_window")?.unwrap_or(4096);
    let sliding = sliding_layers(cfg, base.layers.len(), |i| (i + 1) % pattern != 0)?;
    let ropes = match read_ropes(cfg, base.head_dim, base.max_context)? {
        Ropes::PerLayerType { full, sliding } => vec![full, sliding],
        Ropes::Uniform(mut full) => {
            // Neither dialect names the local base; the class's defaults differ from ours.
            if cfg.get("rope_theta").is_none() && cfg.get("rope_parameters").is_none() {
                full.theta = 1_000_000.0;
            }
            vec![full.clone(), local(full, LOCAL_THETA)]
        }
    };
    let query_scale = cfg.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    let softcap = cfg.number("attn_logit_softcapping")?.map(|c| c as f32);
    let mut spec = sandwich(&base, ropes, 1.0, window, &sliding);
    spec.head.softcap = cfg.number("final_logit_softcapping")?.map(|c| c as f32);
    each_attention(&mut spec, |_, a| {
        a.scale = query_scale.powf(-0.5) as f32;
        a.logit_softcap = softcap;
    });
    // The reference rounds the factor to the embedding's own format.
    let root = (base.hidden_size as f64).sqrt() as f32;
    spec.embedding.scale = match embedding {
        DType::BF16 => half::bf16::from_f32(root).to_f32(),
        DType::F16 => half::f16::from_f32(root).to_f32(),
        _ => root,
    };
    Ok(spec)
}

fn gguf(meta: &Meta<'_>) -> Result<Described, ImportError> {
    let base = Base::gguf(meta)?;
    let full = base.gguf_rope(meta)?;
    let theta = meta.number("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA);
    let ropes = vec![full.clone(), local(full, theta)];
    let window = meta.need_size("attention.sliding_window")?;
    let pattern = meta.size("attention.sliding_window_pattern")?;
    let pattern = pattern.unwrap_or(PATTERN).max(1);
    let sliding: Vec<bool> = (1..=base.layers.len()).map(|i| i % pattern != 0).collect();
    // Converters store the gain itself here, one already added.
    let mut spec = sandwich(&base, ropes, 0.0, window, &sliding);
    spec.embedding.scale = (base.hidden_size as f64).sqrt() as f32;
    // Files do not carry the query scale. It is the head width, except in the
    // 62-layer model, which uses hidden size over heads.
    if spec.layers.len() == 62 {
        each_attention(&mut spec, |_, a| {
            a.scale = (base.hidden_size as f64 / a.heads as f64).powf(-0.5) as f32;
        });
    }
    spec.head.softcap = meta.number("final_logit_softcapping")?.map(|c| c as f32);
    Ok(Described {
        spec,
        permuted_qk: false,
    })
}

fn extras(spec: &ModelSpec) -> Vec<(&'static str, Value)> {
    let windows = spec.layers.iter().map(|layer| {
        let MixerSpec::Attention(a) = &layer.mixer;
        a.window
    });
    let whole = windows.clone().position(|w| w.is_none());
    let number = |n: usize| Value::U32(n.try_into().unwrap_or(u32::MAX));
    let mut out = vec![];
    if let Some(window) = windows.flatten().next() {
        out.push(("attention.sliding_window", number(window)));
        // Read as "every so many"; more than there are layers where none is.
        let every = whole.map_or(spec.layers.len() + 1, |first| first + 1);
        out.push(("attention.sliding_window_pattern", number(every)));
    }
    if let Some(rope) = spec.ropes.get(1) {
        out.push(("rope.freq_base_swa", Value::F32(rope.theta as f32)));
    }
    if let Some(cap) = spec.head.softcap {
        out.push(("final_logit_softcapping", Value::F32(cap)));
    }
    out
}

/// The rope of layers with a window: never stretched.
fn local(full: RopeSpec, theta: f64) -> RopeSpec {
    RopeSpec {
        theta,
        scaling: RopeScaling::None,
        ..full
    }
}

/// The family's blocks: norms around both branches and on queries and keys.
fn sandwich(
    base: &Base,
    ropes: Vec<RopeSpec>,
    weight_offset: f32,
    window: usize,
    sliding: &[bool],
) -> ModelSpec {
    let norm = NormSpec {
        eps: base.eps,
        weight_offset,
    };
    let mut spec = base.spec(ropes);
    spec.final_norm = norm;
    for layer in &mut spec.layers {
        layer.mixer_norm = norm;
        layer.post_mixer_norm = Some(norm);
        layer.ffn_norm = norm;
        layer.post_ffn_norm = Some(norm);
        let FfnSpec::Gated { activation, .. } = &mut layer.ffn;
        *activation = Activation::GeluTanh;
    }
    each_attention(&mut spec, |i, a| {
        a.qk_norm = Some(norm);
        a.window = sliding[i].then_some(window);
        a.rope = Some(usize::from(sliding[i]));
    });
    spec
}
