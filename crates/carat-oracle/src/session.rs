//! Sequences that grow.

use std::collections::BTreeMap;

use crate::OracleError;
use crate::attention::KvCache;
use crate::forward::{Caches, Input, LogitRow, Logits, Rows};
use crate::oracle::Oracle;
use crate::taps::{NoTaps, Taps};
use crate::weights::attention;

/// A sequence of a [`Session`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

/// Sequences whose keys and values are kept, so that each can be extended.
/// Extending token by token gives the same bits as a whole pass.
pub struct Session<'o, 'a> {
    oracle: &'o Oracle<'a>,
    sequences: BTreeMap<SequenceId, State>,
    opened: u64,
}

#[derive(Default)]
struct State {
    tokens: usize,
    /// One per layer.
    caches: Vec<KvCache>,
}

/// Keys and values of one sequence in one layer.
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'s> {
    /// Positions held.
    pub tokens: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// `[tokens, kv_heads, head_dim]`, rotated.
    pub keys: &'s [f32],
    /// `[tokens, kv_heads, head_dim]`
    pub values: &'s [f32],
}

impl<'a> Oracle<'a> {
    /// A session without sequences.
    pub fn session(&self) -> Session<'_, 'a> {
        Session {
            oracle: self,
            sequences: BTreeMap::new(),
            opened: 0,
        }
    }
}

impl Session<'_, '_> {
    /// Begins a sequence.
    pub fn open(&mut self) -> SequenceId {
        let id = SequenceId(self.opened);
        self.opened += 1;
        let caches = vec![KvCache::default(); self.oracle.spec.layers.len()];
        self.sequences.insert(id, State { tokens: 0, caches });
        id
    }

    /// Ends a sequence and frees its memory; false if it was not open.
    pub fn close(&mut self, id: SequenceId) -> bool {
        self.sequences.remove(&id).is_some()
    }

    /// Tokens of a sequence so far, `None` if it is not open.
    pub fn tokens(&self, id: SequenceId) -> Option<usize> {
        self.sequences.get(&id).map(|s| s.tokens)
    }

    /// Forgets all but the first `tokens` tokens of a sequence (nothing if it has
    /// no more than that).
    ///
    /// # Errors
    ///
    /// [`OracleError::UnknownSequence`].
    pub fn truncate(&mut self, id: SequenceId, tokens: usize) -> Result<(), OracleError> {
        let widths = self.kv_widths();
        let state = self
            .sequences
            .get_mut(&id)
            .ok_or(OracleError::UnknownSequence { id: id.0 })?;
        state.truncate(tokens, &widths);
        Ok(())
    }

    /// Keys and values of a sequence in a layer; `None` if there is none such.
    pub fn cache(&self, id: SequenceId, layer: usize) -> Option<CacheView<'_>> {
        let state = self.sequences.get(&id)?;
        let cache = state.caches.get(layer)?;
        let spec = attention(self.oracle.spec.layers.get(layer)?);
        Some(CacheView {
            tokens: state.tokens,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            keys: &cache.keys,
            values: &cache.values,
        })
    }

    /// Appends ids to sequences, all in one pass; logits of the rows asked for,
    /// one [`Logits`] per step, in order. Rows count from the step's first id.
    ///
    /// # Errors
    ///
    /// Those of [`Oracle::forward`]; [`OracleError::UnknownSequence`] and
    /// [`OracleError::RepeatedSequence`]. Sequences are then as before the call.
    pub fn extend(
        &mut self,
        steps: &[(SequenceId, &[u32])],
        rows: Rows,
    ) -> Result<Vec<Logits>, OracleError> {
        let vocab = self.oracle.spec.vocab_size;
        let mut out: Vec<Logits> = steps
            .iter()
            .map(|_| Logits {
                rows: Vec::new(),
                vocab,
                data: Vec::new(),
            })
            .collect();
        self.extend_with(steps, rows, &mut NoTaps, &mut |row| {
            let logits = &mut out[row.sequence];
            logits.rows.push(row.row);
            logits.data.extend_from_slice(row.logits);
            Ok(())
        })?;
        Ok(out)
    }

    /// [`extend`](Session::extend) that hands activations and logits out, as
    /// [`Oracle::forward_with`] does; `sequence` there is the index of the step.
    ///
    /// # Errors
    ///
    /// Those of [`extend`](Session::extend) and of `each`.
    pub fn extend_with(
        &mut self,
        steps: &[(SequenceId, &[u32])],
        rows: Rows,
        taps: &mut dyn Taps,
        each: &mut dyn FnMut(LogitRow<'_>) -> Result<(), OracleError>,
    ) -> Result<(), OracleError> {
        let mut inputs = Vec::with_capacity(steps.len());
        for (i, &(id, ids)) in steps.iter().enumerate() {
            let position = self
                .tokens(id)
                .ok_or(OracleError::UnknownSequence { id: id.0 })?;
            if steps[..i].iter().any(|(earlier, _)| *earlier == id) {
                return Err(OracleError::RepeatedSequence { id: id.0 });
            }
            inputs.push(Input { position, ids });
        }
        let rows = self.oracle.check(&inputs, rows)?;

        // The pass wants the caches side by side: they move out of the map for its duration.
        let mut caches: Vec<Vec<KvCache>> = steps
            .iter()
            .map(|(id, _)| match self.sequences.get_mut(id) {
                Some(state) => std::mem::take(&mut state.caches),
                None => Vec::new(),
            })
            .collect();
        let result = self
            .oracle
            .pass(&inputs, Caches::Kept(&mut caches), &rows, taps, each);
        let widths = self.kv_widths();
        for (((id, ids), caches), input) in steps.iter().zip(caches).zip(&inputs) {
            if let Some(state) = self.sequences.get_mut(id) {
                state.caches = caches;
                state.tokens = input.position + ids.len();
                if result.is_err() {
                    state.truncate(input.position, &widths);
                }
            }
        }
        result
    }

    /// Values per position of each layer's keys.
    fn kv_widths(&self) -> Vec<usize> {
        self.oracle.kv_widths()
    }
}

impl Oracle<'_> {
    /// Values per position of each layer's keys.
    pub(crate) fn kv_widths(&self) -> Vec<usize> {
        let specs = self.spec.layers.iter().map(attention);
        specs.map(|a| a.kv_heads * a.head_dim).collect()
    }
}

impl State {
    fn truncate(&mut self, tokens: usize, widths: &[usize]) {
        if tokens < self.tokens {
            self.tokens = tokens;
            for (cache, &width) in self.caches.iter_mut().zip(widths) {
                cache.truncate(tokens, width);
            }
        }
    }
}
