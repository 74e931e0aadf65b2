//! Properties of all formats on arbitrary input.

use carat_tensor::DType;
use carat_tensor::formats::{self, FormatError};
use proptest::prelude::*;

fn any_dtype() -> impl Strategy<Value = DType> {
    proptest::sample::select(DType::ALL.to_vec())
}

fn quantized() -> impl Strategy<Value = DType> {
    let list: Vec<_> = DType::ALL.into_iter().filter(|d| !d.is_float()).collect();
    proptest::sample::select(list)
}

/// Makes code 3 of TQ2_0 into code 2, so that any bytes are a block.
fn legalise(dtype: DType, bytes: &mut [u8]) {
    if dtype == DType::TQ2_0 {
        for block in bytes.chunks_exact_mut(66) {
            for b in &mut block[..64] {
                *b &= !((*b & (*b >> 1)) & 0x55);
            }
        }
    }
}

/// Arbitrary whole blocks of an arbitrary format of `of`.
fn blocks(of: impl Strategy<Value = DType>) -> impl Strategy<Value = (DType, Vec<u8>)> {
    (of, 1usize..4).prop_flat_map(|(dtype, n)| {
        let bytes = proptest::collection::vec(any::<u8>(), n * dtype.block_bytes());
        bytes.prop_map(move |mut bytes| {
            legalise(dtype, &mut bytes);
            (dtype, bytes)
        })
    })
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    formats::decode(dtype, bytes, &mut out).unwrap();
    out
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0xa5; dtype.row_bytes(values.len()).unwrap()];
    formats::encode(dtype, values, &mut out).unwrap();
    out
}

/// Bits, with all NaNs alike.
fn canonical(values: &[f32]) -> Vec<u32> {
    let bits = |v: &f32| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() };
    values.iter().map(bits).collect()
}

fn f16(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_length_and_no_bytes_panic(
        dtype in any_dtype(),
        bytes in proptest::collection::vec(any::<u8>(), 0..700),
        elements in 0usize..700,
    ) {
        let mut out = vec![0.0; elements];
        let fits = dtype.row_bytes(elements) == Some(bytes.len());
        match formats::decode(dtype, &bytes, &mut out) {
            Ok(()) => prop_assert!(fits),
            Err(FormatError::InvalidCode { .. }) => prop_assert!(fits && dtype == DType::TQ2_0),
            Err(_) => prop_assert!(!fits),
        }
        let whole = bytes.len().is_multiple_of(dtype.block_bytes());
        let check = formats::check(dtype, &bytes);
        prop_assert!(whole || check.is_err());
        if !dtype.is_float() {
            prop_assert_eq!(formats::to_int8_groups(dtype, &bytes).err(), check.err());
        }
        let tq1 = bytes.len().is_multiple_of(DType::TQ1_0.block_bytes());
        prop_assert_eq!(formats::tq1_0_to_tq2_0(&bytes).is_ok(), tq1);
    }

    #[test]
    fn encoders_refuse_lengths_that_do_not_match(
        dtype in any_dtype(),
        elements in 0usize..300,
        bytes in 0usize..700,
    ) {
        let values = vec![1.0; elements];
        let mut out = vec![0; bytes];
        let ok = formats::encode(dtype, &values, &mut out).is_ok();
        let fits = dtype.row_bytes(elements) == Some(bytes);
        prop_assert_eq!(ok, formats::can_encode(dtype) && fits);
    }

    /// Infinite and NaN scales included.
    #[test]
    fn integer_groups_decode_to_the_same_bits((dtype, bytes) in blocks(quantized())) {
        let (target, groups) = formats::to_int8_groups(dtype, &bytes).unwrap();
        prop_assert_eq!(
            canonical(&decoded(target, &groups)),
            canonical(&decoded(dtype, &bytes))
        );
        // Restating what is restated changes nothing.
        let (again, same) = formats::to_int8_groups(target, &groups).unwrap();
        prop_assert_eq!((again, same), (target, groups));
    }

    #[test]
    fn any_tq1_0_is_ternary_and_becomes_tq2_0(
        bytes in proptest::collection::vec(any::<u8>(), 54)
    ) {
        let restated = formats::tq1_0_to_tq2_0(&bytes).unwrap();
        prop_assert_eq!(formats::check(DType::TQ2_0, &restated), Ok(()));
        prop_assert_eq!(
            canonical(&decoded(DType::TQ1_0, &bytes)),
            canonical(&decoded(DType::TQ2_0, &restated))
        );
        prop_assert_eq!(&restated[64..], &bytes[52..]);
        // And back: the same trits and scale, and nothing left to change.
        let dense = formats::tq2_0_to_tq1_0(&restated).unwrap();
        prop_assert_eq!(&formats::tq1_0_to_tq2_0(&dense).unwrap(), &restated);
        let mut invalid = restated.clone();
        invalid[0] |= 3;
        prop_assert!(formats::tq2_0_to_tq1_0(&invalid).is_err());
    }

    /// Arbitrary finite values either encode or overflow, and what is encoded decodes
    /// to finite numbers.
    #[test]
    fn encoders_stay_finite(
        bits in proptest::collection::vec(any::<u32>(), 256),
        exponent_cap in 0u32..255,
    ) {
        // Exponents up to a cap, so that all magnitudes get whole blocks.
        let values: Vec<f32> = bits
            .iter()
            .map(|b| {
                let exponent = (b >> 23 & 0xff) % (exponent_cap + 1);
                f32::from_bits(b & 0x807f_ffff | exponent << 23)
            })
            .collect();
        for dtype in DType::ALL.into_iter().filter(|&d| formats::can_encode(d)) {
            let mut out = vec![0u8; dtype.row_bytes(256).unwrap()];
            match formats::encode(dtype, &values, &mut out) {
                Ok(()) => prop_assert!(decoded(dtype, &out).iter().all(|v| v.is_finite())),
                Err(FormatError::Overflow { index, .. }) => {
                    // fp16 ends at 65504; no format ends below it.
                    prop_assert!(values.iter().any(|v| v.abs() > 65504.0));
                    prop_assert_eq!(index % dtype.block_len(), 0);
                }
                Err(other) => return Err(TestCaseError::fail(format!("{dtype}: {other}"))),
            }
        }
    }

    /// What a symmetric encoder made, it makes again from the decoded values:
    /// a nonzero scale is recovered exactly, since products of an fp16 scale and
    /// a code are exact in fp32.
    #[test]
    fn symmetric_encoders_are_idempotent(
        values in proptest::collection::vec(-1.0f32..1.0, 256),
        power in -8i32..12,
    ) {
        let values: Vec<f32> = values.iter().map(|v| v * 2f32.powi(power)).collect();
        for dtype in [
            DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q5_0, DType::Q8_0,
            DType::TQ1_0, DType::TQ2_0,
        ] {
            let first = encoded(dtype, &values);
            let second = encoded(dtype, &decoded(dtype, &first));
            prop_assert_eq!(first, second, "{}", dtype);
        }
    }

    /// On the grid of Q4_1 and Q5_1, with both ends in use. `d * q + m` rounds in
    /// fp32 to within 2^-24 of itself; recovering `d` from it is off by at most
    /// 2^-24 * |m| / d + a few ulp, which must stay below half an fp16 ulp (2^-12):
    /// so |m| < 1000 d.
    #[test]
    fn ranged_grids_are_kept(
        d in 0x0400u16..0x5400,
        steps in -900i32..900,
        codes in proptest::collection::vec(0u8..32, 32),
    ) {
        let d = f16(d);
        let m = half::f16::from_f32(d * steps as f32);
        for (dtype, top) in [(DType::Q4_1, 15u8), (DType::Q5_1, 31)] {
            let mut codes: Vec<u8> = codes.iter().map(|c| c % (top + 1)).collect();
            (codes[3], codes[29]) = (0, top);
            let values: Vec<f32> =
                codes.iter().map(|&q| d * f32::from(q) + m.to_f32()).collect();
            let block = encoded(dtype, &values);
            prop_assert_eq!(canonical(&decoded(dtype, &block)), canonical(&values), "{}", dtype);
        }
    }

    /// Half a step, plus the rounding of the scale's reciprocal, of the product and
    /// of the decoded value: each 2^-24 of at most 127 steps.
    #[test]
    fn integer_group_encoders_err_by_half_a_step(
        values in proptest::collection::vec(-1.0f32..1.0, 32),
        power in -100i32..100,
    ) {
        let values: Vec<f32> = values.iter().map(|v| v * 2f32.powi(power)).collect();
        for dtype in [DType::I8G16, DType::I8G32] {
            let block = encoded(dtype, &values);
            let found = decoded(dtype, &block);
            let group = dtype.block_len();
            for (x, w) in values.chunks(group).zip(found.chunks(group)) {
                let largest = x.iter().fold(0f64, |a, &v| a.max(f64::from(v).abs()));
                let bound = largest / 127.0 * 0.5 + largest * 3.0 * 2f64.powi(-23);
                for (x, w) in x.iter().zip(w) {
                    prop_assert!((f64::from(*x) - f64::from(*w)).abs() <= bound);
                }
            }
        }
    }
}

#[test]
fn encodable_formats() {
    let can: Vec<&str> = DType::ALL
        .into_iter()
        .filter(|&d| formats::can_encode(d))
        .map(DType::name)
        .collect();
    let expected = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q6_K TQ1_0 TQ2_0 I8G16 I8G32";
    assert_eq!(can.join(" "), expected);
}

#[test]
fn only_finite_values_are_encoded() {
    for dtype in DType::ALL.into_iter().filter(|&d| formats::can_encode(d)) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.5; 512];
            values[300] = bad;
            let mut out = vec![0xa5; dtype.row_bytes(512).unwrap()];
            let error = formats::encode(dtype, &values, &mut out).unwrap_err();
            assert!(
                matches!(error, FormatError::NonFinite { index: 300, .. }),
                "{dtype}: {error}"
            );
            assert!(out.iter().all(|&b| b == 0xa5), "{dtype} wrote");
        }
    }
}

#[test]
fn overflow_is_an_error_not_an_infinity() {
    // Rounds to fp16 infinity as a value or as a trit's scale; 32 steps of it do so
    // in every other format with an fp16 scale.
    let cases = [
        (DType::F16, 65520.0),
        (DType::BF16, f32::MAX),
        (DType::TQ1_0, 65520.0),
        (DType::TQ2_0, 65520.0),
        (DType::Q4_0, 65520.0 * 8.0),
        (DType::Q4_1, 65520.0 * 15.0),
        (DType::Q5_0, 65520.0 * 16.0),
        (DType::Q5_1, 65520.0 * 31.0),
        (DType::Q8_0, 65520.0 * 127.0),
        (DType::Q4_K, 65520.0 * 15.0 * 63.0),
        (DType::Q6_K, 65520.0 * 32.0 * 127.0),
        (DType::Q6_K, f32::MAX),
        (DType::Q4_K, -f32::MAX),
    ];
    for (dtype, value) in cases {
        let mut values = vec![0.0; 512];
        values[256] = value;
        let mut out = vec![0; dtype.row_bytes(512).unwrap()];
        assert_eq!(
            formats::encode(dtype, &values, &mut out),
            Err(FormatError::Overflow { dtype, index: 256 }),
        );
        values[256] = value * (65504.0 / 65520.0) * (1.0 - f32::EPSILON);
        if value.abs() < f32::MAX {
            assert_eq!(formats::encode(dtype, &values, &mut out), Ok(()), "{dtype}");
        }
    }
}

#[test]
fn code_3_of_tq2_0_is_rejected_wherever_it_is() {
    for element in 0..256 {
        // Byte h * 32 + m, bits 2 l, of element h * 128 + l * 32 + m.
        let (h, l, m) = (element / 128, element / 32 % 4, element % 32);
        let mut bytes = vec![0b10_01_00_10u8; 3 * 66];
        bytes[66 + h * 32 + m] |= 3 << (2 * l);
        let expected = Err(FormatError::InvalidCode {
            dtype: DType::TQ2_0,
            block: 1,
            element,
            code: 3,
        });
        assert_eq!(formats::check(DType::TQ2_0, &bytes), expected);
        assert_eq!(
            formats::decode(DType::TQ2_0, &bytes, &mut [0.0; 768]),
            expected
        );
        let groups = formats::to_int8_groups(DType::TQ2_0, &bytes);
        assert_eq!(groups.map(|_| ()), expected);
    }
}

#[test]
fn errors_name_culprit_expected_and_found() {
    let message = |e: Result<(), FormatError>| e.unwrap_err().to_string();
    assert_eq!(
        message(formats::decode(DType::Q4_0, &[0; 17], &mut [0.0; 32])),
        "Q4_0 data has the wrong length: expected 18 bytes, found 17"
    );
    assert_eq!(
        message(formats::decode(DType::Q4_K, &[0; 144], &mut [0.0; 32])),
        "32 elements are not a whole number of Q4_K blocks of 256"
    );
    assert_eq!(
        message(formats::encode(DType::IQ1_S, &[0.0; 256], &mut [0; 50])),
        "IQ1_S has no encoder"
    );
    assert_eq!(
        message(formats::to_int8_groups(DType::BF16, &[]).map(|_| ())),
        "BF16 is not a quantized format: it has no integer codes"
    );
    assert_eq!(formats::int8_group_dtype(DType::F16), None);
}
