//! Task accuracy: how many questions a model answers right, and whether two bundles
//! differ in that by more than chance.
//!
//! A gate says whether the answers are the same; this says whether they are as good.
//! Numbers are comparable only under one protocol, so results carry theirs, and a
//! comparison across protocols is refused.

mod arrow;
mod compare;
mod load;
mod score;

pub use compare::{Comparison, compare};
pub use load::{Question, Task, read_questions};
pub use score::{Outcome, gold_number, score_choice, score_number};

use std::fmt;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::FidelityError;
use crate::journal::{self, Journal, Rules};
use crate::stats::Estimate;

/// `schema` of a file of results.
pub const EVAL_SCHEMA: &str = "carat.eval";
/// Its version.
pub const EVAL_VERSION: u32 = 1;

/// Everything that a result depends on beside the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// The task.
    pub task: Task,
    /// Questions asked.
    pub n: usize,
    /// BLAKE3 of the questions as asked.
    pub data_digest: String,
    /// BLAKE3 of the instruction that goes with each question.
    pub instruction_digest: String,
    /// BLAKE3 of the chat template; `None` for text that is continued as it is.
    pub template_digest: Option<String>,
    /// Whether a thinking model is asked to think.
    pub thinking: bool,
    /// New tokens at most per answer; 0 where nothing is generated.
    pub max_new_tokens: usize,
    /// Softmax temperature; 0 is greedy.
    pub temperature: f32,
    /// Ids that end an answer.
    pub stop_ids: Vec<u32>,
}

impl Protocol {
    /// BLAKE3 of all of it (64 hex digits).
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).expect("invariant: a protocol is plain data");
        blake3::hash(&json).to_hex().to_string()
    }

    /// The first field in which another protocol differs.
    pub fn differs(&self, other: &Protocol) -> Option<String> {
        let fields = |p: &Protocol| match serde_json::to_value(p) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        };
        let (a, b) = (fields(self), fields(other));
        let (name, value) = a.iter().find(|(name, value)| b.get(*name) != Some(value))?;
        let other = b.get(name).cloned().unwrap_or_default();
        Some(format!("{name} is {value} in one and {other} in the other"))
    }
}

/// BLAKE3 of a text (64 hex digits).
pub fn text_digest(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// First line of a file of results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Always `carat.eval`.
    #[schemars(extend("const" = EVAL_SCHEMA))]
    pub schema: String,
    /// Version of the format, 1.
    #[schemars(extend("const" = EVAL_VERSION))]
    pub version: u32,
    /// Digest of the protocol.
    pub protocol_digest: String,
    /// The protocol.
    pub protocol: Protocol,
    /// Name of the model.
    pub model: String,
    /// Digest of the bundle; `None` for a checkpoint packed in memory.
    pub bundle_digest: Option<String>,
    /// Device, instruction set and threads.
    pub backend: String,
    /// Arithmetic on activations.
    pub activation: String,
}

impl Header {
    /// Whether results of one belong to the other: threads and instruction set change
    /// no answer.
    fn same_run(&self, other: &Header) -> bool {
        (&self.protocol_digest, &self.bundle_digest, &self.activation)
            == (
                &other.protocol_digest,
                &other.bundle_digest,
                &other.activation,
            )
            && (self.bundle_digest.is_some() || self.model == other.model)
    }
}

/// A line of a file of results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Item {
    /// Number of the question, from 0.
    pub index: usize,
    /// How it came out.
    pub outcome: Outcome,
    /// What was taken for the answer.
    pub predicted: Option<String>,
    /// The right answer.
    pub gold: String,
    /// New tokens.
    pub tokens: usize,
    /// The whole answer; empty where nothing was generated.
    pub text: String,
}

/// Results so far, on disk as they come.
#[derive(Debug)]
pub struct Results {
    /// What they are of.
    pub header: Header,
    /// In the order they came.
    pub items: Vec<Item>,
    file: Option<Journal>,
}

impl Results {
    /// Opens a file of results to go on with it, or begins one. What a killed run left
    /// of its last line is dropped.
    ///
    /// # Errors
    /// Where the file is of another run, or cannot be read or written.
    pub fn resume(path: &Path, header: Header) -> Result<Results, FidelityError> {
        let before = journal::before(path, &RULES)?;
        if let Some(found) = before.header.as_ref().filter(|h| !h.same_run(&header)) {
            let problem = match found.protocol.differs(&header.protocol) {
                Some(field) => format!("holds results of another protocol: {field}"),
                None => "holds results of another bundle".into(),
            };
            let origin = path.display().to_string();
            return Err(FidelityError::malformed(origin, problem));
        }
        let file = Some(Journal::resume(path, &before, &header)?);
        Ok(Results {
            header,
            items: before.items,
            file,
        })
    }

    /// Reads a finished or unfinished file.
    ///
    /// # Errors
    /// Where it is no file of results.
    pub fn read(path: &Path) -> Result<Results, FidelityError> {
        let missing = || FidelityError::malformed(path.display().to_string(), "has no header");
        let found = journal::read(path, false, &RULES)?;
        Ok(Results {
            header: found.header.ok_or_else(missing)?,
            items: found.items,
            file: None,
        })
    }

    /// Adds a result, and has it on its way to disk before it returns.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn push(&mut self, item: Item) -> Result<(), FidelityError> {
        if let Some(file) = &mut self.file {
            file.push(&item)?;
        }
        self.items.push(item);
        Ok(())
    }

    /// Whether a question has its result.
    pub fn has(&self, index: usize) -> bool {
        self.items.iter().any(|i| i.index == index)
    }

    /// Counts of all outcomes.
    pub fn summary(&self) -> Summary {
        let count = |o: Outcome| self.items.iter().filter(|i| i.outcome == o).count();
        let correct = count(Outcome::Correct);
        Summary {
            n: self.header.protocol.n,
            correct,
            wrong: count(Outcome::Wrong),
            unmarked: count(Outcome::Unmarked),
            off_format: count(Outcome::OffFormat),
            truncated: count(Outcome::Truncated),
            missing: self.header.protocol.n.saturating_sub(self.items.len()),
            accuracy: Estimate::share(correct, self.items.len()),
        }
    }
}

/// What lines of a file of results have to be.
const RULES: Rules<Header, Item> = Rules {
    header: |found| {
        if (found.schema.as_str(), found.version) != (EVAL_SCHEMA, EVAL_VERSION) {
            return Err(format!("schema {}", found.schema));
        }
        match found.protocol.digest() == found.protocol_digest {
            true => Ok(()),
            false => Err("protocol_digest is not the protocol's".into()),
        }
    },
    item: |header, items, item| {
        let again = items.iter().any(|i| i.index == item.index);
        match item.index >= header.protocol.n || again {
            true => Err(format!("a second or unknown item {}", item.index)),
            false => Ok(()),
        }
    },
};

/// Counts of outcomes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Questions of the protocol.
    pub n: usize,
    /// Right answers.
    pub correct: usize,
    /// Answers in the format, of another value.
    pub wrong: usize,
    /// Answers that ended without naming a result.
    pub unmarked: usize,
    /// Answers that name a result in another format.
    pub off_format: usize,
    /// Answers cut off by their length.
    pub truncated: usize,
    /// Questions without an answer so far.
    pub missing: usize,
    /// Right answers over answered questions, with Wilson's interval.
    pub accuracy: Option<Estimate>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answered = self.n - self.missing;
        write!(f, "{} of {answered} right", self.correct)?;
        if let Some(e) = self.accuracy {
            let percent = e.map(|v| 100.0 * v);
            write!(f, ", {percent:.1} %")?;
        }
        write!(
            f,
            "; {} wrong, {} unmarked, {} off format, {} truncated, {} missing",
            self.wrong, self.unmarked, self.off_format, self.truncated, self.missing
        )
    }
}
