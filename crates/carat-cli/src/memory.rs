//! What a model needs, before it takes it.

use carat_model::Plan;

use crate::{
    failure::{Failure, Outcome},
    output::bytes,
};

/// Bytes that running a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Weights, mapped from a file.
    pub(crate) weights: u64,
    /// KV cache for the whole context.
    pub(crate) kv: u64,
    /// Scratch of a prefill chunk.
    pub(crate) chunk: u64,
}

impl Needs {
    /// Needs of `context` tokens with chunks of `chunk` tokens.
    pub(crate) fn of(plan: &Plan, weight_bytes: u64, context: usize, chunk: usize) -> Needs {
        // KV is held in blocks, and the pool doubles: the last doubling is what there is.
        let block = carat_model::BLOCK_TOKENS;
        let held = context.div_ceil(block) * block;
        Needs {
            weights: weight_bytes,
            kv: (plan.kv_bytes_per_token() as u64).saturating_mul(held as u64),
            chunk: plan.scratch_bytes(chunk.min(context), 1) as u64,
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.weights
            .saturating_add(self.kv)
            .saturating_add(self.chunk)
    }

    /// `None` where the system does not tell what is free.
    pub(crate) fn fits(&self) -> Option<bool> {
        carat_bench::available_memory_bytes().map(|free| self.total() <= free)
    }

    /// Refuses what would not fit, before it is tried.
    pub(crate) fn require(&self, context: usize) -> Outcome<()> {
        let Some(free) = carat_bench::available_memory_bytes() else {
            return Ok(());
        };
        if self.total() <= free {
            return Ok(());
        }
        Err(Failure::refused(anyhow::anyhow!(
            "a context of {context} tokens needs {} (weights {}, KV cache {}, chunk {}), {} are free",
            bytes(self.total()),
            bytes(self.weights),
            bytes(self.kv),
            bytes(self.chunk),
            bytes(free),
        ))
        .hint("ask for less with --ctx N, or free memory"))
    }
}
