//! IQ4_NL, IQ4_XS and MXFP4: four-bit indices into sixteen integer levels.
//!
//! ```text
//! IQ4_NL  d:f16 nibbles[16]                              32 elements, w = d * level
//! IQ4_XS  d:f16 scales_high:u16 scales_low[4] nibbles[128]  256 elements in groups of 32,
//!                                                        w = (d * (s - 32)) * level
//! MXFP4   e:u8 nibbles[16]                               32 elements, w = 2^(e - 128) * level
//! ```
//!
//! In each group of 32, byte `j` of 16 holds elements `j` (low) and `16 + j` (high).

use super::{Groups, InvalidCode, f16_at, u16_at};

/// Levels of IQ4_NL and IQ4_XS: denser near zero, as weights are.
const IQ4_LEVELS: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// FP4 (E2M1) numbers, doubled so that they are integers. Code 8, minus zero,
/// reads as plain zero.
const FP4_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The level of element `i` of a group of 32.
fn level(levels: &[i8; 16], nibbles: &[u8], i: usize) -> i8 {
    levels[usize::from((nibbles[i % 16] >> (i / 16 * 4)) & 0x0f)]
}

pub(super) fn unpack_iq4_nl(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    into.scales[0] = f16_at(block, 0);
    for i in 0..32 {
        into.codes[i] = level(&IQ4_LEVELS, &block[2..], i);
    }
    Ok(())
}

pub(super) fn unpack_iq4_xs(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let d = f16_at(block, 0);
    let (high, low, nibbles) = (u16_at(block, 2), &block[4..8], &block[8..]);
    for g in 0..8 {
        let low = (low[g / 2] >> (g % 2 * 4)) & 0x0f;
        let high = (high >> (2 * g)) as u8 & 3;
        let scale = (low | (high << 4)) as i8 - 32;
        into.scales[g] = d * f32::from(scale);
        for i in 0..32 {
            into.codes[g * 32 + i] = level(&IQ4_LEVELS, &nibbles[g * 16..], i);
        }
    }
    Ok(())
}

/// `2^(e - 128)`: the block exponent, halved because the levels are doubled. The
/// two smallest are fp32 subnormals. Exponent 255, NaN in the standard, is read as
/// a number like the others.
fn mxfp4_scale(e: u8) -> f32 {
    f32::from_bits(match e {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        _ => u32::from(e - 1) << 23,
    })
}

pub(super) fn unpack_mxfp4(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    into.scales[0] = mxfp4_scale(block[0]);
    for i in 0..32 {
        into.codes[i] = level(&FP4_LEVELS, &block[1..], i);
    }
    Ok(())
}
