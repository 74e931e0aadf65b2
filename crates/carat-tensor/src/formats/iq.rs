//! IQ1, IQ2 and IQ3: 256 elements, vectors of eight or four from a codebook.
//!
//! ```text
//! IQ2_XXS  d:f16 (index:u8[4] signs7[4]+scale4 :u32)[8]     w = (d (s + 1/2) / 4) * level, groups of 32
//! IQ2_XS   d:f16 (index9 signs7 :u16)[32] scale4[16]        w = (d (s + 1/2) / 4) * level, groups of 16
//! IQ2_S    d:f16 index[32] signs[32] high2[32] scale4[16]   w = (d (s + 1/2) / 4) * level, groups of 16
//! IQ3_XXS  d:f16 index[64] (signs7[4]+scale4 :u32)[8]       w = (d (s + 1/2) / 2) * level, groups of 32
//! IQ3_S    d:f16 index[64] high1[64] signs[32] scale4[8]    w = (d (2 s + 1)) * level,     groups of 32
//! IQ1_S    d:f16 index[32] (high3[4] scale3 delta1 :u16)[8] w = (d (2 s + 1)) * (level ± 1/8), groups of 32
//! IQ1_M    index[32] (high3 delta1)[32] (scale3[4] d4 :u16)[4]  the same, groups of 16
//! ```
//!
//! Signs are folded into the codes. IQ1's codes count eighths, so its scales are
//! divided by eight, which is exact: the smallest nonzero `d` is 2^-24.

use super::iq_tables::{
    IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, even_signs,
};
use super::{Groups, InvalidCode, f16_at, u16_at, u32_at};

/// Writes vector `levels` with the signs of the bits of `signs`.
fn put_signed(codes: &mut [i8], levels: &[i8], signs: u8) {
    for (j, (code, &level)) in codes.iter_mut().zip(levels).enumerate() {
        *code = if (signs >> j) & 1 == 1 { -level } else { level };
    }
}

/// The four-bit field `g` of a run of nibbles, low half first.
fn nibble(bytes: &[u8], g: usize) -> u8 {
    (bytes[g / 2] >> (g % 2 * 4)) & 0x0f
}

/// `d (s + 1/2) / 4`: exact, at most 16 significant bits.
fn iq2_scale(d: f32, s: u8) -> f32 {
    d * (0.5 + f32::from(s)) * 0.25
}

pub(super) fn unpack_iq2_xxs(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let d = f16_at(block, 0);
    for g in 0..8 {
        let indices = &block[2 + g * 8..][..4];
        let word = u32_at(block, 2 + g * 8 + 4);
        into.scales[g] = iq2_scale(d, (word >> 28) as u8);
        for (v, &index) in indices.iter().enumerate() {
            let signs = even_signs((word >> (7 * v)) as u8 & 0x7f);
            let codes = &mut into.codes[g * 32 + v * 8..][..8];
            put_signed(codes, &IQ2_XXS_GRID[usize::from(index)], signs);
        }
    }
    Ok(())
}

pub(super) fn unpack_iq2_xs(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let d = f16_at(block, 0);
    for g in 0..16 {
        into.scales[g] = iq2_scale(d, nibble(&block[66..], g));
    }
    for (v, codes) in into.codes.chunks_exact_mut(8).enumerate() {
        let word = u16_at(block, 2 + v * 2);
        let levels = &IQ2_XS_GRID[usize::from(word & 511)];
        put_signed(codes, levels, even_signs((word >> 9) as u8));
    }
    Ok(())
}

pub(super) fn unpack_iq2_s(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let d = f16_at(block, 0);
    let (index, signs, high) = (&block[2..34], &block[34..66], &block[66..74]);
    for g in 0..16 {
        into.scales[g] = iq2_scale(d, nibble(&block[74..], g));
    }
    for (v, codes) in into.codes.chunks_exact_mut(8).enumerate() {
        let high = usize::from((high[v / 4] >> (v % 4 * 2)) & 3);
        let levels = &IQ2_S_GRID[usize::from(index[v]) | (high << 8)];
        put_signed(codes, levels, signs[v]);
    }
    Ok(())
}

pub(super) fn unpack_iq3_xxs(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let d = f16_at(block, 0);
    let index = &block[2..66];
    for g in 0..8 {
        let word = u32_at(block, 66 + g * 4);
        into.scales[g] = d * (0.5 + (word >> 28) as f32) * 0.5;
        for v in 0..8 {
            // Eight signs serve two vectors of four.
            let signs = even_signs((word >> (v / 2 * 7)) as u8 & 0x7f) >> (v % 2 * 4);
            let levels = &IQ3_XXS_GRID[usize::from(index[g * 8 + v])];
            put_signed(&mut into.codes[g * 32 + v * 4..][..4], levels, signs);
        }
    }
    Ok(())
}

pub(super) fn unpack_iq3_s(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let d = f16_at(block, 0);
    let (index, high) = (&block[2..66], &block[66..74]);
    let (signs, scales) = (&block[74..106], &block[106..110]);
    for g in 0..8 {
        into.scales[g] = d * f32::from(1 + 2 * nibble(scales, g));
    }
    for (v, codes) in into.codes.chunks_exact_mut(4).enumerate() {
        let high = usize::from((high[v / 8] >> (v % 8)) & 1);
        let levels = &IQ3_S_GRID[usize::from(index[v]) | (high << 8)];
        put_signed(codes, levels, signs[v / 2] >> (v % 2 * 4));
    }
    Ok(())
}

/// Writes vector `index` shifted up or down by an eighth, in eighths.
fn put_iq1(codes: &mut [i8], index: usize, down: bool) {
    let delta = if down { -1 } else { 1 };
    for (code, &level) in codes.iter_mut().zip(&IQ1_GRID[index]) {
        *code = 8 * level + delta;
    }
}

/// `d (2 s + 1) / 8`: exact, see the module's text.
fn iq1_scale(d: f32, s: u8) -> f32 {
    d * f32::from(2 * s + 1) * 0.125
}

pub(super) fn unpack_iq1_s(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let d = f16_at(block, 0);
    let index = &block[2..34];
    for g in 0..8 {
        let word = u16_at(block, 34 + g * 2);
        into.scales[g] = iq1_scale(d, (word >> 12) as u8 & 7);
        for v in 0..4 {
            let high = usize::from((word >> (3 * v)) & 7);
            let codes = &mut into.codes[g * 32 + v * 8..][..8];
            let at = usize::from(index[g * 4 + v]) | (high << 8);
            put_iq1(codes, at, word & 0x8000 != 0);
        }
    }
    Ok(())
}

pub(super) fn unpack_iq1_m(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    let (index, high) = (&block[..32], &block[32..48]);
    let words: [u16; 4] = std::array::from_fn(|k| u16_at(block, 48 + k * 2));
    // The top nibbles of the four words are the fp16 scale, lowest first.
    let d = (0..4).fold(0, |d, k| d | ((words[k] >> 12) << (4 * k)));
    let d = half::f16::from_bits(d).to_f32();
    for g in 0..16 {
        into.scales[g] = iq1_scale(d, (words[g / 4] >> (g % 4 * 3)) as u8 & 7);
    }
    for (v, codes) in into.codes.chunks_exact_mut(8).enumerate() {
        let field = nibble(high, v);
        let at = usize::from(index[v]) | (usize::from(field & 7) << 8);
        put_iq1(codes, at, field & 8 != 0);
    }
    Ok(())
}
