//! TQ1_0 and TQ2_0: 256 trits under one fp16 scale, `w = d * (trit - 1)`.
//!
//! ```text
//! TQ2_0  codes[64] d:f16     four trits to a byte, two bits each; code 3 is invalid
//! TQ1_0  five[48] four[4] d:f16    five (then four) trits to a byte
//! ```
//!
//! TQ2_0: byte `h * 32 + m` holds elements `h * 128 + l * 32 + m` at bits `2 l`.
//!
//! TQ1_0: a byte is a fraction. With the digits read as a base-3 number `n < 243`,
//! it stores `ceil(256 n / 243)`; multiplying by three moves the next digit above
//! the binary point. So any byte decodes to five trits. The first 32 bytes hold
//! elements `k * 32 + j`, the next 16 elements `160 + k * 16 + j`, the last four
//! (whose fifth digit is zero) elements `240 + k * 4 + j`, for digit `k` of byte `j`.

use super::{
    FormatError, Groups, InvalidCode, Overflow, expect_whole_blocks, f16_at, legacy::extreme,
    reciprocal, to_f16,
};
use crate::DType;

const LEN: usize = 256;
const TQ2_0_CODES: usize = 64;
const TQ1_0_CODES: usize = 52;

/// Byte and shift of element `i` of a TQ2_0 block.
fn tq2_0_place(i: usize) -> (usize, usize) {
    (i / 128 * 32 + i % 32, i / 32 % 4 * 2)
}

/// Byte and digit of element `i` of a TQ1_0 block.
fn tq1_0_place(i: usize) -> (usize, usize) {
    match i {
        0..160 => (i % 32, i / 32),
        160..240 => (32 + i % 16, (i - 160) / 16),
        _ => (48 + i % 4, (i - 240) / 4),
    }
}

/// Digit `k` of a TQ1_0 byte: 0, 1 or 2.
fn tq1_0_digit(byte: u8, k: usize) -> u8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let fraction = byte.wrapping_mul(POWERS[k]);
    ((u16::from(fraction) * 3) >> 8) as u8
}

/// Code (0, 1 or 2) of element `i` of a TQ1_0 block.
pub(crate) fn tq1_0_code(block: &[u8], i: usize) -> u8 {
    let (byte, digit) = tq1_0_place(i);
    tq1_0_digit(block[byte], digit)
}

/// Writes the 256 codes of a TQ1_0 block: its first 52 bytes.
pub(crate) fn put_tq1_0_codes(codes: &[u8], block: &mut [u8]) {
    let mut numbers = [0u16; TQ1_0_CODES];
    for (i, &code) in codes.iter().enumerate() {
        let (byte, digit) = tq1_0_place(i);
        numbers[byte] += u16::from(code) * 3u16.pow(4 - digit as u32);
    }
    for (byte, n) in block.iter_mut().zip(numbers) {
        *byte = (n * 256).div_ceil(243) as u8;
    }
}

fn set_scale(into: &mut Groups, d: f32) {
    into.scales[..LEN / 32].fill(d);
}

pub(super) fn unpack_tq1_0(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    set_scale(into, f16_at(block, TQ1_0_CODES));
    for (i, code) in into.codes.iter_mut().enumerate() {
        let (byte, digit) = tq1_0_place(i);
        *code = tq1_0_digit(block[byte], digit) as i8 - 1;
    }
    Ok(())
}

pub(super) fn unpack_tq2_0(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    set_scale(into, f16_at(block, TQ2_0_CODES));
    for (element, code) in into.codes.iter_mut().enumerate() {
        let (byte, shift) = tq2_0_place(element);
        let stored = (block[byte] >> shift) & 3;
        if stored == 3 {
            return Err(InvalidCode {
                element,
                code: stored,
            });
        }
        *code = stored as i8 - 1;
    }
    Ok(())
}

/// Looks for code 3; `bytes` is whole blocks.
pub(super) fn check_tq2_0(bytes: &[u8]) -> Result<(), FormatError> {
    let dtype = DType::TQ2_0;
    for (block, bytes) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
        // A pair of set bits, without a branch per byte.
        let any = bytes[..TQ2_0_CODES]
            .iter()
            .fold(0, |any, &b| any | (b & (b >> 1) & 0x55));
        if any != 0 {
            let element = (0..LEN)
                .find(|&i| {
                    let (byte, shift) = tq2_0_place(i);
                    (bytes[byte] >> shift) & 3 == 3
                })
                .unwrap_or(0);
            return Err(FormatError::InvalidCode {
                dtype,
                block,
                element,
                code: 3,
            });
        }
    }
    Ok(())
}

/// Trits (plus one) of a block whose largest magnitude is one step, and that step.
fn trits(values: &[f32]) -> Result<(half::f16, [u8; LEN]), Overflow> {
    let scale = extreme(values).abs();
    let stored = to_f16(scale)?;
    let inverse = reciprocal(scale);
    let mut trits = [0u8; LEN];
    for (trit, &v) in trits.iter_mut().zip(values) {
        *trit = ((v * inverse).round() + 1.0) as u8;
    }
    Ok((stored, trits))
}

fn pack_tq2_0(trits: &[u8; LEN], d: [u8; 2], out: &mut [u8]) {
    out[..TQ2_0_CODES].fill(0);
    for (i, &trit) in trits.iter().enumerate() {
        let (byte, shift) = tq2_0_place(i);
        out[byte] |= trit << shift;
    }
    out[TQ2_0_CODES..].copy_from_slice(&d);
}

/// A TQ2_0 block of 256 codes -1, 0 or 1 (two's complement) under the fp16 scale `d`.
///
/// # Panics
///
/// If there are not 256 codes.
pub fn tq2_0_block(codes: &[u8], d: [u8; 2]) -> [u8; TQ2_0_CODES + 2] {
    assert_eq!(codes.len(), LEN, "codes of a block");
    let trits = std::array::from_fn(|i| codes[i].wrapping_add(1));
    let mut block = [0; TQ2_0_CODES + 2];
    pack_tq2_0(&trits, d, &mut block);
    block
}

pub(super) fn encode_tq2_0(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let (d, trits) = trits(values)?;
    pack_tq2_0(&trits, d.to_le_bytes(), out);
    Ok(())
}

pub(super) fn encode_tq1_0(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let (d, trits) = trits(values)?;
    put_tq1_0_codes(&trits, out);
    out[TQ1_0_CODES..].copy_from_slice(&d.to_le_bytes());
    Ok(())
}

/// Restates TQ2_0 blocks as TQ1_0 blocks: the same trits, the same scale bits.
///
/// # Errors
///
/// [`FormatError::PartialBlock`] when `bytes` is not whole TQ2_0 blocks,
/// [`FormatError::InvalidCode`] for a code 3.
pub fn tq2_0_to_tq1_0(bytes: &[u8]) -> Result<Vec<u8>, FormatError> {
    expect_whole_blocks(DType::TQ2_0, bytes)?;
    check_tq2_0(bytes)?;
    let (from, to) = (DType::TQ2_0.block_bytes(), DType::TQ1_0.block_bytes());
    let mut out = vec![0u8; bytes.len() / from * to];
    for (block, out) in bytes.chunks_exact(from).zip(out.chunks_exact_mut(to)) {
        let trits: [u8; LEN] = std::array::from_fn(|i| {
            let (byte, shift) = tq2_0_place(i);
            (block[byte] >> shift) & 3
        });
        put_tq1_0_codes(&trits, out);
        out[TQ1_0_CODES..].copy_from_slice(&block[TQ2_0_CODES..]);
    }
    Ok(out)
}

/// Restates TQ1_0 blocks as TQ2_0 blocks: the same trits, the same scale bits.
///
/// # Errors
///
/// [`FormatError::PartialBlock`] when `bytes` is not whole TQ1_0 blocks.
pub fn tq1_0_to_tq2_0(bytes: &[u8]) -> Result<Vec<u8>, FormatError> {
    expect_whole_blocks(DType::TQ1_0, bytes)?;
    let (from, to) = (DType::TQ1_0.block_bytes(), DType::TQ2_0.block_bytes());
    let mut out = vec![0u8; bytes.len() / from * to];
    for (block, out) in bytes.chunks_exact(from).zip(out.chunks_exact_mut(to)) {
        let trits = std::array::from_fn(|i| tq1_0_code(block, i));
        let d = [block[TQ1_0_CODES], block[TQ1_0_CODES + 1]];
        pack_tq2_0(&trits, d, out);
    }
    Ok(out)
}
