//! How a tensor's bytes are arranged: the bridge to `carat_tensor::packed`.

use carat_tensor::{
    DType, Form, Grid, Shape,
    formats::{self, FormatError},
    packed,
};

use crate::{
    manifest::{Layout, is_matrix},
    spec::TensorRole,
};

/// The layout in which a tensor is stored: matrices in formats that have a
/// packed layout are packed, everything else is row-major.
pub fn layout_for(role: TensorRole, dtype: DType, shape: &Shape) -> Layout {
    if is_matrix(role) && shape.dims().len() == 2 && packed::supports(dtype) {
        Layout::Packed16
    } else {
        Layout::RowMajor
    }
}

/// Bytes that a tensor takes in a layout, rows of padding included.
///
/// # Errors
/// Says why the shape cannot be stored in that format.
pub fn stored_bytes(layout: Layout, dtype: DType, shape: &Shape) -> Result<u64, String> {
    match layout {
        Layout::RowMajor => shape
            .bytes(dtype)
            .map(|b| b as u64)
            .map_err(|e| e.to_string()),
        Layout::Packed16 => packed_layout(dtype, shape).map(|p| p.bytes() as u64),
        Layout::Sections => Err("a grid's size is not that of a format".into()),
    }
}

/// Checks whole rows of `columns` elements: every code defined, every weight
/// finite. `first` is the number of the first row in its tensor.
///
/// # Errors
/// Names the row, the column and the format.
pub fn check_rows(dtype: DType, data: &[u8], first: usize, columns: usize) -> Result<(), String> {
    let checked = formats::check(dtype, data).and_then(|()| formats::check_finite(dtype, data));
    let place = |index: usize| {
        let columns = columns.max(1);
        format!(
            "row {}, column {}",
            first + index / columns,
            index % columns
        )
    };
    checked.map_err(|e| match e {
        FormatError::NotFinite { index, value, .. } => format!(
            "{}: {dtype} weight is {value}, expected a finite number",
            place(index)
        ),
        FormatError::InvalidCode {
            block,
            element,
            code,
            ..
        } => format!(
            "{}: code {code} is not valid in {dtype}",
            place(block * dtype.block_len() + element)
        ),
        e => e.to_string(),
    })
}

/// Bytes that a matrix takes as a grid, in sections or packed.
///
/// # Errors
/// Says why the tensor cannot be stored so.
pub fn grid_bytes(
    role: TensorRole,
    grid: Grid,
    shape: &Shape,
    layout: Layout,
) -> Result<u64, String> {
    let [rows, columns] = *shape.dims() else {
        return Err(format!("shape {shape} is not a matrix"));
    };
    if !is_matrix(role) {
        return Err("only matrices are stored as grids".into());
    }
    // What reading gives must fit in memory's address space, too.
    shape.bytes(DType::F32).map_err(|e| e.to_string())?;
    match layout {
        Layout::Packed16 => packed_layout(grid, shape).map(|p| p.bytes() as u64),
        Layout::Sections => {
            let parts = grid.parts(rows, columns).map_err(|e| e.to_string())?;
            Ok(parts.total() as u64)
        }
        Layout::RowMajor => Err("a grid is not made of rows".into()),
    }
}

/// The packed layout of a matrix.
pub(crate) fn packed_layout(
    form: impl Into<Form>,
    shape: &Shape,
) -> Result<packed::PackedLayout, String> {
    let form = form.into();
    let [rows, columns] = shape.dims() else {
        return Err(format!("shape {shape} is not a matrix"));
    };
    // Rejects what overflows before any size is derived from it.
    let dtype = match form {
        Form::Block(dtype) => dtype,
        Form::Grid(_) => DType::F32,
    };
    shape.bytes(dtype).map_err(|e| e.to_string())?;
    packed::PackedLayout::of(form, *rows, *columns).map_err(|e| e.to_string())
}
