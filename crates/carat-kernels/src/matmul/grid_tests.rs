//! Grids on every instruction set: the bits of the same weights in formats that the
//! other tests hold against fp64.

use carat_tensor::formats::float8::{E4M3, FP4};
use carat_tensor::grid::{Code, Grid, Scale, Spread};
use carat_tensor::{DType, GridMatrix};
use half::f16;

use super::tests::{Noise, Weight, assert_same, named, product};
use super::*;

/// The kinds of grids: every width of code, way to store a scale, and spread.
fn grids() -> Vec<Grid> {
    [
        "int2.block32.f16",
        "int2.channel.f32.zp",
        "int4.block16.f16",
        "int4.block16.f16.zp",
        "int4.block48.f32.zp",
        "int4.block64.f16",
        "int4.block128.f16.zp",
        "int4.channel.f16",
        "int4.tensor.f16.zp",
        "int8.block256.f16.zp",
        "int8.block16.f32",
        "int8.channel.f32",
        "int8.tensor.f32.zp",
        "trit.tensor.f16",
        "trit.tensor.f32",
        "trit.channel.f16",
        "trit.channel.f32",
        "trit.block64.f32",
        "fp4.block32.e8m0",
        "fp4.block16.e4m3",
        "fp4.tensor.e4m3",
        "fp4.channel.f16",
        "fp8e4m3.channel.f16",
        "fp8e4m3.block128.e8m0",
        "fp8e5m2.tensor.f32",
        "lut1.tensor.f16",
        "lut2.rows8.f16.scaled",
        "lut3.rows4.f16",
        "lut4.rows8.f16",
        "lut4.rows20.f16.scaled",
        "lut4.rows5.f16",
        "lut6.rows8.f16",
        "lut6.tensor.f16.scaled",
        "lut8.tensor.f16",
        "lut8.rows40.f16",
    ]
    .map(|name| Grid::from_name(name).unwrap())
    .to_vec()
}

/// A short and a long row: the long one is more than kernels take at once. Of ternary
/// rows also such that end with a block, or just begin one.
fn columns(grid: Grid) -> &'static [usize] {
    match grid.spread {
        Spread::Block(16) => &[16, 576],
        Spread::Block(32) => &[32, 576],
        Spread::Block(48) => &[48, 576],
        Spread::Block(64) => &[64, 576],
        Spread::Block(_) => &[256, 768],
        _ if grid.code == Code::Trit => &[21, 551, 768, 1025],
        _ => &[21, 551],
    }
}

fn random(grid: Grid, rows: usize, columns: usize, noise: &mut Noise) -> GridMatrix {
    let code = |noise: &mut Noise| {
        let bits = noise.bits() as u8;
        match grid.code {
            Code::Int(n) => ((bits << (8 - n)) as i8 >> (8 - n)) as u8,
            Code::Trit => (bits % 3).wrapping_sub(1),
            // Not the codes that are no numbers.
            Code::Fp8E4M3 if bits & 0x7f == 0x7f => 0,
            Code::Fp8E5M2 if bits & 0x7f >= 0x7c => 0x81,
            code => (u16::from(bits) & ((1 << code.bits()) - 1)) as u8,
        }
    };
    let scale = |noise: &mut Noise| match grid.scale {
        Scale::F32 => noise.unit(),
        Scale::F16 => f16::from_f32(noise.unit()).to_f32(),
        Scale::E8M0 => 2f32.powi((noise.bits() % 16) as i32 - 12),
        Scale::E4M3 => E4M3.decode(noise.bits() as u8 % 0x7f),
    };
    let lut = matches!(grid.code, Code::Lut(_));
    let scales = match grid.spread {
        _ if lut => usize::from(grid.scaled) * rows,
        Spread::Tensor => 1,
        Spread::Block(n) => rows * columns / usize::from(n),
        _ => rows,
    };
    let tables = match grid.spread {
        _ if !lut => 0,
        Spread::Rows(n) => rows / usize::from(n),
        _ => 1,
    };
    GridMatrix {
        grid,
        rows,
        columns,
        codes: (0..rows * columns).map(|_| code(noise)).collect(),
        scales: (0..scales).map(|_| scale(noise)).collect(),
        zero_points: (0..scales * usize::from(grid.zero_points))
            .map(|_| noise.bits() as i8)
            .collect(),
        tables: (0..tables << grid.code.bits())
            .map(|i| f16::from_f32(if i % 7 == 0 { -0.0 } else { noise.unit() }).to_f32())
            .collect(),
        tensor_scale: match grid.scale {
            Scale::E4M3 => 0.0123,
            _ => 1.0,
        },
    }
}

fn packed(matrix: &GridMatrix) -> Weight {
    let bytes = matrix.to_bytes().unwrap();
    Weight::of(matrix.grid.into(), matrix.rows, matrix.columns, &bytes)
}

/// The same integers as int8 groups under fp32 scales and minima.
fn restated(matrix: &GridMatrix) -> Weight {
    let run = match matrix.grid.spread {
        Spread::Block(n) => usize::from(n),
        _ => matrix.columns,
    };
    let (dtype, group) = match run % 32 {
        16 => (DType::I8G16, 16),
        _ => (DType::I8G32, 32),
    };
    let columns = matrix.columns.next_multiple_of(group);
    let mut bytes = Vec::new();
    for row in 0..matrix.rows {
        for first in (0..columns).step_by(group) {
            let at = match matrix.grid.spread {
                Spread::Tensor => 0,
                _ => row * (matrix.columns / run) + first / run,
            };
            let mut scale = matrix.scales[at] * matrix.tensor_scale;
            if matrix.grid.code == Code::Fp4 {
                scale *= 0.5;
            }
            let zero = f32::from(matrix.zero_points.get(at).copied().unwrap_or(0));
            let min = if matrix.grid.zero_points {
                -(scale * zero)
            } else {
                0.0
            };
            bytes.extend(scale.to_le_bytes());
            bytes.extend(min.to_le_bytes());
            bytes.extend((first..first + group).map(|column| {
                if column >= matrix.columns {
                    return 0;
                }
                match (
                    matrix.grid.code,
                    matrix.codes[row * matrix.columns + column],
                ) {
                    (Code::Fp4, code) => (2.0 * FP4.decode(code)) as i8 as u8,
                    (_, code) => code,
                }
            }));
        }
    }
    Weight::of(dtype.into(), matrix.rows, columns, &bytes)
}

/// Products of ternary rows with inputs of one scale a token, in the reference's own
/// words: `s = 127 / max(|x|, 1e-5)`, `q = clamp(round(x s), -128, 127)`, sums of integers.
fn of_rows(matrix: &GridMatrix, bias: Option<&[f32]>, x: &[f32]) -> Vec<f32> {
    let mut out = Vec::new();
    for x in x.chunks_exact(matrix.columns) {
        let largest = x.iter().fold(1e-5f32, |a, x| a.max(x.abs()));
        let s = 127.0 / largest;
        let codes: Vec<i64> = x
            .iter()
            .map(|x| (x * s).round_ties_even().clamp(-128.0, 127.0) as i64)
            .collect();
        let of_token = match largest.is_finite() {
            true => largest / 127.0,
            false => f32::NAN,
        };
        for (row, weights) in matrix.codes.chunks_exact(matrix.columns).enumerate() {
            let products = weights.iter().zip(&codes);
            let sum: i64 = products.map(|(&w, q)| i64::from(w as i8) * q).sum();
            assert!(sum.abs() < 1 << 24);
            let scale = matrix.scales[row % matrix.scales.len()];
            let value = sum as f32 * (scale * of_token);
            out.push(bias.map_or(value, |bias| value + bias[row]));
        }
    }
    out
}

/// The decoded weights.
fn decoded(matrix: &GridMatrix) -> Weight {
    let mut values = vec![0.0; matrix.rows * matrix.columns];
    for (row, values) in values.chunks_exact_mut(matrix.columns).enumerate() {
        matrix.decode_row(row, values);
    }
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Weight::of(DType::F32.into(), matrix.rows, matrix.columns, &bytes)
}

/// Rows of the input, each filled up with zeros.
fn widen(x: &[f32], from: usize, to: usize) -> Vec<f32> {
    let rows = x.chunks_exact(from);
    rows.flat_map(|row| row.iter().copied().chain(vec![0.0; to - from]))
        .collect()
}

fn grids_equal_what_they_stand_for(isa: Isa) {
    const ROWS: usize = 40;
    const TOKENS: [usize; 5] = [1, 2, 3, 7, 13];
    let one = Pool::new(1);
    let mut noise = Noise(77);
    for grid in grids() {
        for &k in columns(grid) {
            let matrix = random(grid, ROWS, k, &mut noise);
            let weight = packed(&matrix);
            let mut x = noise.input(13 * k);
            x[k..2 * k].fill(0.0);
            x[2 * k..3 * k].fill(1.0);
            x[5 * k + 7] = f32::INFINITY;
            let bias = noise.input(ROWS);
            for precision in [ActPrecision::Int8, ActPrecision::F32] {
                let form = Form::Grid(grid);
                let expected = if precision == ActPrecision::Int8 && form.is_row_of_trits() {
                    of_rows(&matrix, Some(&bias), &x)
                } else if precision == ActPrecision::Int8 && form.is_integer() {
                    let other = restated(&matrix);
                    let x = widen(&x, k, other.layout.columns());
                    product(Isa::Scalar, &one, precision, &other, Some(&bias), &x)
                } else {
                    let other = decoded(&matrix);
                    product(Isa::Scalar, &one, precision, &other, Some(&bias), &x)
                };
                for (m, threads) in TOKENS.into_iter().zip([1, 3, 1, 2, 1]) {
                    let pool = Pool::new(threads);
                    let out = product(isa, &pool, precision, &weight, Some(&bias), &x[..m * k]);
                    let what = format_args!("{isa} {grid} {precision:?} m {m} k {k}");
                    assert_same(&out, &expected[..m * ROWS], what);
                }
            }
        }
    }
}

/// A token's row among 64 and among 150, more than a job takes, is its row alone.
fn ternary_rows_do_not_depend_on_company(isa: Isa) {
    let mut noise = Noise(78);
    let (rows, k) = (200, 1128);
    for name in ["trit.channel.f16", "trit.tensor.f32"] {
        let matrix = random(Grid::from_name(name).unwrap(), rows, k, &mut noise);
        let weight = packed(&matrix);
        let x = noise.input(150 * k);
        let expected = of_rows(&matrix, None, &x);
        for (m, threads) in [(4, 2), (64, 3), (150, 2)] {
            let pool = Pool::new(threads);
            let out = product(isa, &pool, ActPrecision::Int8, &weight, None, &x[..m * k]);
            assert_same(
                &out,
                &expected[..m * rows],
                format_args!("{isa} {name} m {m}"),
            );
        }
    }
}

macro_rules! suite {
    ($($name:ident: $isa:expr;)*) => {$(
        #[test]
        fn $name() {
            if $isa.is_available() {
                grids_equal_what_they_stand_for($isa);
                ternary_rows_do_not_depend_on_company($isa);
            }
        }
    )*};
}

suite! {
    grids_on_scalar: Isa::Scalar;
    grids_on_neondot: Isa::NeonDot;
    grids_on_avx2: Isa::Avx2;
    grids_on_avxvnni: Isa::AvxVnni;
    grids_on_avx512vnni: Isa::Avx512Vnni;
    grids_on_amx: Isa::Amx;
}

#[test]
fn grids_are_named_in_plans() {
    let name = |grid: &str| {
        let grid = Grid::from_name(grid).unwrap();
        named(Isa::Scalar, grid, ActPrecision::Int8, 1)
    };
    assert_eq!(
        name("int4.channel.f16"),
        "scalar int4.channel.f16 x int8/32 fused"
    );
    assert_eq!(
        name("trit.tensor.f16"),
        "scalar trit.tensor.f16 x int8/row fused"
    );
    assert_eq!(name("lut4.rows8.f16"), "scalar lut4.rows8.f16 x f32 fused");
}
