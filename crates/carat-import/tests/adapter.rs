//! Low-rank adapters: merged exactly, refused when they ask for more.

use std::{collections::BTreeMap, path::Path};

use carat_bundle::source::TensorSource;
use carat_import::{
    Checkpoint,
    adapter::{Adapter, Merged},
};
use carat_tensor::formats;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

fn model() -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/wren-dense");
    carat_import::open(&path).unwrap()
}

const STEM: &str = "base_model.model.model.layers.1.mlp.down_proj";

/// An adapter of rank 2 whose values are small multiples of 1/8, so that sums of
/// products are exact.
fn adapter(folder: &Path, stem: &str, config: serde_json::Value) {
    let floats = |n: usize| -> Vec<u8> {
        (0..n)
            .flat_map(|i| ((i % 7) as f32 / 8.0 - 0.25).to_le_bytes())
            .collect()
    };
    let (a, b) = (floats(2 * 768), floats(256 * 2));
    let view = |shape, data| TensorView::new(Dtype::F32, shape, data).unwrap();
    let tensors = BTreeMap::from([
        (format!("{stem}.lora_A.weight"), view(vec![2, 768], &a)),
        (format!("{stem}.lora_B.weight"), view(vec![256, 2], &b)),
    ]);
    let bytes = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(folder.join("adapter_model.safetensors"), bytes).unwrap();
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

fn values(source: &dyn TensorSource, name: &str) -> Vec<f32> {
    let info = source.info(name).unwrap();
    let mut out = vec![0.0; info.shape.elements().unwrap()];
    formats::decode(info.dtype, &source.read(name).unwrap(), &mut out).unwrap();
    out
}

#[test]
fn a_merge_adds_the_scaled_product() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"});
    adapter(dir.path(), STEM, config);
    let model = model();
    let adapter = Adapter::open(dir.path(), &model.spec).unwrap();
    assert_eq!(adapter.matrices(), 1);
    let source = model.tensors.as_ref();
    let merged = Merged {
        source,
        adapter: &adapter,
    };
    let name = "layers.1.ffn.down.weight";
    let (before, after) = (values(source, name), values(&merged, name));
    let value = |i: usize| f64::from((i % 7) as f32 / 8.0 - 0.25);
    for row in [0, 5, 255] {
        for column in [0, 3, 767] {
            let product: f64 = (0..2)
                .map(|r| value(row * 2 + r) * value(r * 768 + column))
                .sum();
            let at = row * 768 + column;
            // Two additions to a bf16 weight below 2, each off by half an ulp.
            let expected = f64::from(before[at]) + 2.0 * product;
            assert!(
                (f64::from(after[at]) - expected).abs() <= 2.0 * 2f64.powi(-24),
                "{row} {column}"
            );
        }
    }
    let other = "layers.0.ffn.down.weight";
    assert_eq!(merged.info(other), source.info(other));
    assert_eq!(merged.names(), source.names());
}

#[test]
fn what_is_more_than_a_product_is_refused() {
    let model = model();
    let good = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
    let refused = |stem: &str, key: &str, value: serde_json::Value| {
        let dir = tempfile::tempdir().unwrap();
        let mut config = good.clone();
        config[key] = value;
        adapter(dir.path(), stem, config);
        match Adapter::open(dir.path(), &model.spec) {
            Ok(_) => panic!("accepted {key}"),
            Err(e) => e.to_string(),
        }
    };
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("modules_to_save", json!(["lm_head"])),
        ("rank_pattern", json!({"q_proj": 4})),
        ("r", json!(0)),
        ("lora_alpha", json!("x")),
    ] {
        let message = refused(STEM, key, value);
        assert!(message.contains(key), "{key}: {message}");
    }
    let message = refused(
        "base_model.model.model.layers.9.mlp.down_proj",
        "r",
        json!(2),
    );
    assert!(message.contains("changes no matrix"), "{message}");
    let message = refused("base_model.model.model.layers.1.mlp.up_proj", "r", json!(2));
    assert!(message.contains("do not fit [768, 256]"), "{message}");
    let dir = tempfile::tempdir().unwrap();
    assert!(Adapter::open(dir.path(), &model.spec).is_err());
}
