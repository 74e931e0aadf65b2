//! Quantized matrices in their recipe's own terms: codes, scales, zero points
//! and look-up tables as separate sections.
//!
//! Block formats ([`DType`](crate::DType)) put a scale into every block of a row.
//! A [`Grid`] describes what they cannot: one scale for a row or a tensor, zero
//! points, floating-point codes, a palette for a group of rows. It is a value, not
//! a list of variants, with a name that says it all: `int4.block64.f16.zp`.
//!
//! ```text
//! w[n, k] = scale * (code - zero_point)           int, trit
//! w[n, k] = scale * float(code)                   fp4, fp8    (times the tensor's scale, if e4m3)
//! w[n, k] = lut[n / group][code] * scale          lut         (scale 1 unless the grid has `scaled`)
//! ```
//!
//! in fp32, in this order. The bytes of `[rows, columns]` are
//!
//! ```text
//! codes        rows × ⌈columns × bits / 8⌉, lowest bits first
//! scales       as many as the spread says, row by row (for lut: one fp16 a row, if scaled)
//! zero points  one byte, signed, for each scale
//! tables       fp16, 2^bits for each group of rows
//! tensor       one fp32 scale (e4m3 only)
//! ```

use half::f16;
use serde::{Deserialize, Serialize};

use crate::formats::float8::{E4M3, E5M2, FP4, MiniFloat};

/// What a code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Code {
    /// A signed integer of 2, 4 or 8 bits.
    Int(u8),
    /// -1, 0 or 1, in two bits.
    Trit,
    /// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    Fp4,
    /// E4M3 without infinities, at most 448.
    Fp8E4M3,
    /// E5M2, at most 57344.
    Fp8E5M2,
    /// An index of 1, 2, 3, 4, 6 or 8 bits into a table of fp16 values.
    Lut(u8),
}

impl Code {
    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Code::Int(bits) | Code::Lut(bits) => bits as usize,
            Code::Trit => 2,
            Code::Fp4 => 4,
            Code::Fp8E4M3 | Code::Fp8E5M2 => 8,
        }
    }

    pub(crate) const fn mini_float(self) -> Option<&'static MiniFloat> {
        match self {
            Code::Fp4 => Some(&FP4),
            Code::Fp8E4M3 => Some(&E4M3),
            Code::Fp8E5M2 => Some(&E5M2),
            _ => None,
        }
    }
}

/// Which weights share a scale, or a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Spread {
    /// All of them.
    Tensor,
    /// A row.
    Channel,
    /// So many columns of a row.
    Block(u16),
    /// So many whole rows (tables only).
    Rows(u16),
}

/// How a scale is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scale {
    /// fp32.
    F32,
    /// fp16.
    F16,
    /// A power of two, one byte.
    E8M0,
    /// E4M3, one byte, under one fp32 scale of the whole tensor.
    E4M3,
}

impl Scale {
    /// Bytes of a scale.
    pub const fn bytes(self) -> usize {
        match self {
            Scale::F32 => 4,
            Scale::F16 => 2,
            Scale::E8M0 | Scale::E4M3 => 1,
        }
    }

    const NAMES: [(Scale, &'static str); 4] = [
        (Scale::F32, "f32"),
        (Scale::F16, "f16"),
        (Scale::E8M0, "e8m0"),
        (Scale::E4M3, "e4m3"),
    ];
}

/// A parametric format, see the [module](self). Written as its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Grid {
    /// What a code stands for.
    pub code: Code,
    /// Which weights share a scale or a table.
    pub spread: Spread,
    /// How scales are stored.
    pub scale: Scale,
    /// Whether each scale has a zero point.
    pub zero_points: bool,
    /// Tables only: whether each row has a scale besides.
    pub scaled: bool,
}

/// Why bytes or a shape do not fit a grid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GridError {
    /// A dimension is not a whole number of groups.
    #[error("{count} {what} are not a whole number of groups of {group}")]
    PartialGroup {
        /// `columns` or `rows`.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many share a scale or a table.
        group: usize,
    },
    /// The size does not fit in `usize`.
    #[error("[{rows}, {columns}] is too large")]
    Overflow {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// The bytes are not as many as the shape takes.
    #[error("{grid} of [{rows}, {columns}] takes {expected} bytes, found {found}")]
    Length {
        /// The grid.
        grid: Grid,
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// Bytes that it takes.
        expected: usize,
        /// Bytes found.
        found: usize,
    },
    /// A code that the grid does not define.
    #[error("row {row}, column {column}: code {code} is not a {grid}")]
    InvalidCode {
        /// The grid.
        grid: Grid,
        /// Row of the code.
        row: usize,
        /// Its column.
        column: usize,
        /// The code.
        code: i8,
    },
    /// No grid has these parameters, or this name.
    #[error("{0:?} is not a grid")]
    Unknown(String),
}

/// Bytes of each section.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Codes.
    pub codes: usize,
    /// Scales, the tensor's own included.
    pub scales: usize,
    /// Zero points.
    pub zero_points: usize,
    /// Tables.
    pub tables: usize,
}

impl Parts {
    /// All sections.
    pub fn total(&self) -> usize {
        self.codes + self.scales + self.zero_points + self.tables
    }
}

impl Grid {
    /// Integers or floats under a scale, without zero points.
    pub const fn new(code: Code, spread: Spread, scale: Scale) -> Grid {
        Grid {
            code,
            spread,
            scale,
            zero_points: false,
            scaled: false,
        }
    }

    /// Whether the parameters make sense together.
    pub fn is_valid(&self) -> bool {
        let group = match self.spread {
            Spread::Block(n) | Spread::Rows(n) => n > 0,
            Spread::Tensor | Spread::Channel => true,
        };
        let lut = matches!(self.code, Code::Lut(_));
        let bits = match self.code {
            Code::Int(bits) => matches!(bits, 2 | 4 | 8),
            Code::Lut(bits) => matches!(bits, 1 | 2 | 3 | 4 | 6 | 8),
            _ => true,
        };
        let spread = match self.spread {
            Spread::Tensor => true,
            Spread::Rows(_) => lut,
            Spread::Channel | Spread::Block(_) => !lut,
        };
        let zero_points = !self.zero_points || matches!(self.code, Code::Int(_));
        let scale = match self.scale {
            Scale::F32 => !lut,
            Scale::F16 => true,
            Scale::E8M0 => self.code.mini_float().is_some(),
            Scale::E4M3 => self.code == Code::Fp4,
        };
        group && bits && spread && zero_points && scale && (lut || !self.scaled)
    }

    /// Scales of a matrix.
    fn scale_count(&self, rows: usize, columns: usize) -> Option<usize> {
        match (self.code, self.spread) {
            (Code::Lut(_), _) => Some(if self.scaled { rows } else { 0 }),
            (_, Spread::Tensor) => Some(1),
            (_, Spread::Channel | Spread::Rows(_)) => Some(rows),
            (_, Spread::Block(n)) => rows.checked_mul(columns / usize::from(n)),
        }
    }

    /// Tables of a matrix.
    fn table_count(&self, rows: usize) -> usize {
        match (self.code, self.spread) {
            (Code::Lut(_), Spread::Rows(n)) => rows / usize::from(n),
            (Code::Lut(_), _) => 1,
            _ => 0,
        }
    }

    /// Sizes of the sections of `[rows, columns]`.
    ///
    /// # Errors
    ///
    /// [`GridError::PartialGroup`] when a dimension is not a whole number of
    /// groups, [`GridError::Overflow`] when the size overflows.
    pub fn parts(&self, rows: usize, columns: usize) -> Result<Parts, GridError> {
        let (what, count, group) = match self.spread {
            Spread::Block(n) => ("columns", columns, usize::from(n)),
            Spread::Rows(n) => ("rows", rows, usize::from(n)),
            Spread::Tensor | Spread::Channel => ("rows", rows, 1),
        };
        if group == 0 || !count.is_multiple_of(group) {
            return Err(GridError::PartialGroup { what, count, group });
        }
        let sizes = || {
            let row = columns.checked_mul(self.code.bits())?.div_ceil(8);
            let scales = self.scale_count(rows, columns)?;
            let parts = Parts {
                codes: rows.checked_mul(row)?,
                scales: scales
                    .checked_mul(self.scale.bytes())?
                    .checked_add(if self.scale == Scale::E4M3 { 4 } else { 0 })?,
                zero_points: if self.zero_points { scales } else { 0 },
                tables: self.table_count(rows).checked_mul(2 << self.code.bits())?,
            };
            let total = parts.codes.checked_add(parts.scales)?;
            let total = total.checked_add(parts.zero_points)?;
            isize::try_from(total.checked_add(parts.tables)?).ok()?;
            Some(parts)
        };
        sizes().ok_or(GridError::Overflow { rows, columns })
    }

    /// The grid of that name.
    ///
    /// # Errors
    ///
    /// [`GridError::Unknown`].
    pub fn from_name(name: &str) -> Result<Grid, GridError> {
        fn number<T: std::str::FromStr>(word: &str, prefix: &str) -> Option<T> {
            word.strip_prefix(prefix)?.parse().ok()
        }
        let parse = || {
            let mut words = name.split('.');
            let code = match words.next()? {
                "trit" => Code::Trit,
                "fp4" => Code::Fp4,
                "fp8e4m3" => Code::Fp8E4M3,
                "fp8e5m2" => Code::Fp8E5M2,
                word => number(word, "int")
                    .map(Code::Int)
                    .or_else(|| number(word, "lut").map(Code::Lut))?,
            };
            let spread = match words.next()? {
                "tensor" => Spread::Tensor,
                "channel" => Spread::Channel,
                word => number(word, "block")
                    .map(Spread::Block)
                    .or_else(|| number(word, "rows").map(Spread::Rows))?,
            };
            let scale = words.next()?;
            let (scale, _) = Scale::NAMES.into_iter().find(|(_, n)| *n == scale)?;
            let mut grid = Grid::new(code, spread, scale);
            match words.next() {
                None => {}
                Some("zp") => grid.zero_points = true,
                Some("scaled") => grid.scaled = true,
                Some(_) => return None,
            }
            // One spelling for each grid: no `block032`, nothing after the end.
            (grid.is_valid() && grid.to_string() == name).then_some(grid)
        };
        parse().ok_or_else(|| GridError::Unknown(name.chars().take(80).collect()))
    }
}

impl std::fmt::Display for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.code {
            Code::Int(bits) => write!(f, "int{bits}")?,
            Code::Lut(bits) => write!(f, "lut{bits}")?,
            Code::Trit => f.write_str("trit")?,
            Code::Fp4 => f.write_str("fp4")?,
            Code::Fp8E4M3 => f.write_str("fp8e4m3")?,
            Code::Fp8E5M2 => f.write_str("fp8e5m2")?,
        }
        match self.spread {
            Spread::Tensor => f.write_str(".tensor")?,
            Spread::Channel => f.write_str(".channel")?,
            Spread::Block(n) => write!(f, ".block{n}")?,
            Spread::Rows(n) => write!(f, ".rows{n}")?,
        }
        let name = Scale::NAMES.iter().find(|(s, _)| *s == self.scale);
        write!(f, ".{}", name.map_or("", |(_, n)| n))?;
        if self.zero_points {
            f.write_str(".zp")?;
        }
        if self.scaled {
            f.write_str(".scaled")?;
        }
        Ok(())
    }
}

impl TryFrom<String> for Grid {
    type Error = GridError;

    fn try_from(name: String) -> Result<Grid, GridError> {
        Grid::from_name(&name)
    }
}

impl From<Grid> for String {
    fn from(grid: Grid) -> String {
        grid.to_string()
    }
}

/// A quantized matrix: a byte for each code, everything else in fp32.
#[derive(Clone, Debug, PartialEq)]
pub struct GridMatrix {
    /// The format.
    pub grid: Grid,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Row-major codes; integers in two's complement.
    pub codes: Vec<u8>,
    /// Scales, row by row; of values that the grid's scale can store.
    pub scales: Vec<f32>,
    /// As many as scales, or none.
    pub zero_points: Vec<i8>,
    /// `2^bits` for each group of rows; fp16 values.
    pub tables: Vec<f32>,
    /// Scale of the whole tensor; 1 unless the scales are E4M3.
    pub tensor_scale: f32,
}

impl GridMatrix {
    /// Where the scale of an element is.
    fn scale_at(&self, row: usize, column: usize) -> usize {
        match (self.grid.code, self.grid.spread) {
            (Code::Lut(_), _) | (_, Spread::Channel | Spread::Rows(_)) => row,
            (_, Spread::Tensor) => 0,
            (_, Spread::Block(n)) => {
                let n = usize::from(n);
                row * (self.columns / n) + column / n
            }
        }
    }

    /// Columns that share a scale.
    fn run(&self) -> usize {
        match self.grid.spread {
            Spread::Block(n) => usize::from(n),
            _ => self.columns,
        }
    }

    /// The values of a row.
    ///
    /// # Panics
    ///
    /// If there is no such row or `out` has not one value per column.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.columns, "values of a row");
        let codes = &self.codes[row * self.columns..][..self.columns];
        if let Code::Lut(bits) = self.grid.code {
            let group = match self.grid.spread {
                Spread::Rows(n) => row / usize::from(n),
                _ => 0,
            };
            let table = &self.tables[group << bits..][..1 << bits];
            for (w, &code) in out.iter_mut().zip(codes) {
                *w = table[usize::from(code)];
            }
            if self.grid.scaled {
                out.iter_mut().for_each(|w| *w *= self.scales[row]);
            }
            return;
        }
        let run = self.run().max(1);
        for (i, (out, codes)) in out.chunks_mut(run).zip(codes.chunks(run)).enumerate() {
            let at = self.scale_at(row, i * run);
            let scale = self.scales[at] * self.tensor_scale;
            match self.grid.code.mini_float() {
                Some(float) => {
                    for (w, &code) in out.iter_mut().zip(codes) {
                        *w = scale * float.decode(code);
                    }
                }
                None => {
                    let zero = self.zero_points.get(at).map_or(0, |&z| i32::from(z));
                    for (w, &code) in out.iter_mut().zip(codes) {
                        *w = scale * (i32::from(code as i8) - zero) as f32;
                    }
                }
            }
        }
    }

    /// The matrix as it is stored.
    ///
    /// # Errors
    ///
    /// As [`Grid::parts`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, GridError> {
        let parts = self.grid.parts(self.rows, self.columns)?;
        let mut out = Vec::with_capacity(parts.total());
        let bits = self.grid.code.bits();
        for row in self.codes.chunks(self.columns.max(1)) {
            pack_bits(row, bits, &mut out);
        }
        for &scale in &self.scales {
            match self.grid.scale {
                Scale::F32 => out.extend(scale.to_le_bytes()),
                Scale::F16 => out.extend(f16::from_f32(scale).to_le_bytes()),
                // Exact: the scale is a power of two, its fraction is zero.
                Scale::E8M0 => out.push((scale.to_bits() >> 23) as u8),
                Scale::E4M3 => out.push(E4M3.encode(scale)),
            }
        }
        out.extend(self.zero_points.iter().map(|&z| z as u8));
        for &value in &self.tables {
            out.extend(f16::from_f32(value).to_le_bytes());
        }
        if self.grid.scale == Scale::E4M3 {
            out.extend(self.tensor_scale.to_le_bytes());
        }
        debug_assert_eq!(out.len(), parts.total());
        Ok(out)
    }

    /// Reads a stored matrix.
    ///
    /// # Errors
    ///
    /// As [`Grid::parts`]; [`GridError::Length`] when `bytes` is not exactly what
    /// the shape takes, [`GridError::InvalidCode`] for a fourth trit or
    /// a float that is no number.
    pub fn from_bytes(
        grid: Grid,
        rows: usize,
        columns: usize,
        bytes: &[u8],
    ) -> Result<GridMatrix, GridError> {
        let parts = grid.parts(rows, columns)?;
        if bytes.len() != parts.total() {
            return Err(GridError::Length {
                grid,
                rows,
                columns,
                expected: parts.total(),
                found: bytes.len(),
            });
        }
        let (codes, rest) = bytes.split_at(parts.codes);
        let (scales, rest) = rest.split_at(parts.scales - Self::tensor_bytes(grid));
        let (zero_points, rest) = rest.split_at(parts.zero_points);
        let (tables, tensor) = rest.split_at(parts.tables);
        let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
        let single = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let signed = matches!(grid.code, Code::Int(_) | Code::Trit);
        let mut unpacked = Vec::with_capacity(rows * columns);
        for row in codes.chunks_exact((columns * grid.code.bits()).div_ceil(8).max(1)) {
            unpack_bits(row, grid.code.bits(), columns, signed, &mut unpacked);
        }
        let undefined = |code: &u8| match grid.code {
            Code::Trit => *code as i8 == -2,
            Code::Fp8E4M3 => E4M3.decode(*code).is_nan(),
            Code::Fp8E5M2 => E5M2.decode(*code).is_nan(),
            _ => false,
        };
        if let Some(at) = unpacked.iter().position(undefined) {
            return Err(GridError::InvalidCode {
                grid,
                row: at / columns,
                column: at % columns,
                code: unpacked[at] as i8,
            });
        }
        let scales = match grid.scale {
            Scale::F32 => scales.chunks_exact(4).map(single).collect(),
            Scale::F16 => scales.chunks_exact(2).map(half).collect(),
            Scale::E8M0 => scales.iter().map(|&e| e8m0(e)).collect(),
            Scale::E4M3 => scales.iter().map(|&e| E4M3.decode(e)).collect(),
        };
        Ok(GridMatrix {
            grid,
            rows,
            columns,
            codes: unpacked,
            scales,
            zero_points: zero_points.iter().map(|&z| z as i8).collect(),
            tables: tables.chunks_exact(2).map(half).collect(),
            tensor_scale: if tensor.is_empty() {
                1.0
            } else {
                single(tensor)
            },
        })
    }

    const fn tensor_bytes(grid: Grid) -> usize {
        match grid.scale {
            Scale::E4M3 => 4,
            _ => 0,
        }
    }
}

/// `2^(e - 127)`; 0 is 2^-127 (subnormal in fp32), 255 is not a number.
pub(crate) fn e8m0(e: u8) -> f32 {
    match e {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        e => f32::from_bits(u32::from(e) << 23),
    }
}

/// Appends the low `bits` of each code, lowest first, filled up to a byte.
pub(crate) fn pack_bits(codes: &[u8], bits: usize, out: &mut Vec<u8>) {
    if bits == 8 {
        out.extend_from_slice(codes);
        return;
    }
    let (mut word, mut held) = (0u32, 0);
    for &code in codes {
        word |= u32::from(code & ((1 << bits) - 1)) << held;
        held += bits;
        while held >= 8 {
            out.push(word as u8);
            word >>= 8;
            held -= 8;
        }
    }
    if held > 0 {
        out.push(word as u8);
    }
}

/// The inverse of [`pack_bits`] for `count` codes, with their sign if `signed`.
pub(crate) fn unpack_bits(
    bytes: &[u8],
    bits: usize,
    count: usize,
    signed: bool,
    out: &mut Vec<u8>,
) {
    let shift = 8 - bits;
    for i in 0..count {
        let at = i * bits;
        let pair = [bytes[at / 8], bytes.get(at / 8 + 1).copied().unwrap_or(0)];
        let top = (u16::from_le_bytes(pair) >> (at % 8)) as u8;
        // Shifted to the top and back, the sign (or zeros) comes in.
        out.push(if signed {
            ((top << shift) as i8 >> shift) as u8
        } else {
            top << shift >> shift
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grids() -> Vec<Grid> {
        let mut all = Vec::new();
        for spread in [
            Spread::Tensor,
            Spread::Channel,
            Spread::Block(16),
            Spread::Rows(2),
        ] {
            let codes = [2, 4, 8].map(Code::Int).into_iter();
            let codes = codes.chain([1, 2, 3, 4, 6, 8].map(Code::Lut));
            for code in codes.chain([Code::Trit, Code::Fp4, Code::Fp8E4M3, Code::Fp8E5M2]) {
                for (scale, _) in Scale::NAMES {
                    for (zero_points, scaled) in [(false, false), (true, false), (false, true)] {
                        all.push(Grid {
                            code,
                            spread,
                            scale,
                            zero_points,
                            scaled,
                        });
                    }
                }
            }
        }
        all.retain(Grid::is_valid);
        all
    }

    #[test]
    fn names_and_bytes_round_trip() {
        assert!(grids().len() > 60);
        for grid in grids() {
            assert_eq!(Grid::from_name(&grid.to_string()), Ok(grid));
            // An odd number of columns where the spread allows it.
            let columns = if matches!(grid.spread, Spread::Block(_)) {
                48
            } else {
                21
            };
            let (rows, bits) = (4, grid.code.bits());
            let parts = grid.parts(rows, columns).unwrap();
            // Trits of bytes below 128 without the pair 10: 0, 1 and 3.
            let byte = |i: usize| match grid.code {
                Code::Trit => [0b0011_0100, 0b0101_1100, 0b0000_0001][i % 3],
                _ => (i * 37 % 119) as u8,
            };
            let bytes: Vec<u8> = (0..parts.total()).map(byte).collect();
            let mut matrix = GridMatrix::from_bytes(grid, rows, columns, &bytes).unwrap();
            // What is left over in the last byte of a row is no code.
            let row = (columns * bits).div_ceil(8);
            let mut expected = bytes.clone();
            for r in 0..rows {
                let unused = row * 8 - columns * bits;
                expected[(r + 1) * row - 1] &= 0xff >> unused;
            }
            if grid.scale == Scale::E8M0 {
                // The exponent 0 is a subnormal, which the writer never makes.
                matrix.scales.iter_mut().for_each(|s| *s = 0.25);
                expected[parts.codes..parts.codes + parts.scales].fill(125);
            }
            assert_eq!(matrix.to_bytes().unwrap(), expected, "{grid}");
        }
    }

    #[test]
    fn names_have_one_spelling() {
        for name in [
            "",
            "int4",
            "int3.tensor.f16",
            "int4.block0.f16",
            "int4.block032.f16",
            "int4.rows8.f16",
            "lut4.block32.f16",
            "lut5.tensor.f16",
            "int4.tensor.f16.zp.x",
            "int4.tensor.e8m0",
            "fp4.block32.e8m0.zp",
            "int4.tensor.f16.scaled",
            "int4.block70000.f16",
        ] {
            assert!(Grid::from_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn values_follow_the_definition() {
        let grid = Grid {
            zero_points: true,
            ..Grid::new(Code::Int(4), Spread::Block(2), Scale::F16)
        };
        // Codes 1 and -2 in the first byte, 7 and -8 in the second.
        let bytes = [0xe1, 0x87, 0x00, 0x38, 0x00, 0x40, 0xff, 0x03];
        let m = GridMatrix::from_bytes(grid, 1, 4, &bytes).unwrap();
        let mut w = [0.0; 4];
        m.decode_row(0, &mut w);
        assert_eq!(w, [1.0, -0.5, 8.0, -22.0]);

        let grid = Grid {
            scaled: true,
            ..Grid::new(Code::Lut(1), Spread::Rows(1), Scale::F16)
        };
        let bytes = [
            0b01, 0b10, 0x00, 0x3c, 0x00, 0x40, 0, 0, 0, 0x3c, 0, 0x38, 0, 0x34,
        ];
        let m = GridMatrix::from_bytes(grid, 2, 2, &bytes).unwrap();
        let mut w = [0.0; 2];
        m.decode_row(0, &mut w);
        assert_eq!(w, [1.0, 0.0]);
        m.decode_row(1, &mut w);
        assert_eq!(w, [1.0, 0.5]);
    }

    #[test]
    fn sizes_are_checked() {
        let grid = Grid::new(Code::Int(8), Spread::Block(32), Scale::F16);
        assert!(matches!(
            grid.parts(2, 33),
            Err(GridError::PartialGroup { count: 33, .. })
        ));
        assert!(matches!(
            grid.parts(usize::MAX, 64),
            Err(GridError::Overflow { .. })
        ));
        assert!(matches!(
            GridMatrix::from_bytes(grid, 1, 32, &[0; 33]),
            Err(GridError::Length {
                expected: 34,
                found: 33,
                ..
            })
        ));
        let trits = Grid::new(Code::Trit, Spread::Tensor, Scale::F16);
        assert!(matches!(
            GridMatrix::from_bytes(trits, 1, 4, &[0b0010_0000, 0, 0]),
            Err(GridError::InvalidCode { column: 2, .. })
        ));
        // Ledger section 0: 2,516,582,400 parameters, int8 and one fp16 scale per 32.
        let parts = grid.parts(1_228_800, 2048).unwrap();
        assert_eq!(parts.total() as u64, 2_673_868_800);
    }
}
