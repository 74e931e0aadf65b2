//! Restating rows in another format without rounding, and arranging them.

use std::borrow::Cow;

use carat_tensor::{DType, Shape, formats, packed};

use crate::{layout::packed_layout, manifest::Layout, writer::TensorToStore};

/// Restates rows in another format and arranges them.
pub(crate) fn convert_rows(
    t: &TensorToStore<'_>,
    stored: DType,
    layout: Layout,
    data: &[u8],
    rows: usize,
) -> Result<Vec<u8>, String> {
    let restated = restate(t.dtype, stored, data)?;
    match layout {
        Layout::RowMajor => Ok(restated.into_owned()),
        Layout::Packed16 => {
            let shape = Shape::from([rows, t.shape.columns()]);
            let panel = packed_layout(stored, &shape)?;
            let mut out = vec![0; panel.bytes()];
            packed::pack(&panel, &restated, &mut out).map_err(|e| e.to_string())?;
            Ok(out)
        }
        Layout::Sections => Err("a grid is not made of rows".into()),
    }
}

/// Restates blocks of one format in another without rounding.
fn restate(from: DType, to: DType, data: &[u8]) -> Result<Cow<'_, [u8]>, String> {
    let text = |e: formats::FormatError| e.to_string();
    formats::check(from, data).map_err(text)?;
    if from == to {
        return Ok(Cow::Borrowed(data));
    }
    if to == DType::F32 {
        let elements = data.len() / from.block_bytes() * from.block_len();
        let mut values = vec![0f32; elements];
        formats::decode(from, data, &mut values).map_err(text)?;
        let mut out = Vec::with_capacity(elements * 4);
        out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        return Ok(Cow::Owned(out));
    }
    if (from, to) == (DType::TQ1_0, DType::TQ2_0) {
        return formats::tq1_0_to_tq2_0(data).map(Cow::Owned).map_err(text);
    }
    if (from, to) == (DType::TQ2_0, DType::TQ1_0) {
        return formats::tq2_0_to_tq1_0(data).map(Cow::Owned).map_err(text);
    }
    if formats::int8_group_dtype(from) == Some(to) {
        return formats::to_int8_groups(from, data)
            .map(|(_, out)| Cow::Owned(out))
            .map_err(text);
    }
    Err(format!(
        "{from} cannot be restated as {to} without rounding"
    ))
}
