//! Foreign fp32 logits of one tiny checkpoint per family. They anchor the oracle
//! together with the import that feeds it.

#![allow(clippy::print_stderr)] // tests say what they measured or skipped

mod common;

use std::collections::HashMap;
use std::path::Path;

use carat_oracle::{Oracle, OracleOptions, Rows};
use common::root;
use safetensors::{Dtype, SafeTensors};

/// Reference of one case.
struct Golden {
    input_ids: Vec<u32>,
    rows: Vec<usize>,
    /// `[rows, vocab]`
    logits: Vec<f32>,
    greedy_ids: Vec<u32>,
    greedy_margins: Vec<f32>,
}

impl Golden {
    fn read(path: &Path) -> Golden {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let integers = |name: &str| -> Vec<i64> {
            let view = file.tensor(name).unwrap();
            assert_eq!(view.dtype(), Dtype::I64);
            view.data()
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().unwrap()))
                .collect()
        };
        let floats = |name: &str| -> Vec<f32> {
            let view = file.tensor(name).unwrap();
            assert_eq!(view.dtype(), Dtype::F32);
            view.data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect()
        };
        let ids = |name: &str| {
            integers(name)
                .iter()
                .map(|&i| i.try_into().unwrap())
                .collect()
        };
        Golden {
            input_ids: ids("input_ids"),
            rows: integers("rows")
                .iter()
                .map(|&i| i.try_into().unwrap())
                .collect(),
            logits: floats("logits"),
            greedy_ids: ids("greedy_ids"),
            greedy_margins: floats("greedy_margins"),
        }
    }
}

/// max |difference| / std(reference) must stay below this at every kept row: the
/// bound that the reference's makers set for an fp32 forward of these models.
const BOUND: f64 = 2e-3;

/// Greedy choices count where the reference's softmax margin is at least this.
const CLEAR: f32 = 0.1;

fn check(checkpoint: &str, golden: &str, capacity: usize) {
    let folder = root().join("tests/golden");
    let golden = Golden::read(&folder.join(golden));
    let checkpoint = carat_import::open(&folder.join(checkpoint)).unwrap();
    let options = OracleOptions::new(capacity);
    let oracle = Oracle::new(&checkpoint.spec, &*checkpoint.tensors, options).unwrap();

    let logits = oracle
        .forward(&[&golden.input_ids], Rows::Some(&golden.rows))
        .unwrap()
        .remove(0);
    assert_eq!(logits.data.len(), golden.logits.len());
    let n = golden.logits.len() as f64;
    let mean = golden.logits.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let variance = golden
        .logits
        .iter()
        .map(|&v| (f64::from(v) - mean).powi(2))
        .sum::<f64>()
        / n;
    let mut worst = HashMap::new();
    for (i, &row) in golden.rows.iter().enumerate() {
        let reference = &golden.logits[i * logits.vocab..][..logits.vocab];
        let difference = logits
            .row(i)
            .iter()
            .zip(reference)
            .map(|(a, b)| (a - b).abs());
        let difference = f64::from(difference.fold(0.0, f32::max)) / variance.sqrt();
        assert!(
            difference <= BOUND,
            "row {row}: {difference:e} of a standard deviation"
        );
        worst.insert(row, difference);
    }
    let worst = worst.values().copied().fold(0.0, f64::max);
    // Two programs that add in different orders cannot agree to the last bit everywhere.
    assert!(worst > 0.0);

    // Forced onto the reference's own tokens, so that a near-tie does not spoil what follows.
    // Where the capacity ends the reference would have changed its factor set.
    let room = capacity + 1 - golden.input_ids.len();
    let greedy = &golden.greedy_ids[..golden.greedy_ids.len().min(room)];
    let forced = oracle.teacher_force(&golden.input_ids, greedy).unwrap();
    // A probability moves by at most half of what the difference of two logits does.
    let moved = (BOUND * variance.sqrt()) as f32;
    let mut decided = 0;
    for (i, (step, margin)) in forced.iter().zip(&golden.greedy_margins).enumerate() {
        if *margin >= CLEAR.min(2.0 * moved) {
            decided += 1;
            assert_eq!(step.best.id, step.id, "greedy step {i}, margin {margin}");
            let difference = (step.best.softmax_margin - margin).abs();
            assert!(
                difference <= 2.0 * moved,
                "greedy step {i}: margin off by {difference}"
            );
        }
    }
    let steps = forced.len();
    eprintln!("worst {worst:.1e} of a standard deviation; {decided} of {steps} steps decided");
    assert!(decided > steps / 2);
}

macro_rules! golden {
    ($($name:ident: $checkpoint:literal, $golden:literal, $capacity:literal;)*) => {
        $(#[test]
        fn $name() {
            check($checkpoint, $golden, $capacity);
        })*
    };
}

golden! {
    grouped_heads_of_their_own_width:
        "llama-gqa-headdim", "llama-gqa-headdim/golden.safetensors", 1024;
    piecewise_rope_and_tied_head:
        "llama-rope-llama3-tied", "llama-rope-llama3-tied/golden.safetensors", 1024;
    sliding_window: "mistral-sliding", "mistral-sliding/golden.safetensors", 1024;
    qkv_bias: "qwen2-bias-tied", "qwen2-bias-tied/golden.safetensors", 1024;
    head_norms: "qwen3-qknorm", "qwen3-qknorm/golden.safetensors", 1024;
    scaled_residuals: "minicpm4", "minicpm4/golden.safetensors", 512;
    scaled_residuals_from_ternary_gguf:
        "minicpm4/minicpm4-tq2_0.gguf", "minicpm4/golden-gguf.safetensors", 512;
    long_factors: "minicpm4-long", "minicpm4-long/golden.safetensors", 1024;
    mixed_windows_and_sandwich_norms: "gemma3-sliding", "gemma3-sliding/golden.safetensors", 1024;
}

/// The bound is worth something: the short factor set, which a smaller capacity
/// would choose, is far outside it from the first rows on.
#[test]
fn the_wrong_factor_set_is_noticed() {
    let folder = root().join("tests/golden/minicpm4-long");
    let golden = Golden::read(&folder.join("golden.safetensors"));
    let checkpoint = carat_import::open(&folder).unwrap();
    let oracle = Oracle::new(
        &checkpoint.spec,
        &*checkpoint.tensors,
        OracleOptions::new(256),
    )
    .unwrap();
    let ids = &golden.input_ids[..200];
    let logits = oracle.forward(&[ids], Rows::Some(&[15])).unwrap().remove(0);
    let at = golden.rows.iter().position(|&r| r == 15).unwrap() * logits.vocab;
    let reference = &golden.logits[at..at + logits.vocab];
    let worst = logits
        .row(0)
        .iter()
        .zip(reference)
        .map(|(a, b)| (a - b).abs());
    // Logits of these models have a standard deviation near 1.
    assert!(f64::from(worst.fold(0.0, f32::max)) > 10.0 * BOUND);
}
