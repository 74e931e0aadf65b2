//! Whether blocks hold nothing but finite weights.
//!
//! A look at the few fields that can hold an infinity or a NaN settles almost
//! every block; only where one looks wrong the block is decoded, which tells the
//! element. Integer factors cannot make an infinity of a finite fp16 scale: they
//! stay below 2^8, fp16 below 2^16.

use super::{FormatError, MAX_BLOCK, decode, expect_whole_blocks, f32_at, u16_at};
use crate::DType;

/// Bytes looked at before the loop may end: long enough for wide vectors.
const STRIDE: usize = 4096;

/// Whether an fp16 has the exponent of infinities and NaNs.
fn f16_suspect(bits: u16) -> bool {
    bits & 0x7c00 == 0x7c00
}

/// Whether `scale * code + min` may overflow for some code, or is NaN.
pub(crate) fn single_suspect(scale: f32, min: f32) -> bool {
    !(scale.abs() * 128.0 + min.abs()).is_finite()
}

/// Exponents of an MXFP4 block whose largest level leaves fp32, and the NaN.
const MXFP4_SUSPECT: u8 = 253;
/// NaN in the standard of MXFP4, whatever the levels.
const MXFP4_NAN: u8 = 255;

/// Offsets of the fp16 fields of a block, apart from IQ1_M's, which is spread.
const fn f16_fields(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        DType::TQ1_0 => &[52],
        DType::TQ2_0 => &[64],
        DType::Q4_0
        | DType::Q5_0
        | DType::Q8_0
        | DType::IQ4_NL
        | DType::IQ4_XS
        | DType::IQ2_XXS
        | DType::IQ2_XS
        | DType::IQ2_S
        | DType::IQ3_XXS
        | DType::IQ3_S
        | DType::IQ1_S => &[0],
        DType::F32
        | DType::F16
        | DType::BF16
        | DType::IQ1_M
        | DType::MXFP4
        | DType::I8G16
        | DType::I8G32 => &[],
    }
}

/// Whether a quantized block may hold a weight that is not finite.
fn block_suspect(dtype: DType, block: &[u8]) -> bool {
    match dtype {
        // The top nibbles of the last and of the last but one word of four have
        // sign and exponent.
        DType::IQ1_M => {
            let top = u16_at(block, 54) & 0xf000 | (u16_at(block, 52) & 0xf000) >> 4;
            f16_suspect(top)
        }
        DType::MXFP4 => block[0] >= MXFP4_SUSPECT,
        DType::I8G16 | DType::I8G32 => single_suspect(f32_at(block, 0), f32_at(block, 4)),
        _ => f16_fields(dtype)
            .iter()
            .any(|&at| f16_suspect(u16_at(block, at))),
    }
}

/// Whether plain floats, in whatever order, are all finite.
pub(crate) fn floats_finite(dtype: DType, bytes: &[u8]) -> bool {
    // No early end within a stride, so that it becomes vector code.
    let any16 = |part: &[u8], mask: u16| {
        let (elements, _) = part.as_chunks::<2>();
        elements.iter().fold(false, |any, &e| {
            any | (u16::from_le_bytes(e) & mask == mask)
        })
    };
    let any32 = |part: &[u8]| {
        let (elements, _) = part.as_chunks::<4>();
        elements.iter().fold(false, |any, &e| {
            any | (u32::from_le_bytes(e) & 0x7f80_0000 == 0x7f80_0000)
        })
    };
    !bytes.chunks(STRIDE).any(|part| match dtype {
        DType::F16 => any16(part, 0x7c00),
        DType::BF16 => any16(part, 0x7f80),
        _ => any32(part),
    })
}

/// Checks that whole blocks of `dtype` decode to finite weights only: no infinity
/// and no NaN among values, scales or minimums. An MXFP4 block with the exponent
/// 255 is refused whatever its levels: the standard calls it NaN.
///
/// # Errors
///
/// [`FormatError::PartialBlock`]; [`FormatError::NotFinite`] with the first such
/// weight; [`FormatError::InvalidCode`] where a block that has to be decoded for
/// that has an undefined code.
pub fn check_finite(dtype: DType, bytes: &[u8]) -> Result<(), FormatError> {
    expect_whole_blocks(dtype, bytes)?;
    if dtype.is_float() && floats_finite(dtype, bytes) {
        return Ok(());
    }
    let mut values = [0f32; MAX_BLOCK];
    let values = &mut values[..dtype.block_len()];
    for (index, block) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
        if !dtype.is_float() && !block_suspect(dtype, block) {
            continue;
        }
        let not_finite = |element: usize, value: f32| FormatError::NotFinite {
            dtype,
            index: index * dtype.block_len() + element,
            value,
        };
        if dtype == DType::MXFP4 && block[0] == MXFP4_NAN {
            return Err(not_finite(0, f32::NAN));
        }
        decode(dtype, block, values).map_err(|e| e.in_block(index))?;
        if let Some(element) = values.iter().position(|v| !v.is_finite()) {
            return Err(not_finite(element, values[element]));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the same sequence on every machine (xorshift).
    fn bytes(seed: u64, n: usize) -> Vec<u8> {
        let mut state = seed | 1;
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        std::iter::repeat_with(next).take(n).collect()
    }

    /// Whatever the bytes, the check says what decoding says.
    #[test]
    fn the_check_agrees_with_decoding() {
        for dtype in DType::ALL {
            let (len, size) = (dtype.block_len(), dtype.block_bytes());
            let mut found = [0usize; 2];
            for (seed, fill) in
                (1..=400).flat_map(|s| [None, Some(0xff), Some(0x7c)].map(|f| (s, f)))
            {
                let mut block = bytes(seed, size);
                // Also exponents at the edge, which random bytes seldom have.
                if let Some(fill) = fill {
                    let ends = [0, 1, 3, 7].into_iter().chain(size.saturating_sub(3)..size);
                    ends.filter(|at| *at < size).for_each(|at| block[at] = fill);
                }
                if dtype == DType::TQ2_0 {
                    // Code 3 does not exist.
                    block[..64].iter_mut().for_each(|b| *b &= !(*b >> 1 & 0x55));
                }
                let mut values = vec![0f32; len];
                if decode(dtype, &block, &mut values).is_err() {
                    continue;
                }
                let wrong = values.iter().position(|v| !v.is_finite());
                let nan = dtype == DType::MXFP4 && block[0] == 255;
                let expected = wrong.is_none() && !nan;
                found[usize::from(expected)] += 1;
                match check_finite(dtype, &block) {
                    Ok(()) => assert!(expected, "{dtype}: {wrong:?}"),
                    Err(FormatError::NotFinite { index, .. }) => {
                        assert!(!expected, "{dtype}");
                        assert!(nan || Some(index) == wrong, "{dtype}");
                    }
                    Err(e) => panic!("{dtype}: {e}"),
                }
            }
            assert!(found[0] > 0 && found[1] > 0, "{dtype}: {found:?}");
        }
    }

    /// Every field that holds a number, whole kinds: an infinity or NaN in it is found.
    #[test]
    fn every_fp16_field_is_looked_at() {
        for dtype in DType::ALL
            .into_iter()
            .filter(|d| !f16_fields(*d).is_empty())
        {
            for &at in f16_fields(dtype) {
                for bad in [0x7c00u16, 0xfc00, 0x7e00] {
                    // Two blocks, the second one at fault.
                    let mut data = vec![0u8; 2 * dtype.block_bytes()];
                    data[dtype.block_bytes() + at..][..2].copy_from_slice(&bad.to_le_bytes());
                    let e = check_finite(dtype, &data).unwrap_err();
                    assert!(
                        matches!(e, FormatError::NotFinite { index, .. } if index >= dtype.block_len()),
                        "{dtype} at {at}: {e}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_element_is_named() {
        let mut data = vec![0u8; 100 * 4];
        data[97 * 4..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        let e = check_finite(DType::F32, &data).unwrap_err();
        assert_eq!(
            e.to_string(),
            "F32 element 97 is inf: expected a finite number"
        );
        // Largest exponent of MXFP4 that no level leaves fp32 with: 2^(252 - 127) * 6.
        for (e, ok) in [(252, true), (253, false), (254, false), (255, false)] {
            let mut block = [0x77; 17];
            block[0] = e;
            assert_eq!(check_finite(DType::MXFP4, &block).is_ok(), ok, "{e}");
        }
        // Levels of zero: only the exponent that is no number is refused.
        for (e, ok) in [(254, true), (255, false)] {
            let mut block = [0; 17];
            block[0] = e;
            assert_eq!(check_finite(DType::MXFP4, &block).is_ok(), ok, "{e}");
        }
        assert!(check_finite(DType::F16, &[0; 3]).is_err());
    }
}
