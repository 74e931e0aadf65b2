//! `carat recipe`, and `carat convert --recipe`.

mod common;

use std::fs;

use common::*;
use serde_json::Value;

#[test]
fn recipes_are_listed_shown_checked_and_resolved() {
    let place = Place::new();
    let list = place.run(&["recipe", "show"]).ok().out;
    assert!(list.contains("int8hu") && list.contains("4bit_weight_palettized_group32"));
    let preset = place.run(&["recipe", "show", "4bit"]).ok().out;
    assert!(
        preset.contains("qscheme: symmetric_with_clipping"),
        "{preset}"
    );
    place.file("mine.yaml", &preset);
    let checked = place.run(&["recipe", "check", "mine.yaml"]).ok().out;
    assert_eq!(checked, "mine.yaml: ok\n");
    let schema = place.run(&["recipe", "schema"]).ok().out;
    let schema: Value = serde_json::from_str(&schema).unwrap();
    assert!(schema["properties"]["quantization_config"].is_object());
    let model = text(wren_dense());
    let plan = place.object(
        &["recipe", "show", "int8lin", "--model", &model],
        "carat.recipe-plan",
    );
    assert_eq!(plan["tensors"][0]["grid"], "int8.block32.f16");
    assert_eq!(plan["theory"]["codes"], plan["theory"]["quantized_weights"]);
}

#[test]
fn a_recipe_is_printed_stored_and_runs() {
    let place = Place::new();
    let model = text(wren_dense());
    let convert = [
        "convert",
        &model,
        "b",
        "--recipe",
        "int8lin",
        "--num-layers",
        "1",
    ];
    let told = place.run(&convert).ok().out;
    assert!(
        told.contains("tensors  int8.block32.f16 symmetric (global_config)"),
        "{told}"
    );
    assert!(told.contains("not to be published"), "{told}");
    let stored = fs::read_to_string(place.path("b/recipe.yaml")).unwrap();
    assert_eq!(stored, place.run(&["recipe", "show", "int8lin"]).ok().out);
    place.run(&["verify", "b"]).ok();
    place.file("ids.json", "[1, 2, 3]");
    place
        .run(&[
            "generate",
            "b",
            "--ids",
            "ids.json",
            "--max-new-tokens",
            "2",
        ])
        .ok();
}

#[test]
fn what_no_kernel_reads_is_refused_and_the_oracle_reads_it() {
    let place = Place::new();
    let model = text(wren_dense());
    let convert = |target: &str| {
        place.run(&[
            "convert",
            &model,
            "b",
            "--recipe",
            "mxfp4",
            "--num-layers",
            "1",
            "--target",
            target,
        ])
    };
    convert("native")
        .fails(2)
        .says("no kernel of the CPU engine reads fp4.block32.e8m0")
        .hints("--target portable");
    assert!(!place.path("b").exists());
    convert("portable").ok();
    place.file("ids.json", "[1, 2, 3]");
    let logits = |engine: &str| {
        let out = ["--out", "l.safetensors", "--engine", engine];
        place.run(&[&["logits", "b", "--ids", "ids.json"][..], &out].concat())
    };
    logits("auto").fails(2).hints("--engine oracle reads it");
    logits("oracle").ok();
}

#[test]
fn mistakes_in_a_recipe_have_a_line() {
    let place = Place::new();
    let model = text(wren_dense());
    place.file(
        "r.yaml",
        "quantization_config:\n  global_config: null\n  global_confg: null\n",
    );
    let check = place.run(&["recipe", "check", "r.yaml"]).fails(2);
    check.says("line 3").hints("carat recipe schema");
    let convert = place.run(&["convert", &model, "b", "--recipe", "r.yaml"]);
    convert.fails(2).says("global_confg");
    assert!(!place.path("b").exists());
}
