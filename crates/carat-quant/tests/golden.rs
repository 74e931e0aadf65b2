//! Quantizers against what `coreai-opt` makes of the same weights
//! (`scripts/make_quant_golden.py`).

use carat_quant::{
    linear::{Linear, RangeSearch, Scheme},
    matrix::{Method, Source, quantize},
};
use carat_tensor::{
    DType, GridMatrix,
    grid::{Code, Scale, Spread},
};
use half::f16;
use safetensors::{SafeTensors, tensor::TensorView};

fn golden(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).unwrap()
}

fn floats(view: &TensorView<'_>) -> Vec<f32> {
    let dtype = dtype(view);
    let mut out = vec![0.0; view.shape().iter().product()];
    carat_tensor::formats::decode(dtype, view.data(), &mut out).unwrap();
    out
}

fn dtype(view: &TensorView<'_>) -> DType {
    match view.dtype() {
        safetensors::Dtype::F16 => DType::F16,
        _ => DType::F32,
    }
}

fn source<'a>(view: &'a TensorView<'a>) -> Source<'a> {
    Source {
        dtype: dtype(view),
        rows: view.shape()[0],
        columns: view.shape()[1],
        data: view.data(),
    }
}

fn decoded(matrix: &GridMatrix) -> Vec<f32> {
    let mut out = vec![0.0; matrix.rows * matrix.columns];
    for (row, out) in out.chunks_exact_mut(matrix.columns).enumerate() {
        matrix.decode_row(row, out);
    }
    out
}

fn spread(word: &str) -> Spread {
    match word {
        "tensor" => Spread::Tensor,
        "channel" => Spread::Channel,
        "block16" => Spread::Block(16),
        "block32" => Spread::Block(32),
        "rows8" => Spread::Rows(8),
        "rows16" => Spread::Rows(16),
        _ => panic!("{word}"),
    }
}

/// The quantizer that a case's name describes.
fn linear(case: &str) -> (Linear, Spread) {
    let words: Vec<&str> = case.split('.').collect();
    let code = match words[2] {
        "int8" | "uint8" => Code::Int(8),
        "int4" | "uint4" => Code::Int(4),
        "int2" => Code::Int(2),
        "float8_e4m3fn" => Code::Fp8E4M3,
        "float8_e5m2" => Code::Fp8E5M2,
        _ => Code::Fp4,
    };
    let scale = match words[0] {
        _ if words.contains(&"e8m0") || code == Code::Fp4 => Scale::E8M0,
        "f16" => Scale::F16,
        _ => Scale::F32,
    };
    let scheme = match words[3] {
        "asymmetric" => Scheme::Asymmetric,
        // Unsigned codes have no code without a counterpart to leave out.
        "symmetric_with_clipping" if !words[2].starts_with('u') => Scheme::SymmetricWithClipping,
        _ => Scheme::Symmetric,
    };
    let linear = Linear {
        code,
        scheme,
        scale,
        search: RangeSearch::MinMax,
    };
    (linear, spread(words[1]))
}

#[test]
fn linear_quantizers_equal_the_reference() {
    let bytes = golden("linear.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut cases = 0;
    for (name, expected) in file.iter().filter(|(n, _)| !n.starts_with("weights")) {
        let weights = file.tensor(&format!("weights.{}", &name[..3])).unwrap();
        let (linear, spread) = linear(name);
        let method = Method::Linear { linear, spread };
        let found = decoded(&quantize(&method, source(&weights), None).unwrap());
        // The reference returns its result in the weights' own type.
        let found = found.iter().map(|&w| match dtype(&weights) {
            DType::F16 => f16::from_f32(w).to_f32(),
            _ => w,
        });
        for (i, (found, expected)) in found.zip(floats(&expected)).enumerate() {
            assert_eq!(found, expected, "{name}, element {i}");
        }
        cases += 1;
    }
    assert_eq!(cases, 2 * (4 * 18 + 1));
}

#[test]
fn palettes_equal_the_reference() {
    let bytes = golden("palettes.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut cases = 0;
    for (name, codes) in file.iter() {
        let Some(case) = name.strip_suffix(".codes") else {
            continue;
        };
        let words: Vec<&str> = case.split('.').collect();
        let weights = file.tensor(&format!("weights.{}", words[0])).unwrap();
        let method = Method::Palette {
            bits: words[2].parse().unwrap(),
            spread: spread(words[1]),
            scaled: words.contains(&"scaled"),
            decimals: Some(4),
        };
        let found = quantize(&method, source(&weights), None).unwrap();
        let table = floats(&file.tensor(&format!("{case}.table")).unwrap());
        // The reference keeps fp32 tables for fp32 weights; ours are fp16.
        let table: Vec<f32> = table.iter().map(|&v| f16::from_f32(v).to_f32()).collect();
        assert_eq!(found.tables, table, "{case}");
        assert_eq!(found.codes, codes.data(), "{case}");
        cases += 1;
    }
    assert_eq!(cases, 6 * 3 * 3);
}
