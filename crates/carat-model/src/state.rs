//! What a sequence keeps across steps, and who owns which KV block.

use crate::ModelError;

/// Positions per KV block.
pub const BLOCK_TOKENS: usize = carat_kernels::attention::KV_TILE;

/// Blocks that a growing cache starts with: 256 tokens.
const FIRST_BLOCKS: usize = 256 / BLOCK_TOKENS;

/// Most blocks there can be: slots and positions are 32-bit.
const MAX_BLOCKS: usize = u32::MAX as usize / BLOCK_TOKENS;

/// Hands out KV blocks.
#[derive(Clone, Debug, Default)]
pub struct BlockAllocator {
    free: Vec<u32>,
    total: usize,
}

impl BlockAllocator {
    /// Blocks that exist, free or not.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Blocks that nobody holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks there must be in total so that `more` can be taken by a sequence
    /// that will never take more than `most`: the total doubles from 256 tokens
    /// on, so that growing costs a constant per token, but never beyond what
    /// `most` would need.
    ///
    /// # Errors
    ///
    /// [`ModelError::CacheTooLong`] beyond what 32-bit slots can name.
    pub fn total_for(&self, more: usize, most: usize) -> Result<usize, ModelError> {
        let held = self.total - self.free.len();
        let needed = held.saturating_add(more);
        if needed > MAX_BLOCKS {
            return Err(ModelError::CacheTooLong {
                tokens: needed.saturating_mul(BLOCK_TOKENS),
                max: MAX_BLOCKS * BLOCK_TOKENS,
            });
        }
        if needed <= self.total {
            return Ok(self.total);
        }
        let doubled = self.total.saturating_mul(2).max(FIRST_BLOCKS);
        let useful = held.saturating_add(most).min(MAX_BLOCKS);
        Ok(needed.max(doubled.min(useful)))
    }

    /// Declares that there are now `total` blocks.
    pub fn grow(&mut self, total: usize) {
        // Reversed, so that blocks are taken in ascending order.
        let fresh = (self.total..total).rev().map(|b| b as u32);
        self.free.splice(0..0, fresh);
        self.total = self.total.max(total);
    }

    fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    fn give(&mut self, blocks: impl Iterator<Item = u32>) {
        self.free.extend(blocks);
    }
}

/// Where a sequence stands: its length and its KV blocks.
///
/// Rolling back is moving the length: rows beyond it are stale and are
/// overwritten before anything reads them.
#[derive(Debug)]
pub struct SequenceState {
    blocks: Vec<u32>,
    length: usize,
    capacity: usize,
    slot: u32,
}

/// A place to come back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateCheckpoint {
    length: usize,
}

impl SequenceState {
    /// A sequence that may grow to `capacity` tokens.
    pub fn new(capacity: usize, slot: u32) -> Self {
        SequenceState {
            blocks: Vec::new(),
            length: 0,
            capacity,
            slot,
        }
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Tokens it was opened for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// KV blocks in order of position.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Slot of fixed-size states.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Blocks missing to hold `tokens` tokens, or why it cannot.
    pub fn missing_blocks(&self, tokens: usize) -> Result<usize, ModelError> {
        if tokens > self.capacity {
            return Err(ModelError::Capacity {
                capacity: self.capacity,
                needed: tokens,
            });
        }
        Ok(tokens
            .div_ceil(BLOCK_TOKENS)
            .saturating_sub(self.blocks.len()))
    }

    /// Takes blocks for `tokens` tokens; the allocator must have them.
    pub fn reserve(
        &mut self,
        tokens: usize,
        allocator: &mut BlockAllocator,
    ) -> Result<(), ModelError> {
        let missing = self.missing_blocks(tokens)?;
        if allocator.free() < missing {
            return Err(ModelError::Batch(format!(
                "{missing} KV blocks wanted, {} free",
                allocator.free()
            )));
        }
        self.blocks
            .extend((0..missing).filter_map(|_| allocator.take()));
        Ok(())
    }

    /// Slot of a position that is reserved.
    pub fn slot_of(&self, position: usize) -> Option<u32> {
        self.blocks
            .get(position / BLOCK_TOKENS)
            .map(|block| block * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32)
    }

    /// Declares that `tokens` more rows have been written.
    pub fn advance(&mut self, tokens: usize) -> Result<(), ModelError> {
        let length = self.length.saturating_add(tokens);
        if length > self.blocks.len() * BLOCK_TOKENS {
            return Err(ModelError::Capacity {
                capacity: self.blocks.len() * BLOCK_TOKENS,
                needed: length,
            });
        }
        self.length = length;
        Ok(())
    }

    /// Forgets all but the first `length` tokens; keeps the blocks.
    pub fn truncate(&mut self, length: usize) -> Result<(), ModelError> {
        if length > self.length {
            return Err(ModelError::Truncate {
                length: self.length,
                to: length,
            });
        }
        self.length = length;
        Ok(())
    }

    /// A place to come back to with [`restore`](Self::restore).
    pub fn checkpoint(&self) -> StateCheckpoint {
        StateCheckpoint {
            length: self.length,
        }
    }

    /// Goes back to a checkpoint.
    pub fn restore(&mut self, checkpoint: &StateCheckpoint) -> Result<(), ModelError> {
        self.truncate(checkpoint.length)
    }

    /// Gives all blocks back.
    pub fn release(&mut self, allocator: &mut BlockAllocator) {
        allocator.give(self.blocks.drain(..).rev());
        self.length = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grown(sequence: &mut SequenceState, tokens: usize, allocator: &mut BlockAllocator) {
        let missing = sequence.missing_blocks(tokens).unwrap();
        let most = sequence.missing_blocks(sequence.capacity()).unwrap();
        allocator.grow(allocator.total_for(missing, most).unwrap());
        sequence.reserve(tokens, allocator).unwrap();
    }

    #[test]
    fn growth_starts_at_256_and_doubles() {
        let mut allocator = BlockAllocator::default();
        let mut s = SequenceState::new(10_000, 0);
        let mut totals = vec![];
        for tokens in 1..=2_000 {
            grown(&mut s, tokens, &mut allocator);
            if totals.last() != Some(&allocator.total()) {
                totals.push(allocator.total());
            }
        }
        let tokens: Vec<_> = totals.iter().map(|t| t * BLOCK_TOKENS).collect();
        assert_eq!(tokens, [256, 512, 1024, 2048]);
    }

    #[test]
    fn growth_never_exceeds_what_the_capacity_needs() {
        let (mut at_once, mut slowly) = (BlockAllocator::default(), BlockAllocator::default());
        grown(&mut SequenceState::new(5_000, 0), 4_999, &mut at_once);
        let mut s = SequenceState::new(5_000, 0);
        for tokens in 1..=5_000 {
            grown(&mut s, tokens, &mut slowly);
        }
        let whole = 5_000usize.div_ceil(BLOCK_TOKENS);
        assert_eq!((at_once.total(), slowly.total()), (whole, whole));
        let mut small = BlockAllocator::default();
        grown(&mut SequenceState::new(10, 0), 1, &mut small);
        assert_eq!(small.total(), 1);
    }

    #[test]
    fn more_than_can_be_addressed_is_an_error() {
        let mut allocator = BlockAllocator::default();
        for tokens in [usize::MAX, u32::MAX as usize + 1] {
            let s = SequenceState::new(usize::MAX, 0);
            let missing = s.missing_blocks(tokens).unwrap();
            assert!(matches!(
                allocator.total_for(missing, missing),
                Err(ModelError::CacheTooLong { .. })
            ));
        }
        grown(&mut SequenceState::new(usize::MAX, 0), 300, &mut allocator);
        assert!(allocator.total_for(usize::MAX, usize::MAX).is_err());
        let mut s = SequenceState::new(100, 0);
        assert!(s.advance(usize::MAX).is_err());
    }

    #[test]
    fn two_sequences_never_share_a_block_and_give_them_back() {
        let mut allocator = BlockAllocator::default();
        let (mut a, mut b) = (SequenceState::new(1_000, 0), SequenceState::new(1_000, 1));
        for tokens in (1..=300).step_by(7) {
            grown(&mut a, tokens, &mut allocator);
            grown(&mut b, tokens, &mut allocator);
        }
        assert!(a.blocks().iter().all(|x| !b.blocks().contains(x)));
        a.release(&mut allocator);
        b.release(&mut allocator);
        assert_eq!(allocator.free(), allocator.total());
    }

    #[test]
    fn capacity_and_truncation_are_checked() {
        let mut allocator = BlockAllocator::default();
        let mut s = SequenceState::new(100, 0);
        assert!(matches!(
            s.missing_blocks(101),
            Err(ModelError::Capacity {
                capacity: 100,
                needed: 101
            })
        ));
        grown(&mut s, 100, &mut allocator);
        s.advance(80).unwrap();
        let here = s.checkpoint();
        s.advance(10).unwrap();
        s.restore(&here).unwrap();
        assert_eq!(s.len(), 80);
        assert!(matches!(s.truncate(81), Err(ModelError::Truncate { .. })));
        s.truncate(3).unwrap();
        assert!(
            s.restore(&here).is_err(),
            "a checkpoint past the end is gone"
        );
    }
}
