//! Moves blocks between row-major form and panels.
//!
//! In between, the codes of a row's block are *words*: word `8u + i` holds the
//! four bytes of step `i` of unit `u`, one code a byte.

use super::{Codes, PANEL_ROWS, PackedLayout};
use crate::{DType, formats};

const LANE: usize = 4;
const VECTOR: usize = LANE * PANEL_ROWS;
const NIBBLES: u32 = 0x0f0f_0f0f;
const PAIRS: u32 = 0x0303_0303;
const BITS: u32 = 0x0101_0101;
const POWERS_OF_3: [u32; 5] = [1, 3, 9, 27, 81];

type Words = [u32; 64];

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn or_word(bytes: &mut [u8], at: usize, value: u32) {
    let old = word(bytes, at);
    bytes[at..at + 4].copy_from_slice(&(old | value).to_le_bytes());
}

/// Bits 0..4 of `nibble` as the lowest bits of the four bytes.
fn spread(nibble: u32) -> u32 {
    (nibble | nibble << 7 | nibble << 14 | nibble << 21) & BITS
}

/// The inverse of [`spread`].
fn gather(bits: u32) -> u32 {
    (bits | bits >> 7 | bits >> 14 | bits >> 21) & 15
}

/// Takes the codes of a row-major block apart into words.
fn split_words(dtype: DType, block: &[u8], words: &mut Words) {
    match dtype {
        DType::Q4_0 | DType::Q4_1 => split_nibbles(block, dtype.block_bytes() - 16, words),
        DType::Q5_0 | DType::Q5_1 => {
            split_nibbles(block, dtype.block_bytes() - 16, words);
            let top = word(block, dtype.block_bytes() - 20);
            for (i, w) in words[..8].iter_mut().enumerate() {
                *w |= spread(top >> (4 * i) & 15) << 4;
            }
        }
        DType::Q8_0 | DType::I8G16 | DType::I8G32 => {
            let codes = dtype.block_bytes() - dtype.block_len();
            for (i, w) in words[..dtype.block_len() / 4].iter_mut().enumerate() {
                *w = word(block, codes + 4 * i) ^ 0x8080_8080;
            }
        }
        DType::Q4_K | DType::Q5_K => {
            let codes = dtype.block_bytes() - 128;
            for (i, w) in words.iter_mut().enumerate() {
                let (unit, step) = (i / 8, i % 8);
                let at = codes + unit / 2 * 32 + step * 4;
                *w = word(block, at) >> (unit % 2 * 4) & NIBBLES;
                if dtype == DType::Q5_K {
                    *w |= (word(block, 16 + step * 4) >> unit & BITS) << 4;
                }
            }
        }
        DType::Q6_K => {
            for (i, w) in words.iter_mut().enumerate() {
                let (low, low_shift, top, top_shift) = q6_k_places(i);
                *w = word(block, low) >> low_shift & NIBBLES
                    | (word(block, top) >> top_shift & PAIRS) << 4;
            }
        }
        DType::TQ1_0 => {
            for (i, w) in words.iter_mut().enumerate() {
                *w = u32::from_le_bytes(std::array::from_fn(|t| {
                    formats::tq1_0_code(block, 4 * i + t)
                }));
            }
        }
        DType::TQ2_0 => {
            for (i, w) in words.iter_mut().enumerate() {
                let (at, shift) = tq2_0_place(i);
                *w = word(block, at) >> shift & PAIRS;
            }
        }
        _ => unreachable!("invariant: {dtype} has no packed codes"),
    }
}

/// The inverse of [`split_words`]; the code bytes of `block` are zero before.
fn join_words(dtype: DType, words: &Words, block: &mut [u8]) {
    match dtype {
        DType::Q4_0 | DType::Q4_1 => join_nibbles(words, block, dtype.block_bytes() - 16),
        DType::Q5_0 | DType::Q5_1 => {
            join_nibbles(words, block, dtype.block_bytes() - 16);
            let top = (0..8).fold(0, |top, i| top | gather(words[i] >> 4 & BITS) << (4 * i));
            or_word(block, dtype.block_bytes() - 20, top);
        }
        DType::Q8_0 | DType::I8G16 | DType::I8G32 => {
            let codes = dtype.block_bytes() - dtype.block_len();
            for (i, w) in words[..dtype.block_len() / 4].iter().enumerate() {
                or_word(block, codes + 4 * i, w ^ 0x8080_8080);
            }
        }
        DType::Q4_K | DType::Q5_K => {
            let codes = dtype.block_bytes() - 128;
            for (i, w) in words.iter().enumerate() {
                let (unit, step) = (i / 8, i % 8);
                let at = codes + unit / 2 * 32 + step * 4;
                or_word(block, at, (w & NIBBLES) << (unit % 2 * 4));
                if dtype == DType::Q5_K {
                    or_word(block, 16 + step * 4, (w >> 4 & BITS) << unit);
                }
            }
        }
        DType::Q6_K => {
            for (i, w) in words.iter().enumerate() {
                let (low, low_shift, top, top_shift) = q6_k_places(i);
                or_word(block, low, (w & NIBBLES) << low_shift);
                or_word(block, top, (w >> 4 & PAIRS) << top_shift);
            }
        }
        DType::TQ1_0 => {
            let codes = words.map(u32::to_le_bytes);
            formats::put_tq1_0_codes(codes.as_flattened(), block);
        }
        DType::TQ2_0 => {
            for (i, w) in words.iter().enumerate() {
                let (at, shift) = tq2_0_place(i);
                or_word(block, at, (w & PAIRS) << shift);
            }
        }
        _ => unreachable!("invariant: {dtype} has no packed codes"),
    }
}

fn split_nibbles(block: &[u8], codes: usize, words: &mut Words) {
    for i in 0..4 {
        let w = word(block, codes + 4 * i);
        words[i] = w & NIBBLES;
        words[i + 4] = w >> 4 & NIBBLES;
    }
}

fn join_nibbles(words: &Words, block: &mut [u8], codes: usize) {
    for i in 0..4 {
        let w = words[i] & NIBBLES | (words[i + 4] & NIBBLES) << 4;
        or_word(block, codes + 4 * i, w);
    }
}

/// Byte offset and shift of the low nibbles and of the top bits of word `i`.
fn q6_k_places(i: usize) -> (usize, usize, usize, usize) {
    let (half, quarter, step) = (i / 32, i / 8 % 4, i % 8);
    (
        half * 64 + quarter % 2 * 32 + step * 4,
        quarter / 2 * 4,
        128 + half * 32 + step * 4,
        quarter * 2,
    )
}

/// Byte offset and shift of word `i`.
fn tq2_0_place(i: usize) -> (usize, usize) {
    let (half, quarter, step) = (i / 32, i / 8 % 4, i % 8);
    (half * 32 + step * 4, quarter * 2)
}

/// Writes the words of row `lane` into the planes of a block, which are zero
/// there before.
pub(super) fn put_words(codes: Codes, words: &[u32], lane: usize, planes: &mut [u8]) {
    let at = |vector: usize| vector * VECTOR + lane * LANE;
    if codes == Codes::Eight {
        for (i, w) in words.iter().enumerate() {
            or_word(planes, at(i), *w);
        }
        return;
    }
    if codes == Codes::Trits {
        // Each byte of the sum stays below 3^5: no carries.
        for (v, w) in words.chunks(5).enumerate() {
            let digits = w.iter().zip(POWERS_OF_3).map(|(w, power)| w * power);
            or_word(planes, at(v), digits.sum());
        }
        return;
    }
    let units = words.len() / 8;
    for (u, w) in words.chunks_exact(8).enumerate() {
        let bits = |shift: usize| (0..8).fold(0, |top, i| top | (w[i] >> shift & BITS) << i);
        match codes {
            Codes::One => {
                or_word(planes, at(u), bits(0));
                continue;
            }
            Codes::Two => {
                put_pairs(w, 0, planes, at(2 * u));
                continue;
            }
            Codes::Three => {
                put_pairs(w, 0, planes, at(2 * u));
                or_word(planes, at(2 * units + u), bits(2));
                continue;
            }
            _ => {}
        }
        for i in 0..4 {
            let nibbles = w[i] & NIBBLES | (w[i + 4] & NIBBLES) << 4;
            or_word(planes, at(4 * u + i), nibbles);
        }
        match codes {
            Codes::Five => or_word(planes, at(4 * units + u), bits(4)),
            Codes::Six => put_pairs(w, 4, planes, at(4 * units + 2 * u)),
            _ => {}
        }
    }
}

/// Puts two bits (from `shift` on) of the codes of 8 words in two vectors.
fn put_pairs(w: &[u32], shift: usize, planes: &mut [u8], at: usize) {
    for j in 0..2 {
        let pairs = (0..4).fold(0, |v, p| v | (w[4 * j + p] >> shift & PAIRS) << (2 * p));
        or_word(planes, at + j * VECTOR, pairs);
    }
}

/// Reads the words of row `lane` from the planes of a block.
pub(super) fn get_words(codes: Codes, lane: usize, planes: &[u8], words: &mut [u32]) {
    let at = |vector: usize| vector * VECTOR + lane * LANE;
    if codes == Codes::Eight {
        for (i, w) in words.iter_mut().enumerate() {
            *w = word(planes, at(i));
        }
        return;
    }
    if codes == Codes::Trits {
        for (v, w) in words.chunks_mut(5).enumerate() {
            let bytes = word(planes, at(v)).to_le_bytes();
            for (w, power) in w.iter_mut().zip(POWERS_OF_3) {
                *w = u32::from_le_bytes(bytes.map(|b| (u32::from(b) / power % 3) as u8));
            }
        }
        return;
    }
    let units = words.len() / 8;
    for (u, w) in words.chunks_exact_mut(8).enumerate() {
        let pairs =
            |vector: usize, i: usize| word(planes, at(vector + i / 4)) >> (2 * (i % 4)) & PAIRS;
        for (i, w) in w.iter_mut().enumerate() {
            let low = || word(planes, at(4 * u + i % 4)) >> (i / 4 * 4) & NIBBLES;
            *w = match codes {
                Codes::One => word(planes, at(u)) >> i & BITS,
                Codes::Two => pairs(2 * u, i),
                Codes::Three => {
                    pairs(2 * u, i) | (word(planes, at(2 * units + u)) >> i & BITS) << 2
                }
                Codes::Five => low() | (word(planes, at(4 * units + u)) >> i & BITS) << 4,
                Codes::Six => low() | pairs(4 * units + 2 * u, i) << 4,
                _ => low(),
            };
        }
    }
}

/// Packs up to 16 rows into a panel; missing rows are zero bytes.
pub(super) fn pack_panel(layout: &PackedLayout, rows: &[u8], panel: &mut [u8]) {
    let g = layout.geometry();
    panel.fill(0);
    let row_bytes = layout.row_bytes();
    if let Codes::Float(width) = g.codes {
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            for (k, value) in row.chunks_exact(width).enumerate() {
                panel[(k * PANEL_ROWS + lane) * width..][..width].copy_from_slice(value);
            }
        }
        return;
    }
    let blocks = layout.blocks();
    let mut words = [0; 64];
    // Block by block, so that the 16 rows of a chunk meet in the cache.
    for b in 0..blocks {
        let (codes, fields) = g.block_at(b, blocks);
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            let block = &row[b * layout.dtype().block_bytes()..][..layout.dtype().block_bytes()];
            split_words(layout.dtype(), block, &mut words);
            put_words(
                g.codes,
                &words[..g.block_columns / 4],
                lane,
                &mut panel[codes..][..g.codes_bytes()],
            );
            let mut at = fields;
            for f in g.fields {
                panel[at + lane * f.width..][..f.width]
                    .copy_from_slice(&block[f.offset..][..f.width]);
                at += f.width * PANEL_ROWS;
            }
        }
    }
}

/// Recovers up to 16 rows from a panel.
pub(super) fn unpack_panel(layout: &PackedLayout, panel: &[u8], rows: &mut [u8]) {
    let g = layout.geometry();
    let row_bytes = layout.row_bytes();
    if let Codes::Float(width) = g.codes {
        for (lane, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
            for (k, value) in row.chunks_exact_mut(width).enumerate() {
                value.copy_from_slice(&panel[(k * PANEL_ROWS + lane) * width..][..width]);
            }
        }
        return;
    }
    rows.fill(0);
    let blocks = layout.blocks();
    let mut words = [0; 64];
    for b in 0..blocks {
        let (codes, fields) = g.block_at(b, blocks);
        for (lane, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
            let block =
                &mut row[b * layout.dtype().block_bytes()..][..layout.dtype().block_bytes()];
            get_words(
                g.codes,
                lane,
                &panel[codes..][..g.codes_bytes()],
                &mut words[..g.block_columns / 4],
            );
            join_words(layout.dtype(), &words, block);
            let mut at = fields;
            for f in g.fields {
                block[f.offset..][..f.width]
                    .copy_from_slice(&panel[at + lane * f.width..][..f.width]);
                at += f.width * PANEL_ROWS;
            }
        }
    }
}
