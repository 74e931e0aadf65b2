//! Mistral: the same blocks as Llama, every layer with the same sliding window
//! (if any).

use carat_bundle::spec::ModelSpec;
use carat_tensor::DType;

use super::{
    HfFamily,
    base::{Base, Defaults, each_attention, require_silu, sliding_layers},
    names,
};
use crate::{ImportError, hf::Config};

pub(super) const HF: HfFamily = HfFamily {
    types: &["mistral"],
    sub_config: None,
    describe: hf,
    names: &names::HF_PRE_NORM,
};

fn hf(cfg: &Config<'_>, _: DType) -> Result<ModelSpec, ImportError> {
    let base = Base::hf(
        cfg,
        &Defaults {
            kv_heads: Some(8),
            eps: Some(1e-6),
            ..Defaults::default()
        },
    )?;
    require_silu(cfg)?;
    // An absent key means the class's default window, `null` means none: a file
    // that leaves it out says too little.
    if !cfg.keys().any(|k| k == "sliding_window") {
        return Err(cfg.error("sliding_window", "expected a number or null, found nothing"));
    }
    let window = cfg.size("sliding_window")?;
    let sliding = sliding_layers(cfg, base.layers.len(), |_| true)?;
    let mut spec = base.spec(vec![base.hf_rope(cfg)?]);
    each_attention(&mut spec, |i, a| a.window = window.filter(|_| sliding[i]));
    Ok(spec)
}
