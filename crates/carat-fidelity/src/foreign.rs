//! Logits of another program as the reference.

use carat_engine::Engine;

use crate::candidate::{Candidate, EngineCandidate};
use crate::fixture::{Case, CaseKind, Step};
use crate::stats::Estimate;
use crate::transcript::{Check, Status};
use crate::{FidelityError, row};

/// Logits of some positions of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct ForeignLogits {
    /// The sequence.
    pub ids: Vec<u32>,
    /// Positions that have logits, ascending.
    pub rows: Vec<usize>,
    /// Logits per row.
    pub vocab: usize,
    /// `[rows, vocab]`
    pub logits: Vec<f32>,
}

impl ForeignLogits {
    /// What no program could have said about `ids`.
    ///
    /// # Errors
    /// Names the problem; `origin` is what it calls the file.
    pub fn check(&self, origin: &str) -> Result<(), FidelityError> {
        let wrong = |problem: String| Err(FidelityError::malformed(origin, problem));
        if self.rows.is_empty() || self.vocab < 2 {
            return wrong("there are no logits".into());
        }
        if self.rows.len().checked_mul(self.vocab) != Some(self.logits.len()) {
            return wrong(format!(
                "{} logits, expected {} rows of {}",
                self.logits.len(),
                self.rows.len(),
                self.vocab
            ));
        }
        if !self.rows.is_sorted_by(|a, b| a < b) {
            return wrong("its rows do not ascend".into());
        }
        if let Some(row) = self.rows.iter().find(|row| **row >= self.ids.len()) {
            return wrong(format!("row {row} of {} ids", self.ids.len()));
        }
        if let Some(id) = self.ids.iter().find(|id| **id as usize >= self.vocab) {
            return wrong(format!("id {id}, the logits have {}", self.vocab));
        }
        if let Some(at) = self.logits.iter().position(|v| !v.is_finite()) {
            let (row, value) = (self.rows[at / self.vocab], self.logits[at]);
            return wrong(format!("a logit of row {row} is {value}"));
        }
        Ok(())
    }

    /// A case for each run of neighbouring rows. Steps below the floor are declared:
    /// nobody chose the tokens for their margins.
    pub fn cases(&self, floor: f64) -> Vec<Case> {
        let mut cases: Vec<Case> = Vec::new();
        let mut previous = None;
        for (&at, logits) in self.rows.iter().zip(self.logits.chunks_exact(self.vocab)) {
            let Some(mut step) = row::step_of(logits) else {
                continue;
            };
            let next = self.ids.get(at + 1).copied();
            step.fed = next.filter(|next| *next != step.id);
            match cases.last_mut() {
                Some(case) if previous.map(|p| p + 1) == Some(at) => case.steps.push(step),
                _ => cases.push(Self::case(&self.ids[..=at], step)),
            }
            previous = Some(at);
        }
        for case in &mut cases {
            case.declare_knife_edges(floor);
        }
        // A run without a clear step judges nothing.
        cases.retain(|case| case.weakness(floor).is_none());
        cases
    }

    fn case(prompt: &[u32], step: Step) -> Case {
        Case {
            name: format!("foreign row {}", prompt.len() - 1),
            kind: CaseKind::Probe,
            prompt_ids: prompt.to_vec(),
            prompt: None,
            answer: None,
            must_stop: false,
            steps: vec![step],
            knife_edges: vec![],
        }
    }

    /// How far the engine's logits are from these, at every row: mean divergence and
    /// the largest difference over the standard deviation of the reference.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn distance(&self, engine: &mut Engine, capacity: usize) -> Result<Check, FidelityError> {
        let (mut divergences, mut worst, mut broken) = (Vec::new(), 0f64, 0usize);
        let mut rows = self
            .rows
            .iter()
            .zip(self.logits.chunks_exact(self.vocab))
            .peekable();
        // Fed one more than there is, so that the last id has a row as well.
        let fed = [&self.ids[1..], &[0]].concat();
        let mut candidate = EngineCandidate::new(engine, capacity);
        candidate.forced(&self.ids[..1], &fed, &mut |at, found| {
            let Some((_, expected)) = rows.next_if(|(row, _)| **row == at) else {
                return;
            };
            match (row::log_softmax(expected), row::log_softmax(found)) {
                (Some(p), Some(q)) => divergences.push(row::kl(&p, &q)),
                _ => broken += 1,
            }
            for (a, b) in expected.iter().zip(found) {
                worst = worst.max((f64::from(*a) - f64::from(*b)).abs());
            }
        })?;
        let n = self.logits.len() as f64;
        let mean = self.logits.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let squares = self.logits.iter().map(|v| (f64::from(*v) - mean).powi(2));
        let deviation = (squares.sum::<f64>() / n).sqrt();
        let share = worst / deviation.max(f64::MIN_POSITIVE);
        let kl = Estimate::mean(&divergences);
        let text = kl.map_or("none".into(), |kl| format!("{kl:.6}"));
        let detail = format!(
            "{} rows: KL {text}, largest difference {share:.4} of the standard deviation, {broken} rows not finite",
            self.rows.len()
        );
        let status = if broken > 0 {
            Status::Fail
        } else {
            Status::Info
        };
        Ok(Check::new("foreign_distance", status, detail)
            .value("kl_mean", kl.map_or(f64::NAN, |kl| kl.value))
            .value("max_over_std", share))
    }
}
