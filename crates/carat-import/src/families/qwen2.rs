//! Qwen2 and Qwen2.5: biases on q, k and v; a sliding window only where the
//! config switches it on.

use carat_bundle::spec::ModelSpec;
use carat_tensor::DType;

use super::{
    Described, GgufFamily, HfFamily,
    base::{Base, Defaults, each_attention, require_silu, sliding_layers},
    names, no_extras,
};
use crate::{ImportError, ggml::Meta, hf::Config};

pub(super) const HF: HfFamily = HfFamily {
    types: &["qwen2", "qwen2_5"],
    sub_config: None,
    describe: hf,
    names: &names::HF_PRE_NORM,
};

pub(super) const GGUF: GgufFamily = GgufFamily {
    architecture: "qwen2",
    describe: gguf,
    extras: no_extras,
    names: &names::GGUF,
};

fn hf(cfg: &Config<'_>, _: DType) -> Result<ModelSpec, ImportError> {
    let base = Base::hf(
        cfg,
        &Defaults {
            kv_heads: Some(32),
            eps: Some(1e-6),
            ..Defaults::default()
        },
    )?;
    require_silu(cfg)?;
    let windows = windows(cfg, &base)?;
    let mut spec = base.spec(vec![base.hf_rope(cfg)?]);
    each_attention(&mut spec, |i, a| {
        a.qkv_bias = true;
        a.window = windows[i];
    });
    Ok(spec)
}

/// The window of each layer: none unless `use_sliding_window`, and then on the
/// layers that `layer_types` names or from `max_window_layers` up.
pub(super) fn windows(cfg: &Config<'_>, base: &Base) -> Result<Vec<Option<usize>>, ImportError> {
    let on = cfg.flag("use_sliding_window")?.unwrap_or(false);
    let window = cfg.size("sliding_window")?;
    let from = cfg.size("max_window_layers")?.unwrap_or(28);
    let sliding = sliding_layers(cfg, base.layers.len(), |i| on && i >= from)?;
    if !on {
        if sliding.contains(&true) {
            return Err(cfg.error(
                "layer_types",
                "expected full_attention only while use_sliding_window is false",
            ));
        }
        return Ok(vec![None; sliding.len()]);
    }
    let window = cfg.need("sliding_window", window)?;
    Ok(sliding.into_iter().map(|s| s.then_some(window)).collect())
}

fn gguf(meta: &Meta<'_>) -> Result<Described, ImportError> {
    let base = Base::gguf(meta)?;
    let mut spec = base.spec(vec![base.gguf_rope(meta)?]);
    each_attention(&mut spec, |_, a| a.qkv_bias = true);
    Ok(Described {
        spec,
        permuted_qk: false,
    })
}
