//! Streaming holds one layer in fp32, whatever the size of the model. The only
//! test of its program, because it measures the whole process.

#![allow(clippy::print_stderr)] // tests say what they measured

mod common;

use std::borrow::Cow;
use std::io::Write as _;

use carat_bundle::source::{SourceError, TensorInfo, TensorSource};
use carat_bundle::spec::*;
use carat_oracle::{Oracle, OracleOptions, Rows};
use carat_tensor::DType;
use common::everything;

/// All tensors of a spec, each the same bytes over and over: matrices in TQ2_0,
/// vectors in fp32.
struct Repeated {
    spec: ModelSpec,
    ternary: Vec<u8>,
    ones: Vec<u8>,
}

impl Repeated {
    fn new(spec: ModelSpec) -> Repeated {
        // 256 codes of all three kinds, then the scale 2^-8 in half precision.
        let mut block: Vec<u8> = (0..64).map(|i| [0x86, 0x19, 0x24, 0x52][i % 4]).collect();
        block.extend([0x00, 0x1c]);
        let decls = spec.tensors();
        let most = |matrix: bool, dtype| {
            let fits = decls
                .iter()
                .filter(|t| (t.shape.dims().len() == 2) == matrix);
            fits.map(|t| t.shape.bytes(dtype).unwrap()).max().unwrap()
        };
        let ternary = block.repeat(most(true, DType::TQ2_0) / block.len());
        let ones = 1f32.to_le_bytes().repeat(most(false, DType::F32) / 4);
        Repeated {
            spec,
            ternary,
            ones,
        }
    }
}

impl TensorSource for Repeated {
    fn origin(&self) -> &str {
        "repeated"
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.spec.tensors().into_iter().map(|t| t.name).collect();
        names.sort();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let decl = self.spec.tensors().into_iter().find(|t| t.name == name)?;
        let dtype = if decl.shape.dims().len() == 2 {
            DType::TQ2_0
        } else {
            DType::F32
        };
        Some(TensorInfo {
            dtype,
            shape: decl.shape,
        })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        let info = self.info(name).unwrap();
        let bytes = info.shape.bytes(info.dtype).unwrap();
        let all = if info.dtype == DType::F32 {
            &self.ones
        } else {
            &self.ternary
        };
        Ok(Cow::Borrowed(&all[..bytes]))
    }
}

/// A plain model of these sizes.
fn model(hidden: usize, inner: usize, layers: usize, vocab: usize) -> ModelSpec {
    let norm = NormSpec {
        eps: 1e-5,
        weight_offset: 0.0,
    };
    let layer = LayerSpec {
        mixer_norm: norm,
        mixer: MixerSpec::Attention(AttentionSpec {
            heads: hidden / 128,
            kv_heads: hidden / 512,
            head_dim: 128,
            qkv_bias: false,
            out_bias: false,
            qk_norm: None,
            rope: None,
            window: None,
            scale: 0.1,
            logit_softcap: None,
        }),
        post_mixer_norm: None,
        ffn_norm: norm,
        ffn: FfnSpec::Gated {
            intermediate_size: inner,
            activation: Activation::Silu,
            bias: false,
        },
        post_ffn_norm: None,
        residual_scale: 1.0,
    };
    ModelSpec {
        hidden_size: hidden,
        vocab_size: vocab,
        layers: vec![layer; layers],
        head: HeadSpec {
            tied: true,
            scale: 1.0,
            softcap: None,
        },
        ..everything()
    }
}

/// Most memory that the process has held since the last call, in bytes.
fn peak_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[test]
fn streaming_holds_one_layer_and_a_block_of_the_head() {
    // With CARAT_TEST_LARGE, the shape of an 8B model, which must stay under 4 GB.
    let large = std::env::var_os("CARAT_TEST_LARGE").is_some();
    let (spec, tokens) = match large {
        true => (model(4096, 14336, 32, 128_256), 40),
        false => (model(1024, 2816, 16, 65_536), 40),
    };
    let fp32 = |t: &TensorDecl| t.shape.elements().unwrap() * 4;
    let tensors = spec.tensors();
    let whole: usize = tensors.iter().map(fp32).sum();
    let layer: usize = tensors
        .iter()
        .filter(|t| t.name.starts_with("layers.0."))
        .map(fp32)
        .sum();
    let source = Repeated::new(spec.clone());
    let options = OracleOptions {
        resident_bytes: 0,
        threads: 2,
        ..OracleOptions::new(1024)
    };
    let told = options.memory(&spec, tokens as usize);
    let told = (told.weights + told.cache + told.scratch) as usize;
    let oracle = Oracle::new(&spec, &source, options).unwrap();
    let Some(before) = peak_bytes() else {
        // Past the capture of passing tests.
        let why = "this system does not tell a process's peak memory";
        let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
        return;
    };
    let ids: Vec<u32> = (0..tokens).collect();
    let started = std::time::Instant::now();
    let logits = oracle.forward(&[&ids], Rows::Last).unwrap().remove(0);
    assert!(logits.data.iter().all(|v| v.is_finite()));
    let used = peak_bytes().unwrap() - before;
    eprintln!(
        "{tokens} tokens: {} MiB over {} MiB before, {} MiB per layer, {} MiB in all; {:.1} s",
        used >> 20,
        before >> 20,
        layer >> 20,
        whole >> 20,
        started.elapsed().as_secs_f64()
    );
    // One layer, a block of 64 MiB of the head, the activations (per token less than
    // eight rows as wide as the residual and four as wide as the feed-forward), logits of
    // one row; then some MiB of scratch per thread and of the allocator.
    let FfnSpec::Gated {
        intermediate_size: inner,
        ..
    } = spec.layers[0].ffn;
    let activations = ids.len() * (8 * spec.hidden_size + 4 * inner) * 4;
    let expected = layer + (64 << 20) + activations + spec.vocab_size * 8;
    assert!(
        used <= expected + (32 << 20),
        "{used} bytes, expected {expected}"
    );
    assert!(expected + (32 << 20) < whole / 3, "the test is too weak");
    // What callers are told beforehand covers it, and is no excuse to refuse.
    assert!(
        used <= told + (32 << 20) && told < expected + (64 << 20),
        "{used} bytes, told {told}"
    );
    if large {
        assert!(before + used < 4_000_000_000);
    }
}
