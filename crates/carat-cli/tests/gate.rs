//! Fixtures, gates, reports and evals from the command line.

mod common;

use common::*;
use serde_json::{Value, json};

#[test]
fn a_gguf_is_gated_and_its_transcript_checked_again() {
    let place = Place::new();
    let fixture = text(place.path("f.json"));
    let made = place.object(
        &["fixture", "make", &wren(), "--out", &fixture],
        "carat.fixture-report",
    );
    let kinds: Vec<&str> = made["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds[..4], ["list", "chat", "long", "free_form"]);
    assert!(kinds.len() > 4 && kinds[4..].iter().all(|k| *k == "probe"));
    assert_eq!(made["cases"][0]["steps"], 24);
    assert_eq!(made["cases"][1]["must_stop"], true);

    let bundle = place.bundle();
    let gated = place.object(
        &["gate", &bundle, "--source", &wren(), "--fixture", &fixture],
        "carat.gate",
    );
    assert!(
        gated["verdict"] == "PASS" || gated["verdict"] == "PASS_TIE",
        "{}",
        gated["reasons"]
    );
    assert_eq!(gated["weights"], "source");
    assert_eq!(gated["fixture"]["reference"]["oracle"], "self");
    assert!(gated["text"]["positions"].as_u64().unwrap() > 300);
    let stored = format!("{bundle}/gates/standard.json");
    let record: Value = serde_json::from_slice(&std::fs::read(&stored).unwrap()).unwrap();
    assert_eq!(record, gated);
    let recipe = std::fs::read_to_string(format!("{bundle}/recipe.toml")).unwrap();
    assert!(
        recipe.contains("verified_by = \"standard.json\""),
        "{recipe}"
    );
    place.run(&["verify", &bundle]).ok();

    // Again, without source or oracle; then on a record of other ids.
    let again = place.object(&["gate", &bundle, "--transcript", &stored], "carat.gate");
    assert_eq!(again["verdict"], gated["verdict"]);
    let mut wrong = record.clone();
    wrong["cases"][0]["found"][2] = json!(7);
    let wrong = place.json("wrong.json", &wrong);
    place
        .run(&["gate", &bundle, "--transcript", &wrong])
        .fails(1)
        .says("recorded");
    place
        .run(&["gate", &bundle, "--transcript", &fixture])
        .fails(2)
        .says("f.json");

    // By its own weights, which is said.
    let own = place.run(&["gate", &bundle]).ok();
    assert!(own.out.contains("its own weights, decoded"), "{own:?}");
    let recipe = || std::fs::read_to_string(format!("{bundle}/recipe.toml")).unwrap();
    assert!(std::fs::exists(format!("{bundle}/gates/standard-own.json")).unwrap());
    assert!(recipe().contains("verified_by = \"standard.json\""));
    // By the answers of a fixture alone, which proves less; another model's do not pass.
    place.run(&["gate", &bundle, "--fixture", &fixture]).ok();
    assert!(std::fs::exists(format!("{bundle}/gates/standard-answers.json")).unwrap());
    let dense = text(place.path("dense.json"));
    let args = [
        "fixture",
        "make",
        &text(wren_dense()),
        "--out",
        &dense,
        "--name",
        "dense",
    ];
    place.run(&args).ok();
    place.run(&["gate", &bundle, "--fixture", &dense]).fails(1);
    assert!(recipe().contains("status = \"unverified\""));
    place.run(&["gate", &bundle, "--source", &wren()]).ok();

    let page = text(place.path("page.html"));
    let card = text(place.path("card.md"));
    place.object(
        &["report", &bundle, "--out", &page, "--card", &card],
        "carat.report",
    );
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && page.contains("PASS"));
    for outside in ["<script", "http://", "https://", "src="] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(
        std::fs::read_to_string(card)
            .unwrap()
            .contains("| verdict | **PASS")
    );
}

#[test]
fn a_poisoned_fixture_fails_and_a_weak_one_is_refused() {
    let place = Place::new();
    let prompts = place.file(
        "p.jsonl",
        "{\"prompt\": \"1, 2, 3, 4, 5, 6,\"}\n{\"question\": \"Hello!\"}\n",
    );
    let fixture = text(place.path("f.json"));
    let args = ["fixture", "make", &wren(), "--out", &fixture];
    place
        .run(&[&args[..], &["--prompts", &prompts, "--name", "two"]].concat())
        .ok();
    let clean: Value = serde_json::from_slice(&std::fs::read(&fixture).unwrap()).unwrap();
    let hello = clean["cases"]
        .as_array()
        .unwrap()
        .iter()
        .position(|c| c["kind"] == "chat")
        .unwrap();

    let mut poisoned = clean.clone();
    let step = &mut poisoned["cases"][hello]["steps"][2];
    step["fed"] = step["id"].take();
    step["id"] = step["second"].clone();
    let poisoned = place.json("poisoned.json", &poisoned);
    place
        .run(&["gate", &wren(), "--fixture", &poisoned])
        .fails(1)
        .says("1 clear flips");

    let mut weak = clean.clone();
    weak["cases"][hello]["steps"][2]["margin"] = json!(0.05);
    let weak = place.json("weak.json", &weak);
    place
        .run(&["gate", &wren(), "--fixture", &weak])
        .fails(4)
        .says("not declared")
        .hints("sweep");

    let mut other = clean;
    other["reference"]["digest"] = json!("0".repeat(64));
    let other = place.json("other.json", &other);
    place
        .run(&["gate", &wren(), "--fixture", &other])
        .fails(2)
        .says("the fixture was made from");
    place
        .run(&["gate", &wren(), "--fixture", &prompts])
        .fails(2)
        .says("p.jsonl");
}

#[test]
fn another_programs_logits_are_a_reference() {
    let place = Place::new();
    let ids = record("What is the capital of France")["prompt_ids"].clone();
    let list = place.json("ids.json", &ids);
    let logits = text(place.path("l.safetensors"));
    let args = ["logits", &wren(), "--engine", "oracle", "--ids", &list];
    place.run(&[&args[..], &["--out", &logits]].concat()).ok();
    // The same with its ids, and with one logit of a clear row raised.
    let bytes = std::fs::read(&logits).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor("logits").unwrap();
    let ids: Vec<u8> = serde_json::from_value::<Vec<u32>>(ids)
        .unwrap()
        .iter()
        .flat_map(|id| id.to_le_bytes())
        .collect();
    let write = |name: &str, data: &[u8]| {
        let shape = vec![ids.len() / 4];
        let ids = safetensors::tensor::TensorView::new(safetensors::Dtype::U32, shape, &ids);
        let shape = view.shape().to_vec();
        let logits = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, data);
        let tensors = [("input_ids", ids.unwrap()), ("logits", logits.unwrap())];
        place.file(name, safetensors::serialize(tensors, None).unwrap())
    };
    let foreign = write("foreign.safetensors", view.data());
    let gated = place.object(&["gate", &wren(), "--reference", &foreign], "carat.gate");
    assert_eq!(gated["fixture"]["reference"]["oracle"], "foreign");
    assert_eq!(gated["weights"], "foreign");

    let mut data = view.data().to_vec();
    let rows = view.shape()[0];
    for row in 0..rows {
        // An id that no prompt of questions continues with.
        let at = (row * view.shape()[1] + 1999) * 4;
        data[at..at + 4].copy_from_slice(&60f32.to_le_bytes());
    }
    let wrong = write("wrong.safetensors", &data);
    place
        .run(&["gate", &wren(), "--reference", &wrong])
        .fails(1)
        .says("clear flips");
    place
        .run(&["gate", &wren(), "--reference", &logits])
        .fails(2)
        .hints("input_ids");
}

#[test]
fn an_eval_goes_on_where_it_ended_and_compares_like_with_like() {
    let place = Place::new();
    let bundle = place.bundle();
    let eval = std::fs::read_to_string(root().join("models/eval.jsonl")).unwrap();
    let some: String = eval.lines().take(12).map(|l| format!("{l}\n")).collect();
    let data = place.file("eval.jsonl", some);
    let out = text(place.path("out.jsonl"));
    let args = |out: &str, more: &[&str]| -> Vec<String> {
        let base = [
            "eval",
            &bundle,
            "--task",
            "arithmetic",
            "--data",
            &data,
            "--out",
            out,
        ];
        base.iter().chain(more).map(|s| s.to_string()).collect()
    };
    let run = |out: &str, more: &[&str]| {
        let args = args(out, more);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        place.object(&args, "carat.eval-report")
    };
    let whole = run(&out, &[]);
    assert_eq!(whole["summary"]["missing"], 0);
    assert!(
        whole["summary"]["correct"].as_u64().unwrap() >= 9,
        "{whole}"
    );

    // A killed run: half a line at the end.
    let lines = std::fs::read_to_string(&out).unwrap();
    let cut = lines.match_indices('\n').nth(6).unwrap().0 + 20;
    let part = place.file("part.jsonl", &lines[..cut]);
    let resumed = run(&part, &["--compare", &out]);
    assert_eq!(resumed["summary"], whole["summary"]);
    assert_eq!(std::fs::read_to_string(&part).unwrap(), lines);
    let pairs = &resumed["comparison"]["pairs"];
    assert_eq!(
        (&pairs["pairs"], &pairs["p_value"]),
        (&json!(12), &json!(1.0))
    );

    // Other questions are another protocol.
    let short = text(place.path("short.jsonl"));
    run(&short, &["--limit", "3"]);
    let refused = args(&short, &["--limit", "3", "--compare", &out]);
    let refused: Vec<&str> = refused.iter().map(String::as_str).collect();
    place.run(&refused).fails(4).says("protocol");
    let mixed = args(&short, &[]);
    let mixed: Vec<&str> = mixed.iter().map(String::as_str).collect();
    place.run(&mixed).fails(2).says("another protocol");

    let choices = place.file(
        "c.jsonl",
        "{\"context\": \"The capital of France is\", \"choices\": [\" Paris.\", \" seventeen.\"], \"gold\": 0}\n",
    );
    let scored = text(place.path("c.out"));
    let args = [
        "eval", &bundle, "--task", "choice", "--data", &choices, "--out", &scored,
    ];
    let found = place.object(&args, "carat.eval-report");
    assert_eq!(found["summary"]["correct"], 1);
}
