//! Sines and cosines of the batch's rows.

use carat_bundle::spec::{ModelSpec, RopeScaling};

use crate::Batch;

/// Per rope of the spec: `[M, rotary_dim / 2]` cosines and sines.
pub(super) struct RopeTables {
    pub(super) rows: Vec<RopeRows>,
    /// Per rope, frequencies of the short and of the long factor set.
    frequencies: Vec<[Vec<f32>; 2]>,
}

#[derive(Default)]
pub(super) struct RopeRows {
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

impl RopeTables {
    pub(super) fn new(spec: &ModelSpec) -> Self {
        RopeTables {
            rows: spec.ropes.iter().map(|_| RopeRows::default()).collect(),
            frequencies: spec
                .ropes
                .iter()
                .map(|rope| [rope.inv_freq(1), rope.inv_freq(usize::MAX)])
                .collect(),
        }
    }

    /// Fills the rows of a batch. Angles are fp32 products of position and
    /// frequency, as the reference implementations compute them.
    pub(super) fn prepare(&mut self, spec: &ModelSpec, batch: &Batch<'_>) {
        for ((rows, sets), rope) in self.rows.iter_mut().zip(&self.frequencies).zip(&spec.ropes) {
            let pairs = rope.rotary_dim / 2;
            rows.cos.resize(batch.len() * pairs, 0.0);
            rows.sin.resize(batch.len() * pairs, 0.0);
            let factor = rope.attention_factor();
            for (b, sequence) in batch.sequences.iter().enumerate() {
                let long = match &rope.scaling {
                    RopeScaling::LongRope {
                        original_max_context,
                        ..
                    } => sequence.capacity > *original_max_context,
                    _ => false,
                };
                let frequencies = &sets[usize::from(long)];
                for row in batch.rows_of(b) {
                    let position = batch.positions[row] as f32;
                    let at = row * pairs;
                    for (i, f) in frequencies.iter().enumerate() {
                        let (sin, cos) = (position * f).sin_cos();
                        rows.cos[at + i] = cos * factor;
                        rows.sin[at + i] = sin * factor;
                    }
                }
            }
        }
    }
}
