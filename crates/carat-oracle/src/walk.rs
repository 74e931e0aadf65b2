//! A pass that its caller takes layer by layer: what calibration needs, which wants
//! a layer's activations, changes the layer, and goes on from the changed one.

use carat_bundle::source::TensorSource;

use crate::attention::KvCache;
use crate::forward::{Input, Segment, chunks};
use crate::rope::RopeTable;
use crate::weights::Loader;
use crate::{NoTaps, Oracle, OracleError, Rows, Taps};

/// Sequences on their way through an oracle's layers. Memory is the residual stream
/// of all of them and what one layer takes.
pub struct Walk<'o> {
    oracle: &'o Oracle<'o>,
    sequences: usize,
    chunks: Vec<Vec<Segment>>,
    ropes: Vec<RopeTable>,
    /// `[tokens, hidden_size]`
    x: Vec<f32>,
    layer: usize,
}

impl<'o> Walk<'o> {
    /// Whole sequences, embedded and before the first layer.
    ///
    /// # Errors
    ///
    /// Those of [`Oracle::forward`].
    pub fn new(oracle: &'o Oracle<'o>, sequences: &[&[u32]]) -> Result<Walk<'o>, OracleError> {
        let inputs: Vec<_> = sequences
            .iter()
            .map(|ids| Input { position: 0, ids })
            .collect();
        oracle.check(&inputs, Rows::Some(&[]))?;
        let ids: Vec<u32> = sequences
            .iter()
            .flat_map(|ids| ids.iter().copied())
            .collect();
        Ok(Walk {
            oracle,
            sequences: sequences.len(),
            chunks: chunks(&inputs),
            ropes: oracle.rope_tables(&inputs),
            x: oracle.embed(&ids)?,
            layer: 0,
        })
    }

    /// The layer that comes next; the number of layers at the end.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.x.len() / self.oracle.spec.hidden_size
    }

    /// Hands the activations of the next layer to `taps`, or at the end what the head
    /// sees, and stays before it.
    ///
    /// # Errors
    ///
    /// If weights cannot be read.
    pub fn observe(&self, taps: &mut dyn Taps) -> Result<(), OracleError> {
        if self.layer == self.oracle.spec.layers.len() {
            self.oracle.final_hidden(&self.chunks, &self.x, taps);
            return Ok(());
        }
        let mut x = self.x.clone();
        let weights = self.oracle.layer(self.layer)?;
        self.run(&weights, &mut x, taps);
        Ok(())
    }

    /// Goes through the next layer with its weights as `source` has them. Nothing
    /// happens at the end.
    ///
    /// # Errors
    ///
    /// If weights cannot be read or have another shape.
    pub fn advance(&mut self, source: &dyn TensorSource) -> Result<(), OracleError> {
        if self.layer == self.oracle.spec.layers.len() {
            return Ok(());
        }
        let loader = Loader {
            source,
            ..self.oracle.loader
        };
        let weights = loader.layer(self.oracle.spec, self.layer, false)?;
        let mut x = std::mem::take(&mut self.x);
        self.run(&weights, &mut x, &mut NoTaps);
        self.x = x;
        self.layer += 1;
        Ok(())
    }

    fn run(&self, weights: &crate::weights::LayerWeights<'_>, x: &mut [f32], taps: &mut dyn Taps) {
        let mut caches: Vec<KvCache> = Vec::new();
        caches.resize_with(self.sequences, KvCache::default);
        let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
        let (layer, ropes, chunks) = (self.layer, &self.ropes, &self.chunks);
        self.oracle
            .one_layer(layer, weights, ropes, chunks, &mut caches, x, taps);
    }
}
