//! Recipes: against the reference's own resolution, their plans, and what is
//! refused.

use std::{collections::BTreeMap, path::Path};

use carat_bundle::spec::ModelSpec;
use carat_quant::{
    Plan, QuantError, Recipe, Treatment,
    matrix::Method,
    recipe::{PRESETS, alias},
};
use carat_tensor::grid::{Code, Spread};

fn spec(tied: bool, vocab: usize) -> ModelSpec {
    let norm = serde_json::json!({ "eps": 1e-5, "weight_offset": 0.0 });
    let layer = serde_json::json!({
        "mixer_norm": norm, "post_mixer_norm": null, "ffn_norm": norm, "post_ffn_norm": null,
        "residual_scale": 1.0,
        "mixer": { "kind": "attention", "heads": 4, "kv_heads": 4, "head_dim": 64,
            "qkv_bias": true, "out_bias": false, "qk_norm": null, "rope": null,
            "window": null, "scale": 0.125, "logit_softcap": null },
        "ffn": { "kind": "gated", "intermediate_size": 256, "activation": "silu", "bias": false },
    });
    serde_json::from_value(serde_json::json!({
        "hidden_size": 256, "vocab_size": vocab, "max_context": 64,
        "embedding": { "scale": 1.0 }, "layers": [layer, layer, layer],
        "final_norm": norm, "head": { "tied": tied, "scale": 1.0, "softcap": null }, "ropes": [],
    }))
    .unwrap()
}

fn recipe(text: &str) -> Result<Recipe, QuantError> {
    Recipe::parse("test", text)
}

fn refused(text: &str) -> String {
    match recipe(text) {
        Ok(_) => panic!("accepted: {text}"),
        Err(e) => e.to_string(),
    }
}

fn plan(text: &str, spec: &ModelSpec) -> Plan {
    recipe(text).unwrap().resolve(spec).unwrap()
}

fn treatment(plan: &Plan, name: &str) -> String {
    let found = plan.tensors.iter().find(|t| t.decl.name == name);
    found.expect(name).treatment.to_string()
}

/// A treatment in the words of `scripts/make_recipe_golden.py`.
fn in_words(treatment: &Treatment) -> Option<String> {
    let Treatment::Quantize(method) = treatment else {
        return None;
    };
    let spread = |spread| match spread {
        Spread::Tensor => "per_tensor".to_owned(),
        Spread::Channel => "per_channel".to_owned(),
        Spread::Block(n) => format!("per_block {n}"),
        Spread::Rows(n) => format!("per_grouped_channel {n}"),
    };
    Some(match *method {
        Method::Palette {
            bits, spread: s, ..
        } => format!("{bits} {}", spread(s)),
        Method::Linear { linear, spread: s } => {
            let code = match linear.code {
                Code::Int(bits) => format!("int{bits}"),
                Code::Fp8E4M3 => "float8_e4m3fn".into(),
                Code::Fp4 => "float4_e2m1fn_x2".into(),
                other => panic!("{other:?}"),
            };
            format!("{code} {} {}", linear.scheme.name(), spread(s))
        }
    })
}

#[test]
fn recipes_resolve_as_the_reference_resolves_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recipes");
    let json = std::fs::read_to_string(folder.join("expected.json")).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, Option<String>>> =
        serde_json::from_str(&json).unwrap();
    assert_eq!(expected.len(), 6);
    for (name, expected) in expected {
        let text = std::fs::read_to_string(folder.join(format!("{name}.yaml"))).unwrap();
        let plan = plan(&text, &spec(false, 256));
        let mut compared = 0;
        for t in &plan.tensors {
            let names = alias::names(&t.decl.name);
            let Some(expected) = names.iter().find_map(|n| expected.get(n)) else {
                continue;
            };
            // Unsigned codes are ours, moved.
            let expected = expected.as_ref().map(|e| e.replace("uint", "int"));
            assert_eq!(in_words(&t.treatment), expected, "{name}: {}", t.decl.name);
            compared += 1;
        }
        assert_eq!(compared, 23, "{name}");
    }
}

#[test]
fn presets_resolve_and_say_what_they_do() {
    let spec = spec(true, 256);
    let mut seen = Vec::new();
    for (name, _) in PRESETS {
        let recipe = Recipe::preset(name).expect(name);
        assert!(recipe.description().is_some(), "{name}");
        let plan = recipe.resolve(&spec).unwrap();
        seen.push(format!(
            "{name}: {}, embed {}{}",
            treatment(&plan, "layers.1.ffn.down.weight"),
            treatment(&plan, "embed.weight"),
            if plan.untied_head { ", own head" } else { "" }
        ));
    }
    let expected = "\
none: F16, embed F16
int8lin: int8.block32.f16 symmetric, embed int8.block32.f16 symmetric
int8hu: int8.block32.f16 symmetric, embed int8.block32.f16 symmetric, own head
int8_channel: int8.channel.f16 symmetric, embed int8.channel.f16 symmetric
4bit: int4.block32.f16 symmetric_with_clipping, embed int4.block32.f16 symmetric_with_clipping
int4lin_sym: int4.block32.f16 q4_0, embed int4.block32.f16 q4_0
mxfp4: fp4.block32.e8m0 symmetric, embed fp4.block32.e8m0 symmetric
nvfp4: fp4.block16.e4m3 symmetric, embed fp4.block16.e4m3 symmetric
ternary: trit.block256.f16 absmean, embed as stored
4bit_weight_palettized_group8: lut4.rows8.f16 k-means, embed lut4.rows8.f16 k-means
4bit_weight_palettized_group32: lut4.rows32.f16 k-means, embed lut4.rows32.f16 k-means
pal6_g8: lut6.rows8.f16 k-means, embed lut6.rows8.f16 k-means
pal8_g32: lut8.rows32.f16 k-means, embed lut8.rows32.f16 k-means
mixed48_g8: lut8.tensor.f16 k-means, embed lut4.rows8.f16 k-means
mixed48_g32: lut8.tensor.f16 k-means, embed lut4.rows32.f16 k-means";
    assert_eq!(seen.join("\n"), expected);
}

const INT8: &str = "{op_state_spec: {weight: {granularity: {type: per_channel, axis: 0}}}, \
                    op_input_spec: null, op_output_spec: null}";

#[test]
fn a_recipe_that_names_a_tied_head_never_skips_it() {
    let text = format!(
        "quantization_config: {{global_config: null, module_name_configs: {{lm_head: {INT8}}}}}"
    );
    let tied = plan(&text, &spec(true, 250));
    assert!(tied.untied_head);
    assert_eq!(
        treatment(&tied, "head.weight"),
        "int8.channel.f16 symmetric"
    );
    assert_eq!(treatment(&tied, "embed.weight"), "as stored");
    // The same for table and head needs no copy.
    let text = format!("quantization_config: {{global_config: {INT8}}}");
    let whole = plan(&text, &spec(true, 250));
    assert!(!whole.untied_head && whole.tensors.iter().all(|t| t.decl.name != "head.weight"));
    // A head of its own is only a head.
    assert!(!plan(&text, &spec(false, 250)).untied_head);
}

#[test]
fn what_does_not_fit_is_an_error_unless_declared() {
    let pal = "kmeans_palettization_config: {global_config: {op_state_spec: {weight: \
               {granularity: {type: per_grouped_channel, group_size: 32}}}}}";
    let error = recipe(pal)
        .unwrap()
        .resolve(&spec(false, 250))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("\"embed.weight\": 250 rows are not a whole number of groups of 32"),
        "{error}"
    );
    assert!(error.contains("carat.skip"), "{error}");
    let declared = format!("carat: {{skip: [embed_tokens, lm_head]}}\n{pal}");
    let plan = plan(&declared, &spec(false, 250));
    let names: Vec<&str> = plan.skipped.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names, ["embed.weight", "head.weight"]);
    assert_eq!(treatment(&plan, "embed.weight"), "as stored");
}

#[test]
fn activations_are_off_or_the_recipe_is_refused() {
    let message = refused("quantization_config:\n  global_config:\n    op_output_spec: null\n");
    assert!(
        message.contains(
            "global_config.op_input_spec: is left out, which would turn activations to int8"
        ),
        "{message}"
    );
    let message = refused(
        "quantization_config:\n  global_config: {op_input_spec: null, op_output_spec: {0: {dtype: int8}}}\n",
    );
    assert!(
        message.contains("op_output_spec: activations cannot be quantized"),
        "{message}"
    );
    let message = refused(
        "quantization_config: {global_config: {op_input_spec: null, op_output_spec: null, \
         op_type_config: {linear: {op_input_spec: null}}}}",
    );
    assert!(
        message.contains("op_type_config.linear.op_output_spec: is left out"),
        "{message}"
    );
    let message = refused(
        "kmeans_palettization_config: {global_config: {op_input_spec: {\"*\": {n_bits: 4}}}}",
    );
    assert!(message.contains("palettes are of weights"), "{message}");
    // Off in so many words, and a rule that is off itself.
    recipe(
        "quantization_config: {global_config: {op_input_spec: {\"*\": null}, op_output_spec: {}}, \
         module_name_configs: {a: null}}",
    )
    .unwrap();
}

#[test]
fn mistakes_have_a_place() {
    let message = refused(
        "quantization_config:\n  global_config:\n    op_state_spec:\n      weight:\n        dtyp: int8\n",
    );
    assert!(
        message.contains("dtyp") && message.contains("line 5") && message.contains("column 9"),
        "{message}"
    );
    for (text, part) in [
        ("{}", "found neither"),
        (
            "quantization_config: {global_config: null}\nkmeans_palettization_config: {global_config: null}",
            "found both",
        ),
        (
            "quantization_config: {global_config: null, module_name_configs: {'(': null}}",
            "is no pattern",
        ),
        (
            "quantization_config: {global_config: null, module_type_configs: {torch.nn.Conv1d: {op_input_spec: null, op_output_spec: null}}}",
            "Linear and Embedding",
        ),
        (
            "kmeans_palettization_config: {global_config: {op_state_spec: {weight: {n_bits: 5}}}}",
            "n_bits: expected 1, 2, 3, 4, 6 or 8, found 5",
        ),
        (
            "kmeans_palettization_config: {global_config: {op_state_spec: {weight: {n_bits: 4}}, rounding_precision: 9}}",
            "at most 7",
        ),
        (
            "kmeans_palettization_config: {global_config: {op_state_spec: {weight: {n_bits: 4}}, dtype: 9}}",
            "dtype",
        ),
        (
            "quantization_config: {calibrate_activations: true, global_config: null}",
            "calibrate_activations",
        ),
        (
            "quantization_config: {global_config: null, global_config: null}",
            "duplicate",
        ),
        ("quantization_config: [1]", "line 1"),
    ] {
        let message = refused(text);
        assert!(message.contains(part), "{text}: {message}");
    }
    for (spec, part) in [
        ("dtype: int3", "int3"),
        (
            "dtype: int8, qscheme: absmean",
            "qscheme: expected symmetric",
        ),
        ("dtype: ternary", "absmean"),
        (
            "dtype: int4, qscheme: q4_0, granularity: {type: per_channel}",
            "q4_0 is for int4 in blocks of 32",
        ),
        (
            "dtype: float8_e4m3fn, qscheme: asymmetric",
            "symmetric for floats",
        ),
        ("dtype: int8, scale_dtype: float8_e8m0fnu", "scale_dtype"),
        (
            "dtype: float4_e2m1fn, scale_dtype: float32, granularity: {type: per_channel, axis: 1}",
            "granularity.axis",
        ),
        (
            "granularity: {type: per_block, axis: 1, block_size: 0}",
            "block_size",
        ),
        (
            "granularity: {type: per_block, axis: 0, block_size: 32}",
            "granularity.axis",
        ),
        (
            "granularity: {type: per_block, block_size: [32, 1]}",
            "1 for all dimensions but the last",
        ),
        ("float_range: [-1.0, 1.0]", "float_range"),
        ("qformulation: minval", "qformulation"),
        ("range_calculator_cls: mse", "minmax where the whole tensor"),
        ("qparam_calculator_cls: dynamic", "qparam_calculator_cls"),
    ] {
        let message = refused(&format!(
            "quantization_config: {{global_config: {{op_state_spec: {{weight: {{{spec}}}}}, op_input_spec: null, op_output_spec: null}}}}"
        ));
        assert!(message.contains(part), "{spec}: {message}");
    }
}

#[test]
fn rules_that_match_nothing_are_listed() {
    let plan = plan(
        "quantization_config: {global_config: null, module_name_configs: {lm_hed: null, lm_head: null}}",
        &spec(false, 250),
    );
    assert_eq!(plan.unmatched, ["module_name_configs: lm_hed"]);
}

#[test]
fn hostile_files_are_refused() {
    let laughs = (1..30).fold("a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned(), |text, i| {
        let last = i - 1;
        let refs = vec![format!("*a{last}"); 9].join(",");
        format!("{text}a{i}: &a{i} [{refs}]\n")
    });
    for text in [
        laughs,
        "quantization_config: ".to_owned() + &"{".repeat(100_000),
        "#".repeat(2 << 20),
        "\u{0}".into(),
    ] {
        assert!(recipe(&text).is_err());
    }
}

#[test]
fn the_committed_schema_is_that_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../schemas/recipe.schema.json");
    let schema = Recipe::json_schema();
    let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
    if std::env::var_os("CARAT_UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    assert!(
        committed == text,
        "recipe.schema.json is stale: run with CARAT_UPDATE=1"
    );
    let validator = jsonschema::validator_for(&schema).unwrap();
    let json = |yaml: &str| serde_saphyr::from_str::<serde_json::Value>(yaml).unwrap();
    for (name, text) in PRESETS {
        let errors: Vec<_> = validator
            .iter_errors(&json(text))
            .map(|e| e.to_string())
            .collect();
        assert!(errors.is_empty(), "{name}: {errors:?}");
    }
    for wrong in [
        "{}",
        "quantization_config: {global_confg: null}",
        "quantization_config: {global_config: {op_state_spec: {weight: {dtype: int3}}}}",
    ] {
        assert!(!validator.is_valid(&json(wrong)), "{wrong}");
    }
}

/// Ternary rows need not be whole blocks of 256 where the scale is a row's or the
/// tensor's; a block of 256 that a row does not fill is refused by name.
#[test]
fn ternary_rows_of_any_length_have_a_scale_of_their_own_or_are_refused() {
    let mut odd = spec(false, 250);
    odd.hidden_size = 272;
    let text = |granularity: &str| {
        format!(
            "quantization_config: {{module_name_configs: {{'layers\\..*': {{op_state_spec: \
             {{weight: {{dtype: ternary, qscheme: absmean, scale_dtype: float32, \
             granularity: {granularity}}}}}, op_input_spec: null, op_output_spec: null}}}}}}"
        )
    };
    for (granularity, expected) in [
        ("{type: per_tensor}", "trit.tensor.f32 absmean"),
        ("{type: per_channel, axis: 0}", "trit.channel.f32 absmean"),
    ] {
        let plan = plan(&text(granularity), &odd);
        let name = "layers.0.ffn.up.weight";
        let up = plan.tensors.iter().find(|t| t.decl.name == name).unwrap();
        assert_eq!(up.decl.shape.columns(), 272);
        assert_eq!(treatment(&plan, name), expected);
    }
    let blocks = text("{type: per_block, axis: 1, block_size: 256}");
    let error = recipe(&blocks).unwrap().resolve(&odd).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("\"layers.0.") && error.contains("272 columns are not a whole number"),
        "{error}"
    );
}

fn corpus(target: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target)
}

/// Seeds of the fuzz targets. Run with `CARAT_UPDATE=1` to write them anew.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    if target == "recipe" {
        let calibrated = "carat:\n  calibration: {rounding: gptq, scales: awq, sweeps: 3}\n\
             kmeans_palettization_config:\n  global_config:\n    op_state_spec:\n      weight: \
             {n_bits: 3, granularity: {type: per_grouped_channel, axis: 0, group_size: 8}}\n";
        let anchors = "quantization_config:\n  global_config: &a\n    op_state_spec:\n      weight: \
             {dtype: int4, qscheme: q4_0, granularity: {type: per_block, axis: 1, block_size: 32}}\n    \
             op_input_spec: null\n    op_output_spec: null\n  module_name_configs:\n    \
             'layers\\.(0|1)\\..*': *a\n    lm_head: null\n";
        let own = [
            ("calibrated", calibrated),
            ("anchors", anchors),
            ("deep", &"[".repeat(4096)),
        ]
        .map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec()));
        let presets = PRESETS.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec()));
        return own.into_iter().chain(presets).collect();
    }
    let grids = [
        ("int4.block32.f16", 3, 64),
        ("int8.channel.f32.zp", 5, 21),
        ("int2.tensor.f16", 4, 10),
        ("trit.block16.f16", 2, 32),
        ("fp4.block16.e4m3", 2, 32),
        ("fp4.block32.e8m0", 1, 32),
        ("fp8e5m2.channel.f16", 2, 7),
        ("lut3.rows2.f16", 4, 21),
        ("lut6.tensor.f16.scaled", 3, 5),
        ("int4.block32.f16", usize::MAX, 32),
        ("lut8.rows65535.f16", 0, usize::MAX),
    ];
    let seed = |(name, rows, columns): (&str, usize, usize)| {
        let grid = carat_tensor::Grid::from_name(name).unwrap();
        let total = grid.parts(rows, columns).map_or(9, |parts| parts.total());
        // No fourth trit: 10 in binary.
        let body = (0..total).map(|i| (i * 37 % 119) as u8 & 0x55);
        let head = format!("{name} {rows} {columns}\n").into_bytes();
        (
            format!("{name}-{rows}"),
            head.into_iter().chain(body).collect(),
        )
    };
    grids.into_iter().map(seed).collect()
}

#[test]
fn fuzz_corpora_are_current_and_neither_they_nor_mutations_panic() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    for (target, run) in [
        ("recipe", carat_quant::fuzzing::recipe as fn(&[u8])),
        ("grid", carat_quant::fuzzing::grid),
    ] {
        let folder = corpus(target);
        if std::env::var_os("CARAT_UPDATE").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            for (name, bytes) in seeds(target) {
                std::fs::write(folder.join(name), bytes).unwrap();
            }
        }
        for (name, bytes) in seeds(target) {
            let stored = std::fs::read(folder.join(&name)).expect(&name);
            assert!(stored == bytes, "{name} is stale: run with CARAT_UPDATE=1");
        }
        // Whatever a fuzzer has added is replayed too.
        let files = std::fs::read_dir(&folder)
            .unwrap()
            .map(|e| e.unwrap().path());
        let mut files: Vec<_> = files.collect();
        files.sort();
        for file in files {
            let bytes = std::fs::read(&file).unwrap();
            run(&bytes);
            for _ in 0..60 {
                let mut changed = bytes.clone();
                for _ in 0..=random(3) {
                    let at = random(changed.len());
                    match random(4) {
                        _ if changed.is_empty() => {}
                        0 => changed[at] ^= 1 << random(8),
                        1 => changed[at] = b"0189 -:{}[]&*\n"[random(14)],
                        2 => {
                            let end = (at + random(40)).min(changed.len());
                            let piece = changed[at..end].to_vec();
                            changed.splice(at..at, piece);
                        }
                        _ => changed.truncate(at),
                    }
                }
                let outcome = std::panic::catch_unwind(|| run(&changed));
                let shown = String::from_utf8_lossy(&changed);
                assert!(
                    outcome.is_ok(),
                    "a mutation of {} panics: {shown}",
                    file.display()
                );
            }
        }
    }
}
