//! The GGUF architectures beside `llama`, from metadata as converters write it.

mod common;

use carat_bundle::spec::{AttentionSpec, MixerSpec, RopeScaling};
use carat_import::{
    Checkpoint,
    gguf::{Value, Writer},
};
use carat_tensor::{DType, Shape};
use common::{encode, message, open_gguf};

const LAYERS: usize = 7;

/// Metadata of a model with 2 and 1 heads of 4, hidden size 8.
fn metadata(arch: &str) -> Writer {
    let mut w = Writer::new();
    w.set("general.architecture", arch);
    for (key, value) in [
        ("block_count", LAYERS as u32),
        ("context_length", 128),
        ("embedding_length", 8),
        ("feed_forward_length", 16),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 4),
        ("attention.value_length", 4),
    ] {
        w.set(&format!("{arch}.{key}"), value);
    }
    for (key, value) in [
        ("attention.layer_norm_rms_epsilon", 1e-6f32),
        ("rope.freq_base", 1e6),
    ] {
        w.set(&format!("{arch}.{key}"), value);
    }
    w
}

/// Opens the model with the common tensors, `layer` ones in each layer and
/// `outer` ones.
fn import(
    mut w: Writer,
    layer: &[(&str, usize)],
    outer: &[(&str, usize)],
) -> Result<Checkpoint, carat_import::ImportError> {
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("token_embd.weight".into(), vec![6, 8]),
        ("output_norm.weight".into(), vec![8]),
    ];
    for (name, n) in outer {
        shapes.push(((*name).to_owned(), vec![*n]));
    }
    for i in 0..LAYERS {
        for (name, shape) in [
            ("attn_norm.weight", vec![8]),
            ("attn_q.weight", vec![8, 8]),
            ("attn_k.weight", vec![4, 8]),
            ("attn_v.weight", vec![4, 8]),
            ("attn_output.weight", vec![8, 8]),
            ("ffn_norm.weight", vec![8]),
            ("ffn_gate.weight", vec![16, 8]),
            ("ffn_up.weight", vec![16, 8]),
            ("ffn_down.weight", vec![8, 16]),
        ] {
            shapes.push((format!("blk.{i}.{name}"), shape));
        }
        for (name, n) in layer {
            shapes.push((format!("blk.{i}.{name}"), vec![*n]));
        }
    }
    for (name, shape) in &shapes {
        w.tensor(name, DType::F32, Shape(shape.clone()));
    }
    let mut file = Vec::new();
    w.write(&mut file, |name| {
        let (_, shape) = shapes.iter().find(|s| s.0 == name).unwrap();
        let n: usize = shape.iter().product();
        let values: Vec<f32> = (1..=n).map(|i| i as f32).collect();
        Ok(encode(DType::F32, &values).into())
    })
    .unwrap();
    open_gguf(&file)
}

fn attention(c: &Checkpoint, layer: usize) -> &AttentionSpec {
    let MixerSpec::Attention(a) = &c.spec.layers[layer].mixer;
    a
}

#[test]
fn qwen2() {
    let bias = [("attn_q.bias", 8), ("attn_k.bias", 4), ("attn_v.bias", 4)];
    let c = import(metadata("qwen2"), &bias, &[]).unwrap();
    assert!(attention(&c, 0).qkv_bias && !attention(&c, 0).out_bias);
    assert!(!c.origin.permuted_qk);
    assert!(c.spec.head.tied);
    assert_eq!(c.spec.ropes[0].theta, 1e6);
    // In file order: nothing is permuted here.
    let q = c.tensors.read("layers.0.attn.q.bias").unwrap();
    let expected: Vec<f32> = (1..=8).map(|i| i as f32).collect();
    assert_eq!(*q, encode(DType::F32, &expected));
    assert_eq!(
        message(import(metadata("qwen2"), &bias[..2], &[])),
        "tensor \"blk.0.attn_v.bias\" is missing (expected shape [4])"
    );
}

#[test]
fn qwen3() {
    let norms = [("attn_q_norm.weight", 4), ("attn_k_norm.weight", 4)];
    let c = import(metadata("qwen3"), &norms, &[]).unwrap();
    let norm = attention(&c, 0).qk_norm.unwrap();
    assert_eq!((norm.eps, norm.weight_offset), (1e-6, 0.0));
    assert!(!c.origin.permuted_qk);
    // A rope over a part of the head is fine where rows are not permuted.
    let mut w = metadata("qwen3");
    w.set("qwen3.rope.dimension_count", 2u32);
    assert_eq!(import(w, &norms, &[]).unwrap().spec.ropes[0].rotary_dim, 2);
}

#[test]
fn gemma3() {
    let norms = [
        ("attn_q_norm.weight", 4),
        ("attn_k_norm.weight", 4),
        ("post_attention_norm.weight", 8),
        ("post_ffw_norm.weight", 8),
    ];
    let mut w = metadata("gemma3");
    w.set("gemma3.attention.sliding_window", 32u32)
        .set("gemma3.rope.scaling.type", "linear")
        .set("gemma3.rope.scaling.factor", 8.0f32);
    let c = import(w.clone(), &norms, &[]).unwrap();
    // Gains are stored whole here, unlike in the HF checkpoint.
    assert_eq!(c.spec.final_norm.weight_offset, 0.0);
    assert_eq!(c.spec.embedding.scale, 8f32.sqrt());
    let windows: Vec<_> = (0..LAYERS).map(|i| attention(&c, i).window).collect();
    assert_eq!(windows[4..], [Some(32), None, Some(32)]);
    let rope = |i: usize| &c.spec.ropes[attention(&c, i).rope.unwrap()];
    assert_eq!(
        (rope(0).theta, &rope(0).scaling),
        (10_000.0, &RopeScaling::None)
    );
    assert_eq!(
        (rope(5).theta, &rope(5).scaling),
        (1e6, &RopeScaling::Linear { factor: 8.0 })
    );
    w.set("gemma3.attention.sliding_window_pattern", 2u32);
    let c = import(w, &norms, &[]).unwrap();
    assert_eq!(attention(&c, 1).window, None);
    assert_eq!(attention(&c, 2).window, Some(32));
    assert_eq!(
        message(import(metadata("gemma3"), &norms, &[])),
        "gemma3.attention.sliding_window: expected a value, found none"
    );
}

#[test]
fn minicpm() {
    let mut w = metadata("minicpm");
    w.set("minicpm.embedding_scale", 12.0f32)
        .set("minicpm.residual_scale", 0.25f32)
        .set("minicpm.logit_scale", 16.0f32)
        .set("minicpm.rope.scaling.type", "longrope")
        .set("minicpm.rope.scaling.attn_factor", 1.25f32)
        .set("minicpm.rope.scaling.original_context_length", 32u32);
    let factors = [
        ("rope_factors_short.weight", 2),
        ("rope_factors_long.weight", 2),
    ];
    let c = import(w.clone(), &[], &factors).unwrap();
    assert!(c.origin.permuted_qk);
    assert_eq!(c.spec.embedding.scale, 12.0);
    assert_eq!(c.spec.layers[3].residual_scale, 0.25);
    assert_eq!(c.spec.head.scale, 1.0 / 16.0);
    assert_eq!(
        c.spec.ropes[0].scaling,
        RopeScaling::LongRope {
            short_factors: vec![1.0, 2.0],
            long_factors: vec![1.0, 2.0],
            original_max_context: 32,
            attention_factor: 1.25,
        }
    );
    assert_eq!(
        message(import(w.clone(), &[], &factors[..1])),
        "tensor \"rope_factors_long.weight\": expected rotary factors, found none"
    );
    w.set("minicpm.logit_scale", 0.0f32);
    assert_eq!(
        message(import(w, &[], &factors)),
        "minicpm.logit_scale: expected a divisor of the logits, found 0"
    );
    assert_eq!(
        message(import(metadata("minicpm"), &[], &[])),
        "minicpm.embedding_scale: expected a value, found none"
    );
    // Factors that no declared scaling uses are no settings.
    let mut w = metadata("minicpm");
    w.set("minicpm.embedding_scale", 12.0f32)
        .set("minicpm.residual_scale", 0.25f32)
        .set("minicpm.logit_scale", 16.0f32);
    assert_eq!(
        message(import(w, &[], &factors)),
        "unexpected tensors \"rope_factors_long.weight\", \"rope_factors_short.weight\""
    );
}

#[test]
fn llama_rope_settings() {
    let c = import(metadata("llama"), &[], &[("rope_freqs.weight", 2)]).unwrap();
    assert_eq!(c.origin.skipped[0].name, "rope_freqs.weight");
    assert_eq!(
        c.spec.ropes[0].scaling,
        RopeScaling::Factors {
            factors: vec![1.0, 2.0]
        }
    );
    let linear = |w: &mut Writer| {
        w.set("llama.rope.scaling.type", "linear")
            .set("llama.rope.scaling.factor", 4.0f32);
    };
    let mut w = metadata("llama");
    linear(&mut w);
    let c = import(w.clone(), &[], &[]).unwrap();
    assert_eq!(c.spec.ropes[0].scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(
        message(import(w, &[], &[("rope_freqs.weight", 2)])),
        "llama.rope.scaling.type: expected no scaling beside tensor \"rope_freqs.weight\""
    );
    // The older name of the factor, and no type.
    let mut w = metadata("llama");
    w.set("llama.rope.scale_linear", 2.0f32);
    let c = import(w, &[], &[]).unwrap();
    assert_eq!(c.spec.ropes[0].scaling, RopeScaling::Linear { factor: 2.0 });
    let mut w = metadata("llama");
    w.set("llama.rope.scaling.type", Value::String("none".into()));
    assert!(import(w, &[], &[]).is_ok());
}
