//! Models in GGUF files: metadata, tensors and text.

mod meta;
mod open;
mod text;
mod write;

pub(crate) use meta::Meta;
pub(crate) use open::{from_bytes, open};
pub use write::{DescribeError, Description, describe, in_gguf_terms};
