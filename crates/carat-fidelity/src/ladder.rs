//! Where a failure starts.
//!
//! Three walks over the same tokens, compared after every layer: the reference on
//! its own weights, the oracle's arithmetic on the candidate's weights, and the
//! engine (once on its own states, once on states that the second walk made). What
//! the first two differ by is what is stored; what remains is the engine's states
//! or its kernels.

use std::collections::BTreeMap;

use carat_bundle::source::TensorSource;
use carat_bundle::spec::ModelSpec;
use carat_engine::{Engine, LogitRows, Sequence};
use carat_model::Output;
use carat_oracle::{Oracle, OracleOptions, Rows, Tap, TapPoint, Taps};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fixture::Case;
use crate::{FidelityError, row};

/// Distances per layer at one failed step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ladder {
    /// Case looked at.
    pub case: String,
    /// Its step.
    pub step: usize,
    /// What is at fault.
    pub cause: Cause,
    /// The layer that adds most to the distance of that cause.
    pub layer: Option<usize>,
    /// One rung per layer.
    pub rungs: Vec<Rung>,
}

/// What makes a candidate differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The weights or the model's description as stored.
    Storage,
    /// The engine's caches: on given ones it agrees.
    State,
    /// The engine's arithmetic.
    Kernel,
    /// At this step, under the same tokens, nothing differs.
    NotHere,
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Cause::Storage => "storage",
            Cause::State => "state",
            Cause::Kernel => "kernel",
            Cause::NotHere => "not at this step",
        })
    }
}

/// Distances of the residual stream after one layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rung {
    /// The layer.
    pub layer: usize,
    /// Reference and oracle on the candidate's weights.
    pub storage: Distance,
    /// Oracle on the candidate's weights and the engine on given states.
    pub kernel: Distance,
    /// Oracle on the candidate's weights and the engine on its own states.
    pub engine: Distance,
}

/// How far one vector is from another. What is not a number counts as 0, 1e30, 1e30.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Distance {
    /// Cosine.
    pub cosine: f64,
    /// Length of the difference over the length of the first.
    pub relative: f64,
    /// Largest difference of an element.
    pub max_error: f64,
}

impl Distance {
    fn of(expected: &[f32], found: &[f32]) -> Distance {
        let difference: Vec<f32> = expected.iter().zip(found).map(|(a, b)| a - b).collect();
        let max = |m: f64, v: &f32| m.max(f64::from(v.abs()));
        let out = Distance {
            cosine: row::cosine(expected, found),
            relative: row::norm(&difference) / row::norm(expected).max(f64::MIN_POSITIVE),
            max_error: difference.iter().fold(0.0, max),
        };
        if out.cosine.is_finite() && out.relative.is_finite() && out.max_error.is_finite() {
            return out;
        }
        // JSON has no other numbers.
        Distance {
            cosine: 0.0,
            relative: 1e30,
            max_error: 1e30,
        }
    }
}

/// The last row after each layer, and its likeliest token.
#[derive(Default)]
struct Walk {
    residuals: BTreeMap<usize, Vec<f32>>,
    best: Option<u32>,
}

impl Taps for Walk {
    fn wants(&self, point: TapPoint) -> bool {
        matches!(point, TapPoint::Residual(_))
    }

    fn take(&mut self, tap: Tap<'_>) {
        if let TapPoint::Residual(layer) = tap.point {
            let last = tap.data.len() - tap.width;
            self.residuals.insert(layer, tap.data[last..].to_vec());
        }
    }
}

/// Compares the walks at a step of a case.
pub(crate) fn climb(
    reference: &Oracle<'_>,
    engine: &mut Engine,
    spec: &ModelSpec,
    tensors: &dyn TensorSource,
    (case, step): (&Case, usize),
) -> Result<Ladder, FidelityError> {
    let ids = [&case.prompt_ids[..], &case.fed()[..step]].concat();
    let (&last, before) = ids.split_last().expect("invariant: a prompt has tokens");
    let expected = walk_oracle(reference, &ids)?;

    let stored = Oracle::new(spec, tensors, OracleOptions::new(reference.capacity()))?;
    let mut session = stored.session();
    let id = session.open();
    if !before.is_empty() {
        session.extend(&[(id, before)], Rows::Some(&[]))?;
    }
    let layers = spec.layers.len();
    let states: Vec<_> = (0..layers)
        .filter_map(|layer| session.cache(id, layer))
        .map(|view| (view.keys, view.values))
        .collect();

    let mut sequence = engine.open(reference.capacity())?;
    for token in before {
        engine.step(&mut sequence, &[*token], LogitRows::None)?;
    }
    let own = walk_engine(engine, &mut sequence, last, layers)?;
    engine.seed(&mut sequence, before, &states)?;
    let seeded = walk_engine(engine, &mut sequence, last, layers)?;
    engine.close(sequence);
    let stored = walk_oracle(&stored, &ids)?;

    let rungs: Vec<Rung> = (0..layers)
        .map(|layer| {
            let of = |walk: &Walk| walk.residuals.get(&layer).cloned().unwrap_or_default();
            Rung {
                layer,
                storage: Distance::of(&of(&expected), &of(&stored)),
                kernel: Distance::of(&of(&stored), &of(&seeded)),
                engine: Distance::of(&of(&stored), &of(&own)),
            }
        })
        .collect();
    let wanted = Some(case.steps[step].id);
    let cause = match () {
        () if stored.best != wanted => Cause::Storage,
        () if seeded.best != wanted => Cause::Kernel,
        () if own.best != wanted => Cause::State,
        () => Cause::NotHere,
    };
    let series = |rung: &Rung| match cause {
        Cause::Storage | Cause::NotHere => rung.storage.relative,
        Cause::Kernel => rung.kernel.relative,
        Cause::State => rung.engine.relative,
    };
    Ok(Ladder {
        case: case.name.clone(),
        step,
        cause,
        layer: steepest(&rungs.iter().map(series).collect::<Vec<_>>()),
        rungs,
    })
}

/// Index of the largest rise of a series that begins at 0; `None` without a rise.
fn steepest(series: &[f64]) -> Option<usize> {
    let mut best = None;
    let (mut previous, mut most) = (0.0, 0.0);
    for (i, &value) in series.iter().enumerate() {
        if value - previous > most {
            (most, best) = (value - previous, Some(i));
        }
        previous = value;
    }
    best
}

fn walk_oracle(oracle: &Oracle<'_>, ids: &[u32]) -> Result<Walk, FidelityError> {
    let (mut walk, mut best) = (Walk::default(), None);
    oracle.forward_with(&[ids], Rows::Last, &mut walk, &mut |row| {
        best = row::argmax(row.logits);
        Ok(())
    })?;
    walk.best = best;
    Ok(walk)
}

fn walk_engine(
    engine: &mut Engine,
    sequence: &mut Sequence,
    last: u32,
    layers: usize,
) -> Result<Walk, FidelityError> {
    let mut wanted: Vec<Output> = (0..layers).map(Output::Residual).collect();
    wanted.push(Output::Logits);
    let out = engine.step_for(sequence, &[last], LogitRows::Last, &wanted)?;
    let mut walk = Walk {
        best: row::argmax(out.logits()),
        ..Walk::default()
    };
    for (output, values) in &out.values {
        if let Output::Residual(layer) = output {
            walk.residuals.insert(*layer, values.clone());
        }
    }
    Ok(walk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_starts_where_the_distance_rises_most() {
        assert_eq!(steepest(&[0.01, 0.02, 0.5, 0.6]), Some(2));
        assert_eq!(steepest(&[0.3, 0.3]), Some(0));
        assert_eq!(steepest(&[0.0, 0.0]), None);
    }

    #[test]
    fn distances_stay_numbers() {
        let d = Distance::of(&[3.0, 4.0], &[3.0, 4.5]);
        assert_eq!((d.relative, d.max_error), (0.1, 0.5));
        let broken = Distance::of(&[1.0, 0.0], &[f32::NAN, 0.0]);
        assert_eq!((broken.cosine, broken.relative), (0.0, 1e30));
    }
}
