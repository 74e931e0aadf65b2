//! What a model needs, before it takes it.

use carat_bundle::spec::ModelSpec;
use carat_model::{BLOCK_TOKENS, BlockAllocator, Extent, KvFormat, Plan};
use carat_oracle::OracleOptions;

use crate::{
    failure::{Failure, Outcome},
    output::bytes,
};

/// What a command is going to ask of an engine, as far as memory goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Tokens that a sequence will hold.
    pub(crate) tokens: usize,
    /// Tokens that the sequence is opened for.
    pub(crate) capacity: usize,
    /// Tokens of the largest step.
    pub(crate) chunk: usize,
    /// Every row of a step gets logits, not the last alone.
    pub(crate) all_rows: bool,
    /// Rows of logits that are kept until the end.
    pub(crate) kept_rows: usize,
}

impl Request {
    /// Up to `tokens` tokens, as far as the capacity goes, in steps of `chunk`.
    pub(crate) fn new(tokens: usize, capacity: usize, chunk: usize) -> Request {
        Request {
            tokens: tokens.min(capacity),
            capacity,
            chunk,
            all_rows: false,
            kept_rows: 0,
        }
    }

    /// Tokens that a KV cache of nothing else has room for, once it holds these.
    fn cache_tokens(&self) -> usize {
        let blocks = |tokens: usize| tokens.div_ceil(BLOCK_TOKENS);
        BlockAllocator::default()
            .total_for(blocks(self.tokens), blocks(self.capacity))
            .map_or(self.tokens, |blocks| blocks * BLOCK_TOKENS)
    }
}

/// Bytes that running a model takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Weights, mapped from a file or packed in memory.
    pub(crate) weights: u64,
    /// KV cache.
    pub(crate) kv: u64,
    /// Scratch of the largest step.
    pub(crate) chunk: u64,
    /// Logits that are kept.
    pub(crate) logits: u64,
}

impl Needs {
    /// Needs of a request on an engine that holds nothing yet.
    pub(crate) fn of(plan: &Plan, weight_bytes: u64, kv: KvFormat, request: &Request) -> Needs {
        Needs::with_cache(plan, weight_bytes, kv, request, request.cache_tokens())
    }

    /// Needs of a request where the KV cache of all sequences will have room for
    /// `cache_tokens` tokens.
    pub(crate) fn with_cache(
        plan: &Plan,
        weight_bytes: u64,
        kv: KvFormat,
        request: &Request,
        cache_tokens: usize,
    ) -> Needs {
        let columns = |extent: Extent| {
            let of_extent = plan.buffers.iter().filter(move |b| b.rows == extent);
            of_extent.map(|b| b.columns).max().unwrap_or(0) as u64
        };
        let rows = request.chunk.min(request.tokens);
        let logit_rows = if request.all_rows { rows } else { 1 };
        let vocab = columns(Extent::LogitRows);
        let floats = |rows: usize, columns: u64| {
            (rows as u64)
                .saturating_mul(columns)
                .saturating_mul(size_of::<f32>() as u64)
        };
        // The widest input is held once more in the kernels' form and once by norms
        // in place; logits are copied out of their buffer.
        let chunk = (plan.scratch_bytes(rows, logit_rows) as u64)
            .saturating_add(floats(rows, 2 * columns(Extent::Tokens)))
            .saturating_add(floats(logit_rows, vocab));
        Needs {
            weights: weight_bytes,
            kv: (plan.kv_bytes_per_token(kv) as u64).saturating_mul(cache_tokens as u64),
            chunk,
            // Once as floats and once more on the way into a file.
            logits: floats(request.kept_rows, 2 * vocab),
        }
    }

    /// Needs of the oracle for sequences of `tokens` tokens in all, of which
    /// `kept_rows` rows of logits are kept.
    pub(crate) fn of_oracle(
        spec: &ModelSpec,
        options: &OracleOptions,
        tokens: usize,
        kept_rows: usize,
    ) -> Needs {
        let memory = options.memory(spec, tokens);
        let row = (spec.vocab_size as u64).saturating_mul(size_of::<f32>() as u64);
        Needs {
            weights: memory.weights,
            kv: memory.cache,
            chunk: memory.scratch,
            logits: row.saturating_mul(2).saturating_mul(kept_rows as u64),
        }
    }

    pub(crate) fn total(&self) -> u64 {
        [self.weights, self.kv, self.chunk, self.logits]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// `None` where the system does not tell what is free.
    pub(crate) fn fits(&self) -> Option<bool> {
        carat_bench::available_memory_bytes().map(|free| self.total() <= free)
    }

    /// Refuses what would not fit, before it is tried. `held` bytes of the needs
    /// are taken already, and no longer among what is free.
    pub(crate) fn require(&self, tokens: usize, held: u64) -> Outcome<()> {
        let free = carat_bench::available_memory_bytes();
        self.require_of(tokens, held, free)
    }

    fn require_of(&self, tokens: usize, held: u64, free: Option<u64>) -> Outcome<()> {
        let Some(free) = free.filter(|free| self.total().saturating_sub(held) > *free) else {
            return Ok(());
        };
        let mut parts = format!(
            "weights {}, KV cache {}, chunk {}",
            bytes(self.weights),
            bytes(self.kv),
            bytes(self.chunk)
        );
        if self.logits > 0 {
            parts.push_str(&format!(", logits {}", bytes(self.logits)));
        }
        if held > 0 {
            parts.push_str(&format!("; {} of it held already", bytes(held)));
        }
        Err(Failure::refused(anyhow::anyhow!(
            "a request of {tokens} tokens needs {} ({parts}), {} are free",
            bytes(self.total()),
            bytes(free),
        ))
        .hint("ask for less (--ctx N bounds prompt and answer), or free memory"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small plan.
    fn plan() -> Plan {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/wren-dense");
        let checkpoint = carat_import::open(std::path::Path::new(path)).unwrap();
        Plan::lower(&checkpoint.spec).unwrap()
    }

    #[test]
    fn the_cache_counts_as_the_engine_allocates_it() {
        let plan = plan();
        let kv = |tokens, capacity| {
            let needs = Needs::of(
                &plan,
                0,
                KvFormat::F16,
                &Request::new(tokens, capacity, 128),
            );
            needs.kv / plan.kv_bytes_per_token(KvFormat::F16) as u64
        };
        assert_eq!(kv(1, 1000), 256, "a cache starts with 256 tokens");
        assert_eq!(kv(1, 10), BLOCK_TOKENS as u64, "but for a smaller capacity");
        assert_eq!(kv(1000, 100_000), 1024, "not the double of it");
        assert_eq!(kv(1_000_000, 1000), 1024, "no more than the context");
    }

    #[test]
    fn what_no_machine_has_saturates() {
        let plan = plan();
        let most = Request {
            all_rows: true,
            kept_rows: usize::MAX,
            ..Request::new(usize::MAX, usize::MAX, usize::MAX)
        };
        let needs = Needs::of(&plan, u64::MAX, KvFormat::F16, &most);
        assert_eq!(needs.total(), u64::MAX);
        assert_eq!((needs.kv, needs.chunk), (u64::MAX, u64::MAX));
        assert!(needs.require_of(usize::MAX, 0, Some(1 << 50)).is_err());
        assert!(needs.require_of(usize::MAX, 0, None).is_ok());
    }

    #[test]
    fn rows_of_logits_and_steps_count() {
        let plan = plan();
        let last = Request::new(1000, 1000, 128);
        let all = Request {
            all_rows: true,
            kept_rows: 1000,
            ..last
        };
        let wide = Request { chunk: 1000, ..all };
        let needs = |request| Needs::of(&plan, 0, KvFormat::F16, &request);
        // Per row a selected one of 256 and its norm, logits of 2,056 ids and their
        // copy, in fp32;
        // kept logits are there twice.
        let row = 2 * (256 + 2056) * 4;
        assert_eq!(needs(all).chunk - needs(last).chunk, 127 * row);
        assert_eq!(needs(all).logits, 2 * 1000 * 2056 * 4);
        assert!(needs(wide).chunk > 7 * needs(all).chunk);
    }

    #[test]
    fn what_is_held_is_not_needed_again() {
        let needs = Needs {
            weights: 60,
            kv: 40,
            ..Needs::default()
        };
        assert!(needs.require_of(1, 0, Some(99)).is_err());
        assert!(needs.require_of(1, 0, Some(100)).is_ok());
        assert!(needs.require_of(1, 40, Some(60)).is_ok());
        assert!(needs.require_of(1, 40, Some(59)).is_err());
    }
}
