//! Configs as published, in both dialects, and configs that must be refused.

use std::path::Path;

use carat_bundle::spec::{AttentionSpec, MixerSpec, ModelSpec, RopeScaling};
use carat_tensor::DType;
use serde_json::{Value, json};

use super::open::{family, read_config};
use crate::{ImportError, OpenOptions};

fn spec_with(json: &Value, options: &OpenOptions) -> Result<(ModelSpec, Vec<String>), ImportError> {
    let path = Path::new("config.json");
    let read = read_config(path, json, family(path, json)?, DType::BF16, options)?;
    read.spec.validate().map_err(|source| ImportError::Spec {
        path: path.to_owned(),
        source,
    })?;
    Ok((read.spec, read.notes))
}

fn spec(json: &Value) -> Result<ModelSpec, ImportError> {
    spec_with(json, &OpenOptions::default()).map(|(s, _)| s)
}

fn attention(spec: &ModelSpec, layer: usize) -> &AttentionSpec {
    let MixerSpec::Attention(a) = &spec.layers[layer].mixer;
    a
}

fn message(json: &Value) -> String {
    spec(json).unwrap_err().to_string()
}

fn with(base: &Value, key: &str, value: Value) -> Value {
    let mut out = base.clone();
    out[key] = value;
    out
}

fn without(base: &Value, key: &str) -> Value {
    let mut out = base.clone();
    out.as_object_mut().unwrap().remove(key);
    out
}

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256
    })
}

#[test]
fn llama_in_the_published_dialect() {
    let s = spec(&llama()).unwrap();
    assert_eq!(s.ropes[0].theta, 500_000.0);
    assert!(matches!(
        s.ropes[0].scaling,
        RopeScaling::FrequencyBands {
            factor: 32.0,
            original_max_context: 8192,
            ..
        }
    ));
    assert!(s.head.tied);
    assert_eq!(attention(&s, 15).scale, 0.125);
}

#[test]
fn the_first_llama_leaves_much_out() {
    let json = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "tie_word_embeddings": false, "vocab_size": 32000
    });
    let s = spec(&json).unwrap();
    let a = attention(&s, 0);
    assert_eq!((a.kv_heads, a.head_dim), (32, 128));
    assert_eq!(s.ropes[0].theta, 10_000.0);
    // Linear scaling under the older name of the key.
    let stretched = with(
        &json,
        "rope_scaling",
        json!({"type": "linear", "factor": 4.0}),
    );
    let s = spec(&stretched).unwrap();
    assert_eq!(s.ropes[0].scaling, RopeScaling::Linear { factor: 4.0 });
}

#[test]
fn llama_biases() {
    let json = with(
        &with(&llama(), "attention_bias", json!(true)),
        "mlp_bias",
        json!(true),
    );
    let names: Vec<String> = spec(&json)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|t| t.name)
        .collect();
    for name in [
        "attn.q.bias",
        "attn.o.bias",
        "ffn.gate.bias",
        "ffn.down.bias",
    ] {
        assert!(names.contains(&format!("layers.3.{name}")), "{name}");
    }
}

#[test]
fn both_dialects_may_stand_side_by_side_if_they_agree() {
    let flat = json!({"rope_type": "default", "rope_theta": 10000.0});
    let json = with(&without(&llama(), "rope_scaling"), "rope_parameters", flat);
    assert_eq!(
        message(&json),
        "config.json: rope_parameters.rope_theta: expected the 500000 of rope_theta, found 10000"
    );
    assert!(spec(&with(&json, "rope_theta", json!(10000.0))).is_ok());
    let json = with(
        &llama(),
        "rope_parameters",
        json!({"rope_type": "default", "rope_theta": 500000.0}),
    );
    assert_eq!(
        message(&json),
        "config.json: rope_parameters: expected the same settings as rope_scaling, found others"
    );
}

#[test]
fn unknown_keys_are_errors_unless_declared() {
    let json = with(&llama(), "residual_multiplier", json!(0.5));
    assert_eq!(
        message(&json),
        "config.json: unknown key \"residual_multiplier\""
    );
    let json = with(&json, "attn_gain", json!(1));
    assert_eq!(
        message(&json),
        "config.json: unknown keys \"attn_gain\", \"residual_multiplier\""
    );
    assert!(
        spec(&json)
            .unwrap_err()
            .hint()
            .unwrap()
            .contains("--ignore-key")
    );
    let options = OpenOptions {
        ignore_keys: vec!["attn_gain".into(), "residual_multiplier".into()],
    };
    let (_, notes) = spec_with(&json, &options).unwrap();
    assert_eq!(
        notes,
        [
            "key residual_multiplier was ignored on request",
            "key attn_gain was ignored on request"
        ]
    );
    // Inside objects too.
    let mut json = llama();
    json["rope_scaling"]["beta_fast"] = json!(32.0);
    assert_eq!(
        message(&json),
        "config.json: unknown key \"rope_scaling.beta_fast\""
    );
}

#[test]
fn values_that_would_change_the_arithmetic_are_refused() {
    for (key, value, expected) in [
        ("pretraining_tp", json!(2), "only 1 is supported, found 2"),
        (
            "hidden_act",
            json!("gelu"),
            "only \"silu\" is supported, found \"gelu\"",
        ),
        (
            "hidden_size",
            json!(-1),
            "expected a whole number, found -1",
        ),
        (
            "hidden_size",
            json!("2048"),
            "expected a whole number, found \"2048\"",
        ),
        (
            "num_hidden_layers",
            json!(1u64 << 40),
            "expected at most 4096, found 1099511627776",
        ),
        (
            "rms_norm_eps",
            json!("small"),
            "expected a number, found \"small\"",
        ),
        (
            "attention_bias",
            json!(0),
            "expected true or false, found 0",
        ),
        (
            "rope_scaling",
            json!([1]),
            "expected an object, found a list",
        ),
    ] {
        assert_eq!(
            message(&with(&llama(), key, value)),
            format!("config.json: {key}: {expected}")
        );
    }
    for (scaling, expected) in [
        (
            json!({"rope_type": "yarn", "factor": 4.0}),
            "rope_scaling.rope_type: expected one of default, linear, llama3, longrope, found \"yarn\"",
        ),
        (
            json!({"rope_type": "linear"}),
            "rope_scaling.factor: expected a value, found none",
        ),
        (
            json!({"rope_type": "linear", "factor": -2.0}),
            "rope_scaling.factor: expected a positive number, found -2",
        ),
        (
            json!({"rope_type": "linear", "type": "dynamic", "factor": 2.0}),
            "rope_scaling.type: expected the \"linear\" of rope_type, found \"dynamic\"",
        ),
        (
            json!({"rope_type": "default", "factor": 2.0}),
            "rope_scaling.factor: only 1.0 or 1 is supported, found 2.0",
        ),
        (
            json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
            "rope_scaling: expected default, linear or llama3, found longrope",
        ),
    ] {
        let json = with(&llama(), "rope_scaling", scaling);
        assert_eq!(message(&json), format!("config.json: {expected}"));
    }
    for key in [
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    ] {
        assert_eq!(
            message(&without(&llama(), key)),
            format!("config.json: {key}: expected a value, found none")
        );
    }
    let odd = without(&with(&llama(), "num_attention_heads", json!(3)), "head_dim");
    assert_eq!(
        message(&odd),
        "config.json: num_attention_heads: expected a divisor of hidden_size 2048, found 3"
    );
    assert_eq!(
        message(&with(&llama(), "num_key_value_heads", json!(0))),
        "config.json: model spec: layers.0.mixer.kv_heads: 0 is outside 1..=4096"
    );
}

#[test]
fn unknown_architectures_list_the_known_ones() {
    let text = message(&json!({"model_type": "mamba"}));
    assert_eq!(
        text,
        "config.json: unknown architecture \"mamba\", expected one of gemma3, gemma3_text, llama, \
         minicpm, mistral, qwen2, qwen2_5, qwen3"
    );
    assert_eq!(
        message(&json!({})),
        "config.json: model_type: expected a string, found none"
    );
    assert_eq!(
        message(&json!([])),
        "config.json: model_type: expected a string, found none"
    );
}

#[test]
fn quantized_folders_are_refused_except_latent_masters() {
    let path = Path::new("config.json");
    let options = OpenOptions::default();
    let json = with(
        &llama(),
        "quantization_config",
        json!({"quant_method": "gptq", "bits": 4}),
    );
    assert_eq!(
        message(&json),
        "config.json: quantization_config.quant_method: expected unquantized weights (or bitnet in \
         online mode), found \"gptq\""
    );
    let online = json!({"quant_method": "bitnet", "quantization_mode": "online"});
    let json = with(&llama(), "quantization_config", online);
    let family = family(path, &json).unwrap();
    let read = read_config(path, &json, family, DType::BF16, &options).unwrap();
    assert!(read.ternary_declared);
    assert_eq!(read.declared_dtype.as_deref(), Some("bfloat16"));
}

#[test]
fn mistral_windows() {
    let json = json!({
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000
    });
    assert_eq!(attention(&spec(&json).unwrap(), 31).window, Some(4096));
    let none = with(&json, "sliding_window", Value::Null);
    assert_eq!(attention(&spec(&none).unwrap(), 31).window, None);
    assert_eq!(
        message(&without(&json, "sliding_window")),
        "config.json: sliding_window: expected a number or null, found nothing"
    );
}

fn qwen2() -> Value {
    json!({
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 1536,
        "initializer_range": 0.02, "intermediate_size": 8960, "max_position_embeddings": 32768,
        "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 12,
        "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151936
    })
}

#[test]
fn qwen2_windows_only_when_switched_on() {
    let s = spec(&qwen2()).unwrap();
    assert!(attention(&s, 0).qkv_bias && !attention(&s, 0).out_bias);
    assert!((0..28).all(|i| attention(&s, i).window.is_none()));
    let on = with(&qwen2(), "use_sliding_window", json!(true));
    let s = spec(&on).unwrap();
    let windows: Vec<bool> = (0..28).map(|i| attention(&s, i).window.is_some()).collect();
    assert_eq!(windows, (0..28).map(|i| i >= 21).collect::<Vec<_>>());
    let types = |n: usize, t: &str| with(&on, "layer_types", json!(vec![t; n]));
    assert!(spec(&types(28, "full_attention")).is_ok());
    assert_eq!(
        message(&types(27, "full_attention")),
        "config.json: layer_types: expected 28 entries, found 27"
    );
    assert_eq!(
        message(&types(28, "linear_attention")),
        "config.json: layer_types: expected full_attention or sliding_attention, found \
         \"linear_attention\""
    );
    let contradiction = with(
        &types(28, "sliding_attention"),
        "use_sliding_window",
        json!(false),
    );
    assert!(message(&contradiction).contains("while use_sliding_window is false"));
}

#[test]
fn qwen3_head_width_is_its_own() {
    let json = json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_sliding_window": false, "vocab_size": 151936
    });
    for json in [json.clone(), without(&json, "head_dim")] {
        let s = spec(&json).unwrap();
        let a = attention(&s, 0);
        assert_eq!(a.head_dim, 128);
        assert!(a.qk_norm.is_some() && !a.qkv_bias);
    }
}

#[test]
fn minicpm4_scalings() {
    let factors: Vec<f64> = (0..64).map(|i| 1.0 + f64::from(i) / 64.0).collect();
    let json = json!({
        "architectures": ["MiniCPMForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"}, "bos_token_id": 1,
        "dim_model_base": 256, "eos_token_id": [2, 73440], "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 16384,
        "max_position_embeddings": 32768, "model_type": "minicpm", "mup_denominator": 32,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 2,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "longrope", "long_factor": factors, "short_factor": factors,
            "original_max_position_embeddings": 32768},
        "scale_depth": 1.4, "scale_emb": 12, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 73448
    });
    let s = spec(&json).unwrap();
    assert_eq!(s.embedding.scale, 12.0);
    assert_eq!(s.layers[0].residual_scale, 0.247_487_37);
    assert_eq!(s.head.scale, 1.0 / 16.0);
    assert_eq!(attention(&s, 0).head_dim, 128);
    assert_eq!(s.ropes[0].attention_factor(), 1.0);
    let long = with(&json, "max_position_embeddings", json!(131072));
    // sqrt(1 + ln 4 / ln 32768) = sqrt(1 + 2 / 15)
    let expected = (1.0f64 + 2.0 / 15.0).sqrt() as f32;
    assert_eq!(spec(&long).unwrap().ropes[0].attention_factor(), expected);
    let sparse = with(
        &json,
        "sparse_config",
        json!({"topk": 64, "dense_len": 8192}),
    );
    let (_, notes) = spec_with(&sparse, &OpenOptions::default()).unwrap();
    assert!(
        notes[0].starts_with("sparse_config was ignored"),
        "{notes:?}"
    );
    assert_eq!(
        message(&without(&json, "scale_depth")),
        "config.json: scale_depth: expected a value, found none"
    );
    let mut short = json.clone();
    short["rope_scaling"]["long_factor"] = json!([1.0]);
    assert_eq!(
        message(&short),
        "config.json: model spec: ropes.0.scaling.long_factors: has 1 values, expected 64"
    );
}

#[test]
fn gemma3_multimodal_in_the_published_dialect() {
    // The smallest config that is published: everything else is the class's default.
    let json = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
        "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
            "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152}
    });
    let (s, notes) = spec_with(&json, &OpenOptions::default()).unwrap();
    assert!(notes[0].contains("image inputs are not supported"));
    assert_eq!((s.vocab_size, s.max_context), (262_208, 131_072));
    assert!(s.head.tied);
    let (local, global) = (attention(&s, 4), attention(&s, 5));
    assert_eq!((local.window, global.window), (Some(1024), None));
    assert_eq!((local.heads, local.kv_heads, local.head_dim), (8, 4, 256));
    assert_eq!(local.scale, 1.0 / 16.0);
    let (local, global) = (
        &s.ropes[local.rope.unwrap()],
        &s.ropes[global.rope.unwrap()],
    );
    assert_eq!(
        (local.theta, &local.scaling),
        (10_000.0, &RopeScaling::None)
    );
    assert_eq!(
        (global.theta, &global.scaling),
        (1_000_000.0, &RopeScaling::Linear { factor: 8.0 })
    );
    // sqrt(2560) = 50.596, rounded to bf16.
    assert_eq!(s.embedding.scale, 50.5);
    let mut both = json.clone();
    both["text_config"]["use_bidirectional_attention"] = json!(true);
    assert_eq!(
        message(&both),
        "config.json: text_config.use_bidirectional_attention: only false is supported, found true"
    );
    let mut unknown = json;
    unknown["text_config"]["altup_layers"] = json!(2);
    assert_eq!(
        message(&unknown),
        "config.json: unknown key \"text_config.altup_layers\""
    );
}

#[test]
fn multimodal_checkpoints_keep_their_tensors_elsewhere() {
    let family = family(Path::new("config.json"), &json!({"model_type": "gemma3"})).unwrap();
    let names: Vec<(String, String)> = family
        .names
        .roots
        .iter()
        .map(|&root| {
            let name = |canonical: &str| family.names.name(root, canonical);
            (name("layers.3.ffn_norm.weight"), name("head.weight"))
        })
        .collect();
    let norm = "layers.3.pre_feedforward_layernorm.weight";
    let expected = [
        (format!("model.{norm}"), "lm_head.weight".to_owned()),
        (
            format!("language_model.model.{norm}"),
            "language_model.lm_head.weight".to_owned(),
        ),
        (
            format!("model.language_model.{norm}"),
            "lm_head.weight".to_owned(),
        ),
    ];
    assert_eq!(names, expected);
    assert!(
        family
            .names
            .tolerates("vision_tower.encoder.layers.0.mlp.fc1.bias")
            .is_some()
    );
    assert_eq!(family.names.tolerates("model.layers.0.mlp.fc1.bias"), None);
}

#[test]
fn gemma3_text_with_local_base() {
    let json = json!({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 262144
    });
    let s = spec(&json).unwrap();
    let full: Vec<usize> = (0..26)
        .filter(|&i| attention(&s, i).window.is_none())
        .collect();
    assert_eq!(full, [5, 11, 17, 23]);
    assert_eq!(s.ropes[attention(&s, 5).rope.unwrap()].theta, 1_000_000.0);
    assert_eq!(s.ropes[attention(&s, 0).rope.unwrap()].theta, 10_000.0);
    let capped = with(&json, "final_logit_softcapping", json!(30.0));
    assert_eq!(spec(&capped).unwrap().head.softcap, Some(30.0));
    let capped = with(&json, "attn_logit_softcapping", json!(50.0));
    assert_eq!(
        attention(&spec(&capped).unwrap(), 0).logit_softcap,
        Some(50.0)
    );
}
