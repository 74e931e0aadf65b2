//! Replays the fuzz corpora through the bodies of the fuzz targets.

use std::path::Path;

fn replay(target: &str, body: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let mut seeds = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let data = std::fs::read(&path).unwrap();
        body(&data);
        // Truncations and flipped bytes, deterministic.
        for cut in [data.len() / 3, data.len() / 2, data.len().saturating_sub(1)] {
            body(&data[..cut]);
        }
        for at in (0..data.len()).step_by((data.len() / 40).max(1)) {
            for with in [b'"', b'0', b'}', 0xff] {
                let mut changed = data.clone();
                changed[at] = with;
                body(&changed);
            }
        }
        seeds += 1;
    }
    assert!(seeds >= 5, "{}: only {seeds} seeds", folder.display());
}

#[test]
fn tokenizer() {
    replay("tokenizer", carat_text::fuzzing::tokenizer);
}

#[test]
fn template() {
    replay("template", carat_text::fuzzing::template);
}
