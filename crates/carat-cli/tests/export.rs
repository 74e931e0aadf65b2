//! `carat export`: what comes back is what was in the bundle.

mod common;

use std::{fs, path::Path};

use carat_bundle::{Bundle, source::TensorSource};
use common::*;

fn values(source: &dyn TensorSource, name: &str) -> Vec<f32> {
    let info = source.info(name).unwrap();
    let mut out = vec![0.0; info.shape.elements().unwrap()];
    let bytes = source.read(name).unwrap();
    carat_tensor::formats::decode(info.dtype, &bytes, &mut out).unwrap();
    out
}

fn assert_same(bundle: &Path, exported: &Path) {
    let bundle = Bundle::open(bundle).unwrap();
    let back = carat_import::open(exported).unwrap();
    assert_eq!(back.spec, bundle.manifest().spec);
    for name in bundle.names() {
        let (found, expected) = (values(back.tensors.as_ref(), &name), values(&bundle, &name));
        assert!(found == expected, "{name}");
    }
}

#[test]
fn safetensors_hold_the_dequantized_weights() {
    let place = Place::new();
    let model = text(wren_dense());
    let convert = [
        "convert", &model, "b", "--recipe", "nvfp4", "--target", "portable",
    ];
    place.run(&convert).ok();
    fs::create_dir(place.path("hf")).unwrap();
    let export = ["export", "b", "hf/model.safetensors", "--to", "safetensors"];
    place.run(&export).ok();
    fs::copy(
        wren_dense().join("config.json"),
        place.path("hf/config.json"),
    )
    .unwrap();
    assert_same(&place.path("b"), &place.path("hf"));
    place.run(&export).fails(2).hints("--force");
}

#[test]
fn gguf_holds_the_blocks_of_the_bundle() {
    let place = Place::new();
    let model = wren();
    let of = |recipe: &str, target: &str| {
        let convert = [
            "convert", &model, "b", "--recipe", recipe, "--target", target, "--force",
        ];
        place.run(&convert).ok();
        place.run(&[
            "export", "b", "out.gguf", "--to", "gguf", "--like", &model, "--force",
        ])
    };
    // As it came: the very tensors, rows of q and k permuted again.
    of("keep", "native").ok();
    assert_same(&place.path("b"), &place.path("out.gguf"));
    let bytes = |path: &Path, name: &str| {
        let file = carat_import::gguf::Gguf::open(path).unwrap();
        file.tensor_bytes(name).unwrap().to_vec()
    };
    let (source, out) = (Path::new(&model), place.path("out.gguf"));
    for name in [
        "blk.0.attn_q.weight",
        "blk.7.attn_k.weight",
        "token_embd.weight",
    ] {
        assert!(bytes(source, name) == bytes(&out, name), "{name}");
    }
    for (recipe, target) in [
        ("int8lin", "native"),
        ("4bit", "native"),
        ("mxfp4", "portable"),
    ] {
        of(recipe, target).ok();
        assert_same(&place.path("b"), &place.path("out.gguf"));
    }
    of("nvfp4", "portable")
        .fails(2)
        .says("GGUF has no format for fp4.block16.e4m3");
    let wrong = text(root().join("models/wren-ternary-tq2_0.gguf"));
    let other = text(random());
    place.run(&["convert", &other, "r"]).ok();
    place
        .run(&["export", "r", "r.gguf", "--to", "gguf", "--like", &wrong])
        .fails(2)
        .says("describes another model");
}

#[test]
fn gguf_is_written_without_another_file_and_with_formats_of_ones_own() {
    let place = Place::new();
    let model = text(wren_dense());
    place.run(&["convert", &model, "b"]).ok();
    let export = |more: &[&str]| {
        place.run(
            &[
                &["export", "b", "out.gguf", "--to", "gguf", "--force"][..],
                more,
            ]
            .concat(),
        )
    };
    export(&[]).ok();
    assert_same(&place.path("b"), &place.path("out.gguf"));
    // The same ids and the same chat.
    place.file("t.txt", "What is 12 + 30?\n<|im_end|> tail  end");
    place.file("m.json", r#"[{"role": "user", "content": "Hello."}]"#);
    for words in [
        &["tokenize", "--file", "t.txt"][..],
        &["render", "--messages", "m.json"],
    ] {
        let of = |model: &str| {
            let all = [&words[..1], &[model], &words[1..]].concat();
            place.run(&all).ok().out
        };
        assert_eq!(of("out.gguf"), of(&model), "{words:?}");
    }
    for (name, block) in [("q4_1", 20), ("q4_k", 144), ("Q6_K", 210)] {
        export(&["--encode", name]).ok();
        let file = carat_import::gguf::Gguf::open(&place.path("out.gguf")).unwrap();
        let tensor = file.tensor("blk.3.ffn_down.weight").unwrap().dtype;
        assert_eq!(tensor.name().to_lowercase(), name.to_lowercase());
        assert_eq!(tensor.block_bytes(), block);
        // Every weight is within what the format can be off: its largest group scale.
        let bundle = Bundle::open(&place.path("b")).unwrap();
        let back = carat_import::open(&place.path("out.gguf")).unwrap();
        let down = "layers.3.ffn.down.weight";
        let (found, expected) = (values(back.tensors.as_ref(), down), values(&bundle, down));
        assert!(found != expected);
        for (found, expected) in found.chunks(256).zip(expected.chunks(256)) {
            let largest = expected.iter().fold(0.0f32, |a, v| a.max(v.abs()));
            let pairs = found.iter().zip(expected);
            let off = pairs.fold(0.0f32, |a, (f, e)| a.max((f - e).abs()));
            // Fifteen steps span at most twice the largest weight of a block, and a
            // search may give up the last one for the others.
            assert!(off <= largest / 7.5, "{name}: {off} of {largest}");
        }
    }
    export(&["--encode", "q3_k"]).fails(2).hints("Q4_K");
    place
        .run(&[
            "convert", &model, "i", "--recipe", "nvfp4", "--target", "portable",
        ])
        .ok();
    place
        .run(&["export", "i", "o.gguf", "--to", "gguf", "--encode", "q4_k"])
        .fails(2)
        .says("GGUF has no format for fp4.block16.e4m3");
}
