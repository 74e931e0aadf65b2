//! CPU kernels, instruction-set table and thread pool.
//!
//! The one crate of carat with `unsafe`. Kernels are slice-in, slice-out
//! functions with asserted lengths; each has a scalar twin that is its
//! definition, and gives the same bits on every [`Isa`].

pub mod attention;
mod floats;
mod isa;
mod matmul;
pub mod ops;
mod peak;
mod pool;
mod probe;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub use floats::Floats;
pub use isa::{ISA_VARIABLE, Isa, IsaError};
pub use matmul::{
    ActPrecision, Crossovers, MatmulError, PathTimes, Prepared, Product, WeightShape, crossover,
    default_crossover, gather_rows, is_worth_measuring, kernel_name, matmul, measure,
};
pub use peak::{Arithmetic, PeakLoop, clock_hz};
pub use pool::{MAX_THREADS, Pool};
pub use probe::{ProbeBuffer, read_bandwidth};
