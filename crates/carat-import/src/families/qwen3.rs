//! Qwen3: a norm on each query and key head instead of biases, explicit head
//! width.

use carat_bundle::spec::ModelSpec;
use carat_tensor::DType;

use super::{
    Described, GgufFamily, HfFamily,
    base::{Base, Defaults, each_attention, require_silu},
    names, no_extras,
    qwen2::windows,
};
use crate::{ImportError, ggml::Meta, hf::Config};

pub(super) const HF: HfFamily = HfFamily {
    types: &["qwen3"],
    sub_config: None,
    describe: hf,
    names: &names::HF_PRE_NORM,
};

pub(super) const GGUF: GgufFamily = GgufFamily {
    architecture: "qwen3",
    describe: gguf,
    extras: no_extras,
    names: &names::GGUF,
};

fn hf(cfg: &Config<'_>, _: DType) -> Result<ModelSpec, ImportError> {
    let base = Base::hf(
        cfg,
        &Defaults {
            kv_heads: Some(32),
            head_dim: Some(128),
            eps: Some(1e-6),
            ..Defaults::default()
        },
    )?;
    require_silu(cfg)?;
    let windows = windows(cfg, &base)?;
    let bias = cfg.flag("attention_bias")?.unwrap_or(false);
    let mut spec = base.spec(vec![base.hf_rope(cfg)?]);
    each_attention(&mut spec, |i, a| {
        a.qkv_bias = bias;
        a.out_bias = bias;
        a.qk_norm = Some(base.norm());
        a.window = windows[i];
    });
    Ok(spec)
}

fn gguf(meta: &Meta<'_>) -> Result<Described, ImportError> {
    let base = Base::gguf(meta)?;
    let mut spec = base.spec(vec![base.gguf_rope(meta)?]);
    each_attention(&mut spec, |_, a| a.qk_norm = Some(base.norm()));
    Ok(Described {
        spec,
        permuted_qk: false,
    })
}
