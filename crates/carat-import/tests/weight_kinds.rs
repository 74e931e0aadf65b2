//! Row A1.6: ternary weights, latent masters of ternary models and dense weights
//! are told apart, and a latent master is never called ternary.

mod common;

use std::{fs, path::Path};

use carat_import::{WeightKind, open};
use carat_tensor::DType;
use common::{BLOCKS, Tensor, Tiny, open_gguf, write_config, write_safetensors};

/// Large enough that the linears' statistics mean something.
const NET: Tiny = Tiny {
    hidden: 256,
    layers: 2,
    heads: 4,
    kv_heads: 4,
    head_dim: 64,
    ffn: 512,
    vocab: 16,
};

/// Reproducible uniform numbers in 0..1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.next()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.next()).cos()
    }
}

/// The net's tensors with every linear's values drawn by `draw`.
fn drawn(draw: impl Fn(&mut Random) -> f64) -> Vec<Tensor> {
    let mut random = Random(7);
    let mut tensors = NET.tensors();
    for t in tensors.iter_mut().filter(|t| t.linear) {
        for v in &mut t.values {
            *v = (0.05 * draw(&mut random)) as f32;
        }
    }
    tensors
}

fn kind(tensors: &[Tensor], dtype: DType) -> WeightKind {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), tensors, dtype);
    open(dir.path()).unwrap().origin.weights
}

fn write(dir: &Path, tensors: &[Tensor], dtype: DType) {
    write_config(dir, &NET.config());
    write_safetensors(&dir.join("model.safetensors"), tensors, dtype);
}

#[test]
fn smooth_distributions_are_dense() {
    let heavy = |r: &mut Random| r.normal() / r.next().max(0.05).sqrt();
    let laplace = |r: &mut Random| (1.0 - r.next()).ln() * if r.next() < 0.5 { 1.0 } else { -1.0 };
    let mixture = |r: &mut Random| r.normal() * if r.next() < 0.1 { 4.0 } else { 1.0 };
    // Most weights pruned to zero.
    let sparse = |r: &mut Random| if r.next() < 0.7 { 0.0 } else { r.normal() };
    for dtype in [DType::BF16, DType::F32] {
        assert_eq!(kind(&drawn(Random::normal), dtype), WeightKind::Dense);
        assert_eq!(kind(&drawn(|r| r.next() - 0.5), dtype), WeightKind::Dense);
        assert_eq!(kind(&drawn(heavy), dtype), WeightKind::Dense);
        assert_eq!(kind(&drawn(laplace), dtype), WeightKind::Dense);
        assert_eq!(kind(&drawn(mixture), dtype), WeightKind::Dense);
        assert_eq!(kind(&drawn(sparse), dtype), WeightKind::Dense);
    }
}

/// Weights as ternary training leaves them: some of them have drifted to the
/// threshold, half the mean magnitude (0.8 for a normal distribution), and hover
/// about it.
fn latent(share: f64) -> impl Fn(&mut Random) -> f64 {
    move |r| {
        if r.next() < share {
            let sign = if r.next() < 0.5 { 1.0 } else { -1.0 };
            sign * (0.4 + 0.04 * r.normal())
        } else {
            r.normal()
        }
    }
}

/// The ternary form of a net: sign times one scale per 256 weights, zero below
/// half the mean magnitude.
fn ternarized(mut tensors: Vec<Tensor>) -> Vec<Tensor> {
    for t in tensors.iter_mut().filter(|t| t.linear) {
        for block in t.values.chunks_mut(256) {
            let mean = block.iter().map(|w| w.abs()).sum::<f32>() / block.len() as f32;
            let scale = half_rounded(mean);
            for w in block {
                *w = (*w / mean).round().clamp(-1.0, 1.0) * scale;
            }
        }
    }
    tensors
}

/// A scale that every float format stores exactly.
fn half_rounded(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0xffff_0000)
}

#[test]
fn a_latent_master_and_its_ternary_export() {
    let master = drawn(latent(0.15));
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        assert_eq!(kind(&master, dtype), WeightKind::TernaryLatent);
        assert_eq!(
            kind(&ternarized(drawn(latent(0.15))), dtype),
            WeightKind::Ternary
        );
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &master, DType::BF16);
    let notes = open(dir.path()).unwrap().origin.notes;
    assert!(notes[0].contains("latent master"), "{notes:?}");
}

#[test]
fn one_other_magnitude_is_not_ternary() {
    let mut tensors = ternarized(drawn(Random::normal));
    let last = tensors.iter_mut().rfind(|t| t.linear).unwrap();
    let w = last.values.iter_mut().rfind(|w| **w != 0.0).unwrap();
    *w *= 2.0;
    assert_eq!(kind(&tensors, DType::F32), WeightKind::Dense);
}

#[test]
fn nothing_but_zeros_is_not_ternary() {
    assert_eq!(kind(&drawn(|_| 0.0), DType::F32), WeightKind::Dense);
    let mut tensors = drawn(Random::normal);
    tensors[2].values[3] = f32::NAN;
    assert_eq!(kind(&tensors, DType::F32), WeightKind::Dense);
}

#[test]
fn stored_formats_decide_in_gguf() {
    // Here each linear fits the format.
    let tiny = Tiny {
        heads: 4,
        head_dim: 64,
        kv_heads: 4,
        ..BLOCKS
    };
    for (dtype, expected) in [
        (DType::TQ1_0, WeightKind::Ternary),
        (DType::TQ2_0, WeightKind::Ternary),
        (DType::Q8_0, WeightKind::Quantized),
        (DType::F16, WeightKind::Dense),
    ] {
        let c = open_gguf(&tiny.gguf(dtype)).unwrap();
        assert_eq!(c.origin.weights, expected, "{dtype}");
    }
}

#[test]
fn empty_folders_of_weights_do_not_pass() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &NET.config());
    fs::write(
        dir.path().join("model.safetensors"),
        b"\x02\0\0\0\0\0\0\0{}",
    )
    .unwrap();
    let text = open(dir.path()).unwrap_err().to_string();
    assert!(text.contains("is missing"), "{text}");
}
