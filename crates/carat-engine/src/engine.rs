//! Sequences on a backend.

use std::ops::ControlFlow;

use carat_model::{
    BLOCK_TOKENS, Backend, Batch, BatchSequence, BlockAllocator, ModelError, OpSpan, Output,
    SequenceState, StepOutput,
};

use crate::EngineError;

/// Settings of an [`Engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens per prefill step: one of [`CHUNKS`](EngineOptions::CHUNKS) where a user
    /// chooses it, see [`Schedule::prefill`].
    pub chunk: usize,
    /// Open sequences beyond the context that the model was made for.
    pub extrapolate: bool,
}

impl EngineOptions {
    /// Large enough that unpacking weights is amortised: twice as many are a few
    /// percent faster for double the working set.
    pub const DEFAULT_CHUNK: usize = 64;

    /// Tokens that a prefill step may take: whole tiles of 16, or one, which is the
    /// decode step.
    pub const CHUNKS: [usize; 7] = [1, 16, 32, 64, 128, 256, 512];
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            chunk: Self::DEFAULT_CHUNK,
            extrapolate: false,
        }
    }
}

/// Which rows' logits a call hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: only the states advance.
    None,
    /// Of the last token.
    Last,
    /// Of every token.
    All,
}

/// Chunk sizes of a prefill, in order; the last repeats until the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule(Vec<usize>);

impl Schedule {
    /// Chunks of one size.
    pub fn every(chunk: usize) -> Result<Self, EngineError> {
        Schedule::new(vec![chunk])
    }

    /// Chunks of a size that a prefill is offered in.
    ///
    /// # Errors
    ///
    /// [`EngineError::Chunk`] unless it is one of [`EngineOptions::CHUNKS`].
    pub fn prefill(chunk: usize) -> Result<Self, EngineError> {
        if EngineOptions::CHUNKS.contains(&chunk) {
            return Schedule::every(chunk);
        }
        Err(EngineError::Chunk {
            found: chunk,
            expected: &EngineOptions::CHUNKS,
        })
    }

    /// Chunks of the given sizes; the last one repeats.
    pub fn new(chunks: Vec<usize>) -> Result<Self, EngineError> {
        let wrong = |problem: &str| {
            Err(EngineError::Schedule {
                text: format!("{chunks:?}"),
                problem: problem.into(),
            })
        };
        if chunks.is_empty() {
            return wrong("has no chunk");
        }
        if chunks.contains(&0) {
            return wrong("a chunk has at least one token");
        }
        Ok(Schedule(chunks))
    }

    /// Parses `64,1,16`.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let chunks: Result<Vec<usize>, _> = text.split(',').map(|c| c.trim().parse()).collect();
        match chunks {
            Ok(chunks) => Schedule::new(chunks),
            Err(_) => Err(EngineError::Schedule {
                text: text.into(),
                problem: "is not a list of chunk sizes such as 64,1,16".into(),
            }),
        }
    }

    /// Tokens of the largest chunk there may be.
    pub fn largest(&self) -> usize {
        self.0.iter().copied().max().unwrap_or(0)
    }

    /// The chunks of `tokens` tokens.
    pub fn chunks(&self, tokens: usize) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        let mut start = 0;
        let mut sizes = self.0.iter();
        let mut size = 0;
        std::iter::from_fn(move || {
            if start >= tokens {
                return None;
            }
            size = sizes.next().copied().unwrap_or(size);
            let range = start..start.saturating_add(size).min(tokens);
            start = range.end;
            Some(range)
        })
    }
}

/// A conversation on an engine: its states and the ids they hold.
#[derive(Debug)]
pub struct Sequence {
    state: SequenceState,
    ids: Vec<u32>,
}

impl Sequence {
    /// Ids that the states hold.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Tokens it was opened for.
    pub fn capacity(&self) -> usize {
        self.state.capacity()
    }

    /// Forgets all but the first `length` tokens.
    pub fn truncate(&mut self, length: usize) -> Result<(), EngineError> {
        self.state.truncate(length)?;
        self.ids.truncate(length);
        Ok(())
    }
}

/// Runs sequences step by step on a backend.
pub struct Engine {
    backend: Box<dyn Backend>,
    allocator: BlockAllocator,
    free_slots: Vec<u32>,
    slots: u32,
    options: EngineOptions,
    output: StepOutput,
}

impl Engine {
    /// An engine on a backend.
    pub fn new(backend: Box<dyn Backend>, options: EngineOptions) -> Self {
        Engine {
            backend,
            allocator: BlockAllocator::default(),
            free_slots: Vec::new(),
            slots: 0,
            options,
            output: StepOutput::default(),
        }
    }

    /// The device side.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Starts (or stops) noting the time of every op.
    pub fn set_profiling(&mut self, on: bool) {
        self.backend.set_profiling(on);
    }

    /// The ops that ran since the last call, in order; none unless profiling.
    pub fn take_spans(&mut self) -> Vec<OpSpan> {
        self.backend.take_spans()
    }

    /// Vocabulary size.
    pub fn vocab_size(&self) -> usize {
        self.backend.spec().vocab_size
    }

    /// The schedule used where none is given.
    pub fn schedule(&self) -> Schedule {
        Schedule(vec![self.options.chunk.max(1)])
    }

    /// Opens a sequence for up to `capacity` tokens. The cache grows as it is
    /// needed; the capacity decides the rotary factor set.
    pub fn open(&mut self, capacity: usize) -> Result<Sequence, EngineError> {
        let max = self.backend.spec().max_context;
        if capacity > max && !self.options.extrapolate {
            return Err(ModelError::ContextTooLong {
                requested: capacity,
                max,
            }
            .into());
        }
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slots += 1;
            self.slots - 1
        });
        Ok(Sequence {
            state: SequenceState::new(capacity, slot),
            ids: Vec::new(),
        })
    }

    /// Keys and values of a KV state at positions of a sequence, in logical fp32.
    pub fn export_kv(
        &self,
        sequence: &Sequence,
        state: usize,
        positions: std::ops::Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>), EngineError> {
        Ok(self
            .backend
            .export_kv(state, sequence.state.blocks(), positions)?)
    }

    /// Overwrites keys and values of a KV state from position `first` on.
    pub fn import_kv(
        &mut self,
        sequence: &mut Sequence,
        state: usize,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), EngineError> {
        Ok(self
            .backend
            .import_kv(state, sequence.state.blocks(), first, keys, values)?)
    }

    /// Fills an empty sequence with `ids` whose keys and values are given instead of
    /// computed: of every KV state, in order, two matrices `[ids, kv_heads * head_dim]`.
    pub fn seed(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        states: &[(&[f32], &[f32])],
    ) -> Result<(), EngineError> {
        let expected = self.backend.plan().states.len();
        if states.len() != expected {
            let problem = format!("{} states are given, there are {expected}", states.len());
            return Err(ModelError::Batch(problem).into());
        }
        sequence.truncate(0)?;
        self.reserve(sequence, ids.len())?;
        for (state, (keys, values)) in states.iter().enumerate() {
            self.import_kv(sequence, state, 0, keys, values)?;
        }
        sequence.state.advance(ids.len())?;
        sequence.ids.extend_from_slice(ids);
        Ok(())
    }

    /// Logits `[rows, vocab]` of given rows `[rows, hidden]` of what the head sees.
    pub fn head(&mut self, hidden: &[f32]) -> Result<Vec<f32>, EngineError> {
        let mut logits = Vec::new();
        self.backend.head(hidden, &mut logits)?;
        Ok(logits)
    }

    /// Gives a sequence's memory back for others.
    pub fn close(&mut self, mut sequence: Sequence) {
        sequence.state.release(&mut self.allocator);
        self.free_slots.push(sequence.state.slot());
    }

    fn blocks_for(&self, sequence: &Sequence, tokens: usize) -> Result<usize, EngineError> {
        let missing = sequence.state.missing_blocks(tokens)?;
        let most = sequence.state.missing_blocks(sequence.capacity())?;
        Ok(self.allocator.total_for(missing, most)?)
    }

    /// Tokens that the KV cache of all sequences would have room for once
    /// [`reserve`](Engine::reserve) made room for `tokens` in this one.
    pub fn cache_tokens_for(
        &self,
        sequence: &Sequence,
        tokens: usize,
    ) -> Result<usize, EngineError> {
        Ok(self.blocks_for(sequence, tokens)? * BLOCK_TOKENS)
    }

    /// Makes room for `tokens` tokens in all, so that no later step has to grow.
    pub fn reserve(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<(), EngineError> {
        let total = self.blocks_for(sequence, tokens)?;
        if total > self.allocator.total() {
            self.backend.grow_kv(total)?;
            self.allocator.grow(total);
        }
        sequence.state.reserve(tokens, &mut self.allocator)?;
        Ok(())
    }

    /// Appends ids to a sequence in one step and hands out logits
    /// `[rows, vocab]` of the rows asked for.
    pub fn step(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        rows: LogitRows,
    ) -> Result<&[f32], EngineError> {
        let wanted: &[Output] = match rows {
            LogitRows::None => &[],
            LogitRows::Last | LogitRows::All => &[Output::Logits],
        };
        Ok(self.step_for(sequence, ids, rows, wanted)?.logits())
    }

    /// As [`step`](Engine::step), and hands out whatever is `wanted`; `rows` says of
    /// which rows logits and final hidden states are.
    pub fn step_for(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        rows: LogitRows,
        wanted: &[Output],
    ) -> Result<&StepOutput, EngineError> {
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let first = sequence.len();
        self.reserve(sequence, first + ids.len())?;
        let positions: Vec<u32> = (first..first + ids.len()).map(|p| p as u32).collect();
        let slots: Vec<u32> = positions
            .iter()
            .map(|p| {
                sequence
                    .state
                    .slot_of(*p as usize)
                    .expect("invariant: reserved above")
            })
            .collect();
        let logit_rows: Vec<u32> = match rows {
            LogitRows::None => vec![],
            LogitRows::Last => vec![ids.len() as u32 - 1],
            LogitRows::All => (0..ids.len() as u32).collect(),
        };
        let sequences = [BatchSequence {
            start: 0,
            blocks: sequence.state.blocks(),
            capacity: sequence.state.capacity(),
            state_slot: sequence.state.slot(),
        }];
        let batch = Batch {
            token_ids: ids,
            positions: &positions,
            slot_mapping: &slots,
            sequences: &sequences,
            logit_rows: &logit_rows,
        };
        self.backend.step(&batch, wanted, &mut self.output)?;
        let logits = self.output.logits();
        if !logit_rows.is_empty()
            && let Some(index) = first_not_finite(logits)
        {
            let row = logit_rows[index / self.backend.spec().vocab_size];
            return Err(EngineError::NotANumber {
                position: first + row as usize,
            });
        }
        sequence.state.advance(ids.len())?;
        sequence.ids.extend_from_slice(ids);
        Ok(&self.output)
    }

    /// Appends ids in chunks; hands out the last row's logits.
    pub fn prefill(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        schedule: &Schedule,
    ) -> Result<&[f32], EngineError> {
        let logits = self.prefill_with(sequence, ids, schedule, &mut |_| ControlFlow::Continue(()));
        Ok(logits?.unwrap_or_default())
    }

    /// As [`prefill`](Engine::prefill). `each` is told after each chunk how many
    /// of the ids are in, and may break off: then there are no logits (`None`),
    /// and the sequence holds what went in.
    pub fn prefill_with(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        schedule: &Schedule,
        each: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Option<&[f32]>, EngineError> {
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        self.reserve(sequence, sequence.len().saturating_add(ids.len()))?;
        for chunk in schedule.chunks(ids.len()) {
            let end = chunk.end;
            let rows = if end == ids.len() {
                LogitRows::Last
            } else {
                LogitRows::None
            };
            self.step(sequence, &ids[chunk], rows)?;
            // What is complete is handed out: there is nothing left to break off.
            if each(end).is_break() && end < ids.len() {
                return Ok(None);
            }
        }
        Ok(Some(self.output.logits()))
    }

    /// Logits of every position of `ids`, `[tokens, vocab]` row-major, on a
    /// fresh sequence of `capacity` tokens.
    pub fn logits(
        &mut self,
        ids: &[u32],
        capacity: usize,
        schedule: &Schedule,
    ) -> Result<Vec<f32>, EngineError> {
        self.logits_with(ids, capacity, schedule, &mut |_| {})
    }

    /// As [`logits`](Engine::logits); `each` is told after each chunk how many of
    /// the ids are done.
    pub fn logits_with(
        &mut self,
        ids: &[u32],
        capacity: usize,
        schedule: &Schedule,
        each: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, EngineError> {
        let mut sequence = self.open(capacity)?;
        let result = self.all_logits(&mut sequence, ids, schedule, each);
        self.close(sequence);
        result
    }

    fn all_logits(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        schedule: &Schedule,
        each: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, EngineError> {
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        self.reserve(sequence, sequence.len().saturating_add(ids.len()))?;
        let mut out = Vec::with_capacity(ids.len().saturating_mul(self.vocab_size()));
        for chunk in schedule.chunks(ids.len()) {
            let end = chunk.end;
            out.extend_from_slice(self.step(sequence, &ids[chunk], LogitRows::All)?);
            each(end);
        }
        Ok(out)
    }
}

/// The first value that is infinite or no number.
fn first_not_finite(values: &[f32]) -> Option<usize> {
    // No early end within a part, so that the usual case is vector code.
    let exponent = f32::INFINITY.to_bits();
    let clean = |part: &[f32]| {
        let any = |any, v: &f32| any | (v.to_bits() & exponent == exponent);
        !part.iter().fold(false, any)
    };
    if values.chunks(1024).all(clean) {
        return None;
    }
    values.iter().position(|v| !v.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_cover_everything_in_order() {
        let s = Schedule::parse("64, 1,16").unwrap();
        let chunks: Vec<_> = s.chunks(100).map(|r| r.len()).collect();
        assert_eq!(chunks, [64, 1, 16, 16, 3]);
        assert_eq!(s.chunks(0).count(), 0);
        assert_eq!(s.chunks(3).next(), Some(0..3));
        assert_eq!(s.chunks(3).count(), 1);
        let s = Schedule::parse(&format!("1,{}", usize::MAX)).unwrap();
        assert_eq!(s.chunks(10).collect::<Vec<_>>(), [0..1, 1..10]);
    }

    #[test]
    fn prefill_chunks_are_whole_tiles() {
        let accepted: Vec<usize> = (0..2000)
            .filter(|c| Schedule::prefill(*c).is_ok())
            .collect();
        assert_eq!(accepted, [1, 16, 32, 64, 128, 256, 512]);
        let default = EngineOptions::default().chunk;
        assert_eq!(default, 64);
        assert_eq!(Schedule::prefill(default).unwrap().largest(), 64);
        let refused = Schedule::prefill(48).unwrap_err().to_string();
        assert!(
            refused.contains("48") && refused.contains("32, 64"),
            "{refused}"
        );
    }

    #[test]
    fn bad_schedules_are_errors() {
        for text in ["", "0", "4,0", "a", "-1", "4,,5"] {
            assert!(
                matches!(Schedule::parse(text), Err(EngineError::Schedule { .. })),
                "{text:?}"
            );
        }
    }
}
