//! Larger real models, where they are: every pinned one in the folder of models
//! that `CARAT_TEST_ASSETS` names (see CONTRIBUTING.md). `carat pull` brings them.

mod common;

use std::{io::Write as _, ops::ControlFlow, path::PathBuf};

use carat_engine::GenerateOptions;
use carat_model::ActPrecision;
use carat_oracle::{Oracle, OracleOptions};
use carat_text::{AddSpecial, Tokenizer};
use common::{engine, isa, open, weights};

const TEXT: &str = "The sea covers most of the Earth. Its water is salty because rivers carry \
minerals from the land into it, and the sun takes only fresh water away. Ships cross it every day.";

/// Below this gap between the two best softmax probabilities two correct
/// implementations may differ.
const MARGIN_FLOOR: f64 = 0.1;

#[test]
fn the_engine_follows_the_oracle_on_large_models() {
    let Some(folder) = std::env::var_os("CARAT_TEST_ASSETS") else {
        // Past the capture of passing tests.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: CARAT_TEST_ASSETS names no folder of pulled models"
        );
        return;
    };
    let pinned = PathBuf::from(folder).join("pinned");
    let entries = |path: &PathBuf| -> Vec<PathBuf> {
        let found = std::fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut paths: Vec<_> = found.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    };
    let files: Vec<PathBuf> = entries(&pinned)
        .iter()
        .flat_map(entries)
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    assert!(!files.is_empty(), "{} has no models", pinned.display());
    for path in files {
        let checkpoint = open(&path);
        let tokenizer = Tokenizer::from_assets(&checkpoint.text).unwrap();
        let ids = tokenizer.encode(TEXT, AddSpecial::Yes).unwrap();
        let capacity = 256;
        let oracle = Oracle::new(
            &checkpoint.spec,
            checkpoint.tensors.as_ref(),
            OracleOptions::new(capacity),
        )
        .unwrap();
        let reference = oracle.teacher_force(&ids[..8], &ids[8..]).unwrap();
        let packed = weights(&checkpoint);
        for precision in [ActPrecision::Int8, ActPrecision::F32] {
            let mut engine = engine(&checkpoint, &packed, isa(), 2, precision);
            let mut sequence = engine.open(capacity).unwrap();
            let options = GenerateOptions {
                max_new_tokens: ids.len(),
                force: Some(ids[8..].to_vec()),
                ..GenerateOptions::default()
            };
            let out = engine
                .generate(&mut sequence, &ids[..8], &options, &mut |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
            let mut clear = 0;
            for (step, (expected, found)) in reference.iter().zip(&out.argmax).enumerate() {
                let margin = f64::from(expected.best.softmax_margin);
                clear += usize::from(margin >= MARGIN_FLOOR);
                assert!(
                    expected.best.id == *found || margin < MARGIN_FLOOR,
                    "{} {precision:?} step {step}: {found} instead of {} at margin {margin}",
                    path.display(),
                    expected.best.id
                );
            }
            assert!(clear >= 8, "{}: only {clear} clear steps", path.display());
        }
    }
}
