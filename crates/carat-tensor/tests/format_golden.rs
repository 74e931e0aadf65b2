//! Every format against the `gguf` Python package, bit for bit. The files are
//! made by `scripts/make_format_golden.py`, which says what the blocks cover.

use std::path::{Path, PathBuf};

use carat_tensor::{DType, formats};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn bytes(path: &str) -> Vec<u8> {
    let path = golden().join(path);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn values(path: &str) -> Vec<f32> {
    let bytes = bytes(path);
    assert!(bytes.len().is_multiple_of(4), "{path}");
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|w| f32::from_le_bytes(*w)).collect()
}

fn index() -> serde_json::Value {
    serde_json::from_slice(&bytes("index.json")).unwrap()
}

/// The formats that other programs know: all but carat's own two.
fn foreign() -> impl Iterator<Item = DType> {
    DType::ALL
        .into_iter()
        .filter(|d| !matches!(d, DType::I8G16 | DType::I8G32))
}

/// Fails on the first element whose bits differ.
fn assert_same(dtype: DType, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{dtype}");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        assert!(
            f.to_bits() == e.to_bits(),
            "{dtype} block {}, element {}: {f:?} ({:#010x}), expected {e:?} ({:#010x})",
            i / dtype.block_len(),
            i % dtype.block_len(),
            f.to_bits(),
            e.to_bits(),
        );
    }
}

#[test]
fn decoders_equal_the_gguf_package() {
    let index = index();
    for dtype in foreign() {
        let blocks = bytes(&format!("decode/{dtype}.blocks"));
        let expected = values(&format!("decode/{dtype}.values"));
        // A truncated file must not pass as a shorter test.
        let count = index["decode"][dtype.name()].as_u64().unwrap() as usize;
        assert_eq!(blocks.len(), count * dtype.block_bytes(), "{dtype}");
        assert_eq!(expected.len(), count * dtype.block_len(), "{dtype}");

        formats::check(dtype, &blocks).unwrap();
        let mut found = vec![f32::NAN; expected.len()];
        formats::decode(dtype, &blocks, &mut found).unwrap();
        assert_same(dtype, &found, &expected);
    }
}

#[test]
fn integer_groups_hold_the_same_values() {
    for dtype in foreign().filter(|d| !d.is_float()) {
        let blocks = bytes(&format!("decode/{dtype}.blocks"));
        let expected = values(&format!("decode/{dtype}.values"));
        let (target, groups) = formats::to_int8_groups(dtype, &blocks).unwrap();
        assert_eq!(Some(target), formats::int8_group_dtype(dtype));
        let mut found = vec![f32::NAN; expected.len()];
        formats::decode(target, &groups, &mut found).unwrap();
        assert_same(dtype, &found, &expected);
    }
}

#[test]
fn encoders_equal_the_gguf_package() {
    let index = index();
    let input = values("encode/input.values");
    assert_eq!(index["encode_values"], input.len());
    let encoded = index["encode"].as_object().unwrap();
    assert_eq!(encoded.len(), 9);
    for (name, count) in encoded {
        let dtype = DType::from_name(name).unwrap();
        let expected = bytes(&format!("encode/{name}.blocks"));
        assert_eq!(
            count.as_u64().unwrap() as usize * dtype.block_len(),
            input.len()
        );
        let mut found = vec![0xa5; expected.len()];
        formats::encode(dtype, &input, &mut found).unwrap();
        let size = dtype.block_bytes();
        for (i, (f, e)) in found.chunks(size).zip(expected.chunks(size)).enumerate() {
            let at = i * dtype.block_len();
            assert_eq!(
                f,
                e,
                "{dtype} block {i} of {:?}",
                &input[at..at + dtype.block_len()]
            );
        }
    }
}

#[test]
fn tq1_0_becomes_the_same_tq2_0() {
    let blocks = bytes("decode/TQ1_0.blocks");
    let expected = values("decode/TQ1_0.values");
    let restated = formats::tq1_0_to_tq2_0(&blocks).unwrap();
    formats::check(DType::TQ2_0, &restated).unwrap();
    let mut found = vec![f32::NAN; expected.len()];
    formats::decode(DType::TQ2_0, &restated, &mut found).unwrap();
    assert_same(DType::TQ2_0, &found, &expected);
}

/// Every fp16 number, against its definition in exact arithmetic.
#[test]
fn all_fp16_numbers() {
    for bits in 0..=u16::MAX {
        let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(-24),
            31 if fraction == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
        };
        let expected = if bits >> 15 == 1 {
            -magnitude
        } else {
            magnitude
        } as f32;
        let mut found = [0.0];
        formats::decode(DType::F16, &bits.to_le_bytes(), &mut found).unwrap();
        if expected.is_nan() {
            assert!(found[0].is_nan());
            continue;
        }
        assert_eq!(found[0].to_bits(), expected.to_bits(), "{bits:#06x}");
        if expected.is_finite() {
            let mut back = [0u8; 2];
            formats::encode(DType::F16, &found, &mut back).unwrap();
            assert_eq!(back, bits.to_le_bytes());
        }
    }
}
