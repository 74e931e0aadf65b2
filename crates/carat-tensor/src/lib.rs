//! Element types, tensor views and the definition of every weight format.
//!
//! A *format* is a fixed number of elements stored in a fixed number of bytes
//! ([`DType::block_len`] in [`DType::block_bytes`]). A tensor is row-major; each
//! row is a whole number of blocks. [`formats`] holds one scalar decoder (and,
//! where quantizers need it, one scalar encoder) per format: they are the
//! specification that every fast path is tested against. [`packed`] defines the
//! row-interleaved layout in which bundles store matrices. [`grid`] describes
//! quantized matrices whose scales, zero points or tables do not fit into blocks.
//!
//! This crate knows nothing of files, models or threads.

mod dtype;
mod form;
pub mod formats;
pub mod grid;
pub mod packed;
mod shape;

pub use dtype::DType;
pub use form::Form;
pub use grid::{Grid, GridMatrix};
pub use shape::{Shape, ShapeError};
