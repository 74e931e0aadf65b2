//! Tile units (AMX int8): 32 rows of the weight by 32 tokens at a time.
//!
//! A *step* multiplies a block of two panels (32 rows by 256 columns) with two
//! tiles of 16 tokens: 16 tile products into four tiles of integer sums. Tile
//! products leave the vector unit idle, so between them it does what else is to
//! be done: it scales the sums of the step before and adds them up in floats,
//! and unpacks the next block. The order of a token's additions is the scalar
//! twin's.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use carat_tensor::DType;
use carat_tensor::packed::PANEL_ROWS;

use super::avx512::digits;
use super::{FiveTrits, Form, Stored, TwoBits, unroll8};
use crate::Isa;
use crate::matmul::blocks::{BLOCK, CHUNK_TOKENS, Line, TILE_TOKENS};
use crate::matmul::job::{Job, Kernel, Paths};
use crate::tiles::{Shape, Tiles, dot, load, load_once, store, zero};

/// Bytes of a panel's block as operand tiles: one byte a weight.
const OPERAND: usize = BLOCK * PANEL_ROWS;

/// Floats (or integers) of a tile of sums.
const TILE: usize = TILE_TOKENS * PANEL_ROWS;

/// Blocks ahead of the one being unpacked that are fetched from memory: a block
/// takes 150 ns or more, so this is several times memory's latency.
const AHEAD: usize = 4;

/// Tiles of sums of a step: two of tokens by two panels.
const STEP_TILES: usize = 4;

/// Floats of a pair's results.
const ACC: usize = CHUNK_TOKENS * 2 * PANEL_ROWS;

/// The tile kernel for a ternary format.
pub(in crate::matmul::simd) fn kernel(form: Stored) -> Kernel {
    if form == DType::TQ1_0.into() {
        // Every machine with AMX has VBMI.
        assert!(std::arch::is_x86_feature_detected!("avx512vbmi"));
    }
    Kernel {
        isa: Isa::Amx,
        paths: Paths::Tiled,
        panels: 2,
        run: match form {
            Stored::Block(DType::TQ2_0) => run::<TwoBits>,
            Stored::Block(DType::TQ1_0) => run::<FiveTrits>,
            _ => unreachable!("invariant: {form} has no tiles"),
        },
    }
}

/// Buffers of a thread; all stay in the L1 cache.
#[repr(C, align(4096))]
struct Work {
    /// Weights of a block and of the next.
    operands: [[[i8; OPERAND]; 2]; 2],
    /// Sums of a step and of the one before.
    sums: [[i32; STEP_TILES * TILE]; 2],
    /// Results of a pair of panels and of the one before:
    /// `[step][tile of sums][token][row]`.
    acc: [[f32; ACC]; 2],
    /// Where the step before the first one "adds".
    nowhere: [f32; STEP_TILES * TILE],
}

thread_local! {
    static WORK: RefCell<Option<Box<Work>>> = const { RefCell::new(None) };
}

fn with_work(f: impl FnOnce(&mut Work)) {
    WORK.with_borrow_mut(|work| {
        f(work.get_or_insert_with(|| {
            Box::new(Work {
                operands: [[[0; _]; 2]; 2],
                sums: [[0; _]; 2],
                acc: [[0.0; _]; 2],
                nowhere: [0.0; _],
            })
        }));
    });
}

fn run<F: Form>(job: &Job<'_>) {
    const { F::CHECK };
    debug_assert_eq!(job.weight.layout().dtype(), F::DTYPE);
    let (lines, scales, map) = job.x.tiles();
    let blocks = job.weight.layout().blocks();
    assert!(
        job.tokens.start.is_multiple_of(CHUNK_TOKENS),
        "a chunk's start"
    );
    if job.panels.is_empty() {
        return;
    }
    with_work(|work| {
        for first in job.tokens.clone().step_by(CHUNK_TOKENS) {
            let chunk = first / CHUNK_TOKENS;
            let tokens = CHUNK_TOKENS.min(job.tokens.end - first);
            let chunk = Chunk {
                job,
                first,
                tokens,
                blocks,
                lines: lines[map.line(chunk, 0, 0)..].as_ptr(),
                scales: scales[map.scale(chunk, 0)..].as_ptr(),
            };
            let tiles = map.chunk_tiles(first / CHUNK_TOKENS);
            debug_assert_eq!(tiles, tokens.div_ceil(TILE_TOKENS));
            // SAFETY: this kernel was chosen for a machine with tiles that the
            // system has granted; the input has `tiles` tiles of tokens and
            // `blocks` blocks in this chunk.
            unsafe {
                let _tiles = Tiles::configure(Shape {
                    tokens: tokens.min(TILE_TOKENS),
                    columns: 64,
                });
                match tiles {
                    1 => go::<F, 1>(&chunk, work),
                    2 => go::<F, 2>(&chunk, work),
                    3 => go::<F, 3>(&chunk, work),
                    _ => go::<F, 4>(&chunk, work),
                }
            }
        }
    });
}

/// What is multiplied: a job's panels and up to 64 of its tokens.
struct Chunk<'a> {
    job: &'a Job<'a>,
    /// The first token.
    first: usize,
    tokens: usize,
    blocks: usize,
    /// Input codes of the chunk.
    lines: *const Line,
    /// Input scales of the chunk.
    scales: *const f32,
}

impl Chunk<'_> {
    /// The two panels of a pair; the second is the first where there is none.
    fn pair(&self, index: usize) -> [*const u8; 2] {
        let panel = self.job.panels.start + 2 * index;
        let second = (panel + 1).min(self.job.panels.end - 1);
        [panel, second].map(|panel| self.job.weight.panel(panel).as_ptr())
    }

    /// Stores some of the rows of a pair's results, as they lie in `acc`.
    #[inline(always)]
    fn store(&self, index: usize, acc: &[f32; ACC], rows: Range<usize>) {
        let panel = self.job.panels.start + 2 * index;
        let count = 2.min(self.job.panels.end - panel);
        let acc = &acc.as_chunks::<PANEL_ROWS>().0[rows.clone()];
        for (row, values) in rows.zip(acc) {
            let p = row / TILE_TOKENS % 2;
            let t = row / (2 * TILE_TOKENS) * TILE_TOKENS + row % TILE_TOKENS;
            if p < count && t < self.tokens {
                self.job.store(self.first + t, panel + p, values);
            }
        }
    }
}

/// Sums that are still to be scaled and added.
#[derive(Clone, Copy)]
struct Pending {
    sums: *const i32,
    /// Weight scales of the two panels, fp16.
    d: [*const u8; 2],
    /// Input scales of the step's tokens.
    x: *const f32,
    acc: *mut f32,
}

/// A block of the weight to unpack.
#[derive(Clone, Copy)]
struct Source {
    codes: [*const u8; 2],
    /// The codes to fetch from memory meanwhile.
    ahead: [*const u8; 2],
    to: *mut i8,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c")]
unsafe fn go<F: Form, const TILES: usize>(chunk: &Chunk<'_>, work: &mut Work) {
    let blocks = chunk.blocks;
    let pairs = chunk.job.panels.len().div_ceil(2);
    let places = |pair: [*const u8; 2], block: usize| {
        let (codes, fields) = F::GEOMETRY.block_at(block, blocks);
        (
            pair.map(|panel| panel.wrapping_add(codes)),
            pair.map(|panel| panel.wrapping_add(fields)),
        )
    };
    let operands: [*mut i8; 2] = [
        work.operands[0].as_mut_ptr().cast(),
        work.operands[1].as_mut_ptr().cast(),
    ];
    let sums: [*mut i32; 2] = [work.sums[0].as_mut_ptr(), work.sums[1].as_mut_ptr()];
    let acc: [*mut f32; 2] = [work.acc[0].as_mut_ptr(), work.acc[1].as_mut_ptr()];
    let (first_codes, first_fields) = places(chunk.pair(0), 0);
    let mut pending = Pending {
        sums: sums[1],
        d: first_fields,
        x: chunk.scales,
        acc: work.nowhere.as_mut_ptr(),
    };
    // SAFETY: the machine has the instruction sets and tiles. Pointers: blocks
    // are in their panels, lines and scales in the chunk's; the buffers of
    // `work` are as large as a step or a pair needs (see `Work`).
    unsafe {
        let source = Source {
            codes: first_codes,
            ahead: first_codes,
            to: operands[0],
        };
        for unit in 0..2 * F::VECTORS {
            unpack::<F>(&source, unit);
        }
        let rows = TILES * 2 * TILE_TOKENS;
        let (mut parity, mut block_parity) = (0, 0);
        for index in 0..pairs {
            let pair = chunk.pair(index);
            let acc = acc[index % 2];
            acc.write_bytes(0, ACC);
            for block in 0..blocks {
                let (_, fields) = places(pair, block);
                // The very last block unpacks the first one again, to no use.
                let (next, _) = if block + 1 < blocks {
                    places(pair, block + 1)
                } else {
                    places(chunk.pair((index + 1) % pairs), 0)
                };
                // The two panels are read side by side, so what comes next is not
                // what lies next.
                let far = block + 1 + AHEAD;
                let far_pair = chunk.pair((index + far / blocks) % pairs);
                let (ahead, far_fields) = places(far_pair, far % blocks);
                for fields in far_fields {
                    _mm_prefetch::<_MM_HINT_T1>(fields.cast());
                }
                let source = Source {
                    codes: next,
                    ahead,
                    to: operands[1 - block_parity],
                };
                let lines = chunk
                    .lines
                    .wrapping_add(block * TILES * BLOCK / 64 * TILE_TOKENS);
                macro_rules! step {
                    ($step:literal, $size:ident, $before:ident, $from:expr, $to:expr) => {
                        step::<F, $size, $before, { $from }, { $to }>(
                            lines.wrapping_add($step * 2 * BLOCK / 64 * TILE_TOKENS),
                            operands[block_parity],
                            sums[parity],
                            pending,
                            source,
                        );
                        pending = Pending {
                            sums: sums[parity],
                            d: fields,
                            x: chunk
                                .scales
                                .wrapping_add(block * CHUNK_TOKENS + $step * 2 * TILE_TOKENS),
                            acc: acc.wrapping_add($step * STEP_TILES * TILE),
                        };
                        parity = 1 - parity;
                    };
                }
                const ONE: usize = 1;
                const TWO: usize = 2;
                match TILES {
                    1 => {
                        step!(0, ONE, ONE, 0, 2);
                    }
                    2 => {
                        step!(0, TWO, TWO, 0, 2);
                    }
                    3 => {
                        step!(0, TWO, ONE, 0, 2);
                        step!(1, ONE, TWO, 0, 0);
                    }
                    _ => {
                        step!(0, TWO, TWO, 0, 1);
                        step!(1, TWO, TWO, 1, 2);
                    }
                }
                block_parity = 1 - block_parity;
                // The pair before is complete after this one's first step. Its
                // rows go far apart: not all at once.
                if index > 0 {
                    let rows = rows * block / blocks..rows * (block + 1) / blocks;
                    chunk.store(index - 1, &work.acc[(index - 1) % 2], rows);
                }
            }
        }
        // The last step's sums.
        let last = 2 * TILE_TOKENS * if TILES.is_multiple_of(2) { 2 } else { 1 };
        let d = [scales(pending.d[0]), scales(pending.d[1])];
        for row in 0..last {
            scale(&pending, d, row);
        }
        chunk.store(pairs - 1, &work.acc[(pairs - 1) % 2], 0..rows);
    }
}

/// A step of SIZE tiles of tokens; meanwhile the sums of the step before, of
/// BEFORE tiles of tokens, are scaled, and panels FROM to TO of the next block
/// unpacked.
///
/// # Safety
///
/// As in [`go`].
#[inline(always)]
unsafe fn step<
    F: Form,
    const SIZE: usize,
    const BEFORE: usize,
    const FROM: usize,
    const TO: usize,
>(
    lines: *const Line,
    operands: *const i8,
    sums: *mut i32,
    pending: Pending,
    source: Source,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let d = [scales(pending.d[0]), scales(pending.d[1])];
        let products = const { 8 * SIZE };
        let mut done = 0;
        // What goes between two products.
        macro_rules! between {
            () => {
                let rows = 2 * BEFORE * TILE_TOKENS;
                let mut row = rows * done / products;
                while row < rows * (done + 1) / products {
                    scale(&pending, d, row);
                    row += 1;
                }
                let units = (TO - FROM) * F::VECTORS;
                let mut unit = units * done / products;
                while unit < units * (done + 1) / products {
                    unpack::<F>(&source, FROM * F::VECTORS + unit);
                    unit += 1;
                }
                done += 1;
            };
        }
        zero!(0);
        zero!(1);
        if SIZE == 2 {
            zero!(2);
            zero!(3);
        }
        unroll8!(k => {
            if k < BLOCK / 64 {
                let a = lines.wrapping_add(k * TILE_TOKENS);
                let b = operands.wrapping_add(k * 1024);
                load!(6, b);
                load_once!(4, a);
                dot!(0, 4, 6);
                between!();
                load!(7, b.wrapping_add(OPERAND));
                dot!(1, 4, 7);
                between!();
                if SIZE == 2 {
                    load_once!(5, a.wrapping_add(BLOCK / 64 * TILE_TOKENS));
                    dot!(2, 5, 6);
                    between!();
                    dot!(3, 5, 7);
                    between!();
                }
            }
        });
        debug_assert_eq!(done, products);
        store!(sums, 0);
        store!(sums.wrapping_add(TILE), 1);
        if SIZE == 2 {
            store!(sums.wrapping_add(2 * TILE), 2);
            store!(sums.wrapping_add(3 * TILE), 3);
        }
    }
}

/// The scales of a panel's block.
#[inline(always)]
unsafe fn scales(d: *const u8) -> __m512 {
    // SAFETY: as in `go`; 16 fp16.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(d.cast())) }
}

/// Scales and adds a row of sums: `row / 16` is the tile, the rest the token.
#[inline(always)]
unsafe fn scale(pending: &Pending, d: [__m512; 2], row: usize) {
    let (tile, token) = (row / TILE_TOKENS, row % TILE_TOKENS);
    let x = pending.x.wrapping_add(tile / 2 * TILE_TOKENS + token);
    let acc = pending.acc.wrapping_add(row * PANEL_ROWS);
    // SAFETY: as in `go`.
    unsafe {
        let isum = _mm512_loadu_si512(pending.sums.wrapping_add(row * PANEL_ROWS).cast());
        let scale = _mm512_mul_ps(d[tile % 2], _mm512_set1_ps(*x));
        let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(isum), scale, _mm512_loadu_ps(acc));
        _mm512_storeu_ps(acc, sum);
    }
}

/// Bit matrix that turns the two-bit code at `place` into -1, 0 or 1: with all
/// result bits inverted, 0 gives ones, 1 (the low bit) clears them all, 2 (the
/// high bit) all but the lowest.
const fn signed(place: usize) -> i64 {
    let (low, both) = (1u64 << (2 * place), 3u64 << (2 * place));
    let (mut matrix, mut row) = (low << 56, 0);
    while row < 7 {
        matrix |= both << (8 * row);
        row += 1;
    }
    matrix as i64
}

/// Unpacks vector `unit % VECTORS` of panel `unit / VECTORS` into operand tiles:
/// signed bytes, 64 of them a step.
#[inline(always)]
unsafe fn unpack<F: Form>(source: &Source, unit: usize) {
    let (panel, vector) = (unit / F::VECTORS, unit % F::VECTORS);
    let codes = source.codes[panel].wrapping_add(vector * 64);
    let to = source
        .to
        .wrapping_add(panel * OPERAND + vector * F::STEPS * 64);
    // SAFETY: as in `go`.
    unsafe {
        let ahead = source.ahead[panel].wrapping_add(vector * 64);
        _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
        let mut bytes = _mm512_loadu_si512(codes.cast());
        let mut fifth = bytes;
        if F::STEPS == 5 {
            (bytes, fifth) = digits(bytes);
        }
        macro_rules! put {
            ($step:literal, $bytes:expr, $place:literal) => {
                if (vector * F::STEPS + $step) < BLOCK / 4 {
                    let matrix = _mm512_set1_epi64(const { signed($place) });
                    let step = _mm512_gf2p8affine_epi64_epi8::<0xff>($bytes, matrix);
                    _mm512_storeu_si512(to.wrapping_add($step * 64).cast(), step);
                }
            };
        }
        put!(0, bytes, 0);
        put!(1, bytes, 1);
        put!(2, bytes, 2);
        put!(3, bytes, 3);
        if F::STEPS == 5 {
            // 0, 81 and 162 are 0, 1 and 2 in their two low bits.
            put!(4, fifth, 0);
        }
    }
}
