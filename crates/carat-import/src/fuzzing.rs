//! Bodies of the fuzz targets, replayed over a corpus by the ordinary tests.

use std::sync::Arc;

use crate::{ggml, gguf::Gguf, safetensors_dir, source::Bytes};

/// Parses a GGUF file, reads every tensor, imports it as a model.
pub fn gguf(data: &[u8]) {
    let Ok(file) = Gguf::parse(Arc::new(data.to_vec())) else {
        return;
    };
    for t in file.tensors() {
        let bytes = file.tensor_bytes(&t.name);
        assert_eq!(bytes.map(<[u8]>::len), Some(t.bytes as usize));
    }
    if let Ok(checkpoint) = ggml::from_bytes(data.to_vec()) {
        for name in checkpoint.tensors.names() {
            assert!(checkpoint.tensors.read(&name).is_ok(), "{name}");
        }
    }
}

/// Parses a safetensors file and reads every tensor.
pub fn safetensors(data: &[u8]) {
    let bytes = Bytes(Arc::new(data.to_vec()));
    if let Ok(tensors) = safetensors_dir::tensors_of(&bytes) {
        for (_, stored) in tensors {
            assert_eq!(stored.data().len(), stored.len);
        }
    }
}
