//! MiniCPM4 (and the ternary models built on it): Llama's blocks with scaled
//! embedding, branches and logits, and long-context rotary factors.

use carat_bundle::spec::ModelSpec;
use carat_tensor::DType;

use super::{
    Described, GgufFamily, HfFamily,
    base::{Base, Defaults, each_attention, require_silu},
    llama::permutable,
    names,
};
use crate::{ImportError, ggml::Meta, gguf::Value, hf::Config};

pub(super) const HF: HfFamily = HfFamily {
    types: &["minicpm"],
    sub_config: None,
    describe: hf,
    names: &names::HF_PRE_NORM,
};

pub(super) const GGUF: GgufFamily = GgufFamily {
    architecture: "minicpm",
    describe: gguf,
    extras,
    names: &names::GGUF,
};

fn hf(cfg: &Config<'_>, _: DType) -> Result<ModelSpec, ImportError> {
    // Whole heads rotate, so the number of rotary factors gives the head width of
    // a file that does not declare it.
    let factors = match cfg.object("rope_scaling")? {
        Some(scaling) => scaling.numbers("short_factor")?.map(|f| f.len()),
        None => None,
    };
    let base = Base::hf(
        cfg,
        &Defaults {
            head_dim: factors.map(|n| 2 * n),
            ..Defaults::default()
        },
    )?;
    require_silu(cfg)?;
    cfg.only("pretraining_tp", &[1.into()])?;
    // Mixtures of experts of the same name.
    cfg.only("num_experts", &[0.into()])?;
    // The width against which training scaled its hyper-parameters; inference
    // uses the number of layers.
    cfg.skip("mup_denominator");
    if cfg.get("sparse_config").is_some() {
        cfg.note(
            "sparse_config was ignored: attention is dense, as in the reference up to dense_len",
        );
    }
    let scale_emb = cfg.number("scale_emb")?;
    let scale_depth = cfg.number("scale_depth")?;
    let dim_model_base = cfg.number("dim_model_base")?;
    let mut spec = base.spec(vec![base.hf_rope(cfg)?]);
    spec.embedding.scale = cfg.need("scale_emb", scale_emb)? as f32;
    let depth = cfg.need("scale_depth", scale_depth)? / (spec.layers.len() as f64).sqrt();
    let base_width = cfg.need("dim_model_base", dim_model_base)?;
    spec.head.scale = (base_width / spec.hidden_size as f64) as f32;
    let bias = cfg.flag("attention_bias")?.unwrap_or(false);
    for layer in &mut spec.layers {
        layer.residual_scale = depth as f32;
    }
    each_attention(&mut spec, |_, a| {
        a.qkv_bias = bias;
        a.out_bias = bias;
    });
    Ok(spec)
}

fn gguf(meta: &Meta<'_>) -> Result<Described, ImportError> {
    let base = Base::gguf(meta)?;
    let rope = base.gguf_rope(meta)?;
    permutable(meta, &base, rope.rotary_dim)?;
    let mut spec = base.spec(vec![rope]);
    let number = |key: &str| meta.need(key, meta.number(key)?);
    spec.embedding.scale = number("embedding_scale")? as f32;
    let residual = number("residual_scale")? as f32;
    for layer in &mut spec.layers {
        layer.residual_scale = residual;
    }
    // Stored as the divisor: hidden size over the base width.
    let divisor = number("logit_scale")?;
    if divisor == 0.0 {
        return Err(meta.error("logit_scale", "expected a divisor of the logits, found 0"));
    }
    spec.head.scale = (1.0 / divisor) as f32;
    Ok(Described {
        spec,
        permuted_qk: true,
    })
}

fn extras(spec: &ModelSpec) -> Vec<(&'static str, Value)> {
    let residual = spec.layers.first().map_or(1.0, |l| l.residual_scale);
    vec![
        ("embedding_scale", Value::F32(spec.embedding.scale)),
        ("residual_scale", Value::F32(residual)),
        ("logit_scale", Value::F32(1.0 / spec.head.scale)),
    ]
}
