//! Row and elementwise kernels.
//!
//! Every function has a scalar twin and gives its bits on each [`Isa`](crate::Isa); sums
//! over a row use 16 accumulators (element `i` goes to accumulator `i % 16`)
//! and a fixed tree. NaN results are NaN everywhere, with unspecified payload.

mod elementwise;
pub(crate) mod math;
mod rows;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) mod simd;

#[cfg(all(test, not(loom)))]
mod tests;

pub use elementwise::{
    Activation, add, add_scaled, argmax, f16_from_f32, f32_from_f16, gated, gated_in_place,
    scale_in_place, softcap,
};
pub use rows::{Rope, rms_norm, rope_rotate};
pub use simd::kernel_isa;
