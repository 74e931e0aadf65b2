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
    /// The logits are not numbers: the model or a kernel is broken.
    #[error("no finite logit at position {position}")]
    NotANumber {
        /// Position of the row.
        position: usize,
    },
}
