//! Checkpoints in the forms in which they are found: weights in other formats,
//! vocabularies that mistype their tokens, keys nobody knows, downloads, copies
//! that were trained on.

mod common;

use std::{
    borrow::Cow,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    path::Path,
    process::Command,
};

use carat_import::gguf::{Array, Gguf, Value as Meta, Writer};
use carat_tensor::{DType, formats};
use common::{Place, answer_of, random, record, root, text, wren, wren_dense};
use serde_json::{Value, json};

/// The ternary model written anew, with its metadata edited and, with `float`, its
/// TQ2_0 matrices stored in that format.
fn rewritten(to: &Path, float: Option<DType>, edit: impl Fn(&str, Meta) -> Meta) -> String {
    let gguf = Gguf::open(Path::new(&wren())).unwrap();
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata() {
        writer.set(key, edit(key, value.clone()));
    }
    let stored = |from: DType| match float {
        Some(float) if from == DType::TQ2_0 => float,
        _ => from,
    };
    for tensor in gguf.tensors() {
        writer.tensor(&tensor.name, stored(tensor.dtype), tensor.shape.clone());
    }
    let mut out = fs::File::create(to).unwrap();
    let read = |name: &str| {
        let tensor = gguf.tensor(name).unwrap();
        let bytes = gguf.tensor_bytes(name).unwrap();
        let dtype = stored(tensor.dtype);
        if dtype == tensor.dtype {
            return Ok(Cow::Borrowed(bytes));
        }
        let mut values = vec![0.0; tensor.shape.elements().unwrap()];
        formats::decode(tensor.dtype, bytes, &mut values).unwrap();
        let mut floats = vec![0; tensor.shape.bytes(dtype).unwrap()];
        formats::encode(dtype, &values, &mut floats).unwrap();
        Ok(Cow::Owned(floats))
    };
    writer.write(&mut out, read).unwrap();
    text(to)
}

fn same(_: &str, value: Meta) -> Meta {
    value
}

#[test]
fn ternary_weights_stored_as_floats_convert_and_answer() {
    let place = Place::new();
    let gguf = rewritten(&place.path("f16.gguf"), Some(DType::F16), same);
    let seen = place.object(&["inspect", &gguf], "carat.inspect");
    assert_eq!(seen["weights_kind"], "ternary");
    let bundle = text(place.path("f16.carat"));
    let made = place.object(&["convert", &gguf, &bundle], "carat.convert");
    assert_eq!(made["source"]["weights"], "ternary");
    let report = place.object(&["verify", &bundle], "carat.verify-report");
    assert_eq!(report["passed"], true, "{report}");
    let record = record("Hello!");
    let ids = place.json("ids.json", &record["prompt_ids"]);
    let expected = &record["ternary"]["ids"];
    let limit = expected.as_array().unwrap().len().to_string();
    let args = [
        "generate",
        &bundle,
        "--ids",
        &ids,
        "--max-new-tokens",
        &limit,
    ];
    assert_eq!(
        &place.object(&args, "carat.generate")["ids"],
        expected,
        "the same model in another format"
    );
}

/// Types `<|im_end|>` as `kind`.
fn mistyped(kind: i32) -> impl Fn(&str, Meta) -> Meta {
    move |key, value| match (key, value) {
        ("tokenizer.ggml.token_type", Meta::Array(Array::I32(mut kinds))) => {
            kinds[2053] = kind;
            Meta::Array(Array::I32(kinds))
        }
        (_, value) => value,
    }
}

#[test]
fn an_answer_ends_where_the_turn_end_is_typed_as_a_normal_token() {
    let place = Place::new();
    let record = record("Hello!");
    let prompt = record["messages"][0]["content"].as_str().unwrap();
    for kind in [1, 4] {
        let gguf = rewritten(&place.path("m.gguf"), None, mistyped(kind));
        let args = ["run", &gguf, prompt, "--no-think", "--max-new-tokens", "60"];
        let answer = place.object(&args, "carat.answer");
        assert_eq!(answer["stop_reason"], "eos", "{answer}");
        if record["thinking"] != true {
            assert_eq!(answer["content"], answer_of(&record).trim());
        }
    }
}

#[test]
fn thoughts_are_found_where_their_marks_are_special_tokens() {
    let place = Place::new();
    let special = place.edited(&wren_dense(), "tokenizer.json", |json| {
        for token in json["added_tokens"].as_array_mut().unwrap() {
            token["special"] = true.into();
        }
    });
    let plain = text(wren_dense());
    let question = "Ravi has 5 rows with 8 pancakes in each. Find the total number of pancakes.";
    let answers = [&plain, &special].map(|model| {
        let args = ["run", model, question, "--max-new-tokens", "200"];
        place.object(&args, "carat.answer")
    });
    assert!(answers[0]["thinking"].is_string(), "{}", answers[0]);
    for field in ["thinking", "content", "text", "ids", "thinking_truncated"] {
        assert_eq!(answers[0][field], answers[1][field], "{field}");
    }
    let cut = ["run", &special, question, "--max-new-tokens", "4"];
    let cut = place.object(&cut, "carat.answer");
    assert_eq!(cut["thinking_truncated"], true, "{cut}");
}

#[test]
fn a_vocabulary_that_cannot_be_converted_is_named_and_weights_still_serve() {
    let place = Place::new();
    let gguf = rewritten(&place.path("m.gguf"), None, |key, value| match key {
        "tokenizer.ggml.pre" => "mystery".into(),
        _ => value,
    });
    let bundle = text(place.path("m.carat"));
    place.run(&["convert", &gguf, &bundle]).ok();
    for model in [&gguf, &bundle] {
        for args in [
            vec!["tokenize", model, "--text", "Hi"],
            vec!["run", model, "Hi"],
        ] {
            let ran = place.run(&args).fails(2);
            let ran = ran.says("m.gguf: tokenizer.ggml.pre: unknown pre-tokenizer \"mystery\"");
            assert!(!ran.err.contains("tokenizer.json"), "{ran:?}");
        }
        let ids = place.json("ids.json", &json!([1, 2]));
        let args = ["generate", model, "--ids", &ids, "--max-new-tokens", "2"];
        place.run(&args).ok();
    }
}

#[test]
fn a_key_nobody_knows_can_be_ignored_by_name() {
    let place = Place::new();
    let model = place.edited(&wren_dense(), "config.json", |json| {
        json["mystery"] = 1.into();
    });
    let out = text(place.path("out"));
    let ids = place.json("ids.json", &json!([1, 2]));
    let messages = place.json("m.json", &json!([{"role": "user", "content": "Hi"}]));
    let generate = ["generate", &model, "--ids", &ids, "--max-new-tokens", "1"];
    for args in [
        &["convert", &model, &out][..],
        &["inspect", &model],
        &["tokenize", &model, "--text", "Hi"],
        &["render", &model, "--messages", &messages],
        &generate,
    ] {
        let refused = place.run(args).fails(2).says("unknown key \"mystery\"");
        refused.hints("--ignore-key KEY");
        let ignoring = [args, &["--ignore-key", "mystery"]].concat();
        place.run(&ignoring).ok();
    }
    // What one command was told to ignore is an error to the next one, cache or not.
    place.run(&generate).fails(2).says("mystery");
    let verify = ["verify", &out, "--against", &model];
    place.run(&verify).fails(2).hints("--ignore-key KEY");
    place
        .run(&[&verify[..], &["--ignore-key", "mystery"]].concat())
        .ok();
    let recipe = fs::read_to_string(Path::new(&out).join("recipe.toml")).unwrap();
    assert!(recipe.contains("--ignore-key"), "{recipe}");
}

#[test]
fn a_copy_that_was_trained_on_is_not_the_source() {
    let place = Place::new();
    let (bundle, model) = (text(place.path("b")), text(wren_dense()));
    place.run(&["convert", &model, &bundle]).ok();
    place.run(&["verify", &bundle, "--against", &model]).ok();
    let tuned = place.copy(&wren_dense(), "tuned");
    let weights = tuned.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let args = ["verify", &bundle, "--against", &text(&tuned)];
    let ran = place.run(&args).fails(1);
    let line = ran.out.lines().find(|l| l.contains(" source "));
    assert!(
        line.is_some_and(|l| l.starts_with("FAIL") && l.contains("expected digest")),
        "{ran:?}"
    );
}

#[test]
fn stops_are_tried_at_conversion_and_again_by_verify() {
    let place = Place::new();
    let bundle = text(place.path("b"));
    let made = place.object(&["convert", &wren(), &bundle], "carat.convert");
    let notes = made["source"]["notes"].as_array().unwrap();
    let found = |n: &Value| {
        n.as_str()
            .unwrap()
            .contains("the chat template never writes it")
    };
    assert!(notes.iter().any(found), "{notes:?}");
    let check = |report: &Value| {
        let checks = report["report"]["checks"].as_array().unwrap();
        let stops = checks.iter().find(|c| c["name"] == "stops");
        stops.unwrap()["status"].clone()
    };
    let report = place.object(&["verify", &bundle], "carat.verify-report");
    assert_eq!(
        (check(&report), &report["passed"]),
        ("info".into(), &true.into())
    );
    // The same without a note of it is a difference that nobody declared.
    let manifest = Path::new(&bundle).join("manifest.json");
    let json = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, json.replace("never writes it", "writes it")).unwrap();
    let ran = place.run(&["verify", &bundle, "--json"]).fails(1);
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(check(&report), "DIFF");
}

#[test]
fn tensors_that_are_left_out_are_in_the_manifest() {
    let place = Place::new();
    let model = place.copy(&random(), "model");
    let file = model.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    let extra = [0u8; 8];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2], &extra);
    let all = tensors
        .tensors()
        .into_iter()
        .chain([(name.to_owned(), view.unwrap())]);
    fs::write(&file, safetensors::serialize(all, None).unwrap()).unwrap();
    let bundle = text(place.path("b"));
    let made = place.object(&["convert", &text(&model), &bundle], "carat.convert");
    let expected = json!([{"name": name, "reason": "rotary frequencies, which are computed"}]);
    assert_eq!(made["skipped"], expected);
    let ran = place.run(&["verify", &bundle]).ok();
    assert!(ran.out.contains(name), "{ran:?}");
}

#[test]
fn what_was_pulled_keeps_its_name_and_revision() {
    let place = Place::new();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let repository = place.path("models/hub/org/tiny-1");
    fs::create_dir_all(repository.join(commit)).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), commit).unwrap();
    let checkpoint = place.copy(
        &random(),
        &format!("models/hub/org/tiny-1/{commit}/checkpoint"),
    );
    let config = checkpoint.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("_name_or_path");
    fs::write(&config, json.to_string()).unwrap();
    let made = place.object(
        &["convert", "org/tiny-1", &text(place.path("b"))],
        "carat.convert",
    );
    assert_eq!(made["source"]["revision"], commit);
    assert_eq!(made["source"]["name"], "tiny-1");
    let seen = place.object(&["inspect", "org/tiny-1"], "carat.inspect");
    assert_eq!(seen["name"], "tiny-1");
}

#[test]
fn pull_sends_the_token_that_the_environment_names() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let hub = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let head: Vec<String> = BufReader::new(stream.try_clone().unwrap())
            .lines()
            .map(Result::unwrap)
            .take_while(|line| !line.is_empty())
            .collect();
        let answer = "HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        stream.write_all(answer.as_bytes()).unwrap();
        head
    });
    let place = Place::new();
    let ran = Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(["pull", "org/gated"])
        .env("CARAT_MODELS", place.path("models"))
        .env("HF_ENDPOINT", &endpoint)
        .env("HF_TOKEN", "hf_secret")
        .current_dir(root())
        .output()
        .unwrap();
    let head = hub.join().unwrap();
    assert!(
        head.iter()
            .any(|l| l.eq_ignore_ascii_case("authorization: Bearer hf_secret")),
        "{head:?}"
    );
    assert_eq!(ran.status.code(), Some(2));
    let err = String::from_utf8(ran.stderr).unwrap();
    assert!(
        err.contains("licence") && !err.contains("hf_secret"),
        "{err}"
    );
}

#[test]
fn a_broken_tokenizer_is_found_at_conversion() {
    let place = Place::new();
    let model = place.copy(&wren_dense(), "model");
    let path = model.join("tokenizer.json");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let out = place.path("out");
    place
        .run(&["convert", &text(&model), &text(&out)])
        .fails(2)
        .says("tokenizer.json");
    assert!(!out.exists());
}
