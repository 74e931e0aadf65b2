//! The gate: does the candidate say what the reference says?

use std::collections::BTreeSet;

use carat_bundle::source::TensorSource;
use carat_bundle::spec::{MixerSpec, ModelSpec};
use carat_engine::Engine;
use carat_model::ActPrecision;
use carat_oracle::Oracle;

use crate::candidate::{Candidate, EngineCandidate};
use crate::fixture::{Case, CaseKind, Fixture, OracleKind};
use crate::foreign::ForeignLogits;
use crate::ladder;
use crate::transcript::{
    CandidateRecord, CaseResult, Check, ROWS, RedFirst, ReferenceWeights, Status,
    TRANSCRIPT_SCHEMA, TRANSCRIPT_VERSION, Transcript,
};
use crate::verdict::{ReferenceStep, TeacherForced, Verdict, judge_answer, judge_teacher_forced};
use crate::{FidelityError, checks, head, row, text};

/// Tokens that an answer is let run past its reference, to see whether it stops.
const PAST_THE_END: usize = 8;

/// Tokens of context below which a grid that only long contexts tell apart goes
/// unnoticed.
const LONG_CONTEXT: usize = 272;

/// Tokens of a free-form answer below which a passing bundle may still have lost
/// task accuracy.
pub(crate) const FREE_FORM: usize = 100;

/// Name of the check that a transcript's ids come out again.
const RECORDED: &str = "recorded";

/// A candidate and what it is judged by.
pub struct Gate<'g> {
    /// The candidate.
    pub engine: &'g mut Engine,
    /// Its model.
    pub spec: &'g ModelSpec,
    /// Its weights in logical form.
    pub tensors: &'g dyn TensorSource,
    /// Its own stops.
    pub stops: &'g BTreeSet<u32>,
    /// Its activations.
    pub precision: ActPrecision,
    /// What to call it.
    pub record: CandidateRecord,
    /// The oracle, where there is one: without it only a fixture's steps are judged.
    pub reference: Option<GateReference<'g>>,
    /// Ids of real text for statistics; none without a reference.
    pub text: &'g [u32],
    /// Another program's logits, whose cases are the fixture's.
    pub foreign: Option<&'g ForeignLogits>,
    /// Told what is being done.
    pub progress: &'g mut dyn FnMut(&str),
}

/// The oracle with its weights.
pub struct GateReference<'g> {
    /// The oracle, of the capacity that the fixture names.
    pub oracle: &'g Oracle<'g>,
    /// Its weights.
    pub tensors: &'g dyn TensorSource,
    /// Whose they are.
    pub weights: ReferenceWeights,
}

impl Gate<'_> {
    /// Judges the candidate.
    ///
    /// # Errors
    /// Where there is nothing to judge: another kind of model, or an oracle or
    /// engine that refuses the fixture's tokens.
    pub fn run(mut self, fixture: &Fixture) -> Result<Transcript, FidelityError> {
        self.same_kind(fixture)?;
        let mut out = self.blank(fixture);
        for case in &fixture.cases {
            out.reasons.extend(case.weakness(fixture.floor));
        }
        if !out.reasons.is_empty() {
            out.verdict = Verdict::Refused;
            out.recheck = recheck(&out);
            return Ok(out);
        }
        (self.progress)("poisoned reference");
        out.red_first = self.red_first(fixture)?;
        out.cases = self.judge(&fixture.cases, fixture.reference.capacity)?;
        out.checks = self.checks(fixture)?;
        if let Some(reference) = self.reference.as_ref().filter(|_| self.text.len() > 1) {
            (self.progress)("real text");
            let capacity = fixture.reference.capacity;
            let compared = text::compare(reference.oracle, self.engine, self.text, capacity)?;
            out.checks.extend(compared.as_ref().map(text::judge));
            out.text = compared;
        }
        conclude(&mut out);
        if out.verdict == Verdict::Fail && self.reference.is_some() {
            (self.progress)("where the failure starts");
            out.ladder = self.ladder(fixture, &out)?;
        }
        Ok(out)
    }

    /// Runs the cheap half of a transcript again: the candidate against the recorded
    /// reference, without an oracle. What needs one is taken from the record.
    ///
    /// # Errors
    /// Those of [`run`](Gate::run).
    pub fn recheck(mut self, recorded: &Transcript) -> Result<Transcript, FidelityError> {
        (self.reference, self.foreign, self.text) = (None, None, &[]);
        let mut out = self.run(&recorded.fixture)?;
        out.weights = recorded.weights;
        out.text.clone_from(&recorded.text);
        for before in &recorded.checks {
            let mut before = before.clone();
            if before.status != Status::Skipped {
                before.detail.push_str(" (as recorded)");
            }
            match out.checks.iter_mut().find(|c| c.name == before.name) {
                Some(check) if check.status == Status::Skipped => *check = before,
                Some(_) => {}
                None if before.name == RECORDED => {}
                None => out.checks.push(before),
            }
        }
        let same = out.cases == recorded.cases;
        let digest = out.candidate.digest == recorded.candidate.digest;
        let detail = match (digest, same) {
            (true, true) => "the same bundle gives the same ids",
            (true, false) => "the same bundle gives other ids than recorded",
            (false, true) => "another bundle than recorded, which gives the same ids",
            (false, false) => "another bundle than recorded, which gives other ids",
        };
        // Other machines and threads give the same ids; a record that they do not is wrong.
        let status = match (digest, same) {
            (true, false) => Status::Fail,
            (true, true) => Status::Ok,
            (false, _) => Status::Info,
        };
        out.checks.push(Check::new(RECORDED, status, detail));
        out.reasons.clear();
        out.provisional.clear();
        if out.verdict != Verdict::Refused {
            conclude(&mut out);
        }
        Ok(out)
    }

    fn blank(&self, fixture: &Fixture) -> Transcript {
        Transcript {
            schema: TRANSCRIPT_SCHEMA.into(),
            version: TRANSCRIPT_VERSION,
            verdict: Verdict::Pass,
            reasons: vec![],
            provisional: vec![],
            producer: format!("carat {}", env!("CARGO_PKG_VERSION")),
            candidate: self.record.clone(),
            weights: match (&self.reference, fixture.reference.oracle) {
                (_, OracleKind::Foreign) => ReferenceWeights::Foreign,
                (Some(reference), _) => reference.weights,
                (None, _) => ReferenceWeights::Source,
            },
            fixture_digest: fixture.digest(),
            fixture: fixture.clone(),
            red_first: vec![],
            cases: vec![],
            checks: vec![],
            text: None,
            ladder: None,
            recheck: String::new(),
        }
    }

    /// Refuses to compare models whose answers are not about the same tokens.
    fn same_kind(&self, fixture: &Fixture) -> Result<(), FidelityError> {
        let differs = |field, expected: String, found: String| {
            Err(FidelityError::Mismatch {
                field,
                expected,
                found,
            })
        };
        let (expected, found) = (fixture.reference.vocab_size, self.spec.vocab_size);
        if expected != found {
            return differs("vocabulary", expected.to_string(), found.to_string());
        }
        let Some(reference) = &self.reference else {
            return Ok(());
        };
        let capacity = reference.oracle.capacity();
        if capacity != fixture.reference.capacity {
            let expected = fixture.reference.capacity.to_string();
            return differs("capacity", expected, capacity.to_string());
        }
        let shape = |spec: &ModelSpec| {
            let caches = spec.layers.iter().map(|layer| {
                let MixerSpec::Attention(a) = &layer.mixer;
                format!("{}x{}", a.kv_heads, a.head_dim)
            });
            let mut text = format!("hidden {}, caches", spec.hidden_size);
            for cache in caches {
                text.push(' ');
                text.push_str(&cache);
            }
            text
        };
        let (expected, found) = (shape(reference.oracle.spec()), shape(self.spec));
        if expected != found {
            return differs("shape", expected, found);
        }
        Ok(())
    }

    fn judge(&mut self, cases: &[Case], capacity: usize) -> Result<Vec<CaseResult>, FidelityError> {
        let mut candidate = EngineCandidate::new(self.engine, capacity);
        let mut out = Vec::with_capacity(cases.len());
        for case in cases {
            (self.progress)(&case.name);
            out.push(judge_case(&mut candidate, case, self.stops)?);
        }
        Ok(out)
    }

    /// Runs the gate on references that are wrong at one clear step, in both kinds
    /// of run: what passes them could not have failed.
    fn red_first(&mut self, fixture: &Fixture) -> Result<Vec<RedFirst>, FidelityError> {
        let Some(case) = poisoned(fixture) else {
            return Ok(vec![]);
        };
        let capacity = fixture.reference.capacity;
        let result = judge_case(
            &mut EngineCandidate::new(self.engine, capacity),
            &case,
            self.stops,
        )?;
        let step = case.steps.len() - 1;
        let mut out = vec![RedFirst {
            poison: format!("{}: step {step} is the second best, forced", case.name),
            verdict: result.teacher_forced.verdict,
        }];
        out.extend(result.free_run.map(|run| RedFirst {
            poison: format!("{}: step {step} is the second best, free", case.name),
            verdict: run.verdict,
        }));
        out.push(RedFirst {
            poison: "a row of the head is zero".into(),
            verdict: head::poisoned(self.spec, self.tensors)?,
        });
        Ok(out)
    }

    fn checks(&mut self, fixture: &Fixture) -> Result<Vec<Check>, FidelityError> {
        let capacity = fixture.reference.capacity;
        let mut out = Vec::new();
        let longest = fixture
            .cases
            .iter()
            .max_by_key(|c| c.prompt_ids.len() + c.steps.len());
        if let Some(case) = longest {
            (self.progress)("chunked prefill");
            let ids = [case.prompt_ids.clone(), case.fed()].concat();
            out.push(checks::chunks(self.engine, &ids, capacity)?);
        }
        match &self.reference {
            None => {
                let why = "there is no reference at hand, only its answers";
                for name in ["seeded_step", ROWS] {
                    out.push(Check::new(name, Status::Skipped, why));
                }
            }
            Some(reference) => {
                (self.progress)("a step on the oracle's caches");
                let seeded = checks::seeded(reference.oracle, self.engine, fixture)?;
                out.push(seeded);
                (self.progress)("vocabulary rows");
                let expected = reference.oracle.spec();
                let (reference, found) = (reference.tensors, self.tensors);
                let rows = head::rows((expected, reference), (self.spec, found))?;
                out.push(rows);
            }
        }
        if let Some(foreign) = self.foreign {
            (self.progress)("another program's logits");
            out.push(foreign.distance(self.engine, capacity)?);
        }
        (self.progress)("head on random hidden states");
        let logits = head::logits(self.engine, self.spec, self.tensors, self.precision)?;
        out.push(logits);
        out.push(coverage(fixture));
        for name in ["pipelined_equals_sequential", "cpu_equals_gpu"] {
            out.push(Check::new(name, Status::Skipped, "not built"));
        }
        Ok(out)
    }

    fn ladder(
        &mut self,
        fixture: &Fixture,
        transcript: &Transcript,
    ) -> Result<Option<ladder::Ladder>, FidelityError> {
        let Some(reference) = &self.reference else {
            return Ok(None);
        };
        // The first clear flip; else where a free run parted; else the last step.
        let at = |i: usize, step: usize| (&fixture.cases[i], step);
        let results = || transcript.cases.iter().enumerate();
        let flip = results().find_map(|(i, c)| Some(at(i, c.teacher_forced.flips.first()?.step)));
        let parted = results()
            .filter(|(_, c)| c.verdict == Verdict::Fail)
            .find_map(|(i, c)| Some(at(i, c.free_run.as_ref()?.divergence?.step)));
        let (case, step) = flip
            .or(parted)
            .unwrap_or_else(|| at(0, fixture.cases[0].steps.len() - 1));
        let step = step.min(case.steps.len() - 1);
        ladder::climb(
            reference.oracle,
            self.engine,
            self.spec,
            self.tensors,
            (case, step),
        )
        .map(Some)
    }
}

/// Both runs of a case.
fn judge_case(
    candidate: &mut EngineCandidate<'_>,
    case: &Case,
    stops: &BTreeSet<u32>,
) -> Result<CaseResult, FidelityError> {
    let (teacher_forced, found) = judge_forced(candidate, case)?;
    let mut out = CaseResult {
        name: case.name.clone(),
        verdict: forced_verdict(case.kind, teacher_forced.verdict),
        found,
        teacher_forced,
        answer: vec![],
        free_run: None,
    };
    if case.is_answer() && case.kind != CaseKind::Probe {
        let past = if case.must_stop { PAST_THE_END } else { 0 };
        let tokens = case.steps.len() + past;
        match candidate.free(&case.prompt_ids, tokens, stops) {
            Ok(answer) => out.answer = answer.ids,
            // What is not a number is no answer, and judged so.
            Err(FidelityError::Engine(carat_engine::EngineError::NotANumber { .. })) => {}
            Err(error) => return Err(error),
        }
        let run = judge_answer(&case.reference(), case.must_stop, &out.answer);
        out.verdict = out.verdict.max(run.verdict);
        out.free_run = Some(run);
    }
    Ok(out)
}

/// Holds a candidate to the tokens of a case: the judgement, and its likeliest id
/// per step.
///
/// # Errors
/// Where the candidate cannot answer.
pub fn judge_forced(
    candidate: &mut dyn Candidate,
    case: &Case,
) -> Result<(TeacherForced, Vec<Option<u32>>), FidelityError> {
    let mut found = Vec::with_capacity(case.steps.len());
    candidate.forced(&case.prompt_ids, &case.fed(), &mut |_, logits| {
        found.push(row::argmax(logits));
    })?;
    let reference: Vec<ReferenceStep> = case.reference();
    // The margin rule knows ids: what is not finite is an id that nothing has.
    let ids: Vec<u32> = found.iter().map(|id| id.unwrap_or(u32::MAX)).collect();
    let mut judged = judge_teacher_forced(&reference, &ids);
    let broken = |d: &mut crate::Divergence| {
        if d.found == Some(u32::MAX) {
            d.found = None;
        }
    };
    judged.flips.iter_mut().for_each(broken);
    judged.ties.iter_mut().for_each(broken);
    // Not even a knife-edge excuses what is no number.
    let (lost, ties) = judged.ties.into_iter().partition(|d| d.found.is_none());
    judged.ties = ties;
    let lost: Vec<crate::Divergence> = lost;
    if !lost.is_empty() {
        judged.flips.extend(lost);
        judged.flips.sort_by_key(|d| d.step);
        judged.verdict = Verdict::Fail;
    }
    Ok((judged, found))
}

/// The case up to one of its clear steps (the sixth, or the last before it), which
/// says the second best instead; `None` without a clear step.
pub fn poison(case: &Case, floor: f64) -> Option<Case> {
    const STEP: usize = 5;
    let clear = |(_, s): &(usize, &crate::fixture::Step)| s.is_clear(floor) && s.id != s.second;
    let steps = || case.steps.iter().enumerate().filter(clear);
    let at = steps()
        .take_while(|(i, _)| *i <= STEP)
        .last()
        .or_else(|| steps().next())?
        .0;
    let mut poisoned = case.clone();
    poisoned.steps.truncate(at + 1);
    poisoned.steps[at].id = poisoned.steps[at].second;
    poisoned.must_stop = false;
    poisoned.knife_edges.retain(|edge| *edge < at);
    Some(poisoned)
}

/// The shortest of a fixture's cases that can be poisoned, poisoned; an answer before
/// given tokens, since it is poisoned in both runs.
pub(crate) fn poisoned(fixture: &Fixture) -> Option<Case> {
    let cases = fixture.cases.iter();
    cases
        .filter_map(|case| poison(case, fixture.floor))
        .min_by_key(|case| {
            let length = case.prompt_ids.len() + case.steps.len();
            (case.kind == CaseKind::Probe || !case.is_answer(), length)
        })
}

/// The verdict on a case of which only given tokens were judged.
pub(crate) fn forced_verdict(kind: CaseKind, verdict: Verdict) -> Verdict {
    match (kind, verdict) {
        // Where given tokens leave the reference unsure, nobody asked.
        (CaseKind::Probe, Verdict::PassTie) => Verdict::Pass,
        (_, verdict) => verdict,
    }
}

/// Which ids the judged steps reach: a head that is dead beyond them goes unseen.
fn coverage(fixture: &Fixture) -> Check {
    const PARTS: usize = 8;
    let vocab = fixture.reference.vocab_size.max(1);
    let mut hits = [0usize; PARTS];
    let mut highest = 0;
    for step in fixture.cases.iter().flat_map(|c| &c.steps) {
        if step.is_clear(fixture.floor) {
            hits[(step.id as usize * PARTS / vocab).min(PARTS - 1)] += 1;
            highest = highest.max(step.id);
        }
    }
    let detail = format!(
        "clear steps by eighth of the vocabulary: {hits:?}, highest id {highest} of {vocab}"
    );
    Check::new("coverage", Status::Info, detail).value("highest_id", f64::from(highest))
}

/// The command that runs the cheap half again.
fn recheck(out: &Transcript) -> String {
    let file = out.file_name();
    format!("carat gate BUNDLE --transcript BUNDLE/gates/{file}")
}

/// Verdict, reasons and reservations from what was found.
fn conclude(out: &mut Transcript) {
    out.recheck = recheck(out);
    let (verdict, reasons) = judgement(&out.cases, &out.checks, &out.red_first);
    out.verdict = verdict;
    out.reasons.extend(reasons);
    out.provisional.extend(reservations(&out.fixture.cases));
}

/// Verdict and reasons from cases, checks and poisoned references.
pub(crate) fn judgement(
    cases: &[CaseResult],
    checks: &[Check],
    red_first: &[RedFirst],
) -> (Verdict, Vec<String>) {
    let worst = cases.iter().map(|c| c.verdict).max();
    let mut verdict = worst.unwrap_or(Verdict::Pass);
    let mut reasons = Vec::new();
    for case in cases {
        let flips = case.teacher_forced.flips.len();
        if let Some(first) = case.teacher_forced.flips.first() {
            reasons.push(format!(
                "{}: {flips} clear flips, the first at step {} (margin {:.3})",
                case.name, first.step, first.margin
            ));
        }
        let parted = case.free_run.as_ref().filter(|r| !r.verdict.passed());
        if let Some(at) = parted.and_then(|r| r.divergence) {
            let what = match at.found {
                _ if at.step >= case.found.len() => "runs past its stop".into(),
                None => "ends early".into(),
                Some(id) => format!("says {id} instead of {}", at.expected),
            };
            let (name, step, margin) = (&case.name, at.step, at.margin);
            reasons.push(format!(
                "{name}: the free run {what} at step {step} (margin {margin:.3})"
            ));
        }
        if case.verdict == Verdict::PassTie {
            let ties = case.teacher_forced.ties.len();
            reasons.push(format!("{}: {ties} knife-edge steps differ", case.name));
        }
    }
    for check in checks.iter().filter(|c| c.status == Status::Fail) {
        verdict = verdict.max(Verdict::Fail);
        reasons.push(format!("{}: {}", check.name, check.detail));
    }
    let green = red_first.iter().filter(|r| r.verdict != Verdict::Fail);
    let green: Vec<String> = green
        .map(|r| format!("a poisoned reference got {}: {}", r.verdict, r.poison))
        .collect();
    // A candidate that fails anyway may happen to say the poison.
    if verdict.passed() && (red_first.is_empty() || !green.is_empty()) {
        verdict = Verdict::Error;
        reasons.extend(green);
    }
    (verdict, reasons)
}

/// What a set of cases does not cover.
pub(crate) fn reservations(cases: &[Case]) -> Vec<String> {
    let tokens = |c: &Case| c.prompt_ids.len() + c.steps.len();
    let free = |c: &Case| c.kind == CaseKind::FreeForm && c.steps.len() >= FREE_FORM;
    let wanted = [
        (
            cases.iter().any(|c| c.must_stop),
            "no answer of the fixture has to stop",
        ),
        (
            cases.iter().any(free),
            "no free-form answer of a hundred tokens",
        ),
        (
            cases.iter().any(|c| tokens(c) >= LONG_CONTEXT),
            "no context of 272 tokens",
        ),
    ];
    let lacking = wanted.into_iter().filter(|(covered, _)| !covered);
    lacking.map(|(_, what)| what.to_owned()).collect()
}
