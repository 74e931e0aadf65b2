use carat_model::ModelError;

/// Why a request cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The backend refused the step.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// There is nothing to continue.
    #[error("the prompt is empty: a model needs at least one token to answer")]
    EmptyPrompt,
    /// Prompt and answer do not fit in the context.
    #[error("a prompt of {prompt} tokens leaves no room in a context of {context}")]
    PromptTooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Tokens of the sequence's context.
        context: usize,
    },
    /// A schedule of chunk sizes that cannot be followed.
    #[error("schedule {text:?}: {problem}")]
    Schedule {
        /// What was given.
        text: String,
        /// What is wrong.
        problem: String,
    },
    /// A prefill in steps of a size that is not offered.
    #[error("a prefill chunk of {found} tokens, expected one of {expected:?}")]
    Chunk {
        /// What was given.
        found: usize,
        /// What is offered.
        expected: &'static [usize],
    },
    /// A sampling setting outside its range.
    #[error("{name} is {value}, expected {expected}")]
    Sampling {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// A logit is infinite or not a number: so is a weight, or the weights are too
    /// large for fp32.
    #[error("a logit at position {position} is not a finite number")]
    NotANumber {
        /// Position of the row.
        position: usize,
    },
}
