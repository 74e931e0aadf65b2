use super::kernels::Element;
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

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// Half precision, rounded to nearest even; beyond ±65504, and for
    /// infinities, to ±65504 (one element out of range must not turn scores into
    /// NaN). NaN stays NaN.
    #[default]
    F16,
    /// Single precision, exactly.
    F32,
}

impl KvFormat {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            KvFormat::F16 => 2,
            KvFormat::F32 => 4,
        }
    }
}

/// One layer's keys and values, laid out as the [module](super) says.
#[derive(Clone, Copy, Debug)]
pub enum KvView<'a> {
    /// [`KvFormat::F16`].
    F16 {
        /// Keys.
        keys: &'a [u16],
        /// Values.
        values: &'a [u16],
    },
    /// [`KvFormat::F32`].
    F32 {
        /// Keys.
        keys: &'a [f32],
        /// Values.
        values: &'a [f32],
    },
}

/// As [`KvView`], to write to.
#[derive(Debug)]
pub enum KvViewMut<'a> {
    /// [`KvFormat::F16`].
    F16 {
        /// Keys.
        keys: &'a mut [u16],
        /// Values.
        values: &'a mut [u16],
    },
    /// [`KvFormat::F32`].
    F32 {
        /// Keys.
        keys: &'a mut [f32],
        /// Values.
        values: &'a mut [f32],
    },
}

/// The keys and values of a layer, of one format.
#[derive(Clone, Copy)]
pub(super) struct Store<'a, E> {
    pub(super) keys: &'a [E],
    pub(super) values: &'a [E],
}

/// Rounds up to 16 elements to halves.
pub(super) fn round(isa: Isa, from: &[f32], to: &mut [u16]) {
    let mut halves = [0; LANES];
    run(
        isa,
        Round {
            from,
            to: &mut halves,
        },
    );
    to.copy_from_slice(&halves[..to.len()]);
}

/// Writes the keys and values of one position, `[kv_heads, head_dim]` each, at
/// `offset` of `block`, rounded as the [format](KvFormat) says.
///
/// # Panics
///
/// If a row has another length than `layout` says, `offset` is not below
/// [`KV_TILE`], or a store is too short for `block`.
pub fn kv_write(
    isa: Isa,
    layout: KvLayout,
    to: KvViewMut<'_>,
    (block, offset): (usize, usize),
    k_row: &[f32],
    v_row: &[f32],
) {
    assert_eq!(k_row.len(), layout.row_elements(), "length of a key row");
    assert_eq!(v_row.len(), layout.row_elements(), "length of a value row");
    assert!(offset < KV_TILE, "offset {offset} of {KV_TILE} in a block");
    match to {
        KvViewMut::F16 { keys, values } => {
            write(isa, layout, (keys, values), (block, offset), k_row, v_row);
        }
        KvViewMut::F32 { keys, values } => {
            write(isa, layout, (keys, values), (block, offset), k_row, v_row);
        }
    }
}

fn write<E: Element>(
    isa: Isa,
    layout: KvLayout,
    (k_store, v_store): (&mut [E], &mut [E]),
    (block, offset): (usize, usize),
    k_row: &[f32],
    v_row: &[f32],
) {
    let hd = layout.head_dim;
    let mut stored = [E::default(); LANES];
    for kv_head in 0..layout.kv_heads {
        let tile = layout.tile_start(block, kv_head)..layout.tile_start(block, kv_head + 1);
        let head = kv_head * hd..(kv_head + 1) * hd;
        let k_tile = &mut k_store[tile.clone()];
        for (i, from) in k_row[head.clone()].chunks(LANES).enumerate() {
            let stored = &mut stored[..from.len()];
            E::narrow(isa, from, stored);
            let lines = k_tile[i * LANES * KV_TILE..].chunks_exact_mut(KV_TILE);
            for (line, value) in lines.zip(stored) {
                line[offset] = *value;
            }
        }
        let v_line = &mut v_store[tile][offset * hd..(offset + 1) * hd];
        for (line, from) in v_line.chunks_mut(LANES).zip(v_row[head].chunks(LANES)) {
            E::narrow(isa, from, line);
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
    from: KvView<'_>,
    (block, offset): (usize, usize),
    k_row: &mut [f32],
    v_row: &mut [f32],
) {
    assert_eq!(k_row.len(), layout.row_elements(), "length of a key row");
    assert_eq!(v_row.len(), layout.row_elements(), "length of a value row");
    assert!(offset < KV_TILE, "offset {offset} of {KV_TILE} in a block");
    match from {
        KvView::F16 { keys, values } => {
            read(
                layout,
                Store { keys, values },
                (block, offset),
                k_row,
                v_row,
            );
        }
        KvView::F32 { keys, values } => {
            read(
                layout,
                Store { keys, values },
                (block, offset),
                k_row,
                v_row,
            );
        }
    }
}

fn read<E: Element>(
    layout: KvLayout,
    store: Store<'_, E>,
    (block, offset): (usize, usize),
    k_row: &mut [f32],
    v_row: &mut [f32],
) {
    let hd = layout.head_dim;
    for kv_head in 0..layout.kv_heads {
        let tile = layout.tile_start(block, kv_head)..layout.tile_start(block, kv_head + 1);
        let (k_tile, v_tile) = (&store.keys[tile.clone()], &store.values[tile]);
        for d in 0..hd {
            k_row[kv_head * hd + d] = k_tile[d * KV_TILE + offset].widen();
            v_row[kv_head * hd + d] = v_tile[offset * hd + d].widen();
        }
    }
}
