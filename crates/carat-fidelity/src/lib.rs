//! Does the bundle still answer like the checkpoint?
//!
//! A reference (the fp32 oracle, or another program's logits) says for every step
//! which token is best and by how much; a [`Fixture`] keeps that as a file. The
//! [`Gate`] holds a candidate to it: token by token through its own caches, on the
//! oracle's caches, and answering freely. A candidate is judged only where the
//! reference is sure: a step whose softmax margin is at least [`MARGIN_FLOOR`] must
//! agree; below it, a different token is a tie, which is reported and not held
//! against the candidate. Stops are steps like any other.
//!
//! Answers reach few rows of a vocabulary and few positions, so the gate also
//! compares every row of head and embedding, the head's product on random states,
//! chunked and single prefill, and the distributions on real text. Before a pass
//! counts, a poisoned reference has to fail it. What was found is a [`Transcript`],
//! whose cheap half can be run again without an oracle; a failure is followed down
//! the layers by a [`Ladder`].
//!
//! This crate works on token ids. It knows no tokenizer, no network and no family.

mod baseline;
mod candidate;
mod checks;
mod draft;
mod error;
pub mod eval;
mod fixture;
mod foreign;
mod gate;
mod head;
mod journal;
mod ladder;
pub mod report;
mod row;
pub mod scan;
mod simulation;
mod stats;
mod text;
mod transcript;
mod verdict;

pub use baseline::{Baseline, Harm, Probe};
pub use candidate::{Candidate, EngineCandidate, OracleCandidate};
pub use draft::{Drafter, Question, answer, follow};
pub use error::FidelityError;
pub use fixture::{
    Case, CaseKind, FIXTURE_SCHEMA, FIXTURE_VERSION, Fixture, MAX_FILE_BYTES, OracleKind,
    Reference, Step, TopToken,
};
pub use foreign::ForeignLogits;
pub use gate::{Gate, GateReference, judge_forced, poison};
pub use ladder::{Cause, Distance, Ladder, Rung};
pub use simulation::{
    SIMULATION_SCHEMA, SIMULATION_VERSION, SimulatedRecipe, SimulatedRun, Simulation, Simulator,
    input_rounding,
};
pub use stats::Estimate;
pub use transcript::{
    CandidateRecord, CaseResult, Check, RedFirst, ReferenceWeights, Status, TRANSCRIPT_SCHEMA,
    TRANSCRIPT_VERSION, TextMetrics, Transcript,
};
pub use verdict::{
    Divergence, FreeRun, MARGIN_FLOOR, ReferenceStep, TeacherForced, Verdict, judge_answer,
    judge_free_run, judge_teacher_forced,
};
