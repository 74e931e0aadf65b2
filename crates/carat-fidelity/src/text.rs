//! Statistics on real text.

use carat_engine::{Engine, EngineError, LogitRows};
use carat_oracle::{NoTaps, Oracle, Rows};

use crate::stats::Estimate;
use crate::transcript::TextMetrics;
use crate::verdict::MARGIN_FLOOR;
use crate::{FidelityError, row};

/// Divergence, agreement and perplexity of the engine on `ids`, against the oracle.
/// `None` where the engine's logits are not finite anywhere.
pub(crate) fn compare(
    oracle: &Oracle<'_>,
    engine: &mut Engine,
    ids: &[u32],
    capacity: usize,
) -> Result<Option<TextMetrics>, FidelityError> {
    let fed = &ids[..ids.len() - 1];
    let mut chunks = engine
        .schedule()
        .chunks(fed.len())
        .collect::<Vec<_>>()
        .into_iter();
    let vocab = engine.vocab_size();
    let mut sequence = engine.open(capacity)?;
    // Rows of the engine are computed as the oracle's come along.
    let mut rows: Vec<f32> = Vec::new();
    let mut first = 0;
    let mut failed: Option<EngineError> = None;
    let mut seen = Seen::default();
    oracle.forward_with(&[fed], Rows::All, &mut NoTaps, &mut |reference| {
        if failed.is_some() {
            return Ok(());
        }
        if (reference.row - first) * vocab >= rows.len()
            && let Some(chunk) = chunks.next()
        {
            first = chunk.start;
            match engine.step(&mut sequence, &fed[chunk], LogitRows::All) {
                Ok(logits) => rows = logits.to_vec(),
                Err(error) => failed = Some(error),
            }
        }
        let at = (reference.row - first) * vocab;
        if let Some(candidate) = rows.get(at..at + vocab) {
            seen.take(reference.logits, candidate, ids[reference.row + 1] as usize);
        }
        Ok(())
    })?;
    engine.close(sequence);
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(seen.metrics()),
    }
}

/// Samples per position.
#[derive(Default)]
struct Seen {
    kl: Vec<f64>,
    reference: Vec<f64>,
    candidate: Vec<f64>,
    agreed: usize,
    clear: usize,
    clear_flips: usize,
}

impl Seen {
    fn take(&mut self, reference: &[f32], candidate: &[f32], next: usize) {
        let (Some(p), Some(q)) = (row::log_softmax(reference), row::log_softmax(candidate)) else {
            return;
        };
        self.kl.push(row::kl(&p, &q));
        self.reference.push(-p[next]);
        self.candidate.push(-q[next]);
        let step = row::step_of(reference);
        let agrees = step.as_ref().map(|s| s.id) == row::argmax(candidate);
        self.agreed += usize::from(agrees);
        if step.is_some_and(|s| s.is_clear(MARGIN_FLOOR)) {
            self.clear += 1;
            self.clear_flips += usize::from(!agrees);
        }
    }

    fn metrics(&self) -> Option<TextMetrics> {
        let ratio: Vec<f64> = self
            .candidate
            .iter()
            .zip(&self.reference)
            .map(|(c, r)| c - r)
            .collect();
        Some(TextMetrics {
            positions: self.kl.len(),
            kl: Estimate::mean(&self.kl)?,
            kl_max: self.kl.iter().copied().fold(0.0, f64::max),
            top1: Estimate::share(self.agreed, self.kl.len())?,
            clear_flips: self.clear_flips,
            clear: self.clear,
            perplexity_reference: Estimate::mean(&self.reference)?.map(f64::exp),
            perplexity_candidate: Estimate::mean(&self.candidate)?.map(f64::exp),
            perplexity_ratio: Estimate::mean(&ratio)?.map(f64::exp),
        })
    }
}
