//! The engine on the two real models of the repository: every margin-clear step
//! of the reference answers, stops included, and the accuracy on held-out
//! questions.

mod common;

use std::{collections::BTreeSet, ops::ControlFlow, path::PathBuf};

use carat_engine::{Engine, GenerateOptions, StopReason};
use carat_import::Checkpoint;
use carat_model::ActPrecision;
use carat_text::{AddSpecial, StopSet, Tokenizer};
use common::{engine, isa, models, open, weights};
use serde_json::Value;

/// Checkpoint, key in the reference file, published accuracy in answers of 500.
const MODELS: [(&str, &str, usize); 2] = [
    ("wren-dense", "dense", 475),
    ("wren-ternary-tq2_0.gguf", "ternary", 474),
];

/// Below this gap between the two best softmax probabilities two correct
/// implementations may differ.
const MARGIN_FLOOR: f64 = 0.1;

fn loaded(file: &str) -> (Checkpoint, Engine, Tokenizer, BTreeSet<u32>) {
    let path: PathBuf = models().join(file);
    let checkpoint = open(&path);
    let packed = weights(&checkpoint);
    let engine = engine(&checkpoint, &packed, isa(), 2, ActPrecision::Int8);
    let tokenizer = Tokenizer::from_assets(&checkpoint.text).unwrap();
    let stops = StopSet::from_assets(&tokenizer, &checkpoint.text)
        .ids()
        .clone();
    (checkpoint, engine, tokenizer, stops)
}

fn lines(file: &str) -> Vec<Value> {
    std::fs::read_to_string(models().join(file))
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn every_margin_clear_step_of_the_reference_answers() {
    for (file, key, _) in MODELS {
        let (checkpoint, mut engine, _, stops) = loaded(file);
        let capacity = checkpoint.spec.max_context;
        let (mut steps, mut clear, mut ties, mut stopped) = (0, 0, 0, 0);
        for (n, row) in lines("prompts.jsonl").iter().enumerate() {
            let prompt = ids(&row["prompt_ids"]);
            let expected = ids(&row[key]["ids"]);
            let margins: Vec<f64> = serde_json::from_value(row[key]["margin"].clone()).unwrap();
            let mut sequence = engine.open(capacity).unwrap();
            let forced = GenerateOptions {
                max_new_tokens: expected.len(),
                force: Some(expected.clone()),
                ..GenerateOptions::default()
            };
            let out = engine
                .generate(&mut sequence, &prompt, &forced, &mut |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
            for (step, ((found, expected), margin)) in
                out.argmax.iter().zip(&expected).zip(&margins).enumerate()
            {
                steps += 1;
                clear += usize::from(*margin >= MARGIN_FLOOR);
                ties += usize::from(found != expected);
                assert!(
                    found == expected || *margin < MARGIN_FLOOR,
                    "{key} prompt {n} step {step}: {found} instead of {expected} at margin {margin}"
                );
            }
            // Where the reference stops and every step is clear, a free run must
            // stop at the same place: going on would be the classic fault.
            if margins.iter().all(|m| *m >= MARGIN_FLOOR) && !row[key]["stop"].is_null() {
                let free = GenerateOptions {
                    max_new_tokens: expected.len() + 50,
                    stop_ids: stops.clone(),
                    ..GenerateOptions::default()
                };
                let out = engine
                    .generate(&mut sequence, &prompt, &free, &mut |_| {
                        ControlFlow::Continue(())
                    })
                    .unwrap();
                assert_eq!(out.ids, expected, "{key} prompt {n}");
                assert_eq!(out.stop_reason, StopReason::Eos);
                stopped += 1;
            }
            engine.close(sequence);
        }
        assert!(
            clear > 700 && stopped >= 5,
            "{key}: {clear} clear steps, {stopped} stops: the set shrank"
        );
        assert!(ties <= steps - clear);
    }
}

#[test]
fn accuracy_on_held_out_questions() {
    for (file, key, published) in MODELS {
        let (checkpoint, mut engine, tokenizer, stops) = loaded(file);
        let mut right = 0;
        let questions = lines("eval.jsonl");
        assert_eq!(questions.len(), 500);
        for row in &questions {
            let prompt = format!(
                "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
                row["question"].as_str().unwrap()
            );
            let prompt = tokenizer.encode(&prompt, AddSpecial::No).unwrap();
            let mut sequence = engine.open(checkpoint.spec.max_context).unwrap();
            let options = GenerateOptions {
                max_new_tokens: 110,
                stop_ids: stops.clone(),
                ..GenerateOptions::default()
            };
            let out = engine
                .generate(&mut sequence, &prompt, &options, &mut |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
            engine.close(sequence);
            let text = tokenizer.decode(&out.ids, true).unwrap();
            right += usize::from(answer(&text) == Some(row["value"].as_i64().unwrap()));
        }
        // int8 activations may tip a knife-edge answer either way: five of 500.
        assert!(
            right.abs_diff(published) <= 5,
            "{key}: {right} of 500 right, published {published}"
        );
    }
}

/// The number after the last `####`.
fn answer(text: &str) -> Option<i64> {
    text.rsplit_once("####")?
        .1
        .trim()
        .trim_end_matches('.')
        .replace(',', "")
        .parse()
        .ok()
}
