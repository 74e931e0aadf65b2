//! The command contract: what each command gives when all is well.

mod common;

use common::{Place, answer_of, random, record, root, text, wren, wren_dense};
use serde_json::{Value, json};

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The F32 tensor "logits" of a file.
fn logits(path: &str) -> (Vec<usize>, Vec<u8>) {
    let file = std::fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.names(), ["logits"]);
    let logits = tensors.tensor("logits").unwrap();
    assert_eq!(logits.dtype(), safetensors::Dtype::F32);
    (logits.shape().to_vec(), logits.data().to_vec())
}

#[test]
fn inspect_describes_checkpoints_and_bundles() {
    let place = Place::new();
    let gguf = place.object(&["inspect", &wren()], "carat.inspect");
    assert_eq!(gguf["kind"], "checkpoint");
    assert_eq!(gguf["weights_kind"], "ternary");
    assert_eq!(gguf["context"], 1024);
    assert!(gguf["plan"].is_null() && gguf["read_bandwidth"].is_null());
    assert_eq!(place.names(), [""; 0], "looking converts nothing");
    assert!(!place.path("cache").exists());

    let bundle = place.bundle();
    let bundle = place.object(&["inspect", &bundle, "--plan"], "carat.inspect");
    assert_eq!(bundle["kind"], "bundle");
    assert_eq!(bundle["parameters"], gguf["parameters"]);
    assert_eq!(bundle["spec"], gguf["spec"]);
    let plan = bundle["plan"].as_array().unwrap();
    let linear = plan.iter().filter_map(Value::as_str);
    assert!(
        linear
            .clone()
            .any(|op| op.contains("decode") && op.contains("cpu"))
    );

    let dense = place.object(&["inspect", &text(wren_dense())], "carat.inspect");
    assert_eq!(dense["weights_kind"], "dense");
    assert_eq!(dense["parameters"], gguf["parameters"]);
}

/// Decode and prefill are one plan over one copy of the weights: a second entrypoint
/// adds no byte to a bundle.
#[test]
fn two_entrypoints_share_one_copy_of_the_weights() {
    let place = Place::new();
    let bundle = place.bundle();
    let manifest = std::fs::read_to_string(place.path("wren.carat/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    let tensors = manifest["tensors"].as_array().unwrap();
    let mut spans: Vec<(u64, u64)> = tensors
        .iter()
        .map(|t| (t["offset"].as_u64().unwrap(), t["bytes"].as_u64().unwrap()))
        .collect();
    spans.sort_unstable();
    assert!(spans.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));

    // What one entrypoint reads, by the plan that both run, is all that there is.
    let seen = place.object(&["inspect", &bundle, "--plan"], "carat.inspect");
    let plan: Vec<&str> = seen["plan"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    for t in tensors {
        let name = t["name"].as_str().unwrap();
        let ops: Vec<_> = plan.iter().filter(|op| op.contains(name)).collect();
        assert!(!ops.is_empty(), "no op reads {name}");
        if t["role"] == "linear" {
            let both = |op: &&&str| op.contains("decode") && op.contains("prefill");
            assert!(ops.iter().all(both), "{ops:?}");
        }
    }
    // The rest is alignment: of tensors to 256 bytes, of segments to 16 KiB.
    let path = place.path("wren.carat/weights.bin");
    let weights = std::fs::metadata(path).unwrap().len();
    let segments = manifest["weights"]["segments"].as_array().unwrap().len();
    let most = tensors.len() as u64 * 256 + segments as u64 * (16 << 10);
    let read: u64 = spans.iter().map(|(_, bytes)| bytes).sum();
    assert!(read + most >= weights, "{read} of {weights} bytes");
}

#[test]
fn inspect_with_a_context_says_what_it_takes_and_whether_it_fits() {
    let place = Place::new();
    let small = place.object(&["inspect", &wren(), "--ctx", "64"], "carat.inspect");
    // 8 layers of 2 K and 2 V heads of 64 in fp16, for 64 tokens or the next whole block.
    let kv = small["memory"]["kv_bytes"].as_u64().unwrap();
    assert!((64 * 4096..=2 * 64 * 4096).contains(&kv), "{kv}");
    assert!(small["read_bandwidth"].as_f64().unwrap() > 0.0);
    assert!(small["expected_decode_tps"].as_f64().unwrap() > 0.0);
    let huge = ["inspect", &wren(), "--ctx", "4000000000000"];
    let huge = place.object(&huge, "carat.inspect");
    assert_ne!(huge["memory"]["fits"], true, "{}", huge["memory"]);
}

#[test]
fn conversion_is_deterministic_and_verifies() {
    let place = Place::new();
    let (one, two) = (text(place.path("one")), text(place.path("two")));
    let first = place.object(&["convert", &wren(), &one], "carat.convert");
    let second = place.object(&["convert", &wren(), &two], "carat.convert");
    assert_eq!(first["digest"], second["digest"]);
    for file in ["weights.bin", "manifest.json"] {
        let read = |bundle: &str| std::fs::read(format!("{bundle}/{file}")).unwrap();
        assert!(read(&one) == read(&two), "{file} differs");
    }
    let report = place.object(&["verify", &one], "carat.verify-report");
    assert_eq!(report["passed"], true);
    let against = ["verify", &one, "--against", &wren()];
    let report = place.object(&against, "carat.verify-report");
    assert_eq!(report["passed"], true, "{report}");
    place.run(&["verify", &one]).ok();
    // The path of the conversion is nobody's business.
    let manifest = std::fs::read_to_string(format!("{one}/manifest.json")).unwrap();
    assert!(!manifest.contains(&text(place.path(""))), "{manifest}");
}

#[test]
fn tokenize_and_render_give_the_recorded_ids() {
    let place = Place::new();
    for model in [wren(), text(wren_dense())] {
        for begins in ["Hello!", "Who are you?"] {
            let record = record(begins);
            let messages = place.json("messages.json", &record["messages"]);
            let think = if record["thinking"] == true {
                "on"
            } else {
                "off"
            };
            let args = ["render", &model, "--messages", &messages, "--think", think];
            let rendered = place.object(&args, "carat.render");
            assert_eq!(rendered["text"], record["prompt"]);
            assert_eq!(rendered["ids"], record["prompt_ids"]);

            let prompt = record["prompt"].as_str().unwrap();
            let args = ["tokenize", &model, "--text", prompt, "--no-special"];
            let tokens = place.object(&args, "carat.tokenize");
            assert_eq!(tokens["ids"], record["prompt_ids"]);
            assert_eq!(tokens["decoded"], record["prompt"]);
            let file = place.file("prompt.txt", prompt);
            let args = ["tokenize", &model, "--file", &file, "--no-special"];
            assert_eq!(place.object(&args, "carat.tokenize"), tokens);
            let args = ["tokenize", &model, "--file", "-", "--no-special"];
            let piped = place.run_with(&args, prompt).ok();
            assert_eq!(
                ids(&serde_json::from_str(&piped.out).unwrap()),
                ids(&tokens["ids"])
            );
        }
    }
    let plain = [
        "render",
        &wren(),
        "--messages",
        "messages.json",
        "--no-generation-prompt",
    ];
    let plain = place.run(&plain).ok();
    assert!(!plain.out.contains("assistant"), "{plain:?}");
}

#[test]
fn logits_do_not_depend_on_the_schedule() {
    let place = Place::new();
    let bundle = place.bundle();
    let prompt = &record("What is the capital")["prompt_ids"];
    // Long enough for a step of 64, one of 1, and several of 16.
    let tokens: Vec<u32> = ids(prompt).into_iter().cycle().take(101).collect();
    let file = place.json("ids.json", &json!(tokens));
    let run = |name: &str, more: &[&str]| {
        let out = text(place.path(name));
        let mut args = vec!["logits", &bundle, "--ids", &file, "--out", &out];
        args.extend(more);
        let said = place.object(&args, "carat.logits");
        let (shape, bytes) = logits(&out);
        assert_eq!(json!(shape), json!([said["rows"], said["vocab"]]));
        (shape, bytes)
    };
    let whole = run("whole", &[]);
    assert_eq!(whole.0, [101, 2056]);
    assert!(whole == run("one", &["--chunk", "1", "--threads", "1"]));
    assert!(whole == run("mixed", &["--schedule", "64,1,16", "--threads", "2"]));
    let last = run("last", &["--rows", "last"]);
    assert_eq!(last.0, [1, 2056]);
    assert!(whole.1.ends_with(&last.1));
    let oracle = run("oracle", &["--engine", "oracle", "--rows", "last"]);
    assert_eq!(oracle.0, [1, 2056]);
    assert!(oracle.1 != last.1, "the oracle is not the engine");
    assert_eq!(argmax(&oracle.1), argmax(&last.1));
}

fn argmax(bytes: &[u8]) -> usize {
    let floats = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b));
    let best = floats.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
    best.unwrap().0
}

#[test]
fn generate_gives_the_recorded_answer_on_every_way() {
    let place = Place::new();
    let bundle = place.bundle();
    let record = record("What is the capital");
    let prompt = place.json("ids.json", &record["prompt_ids"]);
    let answer = &record["ternary"]["ids"];
    let ways: [&[&str]; 5] = [
        &[&wren(), "--engine", "oracle"],
        &[&bundle, "--engine", "oracle"],
        &[&bundle],
        &[&wren(), "--engine", "sequential"],
        &[&wren(), "--no-cache", "--chunk", "16", "--threads", "1"],
    ];
    for way in ways {
        let mut args = vec!["generate", "--ids", &prompt, "--max-new-tokens", "40"];
        args.extend(way);
        let made = place.object(&args, "carat.generate");
        assert_eq!(made["ids"], *answer, "{way:?}");
        assert_eq!(made["stop_reason"], "eos", "{way:?}");
        assert_eq!(made["prompt_tokens"], ids(&record["prompt_ids"]).len());
        assert_eq!(
            made["softmax_margins"].as_array().unwrap().len(),
            ids(answer).len()
        );
    }
    let cache: Value =
        serde_json::from_str(&place.run(&["cache", "list", "--json"]).ok().out).unwrap();
    assert_eq!(cache["schema"], "carat.cache");
    assert_eq!(cache["version"], 1);
    assert_eq!(cache["entries"].as_array().unwrap().len(), 1, "{cache}");
    place.run(&["cache", "clear"]).ok().says("freed");
    let cache = place.run(&["cache", "list"]).ok();
    assert_eq!(cache.out, "");
}

#[test]
fn generate_ends_where_it_is_told() {
    let place = Place::new();
    let bundle = place.bundle();
    let record = record("What is the capital");
    let prompt = place.json("ids.json", &record["prompt_ids"]);
    let answer = ids(&record["ternary"]["ids"]);
    let run = |limit: &str, more: &[&str]| {
        let mut args = vec![
            "generate",
            &bundle,
            "--ids",
            &prompt,
            "--max-new-tokens",
            limit,
        ];
        args.extend(more);
        place.object(&args, "carat.generate")
    };
    let short = run("3", &[]);
    assert_eq!(short["stop_reason"], "length");
    assert_eq!(ids(&short["ids"]), answer[..3]);

    let stopped = run("40", &["--stop", "France"]);
    assert_eq!(stopped["stop_reason"], "stop");
    assert_eq!(stopped["text"], "The capital of ");

    let on = run("12", &["--ignore-eos"]);
    assert_eq!(on["stop_reason"], "length");
    assert_eq!(ids(&on["ids"]).len(), 12);
    assert_eq!(ids(&on["ids"])[..answer.len()], answer);

    // Fed its own answer the model would say the same; fed another, that is kept.
    let own = place.json("own.json", &record["ternary"]["ids"]);
    let own = run("40", &["--force", &own]);
    assert_eq!(ids(&own["ids"]), answer);
    assert_eq!(ids(&own["argmax"]), answer);
    let other = place.json("other.json", &json!([5, 6, 7]));
    for engine in ["sequential", "oracle"] {
        let other = run("40", &["--force", &other, "--engine", engine]);
        assert_eq!(ids(&other["ids"]), [5, 6, 7]);
        assert_eq!(ids(&other["argmax"])[0], answer[0]);
        assert_eq!(ids(&other["argmax"]).len(), 3);
    }

    let drawn = ["--temperature", "1.5", "--top-k", "50", "--seed", "7"];
    let (one, two) = (run("20", &drawn), run("20", &drawn));
    assert_eq!(one["ids"], two["ids"], "a seed fixes the draw");
    let cold = run("40", &["--temperature", "0"]);
    assert_eq!(ids(&cold["ids"]), answer);
}

#[test]
fn score_knows_the_greedy_answer() {
    let place = Place::new();
    let record = record("What is the capital");
    let context = place.json("context.json", &record["prompt_ids"]);
    let answer = place.json("answer.json", &record["ternary"]["ids"]);
    let other = place.json("other.json", &json!([5, 6, 7]));
    let score = |continuation: &str, engine: &str| {
        let args = [
            "score",
            &wren(),
            "--no-cache",
            "--engine",
            engine,
            "--context-ids",
            &context,
            "--continuation-ids",
            continuation,
        ];
        place.object(&args, "carat.score")
    };
    for engine in ["sequential", "oracle"] {
        let good = score(&answer, engine);
        assert_eq!(good["is_greedy"], true);
        let tokens = good["token_logprobs"].as_array().unwrap();
        assert_eq!(tokens.len(), ids(&record["ternary"]["ids"]).len());
        let sum: f64 = tokens.iter().map(|t| t.as_f64().unwrap()).sum();
        assert!((sum - good["logprob"].as_f64().unwrap()).abs() < 1e-9);
        // Every step of this record has a softmax margin above 0.86.
        assert!(
            sum > tokens.len() as f64 * 0.86f64.ln() && sum < 0.0,
            "{sum}"
        );
        let bad = score(&other, engine);
        assert_eq!(bad["is_greedy"], false);
        assert!(bad["logprob"].as_f64().unwrap() < sum);
    }
}

#[test]
fn run_answers_arguments_pipes_and_lines() {
    let place = Place::new();
    let bundle = place.bundle();
    let record = record("What is the capital");
    let question = record["messages"][0]["content"].as_str().unwrap();
    let answer = answer_of(&record);

    let ran = place.run(&["run", &bundle, question]).ok().says("tok/s");
    assert_eq!(ran.out.trim_end(), answer);
    let piped = place
        .run_with(&["run", &bundle], &format!("{question}\n"))
        .ok();
    assert_eq!(piped.out.trim_end(), answer);
    let lines = format!("{question}\n\n{question}\n");
    let lines = place.run_with(&["run", &bundle, "--lines"], &lines).ok();
    assert_eq!(lines.out, format!("{answer}\n{answer}\n"));
    let said = place.object(&["run", &bundle, question], "carat.answer");
    assert_eq!(said["text"], answer);
    assert_eq!(said["ids"], record["ternary"]["ids"]);
    assert_eq!(said["stop_reason"], "eos");
    let stopped = ["run", &bundle, question, "--stop", " of"];
    assert_eq!(place.run(&stopped).ok().out, "The capital\n");
    let cut = ["run", &bundle, question, "--max-new-tokens", "2"];
    place.run(&cut).ok().says("cut off at the token limit");

    let raw = record["prompt"].as_str().unwrap();
    let raw = place.run(&["run", &bundle, "--raw", raw]).ok();
    assert_eq!(raw.out.trim_end(), answer);
    let with = ["run", &bundle, question, "--system", "Be brief."];
    let with = place.object(&with, "carat.answer");
    assert!(with["prompt_tokens"].as_u64() > said["prompt_tokens"].as_u64());
}

/// The answers of a piped chat with `--json`.
fn chat(place: &Place, bundle: &str, lines: &str) -> Vec<Value> {
    let ran = place.run_with(&["chat", bundle, "--json"], lines).ok();
    let answers = serde_json::Deserializer::from_str(&ran.out).into_iter();
    answers.map(Result::unwrap).collect()
}

#[test]
fn chat_remembers_until_it_is_reset() {
    let place = Place::new();
    let bundle = place.bundle();
    let record = record("What is the capital");
    let question = record["messages"][0]["content"].as_str().unwrap();
    let answer = answer_of(&record);

    let twice = chat(&place, &bundle, &format!("{question}\n{question}\n"));
    assert_eq!(twice.len(), 2);
    assert_eq!(twice[0]["text"], answer);
    assert!(twice[1]["prompt_tokens"].as_u64() > twice[0]["prompt_tokens"].as_u64());
    assert_ne!(
        twice[1]["reused_tokens"], 0,
        "the first turn is not read again"
    );

    let reset = format!("{question}\n/reset\n{question}\n/exit\n{question}\n");
    let reset = chat(&place, &bundle, &reset);
    assert_eq!(reset.len(), 2, "nothing follows /exit");
    assert_eq!(reset[1]["text"], answer);
    assert_eq!(reset[1]["ids"], reset[0]["ids"]);
    assert_eq!(reset[1]["prompt_tokens"], reset[0]["prompt_tokens"]);

    let plain = format!("/nonsense\n{question}\n");
    let plain = place.run_with(&["chat", &bundle], &plain).ok();
    assert_eq!(plain.out.trim_end(), answer);
    let plain = plain.says("/nonsense: no such command");
    assert!(plain.err.contains("tok/s"));
}

#[test]
fn chat_survives_a_full_context() {
    let place = Place::new();
    let bundle = place.bundle();
    let args = ["chat", &bundle, "--ctx", "40"];
    let line = "What is the capital of France?\n".repeat(4);
    let ran = place.run_with(&args, &(line + "/reset\nHello!\n")).ok();
    let ran = ran
        .says("no longer fits in the context of 40")
        .says("/reset");
    assert!(
        ran.out.trim_end().ends_with("Hello! How can I help you?"),
        "{ran:?}"
    );
}

#[test]
fn bench_is_for_release_builds() {
    let place = Place::new();
    let args = [
        "bench",
        &wren(),
        "--no-cache",
        "-p",
        "8",
        "-n",
        "4",
        "-r",
        "1",
        "--json",
    ];
    if cfg!(debug_assertions) {
        let ran = place.run(&args).fails(4).hints("--release");
        assert_eq!(ran.out, "");
    } else {
        let ran = place.run(&args).ok();
        let record: Value = serde_json::from_str(&ran.out).unwrap();
        assert_eq!(record["schema"], "carat.bench");
        assert!(record["record"]["decode_tps"]["median"].as_f64().unwrap() > 0.0);
        assert!(record["record"]["load_ns"].as_u64().unwrap() > 0);
    }
}

#[test]
fn completions_and_the_list_of_pinned_models() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let ran = place.run(&["completions", shell]).ok();
        assert!(ran.out.contains("inspect") && ran.out.contains("carat"));
    }
    let pinned = place.object(&["pull"], "carat.pinned");
    let names = pinned["models"].as_array().unwrap().iter();
    assert!(names.clone().any(|m| m["name"] == "smollm2-135m"));
    let listed = place.run(&["pull"]).ok();
    assert_eq!(listed.out.lines().count(), names.count());
}

#[test]
fn a_model_without_a_tokenizer_still_counts() {
    let place = Place::new();
    let prompt = place.json("ids.json", &json!([1, 2, 3, 4]));
    let model = text(random());
    let args = [
        "generate",
        &model,
        "--ids",
        &prompt,
        "--max-new-tokens",
        "5",
        "--ignore-eos",
    ];
    let made = place.object(&args, "carat.generate");
    assert_eq!(ids(&made["ids"]).len(), 5);
    assert!(made["text"].is_null());
    assert!(root().join("tests/golden").is_dir());
}
