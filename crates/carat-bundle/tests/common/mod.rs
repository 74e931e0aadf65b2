//! A tiny model in memory, in any format.
#![allow(dead_code, unreachable_pub)] // each test file uses a part of it

use std::{borrow::Cow, collections::BTreeMap, path::Path};

use carat_bundle::{
    ConvertOptions, ConvertReport, convert,
    manifest::{SourceKind, SourceRecord, WeightsKind},
    source::{SourceError, TensorInfo, TensorSource},
    spec::*,
    text::{SpecialToken, TextAssets, TextConfig},
};
use carat_tensor::{
    DType,
    formats::{self, FormatError},
};

/// Rows that are no multiple of 16, columns that every format divides.
pub const VOCAB: usize = 40;

pub fn spec(layers: usize) -> ModelSpec {
    let norm = NormSpec {
        eps: 1e-6,
        weight_offset: 0.0,
    };
    ModelSpec {
        hidden_size: 256,
        vocab_size: VOCAB,
        max_context: 2048,
        embedding: EmbeddingSpec { scale: 12.0 },
        layers: vec![
            LayerSpec {
                mixer_norm: norm,
                mixer: MixerSpec::Attention(AttentionSpec {
                    heads: 4,
                    kv_heads: 2,
                    head_dim: 64,
                    qkv_bias: true,
                    out_bias: false,
                    qk_norm: Some(norm),
                    rope: Some(0),
                    window: None,
                    scale: 0.125,
                    logit_softcap: None,
                }),
                post_mixer_norm: None,
                ffn_norm: norm,
                ffn: FfnSpec::Gated {
                    intermediate_size: 512,
                    activation: Activation::Silu,
                    bias: false,
                },
                post_ffn_norm: None,
                // Not representable in few digits: must survive JSON.
                residual_scale: 1.4 / 32f32.sqrt(),
            };
            layers
        ],
        final_norm: norm,
        head: HeadSpec {
            tied: false,
            scale: 1.0 / 16.0,
            softcap: None,
        },
        ropes: vec![RopeSpec {
            rotary_dim: 64,
            theta: 1234567.890123456,
            scaling: RopeScaling::None,
        }],
    }
}

/// A generator of bytes that are the same on every machine (xorshift).
pub struct Bytes(u64);

impl Bytes {
    pub fn new(seed: u64) -> Bytes {
        Bytes(seed | 1)
    }

    pub fn next(&mut self) -> u8 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 24) as u8
    }
}

/// Takes the weights that are no finite numbers out of random blocks, which
/// conversion refuses: such a block becomes zeros.
pub fn make_finite(dtype: DType, data: &mut [u8]) {
    for block in data.chunks_exact_mut(dtype.block_bytes()) {
        if matches!(
            formats::check_finite(dtype, block),
            Err(FormatError::NotFinite { .. })
        ) {
            block.fill(0);
        }
    }
}

pub struct MemorySource {
    pub tensors: BTreeMap<String, (TensorInfo, Vec<u8>)>,
}

impl MemorySource {
    /// Random blocks: `matrix` for matrices, `vector` for norms and biases.
    pub fn random(spec: &ModelSpec, matrix: DType, vector: DType) -> MemorySource {
        let mut bytes = Bytes::new(0x9e3779b97f4a7c15);
        let tensors = spec.tensors().into_iter().map(|d| {
            let is_vector = matches!(d.role, TensorRole::Norm | TensorRole::Bias);
            let dtype = if is_vector { vector } else { matrix };
            let n = d.shape.bytes(dtype).unwrap();
            let mut data: Vec<u8> = (0..n).map(|_| bytes.next()).collect();
            if dtype == DType::TQ2_0 {
                // Code 3 does not exist.
                for block in data.chunks_exact_mut(66) {
                    for b in &mut block[..64] {
                        *b &= !(*b >> 1 & 0x55);
                    }
                }
            }
            make_finite(dtype, &mut data);
            let info = TensorInfo {
                dtype,
                shape: d.shape,
            };
            (d.name, (info, data))
        });
        MemorySource {
            tensors: tensors.collect(),
        }
    }
}

impl TensorSource for MemorySource {
    fn origin(&self) -> &str {
        "memory"
    }
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }
    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.get(name).map(|(info, _)| info.clone())
    }
    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        match self.tensors.get(name) {
            Some((_, data)) => Ok(Cow::Borrowed(data)),
            None => Err(SourceError::Missing {
                origin: "memory".into(),
                name: name.into(),
            }),
        }
    }
}

pub fn text() -> TextAssets {
    TextAssets {
        tokenizer_json: Some(
            br#"{"version":"1.0","added_tokens":[{"id":39,"content":"<end>"}]}"#.to_vec(),
        ),
        config: TextConfig {
            chat_template: Some("{{ messages[0].content }}\n".into()),
            bos: Some(SpecialToken {
                content: "<s>".into(),
                id: Some(1),
            }),
            eos: Some(SpecialToken {
                content: "<end>".into(),
                id: None,
            }),
            generation_eos_ids: vec![2],
            ..TextConfig::default()
        },
    }
}

/// Digest of the source that [`origin`] names.
pub fn tiny_digest() -> String {
    blake3::hash(b"tiny").to_hex().to_string()
}

pub fn origin(weights: WeightsKind) -> SourceRecord {
    SourceRecord {
        kind: SourceKind::Gguf,
        name: "tiny.gguf".into(),
        architecture: "tiny".into(),
        digest: Some(tiny_digest()),
        revision: None,
        weights,
        permuted_qk: false,
        notes: vec![],
        declared: None,
    }
}

/// Converts a random model of Q4_0 matrices and F16 vectors.
pub fn convert_tiny(target: &Path) -> ConvertReport {
    convert_with(target, &ConvertOptions::default())
}

pub fn convert_with(target: &Path, options: &ConvertOptions<'_>) -> ConvertReport {
    let spec = spec(1);
    let source = MemorySource::random(&spec, DType::Q4_0, DType::F16);
    convert(
        &source,
        &spec,
        &text(),
        origin(WeightsKind::Quantized),
        options,
        target,
    )
    .unwrap()
}

/// All files of a folder by relative path.
pub fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path.strip_prefix(dir).unwrap().display().to_string();
                out.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    out
}
