//! CPU kernels, instruction-set table and thread pool.
//!
//! The one crate of carat with `unsafe`. Kernels are slice-in, slice-out
//! functions with asserted lengths; each has a scalar twin that is its
//! definition, and gives the same bits on every [`Isa`].

mod isa;

pub use isa::{ISA_VARIABLE, Isa, IsaError};
