//! Shapes of known models, as data.

use carat_tensor::{DType, Shape};

use super::{Declared, Fill, pieces};
use crate::gguf::Writer;

/// Sizes and formats of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// What it is asked for by.
    pub name: &'static str,
    /// In a few words.
    pub about: &'static str,
    /// Layers.
    pub layers: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// `general.architecture`.
    architecture: &'static str,
    hidden_size: usize,
    intermediate_size: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    context: u32,
    rope_theta: f32,
    eps: f32,
    /// q, k and v have biases.
    qkv_bias: bool,
    linear: DType,
    embedding: DType,
    /// Its own format; none where the embedding is the head too.
    head: Option<DType>,
    /// `general.file_type`.
    file_type: u32,
    scaled: Option<Scaled>,
}

/// Constant factors of a model, and rotary factors per frequency.
#[derive(Clone, Debug, PartialEq)]
struct Scaled {
    embedding: f32,
    /// Branches are scaled by this over the root of the layers.
    depth: f64,
    /// Logits are divided by the hidden size over this width.
    base_width: usize,
    original_context: u32,
    /// Factor of the lowest frequency in a long context.
    longest: f32,
}

const BITCPM: Scaled = Scaled {
    embedding: 12.0,
    depth: 1.4,
    base_width: 256,
    original_context: 32_768,
    longest: 32.0,
};

/// Every shape.
pub const SHAPES: &[ModelShape] = &[
    ModelShape {
        name: "bitcpm-8b",
        about: "BitCPM-8B: ternary linears, Q4_K embedding, Q6_K head, 2.37 GB",
        architecture: "minicpm",
        layers: 32,
        vocab_size: 73_448,
        hidden_size: 4096,
        intermediate_size: 16_384,
        heads: 32,
        kv_heads: 2,
        head_dim: 128,
        context: 32_768,
        rope_theta: 10_000.0,
        eps: 1e-6,
        qkv_bias: false,
        linear: DType::TQ2_0,
        embedding: DType::Q4_K,
        head: Some(DType::Q6_K),
        file_type: 37,
        scaled: Some(BITCPM),
    },
    ModelShape {
        name: "bitnet-2b",
        about: "the sizes of BitNet b1.58 2B on plain blocks: ternary linears, Q6_K embedding",
        architecture: "llama",
        layers: 30,
        vocab_size: 128_256,
        hidden_size: 2560,
        intermediate_size: 6912,
        heads: 20,
        kv_heads: 5,
        head_dim: 128,
        context: 4096,
        rope_theta: 500_000.0,
        eps: 1e-5,
        qkv_bias: false,
        linear: DType::TQ2_0,
        embedding: DType::Q6_K,
        head: None,
        file_type: 37,
        scaled: None,
    },
    ModelShape {
        name: "qwen2.5-1.5b",
        about: "Qwen2.5-1.5B: Q4_0 linears, Q6_K embedding",
        architecture: "qwen2",
        layers: 28,
        vocab_size: 151_936,
        hidden_size: 1536,
        intermediate_size: 8960,
        heads: 12,
        kv_heads: 2,
        head_dim: 128,
        context: 32_768,
        rope_theta: 1_000_000.0,
        eps: 1e-6,
        qkv_bias: true,
        linear: DType::Q4_0,
        embedding: DType::Q6_K,
        head: None,
        file_type: 2,
        scaled: None,
    },
    ModelShape {
        name: "smollm2-135m",
        about: "SmolLM2-135M: Q8_0",
        architecture: "llama",
        layers: 30,
        vocab_size: 49_152,
        hidden_size: 576,
        intermediate_size: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        context: 8192,
        rope_theta: 100_000.0,
        eps: 1e-5,
        qkv_bias: false,
        linear: DType::Q8_0,
        embedding: DType::Q8_0,
        head: None,
        file_type: 7,
        scaled: None,
    },
    ModelShape {
        name: "tiny",
        about: "a small relative of bitcpm-8b, for tests",
        architecture: "minicpm",
        layers: 3,
        vocab_size: 1000,
        hidden_size: 256,
        intermediate_size: 512,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        context: 1024,
        rope_theta: 10_000.0,
        eps: 1e-6,
        qkv_bias: false,
        linear: DType::TQ2_0,
        embedding: DType::Q4_K,
        head: Some(DType::Q6_K),
        file_type: 37,
        scaled: Some(Scaled {
            base_width: 64,
            original_context: 512,
            ..BITCPM
        }),
    },
];

impl ModelShape {
    /// The shape of this name.
    pub fn named(name: &str) -> Option<&'static ModelShape> {
        SHAPES.iter().find(|s| s.name == name)
    }

    /// By how much the head's products are divided.
    fn logit_divisor(&self) -> f32 {
        self.scaled
            .as_ref()
            .map_or(1.0, |s| self.hidden_size as f32 / s.base_width as f32)
    }

    pub(super) fn declare_metadata(&self, writer: &mut Writer, layers: usize, seed: u64) {
        let own = |key: &str| format!("{}.{key}", self.architecture);
        let described = format!(
            "random weights (carat synth {}, {layers} of {} layers, seed {seed})",
            self.name, self.layers
        );
        writer
            .set("general.architecture", self.architecture)
            .set("general.type", "model")
            .set("general.name", &*format!("{}-synthetic", self.name))
            .set("general.description", &*described)
            .set("general.file_type", self.file_type)
            .set("general.quantization_version", 2);
        // All sizes of the table are far below 2^32.
        let sizes = [
            ("block_count", layers),
            ("embedding_length", self.hidden_size),
            ("feed_forward_length", self.intermediate_size),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
            ("vocab_size", self.vocab_size),
        ];
        for (key, size) in sizes {
            writer.set(&own(key), size as u32);
        }
        writer
            .set(&own("context_length"), self.context)
            .set(&own("rope.freq_base"), self.rope_theta)
            .set(&own("attention.layer_norm_rms_epsilon"), self.eps);
        if let Some(s) = &self.scaled {
            let residual = s.depth / (layers as f64).sqrt();
            writer
                .set(&own("embedding_scale"), s.embedding)
                .set(&own("residual_scale"), residual as f32)
                .set(&own("logit_scale"), self.logit_divisor())
                .set(&own("rope.scaling.type"), "longrope")
                .set(
                    &own("rope.scaling.original_context_length"),
                    s.original_context,
                );
        }
        pieces::declare(writer, self.vocab_size);
    }

    pub(super) fn tensors(&self, layers: usize) -> Vec<Declared> {
        let mut out = Vec::new();
        let mut add = |name: String, dtype, shape: Shape, fill| {
            out.push(Declared {
                name,
                dtype,
                shape,
                fill,
            });
        };
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        // Products with a normed input are then of the size of 1.
        let unit = |inputs: usize| 1.0 / (inputs as f32).sqrt();
        let table = Shape::from([self.vocab_size, hidden]);
        // The embedding is of the size of 1 once it is scaled, the logits too.
        let embedded = match &self.scaled {
            Some(s) => 1.0 / s.embedding,
            None => unit(hidden),
        };
        let named = |stem: &str| format!("{stem}.weight");
        add(
            named("token_embd"),
            self.embedding,
            table.clone(),
            Fill::Random(embedded),
        );
        if let Some(s) = &self.scaled {
            let frequencies = self.head_dim / 2;
            let ramp = |top: f32| {
                // From 1 up to `top`, slowly at first.
                let at = |i: usize| i as f32 / (frequencies - 1) as f32;
                let factor = |i| 1.0 + (top - 1.0) * at(i) * at(i);
                Fill::Given((0..frequencies).map(factor).collect())
            };
            let shape = Shape::from([frequencies]);
            let (long, short) = (ramp(s.longest), ramp(1.0));
            add(named("rope_factors_long"), DType::F32, shape.clone(), long);
            add(named("rope_factors_short"), DType::F32, shape, short);
        }
        for i in 0..layers {
            let norms = ["attn_norm", "ffn_norm"];
            let linears = [
                ("attn_q", q, hidden),
                ("attn_k", kv, hidden),
                ("attn_v", kv, hidden),
                ("attn_output", hidden, q),
                ("ffn_gate", inner, hidden),
                ("ffn_up", inner, hidden),
                ("ffn_down", hidden, inner),
            ];
            for stem in norms {
                let name = format!("blk.{i}.{stem}.weight");
                add(name, DType::F32, [hidden].into(), Fill::Gain);
            }
            for (stem, rows, columns) in linears {
                let fill = Fill::Random(unit(columns));
                let name = format!("blk.{i}.{stem}.weight");
                add(name, self.linear, [rows, columns].into(), fill);
                if self.qkv_bias && matches!(stem, "attn_q" | "attn_k" | "attn_v") {
                    let name = format!("blk.{i}.{stem}.bias");
                    add(name, DType::F32, [rows].into(), Fill::Random(0.25));
                }
            }
        }
        let norm = named("output_norm");
        add(norm, DType::F32, [hidden].into(), Fill::Gain);
        if let Some(dtype) = self.head {
            let rms = self.logit_divisor() * unit(hidden);
            add(named("output"), dtype, table, Fill::Random(rms));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::{Synthesis, blocks::FORMATS};

    #[test]
    fn every_shape_is_whole_blocks_of_formats_that_can_be_made() {
        for shape in SHAPES {
            for t in shape.tensors(shape.layers) {
                t.shape.bytes(t.dtype).unwrap();
                assert!(FORMATS.contains(&t.dtype), "{}: {}", shape.name, t.name);
            }
            assert!(shape.vocab_size >= pieces::FEWEST, "{}", shape.name);
            assert_eq!(ModelShape::named(shape.name), Some(shape));
        }
    }

    /// The published size of BitCPM-8B: 7,583,301,632 ternary weights of 66 bytes
    /// per 256, an embedding of 73448 x 4096 in 144 and a head in 210 bytes per
    /// 256: 1.95507 + 0.16922 + 0.24679 = 2.37108 GB. Norms and rotary factors in
    /// fp32 are the rest.
    #[test]
    fn the_size_of_bitcpm_8b_is_the_published_one_to_the_byte() {
        let shape = ModelShape::named("bitcpm-8b").unwrap();
        let linears_of_a_layer: u64 = 4096 * (4096 + 256 + 256 + 4096 + 3 * 16_384);
        assert_eq!(32 * linears_of_a_layer, 7_583_301_632);
        let table = 73_448 * 4096 / 256;
        assert_eq!(
            7_583_301_632 / 256 * 66 + table * (144 + 210),
            2_371_079_424
        );
        for layers in [1, 2, 32] {
            let made = Synthesis::new(shape, layers as usize, 0).unwrap();
            let of = |dtype| -> u64 {
                let some = made.tensors().filter(|(_, d, _)| *d == dtype);
                some.map(|(_, _, bytes)| bytes).sum()
            };
            assert_eq!(of(DType::TQ2_0), layers * linears_of_a_layer / 256 * 66);
            assert_eq!(of(DType::Q4_K), table * 144);
            assert_eq!(of(DType::Q6_K), table * 210);
            assert_eq!(of(DType::F32), 4 * ((2 * layers + 1) * 4096 + 2 * 64));
            let ternary = made.tensors().filter(|(_, d, _)| *d == DType::TQ2_0);
            assert_eq!(ternary.count() as u64, 7 * layers);
            let known = [DType::TQ2_0, DType::Q4_K, DType::Q6_K, DType::F32];
            let sum: u64 = known.into_iter().map(of).sum();
            assert_eq!(made.tensor_bytes(), sum);
            // Metadata: the vocabulary, mostly.
            let head = made.file_bytes().unwrap() - sum;
            assert!((1 << 20..4 << 20).contains(&head), "{head}");
        }
        let whole = Synthesis::new(shape, 32, 0).unwrap();
        assert_eq!(whole.tensor_bytes(), 2_371_079_424 + 1_065_472);
        assert!((2.365e9..2.375e9).contains(&(whole.file_bytes().unwrap() as f64)));
    }
}
