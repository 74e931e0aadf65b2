/// Why a model cannot be built or a step cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The spec is not a model.
    #[error(transparent)]
    Spec(#[from] carat_bundle::spec::SpecError),
    /// A weight could not be read from its source.
    #[error(transparent)]
    Source(#[from] carat_bundle::source::SourceError),
    /// A weight is absent or is not what the plan needs.
    #[error("weight {name:?}: {problem}")]
    Weight {
        /// Canonical name.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A token id that the vocabulary does not have.
    #[error("token id {id} at row {row} is outside the vocabulary of {vocab}")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Row of the batch.
        row: usize,
        /// Vocabulary size.
        vocab: usize,
    },
    /// The batch's arrays contradict each other.
    #[error("batch: {0}")]
    Batch(String),
    /// A sequence cannot hold as many tokens as asked.
    #[error("a sequence opened for {capacity} tokens cannot hold {needed}")]
    Capacity {
        /// Tokens the sequence was opened for.
        capacity: usize,
        /// Tokens it would hold.
        needed: usize,
    },
    /// More context than the model was made for.
    #[error("a context of {requested} tokens is beyond the model's {max}")]
    ContextTooLong {
        /// Tokens asked for.
        requested: usize,
        /// Tokens the checkpoint declares.
        max: usize,
    },
    /// More tokens than a KV cache can address.
    #[error("a KV cache of {tokens} tokens, expected at most {max}")]
    CacheTooLong {
        /// Tokens asked for.
        tokens: usize,
        /// Most there can be.
        max: usize,
    },
    /// The system refused memory for the KV cache.
    #[error("cannot allocate {bytes} bytes for the KV cache of {tokens} tokens")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Tokens they would hold.
        tokens: usize,
    },
    /// A state cannot go back to where it is asked to.
    #[error("cannot truncate a sequence of {length} tokens to {to}")]
    Truncate {
        /// Tokens it holds.
        length: usize,
        /// Tokens asked for.
        to: usize,
    },
}
