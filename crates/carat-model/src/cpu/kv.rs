//! Keys and values of one layer, in blocks of [`BLOCK_TOKENS`] positions.

use carat_kernels::{
    Isa,
    attention::{KvFormat, KvLayout, KvView, KvViewMut, kv_read, kv_write},
};

use crate::{BLOCK_TOKENS, ModelError};

pub(super) struct KvStore {
    pub(super) layout: KvLayout,
    data: Data,
}

/// Keys `[block][kv_head][head_dim][position]` and values
/// `[block][kv_head][position][head_dim]`.
enum Data {
    F16([Vec<u16>; 2]),
    F32([Vec<f32>; 2]),
}

impl KvStore {
    pub(super) fn new(format: KvFormat, kv_heads: usize, head_dim: usize) -> Self {
        KvStore {
            layout: KvLayout { kv_heads, head_dim },
            data: match format {
                KvFormat::F16 => Data::F16(Default::default()),
                KvFormat::F32 => Data::F32(Default::default()),
            },
        }
    }

    pub(super) fn view(&self) -> KvView<'_> {
        match &self.data {
            Data::F16([keys, values]) => KvView::F16 { keys, values },
            Data::F32([keys, values]) => KvView::F32 { keys, values },
        }
    }

    fn view_mut(&mut self) -> KvViewMut<'_> {
        match &mut self.data {
            Data::F16([keys, values]) => KvViewMut::F16 { keys, values },
            Data::F32([keys, values]) => KvViewMut::F32 { keys, values },
        }
    }

    fn width(&self) -> usize {
        self.layout.kv_heads * self.layout.head_dim
    }

    pub(super) fn grow(&mut self, blocks: usize) -> Result<(), ModelError> {
        fn grow<E: Copy + Default>(
            stores: &mut [Vec<E>; 2],
            blocks: usize,
            block_elements: usize,
        ) -> Result<(), ModelError> {
            let elements = blocks.saturating_mul(block_elements);
            for store in stores {
                let more = elements.saturating_sub(store.len());
                store
                    .try_reserve_exact(more)
                    .map_err(|_| ModelError::OutOfMemory {
                        bytes: elements.saturating_mul(size_of::<E>()),
                        tokens: blocks.saturating_mul(BLOCK_TOKENS),
                    })?;
                store.resize(elements.max(store.len()), E::default());
            }
            Ok(())
        }
        let block_elements = self.layout.block_elements();
        match &mut self.data {
            Data::F16(stores) => grow(stores, blocks, block_elements),
            Data::F32(stores) => grow(stores, blocks, block_elements),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match &self.data {
            Data::F16([k, v]) => (k.capacity() + v.capacity()) * KvFormat::F16.bytes(),
            Data::F32([k, v]) => (k.capacity() + v.capacity()) * KvFormat::F32.bytes(),
        }
    }

    /// Blocks there is room for.
    fn blocks(&self) -> usize {
        let elements = match &self.data {
            Data::F16([keys, _]) => keys.len(),
            Data::F32([keys, _]) => keys.len(),
        };
        elements / self.layout.block_elements()
    }

    pub(super) fn write(&mut self, isa: Isa, slot: u32, key: &[f32], value: &[f32]) {
        let slot = slot as usize;
        let place = (slot / BLOCK_TOKENS, slot % BLOCK_TOKENS);
        kv_write(isa, self.layout, self.view_mut(), place, key, value);
    }

    /// Block and offset of each position, checked.
    fn places(
        &self,
        blocks: &[u32],
        positions: std::ops::Range<usize>,
    ) -> Result<Vec<(usize, usize)>, ModelError> {
        let there = self.blocks();
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
        for (place, (key, value)) in places.into_iter().zip(
            keys.chunks_exact_mut(width)
                .zip(values.chunks_exact_mut(width)),
        ) {
            kv_read(self.layout, self.view(), place, key, value);
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
        for (place, (key, value)) in places
            .into_iter()
            .zip(keys.chunks_exact(width).zip(values.chunks_exact(width)))
        {
            kv_write(isa, self.layout, self.view_mut(), place, key, value);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_allocated_is_an_error() {
        let mut store = KvStore::new(KvFormat::F16, 2, 64);
        for blocks in [usize::MAX, usize::MAX / 2, 1 << 57] {
            assert!(matches!(
                store.grow(blocks),
                Err(ModelError::OutOfMemory { .. })
            ));
        }
        assert_eq!(store.bytes(), 0);
    }
}
