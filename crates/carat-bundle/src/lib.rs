//! The description of a model and its form on disk.
//!
//! [`spec`] describes a model as data; [`source`] is how anything that needs
//! weights (oracle, converter, engine) asks for them; [`text`] carries what a
//! tokenizer and a chat template need.

pub mod mmap;
pub mod source;
pub mod spec;
pub mod text;
