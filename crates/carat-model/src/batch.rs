//! The inputs of one step.

use crate::{ModelError, state::BLOCK_TOKENS};

/// One sequence's share of a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct BatchSequence<'a> {
    /// First row of the sequence in the batch; its rows end where the next
    /// sequence's begin.
    pub start: usize,
    /// KV blocks in order: position `p` lives in `blocks[p / BLOCK_TOKENS]`.
    pub blocks: &'a [u32],
    /// Tokens the sequence was opened for: decides the rotary factor set.
    pub capacity: usize,
    /// Slot of the sequence's fixed-size states.
    pub state_slot: u32,
}

/// M rows of B sequences.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// `[M]` ids.
    pub token_ids: &'a [u32],
    /// `[M]` absolute positions.
    pub positions: &'a [u32],
    /// `[M]` where each row's key and value go: `block * BLOCK_TOKENS + offset`.
    pub slot_mapping: &'a [u32],
    /// `[B]` sequences, by ascending start; the first starts at row 0.
    pub sequences: &'a [BatchSequence<'a>],
    /// `[R]` rows whose logits are wanted.
    pub logit_rows: &'a [u32],
}

impl Batch<'_> {
    /// Rows.
    pub fn len(&self) -> usize {
        self.token_ids.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.token_ids.is_empty()
    }

    /// Rows of sequence `b`.
    pub fn rows_of(&self, b: usize) -> std::ops::Range<usize> {
        let end = self.sequences.get(b + 1).map_or(self.len(), |s| s.start);
        self.sequences[b].start..end
    }

    /// Checks every index that a kernel will follow, that the rows of a sequence
    /// have consecutive positions, and that what is written belongs to one
    /// sequence alone (blocks that are only read may be shared). Whether the
    /// positions before a sequence's first row were ever written is not to be seen
    /// from a batch: that is for the caller to keep, as
    /// [`SequenceState`](crate::SequenceState) does.
    ///
    /// # Errors
    /// [`ModelError`] names the row or sequence at fault.
    pub fn validate(&self, vocab: usize, kv_blocks: usize) -> Result<(), ModelError> {
        let m = self.len();
        let wrong = |what: String| Err(ModelError::Batch(what));
        if m == 0 {
            return wrong("has no rows".into());
        }
        if self.positions.len() != m || self.slot_mapping.len() != m {
            return wrong(format!(
                "{m} ids, {} positions and {} slots",
                self.positions.len(),
                self.slot_mapping.len()
            ));
        }
        if self.sequences.first().is_none_or(|s| s.start != 0) {
            return wrong("the first sequence does not start at row 0".into());
        }
        if let Some((row, &id)) = self
            .token_ids
            .iter()
            .enumerate()
            .find(|(_, id)| **id as usize >= vocab)
        {
            return Err(ModelError::TokenOutOfRange { id, row, vocab });
        }
        if let Some(r) = self.logit_rows.iter().find(|r| **r as usize >= m) {
            return wrong(format!("logit row {r} of {m} rows"));
        }
        let mut written: Vec<u32> = Vec::with_capacity(m / BLOCK_TOKENS + self.sequences.len());
        for (b, sequence) in self.sequences.iter().enumerate() {
            let rows = self.rows_of(b);
            if rows.is_empty() || rows.end > m {
                return wrong(format!("sequence {b} has rows {rows:?} of {m}"));
            }
            if let Some(block) = sequence.blocks.iter().find(|x| **x as usize >= kv_blocks) {
                return wrong(format!("sequence {b} names block {block} of {kv_blocks}"));
            }
            for row in rows.clone() {
                let position = self.positions[row] as usize;
                if position >= sequence.capacity {
                    return Err(ModelError::Capacity {
                        capacity: sequence.capacity,
                        needed: position + 1,
                    });
                }
                let slot = sequence
                    .blocks
                    .get(position / BLOCK_TOKENS)
                    .map(|block| *block as usize * BLOCK_TOKENS + position % BLOCK_TOKENS);
                if slot != Some(self.slot_mapping[row] as usize) {
                    return wrong(format!(
                        "row {row} at position {position} has slot {}, expected {slot:?}",
                        self.slot_mapping[row]
                    ));
                }
                if row > rows.start && position != self.positions[row - 1] as usize + 1 {
                    return wrong(format!(
                        "row {row} at position {position} follows position {}",
                        self.positions[row - 1]
                    ));
                }
                let block = self.slot_mapping[row] / BLOCK_TOKENS as u32;
                if written.last() != Some(&block) {
                    written.push(block);
                }
            }
        }
        written.sort_unstable();
        written.dedup();
        let mut named = vec![false; written.len()];
        for (b, sequence) in self.sequences.iter().enumerate() {
            for block in sequence.blocks {
                let Ok(at) = written.binary_search(block) else {
                    continue;
                };
                if std::mem::replace(&mut named[at], true) {
                    return wrong(format!(
                        "sequence {b} names block {block}, which is written at another place"
                    ));
                }
            }
        }
        Ok(())
    }
}
