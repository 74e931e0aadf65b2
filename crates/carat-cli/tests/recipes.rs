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

#[test]
fn an_importance_matrix_changes_what_it_weighs_or_is_refused() {
    use carat_import::gguf::Writer;
    use carat_tensor::{DType, Shape};
    let place = Place::new();
    let model = text(wren_dense());
    let mut writer = Writer::new();
    writer.set("general.type", "imatrix");
    let name = "blk.0.ffn_down.weight";
    writer.tensor(&format!("{name}.in_sum2"), DType::F32, Shape::from([768]));
    writer.tensor(&format!("{name}.counts"), DType::F32, Shape::from([1]));
    let mut file = fs::File::create(place.path("i.gguf")).unwrap();
    let read = |tensor: &str| {
        let count = if tensor.ends_with("counts") { 1 } else { 768 };
        let values = (0..count).flat_map(|i| ((1 + i % 5 * 100) as f32).to_le_bytes());
        Ok(values.collect::<Vec<u8>>().into())
    };
    writer.write(&mut file, read).unwrap();
    let convert = |recipe: &str, more: &[&str]| {
        let words = [
            "convert",
            &model,
            "b",
            "--recipe",
            recipe,
            "--num-layers",
            "1",
            "--force",
            "--target",
            "portable",
        ];
        place.run(&[&words[..], more].concat())
    };
    let tables = || fs::read(place.path("b/weights.bin")).unwrap();
    convert("4bit_weight_palettized_group32", &[]).ok();
    let plain = tables();
    let with = ["--imatrix", "i.gguf"];
    convert("4bit_weight_palettized_group32", &with).ok();
    assert!(plain != tables());
    convert("4bit", &with).fails(2).says("compares no errors");
    convert("keep", &with).fails(2).says("changes no weight");
}
