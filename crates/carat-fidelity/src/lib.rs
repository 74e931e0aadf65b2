//! Does the bundle still answer like the checkpoint?
//!
//! A reference (the fp32 oracle, or foreign logits) says for every step which
//! token is best and by how much. A candidate is judged only where the reference
//! is sure: a step whose softmax margin is at least [`MARGIN_FLOOR`] must agree;
//! below it, a different token is a tie, which is reported and not held against
//! the candidate.

mod verdict;

pub use verdict::{
    Divergence, FreeRun, MARGIN_FLOOR, ReferenceStep, TeacherForced, Verdict, judge_free_run,
    judge_teacher_forced,
};
