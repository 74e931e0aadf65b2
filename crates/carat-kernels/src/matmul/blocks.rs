//! Inputs in blocks of 256 columns, for ternary weights. Either a block has one scale,
//! like those of the weight, or the whole token has, so that the products of as many
//! columns add up in integers.

use crate::Isa;

use super::prepared::{Quantized, Run, largest, quantize, quantize_codes, quantize_under};

/// Columns of a block.
pub(super) const BLOCK: usize = 256;

/// Tokens of a chunk of tiles: their codes of a whole row stay in the L2 cache.
pub(super) const CHUNK_TOKENS: usize = 64;

/// Rows (tokens) of a tile.
pub(super) const TILE_TOKENS: usize = 16;

/// Columns of a tile.
const TILE_COLUMNS: usize = 64;

/// Tiles of a block.
const TILES: usize = BLOCK / TILE_COLUMNS;

/// Which columns of the input share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Span {
    /// A block.
    Block,
    /// A token's; its blocks have scale 1.
    Row,
}

/// A token's scale, and what its values are multiplied with.
#[derive(Clone, Copy, Debug)]
struct RowScale {
    scale: f32,
    /// Not a number if the scale is none.
    inverse: f32,
}

impl RowScale {
    /// No smaller magnitude makes a scale.
    const SMALLEST: f32 = 1e-5;

    fn of(isa: Isa, x: &[f32]) -> RowScale {
        let largest = largest(isa, x);
        if !largest.is_finite() {
            return RowScale {
                scale: f32::NAN,
                inverse: f32::NAN,
            };
        }
        let largest = largest.max(RowScale::SMALLEST);
        RowScale {
            scale: largest / 127.0,
            inverse: 127.0 / largest,
        }
    }
}

/// Quantizes one token into blocks under its one scale, which is returned.
pub(super) fn quantize_row(isa: Isa, x: &[f32], out: &mut [XBlock]) -> f32 {
    let row = RowScale::of(isa, x);
    for (x, block) in x.chunks(BLOCK).zip(out) {
        block.scale = 1.0;
        block.negative_sum = -quantize_under(isa, x, row.inverse, &mut block.codes);
    }
    row.scale
}

/// A quantized block of the input.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct XBlock {
    pub(super) codes: [i8; BLOCK],
    pub(super) scale: f32,
    /// Negated sum of the codes: what the offset 1 of ternary codes takes away.
    pub(super) negative_sum: i32,
}

impl Default for XBlock {
    fn default() -> Self {
        XBlock {
            codes: [0; BLOCK],
            scale: 0.0,
            negative_sum: 0,
        }
    }
}

/// Blocks from one token to the next: odd, and a block is five cache lines, so
/// that the same block of several tokens does not fall in one set of the cache.
pub(super) fn block_stride(k: usize) -> usize {
    k.div_ceil(BLOCK) | 1
}

/// A cache line of codes.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(super) struct Line(pub(super) [i8; TILE_COLUMNS]);

/// Where the codes of `m` tokens of `k` columns lie as tiles of 16 tokens by 64
/// columns: by chunk of 64 tokens, block, tile of tokens, tile of columns; a
/// line per token. Scales: by chunk, block, token.
///
/// A chunk's last tile may be short of tokens: their lines hold whatever they
/// held before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TileMap {
    m: usize,
    blocks: usize,
}

impl TileMap {
    pub(super) fn new(m: usize, k: usize) -> TileMap {
        TileMap {
            m,
            blocks: k.div_ceil(BLOCK),
        }
    }

    /// Lines that are needed.
    pub(super) fn lines(&self) -> usize {
        self.m.next_multiple_of(TILE_TOKENS) * self.blocks * TILES
    }

    /// Scales that are needed.
    pub(super) fn scales(&self) -> usize {
        self.m.next_multiple_of(CHUNK_TOKENS) * self.blocks
    }

    /// Tiles of tokens in a chunk.
    pub(super) fn chunk_tiles(&self, chunk: usize) -> usize {
        (self.m - chunk * CHUNK_TOKENS)
            .min(CHUNK_TOKENS)
            .div_ceil(TILE_TOKENS)
    }

    /// First line of a tile of tokens in a block; its four column tiles follow
    /// each other.
    pub(super) fn line(&self, chunk: usize, block: usize, tile: usize) -> usize {
        let tiles = self.chunk_tiles(chunk);
        let start = chunk * CHUNK_TOKENS * self.blocks * TILES;
        start + (block * tiles + tile) * TILES * TILE_TOKENS
    }

    /// The first of a block's scales; one for each token of the chunk.
    pub(super) fn scale(&self, chunk: usize, block: usize) -> usize {
        (chunk * self.blocks + block) * CHUNK_TOKENS
    }

    /// Line of a tile of columns of a token's block, and its scale.
    fn places(&self, token: usize, block: usize) -> (usize, usize) {
        let (chunk, within) = (token / CHUNK_TOKENS, token % CHUNK_TOKENS);
        let line = self.line(chunk, block, within / TILE_TOKENS) + within % TILE_TOKENS;
        (line, self.scale(chunk, block) + within)
    }

    /// Quantizes one token into tiles.
    ///
    /// # Safety
    ///
    /// `lines` and `scales` must have as many elements as this map says, and
    /// nobody else may use this token's.
    pub(super) unsafe fn quantize(
        &self,
        isa: Isa,
        x: &[f32],
        token: usize,
        lines: *mut Line,
        scales: *mut f32,
    ) {
        let mut block = [XBlock::default()];
        for (b, x) in x.chunks(BLOCK).enumerate() {
            quantize(isa, x, &mut block);
            let (line, scale) = self.places(token, b);
            for (tile, codes) in block[0].codes.as_chunks().0.iter().enumerate() {
                // SAFETY: the map's places are in the buffers, and a token's its own.
                unsafe { lines.add(line + tile * TILE_TOKENS).write(Line(*codes)) };
            }
            // SAFETY: as above.
            unsafe { scales.add(scale).write(block[0].scale) };
        }
    }
}

impl Run<BLOCK> for XBlock {
    #[inline(always)]
    fn quantize(x: &[f32; BLOCK], out: &mut XBlock) {
        let Quantized { scale, sums } = quantize_codes(x, &mut out.codes);
        out.scale = scale;
        out.negative_sum = -(sums[0] + sums[1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_five_lines_and_all_sets_of_the_isa_agree() {
        assert_eq!(size_of::<XBlock>(), 5 * 64);
        let x: Vec<f32> = (0..600)
            .map(|i| ((i * 7919) % 1000) as f32 - 500.0)
            .collect();
        let mut expected = [XBlock::default(); 3];
        quantize(Isa::Scalar, &x, &mut expected);
        assert!(expected[2].codes[600 - 512..].iter().all(|&c| c == 0));
        for (x, block) in x.chunks(BLOCK).zip(&expected) {
            let largest = x.iter().fold(0f32, |a, x| a.max(x.abs()));
            assert_eq!(block.scale, largest / 127.0);
            let sum: i32 = block.codes.iter().map(|&c| i32::from(c)).sum();
            assert_eq!(block.negative_sum, -sum);
        }
        for isa in Isa::available() {
            let mut got = [XBlock::default(); 3];
            quantize(isa, &x, &mut got);
            assert_eq!(got, expected, "{isa}");
        }
    }

    #[test]
    fn a_block_with_a_nan_has_no_scale() {
        let mut x = [1.0; BLOCK];
        x[200] = f32::INFINITY;
        for isa in Isa::available() {
            let mut got = [XBlock::default()];
            quantize(isa, &x, &mut got);
            assert!(got[0].scale.is_nan() && got[0].codes == [0; BLOCK]);
        }
    }

    #[test]
    fn tiles_hold_every_token_once() {
        for (m, k) in [
            (1, 256),
            (16, 512),
            (17, 256),
            (64, 512),
            (65, 768),
            (150, 256),
        ] {
            let map = TileMap::new(m, k);
            let mut seen = vec![false; map.lines()];
            let mut scales = vec![false; map.scales()];
            for token in 0..m {
                for block in 0..k / BLOCK {
                    let (line, scale) = map.places(token, block);
                    assert!(!std::mem::replace(&mut scales[scale], true));
                    for tile in 0..TILES {
                        let line = line + tile * TILE_TOKENS;
                        assert!(!std::mem::replace(&mut seen[line], true));
                    }
                }
            }
        }
    }
}
