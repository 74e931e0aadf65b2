//! Attention over a tiled KV cache of halves or floats.
//!
//! A block of the cache holds [`KV_TILE`] consecutive positions of one
//! sequence. Keys are stored transposed, `[block][kv_head][head_dim][KV_TILE]`,
//! so that the lanes of a score vector are positions; values as
//! `[block][kv_head][KV_TILE][head_dim]`, so that the lanes of an output vector
//! are elements of the head.
//!
//! The result of a row is a function of its query, its visible positions and
//! their keys and values, and of nothing else: not of the other rows, nor of
//! the number of threads. `scalar` defines it:
//!
//! * Positions are cut at absolute multiples of 1024 into segments and of 64
//!   into tiles. A segment runs an online softmax over its tiles in order; the
//!   segments' `(max, sum, accumulator)` are merged in order.
//! * A score is a chain of fused multiply-adds over `head_dim`; an output
//!   element is one over the visible positions of a tile; a sum of
//!   exponentials keeps 16 accumulators, position `p` in accumulator `p % 16`.
//!
//! Invisible positions are never read into a result, so what a block holds
//! there (stale numbers, NaN) does not matter.

mod kernels;
mod kv;
mod scalar;
mod task;

#[cfg(all(test, not(loom)))]
mod tests;

pub use kv::{KV_TILE, KvFormat, KvLayout, KvView, KvViewMut, kv_read, kv_write};
pub use task::{AttentionArgs, AttentionRow, attention};

/// Tiles in a segment.
const SEGMENT_TILES: usize = 16;
/// Positions in a segment.
const SEGMENT: usize = SEGMENT_TILES * KV_TILE;
