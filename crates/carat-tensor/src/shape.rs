use serde::{Deserialize, Serialize};

/// Why a shape cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShapeError {
    /// The product of the dimensions does not fit in `usize`.
    #[error("shape {0:?} has too many elements")]
    Overflow(Vec<usize>),
    /// A row is not a whole number of the format's blocks.
    #[error("a row of {columns} elements is not a whole number of {dtype} blocks of {block}")]
    PartialBlock {
        /// The offending row length.
        columns: usize,
        /// The format.
        dtype: crate::DType,
        /// The format's block length.
        block: usize,
    },
}

/// Dimensions of a tensor, slowest first (row-major): a matrix is `[rows, columns]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(pub Vec<usize>);

impl Shape {
    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// Number of elements, checked.
    pub fn elements(&self) -> Result<usize, ShapeError> {
        self.0
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .ok_or_else(|| ShapeError::Overflow(self.0.clone()))
    }

    /// Length of the last dimension; 1 for a scalar.
    pub fn columns(&self) -> usize {
        self.0.last().copied().unwrap_or(1)
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> Result<usize, ShapeError> {
        match self.0.split_last() {
            Some((_, lead)) => Shape(lead.to_vec()).elements(),
            None => Ok(1),
        }
    }

    /// Bytes of a row-major tensor of this shape in `dtype`, checked.
    pub fn bytes(&self, dtype: crate::DType) -> Result<usize, ShapeError> {
        let row = dtype
            .row_bytes(self.columns())
            .ok_or(ShapeError::PartialBlock {
                columns: self.columns(),
                dtype,
                block: dtype.block_len(),
            })?;
        self.rows()?
            .checked_mul(row)
            .ok_or_else(|| ShapeError::Overflow(self.0.clone()))
    }
}

impl<const D: usize> From<[usize; D]> for Shape {
    fn from(dims: [usize; D]) -> Self {
        Shape(dims.to_vec())
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn sizes_are_checked() {
        assert_eq!(Shape::from([3, 64]).bytes(DType::Q8_0), Ok(3 * 68));
        assert_eq!(Shape(vec![]).elements(), Ok(1));
        assert!(matches!(
            Shape::from([usize::MAX, 2]).elements(),
            Err(ShapeError::Overflow(_))
        ));
        assert!(matches!(
            Shape::from([2, 33]).bytes(DType::Q8_0),
            Err(ShapeError::PartialBlock { columns: 33, .. })
        ));
    }
}
