use crate::Isa;
use crate::ops::simd::{Kernel, LANES, Simd, run};

/// Positions in a block of the KV cache.
pub const KV_TILE: usize = 64;

/// The greatest finite half.
const F16_MAX: f32 = 65504.0;

/// The shape of one layer's keys (or values) at one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl KvLayout {
    /// Elements of the keys (or of the values) at one position.
    pub const fn row_elements(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements that a block takes in the key store, and again in the value
    /// store.
    pub const fn block_elements(self) -> usize {
        self.row_elements() * KV_TILE
    }

    /// Where the tile of a head begins in either store.
    pub(super) const fn tile_start(self, block: usize, kv_head: usize) -> usize {
        (block * self.kv_heads + kv_head) * self.head_dim * KV_TILE
    }
}

/// Sixteen elements of a row to halves, clamped to the finite ones.
struct Round<'a> {
    from: &'a [f32],
    to: &'a mut [u16; LANES],
}

impl Kernel for Round<'_> {
    type Output = ();

    fn scalar(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = half::f16::from_f32(from.clamp(-F16_MAX, F16_MAX)).to_bits();
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let mut x = [0.0; LANES];
        x[..self.from.len()].copy_from_slice(self.from);
        // NaN goes through: it is the second operand of both.
        let x = s.max(s.splat(-F16_MAX), s.load(&x));
        s.store_f16(self.to, s.min(s.splat(F16_MAX), x));
    }
}

/// Writes the keys and values of one position, `[kv_heads, head_dim]` each, at
/// `offset` of `block`.
///
/// Elements are rounded to half precision, to nearest even; beyond ±65504, and
/// for infinities, to ±65504 (one element out of range must not turn scores
/// into NaN). NaN stays NaN.
///
/// # Panics
///
/// If a row has another length than `layout` says, `offset` is not below
/// [`KV_TILE`], or a store is too short for `block`.
#[allow(clippy::too_many_arguments)] // two stores and two rows at one place
pub fn kv_write(
    isa: Isa,
    layout: KvLayout,
    k_store: &mut [u16],
    v_store: &mut [u16],
    block: usize,
    offset: usize,
    k_row: &[f32],
    v_row: &[f32],
) {
    let hd = layout.head_dim;
    assert_eq!(k_row.len(), layout.row_elements(), "length of a key row");
    assert_eq!(v_row.len(), layout.row_elements(), "length of a value row");
    assert!(offset < KV_TILE, "offset {offset} of {KV_TILE} in a block");
    let mut halves = [0; LANES];
    for kv_head in 0..layout.kv_heads {
        let tile = layout.tile_start(block, kv_head)..layout.tile_start(block, kv_head + 1);
        let head = kv_head * hd..(kv_head + 1) * hd;
        let k_tile = &mut k_store[tile.clone()];
        for (i, from) in k_row[head.clone()].chunks(LANES).enumerate() {
            let to = &mut halves;
            run(isa, Round { from, to });
            let lines = k_tile[i * LANES * KV_TILE..].chunks_exact_mut(KV_TILE);
            for (line, half) in lines.zip(&halves[..from.len()]) {
                line[offset] = *half;
            }
        }
        let v_line = &mut v_store[tile][offset * hd..(offset + 1) * hd];
        for (line, from) in v_line.chunks_mut(LANES).zip(v_row[head].chunks(LANES)) {
            let to = &mut halves;
            run(isa, Round { from, to });
            line.copy_from_slice(&halves[..line.len()]);
        }
    }
}

/// Reads what [`kv_write`] wrote: the keys and values of one position,
/// `[kv_heads, head_dim]` each, exactly.
///
/// # Panics
///
/// As [`kv_write`].
pub fn kv_read(
    layout: KvLayout,
    k_store: &[u16],
    v_store: &[u16],
    block: usize,
    offset: usize,
    k_row: &mut [f32],
    v_row: &mut [f32],
) {
    let hd = layout.head_dim;
    assert_eq!(k_row.len(), layout.row_elements(), "length of a key row");
    assert_eq!(v_row.len(), layout.row_elements(), "length of a value row");
    assert!(offset < KV_TILE, "offset {offset} of {KV_TILE} in a block");
    for kv_head in 0..layout.kv_heads {
        let tile = layout.tile_start(block, kv_head)..layout.tile_start(block, kv_head + 1);
        let (k_tile, v_tile) = (&k_store[tile.clone()], &v_store[tile]);
        for d in 0..hd {
            let k = half::f16::from_bits(k_tile[d * KV_TILE + offset]);
            let v = half::f16::from_bits(v_tile[offset * hd + d]);
            k_row[kv_head * hd + d] = k.to_f32();
            v_row[kv_head * hd + d] = v.to_f32();
        }
    }
}
