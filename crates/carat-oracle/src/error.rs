use carat_bundle::source::SourceError;
use carat_bundle::spec::SpecError;
use carat_tensor::{DType, Shape};

/// Why the oracle has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OracleError {
    /// The spec contradicts itself.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A tensor could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A tensor is not of the shape that the spec asks for.
    #[error("{origin}: tensor {name:?} has shape {found}, expected {expected}")]
    TensorShape {
        /// File or bundle.
        origin: String,
        /// Canonical name.
        name: String,
        /// The source's shape.
        found: Shape,
        /// The spec's shape.
        expected: Shape,
    },
    /// A tensor has not as many bytes as its shape and format need.
    #[error("{origin}: tensor {name:?} has {found} bytes, expected {expected} of {dtype}")]
    TensorBytes {
        /// File or bundle.
        origin: String,
        /// Canonical name.
        name: String,
        /// Bytes the source gave.
        found: usize,
        /// Bytes of its shape.
        expected: usize,
        /// Its format.
        dtype: DType,
    },
    /// A tensor's rows or bytes do not make sense in its format.
    #[error("{origin}: tensor {name:?} cannot be decoded: {problem}")]
    Decode {
        /// File or bundle.
        origin: String,
        /// Canonical name.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The oracle was opened for sequences of no tokens.
    #[error("capacity is 0 tokens, expected at least 1")]
    NoCapacity,
    /// A sequence, or a step of it, has no tokens.
    #[error("sequence {sequence}: no tokens, expected at least 1")]
    Empty {
        /// Index of the sequence in the request.
        sequence: usize,
    },
    /// A sequence is longer than the oracle was opened for.
    #[error("sequence {sequence}: {tokens} tokens, expected at most {capacity}")]
    TooLong {
        /// Index of the sequence in the request.
        sequence: usize,
        /// Its length, in tokens.
        tokens: usize,
        /// The oracle's capacity, in tokens.
        capacity: usize,
    },
    /// A token id is not in the vocabulary.
    #[error("sequence {sequence}: token {position} has id {id}, expected below {vocab_size}")]
    TokenRange {
        /// Index of the sequence in the request.
        sequence: usize,
        /// Index of the token in the sequence's ids.
        position: usize,
        /// The id.
        id: u32,
        /// The true vocabulary size.
        vocab_size: usize,
    },
    /// Logits were asked for a row that is not there.
    #[error("sequence {sequence}: row {row} was asked for, expected below {rows}")]
    RowRange {
        /// Index of the sequence in the request.
        sequence: usize,
        /// The row.
        row: usize,
        /// Rows of the sequence.
        rows: usize,
    },
    /// A session has no such sequence (any more).
    #[error("sequence {id} is not open in this session")]
    UnknownSequence {
        /// Number of the sequence in its session.
        id: u64,
    },
    /// A request names the same sequence twice.
    #[error("sequence {id} is listed twice in one step")]
    RepeatedSequence {
        /// Number of the sequence in its session.
        id: u64,
    },
    /// Margins need two candidates.
    #[error("margins of {found} logits, expected at least 2")]
    TooFewLogits {
        /// Number of logits.
        found: usize,
    },
    /// A logit is infinite or not a number: no token can be called the likeliest.
    #[error("logit {index} is {value}, expected a finite number")]
    NotFinite {
        /// Token id of the logit.
        index: usize,
        /// Its value.
        value: f32,
    },
}
