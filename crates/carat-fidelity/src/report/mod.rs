//! What a gate found, for people: one HTML page without anything from outside, and a
//! Markdown card.

mod card;
mod heat;
mod html;
mod plot;

pub use card::card;
pub(crate) use heat::heat_map;
pub use html::html;

use crate::Transcript;
use crate::fixture::Case;
use crate::transcript::CaseResult;

/// A bundle and what is known of it.
pub struct Report<'r> {
    /// Name of the model.
    pub name: String,
    /// Digest of the bundle.
    pub digest: String,
    /// What it was made from.
    pub source: String,
    /// The recipe and the formats it gave.
    pub compression: String,
    /// Arithmetic on activations.
    pub activation: String,
    /// Bytes of all weights as stored.
    pub bytes: u64,
    /// Number of weights.
    pub weights: u64,
    /// Bits per weight.
    pub bits_per_weight: f64,
    /// Its gates, the most important first.
    pub transcripts: Vec<Transcript>,
    /// Measured speeds.
    pub speeds: Vec<Speed>,
    /// Text of ids, where there is a tokenizer.
    pub decode: Option<&'r Decode<'r>>,
}

/// Gives the text of ids.
pub type Decode<'d> = dyn Fn(&[u32]) -> String + 'd;

/// A measured speed.
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    /// Where it was measured.
    pub machine: String,
    /// Prompt tokens per second, median.
    pub prompt_tps: Option<f64>,
    /// Decode tokens per second, median.
    pub decode_tps: Option<f64>,
    /// Prompt and new tokens of the workload.
    pub workload: String,
}

impl Report<'_> {
    /// Text of some ids; the ids themselves without a tokenizer.
    fn text(&self, ids: &[u32]) -> String {
        match self.decode {
            Some(decode) => decode(ids),
            None => format!("{ids:?}"),
        }
    }

    /// Verdict of the gate that counts, in a word.
    fn verdict(&self) -> String {
        let verdict = self.transcripts.first().map(|t| t.verdict.to_string());
        verdict.unwrap_or_else(|| "NOT GATED".into())
    }
}

/// How the candidate fared at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Agrees,
    /// Agrees at a step that is not judged.
    Unsure,
    Tie,
    Flip,
}

/// The fate of each step of a case.
fn fates(case: &Case, result: &CaseResult, floor: f64) -> Vec<Fate> {
    let steps = case.steps.iter().zip(&result.found);
    steps
        .map(|(step, found)| {
            let agrees = *found == Some(step.id);
            match (agrees, step.is_clear(floor)) {
                (true, true) => Fate::Agrees,
                (true, false) => Fate::Unsure,
                (false, false) if found.is_some() => Fate::Tie,
                (false, _) => Fate::Flip,
            }
        })
        .collect()
}

/// `1.23 MB`, powers of ten.
fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "kB", "MB"] {
        if value < 1000.0 {
            return format!("{value:.2} {unit}");
        }
        value /= 1000.0;
    }
    format!("{value:.2} GB")
}
