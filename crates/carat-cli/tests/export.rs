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
