use std::cell::RefCell;
use std::ops::Range;

use super::kernels::{Element, MAX_QUERIES, Merge, Running, Softmax, Widen, accumulate, scores};
use super::kv::{KvView, Store};
use super::scalar::{self, softmax_base};
use super::{KV_TILE, KvLayout, SEGMENT, SEGMENT_TILES};
use crate::ops::math::exp;
use crate::ops::simd::{Kernel, LANES, Simd, max, run, sum_lanes};
use crate::pool::DisjointMut;
use crate::{Floats, Isa, Pool};

/// Queries that share a widened tile: 8 passes of 6, so that widening costs
/// little and the accumulators (24 KiB at 128 elements) stay in L2.
const TARGET_QUERIES: usize = 8 * MAX_QUERIES;

/// Bytes of a tile that are read again and again, by every pass: half of a small
/// L1 cache.
const PART_BYTES: usize = 16 << 10;

/// Tasks per thread below which work is split further, by segments.
const TASKS_PER_THREAD: usize = 2;

/// One query row.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// The row's position in its sequence; the row sees itself and what came
    /// before it.
    pub position: u32,
    /// The block of each tile of the sequence: position `p` is at offset
    /// `p % KV_TILE` of block `blocks[p / KV_TILE]`. Blocks outside the row's
    /// window are not looked at.
    ///
    /// Consecutive rows with the same slice are processed together.
    pub blocks: &'a [u32],
}

/// What [`attention`] reads.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Queries, `[m, heads, head_dim]`.
    pub q: &'a [f32],
    /// Keys and values of the layer.
    pub kv: KvView<'a>,
    /// Shape of keys and values.
    pub layout: KvLayout,
    /// Query heads, a multiple of `layout.kv_heads`: head `h` reads key head
    /// `h / (heads / kv_heads)`.
    pub heads: usize,
    /// What dot products are multiplied by, often `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// A row at `p` sees the last `window` positions, `p` included; all if
    /// `None`.
    pub window: Option<usize>,
    /// Scaled scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// The rows, `m` of them.
    pub rows: &'a [AttentionRow<'a>],
}

/// The positions that a row sees.
pub(super) fn visible(row: &AttentionRow<'_>, window: Option<usize>) -> Range<usize> {
    let end = row.position as usize + 1;
    end.saturating_sub(window.unwrap_or(end))..end
}

/// What accumulators are multiplied by at the end.
pub(super) fn inverse(sum: f32) -> f32 {
    if sum == 0.0 { 0.0 } else { 1.0 / sum }
}

/// Causal attention of `m` rows over the KV cache, into `out: [m, heads,
/// head_dim]`.
///
/// A row's result has the same bits whatever the other rows, the number of
/// threads and `isa`. A row that sees nothing (an empty window) gives zeros; a
/// NaN or infinite score, NaN.
///
/// # Panics
///
/// If a length does not match, `heads` is not a multiple of `kv_heads`, or a
/// visible position has no block within the stores.
pub fn attention(isa: Isa, pool: &Pool, args: &AttentionArgs<'_>, out: &mut [f32]) {
    let hd = args.layout.head_dim;
    let elements = args.rows.len() * args.heads * hd;
    assert_eq!(args.q.len(), elements, "length of q");
    assert_eq!(out.len(), elements, "length of out");
    if elements == 0 {
        return;
    }
    assert!(
        args.layout.kv_heads > 0 && args.heads.is_multiple_of(args.layout.kv_heads),
        "{} heads over {} of keys",
        args.heads,
        args.layout.kv_heads
    );
    match args.kv {
        KvView::F16 { keys, values } => checked(isa, pool, args, Store { keys, values }, out),
        KvView::F32 { keys, values } => checked(isa, pool, args, Store { keys, values }, out),
    }
}

/// [`attention`] on stores of one format.
fn checked<E: Element>(
    isa: Isa,
    pool: &Pool,
    args: &AttentionArgs<'_>,
    store: Store<'_, E>,
    out: &mut [f32],
) {
    let stored = store.keys.len().min(store.values.len()) / args.layout.block_elements();
    for row in args.rows {
        let seen = visible(row, args.window);
        let blocks = &row.blocks[seen.start / KV_TILE..seen.end.div_ceil(KV_TILE)];
        for block in blocks {
            assert!((*block as usize) < stored, "block {block} of {stored}");
        }
    }
    run(
        isa,
        Attention {
            isa,
            pool,
            args,
            store,
            out,
        },
    );
}

struct Attention<'a, E> {
    isa: Isa,
    pool: &'a Pool,
    args: &'a AttentionArgs<'a>,
    store: Store<'a, E>,
    out: &'a mut [f32],
}

impl<E: Element> Kernel for Attention<'_, E> {
    type Output = ();

    fn scalar(self) {
        let Attention { args, store, .. } = self;
        let hd = args.layout.head_dim;
        self.pool.run_chunks_mut(self.out, hd, &|start, out| {
            let index = start / hd;
            scalar::head(args, store, index / args.heads, index % args.heads, out);
        });
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        debug_assert_ne!(self.isa, Isa::Scalar);
        attend(s, self.pool, self.args, self.store, self.out);
    }
}

/// How the work is cut. Nothing of it shows in the result.
struct Plan<'a> {
    /// Consecutive rows with one block table.
    groups: &'a [Range<usize>],
    /// Parts into which the query heads of a key head are cut.
    head_parts: usize,
    /// Segments that any row sees.
    segments: Range<usize>,
    /// Whether each segment is a task of its own.
    split: bool,
}

/// What one task works on: the queries of some rows and heads, over the
/// segments of a range.
struct Span {
    rows: Range<usize>,
    kv_head: usize,
    heads: Range<usize>,
    segments: Range<usize>,
}

impl<'a> Plan<'a> {
    fn new(args: &AttentionArgs<'_>, threads: usize, groups: &'a mut Vec<Range<usize>>) -> Self {
        let group_heads = args.heads / args.layout.kv_heads;
        let most_rows = (TARGET_QUERIES / group_heads).max(1);
        groups.clear();
        let (mut first_segment, mut end_segment) = (usize::MAX, 0);
        for (r, row) in args.rows.iter().enumerate() {
            let seen = visible(row, args.window);
            first_segment = first_segment.min(seen.start / SEGMENT);
            end_segment = end_segment.max(seen.end.div_ceil(SEGMENT));
            match groups.last_mut() {
                Some(group)
                    if group.len() < most_rows
                        && std::ptr::eq(args.rows[group.start].blocks, row.blocks) =>
                {
                    group.end = r + 1;
                }
                _ => groups.push(r..r + 1),
            }
        }
        let segments = first_segment..end_segment;
        let wanted = threads * TASKS_PER_THREAD;
        let whole = groups.len() * args.layout.kv_heads;
        let split = threads > 1 && whole < wanted && segments.len() > 1;
        let tasks = if split { whole * segments.len() } else { whole };
        // Cutting a key head's queries makes every part read its tiles again,
        // so it is the last resort, and no part is below one full pass.
        let head_parts = if threads > 1 && tasks < threads {
            threads
                .div_ceil(tasks)
                .min(group_heads.div_ceil(MAX_QUERIES))
        } else {
            1
        };
        Plan {
            groups,
            head_parts,
            segments,
            split,
        }
    }

    fn tasks(&self, args: &AttentionArgs<'_>) -> usize {
        let segments = if self.split { self.segments.len() } else { 1 };
        self.groups.len() * args.layout.kv_heads * self.head_parts * segments
    }

    fn span(&self, args: &AttentionArgs<'_>, task: usize) -> Span {
        let (task, segments) = if self.split {
            let n = self.segments.len();
            let segment = self.segments.start + task % n;
            (task / n, segment..segment + 1)
        } else {
            (task, self.segments.clone())
        };
        let (task, part) = (task / self.head_parts, task % self.head_parts);
        let kv_heads = args.layout.kv_heads;
        let (group, kv_head) = (task / kv_heads, task % kv_heads);
        let group_heads = args.heads / kv_heads;
        let first = kv_head * group_heads;
        Span {
            rows: self.groups[group].clone(),
            kv_head,
            heads: first + group_heads * part / self.head_parts
                ..first + group_heads * (part + 1) / self.head_parts,
            segments,
        }
    }
}

/// What a task needs, kept by each thread from call to call.
#[derive(Default)]
struct Scratch {
    /// Queries, `[head_dim, queries of the pass]` for each pass.
    q: Floats,
    /// A widened tile of keys and one of values.
    k: Floats,
    v: Floats,
    /// A line for each query: scores, then weights.
    scores: Floats,
    states: Vec<Running>,
    /// Accumulators of the current segment, and of those before it.
    acc: Floats,
    whole: Floats,
    /// `(max, sum)` of the segments so far.
    wholes: Vec<Option<(f32, f32)>>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static CALL: RefCell<CallScratch> = RefCell::default();
}

/// What a call needs beside its tasks' scratch, kept by each calling thread.
#[derive(Default)]
struct CallScratch {
    groups: Vec<Range<usize>>,
    /// The segments' states, where segments are tasks.
    partials: Floats,
}

fn attend<S: Simd, E: Element>(
    s: S,
    pool: &Pool,
    args: &AttentionArgs<'_>,
    store: Store<'_, E>,
    out: &mut [f32],
) {
    CALL.with_borrow_mut(|scratch| {
        let CallScratch { groups, partials } = scratch;
        let plan = Plan::new(args, pool.threads(), groups);
        if plan.split {
            attend_by_segment(s, pool, args, store, &plan, partials, out);
        } else {
            attend_whole(s, pool, args, store, &plan, out);
        }
    });
}

/// A task takes its queries through all segments.
fn attend_whole<S: Simd, E: Element>(
    s: S,
    pool: &Pool,
    args: &AttentionArgs<'_>,
    store: Store<'_, E>,
    plan: &Plan<'_>,
    out: &mut [f32],
) {
    let out = DisjointMut::new(out);
    pool.run(plan.tasks(args), &|task| {
        SCRATCH.with_borrow_mut(|scratch| {
            let span = plan.span(args, task);
            scratch.prepare(args, &span);
            for segment in span.segments.clone() {
                scratch.segment(s, args, store, &span, segment);
                scratch.merge(s, args, segment, &span);
            }
            scratch.finish(args, &span, &out);
        });
    });
}

/// A task takes its queries through one segment; then the segments of each
/// query are merged.
fn attend_by_segment<S: Simd, E: Element>(
    s: S,
    pool: &Pool,
    args: &AttentionArgs<'_>,
    store: Store<'_, E>,
    plan: &Plan<'_>,
    partials: &mut Floats,
    out: &mut [f32],
) {
    let hd = args.layout.head_dim;
    // Each segment leaves `[acc: stride, max, sum]`, padded to whole lines.
    let stride = hd.next_multiple_of(LANES);
    let width = stride + LANES;
    let n = plan.segments.len();
    let base = plan.segments.start;
    let partials = DisjointMut::new(partials.sized(args.rows.len() * args.heads * n * width));
    pool.run(plan.tasks(args), &|task| {
        SCRATCH.with_borrow_mut(|scratch| {
            let span = plan.span(args, task);
            let segment = span.segments.start;
            scratch.prepare(args, &span);
            scratch.segment(s, args, store, &span, segment);
            let acc = scratch.acc.sized(scratch.states.len() * stride);
            for (i, acc) in acc.chunks_exact(stride).enumerate() {
                let at = (span.query(args, i) * n + segment - base) * width;
                // SAFETY: a query is in one span per segment, so each (query,
                // segment) is written by one task.
                let to = unsafe { partials.range(at..at + width) };
                to[..stride].copy_from_slice(acc);
                to[stride] = scratch.states[i].max;
                to[stride + 1] = sum_lanes(scratch.states[i].sums);
            }
        });
    });
    pool.run_chunks_mut(out, hd, &|start, out| {
        let query = start / hd;
        let seen = visible(&args.rows[query / args.heads], args.window);
        if seen.is_empty() {
            out.fill(0.0);
            return;
        }
        let first = seen.start / SEGMENT - base;
        let end = seen.end.div_ceil(SEGMENT) - base;
        let own = (query * n + first) * width..(query * n + end) * width;
        // SAFETY: the region above has ended, and each query's states are used
        // by its own task.
        let (whole, rest) = unsafe { partials.range(own) }.split_at_mut(width);
        for part in rest.chunks_exact(width) {
            let (acc, state) = whole.split_at_mut(stride);
            let now = (part[stride], part[stride + 1]);
            let merged = merge(s, (state[0], state[1]), acc, now, &part[..stride]);
            (state[0], state[1]) = merged;
        }
        let inverse = inverse(whole[stride + 1]);
        for (out, acc) in out.iter_mut().zip(&whole[..stride]) {
            *out = acc * inverse;
        }
    });
}

/// Merges a later segment into the state before it; the new `(max, sum)`.
fn merge<S: Simd>(
    s: S,
    whole: (f32, f32),
    whole_acc: &mut [f32],
    part: (f32, f32),
    part_acc: &[f32],
) -> (f32, f32) {
    let m = max(part.0, whole.0);
    let base = softmax_base(m);
    let (a, b) = (exp(whole.0 - base), exp(part.0 - base));
    s.call(Merge {
        whole: whole_acc,
        whole_factor: a,
        part: part_acc,
        part_factor: b,
    });
    (m, whole.1.mul_add(a, part.1 * b))
}

impl Span {
    fn queries(&self) -> usize {
        self.rows.len() * self.heads.len()
    }

    /// The passes over a tile: consecutive queries, up to [`MAX_QUERIES`] each,
    /// evenly.
    fn passes(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let n = self.queries();
        let passes = n.div_ceil(MAX_QUERIES);
        (0..passes).map(move |i| n * i / passes..n * (i + 1) / passes)
    }

    /// How many of `all` parts of a tile, of `bytes` each, the passes take one after
    /// the other: as many as stay in the L1 cache from pass to pass.
    fn part(&self, all: usize, bytes: usize) -> usize {
        if self.queries() <= MAX_QUERIES {
            return all;
        }
        (PART_BYTES / bytes).clamp(1, all)
    }

    /// Row and head of query `i`, as one index.
    fn query(&self, args: &AttentionArgs<'_>, i: usize) -> usize {
        let heads = self.heads.len();
        (self.rows.start + i / heads) * args.heads + self.heads.start + i % heads
    }
}

impl Scratch {
    /// Packs the span's queries.
    fn prepare(&mut self, args: &AttentionArgs<'_>, span: &Span) {
        let hd = args.layout.head_dim;
        let n = span.queries();
        let packed = self.q.sized(n * hd);
        for pass in span.passes() {
            let packed = &mut packed[pass.start * hd..pass.end * hd];
            for (r, i) in pass.clone().enumerate() {
                let q = &args.q[span.query(args, i) * hd..][..hd];
                for (line, q) in packed.chunks_exact_mut(pass.len()).zip(q) {
                    line[r] = *q;
                }
            }
        }
        self.states.clear();
        self.states.resize(n, Running::START);
        self.wholes.clear();
        self.wholes.resize(n, None);
    }

    /// The online softmax of all queries over one segment: leaves `states` and
    /// `acc`.
    fn segment<S: Simd, E: Element>(
        &mut self,
        s: S,
        args: &AttentionArgs<'_>,
        store: Store<'_, E>,
        span: &Span,
        segment: usize,
    ) {
        let hd = args.layout.head_dim;
        let stride = hd.next_multiple_of(LANES);
        let n = span.queries();
        let heads = span.heads.len();
        // Floats, and for few queries halves, are read from the cache as they are;
        // a head that is not whole vectors is padded by widening.
        let direct = (n <= MAX_QUERIES || E::WIDE) && hd == stride;
        self.states.fill(Running::START);
        let acc = self.acc.sized(n * stride);
        acc.fill(0.0);
        let lines = self.scores.sized(n * KV_TILE);
        let lines = lines.as_chunks_mut::<KV_TILE>().0;
        let packed = self.q.sized(n * hd);
        let blocks = args.rows[span.rows.start].blocks;

        let tiles = segment * SEGMENT_TILES..blocks.len().min((segment + 1) * SEGMENT_TILES);
        for tile in tiles {
            let start = tile * KV_TILE;
            let (mut lowest, mut highest) = (KV_TILE, 0);
            for (r, states) in self.states.chunks_exact_mut(heads).enumerate() {
                let seen = visible(&args.rows[span.rows.start + r], args.window);
                let first = seen.start.clamp(start, start + KV_TILE) - start;
                let end = seen.end.clamp(start, start + KV_TILE) - start;
                for state in states {
                    (state.first, state.end) = (first, end);
                }
                if first < end {
                    lowest = lowest.min(first);
                    highest = highest.max(end);
                }
            }
            if lowest >= highest {
                continue;
            }
            let block = blocks[tile] as usize;
            let at = args.layout.tile_start(block, span.kv_head);
            let k_tile = &store.keys[at..at + hd * KV_TILE];
            let v_tile = &store.values[at..at + hd * KV_TILE];

            if direct {
                all_scores(s, k_tile, hd, packed, span, lines);
            } else {
                let widened = self.k.sized(hd * KV_TILE);
                s.call(Widen {
                    from: k_tile,
                    from_stride: KV_TILE,
                    to: widened,
                    to_stride: KV_TILE,
                });
                all_scores(s, widened, hd, packed, span, lines);
            }
            s.call(Softmax {
                scale: args.scale,
                softcap: args.softcap,
                scores: lines,
                states: &mut self.states,
            });
            if direct {
                all_values(s, v_tile, stride, lines, span, &mut self.states, acc);
            } else {
                let widened = self.v.sized(KV_TILE * stride);
                s.call(Widen {
                    from: &v_tile[lowest * hd..highest * hd],
                    from_stride: hd,
                    to: &mut widened[lowest * stride..highest * stride],
                    to_stride: stride,
                });
                all_values(s, widened, stride, lines, span, &mut self.states, acc);
            }
        }
    }

    /// Merges the segment's state into those before it.
    fn merge<S: Simd>(&mut self, s: S, args: &AttentionArgs<'_>, segment: usize, span: &Span) {
        let stride = args.layout.head_dim.next_multiple_of(LANES);
        let n = self.states.len();
        let parts = self.acc.sized(n * stride).chunks_exact(stride);
        let wholes = self.whole.sized(n * stride).chunks_exact_mut(stride);
        for (i, (acc, part)) in wholes.zip(parts).enumerate() {
            let row = &args.rows[span.rows.start + i / span.heads.len()];
            let seen = visible(row, args.window);
            if seen.start >= (segment + 1) * SEGMENT || seen.end <= segment * SEGMENT {
                continue;
            }
            let state = &self.states[i];
            let now = (state.max, sum_lanes(state.sums));
            self.wholes[i] = Some(match self.wholes[i] {
                None => {
                    acc.copy_from_slice(part);
                    now
                }
                Some(before) => merge(s, before, acc, now, part),
            });
        }
    }

    /// Divides by the sums and writes the span's outputs.
    fn finish(&mut self, args: &AttentionArgs<'_>, span: &Span, out: &DisjointMut<'_, f32>) {
        let hd = args.layout.head_dim;
        let stride = hd.next_multiple_of(LANES);
        let wholes = self.whole.sized(self.states.len() * stride);
        for (i, acc) in wholes.chunks_exact(stride).enumerate() {
            let query = span.query(args, i);
            // SAFETY: without a split by segments, a query is in one span.
            let out = unsafe { out.range(query * hd..(query + 1) * hd) };
            match self.wholes[i] {
                None => out.fill(0.0),
                Some((_, sum)) => {
                    let inverse = inverse(sum);
                    for (out, acc) in out.iter_mut().zip(acc) {
                        *out = acc * inverse;
                    }
                }
            }
        }
    }
}

/// Scores of all of a span's queries against a tile of keys, `[head_dim][KV_TILE]`.
fn all_scores<S: Simd, E: Element>(
    s: S,
    k: &[E],
    hd: usize,
    packed: &[f32],
    span: &Span,
    lines: &mut [[f32; KV_TILE]],
) {
    let part = span.part(hd, KV_TILE * size_of::<E>());
    for (i, k) in k.as_chunks::<KV_TILE>().0.chunks(part).enumerate() {
        let first = i * part;
        for pass in span.passes() {
            let queries = pass.len();
            let q = &packed[pass.start * hd..pass.end * hd];
            let q = &q[first * queries..(first + k.len()) * queries];
            scores(s, k, q, &mut lines[pass], i == 0);
        }
    }
}

/// Adds a tile of values, `[KV_TILE][stride]`, to the accumulators of all of a
/// span's queries.
fn all_values<S: Simd, E: Element>(
    s: S,
    v: &[E],
    stride: usize,
    weights: &[[f32; KV_TILE]],
    span: &Span,
    states: &mut [Running],
    acc: &mut [f32],
) {
    let all = stride / LANES;
    let part = span.part(all, KV_TILE * LANES * size_of::<E>());
    for first in (0..all).step_by(part) {
        let vectors = first..all.min(first + part);
        let last = vectors.end == all;
        for pass in span.passes() {
            let acc = &mut acc[pass.start * stride..pass.end * stride];
            let states = &mut states[pass.clone()];
            let mut rescales = [1.0; MAX_QUERIES];
            for (rescale, state) in rescales.iter_mut().zip(&*states) {
                *rescale = state.rescale;
            }
            values(s, v, stride, vectors.clone(), &weights[pass], states, acc);
            if !last {
                // The other vectors are still behind by that factor.
                for (rescale, state) in rescales.iter().zip(states) {
                    state.rescale = *rescale;
                }
            }
        }
    }
}

/// Adds a tile's values to the accumulators of one pass, each query over what
/// it sees of the tile.
///
/// Queries of neighbouring rows differ by a position or two: what all see is
/// done together, what only some see one by one, before or after, so that each
/// query's order stays that of its positions.
fn values<S: Simd, E: Element>(
    s: S,
    v: &[E],
    stride: usize,
    vectors: Range<usize>,
    weights: &[[f32; KV_TILE]],
    states: &mut [Running],
    acc: &mut [f32],
) {
    let first = states.iter().map(|q| q.first).max().unwrap_or(0);
    let end = states.iter().map(|q| q.end).min().unwrap_or(0);
    let together = first < end;
    for i in 0..states.len() {
        let (own_first, own_end) = (states[i].first, states[i].end);
        let before = if together {
            own_first..first
        } else {
            own_first..own_end
        };
        if before.start < before.end {
            let (states, acc) = (&mut states[i..=i], &mut acc[i * stride..(i + 1) * stride]);
            let positions = (before.start, before.end);
            let vectors = vectors.clone();
            accumulate(
                s,
                v,
                stride,
                vectors,
                positions,
                &weights[i..=i],
                states,
                acc,
            );
        }
    }
    if !together {
        return;
    }
    let common = (first, end);
    accumulate(s, v, stride, vectors.clone(), common, weights, states, acc);
    for i in 0..states.len() {
        let own_end = states[i].end;
        if end < own_end {
            let (states, acc) = (&mut states[i..=i], &mut acc[i * stride..(i + 1) * stride]);
            let (vectors, positions) = (vectors.clone(), (end, own_end));
            accumulate(
                s,
                v,
                stride,
                vectors,
                positions,
                &weights[i..=i],
                states,
                acc,
            );
        }
    }
}
