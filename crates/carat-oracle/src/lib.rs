//! The reference that everything else is judged against.
//!
//! The oracle walks a [`ModelSpec`](carat_bundle::spec::ModelSpec) in plain
//! fp32: every weight is decoded to floats, every block is the textbook loop in
//! its own file. It shares no kernel, plan or layout with the engines, so an
//! engine's mistake cannot hide in both. What it does share is the import: a
//! checkpoint that is read wrongly is wrong here too, which is why families are
//! anchored to logits made by foreign programs.
//!
//! Two promises make it usable as a judge:
//!
//! * **A row's logits are a function of that row's tokens.** They do not depend,
//!   not in one bit, on how many rows or sequences are computed together, on how
//!   a prompt is cut into steps, or on the number of threads. Every output is
//!   reduced in an order fixed by the model alone (see `linear.rs` and
//!   `attention.rs`). Machines may differ: the GEMM uses the widest SIMD there is.
//! * **Memory is bounded.** A model that does not fit
//!   [`OracleOptions::resident_bytes`] is streamed: a panel of rows of a matrix is
//!   decoded when it is multiplied, once for all sequences of the pass (for every
//!   2,048 rows of them); embedding rows are decoded one by one.
//!
//! Matrix products, norms, softmax and activations are in fp32, as the published
//! references compute them; sums outside matrix products are gathered in f64 and
//! rounded once.
//!
//! ```
//! # use carat_bundle::{source::TensorSource, spec::ModelSpec};
//! use carat_oracle::{Oracle, OracleError, OracleOptions, Rows};
//!
//! /// The most likely token after `prompt`.
//! fn next(spec: &ModelSpec, source: &dyn TensorSource, prompt: &[u32]) -> Result<u32, OracleError> {
//!     let oracle = Oracle::new(spec, source, OracleOptions::new(4096))?;
//!     let logits = oracle.forward(&[prompt], Rows::Last)?;
//!     Ok(carat_oracle::Step::of(logits[0].row(0))?.id)
//! }
//! ```

mod attention;
mod error;
mod ffn;
mod forward;
mod generate;
mod linear;
mod margins;
mod norm;
mod oracle;
mod parallel;
mod rope;
mod rounding;
mod session;
mod taps;
mod walk;
mod weights;

pub use error::OracleError;
pub use forward::{LogitRow, Logits, Rows};
pub use generate::ForcedStep;
pub use margins::Step;
pub use oracle::{CachePrecision, Oracle, OracleMemory, OracleOptions};
pub use rounding::{Imitation, Rounding};
pub use session::{CacheView, SequenceId, Session};
pub use taps::{NoTaps, Recorder, Tap, TapPoint, Taps};
pub use walk::Walk;
