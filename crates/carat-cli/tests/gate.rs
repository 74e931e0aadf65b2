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

/// A small fixture of the dense model.
fn two_prompts(place: &Place) -> String {
    let prompts = place.file(
        "two.jsonl",
        "{\"prompt\": \"1, 2, 3, 4, 5, 6,\"}\n{\"question\": \"Hello!\"}\n",
    );
    let out = text(place.path("two.json"));
    let model = text(wren_dense());
    let args = ["fixture", "make", &model, "--out", &out];
    let more = ["--prompts", &prompts, "--max-new-tokens", "24"];
    place.run(&[&args[..], &more].concat()).ok();
    out
}

#[test]
fn a_recipe_is_simulated_beside_the_targets_arithmetic() {
    let place = Place::new();
    let (model, fixture) = (text(wren_dense()), two_prompts(&place));
    let simulate = |recipe: &str, more: &[&str]| {
        let args = [
            "simulate",
            &model,
            "--recipe",
            recipe,
            "--fixture",
            &fixture,
        ];
        place.run(&[&args[..], more].concat())
    };
    let out = text(place.path("s.json"));
    let run = simulate("int8lin", &["--embedding", "int8", "--out", &out, "--json"]).ok();
    let found: Value = serde_json::from_str(&run.out).unwrap();
    let kept: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    assert_eq!(found, kept);
    assert_eq!(found["schema"], "carat.simulation");
    let runs = found["runs"].as_array().unwrap();
    assert_eq!(runs[0]["arithmetic"], "fp32");
    assert_eq!(
        runs[1]["arithmetic"],
        "activations int8, cache f16, embedding table in int8 with one scale"
    );
    assert_eq!(found["verdict"], runs[1]["verdict"]);
    // Each rounding takes the distributions further.
    let kl = |run: &Value| run["text"]["kl"]["value"].as_f64().unwrap();
    assert!(0.0 < kl(&runs[0]) && kl(&runs[0]) < kl(&runs[1]), "{found}");
    // In theory 8.5 bits: codes, and a scale for 32 of them.
    assert_eq!(found["recipe"]["bits_per_weight"], 8.5);
    assert!(!found["provisional"].as_array().unwrap().is_empty());

    // Exact arithmetic is one run, and what is broken fails as a gate does.
    let exact = simulate("int8lin", &["--act", "f32", "--json"]).ok();
    let exact: Value = serde_json::from_str(&exact.out).unwrap();
    assert_eq!(exact["runs"].as_array().unwrap().len(), 1);
    simulate("ternary", &[]).fails(1).says("clear flips");
    simulate("keep", &[]).fails(2).says("changes no weight");
    let other = [
        "simulate",
        &wren(),
        "--recipe",
        "int8lin",
        "--fixture",
        &fixture,
    ];
    place.run(&other).fails(2).says("the fixture was made from");
    let bundle = place.bundle();
    let bundled = ["simulate", &bundle, "--recipe", "int8lin"];
    place.run(&bundled).fails(2).says("is a bundle");
}

#[test]
fn a_scan_is_gone_on_with_and_becomes_a_recipe_of_the_size_asked_for() {
    let place = Place::new();
    let (model, fixture) = (text(wren_dense()), two_prompts(&place));
    let passage = place.file(
        "t.txt",
        "A fox saw some grapes and wanted them for himself.",
    );
    let out = text(place.path("scan.jsonl"));
    let scan = |out: &str, more: &[&str]| {
        let args = [
            "scan",
            &model,
            "--family",
            "linear",
            "--bits",
            "8,4",
            "--matrices",
        ];
        let asked = ["--fixture", &fixture, "--text", &passage, "--out", out];
        place.run(&[&args[..], &asked, more].concat())
    };
    let map = text(place.path("scan.svg"));
    let run = scan(&out, &["--heat-map", &map, "--json"]).ok();
    let found: Value = serde_json::from_str(&run.out).unwrap();
    // Eight layers of seven matrices, embedding and head, at two widths.
    assert_eq!(
        (&found["measured"], &found["of"]),
        (&json!(116), &json!(116))
    );
    assert!(
        std::fs::read_to_string(&map)
            .unwrap()
            .contains("layers.3.ffn.down alone: KL")
    );
    // A killed run ends where its last whole line does.
    let lines = std::fs::read_to_string(&out).unwrap();
    let cut = lines.match_indices('\n').nth(110).unwrap().0 + 20;
    let part = place.file("part.jsonl", &lines[..cut]);

    let recipe = text(place.path("r.yaml"));
    let allocate = |scan: &str, budget: &str, more: &[&str]| {
        let args = [
            "allocate", &model, "--scan", scan, "--budget", budget, "--out", &recipe,
        ];
        place.run(&[&args[..], more].concat())
    };
    allocate(&part, "6MB", &[])
        .fails(2)
        .says("are not measured");
    scan(&part, &[]).ok();
    assert_eq!(std::fs::read_to_string(&part).unwrap(), lines);
    allocate(&part, "1MB", &[])
        .fails(2)
        .says("at 4 bits everywhere")
        .hints("--bits");
    assert!(!std::fs::exists(&recipe).unwrap());

    // Between 4.5 and 8.5 bits for 7.35 million weights.
    let made = allocate(&part, "5500000", &["--json"]).ok();
    let made: Value = serde_json::from_str(&made.out).unwrap();
    let size = made["bytes"].as_u64().unwrap();
    // No step is larger than the table's: 2056 rows of 256 columns, 4 bits more.
    assert!(
        (5_500_000 - 2056 * 256 / 2..=5_500_000).contains(&size),
        "{made}"
    );
    let shown = place.object(
        &["recipe", "show", &recipe, "--model", &model],
        "carat.recipe-plan",
    );
    let theory = &shown["theory"];
    let parts = ["codes", "scales", "zero_points", "tables", "kept"];
    let total: u64 = parts.iter().map(|p| theory[p].as_u64().unwrap()).sum();
    assert_eq!(total, size);
    assert_eq!(made["matrices"].as_array().unwrap().len(), 2);
    let predicted = |of: &Value| of["predicted_kl"].as_f64().unwrap();
    let uniform = &made["uniform"];
    assert!(predicted(&uniform[1]) < predicted(&made) && predicted(&made) < predicted(&uniform[0]));
    // It is what the engine runs, and a scan of another model is refused.
    let bundle = text(place.path("b.carat"));
    place
        .run(&["convert", &model, &bundle, "--recipe", &recipe])
        .ok();
    let args = [
        "allocate",
        &wren(),
        "--scan",
        &part,
        "--budget",
        "6MB",
        "--out",
        &recipe,
    ];
    place.run(&args).fails(2).says("is a scan of");
    place
        .run(&["scan", &model, "--bits", "5", "--out", &out])
        .fails(2)
        .says("--bits 5");
    let again = ["scan", &model, "--bits", "4", "--out", &out];
    place.run(&again).fails(2).says("holds another scan");
}

#[test]
fn a_bundle_with_an_adapter_is_judged_by_the_merged_weights() {
    let place = Place::new();
    let (model, fixture) = (text(wren_dense()), two_prompts(&place));
    let config = json!({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none"});
    std::fs::create_dir(place.path("lora")).unwrap();
    place.file("lora/adapter_config.json", config.to_string());
    // Enough for other words.
    let factor = |n: usize| -> Vec<u8> {
        let value = |i: usize| (i * 31 % 17) as f32 / 16.0 - 0.5;
        (0..n).flat_map(|i| value(i).to_le_bytes()).collect()
    };
    let factors = [("lora_A", [1, 256]), ("lora_B", [768, 1])];
    let bytes = factors.map(|(_, [r, c])| factor(r * c));
    let views = factors.iter().zip(&bytes).map(|((name, shape), bytes)| {
        let name = format!("base_model.model.model.layers.3.mlp.up_proj.{name}.weight");
        let dtype = safetensors::Dtype::F32;
        let view = safetensors::tensor::TensorView::new(dtype, shape.to_vec(), bytes);
        (name, view.unwrap())
    });
    let weights = safetensors::serialize(views, None).unwrap();
    place.file("lora/adapter_model.safetensors", &weights);
    let lora = text(place.path("lora"));
    let bundle = text(place.path("b.carat"));
    place
        .run(&["convert", &model, &bundle, "--adapter", &lora])
        .ok();

    let gate = ["gate", &bundle, "--source", &model];
    place
        .run(&gate)
        .fails(4)
        .says("alone does not answer")
        .hints("--adapter");
    place
        .run(&["gate", &bundle, "--fixture", &fixture])
        .fails(1);
    let args = [&gate[..], &["--adapter", &lora]].concat();
    let found = place.object(&args, "carat.gate");
    assert_eq!(found["weights"], "source");
    assert_ne!(
        found["fixture"]["reference"]["digest"],
        found["candidate"]["source_digest"]
    );

    // Another adapter, and one that nobody merged.
    let mut other = weights;
    *other.last_mut().unwrap() ^= 1;
    place.file("lora/adapter_model.safetensors", &other);
    place.run(&args).fails(2).says("BLAKE3");
    let plain = place.bundle();
    let args = ["gate", &plain, "--source", &wren(), "--adapter", &lora];
    place.run(&args).fails(2).says("has no adapter");
}
