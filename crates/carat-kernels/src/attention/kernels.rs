//! The vector kernels of attention: scores of a tile, softmax, values of a tile.

use std::ops::Range;

use super::KV_TILE;
use super::scalar::softmax_base;
use crate::Isa;
use crate::ops::math::{exp, exp_lanes, softcap_lanes};
use crate::ops::simd::{Kernel, LANES, Simd};

/// Vectors in a row of scores.
const TILE_VECTORS: usize = KV_TILE / LANES;

/// The most queries that one pass over a tile serves: 6 x 4 accumulators leave
/// 8 of AVX-512's 32 registers for keys and a broadcast.
pub(super) const MAX_QUERIES: usize = 6;

/// How the elements of a tile are stored: halves or floats; floats also where a
/// task has widened a tile for many queries.
pub(super) trait Element: Copy + Default + Send + Sync + 'static {
    /// Whether it is as wide as it gets.
    const WIDE: bool;

    fn load<S: Simd>(s: S, x: &[Self; LANES]) -> S::F;
    fn widen(self) -> f32;
    /// Rounds up to 16 elements.
    fn narrow(isa: Isa, from: &[f32], to: &mut [Self]);
}

impl Element for f32 {
    const WIDE: bool = true;

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[f32; LANES]) -> S::F {
        s.load(x)
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    fn narrow(_: Isa, from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Element for u16 {
    const WIDE: bool = false;

    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[u16; LANES]) -> S::F {
        s.load_f16(x)
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        half::f16::from_bits(self).to_f32()
    }

    fn narrow(isa: Isa, from: &[f32], to: &mut [u16]) {
        super::kv::round(isa, from, to);
    }
}

/// Unscaled scores of up to [`MAX_QUERIES`] queries against a tile of keys, or
/// what a part of the head's elements adds to them.
///
/// `k` is `[elements]` lines of positions, `q` is `[elements, queries]`, and
/// `scores` has a line for each query, started if `first`.
pub(super) fn scores<S: Simd, E: Element>(
    s: S,
    k: &[[E; KV_TILE]],
    q: &[f32],
    scores: &mut [[f32; KV_TILE]],
    first: bool,
) {
    match (S::WIDE, scores.len()) {
        (true, 1) => s.call(Scores::<E, 1, 4>::new(k, q, scores, first)),
        (true, 2) => s.call(Scores::<E, 2, 4>::new(k, q, scores, first)),
        (true, 3) => s.call(Scores::<E, 3, 4>::new(k, q, scores, first)),
        (true, 4) => s.call(Scores::<E, 4, 4>::new(k, q, scores, first)),
        (true, 5) => s.call(Scores::<E, 5, 4>::new(k, q, scores, first)),
        (true, 6) => s.call(Scores::<E, 6, 4>::new(k, q, scores, first)),
        (false, 1) => s.call(Scores::<E, 1, 4>::new(k, q, scores, first)),
        (false, 2) => s.call(Scores::<E, 2, 2>::new(k, q, scores, first)),
        (false, 3) => s.call(Scores::<E, 3, 2>::new(k, q, scores, first)),
        (false, 4) => s.call(Scores::<E, 4, 1>::new(k, q, scores, first)),
        (false, 5) => s.call(Scores::<E, 5, 1>::new(k, q, scores, first)),
        (false, 6) => s.call(Scores::<E, 6, 1>::new(k, q, scores, first)),
        (_, n) => unreachable!("{n} queries in one pass"),
    }
}

/// `R` queries by `C` vectors of positions in registers.
struct Scores<'a, E, const R: usize, const C: usize> {
    k: &'a [[E; KV_TILE]],
    q: &'a [[f32; R]],
    scores: &'a mut [[f32; KV_TILE]; R],
    first: bool,
}

impl<'a, E: Element, const R: usize, const C: usize> Scores<'a, E, R, C> {
    fn new(
        k: &'a [[E; KV_TILE]],
        q: &'a [f32],
        scores: &'a mut [[f32; KV_TILE]],
        first: bool,
    ) -> Self {
        let (q, rest) = q.as_chunks::<R>();
        assert!(rest.is_empty() && q.len() == k.len());
        let scores = scores.try_into().expect("invariant: R lines of scores");
        Scores {
            k,
            q,
            scores,
            first,
        }
    }
}

impl<E: Element, const R: usize, const C: usize> Kernel for Scores<'_, E, R, C> {
    type Output = ();

    fn scalar(self) {
        unreachable!("the scalar form of attention works on whole heads");
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        for first in (0..TILE_VECTORS).step_by(C) {
            let mut acc = [[s.splat(0.0); C]; R];
            if !self.first {
                for (acc, scores) in acc.iter_mut().zip(&*self.scores) {
                    let lines = &scores.as_chunks::<LANES>().0[first..first + C];
                    for (acc, line) in acc.iter_mut().zip(lines) {
                        *acc = s.load(line);
                    }
                }
            }
            for (k, q) in self.k.iter().zip(self.q) {
                let lines = &k.as_chunks::<LANES>().0[first..first + C];
                let mut keys = [s.splat(0.0); C];
                for (key, line) in keys.iter_mut().zip(lines) {
                    *key = E::load(s, line);
                }
                for (acc, q) in acc.iter_mut().zip(q) {
                    let q = s.splat(*q);
                    for (acc, key) in acc.iter_mut().zip(&keys) {
                        *acc = s.fma(q, *key, *acc);
                    }
                }
            }
            for (scores, acc) in self.scores.iter_mut().zip(&acc) {
                let lines = &mut scores.as_chunks_mut::<LANES>().0[first..first + C];
                for (line, acc) in lines.iter_mut().zip(acc) {
                    s.store(line, *acc);
                }
            }
        }
    }
}

/// What a query needs between tiles, beside its accumulator.
#[derive(Clone, Copy)]
pub(super) struct Running {
    /// The maximum so far; the exponentials are relative to it.
    pub(super) max: f32,
    /// The sum of exponentials, in 16 parts.
    pub(super) sums: [f32; LANES],
    /// The factor that the accumulator is behind: `exp(old max - new max)`.
    pub(super) rescale: f32,
    /// The visible positions of the current tile.
    pub(super) first: usize,
    pub(super) end: usize,
}

impl Running {
    pub(super) const START: Running = Running {
        max: f32::NEG_INFINITY,
        sums: [0.0; LANES],
        rescale: 1.0,
        first: 0,
        end: 0,
    };
}

/// Turns scores into exponentials, in place, and moves the running states on.
/// A query that sees nothing of the tile is passed over.
pub(super) struct Softmax<'a> {
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    pub(super) scores: &'a mut [[f32; KV_TILE]],
    pub(super) states: &'a mut [Running],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    fn scalar(self) {
        unreachable!("the scalar form of attention works on whole heads");
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let scale = s.splat(self.scale);
        let low = s.splat(f32::NEG_INFINITY);
        for (line, state) in self.scores.iter_mut().zip(self.states) {
            if state.first >= state.end {
                continue;
            }
            let lines = line.as_chunks_mut::<LANES>().0;
            let mut x = [low; TILE_VECTORS];
            for (x, line) in x.iter_mut().zip(&*lines) {
                *x = s.mul(s.load(line), scale);
            }
            if let Some(cap) = self.softcap {
                for x in &mut x {
                    *x = softcap_lanes(s, *x, cap);
                }
            }
            if state.end - state.first < KV_TILE {
                let mask = (u64::MAX >> (KV_TILE - state.end)) & (u64::MAX << state.first);
                for (v, x) in x.iter_mut().enumerate() {
                    *x = s.blend((mask >> (v * LANES)) as u16, *x, low);
                }
            }
            let mut most = s.splat(state.max);
            for x in x {
                most = s.max(x, most);
            }
            let max = s.maximum(most);
            let base = softmax_base(max);
            let rescale = if state.max == max {
                // exp(0), or exp(-inf) of a state that is still all zero.
                1.0
            } else {
                exp(state.max - base)
            };
            let base = s.splat(base);
            for (x, line) in x.iter_mut().zip(lines) {
                *x = exp_lanes(s, s.sub(*x, base));
                s.store(line, *x);
            }
            let tile_sum = s.add(s.add(x[0], x[1]), s.add(x[2], x[3]));
            let sums = s.fma(s.load(&state.sums), s.splat(rescale), tile_sum);
            s.store(&mut state.sums, sums);
            state.max = max;
            state.rescale = rescale;
        }
    }
}

/// Rescales the accumulators of `weights.len()` queries and adds the values of
/// positions `first..end`, weighted; of the head's elements, those of the
/// vectors of a range.
///
/// `v` is `[KV_TILE, stride]`, `acc` is `[queries, stride]`; `stride` is a whole
/// number of vectors.
#[allow(clippy::too_many_arguments)] // a part of a tile for some queries
pub(super) fn accumulate<S: Simd, E: Element>(
    s: S,
    v: &[E],
    stride: usize,
    vectors: Range<usize>,
    positions: (usize, usize),
    weights: &[[f32; KV_TILE]],
    states: &mut [Running],
    acc: &mut [f32],
) {
    let args = Values {
        v,
        stride,
        vectors,
        positions,
        weights,
        states,
        acc,
    };
    match weights.len() {
        1 => s.call(Rows::<E, 1>(args)),
        2 => s.call(Rows::<E, 2>(args)),
        3 => s.call(Rows::<E, 3>(args)),
        4 => s.call(Rows::<E, 4>(args)),
        5 => s.call(Rows::<E, 5>(args)),
        6 => s.call(Rows::<E, 6>(args)),
        n => unreachable!("{n} queries in one pass"),
    }
}

struct Values<'a, E> {
    v: &'a [E],
    stride: usize,
    vectors: Range<usize>,
    positions: (usize, usize),
    weights: &'a [[f32; KV_TILE]],
    states: &'a mut [Running],
    acc: &'a mut [f32],
}

struct Rows<'a, E, const R: usize>(Values<'a, E>);

impl<E: Element, const R: usize> Kernel for Rows<'_, E, R> {
    type Output = ();

    fn scalar(self) {
        unreachable!("the scalar form of attention works on whole heads");
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let mut args = self.0;
        let Range {
            start: mut done,
            end: vectors,
        } = args.vectors.clone();
        // The most columns whose accumulators fit the registers, then fewer.
        // The unused branches fold away: all but `done` is constant.
        let most = if S::WIDE { 24 / R } else { MAX_QUERIES / R };
        if most >= 8 {
            while vectors - done >= 8 {
                columns::<S, E, R, 8>(s, &mut args, done);
                done += 8;
            }
        }
        if most >= 4 {
            while vectors - done >= 4 {
                columns::<S, E, R, 4>(s, &mut args, done);
                done += 4;
            }
        }
        if most >= 2 {
            while vectors - done >= 2 {
                columns::<S, E, R, 2>(s, &mut args, done);
                done += 2;
            }
        }
        while done < vectors {
            columns::<S, E, R, 1>(s, &mut args, done);
            done += 1;
        }
        for state in args.states {
            state.rescale = 1.0;
        }
    }
}

/// `R` queries by `C` vectors of head elements, from vector `at` on.
#[inline(always)]
fn columns<S: Simd, E: Element, const R: usize, const C: usize>(
    s: S,
    args: &mut Values<'_, E>,
    at: usize,
) {
    let (stride, start) = (args.stride, at * LANES);
    let (first, end) = args.positions;
    let weights: &[[f32; KV_TILE]; R] = args
        .weights
        .try_into()
        .expect("invariant: R lines of weights");
    let mut acc = [[s.splat(0.0); C]; R];
    for ((acc, line), state) in acc
        .iter_mut()
        .zip(args.acc.chunks_exact(stride))
        .zip(&*args.states)
    {
        let rescale = s.splat(state.rescale);
        let line = line[start..start + C * LANES].as_chunks::<LANES>().0;
        for (acc, line) in acc.iter_mut().zip(line) {
            *acc = s.mul(s.load(line), rescale);
        }
    }
    assert!(end <= KV_TILE);
    for (j, line) in args
        .v
        .chunks_exact(stride)
        .enumerate()
        .take(end)
        .skip(first)
    {
        let line = line[start..start + C * LANES].as_chunks::<LANES>().0;
        let mut values = [s.splat(0.0); C];
        for (value, line) in values.iter_mut().zip(line) {
            *value = E::load(s, line);
        }
        for (acc, weights) in acc.iter_mut().zip(weights) {
            let weight = s.splat(weights[j]);
            for (acc, value) in acc.iter_mut().zip(&values) {
                *acc = s.fma(weight, *value, *acc);
            }
        }
    }
    for (acc, line) in acc.iter().zip(args.acc.chunks_exact_mut(stride)) {
        let line = line[start..start + C * LANES].as_chunks_mut::<LANES>().0;
        for (acc, line) in acc.iter().zip(line) {
            s.store(line, *acc);
        }
    }
}

/// Widens a tile: lines of `from_stride` elements to lines of `to_stride` floats,
/// with zeros after each line.
pub(super) struct Widen<'a, E> {
    pub(super) from: &'a [E],
    pub(super) from_stride: usize,
    pub(super) to: &'a mut [f32],
    pub(super) to_stride: usize,
}

impl<E: Element> Kernel for Widen<'_, E> {
    type Output = ();

    fn scalar(self) {
        unreachable!("the scalar form of attention works on whole heads");
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let lines = self.from.chunks_exact(self.from_stride);
        for (from, to) in lines.zip(self.to.chunks_exact_mut(self.to_stride)) {
            let (blocks, rest) = from.as_chunks::<LANES>();
            let (to_blocks, _) = to.as_chunks_mut::<LANES>();
            let (to_whole, to_tail) = to_blocks.split_at_mut(blocks.len());
            for (from, to) in blocks.iter().zip(to_whole) {
                s.store(to, E::load(s, from));
            }
            if let Some(to) = to_tail.first_mut() {
                let mut tail = [E::default(); LANES];
                tail[..rest.len()].copy_from_slice(rest);
                s.store(to, E::load(s, &tail));
            }
        }
    }
}

/// Adds a segment's state to the state before it: `a = a * x + b * y`.
pub(super) struct Merge<'a> {
    pub(super) whole: &'a mut [f32],
    pub(super) whole_factor: f32,
    pub(super) part: &'a [f32],
    pub(super) part_factor: f32,
}

impl Kernel for Merge<'_> {
    type Output = ();

    fn scalar(self) {
        unreachable!("the scalar form of attention works on whole heads");
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (a, b) = (s.splat(self.whole_factor), s.splat(self.part_factor));
        let wholes = self.whole.as_chunks_mut::<LANES>().0;
        for (whole, part) in wholes.iter_mut().zip(self.part.as_chunks::<LANES>().0) {
            let sum = s.fma(s.load(whole), a, s.mul(s.load(part), b));
            s.store(whole, sum);
        }
    }
}
