//! A published model, where it has been fetched: `CARAT_TEST_ASSETS` names a
//! folder of pulled models (see CONTRIBUTING.md).

#![allow(clippy::print_stderr)] // tests say what they measured

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;

use carat_oracle::{Oracle, OracleOptions};
use carat_text::{AddSpecial, ChatTemplate, Message, RenderInput, Tokenizer};

const FILE: &str = "pinned/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf";

/// The file, or `None` with a notice that the test is skipped. Notices go past the
/// capture of passing tests.
fn asset(file: &str) -> Option<PathBuf> {
    let skipped = |why: String| {
        let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
    };
    let Some(folder) = std::env::var_os("CARAT_TEST_ASSETS") else {
        skipped(format!("CARAT_TEST_ASSETS names no folder with {file}"));
        return None;
    };
    let path = PathBuf::from(folder).join(file);
    if !path.is_file() {
        skipped(format!("{} is not there", path.display()));
        return None;
    }
    Some(path)
}

#[test]
fn the_capital_of_france() {
    let Some(path) = asset(FILE) else { return };
    let checkpoint = carat_import::open(&path).unwrap();
    let tokenizer = Tokenizer::from_assets(&checkpoint.text).unwrap();
    let template = ChatTemplate::from_assets(&checkpoint.text)
        .unwrap()
        .unwrap();
    let messages = [Message::new("user", "What is the capital of France?")];
    let text = template
        .render(&RenderInput {
            messages: &messages,
            add_generation_prompt: true,
            ..RenderInput::default()
        })
        .unwrap();
    let prompt = tokenizer.encode(&text, AddSpecial::No).unwrap();

    let options = OracleOptions::new(1024);
    let oracle = Oracle::new(&checkpoint.spec, &*checkpoint.tensors, options).unwrap();
    let steps = oracle
        .greedy(&[&prompt], 40, &BTreeSet::from([2]))
        .unwrap()
        .remove(0);
    let ids: Vec<u32> = steps.iter().map(|s| s.id).collect();
    assert_eq!(ids, [504, 3575, 282, 4649, 314, 7042, 30, 2]);
    // The first step is a near-tie of logits published as 25.325 and 25.243, each rounded
    // to 5e-4; two fp32 programs differ by far less.
    assert!(
        (steps[0].logit_margin - 0.082).abs() <= 1.5e-3,
        "{}",
        steps[0].logit_margin
    );
    eprintln!("first margin {}", steps[0].logit_margin);

    // Streamed, one layer at a time: the same to the bit.
    let options = OracleOptions {
        resident_bytes: 0,
        ..OracleOptions::new(1024)
    };
    let streamed = Oracle::new(&checkpoint.spec, &*checkpoint.tensors, options).unwrap();
    let forced = streamed.teacher_force(&prompt, &ids).unwrap();
    assert_eq!(forced.iter().map(|f| f.best).collect::<Vec<_>>(), steps);
}
