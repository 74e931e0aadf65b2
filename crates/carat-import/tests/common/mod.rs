//! A tiny Llama-like model, written as an HF folder and as a GGUF file.
#![allow(dead_code)] // each test file uses a part

use std::{collections::BTreeMap, fs, path::Path};

use carat_import::{
    gguf::{Array, Value, Writer},
    permute_rows,
};
use carat_tensor::{DType, Shape, formats};
use serde_json::json;

#[derive(Clone, Copy)]
pub(crate) struct Tiny {
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) ffn: usize,
    pub(crate) vocab: usize,
}

pub(crate) const SMALL: Tiny = Tiny {
    hidden: 8,
    layers: 1,
    heads: 2,
    kv_heads: 1,
    head_dim: 4,
    ffn: 8,
    vocab: 5,
};

/// Rows of 256, so that every block format fits.
pub(crate) const BLOCKS: Tiny = Tiny {
    hidden: 256,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 8,
    ffn: 256,
    vocab: 12,
};

pub(crate) struct Tensor {
    /// Canonical, HF and GGUF name.
    pub(crate) canonical: String,
    pub(crate) hf: String,
    pub(crate) gguf: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
    pub(crate) linear: bool,
    /// A row order that converters change: q and k.
    pub(crate) permuted: bool,
}

impl Tiny {
    pub(crate) fn config(&self) -> serde_json::Value {
        json!({
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": false,
            "torch_dtype": "float32",
        })
    }

    /// Every tensor with reproducible values of about unit size.
    pub(crate) fn tensors(&self) -> Vec<Tensor> {
        let mut out = Vec::new();
        let mut seed = 1u64;
        let mut add = |canonical: String, hf: String, gguf: String, shape: Vec<usize>| {
            let values = (0..shape.iter().product::<usize>())
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 40) as f32 / (1u32 << 23) as f32 - 1.0
                })
                .collect();
            out.push(Tensor {
                permuted: canonical.contains(".attn.q.") || canonical.contains(".attn.k."),
                linear: canonical.starts_with("layers.") && shape.len() == 2,
                canonical,
                hf,
                gguf,
                shape,
                values,
            });
        };
        let (h, f) = (self.hidden, self.ffn);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        add(
            "embed.weight".into(),
            "model.embed_tokens.weight".into(),
            "token_embd.weight".into(),
            vec![self.vocab, h],
        );
        for i in 0..self.layers {
            for (c, hf, gguf, shape) in [
                ("mixer_norm", "input_layernorm", "attn_norm", vec![h]),
                ("attn.q", "self_attn.q_proj", "attn_q", vec![q, h]),
                ("attn.k", "self_attn.k_proj", "attn_k", vec![kv, h]),
                ("attn.v", "self_attn.v_proj", "attn_v", vec![kv, h]),
                ("attn.o", "self_attn.o_proj", "attn_output", vec![h, q]),
                ("ffn_norm", "post_attention_layernorm", "ffn_norm", vec![h]),
                ("ffn.gate", "mlp.gate_proj", "ffn_gate", vec![f, h]),
                ("ffn.up", "mlp.up_proj", "ffn_up", vec![f, h]),
                ("ffn.down", "mlp.down_proj", "ffn_down", vec![h, f]),
            ] {
                add(
                    format!("layers.{i}.{c}.weight"),
                    format!("model.layers.{i}.{hf}.weight"),
                    format!("blk.{i}.{gguf}.weight"),
                    shape,
                );
            }
        }
        add(
            "final_norm.weight".into(),
            "model.norm.weight".into(),
            "output_norm.weight".into(),
            vec![h],
        );
        add(
            "head.weight".into(),
            "lm_head.weight".into(),
            "output.weight".into(),
            vec![self.vocab, h],
        );
        out
    }

    /// Metadata as converters write it.
    pub(crate) fn metadata(&self) -> Writer {
        let mut w = Writer::new();
        w.set("general.architecture", "llama")
            .set("llama.block_count", self.layers as u32)
            .set("llama.context_length", 64u32)
            .set("llama.embedding_length", self.hidden as u32)
            .set("llama.feed_forward_length", self.ffn as u32)
            .set("llama.attention.head_count", self.heads as u32)
            .set("llama.attention.head_count_kv", self.kv_heads as u32)
            .set("llama.attention.key_length", self.head_dim as u32)
            .set("llama.attention.value_length", self.head_dim as u32)
            .set("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
            .set("llama.rope.dimension_count", self.head_dim as u32)
            .set("llama.rope.freq_base", 10000.0f32)
            .set("llama.vocab_size", self.vocab as u32);
        w
    }

    /// The model as GGUF bytes: `linear` is the format of the linears, everything
    /// else is F32; q and k rows in the converters' order.
    pub(crate) fn gguf(&self, linear: DType) -> Vec<u8> {
        self.gguf_with(self.metadata(), linear)
    }

    pub(crate) fn gguf_with(&self, mut w: Writer, linear: DType) -> Vec<u8> {
        let mut data = BTreeMap::new();
        for t in self.tensors() {
            let dtype = if t.linear && fits(linear, &t.shape) {
                linear
            } else {
                DType::F32
            };
            let mut bytes = encode(dtype, &t.values);
            if t.permuted {
                let row = bytes.len() / t.shape[0];
                bytes = permute_rows(&bytes, row, self.head_dim);
            }
            w.tensor(&t.gguf, dtype, Shape(t.shape.clone()));
            data.insert(t.gguf, bytes);
        }
        let mut file = Vec::new();
        w.write(&mut file, |name| Ok(data[name].clone().into()))
            .unwrap();
        file
    }

    /// Writes the model as an HF folder in one file.
    pub(crate) fn write_hf(&self, folder: &Path, dtype: DType) {
        write_config(folder, &self.config());
        write_safetensors(&folder.join("model.safetensors"), &self.tensors(), dtype);
    }
}

pub(crate) fn fits(dtype: DType, shape: &[usize]) -> bool {
    Shape(shape.to_vec()).bytes(dtype).is_ok()
}

pub(crate) fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    if dtype == DType::F32 {
        // Anything goes, NaN too.
        return values.iter().flat_map(|v| v.to_le_bytes()).collect();
    }
    let blocks = values.len() / dtype.block_len();
    let mut out = vec![0; blocks * dtype.block_bytes()];
    formats::encode(dtype, values, &mut out).unwrap();
    out
}

pub(crate) fn write_config(folder: &Path, config: &serde_json::Value) {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

pub(crate) fn write_safetensors(path: &Path, tensors: &[Tensor], dtype: DType) {
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|t| (t.hf.clone(), t.shape.clone(), encode(dtype, &t.values)))
        .collect();
    fs::write(path, safetensors_bytes(&data, dtype)).unwrap();
}

pub(crate) fn safetensors_bytes(data: &[(String, Vec<usize>, Vec<u8>)], dtype: DType) -> Vec<u8> {
    let dtype = match dtype {
        DType::BF16 => safetensors::Dtype::BF16,
        DType::F16 => safetensors::Dtype::F16,
        _ => safetensors::Dtype::F32,
    };
    let views: Vec<_> = data
        .iter()
        .map(|(name, shape, bytes)| {
            let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes).unwrap();
            (name.as_str(), view)
        })
        .collect();
    safetensors::serialize(views, None).unwrap()
}

/// Opens GGUF bytes through a file, as users do.
pub(crate) fn open_gguf(
    bytes: &[u8],
) -> Result<carat_import::Checkpoint, carat_import::ImportError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, bytes).unwrap();
    // The map outlives the name.
    carat_import::open(&path)
}

/// The message of a failed import, without the folder.
pub(crate) fn message(
    result: Result<carat_import::Checkpoint, carat_import::ImportError>,
) -> String {
    match result {
        Ok(c) => panic!("expected an error, found {c:?}"),
        Err(e) => {
            let text = e.to_string();
            match text.find("/m.gguf: ").map(|i| i + "/m.gguf: ".len()) {
                Some(i) => text[i..].to_owned(),
                None => text,
            }
        }
    }
}

pub(crate) fn strings(values: &[&str]) -> Value {
    Value::Array(Array::String(
        values.iter().map(|s| (*s).to_owned()).collect(),
    ))
}

pub(crate) fn repo(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}
