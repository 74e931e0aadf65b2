//! Encoders of Q4_K and Q6_K.
//!
//! Both minimise the weighted squared error `Σ v (w - x)²` of a block, with
//! `v = rms + |x|` where `rms` is that of the element's group: large weights
//! matter more, small ones still count. The search:
//!
//! 1. each group gets a real scale (and minimum): the weighted least-squares fit to
//!    the codes of the plain stretch of its range, or of one of a row of slightly
//!    wider or narrower stretches, whichever errs least;
//! 2. the block's fp16 scale is the nearest to the largest group scale over the
//!    largest factor, group scales become integers, and each is moved by one step
//!    if that lowers the error;
//! 3. the same with the next larger fp16 scale where the nearest does not reach the
//!    largest group scale (it is subnormal then), and all of it again with plain
//!    stretches and no moves. The best is stored: never worse than the plain encoder.
//!
//! Sums are in f64: no input overflows them, and they are the same everywhere.

use super::k_quants::{pack_six_bit_scale_min, q6_k_nibble_place};
use super::{Overflow, to_f16};

/// The importance of each element of a group.
fn importance<const N: usize>(x: &[f64; N]) -> [f64; N] {
    let rms = (x.iter().map(|v| v * v).sum::<f64>() / N as f64).sqrt();
    x.map(|v| rms + v.abs())
}

/// The groups of a block, widened, with their importance.
fn groups<const N: usize, const G: usize>(values: &[f32]) -> [([f64; N], [f64; N]); G] {
    std::array::from_fn(|g| {
        let x = std::array::from_fn(|i| f64::from(values[g * N + i]));
        (x, importance(&x))
    })
}

/// The fp16 step nearest to `largest / steps`.
fn nearest_step(largest: f64, steps: f64) -> Result<half::f16, Overflow> {
    // Through fp32 the quotient may round twice; either neighbour would do.
    to_f16((largest / steps) as f32)
}

/// `step`, or the next larger where `steps` of it fall short of `largest` by half a
/// step or more.
fn covering_step(step: half::f16, largest: f64, steps: f64) -> half::f16 {
    if (steps + 0.5) * f64::from(step.to_f32()) >= largest {
        step
    } else {
        // Only a subnormal is that far off: the next number is finite.
        half::f16::from_bits(step.to_bits() + 1)
    }
}

/// Nearest whole number, ties to even, of a value below 2^51 in magnitude: the sum
/// has no room for fraction bits. Unlike `f64::round` it is never a library call.
fn nearest(value: f64) -> f64 {
    const NO_FRACTION: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    (value + NO_FRACTION) - NO_FRACTION
}

/// `1 / scale`, or 0 for a zero scale, under which all codes are 0.
fn inverse(scale: f64) -> f64 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// `value / step` rounded to a whole number of steps; 0 steps of size 0.
fn whole_steps(value: f64, step: f64, limit: f64) -> i32 {
    nearest((value * inverse(step)).clamp(-limit, limit)) as i32
}

/// Moves of an integer scale that are tried. Staying goes first: ties keep it.
fn moves(polish: bool) -> &'static [i32] {
    if polish { &[0, -1, 1] } else { &[0] }
}

// ---- Q4_K: groups of 32, w = scale * q - min, q in 0..=15 ----

const Q4_TOP: f64 = 15.0;
/// Largest group scale and minimum.
const SIX_BITS: f64 = 63.0;

/// A group's line, `scale >= 0`, `min >= 0`: `w = scale * q - min`.
#[derive(Clone, Copy)]
struct Line {
    scale: f64,
    min: f64,
}

impl Line {
    /// From the smallest (or 0, if all are positive) to the largest element.
    fn plain(x: &[f64; 32]) -> Line {
        let low = x.iter().copied().fold(0.0, f64::min);
        let high = x.iter().copied().fold(low, f64::max);
        Line {
            scale: (high - low) / Q4_TOP,
            min: -low,
        }
    }

    /// The nearest codes to `x`; all 0 on a line without slope.
    fn codes(self, x: &[f64; 32]) -> [f64; 32] {
        let inverse = inverse(self.scale);
        x.map(|x| nearest(((x + self.min) * inverse).clamp(0.0, Q4_TOP)))
    }

    fn error(self, x: &[f64; 32], weight: &[f64; 32]) -> f64 {
        let codes = self.codes(x);
        (0..32)
            .map(|i| {
                let miss = self.scale * codes[i] - self.min - x[i];
                weight[i] * miss * miss
            })
            .sum()
    }

    /// Weighted least squares over fixed `codes`, the minimum kept from going
    /// below zero; `None` when the codes leave the slope open or falling. Also
    /// gives `Σ v x² - Σ v (w - x)²`: the greater, the better the fit.
    fn fit(x: &[f64; 32], weight: &[f64; 32], codes: &[f64; 32]) -> Option<(f64, Line)> {
        let (mut v, mut vq, mut vqq, mut vx, mut vqx) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for i in 0..32 {
            let (x, q) = (x[i], codes[i]);
            let (wx, wq) = (weight[i] * x, weight[i] * q);
            v += weight[i];
            vq += wq;
            vqq += wq * q;
            vx += wx;
            vqx += wx * q;
        }
        let determinant = v * vqq - vq * vq;
        if determinant <= 0.0 {
            return None;
        }
        let mut line = Line {
            scale: (v * vqx - vq * vx) / determinant,
            min: (vq * vqx - vqq * vx) / determinant,
        };
        if line.min < 0.0 {
            line = Line {
                scale: vqx / vqq,
                min: 0.0,
            };
        }
        // At the least-squares solution Σ v w² = Σ v w x.
        let explained = line.scale * vqx - line.min * vx;
        (line.scale > 0.0).then_some((explained, line))
    }

    /// The best fit to the codes of the plain line or of one near it.
    fn search(x: &[f64; 32], weight: &[f64; 32]) -> Line {
        let plain = Line::plain(x);
        let mut best = (f64::NEG_INFINITY, plain);
        if plain.scale == 0.0 {
            return plain;
        }
        // Ranges from 9 % wider (values pulled in) to 7 % narrower (tails cut).
        for tenths in -12..=12 {
            let stretch = Line {
                scale: plain.scale * Q4_TOP / (Q4_TOP + 0.1 * f64::from(tenths)),
                min: plain.min,
            };
            if let Some(found) = Line::fit(x, weight, &stretch.codes(x))
                && found.0 > best.0
            {
                best = found;
            }
        }
        best.1
    }
}

/// A Q4_K block before its bytes are laid out.
struct Q4kBlock {
    d: half::f16,
    dmin: half::f16,
    scales: [u8; 8],
    mins: [u8; 8],
    error: f64,
}

impl Q4kBlock {
    fn line(d: half::f16, dmin: half::f16, scale: u8, min: u8) -> Line {
        Line {
            scale: f64::from(d.to_f32()) * f64::from(scale),
            min: f64::from(dmin.to_f32()) * f64::from(min),
        }
    }

    /// Rounds the groups' lines to one fp16 pair and six-bit factors, the better of
    /// the nearest and the covering pair of steps; `polish` also tries the neighbours
    /// of each pair of factors.
    fn round(
        groups: &[([f64; 32], [f64; 32]); 8],
        lines: &[Line; 8],
        polish: bool,
    ) -> Result<Q4kBlock, Overflow> {
        let largest = |of: fn(&Line) -> f64| lines.iter().map(of).fold(0.0, f64::max);
        let (scale, min) = (largest(|l| l.scale), largest(|l| l.min));
        let d = nearest_step(scale, SIX_BITS)?;
        let dmin = nearest_step(min, SIX_BITS)?;
        let block = Q4kBlock::with_steps(groups, lines, polish, d, dmin);
        let covering = (
            covering_step(d, scale, SIX_BITS),
            covering_step(dmin, min, SIX_BITS),
        );
        if covering == (d, dmin) {
            return Ok(block);
        }
        let other = Q4kBlock::with_steps(groups, lines, polish, covering.0, covering.1);
        Ok(if other.error < block.error {
            other
        } else {
            block
        })
    }

    fn with_steps(
        groups: &[([f64; 32], [f64; 32]); 8],
        lines: &[Line; 8],
        polish: bool,
        d: half::f16,
        dmin: half::f16,
    ) -> Q4kBlock {
        let mut block = Q4kBlock {
            d,
            dmin,
            scales: [0; 8],
            mins: [0; 8],
            error: 0.0,
        };
        for (g, ((x, weight), line)) in groups.iter().zip(lines).enumerate() {
            let scale = whole_steps(line.scale, f64::from(d.to_f32()), SIX_BITS);
            let min = whole_steps(line.min, f64::from(dmin.to_f32()), SIX_BITS);
            let mut best = (f64::INFINITY, 0, 0);
            for &ds in moves(polish) {
                for &dm in moves(polish) {
                    let (Ok(s), Ok(m)) = (u8::try_from(scale + ds), u8::try_from(min + dm)) else {
                        continue;
                    };
                    if s > 63 || m > 63 {
                        continue;
                    }
                    let error = Q4kBlock::line(d, dmin, s, m).error(x, weight);
                    if error < best.0 {
                        best = (error, s, m);
                    }
                }
            }
            (block.scales[g], block.mins[g]) = (best.1, best.2);
            block.error += best.0;
        }
        block
    }
}

pub(super) fn encode_q4_k(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let groups = groups::<32, 8>(values);
    let plain = groups.each_ref().map(|(x, _)| Line::plain(x));
    let fitted = groups.each_ref().map(|(x, weight)| Line::search(x, weight));
    let mut block = Q4kBlock::round(&groups, &plain, false)?;
    // A fit may reach further than the plain range; if it overflows, plain stays.
    if let Ok(better) = Q4kBlock::round(&groups, &fitted, true)
        && better.error < block.error
    {
        block = better;
    }

    out[..2].copy_from_slice(&block.d.to_le_bytes());
    out[2..4].copy_from_slice(&block.dmin.to_le_bytes());
    pack_six_bit_scale_min(&block.scales, &block.mins, &mut out[4..16]);
    // In each run of 64 elements, byte m holds elements m (low) and 32 + m (high).
    let codes = |g: usize| {
        let line = Q4kBlock::line(block.d, block.dmin, block.scales[g], block.mins[g]);
        line.codes(&groups[g].0)
    };
    for (run, bytes) in out[16..].chunks_exact_mut(32).enumerate() {
        let (low, high) = (codes(2 * run), codes(2 * run + 1));
        for (m, byte) in bytes.iter_mut().enumerate() {
            *byte = low[m] as u8 | ((high[m] as u8) << 4);
        }
    }
    Ok(())
}

// ---- Q6_K: groups of 16, w = scale * q, q in -32..=31 ----

const Q6_LOW: f64 = -32.0;
const Q6_TOP: f64 = 31.0;
/// Largest group scale; -128 is left unused so that signs are alike.
const SEVEN_BITS: f64 = 127.0;

/// The nearest codes to `x`; all 0 under a zero scale.
fn q6_codes(scale: f64, x: &[f64; 16]) -> [f64; 16] {
    let inverse = inverse(scale);
    x.map(|x| nearest((x * inverse).clamp(Q6_LOW, Q6_TOP)))
}

fn q6_error(scale: f64, x: &[f64; 16], weight: &[f64; 16]) -> f64 {
    let codes = q6_codes(scale, x);
    (0..16)
        .map(|i| {
            let miss = scale * codes[i] - x[i];
            weight[i] * miss * miss
        })
        .sum()
}

/// The scale that gives the element of largest magnitude the code -32.
fn q6_plain_scale(x: &[f64; 16]) -> f64 {
    let extreme = x.iter().fold(
        0.0f64,
        |best, &v| if v.abs() > best.abs() { v } else { best },
    );
    extreme / Q6_LOW
}

/// The best least-squares fit to the codes of the plain scale or of one near it.
fn q6_search_scale(x: &[f64; 16], weight: &[f64; 16]) -> f64 {
    let plain = q6_plain_scale(x);
    if plain == 0.0 {
        return plain;
    }
    let mut best = (f64::NEG_INFINITY, plain);
    // From 1.5 codes beyond -32 (tails cut) to 1.5 short of it, which makes room
    // for a large element of the other sign.
    for tenths in -15..=15 {
        let stretch = plain * Q6_LOW / (Q6_LOW + 0.1 * f64::from(tenths));
        let codes = q6_codes(stretch, x);
        let (mut vqx, mut vqq) = (0.0, 0.0);
        for i in 0..16 {
            let wq = weight[i] * codes[i];
            vqx += wq * x[i];
            vqq += wq * codes[i];
        }
        // The fit leaves Σ v x² - vqx² / vqq.
        let explained = vqx * vqx / vqq;
        if vqq > 0.0 && explained > best.0 {
            best = (explained, vqx / vqq);
        }
    }
    best.1
}

/// A Q6_K block before its bytes are laid out.
struct Q6kBlock {
    d: half::f16,
    scales: [i8; 16],
    error: f64,
}

impl Q6kBlock {
    /// Rounds the groups' scales to one fp16 scale and signed factors, the better of
    /// the nearest and the covering step; `polish` also tries the neighbours of each
    /// factor.
    fn round(
        groups: &[([f64; 16], [f64; 16]); 16],
        scales: &[f64; 16],
        polish: bool,
    ) -> Result<Q6kBlock, Overflow> {
        let largest = scales.iter().fold(0.0f64, |best, s| best.max(s.abs()));
        let d = nearest_step(largest, SEVEN_BITS)?;
        let block = Q6kBlock::with_step(groups, scales, polish, d);
        let covering = covering_step(d, largest, SEVEN_BITS);
        if covering == d {
            return Ok(block);
        }
        let other = Q6kBlock::with_step(groups, scales, polish, covering);
        Ok(if other.error < block.error {
            other
        } else {
            block
        })
    }

    fn with_step(
        groups: &[([f64; 16], [f64; 16]); 16],
        scales: &[f64; 16],
        polish: bool,
        d: half::f16,
    ) -> Q6kBlock {
        let step = f64::from(d.to_f32());
        let mut block = Q6kBlock {
            d,
            scales: [0; 16],
            error: 0.0,
        };
        for (g, ((x, weight), &scale)) in groups.iter().zip(scales).enumerate() {
            let rounded = whole_steps(scale, step, SEVEN_BITS);
            let mut best = (f64::INFINITY, 0);
            for &by in moves(polish) {
                let factor = (rounded + by).clamp(-127, 127);
                let error = q6_error(step * f64::from(factor), x, weight);
                if error < best.0 {
                    best = (error, factor as i8);
                }
            }
            block.scales[g] = best.1;
            block.error += best.0;
        }
        block
    }
}

pub(super) fn encode_q6_k(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let groups = groups::<16, 16>(values);
    let plain = groups.each_ref().map(|(x, _)| q6_plain_scale(x));
    let fitted = groups
        .each_ref()
        .map(|(x, weight)| q6_search_scale(x, weight));
    let mut block = Q6kBlock::round(&groups, &plain, false)?;
    if let Ok(better) = Q6kBlock::round(&groups, &fitted, true)
        && better.error < block.error
    {
        block = better;
    }

    let (q4, rest) = out.split_at_mut(128);
    let (q2, rest) = rest.split_at_mut(64);
    let (scales, d) = rest.split_at_mut(16);
    q4.fill(0);
    q2.fill(0);
    let step = f64::from(block.d.to_f32());
    for (g, (x, _)) in groups.iter().enumerate() {
        let codes = q6_codes(step * f64::from(block.scales[g]), x);
        for (m, code) in codes.into_iter().enumerate() {
            let i = g * 16 + m;
            let stored = (code - Q6_LOW) as u8;
            let (byte, shift) = q6_k_nibble_place(i);
            q4[byte] |= (stored & 0x0f) << shift;
            q2[i / 128 * 32 + i % 32] |= (stored >> 4) << (i / 32 % 4 * 2);
        }
    }
    for (out, scale) in scales.iter_mut().zip(block.scales) {
        *out = scale as u8;
    }
    d.copy_from_slice(&block.d.to_le_bytes());
    Ok(())
}
