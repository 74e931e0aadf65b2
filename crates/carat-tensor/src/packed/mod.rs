//! The row-interleaved layout of matrices in a bundle.
//!
//! A matrix `[rows, columns]` is cut into *panels* of [`PANEL_ROWS`] rows (the
//! last one is filled up with zero bytes). Inside a panel a 32-bit lane belongs
//! to a row, so a vector of 4, 8 or 16 lanes computes as many outputs and never
//! adds across lanes. Every field of the source format is kept, only moved: the
//! row-major bytes come back exactly (those of `TQ1_0` in the form that encoders
//! write: its bytes can state the same trits in more than one way).
//!
//! A panel is a sequence of *chunks*; a chunk holds one or two consecutive
//! blocks of all 16 rows ([`Geometry::blocks_per_chunk`]; the last chunk of a
//! panel may hold fewer): first the codes of its blocks, then their fields
//! (scales and minima). Two blocks share a chunk where that keeps the codes
//! aligned to 64 bytes. Panels are padded to a multiple of 64 bytes.
//!
//! **Codes** are unsigned; signed 8-bit codes are stored plus 128. Steps of
//! four consecutive columns make a 64-byte vector: byte `4·row + t` of step `i`
//! is column `4i + t`. The planes of a unit of 32 columns (8 steps; 4 in
//! `I8G16`) hold:
//!
//! | codes | planes of a unit |
//! |---|---|
//! | 8 bits | a vector per step |
//! | 4 bits | vector `i` of 4: step `i` in the low nibbles, step `i + 4` in the high ones |
//! | 5 bits | 4 bits as above; in a plane of its own, bit `i` of each byte is the top bit of step `i` |
//! | 6 bits | 4 bits as above; in two vectors, bits `2p..2p+2` of vector `j` are the top bits of step `4j + p` |
//! | 2 bits | two vectors like those of the top bits of 6-bit codes |
//! | 1 bit | bit `i` of each byte of a vector is step `i` |
//! | 3 bits | 2 bits as above; in a plane of its own, bit `i` of each byte is the top bit of step `i` |
//! | trits | (of 256 columns, 13 vectors) digit `j` to the base 3 of vector `v`, lowest first: step `5v + j` |
//!
//! A block's nibble planes come before its planes of top bits.
//!
//! **Fields** are stored one after the other, 16 rows each, in the order of
//! [`Geometry::fields`]. The packed 6-bit scales of `Q4_K` and `Q5_K` stay
//! packed: three vectors whose lane is 4 of a row's 12 bytes.
//!
//! **Floats** are stored as `[column][16 rows]`.
//!
//! **Grids** have a layout of their own from the same planes: [`grids`].

mod blocks;
pub mod grids;
mod group;

use std::ops::Range;

pub use group::{Group, expand_group, read_row};

use crate::{DType, Form, Grid, formats, grid::GridError};

/// Rows of a panel.
pub const PANEL_ROWS: usize = 16;

/// Multiple of which a panel's size is.
pub const PANEL_ALIGN: usize = 64;

/// Why a matrix cannot be packed or a packed one not be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PackedError {
    /// The format has no packed layout.
    #[error("{0} has no packed layout")]
    Unsupported(DType),
    /// A grid whose groups no kernel reads.
    #[error("{0} has no packed layout: blocks of 16 columns, or multiples, have one")]
    UnsupportedGrid(Grid),
    /// The shape does not fit the grid.
    #[error(transparent)]
    Grid(#[from] GridError),
    /// A matrix without elements.
    #[error("a matrix of {rows} rows and {columns} columns has no elements")]
    Empty {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// A row is not a whole number of blocks.
    #[error("a row of {columns} elements is not a whole number of {dtype} blocks of {block}")]
    PartialBlock {
        /// The offending row length.
        columns: usize,
        /// The format.
        dtype: DType,
        /// The format's block length.
        block: usize,
    },
    /// The size does not fit in `usize`.
    #[error("{form} [{rows}, {columns}] is too large")]
    Overflow {
        /// The format.
        form: Form,
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// A buffer has the wrong size.
    #[error("{what} of {form} [{rows}, {columns}] has {found} bytes, expected {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// The format.
        form: Form,
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// Bytes it should have.
        expected: usize,
        /// Bytes it has.
        found: usize,
    },
    /// Panels that the matrix does not have.
    #[error("panels {first}..{end} are outside 0..{panels}")]
    Panels {
        /// First panel asked for.
        first: usize,
        /// End of the panels asked for.
        end: usize,
        /// Panels of the matrix.
        panels: usize,
    },
}

/// Whether the format has a packed layout.
pub const fn supports(dtype: DType) -> bool {
    geometry(dtype).is_some()
}

/// How the codes of a packed block are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Plain floating point of this many bytes.
    Float(usize),
    /// One bit: a plane of single bits (grids only).
    One,
    /// Two bits: planes of top bits only.
    Two,
    /// Two bits and a plane of single top bits (grids only).
    Three,
    /// Five trits to a byte, of a block of 256 columns.
    Trits,
    /// Nibbles.
    Four,
    /// Nibbles and a plane of single top bits.
    Five,
    /// Nibbles and planes of two top bits.
    Six,
    /// Bytes.
    Eight,
}

impl Codes {
    /// Bytes of the planes of a block of this many columns, 16 rows.
    const fn block_bytes(self, columns: usize) -> usize {
        let bytes_of_8_steps = match self {
            Codes::Float(bytes) => bytes * 32 * PANEL_ROWS,
            Codes::One => 64,
            Codes::Two => 128,
            Codes::Three => 192,
            Codes::Trits => return (columns / 4).div_ceil(5) * 64,
            Codes::Four => 256,
            Codes::Five => 320,
            Codes::Six => 384,
            Codes::Eight => 512,
        };
        bytes_of_8_steps * columns / 32
    }
}

/// A field of a block: where it lies in the row-major block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Offset in the row-major block, in bytes.
    pub offset: usize,
    /// Width of one row's value, in bytes.
    pub width: usize,
}

const fn field(offset: usize, width: usize) -> Field {
    Field { offset, width }
}

/// Sizes and constants of a packed format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Columns of a block.
    pub block_columns: usize,
    /// Blocks of a full chunk.
    pub blocks_per_chunk: usize,
    /// How codes are stored.
    pub codes: Codes,
    /// Subtracted from the stored code.
    pub code_offset: i32,
    /// Columns that share a scale (and a minimum), at most 32; in grids as far as
    /// kernels see them.
    pub group_columns: usize,
    /// Whether groups have a minimum that is added.
    pub has_min: bool,
    /// Fields of a block in packed order.
    pub fields: &'static [Field],
}

const D_FIRST: [Field; 1] = [field(0, 2)];
const D_AND_M: [Field; 2] = [field(0, 2), field(2, 2)];
const D_AT_64: [Field; 1] = [field(64, 2)];
const D_AT_52: [Field; 1] = [field(52, 2)];
const SINGLES: [Field; 2] = [field(0, 4), field(4, 4)];

const SUB_SCALES: [Field; 17] = {
    let mut fields = [field(208, 2); 17];
    let mut i = 0;
    while i < 16 {
        fields[i] = field(192 + i, 1);
        i += 1;
    }
    fields
};

/// The packed form of a format, or `None` if it has none.
pub const fn geometry(dtype: DType) -> Option<Geometry> {
    const fn float(bytes: usize) -> Option<Geometry> {
        Some(Geometry {
            block_columns: 1,
            blocks_per_chunk: 1,
            codes: Codes::Float(bytes),
            code_offset: 0,
            group_columns: 1,
            has_min: false,
            fields: &[],
        })
    }
    const fn integer(
        block_columns: usize,
        blocks_per_chunk: usize,
        codes: Codes,
        code_offset: i32,
        fields: &'static [Field],
    ) -> Option<Geometry> {
        Some(Geometry {
            block_columns,
            blocks_per_chunk,
            codes,
            code_offset,
            group_columns: if block_columns == 16 || matches!(codes, Codes::Six) {
                16
            } else {
                32
            },
            has_min: code_offset == 0 || matches!(codes, Codes::Eight) && fields.len() == 2,
            fields,
        })
    }
    match dtype {
        DType::F32 => float(4),
        DType::F16 | DType::BF16 => float(2),
        DType::Q4_0 => integer(32, 2, Codes::Four, 8, &D_FIRST),
        DType::Q4_1 => integer(32, 1, Codes::Four, 0, &D_AND_M),
        DType::Q5_0 => integer(32, 2, Codes::Five, 16, &D_FIRST),
        DType::Q5_1 => integer(32, 1, Codes::Five, 0, &D_AND_M),
        DType::Q8_0 => integer(32, 2, Codes::Eight, 128, &D_FIRST),
        DType::Q4_K => integer(256, 1, Codes::Four, 0, &K_FIELDS),
        DType::Q5_K => integer(256, 1, Codes::Five, 0, &K_FIELDS),
        DType::Q6_K => integer(256, 2, Codes::Six, 32, &SUB_SCALES),
        DType::TQ1_0 => integer(256, 2, Codes::Trits, 1, &D_AT_52),
        DType::TQ2_0 => integer(256, 2, Codes::Two, 1, &D_AT_64),
        DType::I8G16 => integer(16, 1, Codes::Eight, 128, &SINGLES),
        DType::I8G32 => integer(32, 1, Codes::Eight, 128, &SINGLES),
        _ => None,
    }
}

/// 12 bytes of 6-bit sub-scales and sub-minima, then `d` and `dmin`.
const K_FIELDS: [Field; 5] = [
    field(4, 4),
    field(8, 4),
    field(12, 4),
    field(0, 2),
    field(2, 2),
];

impl Geometry {
    /// Bytes of the codes of one block of a panel.
    pub const fn codes_bytes(&self) -> usize {
        self.codes.block_bytes(self.block_columns)
    }

    /// Bytes of the fields of one block of a panel.
    pub const fn fields_bytes(&self) -> usize {
        let (mut bytes, mut i) = (0, 0);
        while i < self.fields.len() {
            bytes += self.fields[i].width * PANEL_ROWS;
            i += 1;
        }
        bytes
    }

    /// Bytes of one block of a panel.
    pub const fn block_bytes(&self) -> usize {
        self.codes_bytes() + self.fields_bytes()
    }

    /// Where the codes and the fields of block `block` start in a panel of
    /// `blocks` blocks.
    pub const fn block_at(&self, block: usize, blocks: usize) -> (usize, usize) {
        let chunk = block - block % self.blocks_per_chunk;
        let rest = blocks - chunk;
        let in_chunk = if rest < self.blocks_per_chunk {
            rest
        } else {
            self.blocks_per_chunk
        };
        let start = chunk * self.block_bytes();
        let within = block - chunk;
        (
            start + within * self.codes_bytes(),
            start + in_chunk * self.codes_bytes() + within * self.fields_bytes(),
        )
    }
}

/// Shape and format of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    dtype: DType,
    grid: Option<grids::Places>,
    rows: usize,
    columns: usize,
    geometry: Geometry,
    panel_bytes: usize,
    bytes: usize,
}

impl PackedLayout {
    /// The layout of a matrix `[rows, columns]`.
    ///
    /// # Errors
    ///
    /// If the format has no packed layout, the matrix is empty or too large, or
    /// `columns` is not a whole number of blocks.
    pub fn new(dtype: DType, rows: usize, columns: usize) -> Result<Self, PackedError> {
        let geometry = geometry(dtype).ok_or(PackedError::Unsupported(dtype))?;
        if rows == 0 || columns == 0 {
            return Err(PackedError::Empty { rows, columns });
        }
        if !columns.is_multiple_of(geometry.block_columns) {
            return Err(PackedError::PartialBlock {
                columns,
                dtype,
                block: geometry.block_columns,
            });
        }
        let sizes = || {
            let blocks = columns / geometry.block_columns;
            let panel_bytes = blocks
                .checked_mul(geometry.block_bytes())?
                .checked_next_multiple_of(PANEL_ALIGN)?;
            let bytes = rows.div_ceil(PANEL_ROWS).checked_mul(panel_bytes)?;
            // A slice has at most `isize::MAX` bytes.
            isize::try_from(bytes).ok()?;
            Some((panel_bytes, bytes))
        };
        let (panel_bytes, bytes) = sizes().ok_or(PackedError::Overflow {
            form: dtype.into(),
            rows,
            columns,
        })?;
        Ok(PackedLayout {
            dtype,
            grid: None,
            rows,
            columns,
            geometry,
            panel_bytes,
            bytes,
        })
    }

    /// The layout of a matrix `[rows, columns]` in a block format or as a grid.
    ///
    /// # Errors
    ///
    /// As [`new`](PackedLayout::new); a grid also if its blocks are not multiples of
    /// 16 columns.
    pub fn of(form: Form, rows: usize, columns: usize) -> Result<Self, PackedError> {
        match form {
            Form::Block(dtype) => PackedLayout::new(dtype, rows, columns),
            Form::Grid(grid) => grids::layout(grid, rows, columns),
        }
    }

    /// How the matrix is stored.
    pub fn form(&self) -> Form {
        self.grid
            .map_or(Form::Block(self.dtype), |places| Form::Grid(places.grid))
    }

    /// Format of the elements; of a grid, F32: what reading gives.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the parts of a grid are.
    pub fn grid(&self) -> Option<&grids::Places> {
        self.grid.as_ref()
    }

    /// Rows (outputs of a linear layer).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (inputs of a linear layer).
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Sizes and constants of the format.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Blocks in a row.
    pub fn blocks(&self) -> usize {
        self.columns / self.geometry.block_columns
    }

    /// Panels of 16 rows, the last one filled up.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// Bytes of a panel, a multiple of 64.
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Bytes of the packed matrix.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of a row-major row of blocks.
    pub fn row_bytes(&self) -> usize {
        self.blocks() * self.dtype.block_bytes()
    }

    /// Bytes of the row-major matrix, or of a grid's sections.
    pub fn row_major_bytes(&self) -> usize {
        match &self.grid {
            Some(places) => places.section_bytes(),
            // No overflow: the packed form is at least as large.
            None => self.rows * self.row_bytes(),
        }
    }

    fn check(&self, what: &'static str, expected: usize, found: usize) -> Result<(), PackedError> {
        if found == expected {
            return Ok(());
        }
        Err(PackedError::Length {
            what,
            form: self.form(),
            rows: self.rows,
            columns: self.columns,
            expected,
            found,
        })
    }
}

/// A packed matrix: its layout and its bytes.
#[derive(Clone, Copy)]
pub struct PackedRef<'a> {
    layout: PackedLayout,
    bytes: &'a [u8],
}

impl<'a> PackedRef<'a> {
    /// A view of packed bytes.
    ///
    /// # Errors
    ///
    /// If `bytes` has not the layout's size.
    pub fn new(layout: PackedLayout, bytes: &'a [u8]) -> Result<Self, PackedError> {
        layout.check("packed matrix", layout.bytes, bytes.len())?;
        Ok(PackedRef { layout, bytes })
    }

    /// Shape and format.
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// All bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The bytes of a panel.
    ///
    /// # Panics
    ///
    /// If there is no such panel.
    pub fn panel(&self, panel: usize) -> &'a [u8] {
        &self.bytes[panel * self.layout.panel_bytes..][..self.layout.panel_bytes]
    }

    /// What the panels of a grid share, see [`grids`]; nothing of other matrices.
    pub fn tail(&self) -> &'a [u8] {
        &self.bytes[self.layout.panels() * self.layout.panel_bytes..]
    }
}

impl std::fmt::Debug for PackedRef<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackedRef")
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

/// Packs a row-major matrix, or the sections of a grid.
///
/// # Errors
///
/// If a buffer has the wrong size.
pub fn pack(layout: &PackedLayout, row_major: &[u8], out: &mut [u8]) -> Result<(), PackedError> {
    layout.check(
        "row-major matrix",
        layout.row_major_bytes(),
        row_major.len(),
    )?;
    layout.check("packed matrix", layout.bytes, out.len())?;
    let (panels, tail) = out.split_at_mut(layout.panels() * layout.panel_bytes);
    if let Some(places) = &layout.grid {
        grids::pack_tail(places, row_major, tail);
    }
    pack_panels(layout, row_major, 0..layout.panels(), panels)
}

/// Packs a range of panels: `out` is what they occupy, `row_major` the whole
/// matrix. Callers with threads cut the output into panels and call this.
///
/// # Errors
///
/// If a buffer has the wrong size or the range is outside the matrix.
pub fn pack_panels(
    layout: &PackedLayout,
    row_major: &[u8],
    panels: Range<usize>,
    out: &mut [u8],
) -> Result<(), PackedError> {
    layout.check(
        "row-major matrix",
        layout.row_major_bytes(),
        row_major.len(),
    )?;
    if panels.start > panels.end || panels.end > layout.panels() {
        return Err(PackedError::Panels {
            first: panels.start,
            end: panels.end,
            panels: layout.panels(),
        });
    }
    let expected = panels.len() * layout.panel_bytes;
    layout.check("packed range", expected, out.len())?;
    for (panel, out) in panels.zip(out.chunks_exact_mut(layout.panel_bytes)) {
        if let Some(places) = &layout.grid {
            grids::pack_panel(layout, places, row_major, panel, out);
            continue;
        }
        let first = panel * PANEL_ROWS;
        let rows = PANEL_ROWS.min(layout.rows - first);
        let source = &row_major[first * layout.row_bytes()..][..rows * layout.row_bytes()];
        blocks::pack_panel(layout, source, out);
    }
    Ok(())
}

/// Recovers the row-major matrix: the exact inverse of [`pack`].
///
/// # Errors
///
/// If a buffer has the wrong size.
pub fn unpack(layout: &PackedLayout, packed: &[u8], out: &mut [u8]) -> Result<(), PackedError> {
    layout.check("packed matrix", layout.bytes, packed.len())?;
    layout.check("row-major matrix", layout.row_major_bytes(), out.len())?;
    if let Some(places) = &layout.grid {
        grids::unpack(layout, places, packed, out);
        return Ok(());
    }
    let (row_bytes, panel_bytes) = (layout.row_bytes(), layout.panel_bytes);
    for (panel, out) in packed
        .chunks_exact(panel_bytes)
        .zip(out.chunks_mut(PANEL_ROWS * row_bytes))
    {
        blocks::unpack_panel(layout, panel, out);
    }
    Ok(())
}

/// Whether a panel holds nothing but finite weights, by its fields alone: cheap
/// enough to do while data passes. `false` means that the panel has to be looked
/// at more closely ([`unpack`], then [`formats::check_finite`]).
///
/// # Panics
///
/// If `panel` has not [`PackedLayout::panel_bytes`] bytes, or is a grid's.
pub fn panel_is_plainly_finite(layout: &PackedLayout, panel: &[u8]) -> bool {
    assert_eq!(panel.len(), layout.panel_bytes, "bytes of a panel");
    assert!(layout.grid.is_none(), "a grid has other fields");
    let g = layout.geometry();
    if let Codes::Float(_) = g.codes {
        // What fills up the panel is zero.
        return formats::floats_finite(layout.dtype, panel);
    }
    let blocks = layout.blocks();
    (0..blocks).all(|b| {
        let (_, start) = g.block_at(b, blocks);
        let fields = &panel[start..start + g.fields_bytes()];
        if g.codes == Codes::Eight && g.fields == SINGLES {
            let (scales, mins) = fields.split_at(PANEL_ROWS * SINGLES[0].width);
            let single = |b: &[u8; 4]| f32::from_le_bytes(*b);
            let pairs = scales.as_chunks().0.iter().zip(mins.as_chunks().0);
            return !pairs
                .into_iter()
                .any(|(scale, min)| formats::single_suspect(single(scale), single(min)));
        }
        let mut at = 0;
        g.fields.iter().all(|f| {
            let rows = &fields[at..at + f.width * PANEL_ROWS];
            at += rows.len();
            // Fields of two bytes are fp16, the others integers.
            f.width != 2 || formats::floats_finite(DType::F16, rows)
        })
    })
}

#[cfg(test)]
mod grid_tests;
#[cfg(test)]
mod tests;
