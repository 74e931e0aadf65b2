//! `carat bench` beyond one model: refusals, records read again, pages.

mod common;

use common::{Place, root, text, wren};
use serde_json::Value;

fn record(name: &str) -> String {
    text(root().join("benches/records").join(name))
}

const SMOLLM2: &str = "2026-11-29-smollm2-llamacpp.jsonl";
const TERNARY: &str = "2026-11-29-ternary8b-llamacpp.jsonl";

#[test]
fn debug_builds_and_arms_nobody_judged_are_refused() {
    let place = Place::new();
    let args = [
        "bench",
        "ab",
        &wren(),
        &wren(),
        "-p",
        "8",
        "-n",
        "4",
        "-r",
        "1",
    ];
    let ran = place.run(&args).fails(4);
    if cfg!(debug_assertions) {
        ran.says("debug build").hints("--release");
    } else {
        ran.says("fidelity is unknown").hints("--allow ungated");
    }
}

#[test]
fn arms_that_cannot_be_followed_name_the_culprit() {
    let place = Place::new();
    let arm = place.file("arm.toml", "kind = \"command\"\nargv = []\ncolour = 1\n");
    for (arm, says) in [
        ("missing.gguf", "missing.gguf"),
        ("llama-bench:missing.gguf", "missing.gguf"),
        ("openai:http://127.0.0.1:1/v1", "missing field"),
        (arm.as_str(), "arm.toml"),
        (&format!("{},threads=none", wren()), "threads=none"),
        (&format!("{},act=int3", wren()), "int3"),
    ] {
        place.run(&["bench", "ab", arm]).fails(2).says(says);
    }
    let out = text(place.path("sweep.jsonl"));
    let args = ["bench", "sweep", &wren(), "-o", &out, "--axis", "colour"];
    place.run(&args).fails(2).says("known are context");
    // A sweep has a file of its own; what it cannot do it does not take.
    let args = ["bench", "sweep", &wren(), "-o", &out, "--record", &out];
    place.run(&args).fails(2).says("--record");
    let args = ["bench", "sweep", &wren(), "-o", &out, "--axis", "batch"];
    place.run(&args).fails(4);
    assert!(!std::path::Path::new(&out).exists());
    let words = place.file("words.txt", "words");
    let args = ["bench", "ab", "llama-bench:m.gguf", "--text", &words];
    place.run(&args).fails(2).says("tokenizer").hints("--ids");
    let args = ["bench", "sustain", &wren(), "--minutes", "nan"];
    place.run(&args).fails(2).says("--minutes");
    place.run(&["bench"]).fails(2).says("<MODEL>");
}

/// The rounds of a committed file twice, which makes enough of them for an
/// interval, with the speeds of carat's decode times a factor.
fn doubled(place: &Place, name: &str, factor: f64) -> String {
    let lines = std::fs::read_to_string(record(SMOLLM2)).unwrap();
    let lines = lines.lines().map(|line| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        let rounds = value["rounds"].as_array_mut().unwrap();
        rounds.extend(rounds.clone());
        for round in rounds {
            let tps = &mut round["carat"]["decode_tps"];
            *tps = (tps.as_f64().unwrap() * factor).into();
        }
        value.to_string()
    });
    place.file(name, lines.collect::<Vec<_>>().join("\n"))
}

#[test]
fn records_are_compared_with_their_like_only() {
    let place = Place::new();
    let (old, other) = (doubled(&place, "old.jsonl", 1.0), record(TERNARY));
    let ran = place.run(&["bench", "compare", &old, &old]).ok();
    assert_eq!(ran.out.lines().count(), 16, "{ran:?}");
    assert!(ran.out.lines().all(|l| l.ends_with("unchanged")), "{ran:?}");
    let compared = place.object(&["bench", "compare", &old, &old], "carat.bench.compare");
    assert_eq!(compared["comparisons"].as_array().unwrap().len(), 16);
    let few = record(SMOLLM2);
    let ran = place.run(&["bench", "compare", &few, &few]).ok();
    assert!(
        ran.out
            .lines()
            .all(|l| l.ends_with("too few trials to say")),
        "{ran:?}"
    );
    let ran = place.run(&["bench", "compare", &old, &other]);
    ran.fails(4).says("same work");
    let broken = place.file("broken.jsonl", "{}\n");
    let ran = place.run(&["bench", "compare", &old, &broken]);
    ran.fails(2).says("line 1");
    let slow = doubled(&place, "slow.jsonl", 0.5);
    let ran = place.run(&["bench", "compare", &old, &slow]).fails(1);
    assert_eq!(ran.out.matches("REGRESSION").count(), 4, "{ran:?}");
    ran.says("slower than before: carat decode_tps");
}

#[test]
fn pages_of_records() {
    let place = Place::new();
    let (records, other) = (record(SMOLLM2), record(TERNARY));
    let (html, md) = (text(place.path("page.html")), text(place.path("page.md")));
    let args = [
        "bench",
        "report",
        &records,
        &other,
        "--html",
        &html,
        "--markdown",
        &md,
    ];
    place.run(&args).ok();
    assert!(std::fs::read_to_string(html).unwrap().contains("<svg"));
    let tables = std::fs::read_to_string(md).unwrap();
    let shown = place.run(&["bench", "report", &records, &other]).ok();
    assert_eq!(shown.out, tables);
    assert!(tables.contains("| carat / llama.cpp |"), "{tables}");
    let nothing = text(place.path("nothing.jsonl"));
    place
        .run(&["bench", "report", &nothing])
        .fails(2)
        .says("nothing.jsonl");
}
