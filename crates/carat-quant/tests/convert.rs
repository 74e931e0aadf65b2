//! Recipes at work on a real model: bundles verify, sizes are those of theory,
//! nothing depends on threads.

use std::path::Path;

use carat_bundle::{
    Bundle, ConvertOptions, ConvertReport, VerifyOptions, convert,
    manifest::{
        ActivationContract, Layout, SourceKind, SourceRecord, TensorEntry, WeightsKind, is_matrix,
    },
    source::{TensorInfo, TensorSource},
    spec::{ModelSpec, TensorDecl},
    verify,
};
use carat_import::Checkpoint;
use carat_quant::{
    Quantizer, Recipe, Simulated, Target, Truncated, Untied, recipe::PRESETS, report::SizeTheory,
};
use carat_tensor::DType;

fn wren() -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/wren-dense");
    carat_import::open(&path).unwrap()
}

/// Converts the first layers of Wren.
fn made(
    checkpoint: &Checkpoint,
    recipe: &Recipe,
    target: Target,
    threads: usize,
    to: &Path,
) -> Result<(ConvertReport, SizeTheory), String> {
    let cut = Truncated::new(&checkpoint.spec, 2);
    let tensors = checkpoint.tensors.as_ref();
    let plan = recipe.resolve(&cut.spec).map_err(|e| e.to_string())?;
    let quantizer = Quantizer::new(recipe, &plan, target, threads).unwrap();
    let options = ConvertOptions {
        quantize: Some(&quantizer),
        skipped: cut.skipped,
        shippable: false,
        threads,
        activation: ActivationContract::default(),
        ..ConvertOptions::default()
    };
    let origin = SourceRecord {
        kind: SourceKind::Safetensors,
        name: "wren".into(),
        architecture: "wren".into(),
        digest: None,
        revision: None,
        weights: WeightsKind::Dense,
        permuted_qk: false,
        notes: vec![],
        declared: None,
    };
    let theory = SizeTheory::of(&plan, |decl| tensors.info(&decl.name)).unwrap();
    convert(tensors, &cut.spec, &checkpoint.text, origin, &options, to)
        .map(|report| (report, theory))
        .map_err(|e| e.to_string())
}

#[test]
fn every_preset_makes_a_bundle_of_exactly_the_bytes_of_theory() {
    let checkpoint = wren();
    let dir = tempfile::tempdir().unwrap();
    for (name, _) in PRESETS {
        let recipe = Recipe::preset(name).unwrap();
        let path = dir.path().join(name);
        let (report, theory) = made(&checkpoint, &recipe, Target::Portable, 2, &path).unwrap();
        let manifest = &report.manifest;
        assert!(!manifest.shippable);
        let size = &manifest.size_report;
        let of_grids = |part: fn(&carat_bundle::manifest::GridSize) -> u64| -> u64 {
            size.grids.iter().map(part).sum()
        };
        assert_eq!(of_grids(|g| g.weights), theory.quantized_weights, "{name}");
        assert_eq!(of_grids(|g| g.codes), theory.codes, "{name}");
        assert_eq!(of_grids(|g| g.scales), theory.scales, "{name}");
        assert_eq!(of_grids(|g| g.zero_points), theory.zero_points, "{name}");
        assert_eq!(of_grids(|g| g.tables), theory.tables, "{name}");
        let blocks: u64 = size.formats.iter().map(|f| f.logical_bytes).sum();
        assert_eq!(blocks, theory.kept, "{name}");
        assert_eq!(size.logical_bytes, theory.total(), "{name}");
        let file = std::fs::metadata(path.join("weights.bin")).unwrap().len();
        assert_eq!(size.stored_bytes + size.alignment_bytes, file, "{name}");

        let text = std::fs::read_to_string(path.join("recipe.yaml")).unwrap();
        assert_eq!(text, recipe.text());
        let verified = verify(&path, &VerifyOptions::default());
        assert!(verified.passed(), "{name}: {verified}");

        // What a simulation reads is what the bundle holds.
        let cut = Truncated::new(&checkpoint.spec, 2).spec;
        let plan = recipe.resolve(&cut).unwrap();
        let quantizer = Quantizer::new(&recipe, &plan, Target::Portable, 2).unwrap();
        let tensors = checkpoint.tensors.as_ref();
        let simulated = Simulated::new(tensors, &cut, &quantizer).unwrap();
        let bundle = Bundle::open(&path).unwrap();
        for tensor in [
            "embed.weight",
            "layers.1.attn.k.weight",
            "final_norm.weight",
        ] {
            assert!(
                values(&simulated, tensor) == values(&bundle, tensor),
                "{name}: {tensor}"
            );
        }
        native_holds_the_same(&checkpoint, &recipe, &bundle);
    }
}

/// The bundle for the engine: the same weights in no more than what theory says, but
/// for what fills up panels, and every matrix packed.
fn native_holds_the_same(checkpoint: &Checkpoint, recipe: &Recipe, portable: &Bundle) {
    let name = recipe.name();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("native");
    let (report, theory) = made(checkpoint, recipe, Target::Native, 2, &path).unwrap();
    let verified = verify(&path, &VerifyOptions::default());
    assert!(verified.passed(), "{name}: {verified}");
    let native = Bundle::open(&path).unwrap();
    for t in &native.manifest().tensors {
        let packed = t.layout == Layout::Packed16;
        assert_eq!(packed, is_matrix(t.role), "{name}: {}", t.name);
    }
    for tensor in ["embed.weight", "layers.1.ffn.down.weight", "head.weight"] {
        assert_eq!(values(&native, tensor), values(portable, tensor), "{name}");
    }
    let size = &report.manifest.size_report;
    assert_eq!(size.logical_bytes, theory.total(), "{name}");
    let panels = |t: &TensorEntry| (t.shape.rows().unwrap() as u64).div_ceil(16) + 1;
    let filling: u64 = size.stored_bytes - size.logical_bytes;
    let allowed: u64 = native.manifest().tensors.iter().map(panels).sum::<u64>() * 64;
    assert!(filling < allowed, "{name}: {filling} of {allowed}");
    let file = std::fs::metadata(path.join("weights.bin")).unwrap().len();
    assert_eq!(size.stored_bytes + size.alignment_bytes, file, "{name}");
}

#[test]
fn threads_do_not_change_a_bundle() {
    let checkpoint = wren();
    let dir = tempfile::tempdir().unwrap();
    for (name, target) in [
        ("int8lin", Target::Native),
        ("nvfp4", Target::Portable),
        ("4bit_weight_palettized_group32", Target::Portable),
    ] {
        let recipe = Recipe::preset(name).unwrap();
        let digest = |threads: usize| {
            let path = dir.path().join(format!("{name}-{threads}"));
            let (report, _) = made(&checkpoint, &recipe, target, threads, &path).unwrap();
            report.digest
        };
        assert_eq!(digest(1), digest(3), "{name}");
    }
}

fn values(source: &dyn TensorSource, name: &str) -> Vec<f32> {
    let info = source.info(name).unwrap();
    let mut out = vec![0.0; info.shape.elements().unwrap()];
    let bytes = source.read(name).unwrap();
    carat_tensor::formats::decode(info.dtype, &bytes, &mut out).unwrap();
    out
}

#[test]
fn what_the_engine_cannot_run_is_refused_and_leaves_nothing() {
    let checkpoint = wren();
    let dir = tempfile::tempdir().unwrap();
    let text = Recipe::preset("4bit").unwrap().text().to_owned();
    let odd = Recipe::parse("odd", &text.replace("block_size: 32", "block_size: 8")).unwrap();
    let path = dir.path().join("odd");
    let error = made(&checkpoint, &odd, Target::Native, 1, &path).unwrap_err();
    assert!(
        error.contains("blocks of 16 columns and multiples, not int4.block8.f16"),
        "{error}"
    );
    assert!(!path.exists());
}

#[test]
fn an_untied_head_is_a_copy_of_the_table() {
    let checkpoint = wren();
    let untied = Untied(checkpoint.tensors.as_ref());
    assert_eq!(
        values(&untied, "head.weight"),
        values(&untied, "embed.weight")
    );
    let names = untied.names();
    assert!(names.is_sorted() && names.contains(&"head.weight".to_owned()));
    assert_eq!(names.iter().filter(|n| *n == "head.weight").count(), 1);
}

/// A plain decoder of these sizes, untied.
fn decoder(
    layers: usize,
    hidden: usize,
    inner: usize,
    heads: [usize; 2],
    vocab: usize,
) -> ModelSpec {
    let norm = serde_json::json!({ "eps": 1e-6, "weight_offset": 0.0 });
    let layer = serde_json::json!({
        "mixer_norm": norm, "post_mixer_norm": null, "ffn_norm": norm, "post_ffn_norm": null,
        "residual_scale": 1.0,
        "mixer": { "kind": "attention", "heads": heads[0], "kv_heads": heads[1], "head_dim": 128,
            "qkv_bias": false, "out_bias": false, "qk_norm": null, "rope": null,
            "window": null, "scale": 0.1, "logit_softcap": null },
        "ffn": { "kind": "gated", "intermediate_size": inner, "activation": "silu", "bias": false },
    });
    serde_json::from_value(serde_json::json!({
        "hidden_size": hidden, "vocab_size": vocab, "max_context": 4096,
        "embedding": { "scale": 1.0 }, "layers": vec![layer; layers], "final_norm": norm,
        "head": { "tied": false, "scale": 1.0, "softcap": null }, "ropes": [],
    }))
    .unwrap()
}

// Ledger section 0: two published sizes, from shapes alone.
#[test]
fn published_sizes_are_reproduced() {
    // A 2B model in int8 with one fp16 scale for 32 weights, embedding and all.
    let spec = decoder(42, 2048, 6144, [16, 2], 130_560);
    let plan = Recipe::preset("int8lin").unwrap().resolve(&spec).unwrap();
    let theory = SizeTheory::of(&plan, |_| None).unwrap();
    assert_eq!(theory.quantized_weights, 2_516_582_400);
    assert_eq!(theory.quantized(), 2_673_868_800);
    let plan = Recipe::preset("int8_channel")
        .unwrap()
        .resolve(&spec)
        .unwrap();
    let channel = SizeTheory::of(&plan, |_| None).unwrap();
    assert!((channel.quantized() as f64 / 1e9 - 2.52).abs() < 0.005);

    // An 8B model with ternary linear layers, Q4_K embedding and Q6_K head: the
    // 2.37 GB of its file.
    let spec = decoder(32, 4096, 16_384, [32, 2], 73_448);
    let nothing = Recipe::parse("keep", "quantization_config: {global_config: null}").unwrap();
    let plan = nothing.resolve(&spec).unwrap();
    let info = |decl: &TensorDecl| {
        let dtype = match decl.name.as_str() {
            "embed.weight" => DType::Q4_K,
            "head.weight" => DType::Q6_K,
            _ => DType::TQ2_0,
        };
        let shape = decl.shape.clone();
        Some(TensorInfo { dtype, shape })
    };
    let theory = SizeTheory::of(&plan, info).unwrap();
    let vectors = (32 * 2 + 1) * 4096;
    assert_eq!(
        theory.kept_weights - vectors - 2 * 73_448 * 4096,
        7_583_301_632
    );
    assert_eq!(theory.total() - 4 * vectors, 2_371_079_424);
}
