//! The margin rule.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Smallest gap between the two best softmax probabilities at which a step is
/// judged. Below it two correct implementations may differ.
pub const MARGIN_FLOOR: f64 = 0.1;

/// Outcome of a judgement. Of several the greatest counts.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Verdict {
    /// Every judged step agrees, and so does every other.
    Pass,
    /// Every judged step agrees; some knife-edge step does not.
    PassTie,
    /// The reference is too unsure to judge by.
    Refused,
    /// A judged step disagrees.
    Fail,
    /// The gate itself is at fault: it could not have failed.
    Error,
}

impl Verdict {
    /// Whether nothing speaks against the candidate.
    pub fn passed(self) -> bool {
        matches!(self, Verdict::Pass | Verdict::PassTie)
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Verdict::Pass => "PASS",
            Verdict::PassTie => "PASS_TIE",
            Verdict::Refused => "REFUSED",
            Verdict::Fail => "FAIL",
            Verdict::Error => "ERROR",
        })
    }
}

/// What the reference says at one step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReferenceStep {
    /// Best id.
    pub id: u32,
    /// Softmax probability of the best minus that of the second.
    pub margin: f64,
}

/// A step at which the candidate differs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Divergence {
    /// Index of the step, from 0.
    pub step: usize,
    /// Best id of the reference.
    pub expected: u32,
    /// The candidate's id; `None` if it had already stopped.
    pub found: Option<u32>,
    /// The reference's margin there.
    pub margin: f64,
}

/// Judgement of a teacher-forced run: every step counts, since both sides saw
/// the same tokens before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TeacherForced {
    /// Outcome.
    pub verdict: Verdict,
    /// Steps compared.
    pub steps: usize,
    /// Steps at or above the floor.
    pub clear: usize,
    /// Disagreements at or above the floor.
    pub flips: Vec<Divergence>,
    /// Disagreements below it.
    pub ties: Vec<Divergence>,
}

/// Judges the candidate's best ids under the reference's tokens. A candidate
/// with fewer steps than the reference fails at the first missing one.
pub fn judge_teacher_forced(reference: &[ReferenceStep], candidate: &[u32]) -> TeacherForced {
    let mut out = TeacherForced {
        verdict: Verdict::Pass,
        steps: reference.len(),
        clear: reference
            .iter()
            .filter(|s| s.margin >= MARGIN_FLOOR)
            .count(),
        flips: vec![],
        ties: vec![],
    };
    for (step, expected) in reference.iter().enumerate() {
        let found = candidate.get(step).copied();
        if found == Some(expected.id) {
            continue;
        }
        let divergence = Divergence {
            step,
            expected: expected.id,
            found,
            margin: expected.margin,
        };
        // A margin that is not a number is no excuse.
        if found.is_some() && expected.margin < MARGIN_FLOOR {
            out.ties.push(divergence);
        } else {
            out.flips.push(divergence);
        }
        if found.is_none() {
            break;
        }
    }
    out.verdict = match (out.flips.is_empty(), out.ties.is_empty()) {
        (false, _) => Verdict::Fail,
        (true, false) => Verdict::PassTie,
        (true, true) => Verdict::Pass,
    };
    out
}

/// Judgement of a free run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FreeRun {
    /// Outcome.
    pub verdict: Verdict,
    /// Steps that agree before the first divergence.
    pub agreed: usize,
    /// Where the runs part, if they do.
    pub divergence: Option<Divergence>,
}

/// Judges a free run at the first divergence only: after it the two sides see
/// different tokens. The reference's stop is a step like any other, so running
/// past a clear stop fails, and stopping early is not a pass.
pub fn judge_free_run(reference: &[ReferenceStep], candidate: &[u32]) -> FreeRun {
    let agreed = reference
        .iter()
        .zip(candidate)
        .take_while(|(expected, found)| expected.id == **found)
        .count();
    let Some(expected) = reference.get(agreed) else {
        return FreeRun {
            verdict: Verdict::Pass,
            agreed,
            divergence: None,
        };
    };
    let found = candidate.get(agreed).copied();
    let tie = found.is_some() && expected.margin < MARGIN_FLOOR;
    FreeRun {
        verdict: if tie { Verdict::PassTie } else { Verdict::Fail },
        agreed,
        divergence: Some(Divergence {
            step: agreed,
            expected: expected.id,
            found,
            margin: expected.margin,
        }),
    }
}

/// [`judge_free_run`] of a whole answer. Where the reference `stopped`, its last
/// step is the stop: a candidate that says the same and goes on does not know its
/// own stop, whatever the margin.
pub fn judge_answer(reference: &[ReferenceStep], stopped: bool, candidate: &[u32]) -> FreeRun {
    let mut out = judge_free_run(reference, candidate);
    if let (true, None, Some(last), Some(&found)) = (
        stopped,
        out.divergence,
        reference.last(),
        candidate.get(reference.len()),
    ) {
        out.verdict = Verdict::Fail;
        out.divergence = Some(Divergence {
            step: reference.len(),
            expected: last.id,
            found: Some(found),
            margin: last.margin,
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(pairs: &[(u32, f64)]) -> Vec<ReferenceStep> {
        pairs
            .iter()
            .map(|&(id, margin)| ReferenceStep { id, margin })
            .collect()
    }

    #[test]
    fn a_clear_flip_fails_and_a_knife_edge_is_a_tie() {
        let reference = steps(&[(1, 0.9), (2, 0.05), (3, 0.1)]);
        assert_eq!(
            judge_teacher_forced(&reference, &[1, 2, 3]).verdict,
            Verdict::Pass
        );
        assert_eq!(
            judge_teacher_forced(&reference, &[1, 9, 3]).verdict,
            Verdict::PassTie
        );
        let failed = judge_teacher_forced(&reference, &[1, 9, 9]);
        assert_eq!((failed.verdict, failed.clear), (Verdict::Fail, 2));
        assert_eq!(failed.flips[0].step, 2, "the floor itself is judged");
    }

    #[test]
    fn missing_steps_fail_whatever_the_margin() {
        let reference = steps(&[(1, 0.9), (2, 0.05)]);
        assert_eq!(
            judge_teacher_forced(&reference, &[1]).verdict,
            Verdict::Fail
        );
        assert_eq!(judge_free_run(&reference, &[1]).verdict, Verdict::Fail);
    }

    #[test]
    fn a_margin_that_is_not_a_number_is_judged() {
        let reference = steps(&[(1, f64::NAN)]);
        assert_eq!(
            judge_teacher_forced(&reference, &[2]).verdict,
            Verdict::Fail
        );
        assert_eq!(judge_free_run(&reference, &[2]).verdict, Verdict::Fail);
    }

    #[test]
    fn a_free_run_is_judged_at_the_first_divergence_only() {
        let reference = steps(&[(1, 0.9), (2, 0.05), (3, 0.9)]);
        let tie = judge_free_run(&reference, &[1, 9, 9]);
        assert_eq!((tie.verdict, tie.agreed), (Verdict::PassTie, 1));
        assert_eq!(
            judge_free_run(&reference, &[1, 2, 3, 4]).verdict,
            Verdict::Pass
        );
        assert_eq!(
            judge_free_run(&reference, &[1, 2, 4]).verdict,
            Verdict::Fail
        );
    }

    #[test]
    fn running_past_a_stop_fails() {
        let reference = steps(&[(1, 0.9), (7, 0.05)]);
        let verdict = |stopped, candidate: &[u32]| judge_answer(&reference, stopped, candidate);
        assert_eq!(verdict(true, &[1, 7]).verdict, Verdict::Pass);
        let past = verdict(true, &[1, 7, 3]);
        assert_eq!((past.verdict, past.agreed), (Verdict::Fail, 2));
        assert_eq!(past.divergence.unwrap().found, Some(3));
        assert_eq!(verdict(false, &[1, 7, 3]).verdict, Verdict::Pass);
        assert_eq!(
            verdict(true, &[1]).verdict,
            Verdict::Fail,
            "shorter is no pass"
        );
        assert_eq!(verdict(true, &[1, 3]).verdict, Verdict::PassTie);
    }

    #[test]
    fn the_gravest_verdict_counts() {
        use Verdict::*;
        assert!(Pass < PassTie && PassTie < Refused && Refused < Fail && Fail < Error);
        let passed = [Pass, PassTie, Refused, Fail, Error].map(Verdict::passed);
        assert_eq!(passed, [true, true, false, false, false]);
    }
}
