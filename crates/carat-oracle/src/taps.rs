//! Named activations that a pass hands out on request.

use std::collections::BTreeMap;
use std::fmt;

/// An activation of the walk. Layers count from 0.
///
/// The inputs of all projections are among them: that is what calibration needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum TapPoint {
    /// Scaled embedding, `[tokens, hidden_size]`.
    Embedding,
    /// Normed input of a layer's mixer (of q, k and v), `[tokens, hidden_size]`.
    MixerInput(usize),
    /// Input of a mixer's output projection, `[tokens, heads * head_dim]`.
    MixerInner(usize),
    /// Normed input of a layer's feed-forward (of gate and up), `[tokens, hidden_size]`.
    FfnInput(usize),
    /// Input of the down projection, `[tokens, intermediate_size]`.
    FfnInner(usize),
    /// Residual stream after a layer, `[tokens, hidden_size]`.
    Residual(usize),
    /// Normed input of the head, `[tokens, hidden_size]`.
    FinalHidden,
}

impl fmt::Display for TapPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TapPoint::Embedding => f.write_str("embedding"),
            TapPoint::MixerInput(i) => write!(f, "layers.{i}.mixer_input"),
            TapPoint::MixerInner(i) => write!(f, "layers.{i}.mixer_inner"),
            TapPoint::FfnInput(i) => write!(f, "layers.{i}.ffn_input"),
            TapPoint::FfnInner(i) => write!(f, "layers.{i}.ffn_inner"),
            TapPoint::Residual(i) => write!(f, "layers.{i}.residual"),
            TapPoint::FinalHidden => f.write_str("final_hidden"),
        }
    }
}

/// A run of rows of one activation of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Tap<'d> {
    /// Which activation.
    pub point: TapPoint,
    /// Index of the sequence in the request.
    pub sequence: usize,
    /// Index, in the sequence's ids of this request, of the first row.
    pub first_row: usize,
    /// Values per row.
    pub width: usize,
    /// `[rows, width]`
    pub data: &'d [f32],
}

/// Takes activations while a pass runs.
///
/// Points come in the order of the walk; within a point, sequences and rows
/// ascend. A sequence may come in several runs of rows.
pub trait Taps {
    /// Whether [`take`](Taps::take) is to be called for this point.
    fn wants(&self, point: TapPoint) -> bool;

    /// Receives a run of rows.
    fn take(&mut self, tap: Tap<'_>);
}

/// Wants nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoTaps;

impl Taps for NoTaps {
    fn wants(&self, _: TapPoint) -> bool {
        false
    }

    fn take(&mut self, _: Tap<'_>) {}
}

/// Keeps chosen activations in memory.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    points: Vec<TapPoint>,
    taken: BTreeMap<(TapPoint, usize), Vec<f32>>,
}

impl Recorder {
    /// A recorder of `points`.
    pub fn new(points: impl IntoIterator<Item = TapPoint>) -> Recorder {
        Recorder {
            points: points.into_iter().collect(),
            taken: BTreeMap::new(),
        }
    }

    /// Rows of `point` of the request's sequence `sequence`, one after another:
    /// `[tokens, width]`; `None` if it was not asked for or not met.
    pub fn get(&self, point: TapPoint, sequence: usize) -> Option<&[f32]> {
        self.taken.get(&(point, sequence)).map(Vec::as_slice)
    }
}

impl Taps for Recorder {
    fn wants(&self, point: TapPoint) -> bool {
        self.points.contains(&point)
    }

    fn take(&mut self, tap: Tap<'_>) {
        self.taken
            .entry((tap.point, tap.sequence))
            .or_default()
            .extend_from_slice(tap.data);
    }
}
