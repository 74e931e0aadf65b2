//! Linear quantizers: a code for each weight, a scale for each group.
//!
//! ```text
//! q = clamp(round_half_even(x / scale) + zero_point, q_min, q_max)
//! x' = scale * (q - zero_point)
//! ```
//!
//! The scales of a `b`-bit integer, with `a = max|x|`:
//!
//! | scheme | range | scale |
//! |---|---|---|
//! | symmetric | -2^(b-1) .. 2^(b-1)-1 | `a / ((2^b - 1) / 2)`: saturates the largest weight by half a step |
//! | symmetric with clipping | ±(2^(b-1)-1) | `a / (2^(b-1) - 1)`: clips nothing, in spite of its name |
//! | asymmetric | whole | `(max(x, 0) - min(x, 0)) / (2^b - 1)`, zero point `clamp(q_min - round(min / scale))` |
//! | q4_0 | -8 .. 7 | the weight of largest magnitude, with its sign, over -8 |
//! | absmean | -1 .. 1 | mean of the magnitudes, at least 1e-5 |
//!
//! The first three are the formulas of `coreai-opt`, scale arithmetic rounded to
//! the scale's own type after each step and held above 2^-23 as there: for
//! weights in that type the result is equal (`tests/golden.rs`).

use carat_tensor::{
    DType, formats,
    formats::float8::{E4M3, E5M2, FP4, MiniFloat},
    grid::{Code, Scale},
};
use half::f16;

/// How scale and zero point follow from the weights of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// The whole range of codes, no zero point.
    Symmetric,
    /// Without the code that has no counterpart: the largest magnitude is exact.
    SymmetricWithClipping,
    /// From the smallest to the largest weight, with a zero point.
    Asymmetric,
    /// The grid of GGUF's Q4_0, which checkpoints trained for it already have.
    Q4_0,
    /// Ternary: the mean magnitude is one step.
    AbsMean,
}

/// How the range of a group is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RangeSearch {
    /// All of it.
    #[default]
    MinMax,
    /// The part, from all to 0.7 of it, with the least squared error. Ties go to
    /// the larger part.
    Mse,
}

/// Parts of the range that [`RangeSearch::Mse`] tries, in 40ths.
const RATIOS: std::ops::RangeInclusive<u16> = 28..=40;

/// Smallest scale: `f32::EPSILON`, which fp16 can hold.
const MIN_SCALE: f32 = f32::EPSILON;
/// Smallest mean magnitude of a ternary group.
const MIN_MEAN: f32 = 1e-5;

/// A linear quantizer of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Linear {
    /// What a code stands for; not a table.
    pub code: Code,
    /// How the scale is chosen.
    pub scheme: Scheme,
    /// How it is stored.
    pub scale: Scale,
    /// Which range it spans.
    pub search: RangeSearch,
}

/// Smallest and largest weight of a group, zero included, and what the schemes
/// need besides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// At most zero.
    pub min: f32,
    /// At least zero.
    pub max: f32,
    /// Sum of the magnitudes.
    pub sum: f64,
    /// Weights.
    pub count: u64,
}

impl Stats {
    /// Of these weights.
    pub fn of(values: &[f32]) -> Stats {
        let mut stats = Stats {
            count: values.len() as u64,
            ..Stats::default()
        };
        for &v in values {
            stats.min = stats.min.min(v);
            stats.max = stats.max.max(v);
            stats.sum += f64::from(v.abs());
        }
        stats
    }

    /// Of both; equal whatever the order of more than two, but for the sum.
    pub fn and(self, other: Stats) -> Stats {
        Stats {
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            sum: self.sum + other.sum,
            count: self.count + other.count,
        }
    }

    fn largest(&self) -> f32 {
        self.max.max(-self.min)
    }

    fn times(self, ratio: f32) -> Stats {
        Stats {
            min: self.min * ratio,
            max: self.max * ratio,
            ..self
        }
    }
}

/// Scale and zero point of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Params {
    /// As it is stored, before the tensor's own scale.
    pub scale: f32,
    /// Zero unless asymmetric.
    pub zero_point: i8,
}

/// Weights whose scale is beyond what its type can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow;

impl Linear {
    /// Whether each scale has a zero point.
    pub fn has_zero_points(&self) -> bool {
        self.scheme == Scheme::Asymmetric
    }

    fn mini_float(&self) -> Option<&'static MiniFloat> {
        match self.code {
            Code::Fp4 => Some(&FP4),
            Code::Fp8E4M3 => Some(&E4M3),
            Code::Fp8E5M2 => Some(&E5M2),
            _ => None,
        }
    }

    /// Smallest and largest integer.
    fn range(&self) -> (i32, i32) {
        let half = 1 << (self.code.bits() - 1);
        match self.scheme {
            Scheme::SymmetricWithClipping | Scheme::AbsMean => (1 - half, half - 1),
            _ => (-half, half - 1),
        }
    }

    /// Rounds to the type in which a scale is computed and stored.
    fn round(&self, value: f32) -> f32 {
        match self.scale {
            Scale::F16 => f16::from_f32(value).to_f32(),
            _ => value,
        }
    }

    /// The scale of a whole tensor above its E4M3 scales: the largest weight takes
    /// the largest code under the largest scale.
    pub fn tensor_scale(&self, stats: &Stats) -> f32 {
        match (self.scale, self.mini_float()) {
            (Scale::E4M3, Some(float)) if stats.largest() > 0.0 => {
                (stats.largest() / (float.max() * E4M3.max())).max(f32::MIN_POSITIVE)
            }
            _ => 1.0,
        }
    }

    /// Scale and zero point for weights of this range.
    fn params(&self, stats: &Stats, tensor_scale: f32) -> Result<Params, Overflow> {
        let stats = &Stats {
            min: self.round(stats.min),
            max: self.round(stats.max),
            ..*stats
        };
        let (low, high) = self.range();
        let mut zero_point = 0;
        let scale = match (self.scale, self.scheme) {
            (Scale::E8M0, _) => power_of_two(self.code, stats.largest()),
            (Scale::E4M3, _) => {
                let most = self.mini_float().map_or(1.0, MiniFloat::max);
                E4M3.decode(E4M3.encode(stats.largest() / most / tensor_scale))
            }
            (_, Scheme::AbsMean) => {
                let mean = (stats.sum / stats.count.max(1) as f64) as f32;
                self.round(mean.max(MIN_MEAN))
            }
            (_, Scheme::Asymmetric) => {
                let width = self.round(stats.max - stats.min);
                let scale = self.round(width / (high - low) as f32).max(MIN_SCALE);
                let zero = low as f32 - self.round(stats.min / scale).round_ties_even();
                zero_point = zero.clamp(low as f32, high as f32) as i8;
                scale
            }
            _ => {
                let half_range = match self.mini_float() {
                    Some(float) => float.max(),
                    None => (high - low) as f32 / 2.0,
                };
                self.round(stats.largest() / half_range).max(MIN_SCALE)
            }
        };
        match scale.is_finite() {
            true => Ok(Params { scale, zero_point }),
            false => Err(Overflow),
        }
    }

    /// Quantizes with given parameters.
    pub fn codes(&self, values: &[f32], params: Params, tensor_scale: f32, out: &mut [u8]) {
        let scale = params.scale * tensor_scale;
        if scale == 0.0 {
            out.fill(0);
            return;
        }
        match self.mini_float() {
            Some(float) => {
                for (code, &v) in out.iter_mut().zip(values) {
                    *code = float.encode(v / scale);
                }
            }
            None => {
                let (low, high) = self.range();
                let (low, high) = (low as f32, high as f32);
                let zero = f32::from(params.zero_point);
                for (code, &v) in out.iter_mut().zip(values) {
                    let q = (v / scale).round_ties_even() + zero;
                    *code = q.clamp(low, high) as i8 as u8;
                }
            }
        }
    }

    /// What a code stands for under these parameters.
    pub fn value(&self, code: u8, params: Params, tensor_scale: f32) -> f32 {
        let scale = params.scale * tensor_scale;
        match self.mini_float() {
            Some(float) => scale * float.decode(code),
            None => scale * (i32::from(code as i8) - i32::from(params.zero_point)) as f32,
        }
    }

    /// Squared error of a group, each weight's times its importance.
    fn error(&self, values: &[f32], importance: Option<&[f32]>, p: Params, codes: &[u8]) -> f64 {
        let float = self.mini_float();
        let mut sum = 0.0;
        for (i, (&v, &code)) in values.iter().zip(codes).enumerate() {
            let w = match float {
                Some(float) => p.scale * float.decode(code),
                None => p.scale * (i32::from(code as i8) - i32::from(p.zero_point)) as f32,
            };
            let d = f64::from(v) - f64::from(w);
            sum += d * d * importance.map_or(1.0, |m| f64::from(m[i]));
        }
        sum
    }

    /// Quantizes a group whose weights are all in `values`.
    ///
    /// # Errors
    ///
    /// [`Overflow`].
    pub fn group(
        &self,
        values: &[f32],
        importance: Option<&[f32]>,
        tensor_scale: f32,
        out: &mut [u8],
    ) -> Result<Params, Overflow> {
        if self.scheme == Scheme::Q4_0 {
            return q4_0(values, out);
        }
        let stats = Stats::of(values);
        let whole = self.params(&stats, tensor_scale)?;
        self.codes(values, whole, tensor_scale, out);
        if self.search == RangeSearch::MinMax {
            return Ok(whole);
        }
        let total = |p: Params| Params {
            scale: p.scale * tensor_scale,
            ..p
        };
        let mut best = (self.error(values, importance, total(whole), out), whole);
        let mut trial = vec![0; values.len()];
        for ratio in RATIOS.rev().skip(1) {
            let part = stats.times(f32::from(ratio) / 40.0);
            let params = self.params(&part, tensor_scale)?;
            self.codes(values, params, tensor_scale, &mut trial);
            let error = self.error(values, importance, total(params), &trial);
            if error < best.0 {
                best = (error, params);
                out.copy_from_slice(&trial);
            }
        }
        Ok(best.1)
    }

    /// Scale and zero point of a tensor or of rows that are not at hand at once.
    ///
    /// # Errors
    ///
    /// [`Overflow`].
    pub fn params_of(&self, stats: &Stats) -> Result<Params, Overflow> {
        self.params(stats, self.tensor_scale(stats))
    }
}

/// `2^(floor(log2(largest)) - e)`, with `e` the exponent of the largest code: the
/// FLOOR rule of the OCP microscaling specification. At least the smallest normal
/// fp32 number.
fn power_of_two(code: Code, largest: f32) -> f32 {
    let top = match code {
        Code::Fp8E4M3 => 8,
        Code::Fp8E5M2 => 15,
        _ => 2,
    };
    let exponent = (largest.to_bits() >> 23) as i32 - top;
    f32::from_bits((exponent.max(1) as u32) << 23)
}

/// Groups of 32 by the encoder of Q4_0 itself.
fn q4_0(values: &[f32], out: &mut [u8]) -> Result<Params, Overflow> {
    let mut block = [0; 18];
    formats::encode(DType::Q4_0, values, &mut block).map_err(|_| Overflow)?;
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = (byte & 15).wrapping_sub(8);
        *high = (byte >> 4).wrapping_sub(8);
    }
    Ok(Params {
        scale: f16::from_le_bytes([block[0], block[1]]).to_f32(),
        zero_point: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linear(scheme: Scheme) -> Linear {
        Linear {
            code: Code::Int(4),
            scheme,
            scale: Scale::F32,
            search: RangeSearch::MinMax,
        }
    }

    fn quantize(linear: &Linear, x: &[f32]) -> (Params, Vec<i8>) {
        let mut codes = vec![0; x.len()];
        let params = linear.group(x, None, 1.0, &mut codes).unwrap();
        (params, codes.into_iter().map(|c| c as i8).collect())
    }

    #[test]
    fn symmetric_saturates_and_clipping_does_not() {
        let x = [7.5, -7.5, 1.0, 0.5];
        let (p, codes) = quantize(&linear(Scheme::Symmetric), &x);
        // 7.5 becomes 7: 6.7 % off. -7.5 is half-way, and -8 is even.
        assert_eq!((p.scale, codes), (1.0, vec![7, -8, 1, 0]));
        let (p, codes) = quantize(
            &linear(Scheme::SymmetricWithClipping),
            &[7.0, -7.0, 1.5, 2.5],
        );
        assert_eq!((p.scale, codes), (1.0, vec![7, -7, 2, 2]));
    }

    #[test]
    fn asymmetric_spans_the_range_and_zero() {
        let (p, codes) = quantize(&linear(Scheme::Asymmetric), &[0.0, 15.0, 3.0]);
        assert_eq!((p.scale, p.zero_point), (1.0, -8));
        assert_eq!(codes, [-8, 7, -5]);
        // A range above zero is widened to it.
        let (p, _) = quantize(&linear(Scheme::Asymmetric), &[10.0, 15.0]);
        assert_eq!((p.scale, p.zero_point), (1.0, -8));
    }

    #[test]
    fn a_clip_search_never_does_worse_and_helps_with_an_outlier() {
        // 256 weights in ±1 and one at 1.25: a step that is a fifth smaller saves
        // 256 * (1 - 0.8^2) / 12 steps squared, more than the outlier loses.
        let mut x: Vec<f32> = (0..256)
            .map(|i| ((i * 37 % 256) as f32 - 127.5) / 128.0)
            .collect();
        x[5] = 1.25;
        let plain = linear(Scheme::Symmetric);
        let search = Linear {
            search: RangeSearch::Mse,
            ..plain
        };
        let error = |l: &Linear| {
            let (p, codes) = quantize(l, &x);
            let codes: Vec<u8> = codes.iter().map(|&c| c as u8).collect();
            l.error(&x, None, p, &codes)
        };
        assert!(error(&search) < error(&plain));
        // Importance on the outlier keeps the whole range.
        let mut importance = vec![1e-6; 256];
        importance[5] = 1.0;
        let mut codes = vec![0; 256];
        let p = Linear {
            scheme: Scheme::SymmetricWithClipping,
            ..search
        }
        .group(&x, Some(&importance), 1.0, &mut codes)
        .unwrap();
        assert_eq!(p.scale, 1.25 / 7.0);
    }

    #[test]
    fn ternary_by_the_mean_and_by_the_largest() {
        let x = [1.0, -1.0, 0.2, 0.2];
        let absmean = Linear {
            code: Code::Trit,
            scheme: Scheme::AbsMean,
            ..linear(Scheme::Symmetric)
        };
        assert_eq!(
            quantize(&absmean, &x),
            (
                Params {
                    scale: 0.6,
                    zero_point: 0
                },
                vec![1, -1, 0, 0]
            )
        );
        let absmax = Linear {
            code: Code::Trit,
            ..linear(Scheme::SymmetricWithClipping)
        };
        assert_eq!(
            quantize(&absmax, &x),
            (
                Params {
                    scale: 1.0,
                    zero_point: 0
                },
                vec![1, -1, 0, 0]
            )
        );
    }

    #[test]
    fn scales_of_small_floats() {
        let mx = Linear {
            code: Code::Fp4,
            scale: Scale::E8M0,
            ..linear(Scheme::Symmetric)
        };
        let (p, codes) = quantize(&mx, &[5.0, -0.5, 3.9]);
        assert_eq!((p.scale, codes), (1.0, vec![6, 9, 6]));
        // 7 saturates at 6: the rule takes the floor of the exponent.
        assert_eq!(
            quantize(&mx, &[7.0]),
            (
                Params {
                    scale: 1.0,
                    zero_point: 0
                },
                vec![7]
            )
        );
        assert_eq!(quantize(&mx, &[0.0]).1, [0]);
        let nv = Linear {
            code: Code::Fp4,
            scale: Scale::E4M3,
            ..mx
        };
        let stats = Stats::of(&[2688.0, 6.0]);
        assert_eq!(nv.tensor_scale(&stats), 1.0);
        let (p, codes) = quantize(&nv, &[6.0, 1.0]);
        assert_eq!((p.scale, codes), (1.0, vec![7, 2]));
        let e4m3 = Linear {
            code: Code::Fp8E4M3,
            scale: Scale::F32,
            ..mx
        };
        assert_eq!(
            quantize(&e4m3, &[448.0, 1.0]),
            (
                Params {
                    scale: 1.0,
                    zero_point: 0
                },
                vec![0x7e, 0x38]
            )
        );
    }

    #[test]
    fn a_grid_of_q4_0_keeps_what_is_on_it() {
        let d = 0.125;
        let x: Vec<f32> = (0..32).map(|i| d * ((i * 5 % 16) as f32 - 8.0)).collect();
        let q4_0 = Linear {
            scheme: Scheme::Q4_0,
            scale: Scale::F16,
            ..linear(Scheme::Symmetric)
        };
        let (p, codes) = quantize(&q4_0, &x);
        assert_eq!(p.scale, d);
        for (x, code) in x.iter().zip(codes) {
            assert_eq!(*x, p.scale * f32::from(code));
        }
    }

    #[test]
    fn a_scale_beyond_its_type_is_refused() {
        let half = Linear {
            scale: Scale::F16,
            ..linear(Scheme::Symmetric)
        };
        assert_eq!(half.group(&[1e6], None, 1.0, &mut [0]), Err(Overflow));
    }
}
