//! Calibrated recipes on a small model with everything that folding has to mind:
//! shared value heads, biases, gains with an offset, post-norms.

use std::{borrow::Cow, collections::HashMap};

use carat_bundle::{
    convert::Quantize,
    manifest::Form,
    source::{SourceError, TensorInfo, TensorSource},
    spec::{ModelSpec, TensorRole},
};
use carat_oracle::{Oracle, OracleOptions, Rows};
use carat_quant::{Calibrated, Quantizer, Recipe, Target};
use carat_tensor::{DType, GridMatrix};

struct Memory {
    spec: ModelSpec,
    tensors: HashMap<String, Vec<u8>>,
}

impl TensorSource for Memory {
    fn origin(&self) -> &str {
        "memory"
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors.keys().cloned().collect();
        names.sort();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let decl = self.spec.tensors().into_iter().find(|t| t.name == name)?;
        Some(TensorInfo {
            dtype: DType::F32,
            shape: decl.shape,
        })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        Ok(self.tensors[name].as_slice().into())
    }
}

fn spec() -> ModelSpec {
    let norm = serde_json::json!({ "eps": 1e-6, "weight_offset": 1.0 });
    let layer = serde_json::json!({
        "mixer_norm": norm, "post_mixer_norm": norm, "ffn_norm": norm, "post_ffn_norm": norm,
        "residual_scale": 1.0,
        "mixer": { "kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 16,
            "qkv_bias": true, "out_bias": true, "qk_norm": norm, "rope": null,
            "window": null, "scale": 0.3, "logit_softcap": null },
        "ffn": { "kind": "gated", "intermediate_size": 96, "activation": "silu", "bias": true },
    });
    serde_json::from_value(serde_json::json!({
        "hidden_size": 64, "vocab_size": 96, "max_context": 256,
        "embedding": { "scale": 1.0 }, "layers": vec![layer; 2], "final_norm": norm,
        "head": { "tied": false, "scale": 1.0, "softcap": null }, "ropes": [],
    }))
    .unwrap()
}

fn model() -> Memory {
    let spec = spec();
    let mut seed = 88_172_645_463_325_252u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let tensors = spec.tensors().into_iter().map(|decl| {
        let count = decl.shape.elements().unwrap();
        let scale = match decl.role {
            TensorRole::Norm => 0.9,
            TensorRole::Bias => 0.3,
            _ => 2.0 / (decl.shape.columns() as f32).sqrt(),
        };
        // Cubed, so that some weights, gains and biases stand out as in real models.
        let bytes = (0..count).flat_map(|_| (scale * next().powi(3)).to_le_bytes());
        (decl.name.clone(), bytes.collect())
    });
    let tensors = tensors.collect();
    Memory { spec, tensors }
}

fn recipe(calibration: &str, dtype: &str) -> Recipe {
    let text = format!(
        "carat:\n  calibration: {calibration}\n\
         quantization_config:\n  global_config:\n    op_state_spec:\n      weight:\n        \
         dtype: {dtype}\n        qscheme: symmetric\n        \
         granularity: {{type: per_block, axis: 1, block_size: 32}}\n    \
         op_input_spec: null\n    op_output_spec: null\n"
    );
    Recipe::parse("test", &text).unwrap()
}

fn sequences() -> Vec<Vec<u32>> {
    let id = |i: u32| (i.wrapping_mul(2_654_435_761) >> 16) % 96;
    (0..6)
        .map(|s| (0..40).map(|i| id(s * 40 + i)).collect())
        .collect()
}

/// What a calibrated recipe makes of the model, in fp32, and the bytes as stored.
fn made(source: &Memory, recipe: &Recipe, threads: usize) -> (Memory, Vec<Vec<u8>>) {
    let plan = recipe.resolve(&source.spec).unwrap();
    let quantizer = Quantizer::new(recipe, &plan, Target::Portable, threads).unwrap();
    let options = OracleOptions {
        threads,
        resident_bytes: 0,
        ..OracleOptions::new(64)
    };
    let oracle = Oracle::new(&source.spec, source, options).unwrap();
    let text = sequences();
    let text: Vec<&[u32]> = text.iter().map(Vec::as_slice).collect();
    let settings = recipe.calibration().unwrap();
    let calibrated = Calibrated::new(quantizer, settings, &oracle, source, &text).unwrap();
    let mut out = Memory {
        spec: source.spec.clone(),
        tensors: HashMap::new(),
    };
    let mut stored = Vec::new();
    for decl in source.spec.tensors() {
        let data = &source.tensors[&decl.name];
        let bytes = match calibrated.form(&decl, DType::F32).unwrap() {
            None => data.clone(),
            Some((form, _)) => {
                let bytes = calibrated.apply(&decl, DType::F32, data).unwrap();
                stored.push(bytes.clone());
                match (form, decl.shape.dims()) {
                    (Form::Grid(grid), [rows, columns]) => {
                        let matrix = GridMatrix::from_bytes(grid, *rows, *columns, &bytes).unwrap();
                        let mut row = vec![0.0; *columns];
                        let rows = (0..*rows).flat_map(|i| {
                            matrix.decode_row(i, &mut row);
                            row.iter()
                                .flat_map(|v| v.to_le_bytes())
                                .collect::<Vec<u8>>()
                        });
                        rows.collect()
                    }
                    _ => bytes,
                }
            }
        };
        out.tensors.insert(decl.name, bytes);
    }
    (out, stored)
}

/// Mean square of the difference of logits on the calibration text, as a part of the
/// logits' own. (A random model has nothing in common between two texts.)
fn difference(a: &Memory, b: &Memory) -> f64 {
    let logits = |m: &Memory| -> Vec<f32> {
        let oracle = Oracle::new(&m.spec, m, OracleOptions::new(64)).unwrap();
        let text = sequences();
        let text: Vec<&[u32]> = text.iter().map(Vec::as_slice).collect();
        let rows = oracle.forward(&text, Rows::All).unwrap();
        rows.into_iter().flat_map(|l| l.data).collect()
    };
    let (a, b) = (logits(a), logits(b));
    let square = |v: f32| f64::from(v) * f64::from(v);
    let own: f64 = a.iter().map(|v| square(*v)).sum();
    a.iter().zip(&b).map(|(a, b)| square(a - b)).sum::<f64>() / own
}

#[test]
fn folded_scales_are_the_same_model() {
    let source = model();
    let (plain, _) = made(&source, &recipe("{}", "int8"), 2);
    let plain = difference(&source, &plain);
    assert!(plain > 0.0);
    for scales in ["awq", "smoothquant"] {
        let recipe = recipe(&format!("{{tokens: 240, scales: {scales}}}"), "int8");
        let (folded, _) = made(&source, &recipe, 2);
        // AWQ leaves inputs alone where powers do not help.
        let moved = [
            "layers.0.mixer_norm.weight",
            "layers.1.ffn_norm.weight",
            "layers.1.attn.v.bias",
            "layers.0.ffn.up.bias",
            "final_norm.weight",
        ];
        let changed = |name: &&str| folded.tensors[*name] != source.tensors[*name];
        let count = moved.iter().filter(|name| changed(name)).count();
        let least = if scales == "awq" { 1 } else { moved.len() };
        assert!(count >= least, "{scales}: {count}");
        for name in ["layers.0.attn.q.bias", "layers.1.post_ffn_norm.weight"] {
            assert!(!changed(&name), "{scales}: {name}");
        }
        // A scale at a wrong place changes logits by their own size. Steps of int8 are
        // 1/255 of the largest weight of 32, which scales may make a few times as large
        // as its neighbours: 16 times the squared error is four times the step.
        let found = difference(&source, &folded);
        assert!(found < 16.0 * plain, "{scales}: {found}, plain {plain}");
    }
}

#[test]
fn calibration_lowers_the_error_of_logits_at_equal_bytes() {
    let source = model();
    let (plain, plain_bytes) = made(&source, &recipe("{}", "int4"), 2);
    let plain = difference(&source, &plain);
    let size = |bytes: &[Vec<u8>]| bytes.iter().map(Vec::len).sum::<usize>();
    for how in ["{rounding: gptq}", "{rounding: gptq, act_order: false}"] {
        let (found, bytes) = made(&source, &recipe(how, "int4"), 2);
        assert_eq!(size(&bytes), size(&plain_bytes));
        let found = difference(&source, &found);
        assert!(found < plain, "{how}: {found}, plain {plain}");
    }
}

#[test]
fn threads_do_not_change_a_byte() {
    let source = model();
    let recipe = recipe("{scales: awq, rounding: gptq}", "int4");
    let (_, one) = made(&source, &recipe, 1);
    let (_, three) = made(&source, &recipe, 3);
    assert!(one == three);
}

#[test]
fn settings_out_of_range_name_their_key() {
    for (calibration, key) in [
        ("{tokens: 1}", "carat.calibration.tokens"),
        ("{tokens: 99999999}", "carat.calibration.tokens"),
        ("{sequence: 0}", "carat.calibration.sequence"),
        ("{damping: 0}", "carat.calibration.damping"),
        ("{damping: .nan}", "carat.calibration.damping"),
        ("{strength: 2}", "carat.calibration.strength"),
        ("{scales: gptq}", "gptq"),
    ] {
        let text = format!(
            "carat:\n  calibration: {calibration}\nquantization_config: {{global_config: null}}"
        );
        let error = Recipe::parse("bad", &text).unwrap_err().to_string();
        assert!(error.contains(key), "{calibration}: {error}");
    }
}
