//! What can go wrong between text and ids.

/// Why text could not be encoded, decoded or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The checkpoint carries no tokenizer.
    #[error("the checkpoint has no tokenizer (expected tokenizer.json or a GGUF vocabulary)")]
    MissingTokenizer,
    /// The checkpoint carries a vocabulary that no tokenizer could be made of.
    #[error("the checkpoint's vocabulary cannot be used: {problem}")]
    UnusableVocabulary {
        /// File, key, expected and found.
        problem: String,
    },
    /// `tokenizer.json` is not a tokenizer, or one beyond the limits.
    #[error("tokenizer.json: {problem}")]
    BadTokenizer {
        /// What is wrong.
        problem: String,
    },
    /// A special token that the configuration declares is not in the vocabulary.
    #[error("{role} token {content:?} is not in the vocabulary")]
    UnknownSpecial {
        /// `bos` or `eos`.
        role: &'static str,
        /// The declared text.
        content: String,
    },
    /// The configuration asks for a special token that it does not declare.
    #[error("the configuration adds a {role} token but declares none")]
    UndeclaredSpecial {
        /// `bos` or `eos`.
        role: &'static str,
    },
    /// An id that the model has no row for.
    #[error("token {token:?} has id {id}, but the model's vocabulary has {vocab_size} entries")]
    IdBeyondVocabulary {
        /// The id.
        id: u32,
        /// Its text, empty where the tokenizer does not know it either.
        token: String,
        /// Rows of the model's embedding.
        vocab_size: usize,
    },
    /// Text longer than the limit.
    #[error("text has {bytes} bytes, the limit is {limit}")]
    TextTooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Encoding failed.
    #[error("encoding failed: {problem}")]
    Encode {
        /// The tokenizer's reason.
        problem: String,
    },
    /// Decoding failed.
    #[error("decoding failed: {problem}")]
    Decode {
        /// The tokenizer's reason.
        problem: String,
    },
    /// A chat was asked for and there is no chat template.
    #[error("{}", missing_template(.name.as_deref(), *.instruct))]
    MissingTemplate {
        /// The model's name, where known.
        name: Option<String>,
        /// The model declares itself a chat model, so the template was lost.
        instruct: bool,
    },
    /// The chat template is not valid, or beyond the limits.
    #[error("chat template {name:?}: {problem}")]
    BadTemplate {
        /// Which template.
        name: String,
        /// What is wrong, with its line.
        problem: String,
    },
    /// The template refused the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRaised {
        /// The template's own words.
        message: String,
    },
    /// Rendering failed.
    #[error("chat template {name:?} failed: {problem}")]
    Render {
        /// Which template.
        name: String,
        /// What is wrong, with its line.
        problem: String,
    },
    /// A message is not one.
    #[error("message {index}: {problem}")]
    BadMessage {
        /// Position in the conversation.
        index: usize,
        /// What is wrong.
        problem: String,
    },
}

fn missing_template(name: Option<&str>, instruct: bool) -> String {
    let who = name.map_or_else(|| "the model".to_owned(), |n| format!("model {n:?}"));
    if instruct {
        format!("{who} is a chat model but its chat template is missing")
    } else {
        format!("{who} has no chat template")
    }
}
