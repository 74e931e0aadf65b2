//! Scalar reading of packed matrices: the definition of what a panel means.

use half::{bf16, f16};

use super::blocks::get_words;
use super::{Codes, PANEL_ROWS, PackedRef, grids};
use crate::DType;

/// A group of 16 or 32 columns of a panel in plain form:
/// `w[row][4·i + t] = scales[row] * (codes[i][4·row + t] - code_offset) [+ mins[row]]`.
#[derive(Clone, Debug)]
pub struct Group {
    /// Unsigned codes, one vector per step of 4 columns.
    pub codes: [[u8; 4 * PANEL_ROWS]; 8],
    /// Steps in use: 8, or 4 in groups of 16.
    pub steps: usize,
    /// Effective scale of each row.
    pub scales: [f32; PANEL_ROWS],
    /// Effective minimum of each row; zero where the format has none.
    pub mins: [f32; PANEL_ROWS],
}

impl Default for Group {
    fn default() -> Self {
        Group {
            codes: [[0; 4 * PANEL_ROWS]; 8],
            steps: 8,
            scales: [0.0; PANEL_ROWS],
            mins: [0.0; PANEL_ROWS],
        }
    }
}

/// Reads group `group` of panel `panel`.
///
/// # Panics
///
/// If the matrix is of plain floats, or of a grid that is, or has no such group.
pub fn expand_group(weight: PackedRef<'_>, panel: usize, group: usize, out: &mut Group) {
    let layout = weight.layout();
    if let Some(places) = layout.grid() {
        assert!(
            layout.form().is_integer(),
            "{} has no integers",
            places.grid
        );
        grids::expand_group(weight, places, panel, group, out);
        return;
    }
    let g = layout.geometry();
    let groups_per_block = g.block_columns / g.group_columns;
    let (block, within) = (group / groups_per_block, group % groups_per_block);
    let (codes, fields) = g.block_at(block, layout.blocks());
    let panel = weight.panel(panel);
    let planes = &panel[codes..][..g.codes_bytes()];
    let fields = &panel[fields..][..g.fields_bytes()];
    out.steps = g.group_columns / 4;
    let mut words = [0u32; 64];
    for lane in 0..PANEL_ROWS {
        get_words(g.codes, lane, planes, &mut words[..g.block_columns / 4]);
        for (i, codes) in out.codes[..out.steps].iter_mut().enumerate() {
            codes[4 * lane..][..4].copy_from_slice(&words[within * out.steps + i].to_le_bytes());
        }
        (out.scales[lane], out.mins[lane]) = scale_and_min(layout.dtype(), fields, lane, within);
    }
}

/// Effective scale and minimum of a row's group, computed as the format's
/// decoder does.
fn scale_and_min(dtype: DType, fields: &[u8], lane: usize, group: usize) -> (f32, f32) {
    let half = |at: usize| {
        let at = at + 2 * lane;
        f16::from_le_bytes([fields[at], fields[at + 1]]).to_f32()
    };
    let single = |at: usize| {
        let at = at + 4 * lane;
        f32::from_le_bytes([fields[at], fields[at + 1], fields[at + 2], fields[at + 3]])
    };
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::TQ1_0 | DType::TQ2_0 => (half(0), 0.0),
        DType::Q4_1 | DType::Q5_1 => (half(0), half(2 * PANEL_ROWS)),
        DType::I8G16 | DType::I8G32 => (single(0), single(4 * PANEL_ROWS)),
        DType::Q6_K => {
            let sub = fields[group * PANEL_ROWS + lane] as i8;
            (half(16 * PANEL_ROWS) * f32::from(sub), 0.0)
        }
        DType::Q4_K | DType::Q5_K => {
            // Byte `i` of the 12: low 6 bits of sub-scale i (i < 4) or sub-minimum
            // i - 4 (i < 8); the rest of sub-scales and sub-minima 4..8 is in the
            // nibbles of bytes 8..12 and the top two bits of bytes 0..8.
            let byte = |i: usize| fields[i / 4 * 4 * PANEL_ROWS + 4 * lane + i % 4];
            let (scale, min) = if group < 4 {
                (byte(group) & 63, byte(group + 4) & 63)
            } else {
                (
                    byte(group + 4) & 15 | byte(group - 4) >> 6 << 4,
                    byte(group + 4) >> 4 | byte(group) >> 6 << 4,
                )
            };
            let d = half(12 * PANEL_ROWS);
            let dmin = half(14 * PANEL_ROWS);
            (d * f32::from(scale), -(dmin * f32::from(min)))
        }
        _ => unreachable!("invariant: {dtype} has no groups"),
    }
}

/// Decodes one row: the same bits as decoding the row-major row.
///
/// # Panics
///
/// If there is no such row or `out` has not one value per column.
pub fn read_row(weight: PackedRef<'_>, row: usize, out: &mut [f32]) {
    let layout = weight.layout();
    assert!(row < layout.rows(), "row {row} of {}", layout.rows());
    assert_eq!(out.len(), layout.columns(), "values of a row");
    if layout.grid().is_some() {
        let columns = 0..layout.columns();
        grids::read_span(weight, row / PANEL_ROWS, row % PANEL_ROWS, columns, out);
        return;
    }
    let g = layout.geometry();
    let (panel, lane) = (weight.panel(row / PANEL_ROWS), row % PANEL_ROWS);
    if let Codes::Float(width) = g.codes {
        for (column, out) in panel.chunks_exact(width * PANEL_ROWS).zip(out) {
            let v = &column[lane * width..][..width];
            *out = match layout.dtype() {
                DType::F32 => f32::from_le_bytes([v[0], v[1], v[2], v[3]]),
                DType::F16 => f16::from_le_bytes([v[0], v[1]]).to_f32(),
                _ => bf16::from_le_bytes([v[0], v[1]]).to_f32(),
            };
        }
        return;
    }
    let mut words = [0u32; 64];
    let words = &mut words[..g.block_columns / 4];
    for (block, out) in out.chunks_exact_mut(g.block_columns).enumerate() {
        let (codes, fields) = g.block_at(block, layout.blocks());
        get_words(g.codes, lane, &panel[codes..][..g.codes_bytes()], words);
        let fields = &panel[fields..][..g.fields_bytes()];
        for (group, (out, words)) in out
            .chunks_exact_mut(g.group_columns)
            .zip(words.chunks_exact(g.group_columns / 4))
            .enumerate()
        {
            let (scale, min) = scale_and_min(layout.dtype(), fields, lane, group);
            for (out, word) in out.chunks_exact_mut(4).zip(words) {
                for (out, code) in out.iter_mut().zip(word.to_le_bytes()) {
                    let product = scale * (i32::from(code) - g.code_offset) as f32;
                    *out = if g.has_min { product + min } else { product };
                }
            }
        }
    }
}
