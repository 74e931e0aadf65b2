//! The walk over a model's layers.

use std::ops::Range;

use carat_bundle::spec::FfnSpec;

use crate::attention::{self, KvCache, Queries};
use crate::norm::rms_norm;
use crate::oracle::Oracle;
use crate::rope::RopeTable;
use crate::taps::{NoTaps, Tap, TapPoint, Taps};
use crate::weights::{self, LayerWeights};
use crate::{OracleError, ffn};

/// Rows that go through a layer together: bounds the memory of activations.
pub(crate) const ROWS_PER_CHUNK: usize = 2048;

/// Logits computed at a time (256 MiB).
pub(crate) const LOGITS_PER_CHUNK: usize = 1 << 26;

/// Which rows of a sequence get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows<'r> {
    /// Every row.
    All,
    /// The last row.
    Last,
    /// These rows, in this order: indices into the ids of the request.
    Some(&'r [usize]),
    /// As `Some`, but other rows of each sequence; one without an entry has none.
    Each(&'r [Vec<usize>]),
}

impl Rows<'_> {
    /// Row indices for the request's sequence `sequence` of `len` ids.
    pub(crate) fn of(self, sequence: usize, len: usize) -> Result<Vec<usize>, OracleError> {
        let rows = match self {
            Rows::All => return Ok((0..len).collect()),
            Rows::Last => return Ok(vec![len - 1]),
            Rows::Some(rows) => rows,
            Rows::Each(rows) => rows.get(sequence).map_or(&[][..], Vec::as_slice),
        };
        match rows.iter().find(|&&row| row >= len) {
            Some(&row) => Err(OracleError::RowRange {
                sequence,
                row,
                rows: len,
            }),
            None => Ok(rows.to_vec()),
        }
    }
}

/// Logits of some rows of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// Which rows: indices into the ids of the request.
    pub rows: Vec<usize>,
    /// Logits per row: the true vocabulary size.
    pub vocab: usize,
    /// `[rows, vocab]`
    pub data: Vec<f32>,
}

impl Logits {
    /// Logits of the `index`-th of [`rows`](Logits::rows).
    ///
    /// # Panics
    ///
    /// If there are not so many rows.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.data[index * self.vocab..(index + 1) * self.vocab]
    }
}

/// Logits of one row, as a pass hands them out.
#[derive(Clone, Copy, Debug)]
pub struct LogitRow<'l> {
    /// Index of the sequence in the request.
    pub sequence: usize,
    /// Index of the row in the sequence's ids of the request.
    pub row: usize,
    /// One logit per token of the true vocabulary.
    pub logits: &'l [f32],
}

/// Token ids that join a sequence.
#[derive(Clone, Copy)]
pub(crate) struct Input<'i> {
    /// Position of the first.
    pub(crate) position: usize,
    pub(crate) ids: &'i [u32],
}

/// Where keys and values live during a pass.
pub(crate) enum Caches<'c> {
    /// One layer's at a time, for sequences that begin in this pass.
    Passing,
    /// In `[sequence][layer]`, holding each sequence's earlier positions.
    Kept(&'c mut [Vec<KvCache>]),
}

/// Rows of one sequence within a chunk of the pass.
pub(crate) struct Segment {
    /// Index of the sequence in the request.
    sequence: usize,
    /// Index of the first row in the sequence's ids of the request.
    first_row: usize,
    /// Position of the first row.
    position: usize,
    /// Rows of the pass.
    rows: Range<usize>,
}

impl Oracle<'_> {
    /// Logits of whole sequences, all in one pass: each layer's weights are
    /// decoded once and shared. One [`Logits`] per sequence, in order.
    ///
    /// # Errors
    ///
    /// If a sequence is empty, longer than the capacity or holds an id outside
    /// the vocabulary, if a row is out of range, or if weights cannot be read.
    pub fn forward(&self, sequences: &[&[u32]], rows: Rows) -> Result<Vec<Logits>, OracleError> {
        let inputs: Vec<_> = sequences
            .iter()
            .map(|ids| Input { position: 0, ids })
            .collect();
        let rows = self.check(&inputs, rows)?;
        self.collect(&inputs, Caches::Passing, rows, &mut NoTaps)
    }

    /// [`forward`](Oracle::forward) that hands activations to `taps` and each row
    /// of logits to `each` (sequences in order, rows in the order asked for)
    /// instead of keeping them; an error of `each` ends the pass.
    ///
    /// # Errors
    ///
    /// Those of [`forward`](Oracle::forward) and of `each`.
    pub fn forward_with(
        &self,
        sequences: &[&[u32]],
        rows: Rows,
        taps: &mut dyn Taps,
        each: &mut dyn FnMut(LogitRow<'_>) -> Result<(), OracleError>,
    ) -> Result<(), OracleError> {
        let inputs: Vec<_> = sequences
            .iter()
            .map(|ids| Input { position: 0, ids })
            .collect();
        let rows = self.check(&inputs, rows)?;
        self.pass(&inputs, Caches::Passing, &rows, taps, each)
    }

    /// [`forward_with`](Oracle::forward_with) from a layer on: `residual` is the
    /// residual stream before layer `first`, `[rows of all sequences, hidden_size]`, as
    /// [`TapPoint::Residual`]`(first - 1)` (or [`TapPoint::Embedding`]) gives it.
    ///
    /// # Errors
    ///
    /// Those of [`forward_with`](Oracle::forward_with).
    ///
    /// # Panics
    ///
    /// If there is no such layer, or `residual` has another length.
    pub fn resume_with(
        &self,
        (first, residual): (usize, &[f32]),
        sequences: &[&[u32]],
        rows: Rows,
        each: &mut dyn FnMut(LogitRow<'_>) -> Result<(), OracleError>,
    ) -> Result<(), OracleError> {
        let inputs: Vec<_> = sequences
            .iter()
            .map(|ids| Input { position: 0, ids })
            .collect();
        let rows = self.check(&inputs, rows)?;
        let tokens: usize = sequences.iter().map(|ids| ids.len()).sum();
        assert!(first <= self.spec.layers.len(), "no layer {first}");
        assert_eq!(residual.len(), tokens * self.spec.hidden_size);
        let mut x = residual.to_vec();
        self.layers(first, &inputs, Caches::Passing, &mut x, &mut NoTaps)?;
        self.logits(&inputs, &x, &rows, each)
    }

    /// Refuses inputs that are no sequences of this model; the rows to compute
    /// for each otherwise.
    pub(crate) fn check(
        &self,
        inputs: &[Input<'_>],
        rows: Rows,
    ) -> Result<Vec<Vec<usize>>, OracleError> {
        let vocab_size = self.spec.vocab_size;
        let check = |(sequence, input): (usize, &Input<'_>)| {
            if input.ids.is_empty() {
                return Err(OracleError::Empty { sequence });
            }
            let tokens = input.position.saturating_add(input.ids.len());
            if tokens > self.capacity {
                return Err(OracleError::TooLong {
                    sequence,
                    tokens,
                    capacity: self.capacity,
                });
            }
            let outside = |&(_, &id): &(usize, &u32)| id as usize >= vocab_size;
            if let Some((position, &id)) = input.ids.iter().enumerate().find(outside) {
                return Err(OracleError::TokenRange {
                    sequence,
                    position,
                    id,
                    vocab_size,
                });
            }
            rows.of(sequence, input.ids.len())
        };
        inputs.iter().enumerate().map(check).collect()
    }

    /// [`pass`](Oracle::pass) that keeps the logits.
    pub(crate) fn collect(
        &self,
        inputs: &[Input<'_>],
        caches: Caches<'_>,
        rows: Vec<Vec<usize>>,
        taps: &mut dyn Taps,
    ) -> Result<Vec<Logits>, OracleError> {
        let vocab = self.spec.vocab_size;
        let mut out: Vec<Vec<f32>> = vec![Vec::new(); inputs.len()];
        self.pass(inputs, caches, &rows, taps, &mut |row| {
            out[row.sequence].extend_from_slice(row.logits);
            Ok(())
        })?;
        Ok(rows
            .into_iter()
            .zip(out)
            .map(|(rows, data)| Logits { rows, vocab, data })
            .collect())
    }

    /// Runs checked inputs through the model. `rows[sequence]` get logits.
    pub(crate) fn pass(
        &self,
        inputs: &[Input<'_>],
        caches: Caches<'_>,
        rows: &[Vec<usize>],
        taps: &mut dyn Taps,
        each: &mut dyn FnMut(LogitRow<'_>) -> Result<(), OracleError>,
    ) -> Result<(), OracleError> {
        let hidden = self.spec.hidden_size;
        let ids: Vec<u32> = inputs.iter().flat_map(|i| i.ids).copied().collect();
        let mut x = self.embed(&ids)?;
        for chunk in &chunks(inputs) {
            offer(taps, TapPoint::Embedding, chunk, &x[span(chunk, hidden)]);
        }
        self.layers(0, inputs, caches, &mut x, taps)?;
        self.logits(inputs, &x, rows, each)
    }

    /// The residual stream `x` of a pass from before layer `first` to behind the last.
    fn layers(
        &self,
        first: usize,
        inputs: &[Input<'_>],
        mut caches: Caches<'_>,
        x: &mut [f32],
        taps: &mut dyn Taps,
    ) -> Result<(), OracleError> {
        let chunks = chunks(inputs);
        let ropes = self.rope_tables(inputs);
        for index in first..self.spec.layers.len() {
            let weights = self.layer(index)?;
            let mut passing = Vec::new();
            let mut caches: Vec<&mut KvCache> = match &mut caches {
                Caches::Passing => {
                    passing.resize_with(inputs.len(), KvCache::default);
                    passing.iter_mut().collect()
                }
                Caches::Kept(kept) => kept.iter_mut().map(|layers| &mut layers[index]).collect(),
            };
            self.one_layer(index, &weights, &ropes, &chunks, &mut caches, x, taps);
        }
        self.final_hidden(&chunks, x, taps);
        Ok(())
    }

    /// Layer `index` on all rows of a pass.
    #[allow(clippy::too_many_arguments)] // what a pass is made of, for its two callers
    pub(crate) fn one_layer(
        &self,
        index: usize,
        weights: &LayerWeights<'_>,
        ropes: &[RopeTable],
        chunks: &[Vec<Segment>],
        caches: &mut [&mut KvCache],
        x: &mut [f32],
        taps: &mut dyn Taps,
    ) {
        for chunk in chunks {
            let x = &mut x[span(chunk, self.spec.hidden_size)];
            self.mixer(index, weights, ropes, chunk, caches, x, taps);
            self.feed_forward(index, weights, chunk, x, taps);
            offer(taps, TapPoint::Residual(index), chunk, x);
        }
    }

    /// Hands out what the head sees.
    pub(crate) fn final_hidden(&self, chunks: &[Vec<Segment>], x: &[f32], taps: &mut dyn Taps) {
        if taps.wants(TapPoint::FinalHidden) {
            for chunk in chunks {
                let mut y = x[span(chunk, self.spec.hidden_size)].to_vec();
                rms_norm(&self.spec.final_norm, &self.final_norm, &mut y);
                offer(taps, TapPoint::FinalHidden, chunk, &y);
            }
        }
    }

    /// Tables of the ropes that layers use, by index, for all rows of the pass.
    pub(crate) fn rope_tables(&self, inputs: &[Input<'_>]) -> Vec<RopeTable> {
        let positions: Vec<usize> = inputs
            .iter()
            .flat_map(|i| i.position..i.position + i.ids.len())
            .collect();
        self.spec
            .ropes
            .iter()
            .zip(&self.inv_freq)
            .map(|(spec, inv_freq)| RopeTable::new(spec, inv_freq, positions.iter().copied()))
            .collect()
    }

    /// `x += residual_scale * mixer(norm(x))` on one chunk, `[rows, hidden]`.
    #[allow(clippy::too_many_arguments)] // one call, from the loop above
    fn mixer(
        &self,
        index: usize,
        weights: &LayerWeights<'_>,
        ropes: &[RopeTable],
        chunk: &[Segment],
        caches: &mut [&mut KvCache],
        x: &mut [f32],
        taps: &mut dyn Taps,
    ) {
        let layer = &self.spec.layers[index];
        let spec = weights::attention(layer);
        let (threads, w) = (self.loader.threads, &weights.attention);
        let (width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);

        let mut y = x.to_vec();
        rms_norm(&layer.mixer_norm, &weights.mixer_norm, &mut y);
        offer(taps, TapPoint::MixerInput(index), chunk, &y);
        let mut q = w.q.apply(threads, &y);
        let mut k = w.k.apply(threads, &y);
        let v = w.v.apply(threads, &y);
        if let (Some(norm), Some(q_norm), Some(k_norm)) = (&spec.qk_norm, &w.q_norm, &w.k_norm) {
            rms_norm(norm, q_norm, &mut q);
            rms_norm(norm, k_norm, &mut k);
        }
        let start = chunk.first().map_or(0, |s| s.rows.start);
        if let Some(rope) = spec.rope {
            ropes[rope].rotate(start, spec.heads, spec.head_dim, &mut q);
            ropes[rope].rotate(start, spec.kv_heads, spec.head_dim, &mut k);
        }
        let mut v = v;
        self.cache.round(&mut k);
        self.cache.round(&mut v);
        for segment in chunk {
            let rows =
                (segment.rows.start - start) * kv_width..(segment.rows.end - start) * kv_width;
            let cache = &mut *caches[segment.sequence];
            debug_assert_eq!(cache.keys.len(), segment.position * kv_width);
            cache.keys.extend_from_slice(&k[rows.clone()]);
            cache.values.extend_from_slice(&v[rows]);
        }

        let mut mixed = vec![0.0; q.len()];
        let mut batch = Vec::with_capacity(chunk.len());
        let (mut q_rest, mut out_rest) = (q.as_slice(), mixed.as_mut_slice());
        for segment in chunk {
            let len = segment.rows.len() * width;
            let (q, q_after) = q_rest.split_at(len);
            let (out, out_after) = out_rest.split_at_mut(len);
            (q_rest, out_rest) = (q_after, out_after);
            let cache = &*caches[segment.sequence];
            batch.push(Queries {
                position: segment.position,
                cache,
                q,
                out,
            });
        }
        attention::attend(spec, threads, batch);
        offer(taps, TapPoint::MixerInner(index), chunk, &mixed);

        let mut y = w.o.apply(threads, &mixed);
        if let (Some(norm), Some(gain)) = (&layer.post_mixer_norm, &weights.post_mixer_norm) {
            rms_norm(norm, gain, &mut y);
        }
        add_scaled(x, layer.residual_scale, &y);
    }

    /// `x += residual_scale * ffn(norm(x))` on one chunk, `[rows, hidden]`.
    fn feed_forward(
        &self,
        index: usize,
        weights: &LayerWeights<'_>,
        chunk: &[Segment],
        x: &mut [f32],
        taps: &mut dyn Taps,
    ) {
        let layer = &self.spec.layers[index];
        let FfnSpec::Gated { activation, .. } = layer.ffn;
        let threads = self.loader.threads;
        let mut y = x.to_vec();
        rms_norm(&layer.ffn_norm, &weights.ffn_norm, &mut y);
        offer(taps, TapPoint::FfnInput(index), chunk, &y);
        let inner = ffn::inner(&weights.ffn, activation, threads, &y);
        offer(taps, TapPoint::FfnInner(index), chunk, &inner);
        let mut y = weights.ffn.down.apply(threads, &inner);
        if let (Some(norm), Some(gain)) = (&layer.post_ffn_norm, &weights.post_ffn_norm) {
            rms_norm(norm, gain, &mut y);
        }
        add_scaled(x, layer.residual_scale, &y);
    }

    /// Logits of `rows[sequence]` from the residual stream of the whole pass.
    fn logits(
        &self,
        inputs: &[Input<'_>],
        x: &[f32],
        rows: &[Vec<usize>],
        each: &mut dyn FnMut(LogitRow<'_>) -> Result<(), OracleError>,
    ) -> Result<(), OracleError> {
        let (hidden, vocab) = (self.spec.hidden_size, self.spec.vocab_size);
        let mut wanted = Vec::new(); // (sequence, row of the sequence, row of the pass)
        let mut first = 0;
        for (sequence, (input, rows)) in inputs.iter().zip(rows).enumerate() {
            wanted.extend(rows.iter().map(|&row| (sequence, row, first + row)));
            first += input.ids.len();
        }
        for wanted in wanted.chunks((LOGITS_PER_CHUNK / vocab).max(1)) {
            let mut y = Vec::with_capacity(wanted.len() * hidden);
            for &(_, _, row) in wanted {
                y.extend_from_slice(&x[row * hidden..(row + 1) * hidden]);
            }
            rms_norm(&self.spec.final_norm, &self.final_norm, &mut y);
            let logits = self.head(&y)?;
            for (&(sequence, row, _), logits) in wanted.iter().zip(logits.chunks_exact(vocab)) {
                each(LogitRow {
                    sequence,
                    row,
                    logits,
                })?;
            }
        }
        Ok(())
    }
}

/// Cuts the rows of a pass into chunks of at most [`ROWS_PER_CHUNK`].
pub(crate) fn chunks(inputs: &[Input<'_>]) -> Vec<Vec<Segment>> {
    let mut chunks = Vec::new();
    let mut chunk: Vec<Segment> = Vec::new();
    let (mut row, mut room) = (0, ROWS_PER_CHUNK);
    for (sequence, input) in inputs.iter().enumerate() {
        let mut first_row = 0;
        while first_row < input.ids.len() {
            let len = room.min(input.ids.len() - first_row);
            let position = input.position + first_row;
            chunk.push(Segment {
                sequence,
                first_row,
                position,
                rows: row..row + len,
            });
            first_row += len;
            row += len;
            room -= len;
            if room == 0 {
                chunks.push(std::mem::take(&mut chunk));
                room = ROWS_PER_CHUNK;
            }
        }
    }
    if !chunk.is_empty() {
        chunks.push(chunk);
    }
    chunks
}

/// A chunk's part of a pass's `[rows, width]`.
fn span(chunk: &[Segment], width: usize) -> Range<usize> {
    match (chunk.first(), chunk.last()) {
        (Some(first), Some(last)) => first.rows.start * width..last.rows.end * width,
        _ => 0..0,
    }
}

/// Hands a chunk's `[rows, width]` to the taps that want it.
fn offer(taps: &mut dyn Taps, point: TapPoint, chunk: &[Segment], data: &[f32]) {
    if !taps.wants(point) {
        return;
    }
    let width = data.len() / span(chunk, 1).len().max(1);
    let mut rest = data;
    for segment in chunk {
        let (data, after) = rest.split_at(segment.rows.len() * width);
        rest = after;
        let (sequence, first_row) = (segment.sequence, segment.first_row);
        taps.take(Tap {
            point,
            sequence,
            first_row,
            width,
            data,
        });
    }
}

/// `x += scale * y`
fn add_scaled(x: &mut [f32], scale: f32, y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += scale * y;
    }
}
