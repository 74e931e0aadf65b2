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

/// The logits of a file that `carat logits` wrote.
fn logits_of(place: &Place, file: &str) -> Vec<f32> {
    let bytes = fs::read(place.path(file)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let data = tensors.tensor("logits").unwrap().data().to_vec();
    data.chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

/// FP4 with both kinds of scale, palettes, ternary under one scale of the tensor: the
/// engine runs each from its own bits, and agrees with the oracle.
#[test]
fn grids_run_natively_and_the_oracle_reads_sections() {
    // The engine keeps keys and values in fp16, each off by 2^-11 of itself at most, so
    // uniformly by 2^-11 / √3; what attention adds to the one layer is off by as much,
    // and none of some thousand logits by more than five deviations. The order of
    // additions is far below that.
    const BOUND: f32 = 5.0 / 2048.0 / 1.732;
    let place = Place::new();
    let model = text(wren_dense());
    place.file("ids.json", "[1, 2, 3, 700, 41]");
    let ternary = place.run(&["recipe", "show", "ternary"]).ok().out;
    let blocks = "{type: per_block, axis: 1, block_size: 256}";
    assert!(ternary.contains(blocks), "{ternary}");
    let ternary = ternary.replace(blocks, "{type: per_tensor}");
    place.file("ternary.yaml", &ternary);
    let logits = |bundle: &str, engine: &str, act: &str, out: &str| {
        let words = ["logits", bundle, "--ids", "ids.json", "--out", out];
        let engine = match engine {
            "oracle" => &["--engine", engine][..],
            _ => &["--engine", engine, "--act", act, "--kv", "f16"],
        };
        place.run(&[&words[..], engine].concat())
    };
    for (recipe, grid) in [
        ("mxfp4", "fp4.block32.e8m0"),
        ("nvfp4", "fp4.block16.e4m3"),
        ("4bit_weight_palettized_group8", "lut4.rows8.f16"),
        ("ternary.yaml", "trit.tensor.f16"),
    ] {
        let convert = |target: &str| {
            let words = ["convert", &model, target, "--recipe", recipe];
            let more = ["--num-layers", "1", "--target", target, "--force"];
            place.run(&[&words[..], &more].concat()).ok();
        };
        convert("native");
        place.run(&["verify", "native"]).ok();
        assert!(place.run(&["inspect", "native"]).ok().out.contains(grid));
        logits("native", "auto", "f32", "engine.safetensors").ok();
        logits("native", "auto", "int8", "int8.safetensors").ok();
        logits("native", "oracle", "f32", "oracle.safetensors").ok();
        let expected = logits_of(&place, "oracle.safetensors");
        let mean = expected.iter().sum::<f32>() / expected.len() as f32;
        let square = expected.iter().map(|l| (l - mean).powi(2)).sum::<f32>();
        let deviation = (square / expected.len() as f32).sqrt();
        let off = |file: &str| {
            let found = logits_of(&place, file);
            let pairs = found.iter().zip(&expected);
            pairs.fold(0f32, |off, (a, b)| off.max((a - b).abs())) / deviation
        };
        let (exact, rounded) = (off("engine.safetensors"), off("int8.safetensors"));
        assert!(exact < BOUND, "{recipe}: {exact} of {BOUND}");
        // Rounded activations must show, but where palettes take none.
        let floats = grid.starts_with("lut");
        assert_eq!(rounded == exact, floats, "{recipe}: {rounded}, {exact}");
        convert("portable");
        logits("portable", "auto", "f32", "l.safetensors")
            .fails(2)
            .hints("--engine oracle reads it");
        logits("portable", "oracle", "f32", "l.safetensors").ok();
        assert_eq!(logits_of(&place, "l.safetensors"), expected, "{recipe}");
    }
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

#[test]
fn a_calibrated_recipe_reads_its_text_or_says_what_is_missing() {
    let place = Place::new();
    let model = text(wren_dense());
    let recipe = |name: &str, calibration: &str| {
        let preset = place.run(&["recipe", "show", "4bit"]).ok().out;
        let (_, config) = preset.split_once("quantization_config").unwrap();
        let section = format!("carat:\n  calibration: {calibration}\nquantization_config");
        place.file(name, section + config)
    };
    let whole = recipe(
        "gptq.yaml",
        "{text: t.txt, tokens: 64, sequence: 32, rounding: gptq}",
    );
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
        ];
        place.run(&[&words[..], more].concat())
    };
    convert(&whole, &[]).fails(2).says("t.txt");
    place.file("t.txt", "too short");
    convert(&whole, &[])
        .fails(2)
        .says("expected at least 64 tokens")
        .says("found");
    place.file("t.txt", [0xff; 9]);
    convert(&whole, &[]).fails(2).says("no UTF-8");
    assert!(!place.path("b").exists());
    place.file("t.txt", "The capital of France is Paris. ".repeat(20));
    let told = convert(&whole, &[]).ok().out;
    assert!(told.contains("calibrated on 64 tokens of t.txt"), "{told}");
    let calibrated = fs::read(place.path("b/weights.bin")).unwrap();
    place.run(&["verify", "b"]).ok();
    convert("4bit", &[]).ok();
    assert!(fs::read(place.path("b/weights.bin")).unwrap() != calibrated);

    let importance = recipe("none.yaml", "{tokens: 64}");
    let with = ["--calibration", "t.txt"];
    convert(&importance, &with)
        .fails(2)
        .says("would change nothing");
    let nameless = recipe("nameless.yaml", "{tokens: 64, scales: awq}");
    convert(&nameless, &[]).fails(2).hints("--calibration FILE");
    convert(&nameless, &with).ok();
    convert("4bit", &with).fails(2).says("is not calibrated");
    convert("keep", &with).fails(2).says("changes no weight");
}

#[test]
fn a_file_that_is_on_the_grid_asked_for_keeps_it() {
    let place = Place::new();
    let model = text(wren_dense());
    // Q4_0 blocks whose scales are not those that the recipe's formula finds.
    place
        .run(&["convert", &model, "b", "--recipe", "4bit"])
        .ok();
    place.run(&["export", "b", "q4.gguf", "--to", "gguf"]).ok();
    let convert = |more: &str| {
        place.file(
            "r.yaml",
            format!("carat: {{{more}}}\n{}", preset("int4lin_sym")),
        );
        let words = ["convert", "q4.gguf", "c", "--recipe", "r.yaml", "--force"];
        let told = place.object(&words, "carat.convert");
        (told, fs::read(place.path("c/weights.bin")).unwrap())
    };
    let (told, weights) = convert("");
    let kept = told["kept_grids"].as_array().unwrap().len();
    // Eight layers of seven projections, the table and the head.
    assert_eq!(kept, 58);
    assert!(weights == fs::read(place.path("b/weights.bin")).unwrap());
    let (told, weights) = convert("keep_grids: false");
    assert_eq!(told["kept_grids"].as_array().unwrap().len(), 0);
    assert!(weights != fs::read(place.path("b/weights.bin")).unwrap());
}

/// A preset without its section `carat`.
fn preset(name: &str) -> String {
    let text = carat_quant::Recipe::preset(name).unwrap().text().to_owned();
    let at = text.find("quantization_config:").unwrap();
    text[at..].to_owned()
}
