//! From a model's description to something that runs.
//!
//! [`Plan::lower`] turns a [`ModelSpec`](carat_bundle::spec::ModelSpec) into a
//! flat list of operations over named buffers, weights and states. A
//! [`Backend`] runs the list for a [`Batch`] of rows: one token of one
//! sequence, a prefill chunk, several sequences at once, or the rows of a
//! speculative check are all the same plan with other inputs.
//!
//! [`cpu::CpuBackend`] is the backend of this crate. Its results for a row never
//! depend on which other rows share the step, on the number of threads, or on
//! the instruction set.

mod backend;
mod batch;
pub mod cpu;
mod error;
mod plan;
mod state;
mod weights;

pub use backend::{Backend, OpSpan, Output, StepOutput};
pub use batch::{Batch, BatchSequence};
pub use error::ModelError;
pub use plan::{BufferDecl, BufferId, Extent, Op, Plan, Projection, StateDecl, StateId, WeightId};
pub use state::{BLOCK_TOKENS, BlockAllocator, SequenceState, StateCheckpoint};
pub use weights::{MemoryWeights, WeightStore};

pub use carat_kernels::{ActPrecision, attention::KvFormat};
