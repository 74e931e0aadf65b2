//! Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 elements under one fp16 scale.
//!
//! ```text
//! Q4_0  d:f16              nibbles[16]     w = d * (q - 8)
//! Q4_1  d:f16 m:f16        nibbles[16]     w = d * q + m
//! Q5_0  d:f16       high:u32 nibbles[16]   w = d * (q - 16)
//! Q5_1  d:f16 m:f16 high:u32 nibbles[16]   w = d * q + m
//! Q8_0  d:f16              codes:i8[32]    w = d * q
//! ```
//!
//! Byte `j` of the nibbles holds element `j` in its low and element `j + 16` in
//! its high half; bit `i` of `high` is the fifth bit of element `i`.

use super::{Groups, InvalidCode, Overflow, f16_at, reciprocal, to_f16, u32_at};

const LEN: usize = 32;

/// The nibble of element `i`.
fn nibble(nibbles: &[u8], i: usize) -> u8 {
    (nibbles[i % 16] >> (4 * (i / 16))) & 0x0f
}

/// The five-bit code of element `i`.
fn five_bits(high: u32, nibbles: &[u8], i: usize) -> u8 {
    nibble(nibbles, i) | (((high >> i) as u8 & 1) << 4)
}

pub(super) fn unpack_q4_0(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    into.scales[0] = f16_at(block, 0);
    for i in 0..LEN {
        into.codes[i] = nibble(&block[2..], i) as i8 - 8;
    }
    Ok(())
}

pub(super) fn unpack_q4_1(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    into.scales[0] = f16_at(block, 0);
    into.mins[0] = f16_at(block, 2);
    for i in 0..LEN {
        into.codes[i] = nibble(&block[4..], i) as i8;
    }
    Ok(())
}

pub(super) fn unpack_q5_0(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    into.scales[0] = f16_at(block, 0);
    let high = u32_at(block, 2);
    for i in 0..LEN {
        into.codes[i] = five_bits(high, &block[6..], i) as i8 - 16;
    }
    Ok(())
}

pub(super) fn unpack_q5_1(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    into.scales[0] = f16_at(block, 0);
    into.mins[0] = f16_at(block, 2);
    let high = u32_at(block, 4);
    for i in 0..LEN {
        into.codes[i] = five_bits(high, &block[8..], i) as i8;
    }
    Ok(())
}

pub(super) fn unpack_q8_0(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    into.scales[0] = f16_at(block, 0);
    for (code, &byte) in into.codes.iter_mut().zip(&block[2..]) {
        *code = byte as i8;
    }
    Ok(())
}

/// The element of largest magnitude, the first of equals, with its sign.
pub(super) fn extreme(values: &[f32]) -> f32 {
    let mut best = values[0];
    for &v in values {
        if v.abs() > best.abs() {
            best = v;
        }
    }
    best
}

/// Smallest and largest element.
fn range(values: &[f32]) -> (f32, f32) {
    let (mut min, mut max) = (values[0], values[0]);
    for &v in values {
        if v < min {
            min = v;
        }
        if v > max {
            max = v;
        }
    }
    (min, max)
}

/// Codes of a format whose range `-half ..= half - 1` is stretched so that the
/// extreme element takes the code `-half`; stored with `half` added.
fn signed_codes(values: &[f32], half: u8) -> Result<(half::f16, [u8; LEN]), Overflow> {
    let half = f32::from(half);
    let scale = extreme(values) / -half;
    let stored = to_f16(scale)?;
    let inverse = reciprocal(scale);
    let mut codes = [0u8; LEN];
    for (code, &v) in codes.iter_mut().zip(values) {
        // Adding half a step and cutting rounds to nearest; the cast saturates at 0.
        *code = (v * inverse + (half + 0.5)).min(2.0 * half - 1.0) as u8;
    }
    Ok((stored, codes))
}

/// Codes `0 ..= top` from the smallest to the largest element.
fn ranged_codes(values: &[f32], top: u8) -> Result<(half::f16, half::f16, [u8; LEN]), Overflow> {
    let (min, max) = range(values);
    let scale = (max - min) / f32::from(top);
    let stored = (to_f16(scale)?, to_f16(min)?);
    let inverse = reciprocal(scale);
    let mut codes = [0u8; LEN];
    for (code, &v) in codes.iter_mut().zip(values) {
        *code = ((v - min) * inverse + 0.5).min(f32::from(top)) as u8;
    }
    Ok((stored.0, stored.1, codes))
}

/// Packs the low four bits of the codes.
fn pack_nibbles(codes: &[u8; LEN], out: &mut [u8]) {
    for (j, byte) in out.iter_mut().enumerate() {
        *byte = (codes[j] & 0x0f) | (codes[j + 16] << 4);
    }
}

/// Collects the fifth bits of the codes.
fn fifth_bits(codes: &[u8; LEN]) -> u32 {
    (0..LEN).fold(0, |bits, i| bits | (u32::from(codes[i] >> 4) << i))
}

pub(super) fn encode_q4_0(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let (d, codes) = signed_codes(values, 8)?;
    out[..2].copy_from_slice(&d.to_le_bytes());
    pack_nibbles(&codes, &mut out[2..]);
    Ok(())
}

pub(super) fn encode_q4_1(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let (d, m, codes) = ranged_codes(values, 15)?;
    out[..2].copy_from_slice(&d.to_le_bytes());
    out[2..4].copy_from_slice(&m.to_le_bytes());
    pack_nibbles(&codes, &mut out[4..]);
    Ok(())
}

pub(super) fn encode_q5_0(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let (d, codes) = signed_codes(values, 16)?;
    out[..2].copy_from_slice(&d.to_le_bytes());
    out[2..6].copy_from_slice(&fifth_bits(&codes).to_le_bytes());
    pack_nibbles(&codes, &mut out[6..]);
    Ok(())
}

pub(super) fn encode_q5_1(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let (d, m, codes) = ranged_codes(values, 31)?;
    out[..2].copy_from_slice(&d.to_le_bytes());
    out[2..4].copy_from_slice(&m.to_le_bytes());
    out[4..8].copy_from_slice(&fifth_bits(&codes).to_le_bytes());
    pack_nibbles(&codes, &mut out[8..]);
    Ok(())
}

/// Nearest of 255 steps, ties away from zero.
pub(super) fn encode_q8_0(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let scale = extreme(values).abs() / 127.0;
    let d = to_f16(scale)?;
    out[..2].copy_from_slice(&d.to_le_bytes());
    let inverse = reciprocal(scale);
    for (byte, &v) in out[2..].iter_mut().zip(values) {
        *byte = (v * inverse).round() as i8 as u8;
    }
    Ok(())
}
