//! What the reference answers, step by step, as a file.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::FidelityError;
use crate::verdict::{MARGIN_FLOOR, ReferenceStep};

/// `schema` of a fixture.
pub const FIXTURE_SCHEMA: &str = "carat.fixture";
/// Its version.
pub const FIXTURE_VERSION: u32 = 1;
/// Longest capacity that a fixture may ask sequences to be opened with, in tokens.
const MAX_CAPACITY: usize = 1 << 26;
/// Largest file that is read as a fixture or a transcript.
pub const MAX_FILE_BYTES: u64 = 64 << 20;

/// The reference's answers to a set of prompts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fixture {
    /// Always `carat.fixture`.
    #[schemars(extend("const" = FIXTURE_SCHEMA))]
    pub schema: String,
    /// Version of the format, 1.
    #[schemars(extend("const" = FIXTURE_VERSION))]
    pub version: u32,
    /// Name of the set, which names its transcripts: letters, digits, `-` and `_`.
    pub name: String,
    /// What answered.
    pub reference: Reference,
    /// Smallest softmax gap at which a step is judged.
    pub floor: f64,
    /// Ids that end an answer.
    pub stop_ids: Vec<u32>,
    /// The prompts with their answers.
    pub cases: Vec<Case>,
}

/// Who computed a reference, on which weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// Whether carat's own oracle answered, or another program.
    pub oracle: OracleKind,
    /// Arithmetic of the reference.
    pub dtype: String,
    /// Name of the model.
    pub model: String,
    /// BLAKE3 of its files, where it was computed.
    pub digest: Option<String>,
    /// Revision that its repository gives it.
    pub revision: Option<String>,
    /// Whether the digest ties the weights to the revision: false where only the
    /// folder's word stands for it.
    pub revision_honoured: bool,
    /// BLAKE3 of its chat template.
    pub template_digest: Option<String>,
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Capacity that sequences were opened with, in tokens.
    pub capacity: usize,
}

/// Whose reference it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OracleKind {
    /// carat's fp32 walk, which shares the import with what it judges.
    #[serde(rename = "self")]
    Own,
    /// Another program, which shares nothing.
    Foreign,
}

/// What a case is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CaseKind {
    /// A short continuation that is clear at every step.
    List,
    /// A chat turn that must end.
    Chat,
    /// A prompt that crosses a context bucket.
    Long,
    /// An answer of a hundred tokens or more.
    FreeForm,
    /// Given tokens, judged at every position: the ids that answers seldom reach.
    Probe,
}

/// One prompt and what the reference says after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Name within the set.
    pub name: String,
    /// What it is there for.
    pub kind: CaseKind,
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// The same as text, where there is a tokenizer.
    pub prompt: Option<String>,
    /// The answer as text, where there is a tokenizer.
    pub answer: Option<String>,
    /// The answer ends with a stop within its steps, and so must the candidate's.
    pub must_stop: bool,
    /// What the reference says after the prompt and after each fed token.
    pub steps: Vec<Step>,
    /// Steps below the floor that the maker of the fixture accepts as ties.
    pub knife_edges: Vec<usize>,
}

/// The reference at one position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Likeliest id.
    pub id: u32,
    /// Next likeliest id.
    pub second: u32,
    /// The token that follows in this case, if it is not the likeliest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fed: Option<u32>,
    /// Softmax probability of the best minus that of the second: what is judged.
    pub margin: f64,
    /// Logit of the best minus that of the second.
    pub logit_margin: f64,
    /// The likeliest ids with their log-probabilities, best first.
    pub top: Vec<TopToken>,
}

/// A likely token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TopToken {
    /// Its id.
    pub id: u32,
    /// `ln softmax(logits)[id]`.
    pub logprob: f64,
}

impl Step {
    /// The token that follows.
    pub fn next(&self) -> u32 {
        self.fed.unwrap_or(self.id)
    }

    /// Whether the step is judged.
    pub fn is_clear(&self, floor: f64) -> bool {
        // A margin that is not a number is no excuse.
        self.margin >= floor || self.margin.is_nan()
    }
}

impl Case {
    /// The tokens that follow the prompt.
    pub fn fed(&self) -> Vec<u32> {
        self.steps.iter().map(Step::next).collect()
    }

    /// What the margin rule reads.
    pub fn reference(&self) -> Vec<ReferenceStep> {
        let step = |s: &Step| ReferenceStep {
            id: s.id,
            margin: s.margin,
        };
        self.steps.iter().map(step).collect()
    }

    /// Smallest margin; 1 without steps.
    pub fn min_margin(&self) -> f64 {
        self.steps.iter().map(|s| s.margin).fold(1.0, f64::min)
    }

    /// Whether the tokens are the reference's own answer.
    pub fn is_answer(&self) -> bool {
        self.steps.iter().all(|s| s.fed.is_none())
    }

    /// Why the case cannot judge anything: a step below the floor that nobody
    /// declared, or no step above it.
    pub fn weakness(&self, floor: f64) -> Option<String> {
        let undeclared = self
            .steps
            .iter()
            .enumerate()
            .find(|(i, s)| !s.is_clear(floor) && !self.knife_edges.contains(i));
        if let Some((i, step)) = undeclared {
            return Some(format!(
                "{}: step {i} has a margin of {:.4}, below {floor}, and is not declared a knife-edge",
                self.name, step.margin
            ));
        }
        if !self.steps.iter().any(|s| s.is_clear(floor)) {
            return Some(format!("{}: no step has a margin of {floor}", self.name));
        }
        None
    }

    /// Declares every step below the floor a knife-edge.
    pub fn declare_knife_edges(&mut self, floor: f64) {
        let steps = self.steps.iter().enumerate();
        let edges = steps.filter(|(_, s)| !s.is_clear(floor));
        self.knife_edges = edges.map(|(i, _)| i).collect();
    }
}

impl Fixture {
    /// A fixture of `cases`.
    pub fn new(
        name: &str,
        reference: Reference,
        stop_ids: &BTreeSet<u32>,
        cases: Vec<Case>,
    ) -> Fixture {
        Fixture {
            schema: FIXTURE_SCHEMA.into(),
            version: FIXTURE_VERSION,
            name: name.into(),
            reference,
            floor: MARGIN_FLOOR,
            stop_ids: stop_ids.iter().copied().collect(),
            cases,
        }
    }

    /// Reads a file of at most [`MAX_FILE_BYTES`].
    pub fn read(path: &Path) -> Result<Fixture, FidelityError> {
        Fixture::parse(&read_capped(path)?, &path.display().to_string())
    }

    /// Parses and checks; `origin` is what messages call it.
    pub fn parse(json: &[u8], origin: &str) -> Result<Fixture, FidelityError> {
        let wrong = |e: serde_json::Error| FidelityError::malformed(origin, e.to_string());
        let fixture: Fixture = serde_json::from_slice(json).map_err(wrong)?;
        let checked = fixture.check();
        checked.map_err(|problem| FidelityError::malformed(origin, problem))?;
        Ok(fixture)
    }

    /// What no reference could have said.
    pub(crate) fn check(&self) -> Result<(), String> {
        let expect = |field: &str, expected: &str, found: &str| match expected == found {
            true => Ok(()),
            false => Err(format!("{field} is {found}, expected {expected}")),
        };
        expect("schema", FIXTURE_SCHEMA, &self.schema)?;
        let (version, found) = (FIXTURE_VERSION.to_string(), self.version.to_string());
        expect("version", &version, &found)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if self.name.is_empty() || self.name.len() > 64 || !self.name.chars().all(plain) {
            let name = &self.name;
            return Err(format!(
                "name is {name:?}, expected up to 64 letters, digits, - and _"
            ));
        }
        // A lower floor would judge less than it claims to.
        if self.floor != MARGIN_FLOOR {
            let floor = self.floor;
            return Err(format!("floor is {floor}, expected {MARGIN_FLOOR}"));
        }
        if self.cases.is_empty() {
            return Err("there are no cases".into());
        }
        let capacity = self.reference.capacity;
        if capacity > MAX_CAPACITY {
            return Err(format!(
                "capacity is {capacity}, expected at most {MAX_CAPACITY}"
            ));
        }
        let vocab = self.reference.vocab_size;
        for (at, case) in self.cases.iter().enumerate() {
            let place = format!("cases[{at}] ({:?})", case.name);
            if case.prompt_ids.is_empty() || case.steps.is_empty() {
                return Err(format!("{place}: a case has a prompt and steps"));
            }
            let tokens = case.prompt_ids.len() + case.steps.len();
            if tokens > capacity {
                return Err(format!("{place}: {tokens} tokens, capacity is {capacity}"));
            }
            let of_step = |s: &Step| [s.id, s.second, s.next()];
            let ids = case.steps.iter().flat_map(of_step);
            let mut ids = case.prompt_ids.iter().copied().chain(ids);
            if let Some(id) = ids.find(|id| *id as usize >= vocab) {
                return Err(format!("{place}: id {id}, the vocabulary has {vocab}"));
            }
            if let Some(edge) = case.knife_edges.iter().find(|e| **e >= case.steps.len()) {
                return Err(format!("{place}: knife-edge {edge} is no step"));
            }
            let outside = |s: &&Step| !(0.0..=1.0).contains(&s.margin);
            if let Some(step) = case.steps.iter().find(outside) {
                return Err(format!("{place}: a margin of {}", step.margin));
            }
            let last = case.steps.last().map(|s| s.id);
            if case.must_stop && !last.is_some_and(|id| self.stop_ids.contains(&id)) {
                return Err(format!("{place}: must stop, but its answer does not"));
            }
        }
        Ok(())
    }

    /// The file's content.
    pub fn to_json(&self) -> String {
        let json = serde_json::to_string_pretty(self);
        json.expect("invariant: fixtures are plain data") + "\n"
    }

    /// BLAKE3 of [`to_json`](Fixture::to_json) (64 hex digits).
    pub fn digest(&self) -> String {
        blake3::hash(self.to_json().as_bytes()).to_hex().to_string()
    }

    /// Its JSON schema.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Fixture).to_value()
    }
}

/// Reads a whole file of at most [`MAX_FILE_BYTES`].
pub(crate) fn read_capped(path: &Path) -> Result<Vec<u8>, FidelityError> {
    let io = |source| FidelityError::Io {
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(io)?;
    file.take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let problem = format!("is longer than {MAX_FILE_BYTES} bytes");
        return Err(FidelityError::malformed(
            path.display().to_string(),
            problem,
        ));
    }
    Ok(bytes)
}
