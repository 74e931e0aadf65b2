//! Llama: grouped-query attention, optional biases, linear or llama3 rotary
//! scaling, explicit head width. GGUF files of this architecture (which other
//! families use too) store q and k with interleaved rows.

use carat_bundle::spec::{FfnSpec, ModelSpec, RopeScaling};
use carat_tensor::DType;

use super::{
    Described, GgufFamily, HfFamily,
    base::{Base, Defaults, each_attention, require_silu},
    names, no_extras,
};
use crate::{ImportError, ggml::Meta, hf::Config};

pub(super) const HF: HfFamily = HfFamily {
    types: &["llama"],
    sub_config: None,
    describe: hf,
    names: &names::HF_PRE_NORM,
};

pub(super) const GGUF: GgufFamily = GgufFamily {
    architecture: "llama",
    describe: gguf,
    extras: no_extras,
    names: &names::GGUF,
};

fn hf(cfg: &Config<'_>, _: DType) -> Result<ModelSpec, ImportError> {
    let base = Base::hf(
        cfg,
        &Defaults {
            eps: Some(1e-6),
            ..Defaults::default()
        },
    )?;
    require_silu(cfg)?;
    // Tensor-parallel slices are summed in another order: not the same numbers.
    cfg.only("pretraining_tp", &[1.into()])?;
    let rope = base.hf_rope(cfg)?;
    if matches!(rope.scaling, RopeScaling::LongRope { .. }) {
        return Err(cfg.error(
            "rope_scaling",
            "expected default, linear or llama3, found longrope",
        ));
    }
    let mut spec = base.spec(vec![rope]);
    let attention_bias = cfg.flag("attention_bias")?.unwrap_or(false);
    let mlp_bias = cfg.flag("mlp_bias")?.unwrap_or(false);
    each_attention(&mut spec, |_, a| {
        a.qkv_bias = attention_bias;
        a.out_bias = attention_bias;
    });
    set_ffn_bias(&mut spec, mlp_bias);
    Ok(spec)
}

fn gguf(meta: &Meta<'_>) -> Result<Described, ImportError> {
    let base = Base::gguf(meta)?;
    // Mixtures of experts share the architecture's name.
    meta.only_zero("expert_count")?;
    meta.only_zero("expert_used_count")?;
    let rope = base.gguf_rope(meta)?;
    permutable(meta, &base, rope.rotary_dim)?;
    let mut spec = base.spec(vec![rope]);
    // Metadata does not mention biases; the tensors decide.
    let (qkv, out) = (
        meta.has_tensor("blk.0.attn_q.bias"),
        meta.has_tensor("blk.0.attn_output.bias"),
    );
    each_attention(&mut spec, |_, a| {
        a.qkv_bias = qkv;
        a.out_bias = out;
    });
    set_ffn_bias(&mut spec, meta.has_tensor("blk.0.ffn_gate.bias"));
    Ok(Described {
        spec,
        permuted_qk: true,
    })
}

/// Rows are interleaved over whole heads, which only undoes cleanly when whole
/// heads rotate.
pub(super) fn permutable(
    meta: &Meta<'_>,
    base: &Base,
    rotary_dim: usize,
) -> Result<(), ImportError> {
    if rotary_dim == base.head_dim {
        return Ok(());
    }
    Err(meta.error(
        "rope.dimension_count",
        format!(
            "expected the head width {}, found {rotary_dim}",
            base.head_dim
        ),
    ))
}

fn set_ffn_bias(spec: &mut ModelSpec, value: bool) {
    for layer in &mut spec.layers {
        let FfnSpec::Gated { bias, .. } = &mut layer.ffn;
        *bias = value;
    }
}
