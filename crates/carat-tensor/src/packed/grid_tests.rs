use half::f16;
use proptest::prelude::*;

use super::*;
use crate::grid::{Code, GridMatrix, Scale, Spread};

/// Every valid grid with these spreads.
fn all() -> Vec<Grid> {
    let mut all = Vec::new();
    let spreads = [16, 32, 48, 64, 256].map(Spread::Block).into_iter();
    let spreads = spreads.chain([1, 4, 8, 20].map(Spread::Rows));
    for spread in spreads.chain([Spread::Tensor, Spread::Channel]) {
        let codes = [2, 4, 8].map(Code::Int).into_iter();
        let codes = codes.chain([1, 2, 3, 4, 6, 8].map(Code::Lut));
        for code in codes.chain([Code::Trit, Code::Fp4, Code::Fp8E4M3, Code::Fp8E5M2]) {
            for scale in [Scale::F32, Scale::F16, Scale::E8M0, Scale::E4M3] {
                for (zero_points, scaled) in [(false, false), (true, false), (false, true)] {
                    let mut grid = Grid::new(code, spread, scale);
                    (grid.zero_points, grid.scaled) = (zero_points, scaled);
                    all.push(grid);
                }
            }
        }
    }
    all.retain(Grid::is_valid);
    all
}

/// Noise that the grid defines, and finite scales: no byte has exponent bits alone.
fn sections(layout: &PackedLayout, seed: u64) -> Vec<u8> {
    let Form::Grid(grid) = layout.form() else {
        unreachable!()
    };
    let mut state = seed | 1;
    let mut bytes = vec![0; layout.row_major_bytes()];
    for b in &mut bytes {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        *b = (state >> 56) as u8 & 0xbb;
        if grid.code == Code::Trit {
            *b &= !(*b >> 1 & !*b & 0x55) << 1 | 0x55;
        }
    }
    // What is left over in the last byte of a row is no code.
    let bits = layout.columns() * grid.code.bits();
    for row in bytes.chunks_mut(bits.div_ceil(8)).take(layout.rows()) {
        let last = row.len() - 1;
        row[last] &= 0xff >> (row.len() * 8 - bits);
    }
    bytes
}

fn columns(grid: Grid, blocks: usize) -> usize {
    match grid.spread {
        Spread::Block(n) => usize::from(n) * blocks,
        _ => 21 * blocks,
    }
}

#[test]
fn a_packed_grid_has_the_bits_of_its_sections() {
    for grid in all() {
        // Whole panels and units: what is added fills up the panels and the tail.
        let (rows, columns) = (80, columns(grid, 32));
        let layout = PackedLayout::of(grid.into(), rows, columns).unwrap();
        let filling = layout.bytes() - layout.row_major_bytes();
        assert!(
            filling < (layout.panels() + 1) * PANEL_ALIGN,
            "{grid}: {filling}"
        );
    }
    let odd = Grid::new(Code::Int(4), Spread::Block(24), Scale::F16);
    assert_eq!(
        PackedLayout::of(odd.into(), 4, 48),
        Err(PackedError::UnsupportedGrid(odd))
    );
    let rows = Grid::new(Code::Lut(4), Spread::Rows(8), Scale::F16);
    assert!(matches!(
        PackedLayout::of(rows.into(), 12, 48),
        Err(PackedError::Grid(_))
    ));
    assert!(matches!(
        PackedLayout::of(rows.into(), usize::MAX / 16 * 8, 48),
        Err(PackedError::Grid(_) | PackedError::Overflow { .. })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn grids_come_back_and_their_rows_are_the_decoded_ones(
        grid in prop::sample::select(all()),
        panels in 0usize..3,
        blocks in 1usize..4,
        seed: u64,
    ) {
        let (rows, columns) = (40 * panels + 40, columns(grid, blocks));
        let layout = PackedLayout::of(grid.into(), rows, columns).unwrap();
        let source = sections(&layout, seed);
        let mut packed = vec![0xff; layout.bytes()];
        pack(&layout, &source, &mut packed).unwrap();
        let mut back = vec![0xff; source.len()];
        unpack(&layout, &packed, &mut back).unwrap();
        prop_assert!(source == back, "{grid}");

        let matrix = GridMatrix::from_bytes(grid, rows, columns, &source).unwrap();
        let weight = PackedRef::new(layout, &packed).unwrap();
        let (mut expected, mut values) = (vec![0.0; columns], vec![0.0; columns]);
        for row in 0..rows {
            matrix.decode_row(row, &mut expected);
            read_row(weight, row, &mut values);
            for (column, (a, b)) in values.iter().zip(&expected).enumerate() {
                prop_assert!(
                    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
                    "{grid} row {row} column {column}: {a}, expected {b}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// What a kernel gets of ternary rows comes from their values alone, both ways, for
    /// any number of columns: `d = max |w|`, `code = w / d`; of zeros, `d = 0`.
    #[test]
    fn ternary_rows_come_back_from_their_values(
        tensor: bool,
        rows in 1usize..40,
        columns in 1usize..600,
        seed: u64,
    ) {
        let spread = if tensor { Spread::Tensor } else { Spread::Channel };
        let grid = Grid::new(Code::Trit, spread, Scale::F16);
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 40) as u32
        };
        let codes = (0..rows * columns).map(|_| (next() % 3) as u8);
        let codes: Vec<u8> = codes.map(|code| code.wrapping_sub(1)).collect();
        let scale = |bits: u32| f16::from_bits(1 + (bits % 0x7bff) as u16).to_f32();
        let scales: Vec<f32> = (0..if tensor { 1 } else { rows }).map(|_| scale(next())).collect();
        let mut matrix = GridMatrix {
            grid,
            rows,
            columns,
            codes,
            scales,
            zero_points: Vec::new(),
            tables: Vec::new(),
            tensor_scale: 1.0,
        };
        let layout = PackedLayout::of(grid.into(), rows, columns).unwrap();
        let packed = |matrix: &GridMatrix| {
            let mut out = vec![0; layout.bytes()];
            pack(&layout, &matrix.to_bytes().unwrap(), &mut out).unwrap();
            out
        };
        // Rows of zeros have no scale to find.
        for row in 0..if tensor { 0 } else { rows } {
            if matrix.codes[row * columns..][..columns].iter().all(|&code| code == 0) {
                matrix.scales[row] = 0.0;
            }
        }
        if tensor && matrix.codes.iter().all(|&code| code == 0) {
            matrix.scales[0] = 0.0;
        }
        let bytes = packed(&matrix);
        let weight = PackedRef::new(layout, &bytes).unwrap();
        let mut values = vec![0.0; rows * columns];
        for (row, values) in values.chunks_exact_mut(columns).enumerate() {
            read_row(weight, row, values);
        }
        let largest = |values: &[f32]| values.iter().fold(0f32, |d, w| d.max(w.abs()));
        let mut found = matrix.clone();
        found.scales = match tensor {
            true => vec![largest(&values)],
            false => values.chunks_exact(columns).map(largest).collect(),
        };
        found.codes = values
            .iter()
            .enumerate()
            .map(|(i, w)| match found.scales[if tensor { 0 } else { i / columns }] {
                0.0 => 0,
                d => (w / d) as i8 as u8,
            })
            .collect();
        prop_assert!(found == matrix);
        prop_assert!(packed(&found) == bytes);
        for (panel, rows) in matrix.codes.chunks(PANEL_ROWS * columns).enumerate() {
            let of_kernel = grids::row_scales(weight, panel);
            for (row, scale) in of_kernel[..rows.len() / columns].iter().enumerate() {
                let at = if tensor { 0 } else { panel * PANEL_ROWS + row };
                prop_assert_eq!(*scale, matrix.scales[at]);
            }
        }
    }
}

#[test]
fn scales_of_eight_bits_are_read_without_a_table() {
    for code in 0..=255 {
        let (found, expected) = (grids::e4m3(code), crate::formats::float8::E4M3.decode(code));
        assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan());
    }
}
