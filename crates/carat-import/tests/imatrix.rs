//! Importance matrices in GGUF files.

use std::{fs::File, path::Path};

use carat_import::{gguf::Writer, imatrix};
use carat_tensor::{DType, Shape};

fn write(path: &Path, kind: &str, tensors: &[(&str, Vec<f32>)]) {
    let mut writer = Writer::new();
    writer.set("general.type", kind);
    for (name, values) in tensors {
        writer.tensor(name, DType::F32, Shape::from([values.len()]));
    }
    let mut file = File::create(path).unwrap();
    writer
        .write(&mut file, |name| {
            let (_, values) = tensors.iter().find(|(n, _)| *n == name).unwrap();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            Ok(bytes.into())
        })
        .unwrap();
}

#[test]
fn mean_squares_are_read_and_other_files_refused() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/wren-dense");
    let spec = carat_import::open(&model).unwrap().spec;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("i.gguf");
    let sums: Vec<f32> = (0..256).map(|i| i as f32).collect();
    let q = ("blk.0.attn_q.weight.in_sum2", sums.clone());
    let counts = |n: f32| ("blk.0.attn_q.weight.counts", vec![n]);
    write(&path, "imatrix", &[q.clone(), counts(2.0)]);
    let found = imatrix::read(&path, &spec).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found["layers.0.attn.q.weight"][255], 127.5);
    write(&path, "imatrix", &[q.clone(), counts(0.0)]);
    assert!(imatrix::read(&path, &spec).unwrap().is_empty());

    let refused = |kind: &str, tensors: &[(&str, Vec<f32>)]| {
        write(&path, kind, tensors);
        imatrix::read(&path, &spec).unwrap_err().to_string()
    };
    let message = refused("model", std::slice::from_ref(&q));
    assert!(message.contains("no importance matrix"), "{message}");
    let message = refused("imatrix", std::slice::from_ref(&q));
    assert!(
        message.contains("counts") && message.contains("missing"),
        "{message}"
    );
    let message = refused("imatrix", &[(q.0, vec![1.0; 255]), counts(1.0)]);
    assert!(message.contains("expected 256 values"), "{message}");
    let message = refused("imatrix", &[("blk.8.attn_q.weight.in_sum2", sums)]);
    assert!(message.contains("no matrix of this model"), "{message}");
    let message = refused("imatrix", &[(q.0, vec![-1.0; 256]), counts(1.0)]);
    assert!(message.contains("negative"), "{message}");
}
