use super::math;
use super::simd::{Kernel, LANES, Simd, run};
use crate::{Isa, Pool};

/// Elements per task of a cheap operation: some 2 us from L2, so that the
/// region's own 1 us pays.
const CHEAP_CHUNK: usize = 16 * 1024;
/// Elements per task of an operation with an exponential.
const COSTLY_CHUNK: usize = 4 * 1024;

/// The nonlinearity of a gated feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x sigmoid(x)`.
    Silu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

/// An operation on elements of one or two slices.
trait Map: Copy + Sync {
    fn scalar(self, x: f32, y: f32) -> f32;
    fn lanes<S: Simd>(self, s: S, x: S::F, y: S::F) -> S::F;
}

/// `x[i] = map(x[i], y[i])`; `y` is all zero when `None`.
struct Elementwise<'a, M> {
    map: M,
    x: &'a mut [f32],
    y: Option<&'a [f32]>,
}

impl<M: Map> Kernel for Elementwise<'_, M> {
    type Output = ();

    fn scalar(self) {
        for (i, x) in self.x.iter_mut().enumerate() {
            *x = self.map.scalar(*x, self.y.map_or(0.0, |y| y[i]));
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (blocks, rest) = self.x.as_chunks_mut::<LANES>();
        let zero = [0.0; LANES];
        let mut tail = zero;
        tail[..rest.len()].copy_from_slice(rest);
        let tail_y = match self.y {
            Some(y) => {
                let (y_blocks, y_rest) = y.as_chunks::<LANES>();
                for (x, y) in blocks.iter_mut().zip(y_blocks) {
                    let value = self.map.lanes(s, s.load(x), s.load(y));
                    s.store(x, value);
                }
                let mut tail_y = zero;
                tail_y[..y_rest.len()].copy_from_slice(y_rest);
                tail_y
            }
            None => {
                let y = s.splat(0.0);
                for x in blocks {
                    let value = self.map.lanes(s, s.load(x), y);
                    s.store(x, value);
                }
                zero
            }
        };
        if !rest.is_empty() {
            let value = self.map.lanes(s, s.load(&tail), s.load(&tail_y));
            s.store(&mut tail, value);
            rest.copy_from_slice(&tail[..rest.len()]);
        }
    }
}

/// `x[i] = map(x[i], y[i])` on all threads, `chunk` elements per task.
fn binary(isa: Isa, pool: &Pool, map: impl Map, x: &mut [f32], y: &[f32], chunk: usize) {
    assert_eq!(x.len(), y.len(), "slices of different length");
    pool.run_chunks_mut(x, chunk, &|start, x| {
        let y = Some(&y[start..start + x.len()]);
        run(isa, Elementwise { map, x, y });
    });
}

/// `x[i] = map(x[i])` on all threads, `chunk` elements per task.
fn unary(isa: Isa, pool: &Pool, map: impl Map, x: &mut [f32], chunk: usize) {
    pool.run_chunks_mut(x, chunk, &|_, x| {
        run(isa, Elementwise { map, x, y: None });
    });
}

#[derive(Clone, Copy)]
struct AddScaled(f32);

impl Map for AddScaled {
    fn scalar(self, x: f32, y: f32) -> f32 {
        y.mul_add(self.0, x)
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, x: S::F, y: S::F) -> S::F {
        s.fma(y, s.splat(self.0), x)
    }
}

/// `x += scale * y`, rounded once.
///
/// # Panics
///
/// If the lengths differ.
pub fn add_scaled(isa: Isa, pool: &Pool, x: &mut [f32], y: &[f32], scale: f32) {
    binary(isa, pool, AddScaled(scale), x, y, CHEAP_CHUNK);
}

#[derive(Clone, Copy)]
struct Add;

impl Map for Add {
    fn scalar(self, x: f32, y: f32) -> f32 {
        x + y
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, x: S::F, y: S::F) -> S::F {
        s.add(x, y)
    }
}

/// `x += y`.
///
/// # Panics
///
/// If the lengths differ.
pub fn add(isa: Isa, pool: &Pool, x: &mut [f32], y: &[f32]) {
    binary(isa, pool, Add, x, y, CHEAP_CHUNK);
}

#[derive(Clone, Copy)]
struct Scale(f32);

impl Map for Scale {
    fn scalar(self, x: f32, _: f32) -> f32 {
        x * self.0
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, x: S::F, _: S::F) -> S::F {
        s.mul(x, s.splat(self.0))
    }
}

/// `x *= scale`.
pub fn scale_in_place(isa: Isa, pool: &Pool, x: &mut [f32], scale: f32) {
    unary(isa, pool, Scale(scale), x, CHEAP_CHUNK);
}

#[derive(Clone, Copy)]
struct Softcap(f32);

impl Map for Softcap {
    fn scalar(self, x: f32, _: f32) -> f32 {
        math::softcap(x, self.0)
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, x: S::F, _: S::F) -> S::F {
        math::softcap_lanes(s, x, self.0)
    }
}

/// `x = cap * tanh(x / cap)`.
pub fn softcap(isa: Isa, pool: &Pool, x: &mut [f32], cap: f32) {
    unary(isa, pool, Softcap(cap), x, COSTLY_CHUNK);
}

#[derive(Clone, Copy)]
struct SiluGate;

impl Map for SiluGate {
    fn scalar(self, gate: f32, up: f32) -> f32 {
        math::silu(gate) * up
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        s.mul(math::silu_lanes(s, gate), up)
    }
}

#[derive(Clone, Copy)]
struct GeluTanhGate;

impl Map for GeluTanhGate {
    fn scalar(self, gate: f32, up: f32) -> f32 {
        math::gelu_tanh(gate) * up
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        s.mul(math::gelu_tanh_lanes(s, gate), up)
    }
}

/// `gate = activation(gate) * up`.
///
/// # Panics
///
/// If the lengths differ.
pub fn gated_in_place(isa: Isa, pool: &Pool, activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Silu => binary(isa, pool, SiluGate, gate, up, COSTLY_CHUNK),
        Activation::GeluTanh => binary(isa, pool, GeluTanhGate, gate, up, COSTLY_CHUNK),
    }
}

/// `out = activation(gate) * up`, all of one length (`[m, f]`, say).
///
/// # Panics
///
/// If the lengths differ.
pub fn gated(
    isa: Isa,
    pool: &Pool,
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) {
    assert_eq!(out.len(), gate.len(), "slices of different length");
    assert_eq!(out.len(), up.len(), "slices of different length");
    pool.run_chunks_mut(out, COSTLY_CHUNK, &|start, x| {
        let end = start + x.len();
        // The chunk stays in L1 from the copy to its use.
        x.copy_from_slice(&gate[start..end]);
        let y = Some(&up[start..end]);
        match activation {
            Activation::Silu => run(
                isa,
                Elementwise {
                    map: SiluGate,
                    x,
                    y,
                },
            ),
            Activation::GeluTanh => run(
                isa,
                Elementwise {
                    map: GeluTanhGate,
                    x,
                    y,
                },
            ),
        }
    });
}

struct Argmax<'a>(&'a [f32]);

impl Kernel for Argmax<'_> {
    type Output = Option<usize>;

    fn scalar(self) -> Option<usize> {
        let mut best: Option<usize> = None;
        for (i, &x) in self.0.iter().enumerate() {
            if !x.is_nan() && best.is_none_or(|b| x > self.0[b]) {
                best = Some(i);
            }
        }
        best
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> Option<usize> {
        // The maximum does not depend on the order (but for the sign of a zero,
        // which the comparison below ignores); `max(x, acc)` drops a NaN `x`.
        let (blocks, rest) = self.0.as_chunks::<LANES>();
        let low = s.splat(f32::NEG_INFINITY);
        let mut acc = [low; 4];
        let (fours, ones) = blocks.as_chunks::<4>();
        for four in fours {
            for (acc, x) in acc.iter_mut().zip(four) {
                *acc = s.max(s.load(x), *acc);
            }
        }
        for x in ones {
            acc[0] = s.max(s.load(x), acc[0]);
        }
        let mut tail = [f32::NAN; LANES];
        tail[..rest.len()].copy_from_slice(rest);
        let tail = s.load(&tail);
        acc[0] = s.max(tail, acc[0]);
        let acc = s.max(s.max(acc[0], acc[1]), s.max(acc[2], acc[3]));
        let best = s.splat(s.maximum(acc));
        // All NaN leaves -inf, which then equals no element.
        for (i, x) in blocks.iter().enumerate() {
            let mask = s.equal(s.load(x), best);
            if mask != 0 {
                return Some(i * LANES + mask.trailing_zeros() as usize);
            }
        }
        let mask = s.equal(tail, best);
        (mask != 0).then(|| blocks.len() * LANES + mask.trailing_zeros() as usize)
    }
}

/// The index of the greatest element, the first of equals (0 and -0 are equal).
/// NaN never wins; `None` if there is nothing else.
pub fn argmax(isa: Isa, x: &[f32]) -> Option<usize> {
    run(isa, Argmax(x))
}

struct ToF16<'a> {
    from: &'a [f32],
    to: &'a mut [u16],
}

impl Kernel for ToF16<'_> {
    type Output = ();

    fn scalar(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = half::f16::from_f32(*from).to_bits();
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (blocks, rest) = self.from.as_chunks::<LANES>();
        let (to_blocks, to_rest) = self.to.as_chunks_mut::<LANES>();
        for (to, from) in to_blocks.iter_mut().zip(blocks) {
            s.store_f16(to, s.load(from));
        }
        let mut tail = [0.0; LANES];
        tail[..rest.len()].copy_from_slice(rest);
        let mut halves = [0; LANES];
        s.store_f16(&mut halves, s.load(&tail));
        to_rest.copy_from_slice(&halves[..to_rest.len()]);
    }
}

/// Rounds to half precision (bits), to nearest even; overflow gives infinity.
///
/// # Panics
///
/// If the lengths differ.
pub fn f16_from_f32(isa: Isa, from: &[f32], to: &mut [u16]) {
    assert_eq!(from.len(), to.len(), "slices of different length");
    run(isa, ToF16 { from, to });
}

struct FromF16<'a> {
    from: &'a [u16],
    to: &'a mut [f32],
}

impl Kernel for FromF16<'_> {
    type Output = ();

    fn scalar(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = half::f16::from_bits(*from).to_f32();
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (blocks, rest) = self.from.as_chunks::<LANES>();
        let (to_blocks, to_rest) = self.to.as_chunks_mut::<LANES>();
        for (to, from) in to_blocks.iter_mut().zip(blocks) {
            s.store(to, s.load_f16(from));
        }
        let mut tail = [0; LANES];
        tail[..rest.len()].copy_from_slice(rest);
        let mut floats = [0.0; LANES];
        s.store(&mut floats, s.load_f16(&tail));
        to_rest.copy_from_slice(&floats[..to_rest.len()]);
    }
}

/// Widens half precision (bits); exact.
///
/// # Panics
///
/// If the lengths differ.
pub fn f32_from_f16(isa: Isa, from: &[u16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "slices of different length");
    run(isa, FromF16 { from, to });
}
