use super::simd::{Kernel, LANES, Simd, run, sum_lanes};
use crate::{Isa, Pool};

/// Elements per task, about (see `elementwise`).
const ROWS_CHUNK: usize = 16 * 1024;

/// Rows of `columns` elements per task.
fn rows_per_task(columns: usize) -> usize {
    (ROWS_CHUNK / columns).max(1)
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    weight_offset: f32,
    eps: f32,
    out: &'a mut [f32],
}

/// `1 / sqrt(mean + eps)` from the sum of `k` squares.
fn inverse_rms(sum: f32, k: usize, eps: f32) -> f32 {
    1.0 / (sum / k as f32 + eps).sqrt()
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    fn scalar(self) {
        let k = self.weight.len();
        for (x, out) in self.x.chunks_exact(k).zip(self.out.chunks_exact_mut(k)) {
            let mut squares = [0.0f32; LANES];
            for (i, x) in x.iter().enumerate() {
                squares[i % LANES] = x.mul_add(*x, squares[i % LANES]);
            }
            let inverse = inverse_rms(sum_lanes(squares), k, self.eps);
            for ((out, x), w) in out.iter_mut().zip(x).zip(self.weight) {
                *out = (x * inverse) * (w + self.weight_offset);
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let k = self.weight.len();
        let (weights, weight_rest) = self.weight.as_chunks::<LANES>();
        let offset = s.splat(self.weight_offset);
        let weight_tail = padded(weight_rest);
        for (x, out) in self.x.chunks_exact(k).zip(self.out.chunks_exact_mut(k)) {
            let (blocks, rest) = x.as_chunks::<LANES>();
            let mut tail = padded(rest);
            let mut squares = s.splat(0.0);
            for x in blocks {
                let x = s.load(x);
                squares = s.fma(x, x, squares);
            }
            // Zeros beyond the end leave a sum of squares as it is.
            let x = s.load(&tail);
            squares = s.fma(x, x, squares);
            let inverse = s.splat(inverse_rms(s.sum(squares), k, self.eps));
            let (out_blocks, out_rest) = out.as_chunks_mut::<LANES>();
            for ((out, x), w) in out_blocks.iter_mut().zip(blocks).zip(weights) {
                let w = s.add(s.load(w), offset);
                s.store(out, s.mul(s.mul(s.load(x), inverse), w));
            }
            if !out_rest.is_empty() {
                let w = s.add(s.load(&weight_tail), offset);
                let normed = s.mul(s.mul(s.load(&tail), inverse), w);
                s.store(&mut tail, normed);
                out_rest.copy_from_slice(&tail[..out_rest.len()]);
            }
        }
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` for each row of
/// `x: [m, k]`, with `k = weight.len()`.
///
/// Normalising each head by itself is the same with `m = rows * heads`.
///
/// # Panics
///
/// If `weight` is empty, `x` is not whole rows, or `out` has another length.
pub fn rms_norm(
    isa: Isa,
    pool: &Pool,
    x: &[f32],
    weight: &[f32],
    weight_offset: f32,
    eps: f32,
    out: &mut [f32],
) {
    let k = weight.len();
    assert!(k > 0, "no weights");
    assert_eq!(x.len() % k, 0, "x is not whole rows of {k}");
    assert_eq!(x.len(), out.len(), "slices of different length");
    pool.run_chunks_mut(out, rows_per_task(k) * k, &|start, out| {
        let kernel = RmsNorm {
            x: &x[start..start + out.len()],
            weight,
            weight_offset,
            eps,
            out,
        };
        run(isa, kernel);
    });
}

/// What [`rope_rotate`] rotates: rows of `heads` heads of `head_dim` elements,
/// the starts of two rows `row_stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// Heads in a row.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The leading elements of a head that are rotated; even, at most `head_dim`.
    pub rotary_dim: usize,
    /// Elements from one row to the next; at least `heads * head_dim`.
    pub row_stride: usize,
}

struct Rotate<'a> {
    rope: Rope,
    x: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    fn scalar(self) {
        let half = self.rope.rotary_dim / 2;
        for (r, row) in self.x.chunks_mut(self.rope.row_stride).enumerate() {
            for h in 0..self.rope.heads {
                for i in 0..half {
                    let (cos, sin) = (self.cos[r * half + i], self.sin[r * half + i]);
                    let first = h * self.rope.head_dim + i;
                    let second = first + half;
                    let (a, b) = (row[first], row[second]);
                    row[first] = a.mul_add(cos, -(b * sin));
                    row[second] = b.mul_add(cos, a * sin);
                }
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let rope = self.rope;
        let half = rope.rotary_dim / 2;
        let angles = self.cos.chunks_exact(half).zip(self.sin.chunks_exact(half));
        for (row, (cos, sin)) in self.x.chunks_mut(rope.row_stride).zip(angles) {
            let (cos, cos_rest) = cos.as_chunks::<LANES>();
            let (sin, sin_rest) = sin.as_chunks::<LANES>();
            let cos_tail = padded(cos_rest);
            let sin_tail = padded(sin_rest);
            for head in row.chunks_exact_mut(rope.head_dim).take(rope.heads) {
                let (first, rest) = head[..2 * half].split_at_mut(half);
                let (first, first_rest) = first.as_chunks_mut::<LANES>();
                let (second, second_rest) = rest.as_chunks_mut::<LANES>();
                let halves = first.iter_mut().zip(second);
                for ((a, b), (cos, sin)) in halves.zip(cos.iter().zip(sin)) {
                    rotate(s, a, b, cos, sin);
                }
                if !first_rest.is_empty() {
                    let (mut a, mut b) = (padded(first_rest), padded(second_rest));
                    rotate(s, &mut a, &mut b, &cos_tail, &sin_tail);
                    first_rest.copy_from_slice(&a[..first_rest.len()]);
                    second_rest.copy_from_slice(&b[..second_rest.len()]);
                }
            }
        }
    }
}

/// Rotates sixteen pairs.
#[inline(always)]
fn rotate<S: Simd>(
    s: S,
    first: &mut [f32; LANES],
    second: &mut [f32; LANES],
    cos: &[f32; LANES],
    sin: &[f32; LANES],
) {
    let (a, b) = (s.load(first), s.load(second));
    let (cos, sin) = (s.load(cos), s.load(sin));
    s.store(first, s.fma(a, cos, s.neg(s.mul(b, sin))));
    s.store(second, s.fma(b, cos, s.mul(a, sin)));
}

/// Fewer than 16 elements, with zeros after them.
#[inline(always)]
fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut tail = [0.0; LANES];
    tail[..rest.len()].copy_from_slice(rest);
    tail
}

/// Rotates element pairs `(i, i + rotary_dim/2)` of each head, in place, by the
/// angles of the head's row: `(a cos - b sin, b cos + a sin)`.
///
/// `x` holds `m` rows laid out as `rope` says (the last may stop after its
/// heads); `cos` and `sin` are `[m, rotary_dim/2]`.
///
/// # Panics
///
/// If `rope` contradicts itself or a length does not match it.
pub fn rope_rotate(isa: Isa, pool: &Pool, rope: Rope, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let used = rope.heads * rope.head_dim;
    let half = rope.rotary_dim / 2;
    assert_eq!(rope.rotary_dim % 2, 0, "an odd number of rotated elements");
    assert!(
        rope.rotary_dim <= rope.head_dim && used <= rope.row_stride,
        "contradictory {rope:?}"
    );
    assert_eq!(cos.len(), sin.len(), "slices of different length");
    if half == 0 || used == 0 || x.is_empty() {
        return;
    }
    let rows = x.len().div_ceil(rope.row_stride);
    assert_eq!(cos.len(), rows * half, "angles for {rows} rows of {half}");
    assert!(
        x.len() - (rows - 1) * rope.row_stride >= used,
        "the last row is shorter than its heads"
    );
    let chunk = rows_per_task(rope.row_stride) * rope.row_stride;
    pool.run_chunks_mut(x, chunk, &|start, x| {
        let first = start / rope.row_stride;
        let angles = first * half..(first + x.len().div_ceil(rope.row_stride)) * half;
        let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
        run(isa, Rotate { rope, x, cos, sin });
    });
}
