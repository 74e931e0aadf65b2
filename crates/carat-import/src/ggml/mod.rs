//! Models in GGUF files: metadata, tensors and text.

mod meta;
mod open;
mod text;

pub(crate) use meta::Meta;
pub(crate) use open::{from_bytes, open};
