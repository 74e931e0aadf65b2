//! Whether weights that are stored as floats are ternary by value.

use carat_tensor::{DType, formats};

/// Weights that share a scale in the ternary formats.
const BLOCK: usize = 256;

/// What the values of a matrix are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Nothing but zeros, which fits any claim.
    Zeros,
    /// In each block of 256 of a row one of `-d`, `0`, `d`.
    Ternary,
    /// Anything else, also what is not stored as floats.
    Other,
}

/// Classifies a row-major float matrix of `columns` columns. Dense weights fail
/// in the first block, so only ternary ones are read in full.
pub fn classify(dtype: DType, columns: usize, bytes: &[u8]) -> Values {
    let row_bytes = dtype.row_bytes(columns).filter(|&b| b > 0);
    let Some(row_bytes) = row_bytes.filter(|_| dtype.is_float()) else {
        return Values::Other;
    };
    let element = dtype.block_bytes();
    let mut decoded = [0f32; BLOCK];
    let mut found = Values::Zeros;
    for row in bytes.chunks(row_bytes) {
        for block in row.chunks(element * BLOCK) {
            let values = &mut decoded[..block.len() / element];
            if formats::decode(dtype, block, values).is_err() {
                return Values::Other;
            }
            let mut magnitude = 0.0;
            for a in values.iter().map(|w| w.abs()) {
                if a == 0.0 || a == magnitude {
                    continue;
                }
                if magnitude != 0.0 || !a.is_finite() {
                    return Values::Other;
                }
                magnitude = a;
                found = Values::Ternary;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f32]) -> Values {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        classify(DType::F32, values.len(), &bytes)
    }

    #[test]
    fn one_magnitude_per_block() {
        assert_eq!(of(&[0.0, 0.5, -0.5, 0.0]), Values::Ternary);
        assert_eq!(of(&[0.0, -0.0]), Values::Zeros);
        assert_eq!(of(&[0.5, 0.25]), Values::Other);
        assert_eq!(of(&[f32::NAN, 0.5]), Values::Other);
        assert_eq!(of(&[f32::INFINITY, 0.0]), Values::Other);
        // The next block has a scale of its own, and so has the next row.
        let mut blocks = vec![0.5; 256];
        blocks.push(0.25);
        assert_eq!(of(&blocks), Values::Ternary);
        let two_rows: Vec<u8> = [0.5f32, 0.25]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        assert_eq!(classify(DType::F32, 1, &two_rows), Values::Ternary);
        assert_eq!(classify(DType::Q8_0, 32, &[0; 34]), Values::Other);
    }
}
