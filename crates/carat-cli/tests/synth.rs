//! `carat synth`: files that every command takes, whole or not at all.

mod common;

use common::{Place, text};
use serde_json::json;

/// A small synthetic checkpoint, which the place calls `tiny.gguf`.
fn tiny(place: &Place) -> String {
    let file = text(place.path("tiny.gguf"));
    place.run(&["synth", "tiny", "-o", &file]).ok();
    file
}

#[test]
fn a_request_gives_the_same_file_however_it_is_made() {
    let place = Place::new();
    let file = tiny(&place);
    let bytes = std::fs::read(&file).unwrap();
    let other = text(place.path("sub/other.gguf"));
    let args = ["synth", "tiny", &other, "--threads", "3", "--seed", "0"];
    let said = place.object(&args, "carat.synth");
    assert!(bytes == std::fs::read(&other).unwrap());
    assert_eq!(said["file_bytes"], bytes.len());
    assert_eq!(said["layers"], 3);
    assert!(said["tensor_bytes"].as_u64().unwrap() < bytes.len() as u64);

    let args = ["synth", "tiny", "-o", &other, "--layers", "1"];
    place.run(&args).fails(2).says("exists").hints("--force");
    assert!(bytes == std::fs::read(&other).unwrap());
    let force = [&args[..], &["--force", "--seed", "9"]].concat();
    let said = place.object(&force, "carat.synth");
    assert_eq!((&said["layers"], &said["seed"]), (&json!(1), &json!(9)));
    assert_eq!(said["file_bytes"], std::fs::read(&other).unwrap().len());
    assert_eq!(place.names(), ["sub", "tiny.gguf"]);
    assert_eq!(std::fs::read_dir(place.path("sub")).unwrap().count(), 1);
}

#[test]
fn every_command_takes_the_file() {
    let place = Place::new();
    let file = tiny(&place);
    let told = place.object(&["inspect", &file, "--ctx", "256"], "carat.inspect");
    assert_eq!(told["weights_kind"], "ternary");
    assert_eq!(told["spec"]["vocab_size"], 1000);

    let words = "Any text, also \"ünïcode\" and\nlines.";
    let args = ["tokenize", &file, "--text", words, "--no-special"];
    let tokens = place.object(&args, "carat.tokenize");
    assert_eq!(tokens["decoded"], words);

    let bundle = text(place.path("tiny.carat"));
    place.object(&["convert", &file, &bundle], "carat.convert");
    let args = ["verify", &bundle, "--against", &file];
    let report = place.object(&args, "carat.verify-report");
    assert_eq!(report["passed"], true, "{report}");

    let prompt = place.json("ids.json", &json!([1, 300, 400, 500, 600, 700, 800, 900]));
    let made = |engine: &str| {
        let args = ["generate", &bundle, "--ids", &prompt, "--engine", engine];
        let args = [&args[..], &["--max-new-tokens", "4", "--ignore-eos"]].concat();
        place.object(&args, "carat.generate")["ids"].clone()
    };
    assert_eq!(made("oracle").as_array().unwrap().len(), 4);
    assert_eq!(made("sequential").as_array().unwrap().len(), 4);

    // It has no template, so it is continued and not asked.
    place.run(&["run", &bundle, "Hi"]).fails(2).hints("--raw");
    let args = ["run", &bundle, "Hi", "--raw", "--max-new-tokens", "3"];
    place.object(&args, "carat.answer");
}

#[test]
fn logits_are_those_of_a_model() {
    let place = Place::new();
    let file = tiny(&place);
    let prompt = place.json("ids.json", &json!([1, 300, 400, 500, 600, 700, 800, 900]));
    for engine in ["oracle", "sequential"] {
        let out = text(place.path("logits.safetensors"));
        let args = ["logits", &file, "--no-cache", "--ids", &prompt];
        let args = [&args[..], &["--out", &out, "--engine", engine]].concat();
        place.object(&args, "carat.logits");
        let bytes = std::fs::read(&out).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let logits = tensors.tensor("logits").unwrap();
        let values = logits.data().as_chunks::<4>().0.iter();
        let values: Vec<f32> = values.map(|b| f32::from_le_bytes(*b)).collect();
        let mut best = std::collections::BTreeSet::new();
        for row in values.chunks_exact(1000) {
            assert!(row.iter().all(|v| v.is_finite()));
            let mean = row.iter().sum::<f32>() / 1000.0;
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 1000.0;
            // Made to be 1; a row of a random head is the sum of 256 products, so
            // its own spread differs by a few percent.
            assert!(
                (0.8..1.25).contains(&variance.sqrt()),
                "{engine}: {variance}"
            );
            let top = (0..1000).max_by(|a, b| row[*a].total_cmp(&row[*b]));
            best.insert(top);
        }
        assert!(best.len() > 4, "{engine}: positions look alike: {best:?}");
    }
}

#[test]
fn the_known_shapes_are_listed() {
    let place = Place::new();
    let listed = place.object(&["synth"], "carat.shapes");
    let shapes = listed["shapes"].as_array().unwrap();
    let of = |name: &str| shapes.iter().find(|s| s["name"] == name).unwrap();
    assert_eq!(of("bitcpm-8b")["layers"], 32);
    let plain = place.run(&["synth"]).ok();
    assert_eq!(plain.out.lines().count(), shapes.len());
}

#[test]
fn what_cannot_be_made_is_refused_and_leaves_nothing() {
    let place = Place::new();
    let file = text(place.path("x.gguf"));
    let fails = |args: &[&str], says: &str| {
        let ran = place.run(args).fails(2).says(says);
        assert_eq!(ran.out, "");
        assert_eq!(place.names(), [""; 0], "{args:?}");
        ran
    };
    fails(&["synth", "abacus", "-o", &file], "abacus").hints("bitcpm-8b");
    for layers in ["0", "4", "18446744073709551615"] {
        let args = ["synth", "tiny", "-o", &file, "--layers", layers];
        fails(&args, "1 to the 3 of tiny");
    }
    fails(
        &["synth", "tiny", "-o", &file, "--threads", "0"],
        "--threads 0",
    );
    fails(&["synth", "tiny"], "--out");
    fails(&["synth", "tiny", &file, "-o", &file], "--out");
    let bin = text(place.path("x.bin"));
    fails(&["synth", "tiny", "-o", &bin], ".gguf");
    fails(&["synth", "tiny", "-o", ""], ".gguf");
    fails(&["synth", "tiny", "-o", "/dev/null/x.gguf"], "/dev/null");
}

/// A limit on the size of files stands in for a full disk: writes begin to fail
/// in the middle of the file.
#[test]
#[cfg(unix)]
fn a_write_that_fails_leaves_nothing() {
    let place = Place::new();
    std::fs::create_dir(place.path("out")).unwrap();
    let file = text(place.path("out/x.gguf"));
    let script = "trap '' XFSZ; ulimit -f 400; exec \"$0\" synth tiny -o \"$1\"";
    let output = std::process::Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_carat"), &file])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("x.gguf") && said.contains("hint: "), "{said}");
    assert_eq!(std::fs::read_dir(place.path("out")).unwrap().count(), 0);
}
