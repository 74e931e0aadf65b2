//! What a gate found, as a file that can be checked again.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use carat_bundle::file::StagedFile;
use carat_bundle::manifest::GATES_DIR;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::FidelityError;
use crate::fixture::{Fixture, read_capped};
use crate::ladder::Ladder;
use crate::stats::Estimate;
use crate::verdict::{FreeRun, TeacherForced, Verdict};

/// `schema` of a transcript.
pub const TRANSCRIPT_SCHEMA: &str = "carat.gate";
/// Its version.
pub const TRANSCRIPT_VERSION: u32 = 1;

/// Name of the check that needs the reference's weights.
pub(crate) const ROWS: &str = "vocabulary_rows";

/// Everything a gate saw and what it concluded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Transcript {
    /// Always `carat.gate`.
    #[schemars(extend("const" = TRANSCRIPT_SCHEMA))]
    pub schema: String,
    /// Version of the format, 1.
    #[schemars(extend("const" = TRANSCRIPT_VERSION))]
    pub version: u32,
    /// The outcome: the gravest of cases and checks.
    pub verdict: Verdict,
    /// Why it is not PASS, in words; empty if it is.
    pub reasons: Vec<String>,
    /// What the fixture does not cover, for which the verdict is provisional.
    pub provisional: Vec<String>,
    /// Program and version that ran the gate.
    pub producer: String,
    /// What was judged.
    pub candidate: CandidateRecord,
    /// On which weights the reference answered.
    pub weights: ReferenceWeights,
    /// BLAKE3 of the fixture.
    pub fixture_digest: String,
    /// The reference's answers, so that the cheap half can be run again alone.
    pub fixture: Fixture,
    /// Poisoned references, each of which has to fail before a pass counts.
    pub red_first: Vec<RedFirst>,
    /// One result per case of the fixture, in its order.
    pub cases: Vec<CaseResult>,
    /// Everything else.
    pub checks: Vec<Check>,
    /// Statistics on real text, where there was a reference to compare with.
    pub text: Option<TextMetrics>,
    /// Where a failure starts, where that was looked for.
    pub ladder: Option<Ladder>,
    /// The command that checks this transcript without a reference.
    pub recheck: String,
}

/// What was judged, and how it ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CandidateRecord {
    /// Name of the model.
    pub name: String,
    /// Digest of the bundle; `None` for a checkpoint packed in memory.
    pub digest: Option<String>,
    /// Digest of the source that the bundle says it was made from.
    pub source_digest: Option<String>,
    /// Formats of its matrices.
    pub formats: String,
    /// Device, instruction set and threads.
    pub backend: String,
    /// Arithmetic on activations.
    pub activation: String,
}

/// On which weights the reference answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReferenceWeights {
    /// The checkpoint's: what was lost in conversion is judged.
    Source,
    /// The candidate's own, decoded: only its arithmetic is judged.
    Candidate,
    /// Those of another program.
    Foreign,
}

/// A poisoned reference and the verdict it got.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RedFirst {
    /// What was poisoned.
    pub poison: String,
    /// The verdict, which has to be FAIL.
    pub verdict: Verdict,
}

/// The candidate on one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CaseResult {
    /// Name of the case.
    pub name: String,
    /// The graver of the two judgements; ties of given tokens do not count.
    pub verdict: Verdict,
    /// The candidate's likeliest id per step, token by token through its own
    /// caches; null where its logits are not finite.
    pub found: Vec<Option<u32>>,
    /// Judgement of `found`.
    pub teacher_forced: TeacherForced,
    /// The candidate's own answer; empty for given tokens.
    pub answer: Vec<u32>,
    /// Judgement of the answer, at the first divergence.
    pub free_run: Option<FreeRun>,
}

/// Outcome of a check that judges no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It holds.
    Ok,
    /// It does not.
    Fail,
    /// Nothing to judge; worth knowing.
    Info,
    /// Not looked at, which is not ok.
    Skipped,
}

/// Something else that must hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// How it came out.
    pub status: Status,
    /// In words, with what was found and what expected.
    pub detail: String,
    /// Figures.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, f64>,
}

impl Check {
    pub(crate) fn new(name: &str, status: Status, detail: impl Into<String>) -> Check {
        Check {
            name: name.into(),
            status,
            detail: detail.into(),
            values: BTreeMap::new(),
        }
    }

    /// A check that holds or does not.
    pub(crate) fn holds(name: &str, holds: bool, detail: impl Into<String>) -> Check {
        let status = if holds { Status::Ok } else { Status::Fail };
        Check::new(name, status, detail)
    }

    pub(crate) fn value(mut self, name: &str, value: f64) -> Check {
        // JSON has no other numbers.
        if value.is_finite() {
            self.values.insert(name.into(), value);
        }
        self
    }
}

/// How far the candidate's distributions are from the reference's on a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TextMetrics {
    /// Positions compared.
    pub positions: usize,
    /// Mean of `KL(reference ‖ candidate)` per position, in nats.
    pub kl: Estimate,
    /// Largest of a position.
    pub kl_max: f64,
    /// Share of positions with the same likeliest token.
    pub top1: Estimate,
    /// Positions above the margin floor at which it differs.
    pub clear_flips: usize,
    /// Positions above the margin floor.
    pub clear: usize,
    /// `exp` of the reference's mean negative log-likelihood.
    pub perplexity_reference: Estimate,
    /// `exp` of the candidate's.
    pub perplexity_candidate: Estimate,
    /// Candidate's perplexity over the reference's, position by position.
    pub perplexity_ratio: Estimate,
}

impl Transcript {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Where it is no transcript.
    pub fn read(path: &Path) -> Result<Transcript, FidelityError> {
        Transcript::parse(&read_capped(path)?, &path.display().to_string())
    }

    /// Parses and checks; `origin` is what messages call it.
    ///
    /// # Errors
    /// Where it is no transcript, or its parts do not belong together.
    pub fn parse(json: &[u8], origin: &str) -> Result<Transcript, FidelityError> {
        let wrong = |problem: String| FidelityError::malformed(origin, problem);
        let it: Transcript = serde_json::from_slice(json).map_err(|e| wrong(e.to_string()))?;
        if (it.schema.as_str(), it.version) != (TRANSCRIPT_SCHEMA, TRANSCRIPT_VERSION) {
            return Err(wrong(format!(
                "schema {} version {}, expected {TRANSCRIPT_SCHEMA} version {TRANSCRIPT_VERSION}",
                it.schema, it.version
            )));
        }
        it.fixture
            .check()
            .map_err(|e| wrong(format!("fixture: {e}")))?;
        let digest = it.fixture.digest();
        if digest != it.fixture_digest {
            let found = &it.fixture_digest;
            return Err(wrong(format!(
                "fixture_digest is {found}, its fixture has {digest}"
            )));
        }
        Ok(it)
    }

    /// The file's content.
    pub fn to_json(&self) -> String {
        let json = serde_json::to_string_pretty(self);
        json.expect("invariant: transcripts are plain data") + "\n"
    }

    /// Whether everything was judged against the source's own weights.
    pub fn is_whole(&self) -> bool {
        let rows = self.checks.iter().find(|c| c.name == ROWS);
        self.weights == ReferenceWeights::Source
            && rows.is_some_and(|c| c.status != Status::Skipped)
    }

    /// Name of its file in a bundle's `gates/`: what judges less does not take the
    /// place of what judges more.
    pub fn file_name(&self) -> String {
        let less = match self.weights {
            ReferenceWeights::Candidate => "-own",
            ReferenceWeights::Source if !self.is_whole() => "-answers",
            ReferenceWeights::Source | ReferenceWeights::Foreign => "",
        };
        format!("{}{less}.json", self.fixture.name)
    }

    /// Writes it into the bundle's `gates/`, whole or not at all, in place of an
    /// older one of the same fixture. Gives the path.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn store(&self, bundle: &Path) -> Result<PathBuf, FidelityError> {
        let path = bundle.join(GATES_DIR).join(self.file_name());
        let json = self.to_json();
        let io = |source| FidelityError::Io {
            path: path.clone(),
            source,
        };
        let mut file = StagedFile::create(&path, json.len() as u64)?;
        file.write_all(json.as_bytes()).map_err(io)?;
        file.publish()?;
        Ok(path)
    }

    /// Its JSON schema.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Transcript).to_value()
    }
}
