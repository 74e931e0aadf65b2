//! Bad input: each a clear error that names the culprit, with its exit code;
//! nothing is written, nothing panics (every run of `Place` checks the latter).

mod common;

use common::{Place, random, record, text, wren, wren_dense};
use serde_json::{Value, json};

/// Commands that open a model, with all else in order.
fn commands_on(place: &Place, model: &str) -> Vec<Vec<String>> {
    let ids = place.json("ids.json", &json!([1, 2, 3]));
    let messages = place.json(
        "messages.json",
        &json!([{ "role": "user", "content": "Hi" }]),
    );
    let out = text(place.path("out"));
    let commands: [&[&str]; 10] = [
        &["inspect", model],
        &["convert", model, &out],
        &["tokenize", model, "--text", "Hi"],
        &["render", model, "--messages", &messages],
        &["logits", model, "--ids", &ids, "--out", &out],
        &["generate", model, "--ids", &ids, "--max-new-tokens", "3"],
        &[
            "score",
            model,
            "--context-ids",
            &ids,
            "--continuation-ids",
            &ids,
        ],
        &["run", model, "Hi"],
        &["chat", model],
        &["bench", model, "-p", "4", "-n", "4"],
    ];
    let owned = commands
        .iter()
        .map(|c| c.iter().map(|s| (*s).to_owned()).collect());
    owned.collect()
}

/// Every command refuses the model alike, and leaves nothing.
fn all_refuse(place: &Place, model: &str, says: &[&str], hint: Option<&str>) {
    for command in commands_on(place, model) {
        let before = place.names();
        let args: Vec<&str> = command.iter().map(String::as_str).collect();
        let mut ran = place.run(&args).fails(2);
        for part in says {
            ran = ran.says(part);
        }
        if let Some(hint) = hint {
            ran = ran.hints(hint);
        }
        assert_eq!(ran.out, "");
        assert_eq!(place.names(), before, "{args:?}");
        let cache = place.run(&["cache", "list"]).ok();
        assert_eq!(cache.out, "", "{args:?}");
    }
}

#[test]
fn a_model_that_is_not_there() {
    let place = Place::new();
    all_refuse(
        &place,
        "no-such-model",
        &["no-such-model: no such file"],
        Some("carat pull"),
    );
    place
        .run(&["run", "smollm2-135m", "Hi"])
        .fails(2)
        .hints("carat pull smollm2-135m");
    let none = text(place.path("none"));
    place
        .run(&["verify", &none])
        .fails(2)
        .says("none")
        .hints("carat convert");
}

#[test]
fn a_folder_without_a_config() {
    let place = Place::new();
    let folder = place.path("empty");
    std::fs::create_dir(&folder).unwrap();
    all_refuse(
        &place,
        &text(folder),
        &["empty: neither a bundle", "config.json"],
        Some(".gguf"),
    );
}

#[test]
fn an_unknown_architecture_lists_what_is_known() {
    let place = Place::new();
    let model = place.edited(&random(), "config.json", |config| {
        config["model_type"] = json!("abacus");
        config["architectures"] = json!(["AbacusForCausalLM"]);
    });
    all_refuse(
        &place,
        &model,
        &["config.json", "abacus", "expected one of", "qwen3"],
        None,
    );
}

#[test]
fn an_unknown_config_key_is_named() {
    let place = Place::new();
    let model = place.edited(&random(), "config.json", |config| {
        config["attention_wobble"] = json!(0.5);
    });
    all_refuse(
        &place,
        &model,
        &["config.json", "attention_wobble"],
        Some("ignor"),
    );
}

#[test]
fn a_config_that_contradicts_the_weights() {
    let place = Place::new();
    let model = place.edited(&random(), "config.json", |config| {
        let layers = config["num_hidden_layers"].as_u64().unwrap();
        config["num_hidden_layers"] = json!(layers + 1);
    });
    all_refuse(&place, &model, &["is missing"], Some("shard"));
}

#[test]
fn a_truncated_gguf() {
    let place = Place::new();
    let whole = std::fs::read(wren()).unwrap();
    let half = place.file("half.gguf", &whole[..whole.len() / 2]);
    all_refuse(&place, &half, &["half.gguf"], Some("cut short"));
    for (name, length) in [("empty", 0), ("magic", 4), ("head", 24), ("keys", 3000)] {
        let file = place.file(&format!("{name}.gguf"), &whole[..length]);
        place.run(&["inspect", &file]).fails(2).says(name);
    }
    let other = place.file("other.gguf", "This is not a model, however long the text.");
    place.run(&["inspect", &other]).fails(2).says("other.gguf");
}

#[test]
fn a_gguf_with_text_that_is_not_utf_8() {
    let place = Place::new();
    let mut bytes = std::fs::read(wren()).unwrap();
    let key = b"general.architecture";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap();
    // The value follows the key, its type (4 bytes) and its length (8 bytes).
    bytes[at + key.len() + 12] = 0xff;
    let bad = place.file("bad.gguf", &bytes);
    all_refuse(&place, &bad, &["bad.gguf", "UTF-8"], Some("damaged"));
}

#[test]
fn a_missing_shard_is_named() {
    let place = Place::new();
    let folder = place.copy(&random(), "sharded");
    let whole = folder.join("model.safetensors");
    let bytes = std::fs::read(&whole).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let shard = |at: usize| format!("model-0000{}-of-00002.safetensors", at % 2 + 1);
    let names = tensors.names();
    let map: serde_json::Map<String, Value> = names
        .iter()
        .enumerate()
        .map(|(at, name)| ((*name).to_owned(), shard(at).into()))
        .collect();
    let index = json!({ "metadata": {}, "weight_map": map });
    std::fs::write(
        folder.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let half: Vec<_> = names
        .iter()
        .step_by(2)
        .map(|n| (*n, tensors.tensor(n).unwrap()))
        .collect();
    let half = safetensors::serialize(half, None).unwrap();
    std::fs::write(folder.join(shard(0)), half).unwrap();
    std::fs::remove_file(whole).unwrap();
    all_refuse(&place, &text(folder), &[&shard(1)], None);
}

#[test]
fn ids_that_are_none() {
    let place = Place::new();
    let model = wren();
    let good = place.json("good.json", &json!([1, 2, 3]));
    let out = text(place.path("out.safetensors"));
    let bad = [
        ("text.json", "Hello", "hint: expected a JSON list"),
        ("empty.json", "[]", "empty"),
        (
            "object.json",
            "{\"ids\": [1]}",
            "hint: expected a JSON list",
        ),
        ("negative.json", "[1, -1]", "hint: expected a JSON list"),
        (
            "huge.json",
            "[1, 99999999999999999999]",
            "hint: expected a JSON list",
        ),
        (
            "range.json",
            "[1, 2056]",
            "id 2056 at index 1 is outside the vocabulary of 2056",
        ),
        ("absent.json", "", "absent.json"),
    ];
    for (name, content, says) in bad {
        let bad = match name {
            "absent.json" => text(place.path(name)),
            _ => place.file(name, content),
        };
        let commands: [&[&str]; 5] = [
            &["logits", &model, "--ids", &bad, "--out", &out],
            &["generate", &model, "--ids", &bad, "--max-new-tokens", "3"],
            &[
                "generate",
                &model,
                "--ids",
                &good,
                "--max-new-tokens",
                "3",
                "--force",
                &bad,
            ],
            &[
                "score",
                &model,
                "--context-ids",
                &bad,
                "--continuation-ids",
                &good,
            ],
            &[
                "score",
                &model,
                "--context-ids",
                &good,
                "--continuation-ids",
                &bad,
            ],
        ];
        for command in commands {
            for engine in ["sequential", "oracle"] {
                let mut args = command.to_vec();
                args.extend(["--engine", engine]);
                let ran = place.run(&args).fails(2).says(name).says(says);
                assert_eq!(ran.out, "");
            }
        }
    }
    assert!(!place.path("out.safetensors").exists());
}

#[test]
fn an_empty_prompt() {
    let place = Place::new();
    let model = place.bundle();
    place
        .run(&["run", &model, ""])
        .fails(2)
        .says("empty")
        .hints("carat run");
    place.run(&["run", &model]).fails(2).says("empty");
    place
        .run_with(&["run", &model], "\n\r\n")
        .fails(2)
        .says("empty");
    place
        .run(&["run", &model, "--raw", ""])
        .fails(2)
        .says("empty");
    place.run(&["chat", &model]).ok();
    let none = place
        .run(&["tokenize", &model, "--text", "", "--json"])
        .ok();
    let none: Value = serde_json::from_str(&none.out).unwrap();
    assert_eq!(none["ids"], json!([]));
}

#[test]
fn a_prompt_longer_than_the_context() {
    let place = Place::new();
    let model = place.bundle();
    let long = place.json("long.json", &json!(vec![7; 17]));
    let short = place.json("short.json", &json!([7]));
    let out = text(place.path("out.safetensors"));
    let words = "one two three ".repeat(10);
    for engine in ["sequential", "oracle"] {
        let commands: [&[&str]; 3] = [
            &["logits", &model, "--ids", &long, "--out", &out],
            &["generate", &model, "--ids", &long, "--max-new-tokens", "3"],
            &[
                "score",
                &model,
                "--context-ids",
                &long,
                "--continuation-ids",
                &short,
            ],
        ];
        for command in commands {
            let mut args = command.to_vec();
            args.extend(["--ctx", "16", "--engine", engine]);
            place
                .run(&args)
                .fails(2)
                .says("context of 16")
                .hints("--ctx");
        }
    }
    place
        .run(&["run", &model, &words, "--ctx", "16"])
        .fails(2)
        .says("context of 16")
        .hints("--ctx");
    assert!(!place.path("out.safetensors").exists());
}

#[test]
fn options_out_of_range_or_not_built_are_refused_before_any_work() {
    let place = Place::new();
    let model = wren();
    let ids = place.json("ids.json", &json!([1, 2, 3]));
    let bad: [(&[&str], &str, bool); 11] = [
        (&["--ctx", "0"], "--ctx 0", false),
        (&["--threads", "0"], "--threads 0", false),
        (&["--threads", "100000"], "--threads 100000", false),
        (&["--engine", "pipelined"], "--engine pipelined", true),
        (&["--engine", "static"], "--engine static", true),
        (&["--device", "cuda"], "--device cuda", true),
        (&["--device", "wgpu:1"], "--device wgpu:1", true),
        (&["--device", "toaster"], "--device toaster", true),
        (&["--kv", "int8"], "--kv int8", true),
        (
            &["--engine", "oracle", "--device", "cuda"],
            "--device cuda",
            true,
        ),
        (
            &["--engine", "oracle", "--threads", "0"],
            "--threads 0",
            false,
        ),
    ];
    for (options, says, hint) in bad {
        let mut args = vec!["generate", &model, "--ids", &ids, "--max-new-tokens", "3"];
        args.extend(options);
        let ran = place.run(&args).fails(2).says(says);
        if hint {
            ran.hints("");
        }
    }
    place
        .run(&["inspect", &model, "--device", "cuda"])
        .fails(2)
        .hints("--device");
    place
        .run(&["run", &model, "Hi", "--engine", "oracle"])
        .fails(2)
        .hints("generate");
    place
        .run(&["convert", &model, "o", "--recipe", "magic"])
        .fails(2)
        .says("magic")
        .hints("keep");
    place
        .run(&["convert", &model, "o", "--target", "moon"])
        .fails(2)
        .says("moon")
        .hints("native");
    assert_eq!(place.names(), ["ids.json"]);
    assert!(!place.path("cache").exists(), "nothing was converted");
    // What clap refuses is a usage error too.
    for args in [
        &["fly"][..],
        &["inspect"],
        &["inspect", &model, "--engine", "steam"],
    ] {
        place.run(args).fails(2);
    }
}

#[test]
fn settings_of_generation_out_of_range() {
    let place = Place::new();
    let model = place.bundle();
    let ids = place.json("ids.json", &json!([1, 2, 3]));
    let bad: [(&[&str], &str); 8] = [
        (&["--temperature=-1"], "temperature"),
        (&["--temperature", "NaN"], "temperature"),
        (&["--temperature", "1", "--top-p", "1.5"], "top-p"),
        (&["--temperature", "1", "--min-p=-0.1"], "min-p"),
        (&["--chunk", "0"], "chunk"),
        (&["--chunk", "48"], "32, 64"),
        (&["--draft", "ngram"], "--draft ngram"),
        (&["--engine", "oracle", "--temperature", "1"], "greedy"),
    ];
    for (options, says) in bad {
        let mut args = vec!["generate", &model, "--ids", &ids, "--max-new-tokens", "3"];
        args.extend(options);
        place.run(&args).fails(2).says(says);
    }
    let out = text(place.path("out"));
    for schedule in ["0", "64,0", "", "a", "1,,2", "99999999999999999999"] {
        let args = [
            "logits",
            &model,
            "--ids",
            &ids,
            "--out",
            &out,
            "--schedule",
            schedule,
        ];
        place.run(&args).fails(2).says("schedule").hints("64,1,16");
    }
    assert!(!place.path("out").exists());
}

#[test]
fn what_does_not_fit_into_memory_is_refused() {
    let place = Place::new();
    let model = place.bundle();
    let ids = place.json("ids.json", &json!([1, 2, 3]));
    let args = [
        "generate",
        &model,
        "--ids",
        &ids,
        "--ctx",
        "4000000000",
        "--max-new-tokens",
        "3999999000",
    ];
    place.run(&args).fails(4).says("KV cache").hints("--ctx");
}

#[test]
fn a_target_that_cannot_be_written() {
    let place = Place::new();
    let model = wren();
    let ids = place.json("ids.json", &json!([1, 2, 3]));
    let under = text(place.path("ids.json").join("out"));
    let ran = place
        .run(&["convert", &model, &under])
        .fails(2)
        .says("ids.json");
    assert_eq!(ran.out, "");
    let args = ["logits", &model, "--ids", &ids, "--out", &under];
    place.run(&args).fails(2).says("ids.json");
    let gone = text(place.path("gone").join("out"));
    place
        .run(&["logits", &model, "--ids", &ids, "--out", &gone])
        .fails(2)
        .says("gone");
    assert_eq!(place.names(), ["ids.json"]);
    // A cache that cannot be written.
    std::fs::remove_dir_all(place.path("cache")).unwrap();
    std::fs::write(place.path("cache"), "a file").unwrap();
    place.run(&["run", &model, "Hi"]).fails(2).says("cache");
}

#[test]
fn a_bundle_is_not_replaced_unasked() {
    let place = Place::new();
    let bundle = place.bundle();
    let before = std::fs::read(format!("{bundle}/manifest.json")).unwrap();
    place
        .run(&["convert", &text(random()), &bundle])
        .fails(2)
        .says("wren.carat")
        .hints("--force");
    assert!(before == std::fs::read(format!("{bundle}/manifest.json")).unwrap());
    place.run(&["verify", &bundle]).ok();
    place
        .run(&["convert", &text(random()), &bundle, "--force"])
        .ok();
    assert!(before != std::fs::read(format!("{bundle}/manifest.json")).unwrap());
    place.run(&["verify", &bundle]).ok();
    assert_eq!(place.names(), ["wren.carat"]);
    // What is no bundle is never deleted.
    let folder = place.path("mine");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("thesis.txt"), "years of work").unwrap();
    place
        .run(&["convert", &wren(), &text(&folder), "--force"])
        .fails(2)
        .says("mine");
    assert!(folder.join("thesis.txt").exists());
    place
        .run(&["convert", &bundle, "again"])
        .fails(2)
        .says("a bundle already")
        .hints("checkpoint");
}

#[test]
fn a_failed_conversion_leaves_nothing() {
    let place = Place::new();
    let mut bytes = std::fs::read(wren()).unwrap();
    // Two blocks of 66 bytes amid the ternary layers: TQ2_0 has no code 3, so the
    // header is good and the weights are not.
    let middle = bytes.len() / 2;
    bytes[middle..middle + 132].fill(0xff);
    let bad = place.file("bad.gguf", &bytes);
    let out = text(place.path("out"));
    let ran = place.run(&["convert", &bad, &out]).fails(2);
    assert_eq!(ran.out, "");
    assert_eq!(place.names(), ["bad.gguf"]);
}

#[test]
fn a_damaged_bundle_does_not_verify() {
    let place = Place::new();
    let bundle = place.bundle();
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(format!("{bundle}/manifest.json")).unwrap()).unwrap();
    let tensor = &manifest["tensors"][3];
    let weights = format!("{bundle}/weights.bin");
    let mut bytes = std::fs::read(&weights).unwrap();
    let whole = bytes.len();
    bytes[tensor["offset"].as_u64().unwrap() as usize] ^= 1;
    std::fs::write(&weights, &bytes).unwrap();
    let name = tensor["name"].as_str().unwrap();
    let ran = place.run(&["verify", &bundle]).fails(1);
    assert!(ran.out.contains(name), "{ran:?}");
    let ran = place.run(&["verify", &bundle, "--json"]).fails(1);
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["passed"], false);

    // Cut short, it does not even load.
    std::fs::write(&weights, &bytes[..whole / 2]).unwrap();
    place
        .run(&["run", &bundle, "Hi"])
        .fails(2)
        .says("weights.bin");
    place.run(&["verify", &bundle]).fails(1);
    std::fs::write(format!("{bundle}/manifest.json"), "{}").unwrap();
    place
        .run(&["run", &bundle, "Hi"])
        .fails(2)
        .says("manifest.json");
    place.run(&["verify", &bundle]).fails(1);
}

#[test]
fn no_template_no_chat() {
    let place = Place::new();
    let model = place.edited(&wren_dense(), "tokenizer_config.json", |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    let messages = place.json(
        "messages.json",
        &json!([{ "role": "user", "content": "Hi" }]),
    );
    place
        .run(&["run", &model, "Hi"])
        .fails(2)
        .says("template")
        .hints("--raw");
    place
        .run_with(&["chat", &model], "Hi\n")
        .fails(2)
        .says("template")
        .hints("--raw");
    place
        .run(&["render", &model, "--messages", &messages])
        .fails(2)
        .says("template")
        .hints("--raw");
    // Text itself goes on.
    let raw = record("Hello!");
    let raw = raw["prompt"].as_str().unwrap();
    let ran = place.run(&["run", &model, "--raw", raw]).ok();
    assert!(ran.out.starts_with("Hello!"), "{ran:?}");
    place
        .run(&["run", &model, "--raw", "x", "--system", "y"])
        .fails(2)
        .says("--system");
}

#[test]
fn no_tokenizer_no_text() {
    let place = Place::new();
    let model = text(random());
    place
        .run(&["tokenize", &model, "--text", "Hi"])
        .fails(2)
        .hints("tokenizer.json");
    place
        .run(&["run", &model, "--raw", "Hi"])
        .fails(2)
        .hints("tokenizer.json");
    let ids = place.json("ids.json", &json!([1, 2]));
    let args = [
        "generate",
        &model,
        "--ids",
        &ids,
        "--max-new-tokens",
        "3",
        "--stop",
        "x",
    ];
    place.run(&args).fails(2).says("--stop");
}

#[test]
fn conversations_that_are_none() {
    let place = Place::new();
    let model = wren();
    for (name, content) in [
        ("words.json", "Hi"),
        ("object.json", "{}"),
        ("role.json", "[{\"content\": \"Hi\"}]"),
        ("binary.json", "\u{0}\u{1}"),
    ] {
        let messages = place.file(name, content);
        let args = ["render", &model, "--messages", &messages];
        place.run(&args).fails(2).says(name).hints("role");
    }
    let binary = place.file("binary.txt", [0xff, 0xfe, 0x00]);
    place
        .run(&["tokenize", &model, "--file", &binary])
        .fails(2)
        .says("binary.txt");
    place.run(&["tokenize", &model]).fails(2);
}

#[test]
fn names_that_no_hub_has() {
    let place = Place::new();
    for name in [
        "no-such-model",
        "a/b/c",
        "../../etc",
        "org/name:weights.bin",
        "",
    ] {
        let ran = place.run(&["pull", name]).fails(2);
        assert!(
            ran.err.contains(name) && ran.err.contains("hint: "),
            "{ran:?}"
        );
    }
    assert_eq!(place.names(), [""; 0]);
}
