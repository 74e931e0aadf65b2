//! The reference's whole distributions at chosen places, to measure other weights by.

use std::collections::BTreeSet;

use carat_oracle::{Oracle, Recorder, Rows, TapPoint};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fixture::{Case, Step};
use crate::transcript::TextMetrics;
use crate::verdict::MARGIN_FLOOR;
use crate::{FidelityError, row, text};

/// Given tokens, and the positions after which something is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    sequences: Vec<Vec<u32>>,
    rows: Vec<Vec<usize>>,
}

impl Probe {
    /// Every position of a text but the last.
    pub fn text(ids: &[u32]) -> Probe {
        match ids.len() {
            0 | 1 => Probe::default(),
            n => Probe {
                sequences: vec![ids[..n - 1].to_vec()],
                rows: vec![(0..n - 1).collect()],
            },
        }
    }

    /// The steps of cases, under the reference's tokens.
    pub fn steps(cases: &[Case]) -> Probe {
        let mut out = Probe::default();
        for case in cases {
            let fed = case.fed();
            let before = &fed[..fed.len().saturating_sub(1)];
            let ids = [&case.prompt_ids[..], before].concat();
            out.rows
                .push((case.prompt_ids.len() - 1..ids.len()).collect());
            out.sequences.push(ids);
        }
        out
    }

    /// Both.
    #[must_use]
    pub fn and(mut self, other: Probe) -> Probe {
        self.sequences.extend(other.sequences);
        self.rows.extend(other.rows);
        self
    }

    /// Positions asked about.
    pub fn positions(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// BLAKE3 of all of it (64 hex digits).
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(&(&self.sequences, &self.rows));
        let json = json.expect("invariant: a probe is plain data");
        blake3::hash(&json).to_hex().to_string()
    }

    fn sequences(&self) -> Vec<&[u32]> {
        self.sequences.iter().map(Vec::as_slice).collect()
    }
}

/// What the reference says at one position.
pub(crate) struct Place {
    pub(crate) logprobs: Vec<f64>,
    pub(crate) step: Step,
}

impl Place {
    /// `None` where a logit is not finite.
    pub(crate) fn of(logits: &[f32]) -> Option<Place> {
        Some(Place {
            logprobs: row::log_softmax(logits)?,
            step: row::step_of(logits)?,
        })
    }
}

/// The reference at all positions of a probe.
pub struct Baseline<'o, 'a> {
    oracle: &'o Oracle<'a>,
    probe: Probe,
    places: Vec<Option<Place>>,
    /// The residual stream before each layer, `[tokens of all sequences, hidden]`.
    residuals: Vec<Vec<f32>>,
}

/// How far other weights take the distributions, over the positions of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Harm {
    /// Mean of `KL(reference ‖ candidate)`, in nats.
    pub kl: f64,
    /// Largest of a position.
    pub kl_max: f64,
    /// Positions above the margin floor whose likeliest token differs.
    pub flips: usize,
    /// Positions whose logits are not finite.
    pub broken: usize,
}

impl<'o, 'a> Baseline<'o, 'a> {
    /// Asks the reference.
    ///
    /// # Errors
    /// Those of the oracle.
    pub fn new(oracle: &'o Oracle<'a>, probe: Probe) -> Result<Self, FidelityError> {
        let layers = oracle.spec().layers.len();
        let points = (0..layers).map(|layer| match layer {
            0 => TapPoint::Embedding,
            _ => TapPoint::Residual(layer - 1),
        });
        let points: Vec<TapPoint> = points.collect();
        let mut recorder = Recorder::new(points.iter().copied());
        let mut places = Vec::with_capacity(probe.positions());
        let sequences = probe.sequences();
        let rows = Rows::Each(&probe.rows);
        oracle.forward_with(&sequences, rows, &mut recorder, &mut |row| {
            places.push(Place::of(row.logits));
            Ok(())
        })?;
        let of_point = |point| {
            let rows = (0..sequences.len()).filter_map(|s| recorder.get(point, s));
            rows.flatten().copied().collect()
        };
        Ok(Baseline {
            oracle,
            residuals: points.into_iter().map(of_point).collect(),
            places,
            probe,
        })
    }

    /// The reference.
    pub fn oracle(&self) -> &'o Oracle<'a> {
        self.oracle
    }

    /// What is asked.
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// Positions above the margin floor.
    pub fn clear(&self) -> usize {
        let steps = self.places.iter().flatten();
        steps.filter(|p| p.step.is_clear(MARGIN_FLOOR)).count()
    }

    /// Asks a candidate, whose layers before `first` are the reference's.
    fn ask(
        &self,
        candidate: &Oracle<'_>,
        first: usize,
        each: &mut dyn FnMut(&Place, &[f32], usize),
    ) -> Result<(), FidelityError> {
        let mut places = self.places.iter();
        let sequences = self.probe.sequences();
        let mut at = 0;
        let mut take = |row: carat_oracle::LogitRow<'_>| {
            if let Some(Some(place)) = places.next() {
                each(place, row.logits, at);
            }
            at += 1;
            Ok(())
        };
        let rows = Rows::Each(&self.probe.rows);
        match self.residuals.get(first).filter(|_| first > 0) {
            Some(residual) => {
                candidate.resume_with((first, residual), &sequences, rows, &mut take)?;
            }
            None => {
                candidate.forward_with(&sequences, rows, &mut carat_oracle::NoTaps, &mut take)?;
            }
        }
        Ok(())
    }

    /// How far the candidate is. `changed` are the tensors in which it differs from the
    /// reference: what comes before the first layer with one is not computed again.
    ///
    /// # Errors
    /// Those of the oracle.
    pub fn harm(
        &self,
        candidate: &Oracle<'_>,
        changed: &BTreeSet<String>,
    ) -> Result<Harm, FidelityError> {
        let (mut sum, mut positions) = (0.0, 0usize);
        let mut harm = Harm {
            kl: 0.0,
            kl_max: 0.0,
            flips: 0,
            broken: 0,
        };
        let first = first_layer(changed, self.residuals.len());
        self.ask(candidate, first, &mut |place, logits, _| {
            let Some(q) = row::log_softmax(logits) else {
                harm.broken += 1;
                harm.flips += usize::from(place.step.is_clear(MARGIN_FLOOR));
                return;
            };
            let kl = row::kl(&place.logprobs, &q);
            sum += kl;
            positions += 1;
            harm.kl_max = harm.kl_max.max(kl);
            let flip = row::argmax(logits) != Some(place.step.id);
            harm.flips += usize::from(flip && place.step.is_clear(MARGIN_FLOOR));
        })?;
        harm.kl = sum / positions.max(1) as f64;
        Ok(harm)
    }

    /// Statistics of a candidate on the text that the probe is ([`Probe::text`] of
    /// `ids`); `None` where nothing finite came.
    pub(crate) fn text(
        &self,
        candidate: &Oracle<'_>,
        ids: &[u32],
    ) -> Result<Option<TextMetrics>, FidelityError> {
        let mut seen = text::Seen::default();
        self.ask(candidate, 0, &mut |place, logits, at| {
            seen.take(place, logits, ids[at + 1] as usize);
        })?;
        Ok(seen.metrics())
    }
}

/// The first layer in which something changed; the embedding changes all, the head none.
fn first_layer(changed: &BTreeSet<String>, layers: usize) -> usize {
    let layer = |name: &String| match name.strip_prefix("layers.") {
        Some(rest) => rest.split('.').next()?.parse::<usize>().ok(),
        None if name.starts_with("head.") => Some(layers),
        None => Some(0),
    };
    // The last residual that is kept is that before the last layer.
    let first = changed.iter().filter_map(layer).min().unwrap_or(0);
    first.min(layers.saturating_sub(1))
}
