//! Q2_K to Q6_K: 256 elements, groups of 16 or 32 whose small integer scales
//! multiply one fp16 scale.
//!
//! ```text
//! Q2_K  scales[16] q2[64] d:f16 dmin:f16               w = (d * s) * q - (dmin * m), groups of 16
//! Q3_K  high[32] q2[64] scales[12] d:f16               w = (d * s) * q,              groups of 16
//! Q4_K  d:f16 dmin:f16 scales[12] q4[128]              w = (d * s) * q - (dmin * m), groups of 32
//! Q5_K  d:f16 dmin:f16 scales[12] high[32] q4[128]     w = (d * s) * q - (dmin * m), groups of 32
//! Q6_K  q4[128] q2[64] scales:i8[16] d:f16             w = (d * s) * q,              groups of 16
//! ```

use super::{Groups, InvalidCode, f16_at};

const LEN: usize = 256;

/// Element `i` of 256 two-bit fields: in each half of 128 elements, byte `m`
/// holds elements `m`, `32 + m`, `64 + m`, `96 + m`, lowest bits first.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2)) & 3
}

/// Element `i` of 256 single bits: byte `m` holds elements `32 b + m` at bit `b`.
fn one_bit(bytes: &[u8], i: usize) -> u8 {
    (bytes[i % 32] >> (i / 32)) & 1
}

/// Element `i` of 256 nibbles: in each run of 64 elements, byte `m` of 32 holds
/// elements `m` (low) and `32 + m` (high).
fn nibble(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 0x0f
}

/// Scale and minimum of group `g` of eight, six bits each in 12 bytes: bytes 0-3
/// hold the scales of groups 0-3, bytes 4-7 their minimums; the other groups have
/// their low nibbles in bytes 8-11 and their high pairs on top of bytes 0-7.
fn six_bit_scale_min(scales: &[u8], g: usize) -> (u8, u8) {
    if g < 4 {
        (scales[g] & 0x3f, scales[g + 4] & 0x3f)
    } else {
        let low = scales[g + 4];
        (
            (low & 0x0f) | ((scales[g - 4] >> 2) & 0x30),
            (low >> 4) | ((scales[g] >> 2) & 0x30),
        )
    }
}

/// Writes what [`six_bit_scale_min`] reads.
pub(super) fn pack_six_bit_scale_min(scales: &[u8; 8], mins: &[u8; 8], out: &mut [u8]) {
    for g in 0..4 {
        out[g] = scales[g] | ((scales[g + 4] & 0x30) << 2);
        out[g + 4] = mins[g] | ((mins[g + 4] & 0x30) << 2);
        out[g + 8] = (scales[g + 4] & 0x0f) | ((mins[g + 4] & 0x0f) << 4);
    }
}

pub(super) fn unpack_q2_k(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for (g, &pair) in block[..LEN / 16].iter().enumerate() {
        into.scales[g] = d * f32::from(pair & 0x0f);
        into.mins[g] = -(dmin * f32::from(pair >> 4));
    }
    for (i, code) in into.codes.iter_mut().enumerate() {
        *code = two_bits(&block[16..], i) as i8;
    }
    Ok(())
}

pub(super) fn unpack_q3_k(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let (high, q2, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = f16_at(block, 108);
    for g in 0..LEN / 16 {
        // Low nibbles in bytes 0-7 (groups 8-15 above groups 0-7), high pairs in
        // bytes 8-11 (groups g, g + 4, g + 8, g + 12 from the lowest bits up).
        let low = (scales[g % 8] >> (g / 8 * 4)) & 0x0f;
        let pair = (scales[8 + g % 4] >> (g / 4 * 2)) & 3;
        let scale = (low | (pair << 4)) as i8 - 32;
        into.scales[g] = d * f32::from(scale);
    }
    for (i, code) in into.codes.iter_mut().enumerate() {
        // A set high bit means no offset.
        let offset = if one_bit(high, i) == 1 { 0 } else { 4 };
        *code = two_bits(q2, i) as i8 - offset;
    }
    Ok(())
}

/// Scales and minimums that Q4_K and Q5_K share.
fn unpack_header(block: &[u8], into: &mut Groups) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for g in 0..LEN / 32 {
        let (scale, min) = six_bit_scale_min(&block[4..16], g);
        into.scales[g] = d * f32::from(scale);
        into.mins[g] = -(dmin * f32::from(min));
    }
}

pub(super) fn unpack_q4_k(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    unpack_header(block, into);
    for (i, code) in into.codes.iter_mut().enumerate() {
        *code = nibble(&block[16..], i) as i8;
    }
    Ok(())
}

pub(super) fn unpack_q5_k(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    unpack_header(block, into);
    let (high, q4) = (&block[16..48], &block[48..]);
    for (i, code) in into.codes.iter_mut().enumerate() {
        *code = (nibble(q4, i) | (one_bit(high, i) << 4)) as i8;
    }
    Ok(())
}

/// Byte and shift of the low nibble of element `i` of a Q6_K block: in each half
/// of 128 elements, byte `m` of 64 holds elements `m` (low) and `64 + m` (high).
pub(super) fn q6_k_nibble_place(i: usize) -> (usize, usize) {
    (i / 128 * 64 + i % 64, i / 64 % 2 * 4)
}

pub(super) fn unpack_q6_k(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let (q4, q2, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = f16_at(block, 208);
    for (scale, &stored) in into.scales.iter_mut().zip(scales) {
        *scale = d * f32::from(stored as i8);
    }
    for (i, code) in into.codes.iter_mut().enumerate() {
        let (byte, shift) = q6_k_nibble_place(i);
        let low = (q4[byte] >> shift) & 0x0f;
        *code = (low | (two_bits(q2, i) << 4)) as i8 - 32;
    }
    Ok(())
}
