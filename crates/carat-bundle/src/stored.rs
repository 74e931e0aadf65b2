//! Whether the bytes of a tensor are what they have to be.

use carat_tensor::{DType, Shape, packed};

use crate::{
    BundleTensor,
    layout::{check_rows, packed_layout},
    manifest::Layout,
};

/// Digest, padding rows, codes and finite weights of one tensor.
pub(crate) fn check_tensor(t: &BundleTensor<'_>) -> Result<(), String> {
    let found = blake3::hash(t.bytes).to_hex().to_string();
    if found != t.entry.blake3 {
        return Err(format!("expected digest {}, found {found}", t.entry.blake3));
    }
    if let (Some(grid), Some(matrix)) = (t.entry.grid, t.grid_matrix()) {
        let matrix = matrix?;
        let mut again = matrix.to_bytes().map_err(|e| e.to_string())?;
        if t.entry.layout == Layout::Packed16 {
            let layout = packed_layout(grid, &t.entry.shape)?;
            let mut packed = vec![0; layout.bytes()];
            packed::pack(&layout, &again, &mut packed).map_err(|e| e.to_string())?;
            again = packed;
        }
        if again != t.bytes {
            return Err(format!("has bits set that {grid} does not use"));
        }
        let mut fields = matrix.scales.iter().chain(&matrix.tables);
        return match fields.find(|x| !x.is_finite()) {
            Some(x) => Err(format!("a scale or table entry of {grid} is {x}")),
            None => Ok(()),
        };
    }
    let columns = t.entry.shape.columns();
    if t.entry.layout != Layout::Packed16 {
        return check_rows(t.entry.dtype, t.bytes, 0, columns);
    }
    let rows = t.entry.shape.rows().map_err(|e| e.to_string())?;
    let one_panel = Shape::from([packed::PANEL_ROWS, columns]);
    let full = packed_layout(t.entry.dtype, &one_panel)?;
    for (i, panel) in t.bytes.chunks(full.bytes()).enumerate() {
        let first = i * packed::PANEL_ROWS;
        let here = packed::PANEL_ROWS.min(rows - first);
        let partial = here < packed::PANEL_ROWS;
        // Only the last panel has padding rows, only TQ2_0 undefined codes; the rest
        // is looked at closely where the fields of a panel give reason to.
        let plain = t.entry.dtype != DType::TQ2_0 && packed::panel_is_plainly_finite(&full, panel);
        if !partial && plain {
            continue;
        }
        let layout = packed_layout(t.entry.dtype, &Shape::from([here, columns]))?;
        let mut logical = vec![0; layout.row_major_bytes()];
        packed::unpack(&layout, panel, &mut logical).map_err(|e| e.to_string())?;
        check_rows(t.entry.dtype, &logical, first, columns)?;
        if partial {
            // Packing fills up with zeros, so a panel with clean padding is
            // what packing its own rows gives.
            let mut again = vec![0; layout.bytes()];
            packed::pack(&layout, &logical, &mut again).map_err(|e| e.to_string())?;
            if again != panel {
                return Err(format!("padding after row {rows} is not zero"));
            }
        }
    }
    Ok(())
}
