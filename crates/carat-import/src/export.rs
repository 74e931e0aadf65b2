//! The way back: names and orders of tensors in the containers of others.

use carat_bundle::spec::{LayerSpec, MixerSpec, ModelSpec};

pub use crate::ggml::{DescribeError, Description, describe, in_gguf_terms};
use crate::{
    families::{HF_PRE_NORM, HF_SANDWICH, Root, gguf_names},
    permute_rows,
};

/// The name of a canonical tensor in an HF checkpoint of the language model alone.
pub fn hf_name(spec: &ModelSpec, tensor: &str) -> String {
    let sandwich = |layer: &LayerSpec| layer.post_ffn_norm.is_some();
    let table = match spec.layers.iter().any(sandwich) {
        true => &HF_SANDWICH,
        false => &HF_PRE_NORM,
    };
    table.name(Root::PLAIN, tensor)
}

/// The name of a canonical tensor in a GGUF file.
pub fn gguf_name(tensor: &str) -> String {
    gguf_names().name(Root::PLAIN, tensor)
}

/// Rows of a tensor in the order of a GGUF file whose q and k rows are interleaved:
/// those of q and k (and their biases) are permuted, others stay. `bytes` is whole
/// rows of `row_bytes`.
pub fn interleaved(spec: &ModelSpec, tensor: &str, bytes: Vec<u8>, row_bytes: usize) -> Vec<u8> {
    let parts: Vec<&str> = tensor.split('.').collect();
    let ["layers", index, "attn", "q" | "k", _] = parts[..] else {
        return bytes;
    };
    let layer = index.parse().ok().and_then(|i: usize| spec.layers.get(i));
    match layer.map(|l| &l.mixer) {
        Some(MixerSpec::Attention(attention)) => {
            permute_rows(&bytes, row_bytes, attention.head_dim)
        }
        None => bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_are_read() {
        assert_eq!(gguf_name("layers.3.attn.q.weight"), "blk.3.attn_q.weight");
        assert_eq!(gguf_name("head.weight"), "output.weight");
    }
}
