//! Matrices that already are on the grid that a recipe asks for, as checkpoints are
//! that were trained for it: they keep their codes and scales, and lose nothing.
//!
//! A group is on the grid if there is a scale `d` that the grid can store and a code
//! `k` for each weight with `w = d * k`, to the last bit of the source's type. The
//! formulas of [`linear`](crate::linear) would find another scale: that of a group
//! whose largest code is 6 of 7, for one, or that of Q4_0, whose codes reach -8 on one
//! side. Int8 codes in bf16 may not be found: it has fewer digits than they.

use carat_tensor::{
    DType, GridMatrix, formats,
    grid::{Code, Scale, Spread},
};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::matrix::{Method, Source};

/// Scales around the middle of what fits that are tried: as many fp16 numbers lie in
/// the half-ulp of a bf16 number to both sides, divided by a code.
const NEIGHBOURS: i32 = 4;

/// The matrix as it is, if all its groups are on the grid of `method`: one of integers
/// or trits without zero points, with fp16 or fp32 scales of blocks or rows. Looks at
/// no more than a group or two of a matrix that is not.
pub fn on_grid(method: &Method, source: Source<'_>) -> Option<GridMatrix> {
    let grid = method.grid();
    let most = match grid.code {
        Code::Int(bits) => 1i32 << (bits - 1),
        Code::Trit => 1,
        _ => return None,
    };
    let run = match grid.spread {
        Spread::Block(n) => usize::from(n),
        Spread::Channel => source.columns,
        Spread::Tensor | Spread::Rows(_) => return None,
    };
    let known = matches!(grid.scale, Scale::F16 | Scale::F32) && !grid.zero_points;
    grid.parts(source.rows, source.columns).ok()?;
    let row_bytes = source.dtype.row_bytes(source.columns)?;
    if !known || run == 0 || row_bytes.checked_mul(source.rows) != Some(source.data.len()) {
        return None;
    }
    let search = Search {
        // Trits have no code without a counterpart.
        lowest: if grid.code == Code::Trit { -1 } else { -most },
        highest: if grid.code == Code::Trit { 1 } else { most - 1 },
        scale: grid.scale,
        source: source.dtype,
    };
    let mut codes = vec![0; source.rows * source.columns];
    let rows: Option<Vec<Vec<f32>>> = codes
        .par_chunks_mut(source.columns)
        .enumerate()
        .map_init(
            || vec![0.0; source.columns],
            |values, (row, codes)| {
                let bytes = &source.data[row * row_bytes..][..row_bytes];
                formats::decode(source.dtype, bytes, values).ok()?;
                let groups = values.chunks(run).zip(codes.chunks_mut(run));
                groups.map(|(v, codes)| search.group(v, codes)).collect()
            },
        )
        .collect();
    Some(GridMatrix {
        grid,
        rows: source.rows,
        columns: source.columns,
        codes,
        scales: rows?.concat(),
        zero_points: vec![],
        tables: vec![],
        tensor_scale: 1.0,
    })
}

struct Search {
    lowest: i32,
    highest: i32,
    scale: Scale,
    source: DType,
}

impl Search {
    /// The scale of a group, and its codes.
    fn group(&self, values: &[f32], codes: &mut [u8]) -> Option<f32> {
        let largest = values.iter().fold(0.0f32, |a, &v| match v.abs() > a.abs() {
            true => v,
            false => a,
        });
        if !largest.is_finite() {
            return None;
        }
        if largest == 0.0 {
            codes.fill(0);
            return Some(f32::EPSILON);
        }
        // The largest weight may be any code; the lowest one first, as in Q4_0.
        let lowest = (self.lowest < -self.highest).then_some(self.lowest);
        let others = (1..=self.highest).rev();
        let others = others.map(|k| if largest < 0.0 { -k } else { k });
        lowest
            .into_iter()
            .chain(others)
            .find_map(|k| self.with(largest / k as f32, values, codes))
    }

    /// The scale near `guess` under which all weights are codes.
    fn with(&self, guess: f32, values: &[f32], codes: &mut [u8]) -> Option<f32> {
        let (mut low, mut high) = (0.0f64, f64::INFINITY);
        for (&v, code) in values.iter().zip(&mut *codes) {
            let k = (v / guess).round_ties_even();
            if !(self.lowest as f32..=self.highest as f32).contains(&k) || (k == 0.0) != (v == 0.0)
            {
                return None;
            }
            *code = k as i8 as u8;
            if k != 0.0 {
                let (size, slack) = (f64::from(v.abs()), self.slack(v));
                // Below a power of two numbers are twice as close.
                let power = v.to_bits() & 0x007f_ffff == 0;
                let below = if power { slack / 2.0 } else { slack };
                low = low.max((size - below) / f64::from(k.abs()));
                high = high.min((size + slack) / f64::from(k.abs()));
            }
        }
        if low > high {
            return None;
        }
        let middle = ((low + high) / 2.0) as f32;
        let fits = |scale: &f32| {
            let mut pairs = values.iter().zip(&*codes);
            pairs.all(|(&v, &code)| self.rounded(scale * f32::from(code as i8)) == v)
        };
        let sign = guess.signum();
        let near = (0..=2 * NEIGHBOURS).map(|i| {
            // 0, 1, -1, 2, -2, …
            let step = if i % 2 == 0 { -(i / 2) } else { i / 2 + 1 };
            sign * self.neighbour(middle, step)
        });
        near.filter(|scale| scale.is_finite() && *scale != 0.0)
            .find(fits)
    }

    /// Half the distance to the next value of the source's type.
    fn slack(&self, v: f32) -> f64 {
        let digits = match self.source {
            DType::BF16 => 8,
            DType::F16 => 11,
            _ => 24,
        };
        // Smallest exponents: of the subnormal numbers.
        let exponent = match self.source {
            DType::F16 => f64::from(v.abs()).log2().floor().max(-14.0),
            _ => f64::from(v.abs()).log2().floor().max(-126.0),
        };
        2f64.powf(exponent - f64::from(digits))
    }

    /// Rounds a product to the source's type.
    fn rounded(&self, v: f32) -> f32 {
        match self.source {
            DType::BF16 => bf16::from_f32(v).to_f32(),
            DType::F16 => f16::from_f32(v).to_f32(),
            _ => v,
        }
    }

    /// A positive number of the grid's type of scales, so many steps from `v`.
    fn neighbour(&self, v: f32, step: i32) -> f32 {
        match self.scale {
            Scale::F16 => {
                let bits = i32::from(f16::from_f32(v).to_bits()) + step;
                f16::from_bits(bits.clamp(0, 0x7c00) as u16).to_f32()
            }
            _ => f32::from_bits((v.to_bits() as i32 + step).clamp(0, 0x7f80_0000) as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        linear::{Linear, RangeSearch, Scheme},
        matrix::quantize,
    };

    fn method(code: Code, spread: Spread, scale: Scale) -> Method {
        let linear = Linear {
            code,
            scheme: Scheme::SymmetricWithClipping,
            scale,
            search: RangeSearch::MinMax,
        };
        Method::Linear { linear, spread }
    }

    const ROWS: usize = 12;
    const COLUMNS: usize = 256;

    /// Codes that seldom reach the ends, under scales of the grid's type, in `dtype`.
    fn trained(lowest: i32, highest: i32, run: usize, dtype: DType) -> Vec<u8> {
        let values: Vec<f32> = (0..ROWS * COLUMNS)
            .map(|i| {
                let group = i / run;
                let scale = f16::from_f32(0.01 + (group * 31 % 97) as f32 / 5000.0).to_f32();
                let scale = if group % 5 == 4 { -scale } else { scale };
                let spread = (highest - lowest + 1) as usize;
                let code = lowest + (i * i * 7919 % 10007 % spread) as i32;
                // Some groups use few of the codes, one none.
                let code = match group % 7 {
                    3 => code / 2,
                    6 if group == 6 => 0,
                    _ => code,
                };
                scale * code as f32
            })
            .collect();
        let mut out = vec![0; dtype.row_bytes(COLUMNS).unwrap() * ROWS];
        formats::encode(dtype, &values, &mut out).unwrap();
        out
    }

    fn source(dtype: DType, data: &[u8]) -> Source<'_> {
        Source {
            dtype,
            rows: ROWS,
            columns: COLUMNS,
            data,
        }
    }

    #[test]
    fn what_was_trained_for_a_grid_keeps_it_to_the_last_bit() {
        for (code, lowest, highest) in [
            (Code::Int(4), -8, 7),
            (Code::Int(2), -2, 1),
            (Code::Int(8), -128, 127),
            (Code::Trit, -1, 1),
        ] {
            for (spread, run) in [
                (Spread::Block(32), 32),
                (Spread::Block(16), 16),
                (Spread::Channel, COLUMNS),
            ] {
                for scale in [Scale::F16, Scale::F32] {
                    for dtype in [DType::F32, DType::BF16, DType::F16] {
                        if (code, dtype) == (Code::Int(8), DType::BF16) {
                            // Half a step of a large code is less than bf16's last digit.
                            continue;
                        }
                        let method = method(code, spread, scale);
                        let data = trained(lowest, highest, run, dtype);
                        let source = source(dtype, &data);
                        let kept = on_grid(&method, source)
                            .unwrap_or_else(|| panic!("{} in {dtype}", method.grid()));
                        let (mut row, mut was) = (vec![0.0; COLUMNS], vec![0.0; COLUMNS]);
                        for (i, bytes) in data.chunks(data.len() / ROWS).enumerate() {
                            kept.decode_row(i, &mut row);
                            formats::decode(dtype, bytes, &mut was).unwrap();
                            let mut again = vec![0; bytes.len()];
                            formats::encode(dtype, &row, &mut again).unwrap();
                            let mut back = vec![0.0; COLUMNS];
                            formats::decode(dtype, &again, &mut back).unwrap();
                            assert!(back == was, "{} in {dtype}, row {i}", method.grid());
                        }
                        kept.to_bytes().unwrap();
                    }
                }
            }
        }
    }

    #[test]
    fn the_formula_would_have_lost_it() {
        let method = method(Code::Int(4), Spread::Block(32), Scale::F16);
        let data = trained(-8, 7, 32, DType::F32);
        let plain = quantize(&method, source(DType::F32, &data), None).unwrap();
        let kept = on_grid(&method, source(DType::F32, &data)).unwrap();
        assert_ne!(plain.codes, kept.codes);
    }

    #[test]
    fn what_is_between_codes_or_of_another_kind_is_not_on_the_grid() {
        let block = method(Code::Int(4), Spread::Block(32), Scale::F16);
        let mut data = trained(-8, 7, 32, DType::F32);
        assert!(on_grid(&block, source(DType::F32, &data)).is_some());
        // One weight of the last group, half a step off.
        let at = 4 * (ROWS * COLUMNS - 3);
        data[at..][..4].copy_from_slice(&0.0117f32.to_le_bytes());
        assert!(on_grid(&block, source(DType::F32, &data)).is_none());
        data[at..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        assert!(on_grid(&block, source(DType::F32, &data)).is_none());
        assert!(on_grid(&block, source(DType::F32, &data[..40])).is_none());
        let palette = Method::Palette {
            bits: 4,
            spread: Spread::Tensor,
            scaled: false,
            decimals: None,
        };
        let data = trained(-8, 7, 32, DType::F32);
        assert!(on_grid(&palette, source(DType::F32, &data)).is_none());
        let tensor = method(Code::Int(4), Spread::Tensor, Scale::F16);
        assert!(on_grid(&tensor, source(DType::F32, &data)).is_none());
    }
}
