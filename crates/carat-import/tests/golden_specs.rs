//! What the committed checkpoints import as: one snapshot of the whole spec each,
//! and the facts that matter spelt out.

mod common;

use carat_bundle::spec::{
    Activation, AttentionSpec, FfnSpec, MixerSpec, ModelSpec, RopeScaling, TensorRole,
};
use carat_import::{Checkpoint, SourceKind, WeightKind, open};
use carat_tensor::formats;
use common::repo;

fn golden(name: &str) -> Checkpoint {
    let checkpoint = open(&repo("tests/golden").join(name)).unwrap();
    checkpoint.spec.validate().unwrap();
    // Every tensor that the spec declares can be read, at its size.
    for decl in checkpoint.spec.tensors() {
        let info = checkpoint.tensors.info(&decl.name).unwrap();
        assert_eq!(info.shape, decl.shape, "{}", decl.name);
        let bytes = checkpoint.tensors.read(&decl.name).unwrap();
        assert_eq!(bytes.len(), decl.shape.bytes(info.dtype).unwrap());
    }
    let mut names: Vec<String> = checkpoint
        .spec
        .tensors()
        .into_iter()
        .map(|d| d.name)
        .collect();
    names.sort();
    assert_eq!(checkpoint.tensors.names(), names);
    checkpoint
}

fn attention(spec: &ModelSpec, layer: usize) -> &AttentionSpec {
    let MixerSpec::Attention(a) = &spec.layers[layer].mixer;
    a
}

fn snapshot(name: &str, spec: &ModelSpec) {
    let json = serde_json::to_string_pretty(spec).unwrap();
    insta::assert_snapshot!(name, json);
}

#[test]
fn llama_gqa_headdim() {
    let c = golden("llama-gqa-headdim");
    snapshot("llama-gqa-headdim", &c.spec);
    assert_eq!(c.origin.kind, SourceKind::Safetensors);
    assert_eq!(c.origin.architecture, "llama");
    assert_eq!(c.origin.weights, WeightKind::Dense);
    assert_eq!(c.origin.declared_dtype.as_deref(), Some("bfloat16"));
    let a = attention(&c.spec, 0);
    // The head width is not hidden size over heads here.
    assert_eq!((a.heads, a.kv_heads, a.head_dim), (4, 2, 32));
    assert_eq!(c.spec.ropes[0].theta, 5_000_000.0);
    assert!(!c.spec.head.tied);
    assert_eq!(c.text.config.config_eos_ids, [2]);
}

#[test]
fn llama_rope_llama3_tied() {
    let c = golden("llama-rope-llama3-tied");
    snapshot("llama-rope-llama3-tied", &c.spec);
    assert!(c.spec.head.tied);
    assert_eq!(
        c.spec.ropes[0].scaling,
        RopeScaling::FrequencyBands {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_context: 64,
        }
    );
    assert_eq!(c.origin.weights, WeightKind::Dense);
}

#[test]
fn mistral_sliding() {
    let c = golden("mistral-sliding");
    snapshot("mistral-sliding", &c.spec);
    assert!((0..3).all(|i| attention(&c.spec, i).window == Some(100)));
    assert_eq!(c.origin.weights, WeightKind::Dense);
}

#[test]
fn qwen2_bias_tied() {
    let c = golden("qwen2-bias-tied");
    snapshot("qwen2-bias-tied", &c.spec);
    let a = attention(&c.spec, 0);
    assert!(a.qkv_bias && !a.out_bias);
    // A window is declared nowhere unless it is switched on.
    assert_eq!(a.window, None);
    assert_eq!(c.origin.weights, WeightKind::Dense);
}

#[test]
fn qwen3_qknorm() {
    let c = golden("qwen3-qknorm");
    snapshot("qwen3-qknorm", &c.spec);
    let a = attention(&c.spec, 0);
    assert!(a.qk_norm.is_some() && !a.qkv_bias);
    assert_eq!(c.origin.weights, WeightKind::Dense);
}

#[test]
fn gemma3_sliding() {
    let c = golden("gemma3-sliding");
    snapshot("gemma3-sliding", &c.spec);
    assert_eq!(c.spec.embedding.scale, 8.0);
    assert_eq!(c.spec.final_norm.weight_offset, 1.0);
    let windows: Vec<_> = (0..4).map(|i| attention(&c.spec, i).window).collect();
    assert_eq!(windows, [Some(100), Some(100), Some(100), None]);
    let theta = |i: usize| c.spec.ropes[attention(&c.spec, i).rope.unwrap()].theta;
    assert_eq!((theta(0), theta(3)), (10_000.0, 1_000_000.0));
    let FfnSpec::Gated { activation, .. } = &c.spec.layers[0].ffn;
    assert_eq!(*activation, Activation::GeluTanh);
    assert!(c.spec.layers[0].post_mixer_norm.is_some());
    assert_eq!(c.origin.weights, WeightKind::Dense);
}

#[test]
fn minicpm4() {
    let c = golden("minicpm4");
    snapshot("minicpm4", &c.spec);
    assert_eq!(c.spec.embedding.scale, 12.0);
    assert_eq!(c.spec.head.scale, 0.25);
    assert_eq!(c.spec.layers[0].residual_scale, (1.4 / 2f64.sqrt()) as f32);
    assert_eq!(c.spec.ropes[0].attention_factor(), 1.0);
    assert_eq!(c.text.config.config_eos_ids, [2, 376]);
    // Random latent weights carry no trace of ternary training, and never the
    // ternary label.
    assert_eq!(c.origin.weights, WeightKind::Dense);
}

#[test]
fn minicpm4_long() {
    let c = golden("minicpm4-long");
    snapshot("minicpm4-long", &c.spec);
    // sqrt(1 + ln(1024 / 256) / ln(256)) = sqrt(1.25)
    let factor = c.spec.ropes[0].attention_factor();
    assert_eq!(factor, 1.25f64.sqrt() as f32);
    assert_eq!(c.origin.weights, WeightKind::Dense);
}

#[test]
fn minicpm4_gguf() {
    let hf = golden("minicpm4");
    let c = golden("minicpm4/minicpm4-tq2_0.gguf");
    snapshot("minicpm4-gguf", &c.spec);
    assert_eq!(c.origin.kind, SourceKind::Gguf);
    assert_eq!(c.origin.architecture, "minicpm");
    assert_eq!(c.origin.weights, WeightKind::Ternary);
    assert!(c.origin.permuted_qk);
    // Both describe the same model.
    assert_eq!(c.spec, hf.spec);
    assert_eq!(c.text.config.config_eos_ids, [2]);
}

// Row A1.7: the ternary file was made from the folder's weights by a converter
// that reorders the rows of q and k, so codes and latent weights agree in sign row
// by row only if the order was restored. Half of them would agree by chance.
#[test]
fn minicpm4_codes_have_the_latent_signs() {
    let hf = golden("minicpm4");
    let gguf = golden("minicpm4/minicpm4-tq2_0.gguf");
    let values = |c: &Checkpoint, name: &str| -> Vec<f32> {
        let info = c.tensors.info(name).unwrap();
        let mut out = vec![0.0; info.shape.elements().unwrap()];
        formats::decode(info.dtype, &c.tensors.read(name).unwrap(), &mut out).unwrap();
        out
    };
    for decl in hf.spec.tensors() {
        if decl.role != TensorRole::Linear {
            continue;
        }
        let (latent, ternary) = (values(&hf, &decl.name), values(&gguf, &decl.name));
        let mut codes = 0;
        for (i, (l, t)) in latent.iter().zip(&ternary).enumerate() {
            if *t != 0.0 {
                assert_eq!(l.signum(), t.signum(), "{} element {i}", decl.name);
                codes += 1;
            }
        }
        // Most codes of this file are zero; these many signs leave nothing to chance.
        assert!(codes > 1_000, "{}: {codes} codes", decl.name);
    }
}

#[test]
fn wren_dense() {
    let c = open(&repo("models/wren-dense")).unwrap();
    snapshot("wren-dense", &c.spec);
    assert_eq!(c.origin.weights, WeightKind::Dense);
    let text = &c.text.config;
    assert_eq!(text.config_eos_ids, [2051]);
    assert_eq!(text.generation_eos_ids, [2051, 2053]);
    let eos = text.eos.as_ref().unwrap();
    assert_eq!(
        (eos.content.as_str(), eos.id),
        ("<|endoftext|>", Some(2051))
    );
    assert_eq!(text.unk, None);
    assert_eq!(text.add_bos, Some(false));
    assert_eq!(text.model_max_length, Some(1024));
    assert_eq!(text.sampling.do_sample, Some(false));
    assert!(
        text.chat_template
            .as_ref()
            .unwrap()
            .contains("<|im_start|>")
    );
    assert!(c.text.tokenizer_json.is_some());
    assert_eq!(c.origin.files.len(), 6);
}

#[test]
fn wren_ternary() {
    let dense = open(&repo("models/wren-dense")).unwrap();
    let c = open(&repo("models/wren-ternary-tq2_0.gguf")).unwrap();
    snapshot("wren-ternary", &c.spec);
    assert_eq!(c.origin.weights, WeightKind::Ternary);
    assert_eq!(c.origin.name.as_deref(), Some("Wren tiny ternary"));
    assert_eq!(c.origin.declared_dtype.as_deref(), Some("TQ2_0"));
    assert!(c.origin.permuted_qk);
    assert_eq!(c.spec, dense.spec);
    let text = &c.text.config;
    assert_eq!(text.config_eos_ids, [2051]);
    assert_eq!(text.add_bos, Some(false));
    // Both files carry the same template.
    assert_eq!(text.chat_template, dense.text.config.chat_template);
}
