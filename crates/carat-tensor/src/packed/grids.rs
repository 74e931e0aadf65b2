//! Grids in panels.
//!
//! A packed [`Grid`] has the bits of its sections, moved. In a panel of 16 rows:
//!
//! ```text
//! codes        by 32 columns (the last ones filled up with zeros): the planes of
//!              the module's table; integers of 8 bits plus 128, trits plus 1
//! scales       [group][16 rows], as stored; [16 rows] where a row has one
//! zero points  likewise
//! ```
//!
//! filled up to a multiple of 64 bytes. After the last panel comes a *tail* of what
//! panels share: tables, the fp32 scale of the tensor, and where all weights have one
//! scale, that and its zero point; filled up likewise.

use std::ops::Range;

use half::{f16, slice::HalfFloatSliceExt as _};

use super::blocks::{get_words, put_words};
use super::{
    Codes, Geometry, Group, PANEL_ALIGN, PANEL_ROWS, PackedError, PackedLayout, PackedRef,
};
use crate::grid::{Code, Grid, Parts, Scale, Spread, e8m0, pack_bits, unpack_bits};

/// Columns of a unit of codes.
pub const UNIT: usize = 32;

/// Where the parts of a packed grid are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// The grid.
    pub grid: Grid,
    /// Units of 32 columns in a panel.
    pub units: usize,
    /// Scales of a row in its panel: none where the tensor has one.
    pub scales: usize,
    /// Offset of the scales in a panel.
    pub scales_at: usize,
    /// Offset of the zero points in a panel.
    pub zero_points_at: usize,
    /// Number of tables, from the start of the tail.
    pub tables: usize,
    /// Offset of the fp32 scale of the tensor in the tail.
    pub tensor_scale_at: usize,
    /// Offset of the only scale in the tail; its zero point follows.
    pub only_scale_at: usize,
    /// Bytes of the tail.
    pub tail_bytes: usize,
    parts: Parts,
}

/// The planes of codes of so many bits.
const fn codes(bits: usize) -> Codes {
    match bits {
        1 => Codes::One,
        2 => Codes::Two,
        3 => Codes::Three,
        4 => Codes::Four,
        6 => Codes::Six,
        _ => Codes::Eight,
    }
}

/// Sizes and constants of a grid's groups of integers.
pub(super) const fn geometry(grid: Grid) -> Geometry {
    let halves = matches!(grid.spread, Spread::Block(n) if !(n as usize).is_multiple_of(UNIT));
    Geometry {
        block_columns: 1,
        blocks_per_chunk: 1,
        codes: codes(grid.code.bits()),
        code_offset: 128,
        group_columns: if halves { 16 } else { UNIT },
        // A minimum of zero costs less than kernels for groups of 16 without one.
        has_min: grid.zero_points || halves,
        fields: &[],
    }
}

/// The layout of a grid `[rows, columns]`.
pub(super) fn layout(grid: Grid, rows: usize, columns: usize) -> Result<PackedLayout, PackedError> {
    if rows == 0 || columns == 0 {
        return Err(PackedError::Empty { rows, columns });
    }
    if !grid.is_valid() || matches!(grid.spread, Spread::Block(n) if n % 16 != 0) {
        return Err(PackedError::UnsupportedGrid(grid));
    }
    let parts = grid.parts(rows, columns)?;
    let sizes = || {
        let units = columns.div_ceil(UNIT);
        let lut = matches!(grid.code, Code::Lut(_));
        let scales = match grid.spread {
            _ if lut => usize::from(grid.scaled),
            Spread::Tensor => 0,
            Spread::Block(n) => columns / usize::from(n),
            _ => 1,
        };
        let scales_at = units.checked_mul(grid.code.bits() * 2 * UNIT)?;
        let zero_points_at =
            scales_at.checked_add(scales.checked_mul(PANEL_ROWS * grid.scale.bytes())?)?;
        let zero_points = if grid.zero_points { scales } else { 0 };
        let panel_bytes = zero_points_at
            .checked_add(zero_points * PANEL_ROWS)?
            .checked_next_multiple_of(PANEL_ALIGN)?;
        let tensor_scale_at = parts.tables;
        let only_scale_at = tensor_scale_at + if grid.scale == Scale::E4M3 { 4 } else { 0 };
        let only = !lut && grid.spread == Spread::Tensor;
        let tail = only_scale_at + if only { grid.scale.bytes() + 1 } else { 0 };
        let tail_bytes = tail.checked_next_multiple_of(PANEL_ALIGN)?;
        let panels = rows.div_ceil(PANEL_ROWS).checked_mul(panel_bytes)?;
        let bytes = panels.checked_add(tail_bytes)?;
        isize::try_from(bytes).ok()?;
        Some(PackedLayout {
            dtype: crate::DType::F32,
            grid: Some(Places {
                grid,
                units,
                scales,
                scales_at,
                zero_points_at,
                tables: parts.tables / (2 << grid.code.bits()),
                tensor_scale_at,
                only_scale_at,
                tail_bytes,
                parts,
            }),
            rows,
            columns,
            geometry: geometry(grid),
            panel_bytes,
            bytes,
        })
    };
    sizes().ok_or(PackedError::Overflow {
        form: grid.into(),
        rows,
        columns,
    })
}

impl Places {
    /// Bytes of the sections.
    pub(super) fn section_bytes(&self) -> usize {
        self.parts.total()
    }

    /// Bytes of the planes of a unit.
    pub fn unit_bytes(&self) -> usize {
        self.grid.code.bits() * 2 * UNIT
    }

    /// Columns of a row that share a scale.
    pub fn run(&self) -> usize {
        match self.grid.spread {
            Spread::Block(n) => usize::from(n),
            _ => usize::MAX,
        }
    }

    /// Where the fields of a row are: offset in the sections, offset in the panel,
    /// bytes.
    fn fields(&self, row: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let (width, lane, scales) = (self.grid.scale.bytes(), row % PANEL_ROWS, self.scales);
        let zero_points = if self.grid.zero_points { scales } else { 0 };
        let (codes, at) = (self.parts.codes, self.scales_at);
        let (after, zeros_at) = (codes + self.parts.scales, self.zero_points_at);
        let place = move |g: usize| (row * scales + g, g * PANEL_ROWS + lane);
        let of_scales = (0..scales).map(move |g| {
            let (from, to) = place(g);
            (codes + from * width, at + to * width, width)
        });
        of_scales.chain((0..zero_points).map(move |g| {
            let (from, to) = place(g);
            (after + from, zeros_at + to, 1)
        }))
    }

    /// Where what panels share is: offset in the sections, offset in the tail, bytes.
    fn shared(&self) -> [(usize, usize, usize); 4] {
        let Parts {
            codes,
            scales,
            zero_points,
            tables,
        } = self.parts;
        let tensor = if self.grid.scale == Scale::E4M3 { 4 } else { 0 };
        let lut = matches!(self.grid.code, Code::Lut(_));
        let (only, zero) = if !lut && self.grid.spread == Spread::Tensor {
            (self.grid.scale.bytes(), usize::from(self.grid.zero_points))
        } else {
            (0, 0)
        };
        let before_tables = codes + (scales - tensor) + zero_points;
        [
            (before_tables, 0, tables),
            (before_tables + tables, self.tensor_scale_at, tensor),
            (codes, self.only_scale_at, only),
            (codes + scales - tensor, self.only_scale_at + only, zero),
        ]
    }

    /// What codes of the sections and packed ones differ by.
    fn offset(&self) -> Option<Offset> {
        match self.grid.code {
            Code::Int(8) => Some(Offset {
                add: 128,
                mask: 255,
            }),
            Code::Trit => Some(Offset { add: 1, mask: 3 }),
            _ => None,
        }
    }
}

/// Packed codes are those of the sections plus a number, within their bits.
#[derive(Clone, Copy)]
struct Offset {
    add: u8,
    mask: u8,
}

impl Offset {
    fn pack(self, codes: &mut [u8]) {
        let of = |code: &mut u8| *code = code.wrapping_add(self.add) & self.mask;
        codes.iter_mut().for_each(of);
    }

    fn unpack(self, codes: &mut [u8]) {
        let of = |code: &mut u8| *code = code.wrapping_sub(self.add) & self.mask;
        codes.iter_mut().for_each(of);
    }
}

/// Packs rows of the sections of a grid into their panel.
pub(super) fn pack_panel(
    layout: &PackedLayout,
    places: &Places,
    sections: &[u8],
    panel: usize,
    out: &mut [u8],
) {
    out.fill(0);
    let (bits, columns) = (places.grid.code.bits(), layout.columns());
    let row_bytes = (columns * bits).div_ceil(8);
    let mut unpacked = Vec::with_capacity(places.units * UNIT);
    for row in panel * PANEL_ROWS..layout.rows().min((panel + 1) * PANEL_ROWS) {
        unpacked.clear();
        let codes = &sections[row * row_bytes..][..row_bytes];
        unpack_bits(codes, bits, columns, false, &mut unpacked);
        if let Some(offset) = places.offset() {
            offset.pack(&mut unpacked);
        }
        unpacked.resize(places.units * UNIT, 0);
        let planes = out.chunks_exact_mut(places.unit_bytes());
        for (codes, planes) in unpacked.as_chunks::<UNIT>().0.iter().zip(planes) {
            let words = codes.as_chunks::<4>().0;
            let words: [u32; 8] = std::array::from_fn(|i| u32::from_le_bytes(words[i]));
            put_words(layout.geometry.codes, &words, row % PANEL_ROWS, planes);
        }
        for (from, to, len) in places.fields(row) {
            out[to..to + len].copy_from_slice(&sections[from..from + len]);
        }
    }
}

/// Packs what panels share.
pub(super) fn pack_tail(places: &Places, sections: &[u8], tail: &mut [u8]) {
    tail.fill(0);
    for (from, to, len) in places.shared() {
        tail[to..to + len].copy_from_slice(&sections[from..from + len]);
    }
}

/// Recovers the sections.
pub(super) fn unpack(layout: &PackedLayout, places: &Places, packed: &[u8], out: &mut [u8]) {
    let (bits, columns) = (places.grid.code.bits(), layout.columns());
    let row_bytes = (columns * bits).div_ceil(8);
    let (panels, tail) = packed.split_at(packed.len() - places.tail_bytes);
    let (mut codes, mut bytes) = (vec![0; places.units * UNIT], Vec::with_capacity(row_bytes));
    for row in 0..layout.rows() {
        let panel = &panels[row / PANEL_ROWS * layout.panel_bytes..][..layout.panel_bytes];
        read_codes(layout, places, panel, row % PANEL_ROWS, 0, &mut codes);
        if let Some(offset) = places.offset() {
            offset.unpack(&mut codes);
        }
        bytes.clear();
        pack_bits(&codes[..columns], bits, &mut bytes);
        out[row * row_bytes..][..row_bytes].copy_from_slice(&bytes);
        for (to, from, len) in places.fields(row) {
            out[to..to + len].copy_from_slice(&panel[from..from + len]);
        }
    }
    for (to, from, len) in places.shared() {
        out[to..to + len].copy_from_slice(&tail[from..from + len]);
    }
}

/// The codes of a row as stored, from a unit on; as many whole units as `out` has.
fn read_codes(
    layout: &PackedLayout,
    places: &Places,
    panel: &[u8],
    lane: usize,
    first_unit: usize,
    out: &mut [u8],
) {
    let planes = panel.chunks_exact(places.unit_bytes()).skip(first_unit);
    for (out, planes) in out.as_chunks_mut::<UNIT>().0.iter_mut().zip(planes) {
        let mut words = [0u32; 8];
        get_words(layout.geometry.codes, lane, planes, &mut words);
        for (out, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *out = word.to_le_bytes();
        }
    }
}

/// A grid's only scale, times that of the tensor, and its zero point; of a grid
/// whose rows have scales, the tensor's scale and zero.
pub fn shared_scale(places: &Places, tail: &[u8]) -> (f32, i8) {
    let tensor = match places.grid.scale {
        Scale::E4M3 => {
            let at = places.tensor_scale_at;
            f32::from_le_bytes([tail[at], tail[at + 1], tail[at + 2], tail[at + 3]])
        }
        _ => 1.0,
    };
    if matches!(places.grid.code, Code::Lut(_)) || places.grid.spread != Spread::Tensor {
        return (tensor, 0);
    }
    let at = places.only_scale_at;
    let zero = match places.grid.zero_points {
        true => tail[at + places.grid.scale.bytes()] as i8,
        false => 0,
    };
    (scale(places.grid.scale, &tail[at..]) * tensor, zero)
}

/// The scales of a panel's rows, of a grid whose rows or tensor have one.
///
/// # Panics
///
/// If the weight is no such grid or has no such panel.
pub fn row_scales(weight: PackedRef<'_>, panel: usize) -> [f32; PANEL_ROWS] {
    let places = weight.layout().grid.as_ref().expect("a grid");
    assert!(places.scales <= 1, "{} has scales of blocks", places.grid);
    let (shared, _) = shared_scale(places, weight.tail());
    if places.scales == 0 {
        return [shared; PANEL_ROWS];
    }
    let (kind, panel) = (places.grid.scale, weight.panel(panel));
    let bytes = &panel[places.scales_at..][..PANEL_ROWS * kind.bytes()];
    let mut out = [0.0; PANEL_ROWS];
    if kind == Scale::F16 {
        // All at once, which takes instructions that most machines have.
        let halves: [f16; PANEL_ROWS] =
            std::array::from_fn(|i| f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
        halves.convert_to_f32_slice(&mut out);
    } else {
        for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(kind.bytes())) {
            *out = scale(kind, bytes);
        }
    }
    out.map(|scale| scale * shared)
}

/// A scale from its bytes.
fn scale(kind: Scale, bytes: &[u8]) -> f32 {
    match kind {
        Scale::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        Scale::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Scale::E8M0 => e8m0(bytes[0]),
        Scale::E4M3 => e4m3(bytes[0]),
    }
}

/// E4M3 in fp32, without a branch: compilers make vectors of it.
#[inline(always)]
pub fn e4m3(code: u8) -> f32 {
    let (magnitude, sign) = (u32::from(code & 0x7f), u32::from(code & 0x80) << 24);
    // 1.fff × 2^(eeee - 7), or 0.fff × 2^-6 where the exponent is zero.
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let subnormal = magnitude as f32 * (1.0 / 512.0);
    let value = if magnitude < 8 { subnormal } else { normal };
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | sign)
}

/// Effective scale and zero point of a row in its columns from `column` on.
fn scale_and_zero(
    weight: PackedRef<'_>,
    places: &Places,
    panel: usize,
    lane: usize,
    column: usize,
) -> (f32, i32) {
    let (shared, zero) = shared_scale(places, weight.tail());
    if places.scales == 0 {
        return (shared, i32::from(zero));
    }
    let at = column / places.run() * PANEL_ROWS + lane;
    let panel = weight.panel(panel);
    let own = scale(
        places.grid.scale,
        &panel[places.scales_at + at * places.grid.scale.bytes()..],
    );
    let zero = match places.grid.zero_points {
        true => i32::from(panel[places.zero_points_at + at] as i8),
        false => 0,
    };
    (own * shared, zero)
}

/// The table of a row. Rows that fill up the last panel take the last one.
pub fn table_of_row(places: &Places, row: usize) -> usize {
    match places.grid.spread {
        Spread::Rows(n) => (row / usize::from(n)).min(places.tables - 1),
        _ => 0,
    }
}

/// What the scale of an integer grid is multiplied with: the integers of E2M1 are
/// twice its values.
pub const fn integer_factor(grid: Grid) -> f32 {
    match grid.code {
        Code::Fp4 => 0.5,
        _ => 1.0,
    }
}

/// The integer of a stored code, plus 128.
fn integer_code(code: Code, stored: u8) -> u8 {
    match code {
        Code::Int(8) => stored,
        Code::Trit => 127 + stored,
        Code::Fp4 => {
            let magnitude = [0, 1, 2, 3, 4, 6, 8, 12][usize::from(stored & 7)];
            if stored & 8 == 0 {
                128 + magnitude
            } else {
                128 - magnitude
            }
        }
        _ => {
            let shift = 8 - code.bits();
            128u8.wrapping_add(((stored << shift) as i8 >> shift) as u8)
        }
    }
}

/// The integers of all codes of at most four bits; those of fewer bits repeat.
pub fn integer_codes(code: Code) -> [u8; 16] {
    std::array::from_fn(|i| integer_code(code, i as u8 & ((1u32 << code.bits()) - 1) as u8))
}

/// The values of all codes of at most four bits that are no palette, as fp16.
pub fn half_values(code: Code) -> [u16; 16] {
    std::array::from_fn(|i| {
        let stored = i as u8 & ((1u32 << code.bits()) - 1) as u8;
        f16::from_f32(value(code, stored, &[])).to_bits()
    })
}

/// A stored code's value, before scale and zero point.
fn value(code: Code, stored: u8, table: &[u8]) -> f32 {
    match code.mini_float() {
        Some(float) => float.decode(stored),
        None if matches!(code, Code::Lut(_)) => {
            let at = 2 * usize::from(stored);
            f16::from_le_bytes([table[at], table[at + 1]]).to_f32()
        }
        None => f32::from(i16::from(integer_code(code, stored)) - 128),
    }
}

/// As [`expand_group`](super::expand_group).
pub(super) fn expand_group(
    weight: PackedRef<'_>,
    places: &Places,
    panel: usize,
    group: usize,
    out: &mut Group,
) {
    let layout = weight.layout();
    let columns = layout.geometry.group_columns;
    out.steps = columns / 4;
    let (first, factor) = (group * columns, integer_factor(places.grid));
    let mut codes = [0; UNIT];
    for lane in 0..PANEL_ROWS {
        read_codes(
            layout,
            places,
            weight.panel(panel),
            lane,
            first / UNIT,
            &mut codes,
        );
        let codes = &codes[first % UNIT..][..columns];
        for (out, codes) in out.codes.iter_mut().zip(codes.chunks_exact(4)) {
            for (out, &code) in out[4 * lane..].iter_mut().zip(codes) {
                *out = integer_code(places.grid.code, code);
            }
        }
        let (scale, zero) = scale_and_zero(weight, places, panel, lane, first);
        out.scales[lane] = scale * factor;
        out.mins[lane] = match places.grid.zero_points {
            true => -(out.scales[lane] * zero as f32),
            false => 0.0,
        };
    }
}

/// The values of a row of a panel in a range of columns that starts at a unit.
///
/// # Panics
///
/// If the weight is no grid or has no such columns.
pub fn read_span(
    weight: PackedRef<'_>,
    panel: usize,
    lane: usize,
    columns: Range<usize>,
    out: &mut [f32],
) {
    let layout = weight.layout();
    let places = layout.grid.as_ref().expect("a grid");
    assert!(columns.start.is_multiple_of(UNIT) && columns.end <= layout.columns());
    assert_eq!(out.len(), columns.len(), "values of a span");
    let code = places.grid.code;
    let row = panel * PANEL_ROWS + lane;
    let table_bytes = 2 << code.bits();
    let table = match code {
        Code::Lut(_) => &weight.tail()[table_of_row(places, row) * table_bytes..][..table_bytes],
        _ => &[],
    };
    let mut codes = [0; UNIT];
    for (i, out) in out.chunks_mut(UNIT).enumerate() {
        let first = columns.start + i * UNIT;
        read_codes(
            layout,
            places,
            weight.panel(panel),
            lane,
            first / UNIT,
            &mut codes,
        );
        for (half, out) in out.chunks_mut(16).enumerate() {
            let (scale, zero) = scale_and_zero(weight, places, panel, lane, first + half * 16);
            for (out, &stored) in out.iter_mut().zip(&codes[half * 16..]) {
                *out = match code {
                    Code::Int(_) | Code::Trit => {
                        scale * (i32::from(integer_code(code, stored)) - 128 - zero) as f32
                    }
                    _ => scale * value(code, stored, table),
                };
            }
        }
    }
}
