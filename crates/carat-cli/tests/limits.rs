//! Numbers beyond all bounds, engines that cannot do what is asked, and where
//! answers end: the same on every way.

mod common;

use common::{Place, random, record, text, wren, wren_dense};
use serde_json::{Value, json};

const MOST: &str = "18446744073709551615";

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn a_context_beyond_all_numbers_does_not_fit() {
    let place = Place::new();
    let model = place.bundle();
    let told = place.object(&["inspect", &model, "--ctx", MOST], "carat.inspect");
    assert_ne!(told["memory"]["fits"], true, "{}", told["memory"]);
    let prompt = place.json("ids.json", &json!([1, 2, 3]));
    let most = ["--ctx", MOST, "--max-new-tokens", MOST];
    let run = [&["run", &model, "Hi"], &most[..]].concat();
    place.run(&run).fails(4).hints("--ctx");
    let generate = [&["generate", &model, "--ids", &prompt], &most[..]].concat();
    for engine in ["sequential", "oracle"] {
        let args = [&generate[..], &["--engine", engine]].concat();
        place.run(&args).fails(4).hints("--ctx");
    }
    // A turn that does not fit leaves the chat as it was.
    let chat = [&["chat", &model], &most[..]].concat();
    let ran = place.run_with(&chat, "Hello!\n/help\n").fails(4);
    ran.says("/reset").says("KV cache").hints("--ctx");
}

#[test]
fn more_tokens_than_the_context_has_are_no_reason_to_refuse() {
    let place = Place::new();
    let model = place.bundle();
    let record = record("What is the capital");
    let prompt = place.json("ids.json", &record["prompt_ids"]);
    for engine in ["sequential", "oracle"] {
        let args = ["generate", &model, "--ids", &prompt, "--engine", engine];
        let args = [&args[..], &["--max-new-tokens", MOST]].concat();
        let made = place.object(&args, "carat.generate");
        assert_eq!(made["ids"], record["ternary"]["ids"], "{engine}");
    }
    let question = record["messages"][0]["content"].as_str().unwrap();
    place
        .run(&["run", &model, question, "--max-new-tokens", MOST])
        .ok();
}

#[test]
fn engine_and_oracle_fill_a_context_alike() {
    let place = Place::new();
    let model = text(random());
    let prompt = place.json("ids.json", &json!([1, 2, 3, 4, 5, 6, 7, 8]));
    let force = place.json("force.json", &json!([9, 9, 9, 9]));
    for engine in ["sequential", "oracle"] {
        let made = |ctx: &str, more: &[&str]| {
            let args = ["generate", &model, "--no-cache", "--ids", &prompt];
            let size = ["--max-new-tokens", "10", "--ignore-eos", "--ctx", ctx];
            let args = [&args[..], &size, &["--engine", engine], more].concat();
            let made = place.object(&args, "carat.generate");
            assert_eq!(made["stop_reason"], "length");
            ids(&made["ids"]).len()
        };
        assert_eq!(made("10", &[]), 2, "{engine}");
        assert_eq!(made("30", &[]), 10, "{engine}");
        assert_eq!(made("10", &["--force", &force]), 2, "{engine}");
        let args = ["generate", &model, "--no-cache", "--ids", &prompt];
        let size = ["--max-new-tokens", "1", "--ctx", "8", "--engine", engine];
        place
            .run(&[&args[..], &size].concat())
            .fails(2)
            .says("context of 8");
    }
}

#[test]
fn steps_of_any_size() {
    let place = Place::new();
    let model = place.bundle();
    let tokens = place.json("ids.json", &json!([1, 2, 3, 4, 5]));
    let run = |name: &str, more: &[&str]| {
        let out = text(place.path(name));
        let args = ["logits", &model, "--ids", &tokens, "--out", &out];
        place.run(&[&args[..], more].concat()).ok();
        std::fs::read(out).unwrap()
    };
    let whole = run("whole", &[]);
    let schedule = format!("1,{MOST}");
    assert!(whole == run("steps", &["--schedule", &schedule]));
    assert!(whole == run("chunk", &["--chunk", MOST]));
}

#[test]
fn repetitions_beyond_patience() {
    let place = Place::new();
    let model = place.bundle();
    for (option, says) in [("-r", MOST), ("-p", "do not fit"), ("-n", "do not fit")] {
        place
            .run(&["bench", &model, option, MOST])
            .fails(2)
            .says(says)
            .hints("-p");
    }
}

#[test]
fn the_oracle_says_what_it_cannot_honour() {
    let place = Place::new();
    let model = wren();
    let tokens = place.json("ids.json", &json!([1, 2, 3]));
    let out = text(place.path("out"));
    let generate = [
        "generate",
        &model,
        "--ids",
        &tokens,
        "--max-new-tokens",
        "2",
        "--engine",
        "oracle",
    ];
    let logits = [
        "logits", &model, "--ids", &tokens, "--out", &out, "--engine", "oracle",
    ];
    let bad: [(&[&str], &[&str], &str); 5] = [
        (&generate, &["--act", "int8"], "--act"),
        (&generate, &["--act", "bf16"], "--act"),
        (&generate, &["--chunk", "2"], "--chunk"),
        (&logits, &["--chunk", "2"], "--chunk"),
        (&logits, &["--schedule", "1,2"], "--schedule"),
    ];
    for (command, more, option) in bad {
        place
            .run(&[command, more].concat())
            .fails(2)
            .says(
                more.join(" ")
                    .split(',')
                    .next()
                    .unwrap()
                    .split(' ')
                    .next()
                    .unwrap(),
            )
            .hints(option);
    }
    assert!(!place.path("out").exists());
    let fine = [
        &generate[..],
        &["--act", "f32", "--threads", "1", "--no-cache"],
    ]
    .concat();
    place.run(&fine).ok();
}

#[test]
fn a_declared_end_of_several_tokens_ends_every_answer() {
    let place = Place::new();
    let model = place.edited(&wren_dense(), "tokenizer_config.json", |config| {
        config["eos_token"] = json!("of France");
    });
    let record = record("What is the capital");
    let prompt = place.json("ids.json", &record["prompt_ids"]);
    let run = |more: &[&str]| {
        let args = ["generate", &model, "--no-cache", "--ids", &prompt];
        let args = [&args[..], &["--max-new-tokens", "40"], more].concat();
        place.object(&args, "carat.generate")
    };
    for engine in ["sequential", "oracle"] {
        let made = run(&["--engine", engine]);
        assert_eq!(made["text"], "The capital ", "{engine}");
        assert_eq!(made["stop_reason"], "stop", "{engine}");
        let argmax = ids(&made["argmax"]);
        assert_eq!(argmax.len(), ids(&made["ids"]).len(), "{engine}");
        let stopped = run(&["--engine", engine, "--stop", "capital"]);
        assert_eq!(stopped["text"], "The ", "{engine}");
        let on = run(&["--engine", engine, "--ignore-eos"]);
        let said = on["text"].as_str().unwrap();
        assert!(said.starts_with("The capital of France"), "{said}");
    }
}

#[test]
fn a_turn_that_fails_does_not_end_the_chat() {
    let place = Place::new();
    let model = place.edited(&wren_dense(), "tokenizer_config.json", |config| {
        let template = config["chat_template"].as_str().unwrap();
        config["chat_template"] = json!(format!(
            "{{% if messages[0].role == 'system' %}}{{{{ raise_exception('no system here') }}}}\
             {{% endif %}}{template}"
        ));
    });
    let hello = record("Hello!");
    let answer = common::answer_of(&hello);
    let lines = "/system Be brief.\nHello!\nHello!\n/system\nHello!\n";
    let ran = place
        .run_with(&["chat", &model, "--no-cache"], lines)
        .fails(2)
        .says("no system here");
    assert_eq!(ran.err.matches("no system here").count(), 2, "{ran:?}");
    assert!(ran.out.trim_end().starts_with(&answer[..6]), "{ran:?}");
}

#[test]
fn activation_groups_that_no_kernel_has_are_refused() {
    let place = Place::new();
    let bundle = place.bundle();
    let path = format!("{bundle}/manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(manifest["activation"]["default"], "int8");
    manifest["activation"]["group"] = json!(64);
    std::fs::write(&path, manifest.to_string()).unwrap();
    let prompt = place.json("ids.json", &json!([1, 2, 3]));
    let args = ["generate", &bundle, "--ids", &prompt];
    let args = [&args[..], &["--max-new-tokens", "2"]].concat();
    place
        .run(&args)
        .fails(2)
        .says("activation.group is 64")
        .hints("--act f32");
    place.run(&[&args[..], &["--act", "f32"]].concat()).ok();
}

#[test]
fn a_bundle_of_floats_declares_floats() {
    let place = Place::new();
    let out = text(place.path("dense"));
    place.run(&["convert", &text(wren_dense()), &out]).ok();
    let manifest = std::fs::read(format!("{out}/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["activation"]["default"], "f32");

    // What the checkpoint would need is what its bundle needs.
    let weights = |model: &str| {
        let told = place.object(&["inspect", model], "carat.inspect");
        (
            told["memory"]["weights_bytes"].as_u64().unwrap(),
            told["bytes_per_token"].as_u64().unwrap(),
        )
    };
    assert_eq!(weights(&text(wren_dense())), weights(&out));
    assert_eq!(weights(&wren()), weights(&place.bundle()));
}
