//! Keys and values of one layer, in blocks of [`BLOCK_TOKENS`] positions.

use carat_kernels::{
    Isa,
    attention::{KvLayout, kv_read, kv_write},
};

use crate::{BLOCK_TOKENS, ModelError};

pub(super) struct KvStore {
    pub(super) layout: KvLayout,
    /// `[block][kv_head][head_dim][position]` in fp16.
    pub(super) keys: Vec<u16>,
    /// `[block][kv_head][position][head_dim]` in fp16.
    pub(super) values: Vec<u16>,
}

impl KvStore {
    pub(super) fn new(kv_heads: usize, head_dim: usize) -> Self {
        KvStore {
            layout: KvLayout { kv_heads, head_dim },
            keys: Vec::new(),
            values: Vec::new(),
        }
    }

    fn width(&self) -> usize {
        self.layout.kv_heads * self.layout.head_dim
    }

    pub(super) fn grow(&mut self, blocks: usize) -> Result<(), ModelError> {
        let elements = blocks.saturating_mul(self.layout.block_elements());
        for store in [&mut self.keys, &mut self.values] {
            let more = elements.saturating_sub(store.len());
            store
                .try_reserve_exact(more)
                .map_err(|_| ModelError::OutOfMemory {
                    bytes: elements.saturating_mul(size_of::<u16>()),
                    tokens: blocks.saturating_mul(BLOCK_TOKENS),
                })?;
            store.resize(elements.max(store.len()), 0);
        }
        Ok(())
    }

    pub(super) fn bytes(&self) -> usize {
        (self.keys.capacity() + self.values.capacity()) * size_of::<u16>()
    }

    pub(super) fn write(&mut self, isa: Isa, slot: u32, key: &[f32], value: &[f32]) {
        let (block, offset) = (slot as usize / BLOCK_TOKENS, slot as usize % BLOCK_TOKENS);
        kv_write(
            isa,
            self.layout,
            &mut self.keys,
            &mut self.values,
            block,
            offset,
            key,
            value,
        );
    }

    /// Block and offset of each position, checked.
    fn places(
        &self,
        blocks: &[u32],
        positions: std::ops::Range<usize>,
    ) -> Result<Vec<(usize, usize)>, ModelError> {
        let there = self.keys.len() / self.layout.block_elements();
        positions
            .map(|p| match blocks.get(p / BLOCK_TOKENS) {
                Some(&block) if (block as usize) < there => Ok((block as usize, p % BLOCK_TOKENS)),
                _ => Err(ModelError::Batch(format!(
                    "position {p} is in no KV block of the sequence"
                ))),
            })
            .collect()
    }

    pub(super) fn export(
        &self,
        blocks: &[u32],
        positions: std::ops::Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>), ModelError> {
        let width = self.width();
        let places = self.places(blocks, positions)?;
        let mut keys = vec![0.0; places.len() * width];
        let mut values = keys.clone();
        for ((block, offset), (key, value)) in places.into_iter().zip(
            keys.chunks_exact_mut(width)
                .zip(values.chunks_exact_mut(width)),
        ) {
            kv_read(
                self.layout,
                &self.keys,
                &self.values,
                block,
                offset,
                key,
                value,
            );
        }
        Ok((keys, values))
    }

    pub(super) fn import(
        &mut self,
        blocks: &[u32],
        first: usize,
        keys: &[f32],
        values: &[f32],
        isa: Isa,
    ) -> Result<(), ModelError> {
        let width = self.width();
        if keys.len() != values.len() || !keys.len().is_multiple_of(width) {
            return Err(ModelError::Batch(format!(
                "{} key and {} value elements for rows of {width}",
                keys.len(),
                values.len()
            )));
        }
        let places = self.places(blocks, first..first + keys.len() / width)?;
        for ((block, offset), (key, value)) in places
            .into_iter()
            .zip(keys.chunks_exact(width).zip(values.chunks_exact(width)))
        {
            kv_write(
                isa,
                self.layout,
                &mut self.keys,
                &mut self.values,
                block,
                offset,
                key,
                value,
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_allocated_is_an_error() {
        let mut store = KvStore::new(2, 64);
        for blocks in [usize::MAX, usize::MAX / 2, 1 << 57] {
            assert!(matches!(
                store.grow(blocks),
                Err(ModelError::OutOfMemory { .. })
            ));
        }
        assert_eq!(store.bytes(), 0);
    }
}
