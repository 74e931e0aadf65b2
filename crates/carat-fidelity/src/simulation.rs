//! The gate before an export: weights as a recipe would leave them, walked by the
//! oracle, in fp32 and in the target's arithmetic.

use carat_bundle::manifest::{ActivationContract, Form};
use carat_bundle::source::TensorSource;
use carat_model::ActPrecision;
use carat_oracle::{Oracle, Rounding};
use carat_tensor::DType;
use carat_tensor::grid::{Code, Scale, Spread};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::baseline::{Baseline, Probe};
use crate::candidate::OracleCandidate;
use crate::fixture::{CaseKind, Fixture};
use crate::gate::{forced_verdict, judge_forced, judgement, poisoned, reservations};
use crate::transcript::{CaseResult, Check, RedFirst, TextMetrics};
use crate::verdict::{Verdict, judge_answer};
use crate::{FidelityError, head, text};

/// `schema` of a simulation.
pub const SIMULATION_SCHEMA: &str = "carat.simulation";
/// Its version.
pub const SIMULATION_VERSION: u32 = 1;

/// What a gate would say of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Simulation {
    /// Always `carat.simulation`.
    #[schemars(extend("const" = SIMULATION_SCHEMA))]
    pub schema: String,
    /// Version of the format, 1.
    #[schemars(extend("const" = SIMULATION_VERSION))]
    pub version: u32,
    /// The verdict in the target's arithmetic, the last of the runs.
    pub verdict: Verdict,
    /// Name of the model.
    pub model: String,
    /// BLAKE3 of its files.
    pub source_digest: Option<String>,
    /// What is done to its weights.
    pub recipe: SimulatedRecipe,
    /// Name and BLAKE3 of the fixture.
    pub fixture: String,
    /// BLAKE3 of the fixture.
    pub fixture_digest: String,
    /// What the fixture does not cover, for which the verdict is provisional.
    pub provisional: Vec<String>,
    /// One per arithmetic, fp32 first.
    pub runs: Vec<SimulatedRun>,
}

/// A recipe and the size of what it makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SimulatedRecipe {
    /// Its name.
    pub name: String,
    /// BLAKE3 of its text.
    pub digest: String,
    /// Bytes of all weights, in theory.
    pub bytes: u64,
    /// Bits for each quantized weight, in theory.
    pub bits_per_weight: f64,
}

/// What was found in one arithmetic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SimulatedRun {
    /// What is rounded besides the weights, in words.
    pub arithmetic: String,
    /// The outcome.
    pub verdict: Verdict,
    /// Why it is not PASS, in words.
    pub reasons: Vec<String>,
    /// Poisoned references, each of which has to fail before a pass counts.
    pub red_first: Vec<RedFirst>,
    /// One result per case of the fixture, in its order. The answer is what greedy
    /// decoding gives up to where it parts from the reference: given the same tokens,
    /// the walk says the same thing.
    pub cases: Vec<CaseResult>,
    /// Everything else.
    pub checks: Vec<Check>,
    /// Statistics on real text.
    pub text: Option<TextMetrics>,
}

impl Simulation {
    /// The content of its file.
    pub fn to_json(&self) -> String {
        let json = serde_json::to_string_pretty(self);
        json.expect("invariant: simulations are plain data") + "\n"
    }

    /// Its JSON schema.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Simulation).to_value()
    }
}

/// How the inputs of a product are rounded where its matrix is stored as `form`: as the
/// engine does at this precision, in the groups of `contract`. Floats are multiplied
/// as they are unless bf16 is asked for.
pub fn input_rounding(
    precision: ActPrecision,
    form: Form,
    contract: ActivationContract,
) -> Rounding {
    let blocks = |n: u16| u32::from(n).is_multiple_of(contract.ternary_group);
    let ternary = match form {
        Form::Block(dtype) => matches!(dtype, DType::TQ1_0 | DType::TQ2_0),
        // What a bundle for the engine stores in these.
        Form::Grid(grid) => {
            grid.code == Code::Trit
                && grid.scale == Scale::F16
                && matches!(grid.spread, Spread::Block(n) if blocks(n))
        }
    };
    match precision {
        ActPrecision::F32 => Rounding::F32,
        ActPrecision::Bf16 => Rounding::Bf16,
        ActPrecision::Int8 if !form.is_integer() => Rounding::F32,
        ActPrecision::Int8 => Rounding::Int8 {
            group: match ternary {
                _ if form.is_row_of_trits() => usize::MAX,
                true => contract.ternary_group as usize,
                false => contract.group as usize,
            },
        },
    }
}

/// What simulations are judged by.
pub struct Simulator<'s, 'a> {
    fixture: &'s Fixture,
    reference: (&'s Oracle<'a>, &'s dyn TensorSource),
    text: &'s [u32],
    baseline: Baseline<'s, 'a>,
}

impl<'s, 'a> Simulator<'s, 'a> {
    /// The oracle on the source, the source, a fixture of it and ids of real text.
    ///
    /// # Errors
    /// Where the fixture is of another kind of model, or the oracle has no answer.
    pub fn new(
        reference: (&'s Oracle<'a>, &'s dyn TensorSource),
        fixture: &'s Fixture,
        text: &'s [u32],
    ) -> Result<Self, FidelityError> {
        let spec = reference.0.spec();
        let mismatch = |field, expected: usize, found: usize| FidelityError::Mismatch {
            field,
            expected: expected.to_string(),
            found: found.to_string(),
        };
        let (expected, found) = (fixture.reference.vocab_size, spec.vocab_size);
        if expected != found {
            return Err(mismatch("vocabulary", expected, found));
        }
        let (expected, found) = (fixture.reference.capacity, reference.0.capacity());
        if expected != found {
            return Err(mismatch("capacity", expected, found));
        }
        let text = if text.len() < 2 { &[] } else { text };
        Ok(Simulator {
            baseline: Baseline::new(reference.0, Probe::text(text))?,
            fixture,
            reference,
            text,
        })
    }

    /// What the fixture does not cover.
    pub fn provisional(&self) -> Vec<String> {
        reservations(&self.fixture.cases)
    }

    /// Judges `candidate`, an oracle on `tensors`.
    ///
    /// # Errors
    /// Those of the oracle.
    pub fn judge(
        &self,
        arithmetic: &str,
        candidate: &Oracle<'_>,
        tensors: &dyn TensorSource,
    ) -> Result<SimulatedRun, FidelityError> {
        let mut out = SimulatedRun {
            arithmetic: arithmetic.into(),
            verdict: Verdict::Refused,
            reasons: vec![],
            red_first: vec![],
            cases: vec![],
            checks: vec![],
            text: None,
        };
        let cases = &self.fixture.cases;
        let weak = cases.iter().filter_map(|c| c.weakness(self.fixture.floor));
        out.reasons.extend(weak);
        if !out.reasons.is_empty() {
            return Ok(out);
        }
        let spec = candidate.spec();
        if let Some(case) = poisoned(self.fixture) {
            let (judged, _) = judge_forced(&mut OracleCandidate(candidate), &case)?;
            out.red_first.push(RedFirst {
                poison: format!("{}: its last step is the second best", case.name),
                verdict: judged.verdict,
            });
            out.red_first.push(RedFirst {
                poison: "a row of the head is zero".into(),
                verdict: head::poisoned(spec, tensors)?,
            });
        }
        for case in cases {
            let (teacher_forced, found) = judge_forced(&mut OracleCandidate(candidate), case)?;
            let mut result = CaseResult {
                name: case.name.clone(),
                verdict: forced_verdict(case.kind, teacher_forced.verdict),
                found,
                teacher_forced,
                answer: vec![],
                free_run: None,
            };
            if case.is_answer() && case.kind != CaseKind::Probe {
                // Up to the first divergence a free run is given the reference's tokens.
                let agreed = result.found.iter().zip(&case.steps);
                let agreed = agreed.take_while(|(f, s)| **f == Some(s.id)).count();
                let said = result.found.iter().take(agreed + 1);
                result.answer = said.map_while(|id| *id).collect();
                let run = judge_answer(&case.reference(), case.must_stop, &result.answer);
                result.verdict = result.verdict.max(run.verdict);
                result.free_run = Some(run);
            }
            out.cases.push(result);
        }
        let (oracle, source) = self.reference;
        let rows = head::rows((oracle.spec(), source), (spec, tensors))?;
        out.checks.push(rows);
        if !self.text.is_empty() {
            out.text = self.baseline.text(candidate, self.text)?;
            out.checks.extend(out.text.as_ref().map(text::judge));
        }
        let (verdict, reasons) = judgement(&out.cases, &out.checks, &out.red_first);
        (out.verdict, out.reasons) = (verdict, reasons);
        Ok(out)
    }
}
