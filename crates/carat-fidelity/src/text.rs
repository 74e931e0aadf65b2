//! Statistics on real text.

use carat_engine::{Engine, EngineError, LogitRows};
use carat_oracle::{NoTaps, Oracle, Rows};

use crate::baseline::Place;
use crate::gate::FREE_FORM;
use crate::stats::Estimate;
use crate::transcript::{Check, Status, TextMetrics};
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
        if let (Some(place), Some(candidate)) =
            (Place::of(reference.logits), rows.get(at..at + vocab))
        {
            seen.take(&place, candidate, ids[reference.row + 1] as usize);
        }
        Ok(())
    })?;
    engine.close(sequence);
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(seen.metrics()),
    }
}

/// Most clear flips for each clear position of a text: one in [`FREE_FORM`], the length
/// of the shortest free-form answer that makes a verdict more than provisional. With
/// more, a candidate is expected to leave the reference's words within such an answer,
/// and one that did not was lucky.
const MOST_FLIPS: f64 = 1.0 / FREE_FORM as f64;

/// Whether a text speaks against the candidate: whether the share of clear flips is
/// beyond [`MOST_FLIPS`] with its whole 95 % interval. A few flips on words that nobody
/// would have said are within what rounding does, and are no evidence.
pub(crate) fn judge(metrics: &TextMetrics) -> Check {
    const NAME: &str = "text_flips";
    let (flips, clear) = (metrics.clear_flips, metrics.clear);
    let Some(share) = Estimate::share(flips, clear) else {
        return Check::new(NAME, Status::Skipped, "no position of the text is clear");
    };
    let percent = share.map(|v| 100.0 * v);
    let detail = format!(
        "{flips} of {clear} clear positions differ, {percent:.2} %; {:.0} % or less is no evidence",
        100.0 * MOST_FLIPS
    );
    Check::holds(NAME, share.low <= MOST_FLIPS, detail).value("share_low", share.low)
}

/// Samples per position.
#[derive(Default)]
pub(crate) struct Seen {
    kl: Vec<f64>,
    reference: Vec<f64>,
    candidate: Vec<f64>,
    agreed: usize,
    clear: usize,
    clear_flips: usize,
}

impl Seen {
    /// What was said where the reference says `place` and the text goes on with `next`.
    pub(crate) fn take(&mut self, place: &Place, candidate: &[f32], next: usize) {
        let clear = place.step.is_clear(MARGIN_FLOOR);
        let agrees = Some(place.step.id) == row::argmax(candidate);
        self.clear += usize::from(clear);
        self.clear_flips += usize::from(clear && !agrees);
        let p = &place.logprobs;
        let Some(q) = row::log_softmax(candidate) else {
            return;
        };
        self.kl.push(row::kl(p, &q));
        self.reference.push(-p[next]);
        self.candidate.push(-q[next]);
        self.agreed += usize::from(agrees);
    }

    pub(crate) fn metrics(&self) -> Option<TextMetrics> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_fails_only_where_flips_are_beyond_doubt() {
        let status = |clear_flips, clear| {
            let e = Estimate::mean(&[1.0]).unwrap();
            let metrics = TextMetrics {
                positions: clear,
                kl: e,
                kl_max: 1.0,
                top1: e,
                clear_flips,
                clear,
                perplexity_reference: e,
                perplexity_candidate: e,
                perplexity_ratio: e,
            };
            judge(&metrics).status
        };
        // Wilson's interval for 3 of 272 begins at 0.4 %, for 9 of 272 at 1.7 %.
        assert_eq!(status(3, 272), Status::Ok);
        assert_eq!(status(9, 272), Status::Fail);
        assert_eq!(status(1, 5), Status::Fail);
        assert_eq!(status(0, 5), Status::Ok);
        assert_eq!(status(0, 0), Status::Skipped);
    }
}
