//! The definition: one query head at a time, in plain Rust.

use super::kernels::Element;
use super::kv::Store;
use super::task::{AttentionArgs, visible};
use super::{KV_TILE, SEGMENT, SEGMENT_TILES};
use crate::ops::math;
use crate::ops::simd::{LANES, max, sum_lanes};

/// The state of an online softmax.
struct Partial {
    max: f32,
    sum: f32,
    acc: Vec<f32>,
}

/// Attention of query head `head` of row `row`, into `out: [head_dim]`.
pub(super) fn head<E: Element>(
    args: &AttentionArgs<'_>,
    store: Store<'_, E>,
    row: usize,
    head: usize,
    out: &mut [f32],
) {
    let seen = visible(&args.rows[row], args.window);
    let mut whole: Option<Partial> = None;
    for segment in seen.start / SEGMENT..seen.end.div_ceil(SEGMENT) {
        let part = segment_of(args, store, row, head, segment);
        whole = Some(match whole {
            None => part,
            Some(whole) => merge(whole, part),
        });
    }
    match whole {
        Some(whole) => {
            let inverse = super::task::inverse(whole.sum);
            for (out, acc) in out.iter_mut().zip(whole.acc) {
                *out = acc * inverse;
            }
        }
        None => out.fill(0.0),
    }
}

/// The online softmax over the tiles of one segment.
fn segment_of<E: Element>(
    args: &AttentionArgs<'_>,
    store: Store<'_, E>,
    row: usize,
    head: usize,
    segment: usize,
) -> Partial {
    let hd = args.layout.head_dim;
    let kv_head = head / (args.heads / args.layout.kv_heads);
    let q = &args.q[(row * args.heads + head) * hd..][..hd];
    let seen = visible(&args.rows[row], args.window);
    let mut m = f32::NEG_INFINITY;
    let mut sums = [0.0f32; LANES];
    let mut acc = vec![0.0f32; hd];
    for tile in segment * SEGMENT_TILES..(segment + 1) * SEGMENT_TILES {
        let first = seen.start.max(tile * KV_TILE);
        let end = seen.end.min((tile + 1) * KV_TILE);
        if first >= end {
            continue;
        }
        let lanes = first - tile * KV_TILE..end - tile * KV_TILE;
        let start = args
            .layout
            .tile_start(args.rows[row].blocks[tile] as usize, kv_head);
        let k = |d: usize, j: usize| store.keys[start + d * KV_TILE + j].widen();
        let v = |j: usize, d: usize| store.values[start + j * hd + d].widen();

        let mut scores = [f32::NEG_INFINITY; KV_TILE];
        for j in lanes.clone() {
            let mut dot = 0.0f32;
            for (d, q) in q.iter().enumerate() {
                dot = q.mul_add(k(d, j), dot);
            }
            scores[j] = match args.softcap {
                None => dot * args.scale,
                Some(cap) => math::softcap(dot * args.scale, cap),
            };
        }
        let mut new_max = m;
        for s in scores {
            // A NaN score is passed over here and shows in the sum. The order
            // matters for the sign of a zero only, which makes no difference.
            new_max = max(s, new_max);
        }
        let base = softmax_base(new_max);
        let rescale = math::exp(m - base);
        m = new_max;
        let p = scores.map(|s| math::exp(s - base));
        for (l, sum) in sums.iter_mut().enumerate() {
            let tile_sum = (p[l] + p[l + 16]) + (p[l + 32] + p[l + 48]);
            *sum = sum.mul_add(rescale, tile_sum);
        }
        for (d, acc) in acc.iter_mut().enumerate() {
            *acc *= rescale;
            for j in lanes.clone() {
                *acc = p[j].mul_add(v(j, d), *acc);
            }
        }
    }
    Partial {
        max: m,
        sum: sum_lanes(sums),
        acc,
    }
}

/// What is subtracted from scores before the exponential: their maximum, or 0
/// where every score so far is -inf (whose difference would be NaN).
pub(super) fn softmax_base(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

fn merge(mut whole: Partial, part: Partial) -> Partial {
    let m = max(part.max, whole.max);
    let base = softmax_base(m);
    let (a, b) = (math::exp(whole.max - base), math::exp(part.max - base));
    whole.max = m;
    whole.sum = whole.sum.mul_add(a, part.sum * b);
    for (acc, part) in whole.acc.iter_mut().zip(part.acc) {
        *acc = acc.mul_add(a, part * b);
    }
    whole
}
