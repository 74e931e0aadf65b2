use carat_tensor::Form;

use crate::Isa;

/// Why a product cannot be computed. Nothing was written to any output.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MatmulError {
    /// The machine lacks the instruction set.
    #[error("this machine has no {0}")]
    Isa(Isa),
    /// A slice is too short or too long.
    #[error("{what} of {found} values, expected {rows} x {columns}")]
    Values {
        /// Which slice.
        what: &'static str,
        /// Rows (tokens) that it should have.
        rows: usize,
        /// Values of a row.
        columns: usize,
        /// Values that it has.
        found: usize,
    },
    /// A weight's columns are not the input's.
    #[error("a weight of {found} columns, expected the {expected} of the input")]
    Columns {
        /// Columns of the input.
        expected: usize,
        /// Columns of the weight.
        found: usize,
    },
    /// The input lacks the form that a weight's format takes.
    #[error("the input was not prepared for {0}")]
    NotPrepared(Form),
    /// A row that the weight does not have.
    #[error("row {id} of a weight of {rows} rows")]
    Row {
        /// The row asked for.
        id: u32,
        /// Rows of the weight.
        rows: usize,
    },
}

/// Refuses a slice that is not `[rows, columns]`.
pub(super) fn require(
    what: &'static str,
    rows: usize,
    columns: usize,
    found: usize,
) -> Result<(), MatmulError> {
    match rows.checked_mul(columns) {
        Some(expected) if expected == found => Ok(()),
        _ => Err(MatmulError::Values {
            what,
            rows,
            columns,
            found,
        }),
    }
}
