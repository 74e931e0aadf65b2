//! Why there is no record.

use std::path::PathBuf;

use carat_engine::EngineError;

use crate::{Allowance, Nanos};

/// Why there is no record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Nothing to measure.
    #[error("{what} is 0: there is nothing to measure")]
    Empty {
        /// The setting.
        what: &'static str,
    },
    /// More than anybody would wait for.
    #[error("{what} is {value}, expected at most {max}")]
    TooMany {
        /// The setting.
        what: &'static str,
        /// Its value.
        value: usize,
        /// Most there may be.
        max: usize,
    },
    /// A build whose speed means nothing.
    #[error("arm {arm}: this is a debug build: its speed means nothing")]
    DebugBuild {
        /// The arm.
        arm: String,
    },
    /// A speed that the machine cannot have.
    #[error(
        "arm {arm}: {what} would need {needed:.1} {unit} and the machine has {measured:.1} {unit}: a count or a clock is wrong"
    )]
    Implausible {
        /// The arm.
        arm: String,
        /// `decode` or `prefill`.
        what: &'static str,
        /// What the speed implies.
        needed: f64,
        /// What was measured.
        measured: f64,
        /// Unit of both.
        unit: &'static str,
    },
    /// An arm did other work than was asked for.
    #[error("arm {arm}: {found} {what}, expected {expected}: the arms do not do the same work")]
    TokenCount {
        /// The arm.
        arm: String,
        /// `prompt tokens` or `new tokens`.
        what: &'static str,
        /// What the protocol asks for.
        expected: usize,
        /// What the arm did.
        found: usize,
    },
    /// Nobody knows whether the arm answers like its checkpoint.
    #[error("arm {arm}: its fidelity is unknown ({problem})")]
    Ungated {
        /// The arm.
        arm: String,
        /// What is missing.
        problem: String,
    },
    /// The machine was never quiet for enough rounds.
    #[error("only {quiet} of {rounds} rounds were undisturbed, {wanted} wanted; the last: {last}")]
    Disturbed {
        /// Undisturbed rounds.
        quiet: usize,
        /// Rounds that ran.
        rounds: usize,
        /// Rounds that were asked for.
        wanted: usize,
        /// What disturbed the last disturbed round.
        last: String,
        /// What would have to be allowed.
        allowance: Allowance,
    },
    /// The machine did not cool down, or its clock did not come back.
    #[error("arm {arm}: after {waited} of rest the machine is not as cool and fast as it was")]
    NotRecovered {
        /// The arm that was to begin.
        arm: String,
        /// How long was waited.
        waited: Nanos,
    },
    /// A trial that the model has no room for.
    #[error(
        "{prompt} prompt and {new} new tokens{} do not fit in a context of {context}",
        after(*depth)
    )]
    Context {
        /// Prompt tokens.
        prompt: usize,
        /// New tokens.
        new: usize,
        /// Tokens in the cache before them.
        depth: usize,
        /// Tokens that there is room for.
        context: usize,
    },
    /// Arms that cannot be told apart, or too few of them.
    #[error("{0}")]
    Arms(String),
    /// A program or server under measurement failed.
    #[error("arm {arm}: {problem}")]
    Arm {
        /// The arm.
        arm: String,
        /// What happened.
        problem: String,
    },
    /// A program or server did not answer in time.
    #[error("arm {arm}: no result within {limit}")]
    Timeout {
        /// The arm.
        arm: String,
        /// How long was waited.
        limit: Nanos,
    },
    /// Records of different kinds of work.
    #[error("{what} differ: {old} and {new}")]
    Unlike {
        /// `protocols` or `machines`.
        what: &'static str,
        /// Of the old record.
        old: String,
        /// Of the new record.
        new: String,
    },
    /// A file that is not what it should be.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A description of an arm or a sweep that cannot be followed.
    #[error("{text}: {problem}")]
    Spec {
        /// What was given.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
}

fn after(depth: usize) -> String {
    match depth {
        0 => String::new(),
        depth => format!(" after {depth} in the cache"),
    }
}

impl BenchError {
    pub(crate) fn arm(arm: &str, problem: impl ToString) -> BenchError {
        BenchError::Arm {
            arm: arm.to_owned(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn file(path: &std::path::Path, problem: impl ToString) -> BenchError {
        BenchError::File {
            path: path.to_owned(),
            problem: problem.to_string(),
        }
    }
}
