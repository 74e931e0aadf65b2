//! Models that were changed or damaged: found where they are looked at, refused
//! where they are run, alike by every command.

mod common;

use std::path::Path;

use common::{Place, random, text, wren, wren_dense};
use serde_json::{Value, json};

fn manifest(bundle: &str) -> Value {
    let bytes = std::fs::read(Path::new(bundle).join("manifest.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

#[test]
fn an_edited_manifest_is_named_field_by_field() {
    let place = Place::new();
    let bundle = place.bundle();
    let path = format!("{bundle}/manifest.json");
    let valid = std::fs::read(&path).unwrap();
    for (pointer, value, says) in [
        (
            "/spec/layers/0/mixer/scale",
            json!(0.13),
            "spec.layers.0.mixer.scale: bundle 0.13, source 0.",
        ),
        ("/text/eos", json!(null), "text.eos: bundle null, source {"),
        (
            "/source/declared",
            json!(null),
            "source.declared is missing",
        ),
    ] {
        let mut edited: Value = serde_json::from_slice(&valid).unwrap();
        let field = edited.pointer_mut(pointer).unwrap();
        assert_ne!(*field, value, "{pointer}");
        *field = value;
        std::fs::write(&path, edited.to_string()).unwrap();
        let alone = place.run(&["verify", &bundle]).fails(1);
        assert!(alone.out.contains("was changed since"), "{alone:?}");
        let told = place.run(&["verify", &bundle, "--against", &wren()]);
        let told = told.fails(1);
        assert!(told.out.contains(says), "{pointer}: {told:?}");
    }
    std::fs::write(&path, &valid).unwrap();
    place.run(&["verify", &bundle, "--against", &wren()]).ok();
}

#[test]
fn absurd_settings_of_a_checkpoint_are_refused() {
    for (key, value, says) in [
        (
            "rms_norm_eps",
            json!(0),
            "eps: 0 is outside 0.000000000000001..=1",
        ),
        ("rms_norm_eps", json!(9.3e18), "eps"),
        ("rope_theta", json!(-1), "theta: -1 is outside 1..="),
        ("rope_theta", json!(0), "theta"),
    ] {
        let place = Place::new();
        let model = place.edited(&random(), "config.json", |config| {
            if let Some(rope) = config.get_mut("rope_parameters").filter(|r| r.is_object())
                && key == "rope_theta"
            {
                rope[key] = value.clone();
            } else {
                config[key] = value.clone();
            }
        });
        place.run(&["inspect", &model]).fails(2).says(says);
    }
    for (key, value) in [
        ("top_p", json!(1.5)),
        ("min_p", json!(1.5)),
        ("temperature", json!(-1)),
        ("repetition_penalty", json!(0)),
    ] {
        let place = Place::new();
        let model = place.copy(&wren_dense(), "sampling");
        let settings = json!({ key: value });
        std::fs::write(model.join("generation_config.json"), settings.to_string()).unwrap();
        place.run(&["inspect", &text(model)]).fails(2).says(key);
    }
}

/// Writes a NaN over the first weight of the head (row 0) of a bundle of floats.
fn spoil_head(bundle: &str) {
    let manifest = manifest(bundle);
    let tensors = manifest["tensors"].as_array().unwrap();
    let named = |name: &str| tensors.iter().find(|t| t["name"] == name);
    let head = named("head.weight").or(named("embed.weight")).unwrap();
    let nan: &[u8] = match head["dtype"].as_str().unwrap() {
        "F32" => &[0, 0, 0xc0, 0x7f],
        "BF16" => &[0xc0, 0x7f],
        "F16" => &[0, 0x7e],
        other => panic!("{other} is no float"),
    };
    let path = format!("{bundle}/weights.bin");
    let mut weights = std::fs::read(&path).unwrap();
    let at = head["offset"].as_u64().unwrap() as usize;
    weights[at..][..nan.len()].copy_from_slice(nan);
    std::fs::write(path, weights).unwrap();
}

#[test]
fn one_weight_that_is_no_number_is_wrong_input_everywhere() {
    let place = Place::new();
    let bundle = text(place.path("dense"));
    place.run(&["convert", &text(wren_dense()), &bundle]).ok();
    spoil_head(&bundle);
    let ids = place.json("ids.json", &json!([5, 6, 7]));
    let out = text(place.path("out"));
    let commands: [&[&str]; 3] = [
        &["generate", &bundle, "--ids", &ids, "--max-new-tokens", "2"],
        &["logits", &bundle, "--ids", &ids, "--out", &out],
        &[
            "score",
            &bundle,
            "--context-ids",
            &ids,
            "--continuation-ids",
            &ids,
        ],
    ];
    for command in commands {
        for engine in ["sequential", "oracle"] {
            let ran = place.run(&[command, &["--engine", engine]].concat());
            ran.fails(2).hints("carat verify");
        }
    }
    assert!(!place.path("out").exists());
    let told = place.run(&["verify", &bundle]).fails(1);
    assert!(told.out.contains("FAIL    tensors"), "{told:?}");
}

#[test]
fn what_does_not_fit_in_the_context_is_refused_by_all() {
    let place = Place::new();
    let model = text(random());
    let told = place.object(&["inspect", &model], "carat.inspect");
    let context = told["max_context"]
        .as_u64()
        .or(told["spec"]["max_context"].as_u64())
        .unwrap() as usize;
    let long = place.json("long.json", &json!(vec![3; context + 1]));
    let short = place.json("short.json", &json!([3]));
    let out = text(place.path("out"));
    let commands: [&[&str]; 3] = [
        &["generate", &model, "--ids", &long, "--max-new-tokens", "1"],
        &["logits", &model, "--ids", &long, "--out", &out],
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
        for engine in ["sequential", "oracle"] {
            let args = [command, &["--engine", engine, "--no-cache"]].concat();
            let ran = place
                .run(&args)
                .fails(2)
                .says(&format!("context of {context}"));
            ran.says(&(context + 1).to_string()[..3]).hints("--ctx");
        }
    }
    assert!(!place.path("out").exists());
}
