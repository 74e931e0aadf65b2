//! `carat gate`.

use std::{collections::BTreeSet, path::Path, process::ExitCode};

use carat_bundle::{
    convert::as_stored,
    manifest::{ResolvedTensor, format_summary, is_matrix},
    verify::set_recipe_status,
};
use carat_engine::{Engine, EngineOptions};
use carat_fidelity::{
    CandidateRecord, Case, CaseResult, Check, Fixture, ForeignLogits, Gate, GateReference,
    MARGIN_FLOOR, OracleKind, RedFirst, Reference, ReferenceWeights, Status, TextMetrics,
    Transcript, Verdict, eval::text_digest,
};
use carat_import::adapter::Adapter;
use carat_kernels::ActPrecision;
use carat_tensor::DType;
use safetensors::{Dtype, SafeTensors};

use super::{
    answer::Speaker,
    fixture::{Origin, TOKENS_AT_ONCE, reference, same_source},
    generate::declared_stops,
    ground::text_ids,
    standard::Maker,
    write_whole,
};
use crate::{
    args,
    failure::{Failure, OrInput as _, Outcome},
    memory::Request,
    model::{ADAPTER_NOTE, Located, Model, base_name, locate},
    output,
    progress::Spinner,
};

/// Largest file of foreign logits.
const MAX_LOGITS_BYTES: u64 = 4 << 30;

pub(crate) fn run(args: &args::Gate) -> Outcome {
    let candidate = Model::for_engine(&args.model)?;
    let transcript = judge(args, &candidate)?;
    store(args, &candidate, &transcript)?;
    if args.model.json {
        let value = serde_json::to_value(&transcript).map_err(Failure::internal)?;
        output::json(&value).or_input()?;
    } else {
        show(&transcript)?;
    }
    exit(transcript.verdict, &transcript.reasons)
}

/// What the gate finds, in whichever way the arguments ask for.
pub(crate) fn judge(args: &args::Gate, candidate: &Model) -> Outcome<Transcript> {
    let job = Job::new(args, candidate)?;
    match (&args.transcript, &args.reference, &args.fixture) {
        (Some(path), _, _) => job.recheck(path),
        (None, Some(path), _) => job.foreign(path),
        (None, None, Some(path)) => {
            let fixture = Fixture::read(path)?;
            let bundle = matches!(locate(&args.model.model)?, Located::Bundle(_));
            if bundle && args.reference_model.is_none() {
                job.answers_only(&fixture)
            } else {
                job.against_source(Some(fixture))
            }
        }
        (None, None, None) => job.against_source(None),
    }
}

/// What every kind of judgement needs.
struct Job<'j> {
    args: &'j args::Gate,
    candidate: &'j Model,
    speaker: Option<Speaker>,
    stops: BTreeSet<u32>,
    capacity: usize,
    precision: ActPrecision,
}

impl<'j> Job<'j> {
    fn new(args: &'j args::Gate, candidate: &'j Model) -> Outcome<Job<'j>> {
        let has_text = candidate.text.tokenizer_json.is_some();
        let speaker = has_text.then(|| Speaker::new(candidate)).transpose()?;
        let stops = match &speaker {
            Some(speaker) => speaker.stop_ids().clone(),
            None => declared_stops(candidate).ids().clone(),
        };
        Ok(Job {
            args,
            candidate,
            speaker,
            stops,
            capacity: candidate.context(&args.model),
            precision: candidate.cpu_options(&args.model)?.precision,
        })
    }

    fn engine(&self, capacity: usize) -> Outcome<Engine> {
        let chunk = EngineOptions::DEFAULT_CHUNK;
        let request = Request {
            all_rows: true,
            ..Request::new(capacity.min(TOKENS_AT_ONCE), capacity, chunk)
        };
        self.candidate.engine(&self.args.model, &request)
    }

    fn record(&self, engine: &Engine) -> CandidateRecord {
        let bundle = self.candidate.bundle();
        let tensors = self.candidate.tensors();
        let declared = self.candidate.spec.tensors();
        let formats = declared
            .iter()
            .filter_map(|d| Some((d.role, tensors.info(&d.name)?.dtype)));
        CandidateRecord {
            name: self.candidate.name.clone(),
            digest: bundle.map(|b| b.digest().to_owned()),
            source_digest: bundle.and_then(|b| b.manifest().source.digest.clone()),
            formats: format_summary(formats),
            backend: engine.backend().describe(),
            activation: format!("{:?}", self.precision).to_lowercase(),
        }
    }

    fn gate<'g>(&'g self, engine: &'g mut Engine, progress: &'g mut dyn FnMut(&str)) -> Gate<'g> {
        Gate {
            spec: &self.candidate.spec,
            tensors: self.candidate.tensors(),
            stops: &self.stops,
            precision: self.precision,
            record: self.record(engine),
            engine,
            reference: None,
            text: &[],
            foreign: None,
            progress,
        }
    }

    /// The whole gate: the oracle on the source, on a fixture or the standard set.
    fn against_source(&self, fixture: Option<Fixture>) -> Outcome<Transcript> {
        let args = self.args;
        let asked = args.reference_model.as_deref();
        let reference = reference(&args.model, asked, self.candidate)?;
        let (source, origin) = adapted(reference, self.candidate, args.adapter.as_deref())?;
        if origin.own {
            exactly_stored(self.candidate)?;
        }
        let capacity = fixture
            .as_ref()
            .map_or(self.capacity, |f| f.reference.capacity);
        if let Some(fixture) = &fixture {
            let name = args.reference_model.as_deref().unwrap_or(&args.model.model);
            same_source(fixture, &origin, name)?;
        }
        let mut engine = self.engine(capacity)?;
        let _busy = Spinner::start("the gate is at work");
        let oracle = source.oracle(&args.model, capacity, TOKENS_AT_ONCE, 0)?;
        let own = origin.own;
        let fixture = match fixture {
            Some(fixture) => fixture,
            None => {
                let speaker = Speaker::new(&source).map_err(|e| {
                    e.hint("without a tokenizer there are no standard prompts: --fixture or --reference")
                })?;
                let mut maker = Maker {
                    source: &source,
                    oracle: &oracle,
                    engine: &mut engine,
                    speaker: &speaker,
                    digest: origin.digest,
                    revision: origin.revision,
                };
                maker.standard("standard")?
            }
        };
        let text = self.text()?;
        let mut progress = |_: &str| {};
        let mut gate = self.gate(&mut engine, &mut progress);
        gate.text = &text;
        gate.reference = Some(GateReference {
            oracle: &oracle,
            tensors: source.tensors(),
            weights: match own {
                true => ReferenceWeights::Candidate,
                false => ReferenceWeights::Source,
            },
        });
        Ok(gate.run(&fixture)?)
    }

    /// A fixture alone: what it says is judged, the source is not at hand.
    fn answers_only(&self, fixture: &Fixture) -> Outcome<Transcript> {
        let mut engine = self.engine(fixture.reference.capacity)?;
        let mut progress = |_: &str| {};
        Ok(self.gate(&mut engine, &mut progress).run(fixture)?)
    }

    fn recheck(&self, path: &Path) -> Outcome<Transcript> {
        let recorded = Transcript::read(path)?;
        let mut engine = self.engine(recorded.fixture.reference.capacity)?;
        let mut progress = |_: &str| {};
        Ok(self.gate(&mut engine, &mut progress).recheck(&recorded)?)
    }

    fn foreign(&self, path: &Path) -> Outcome<Transcript> {
        let foreign = read_logits(path)?;
        let reference = Reference {
            oracle: OracleKind::Foreign,
            dtype: "f32".into(),
            model: base_name(path),
            digest: None,
            revision: None,
            revision_honoured: false,
            template_digest: None,
            vocab_size: foreign.vocab,
            capacity: self.capacity.max(foreign.ids.len() + 1),
        };
        let cases = foreign.cases(MARGIN_FLOOR);
        if cases.is_empty() {
            return Err(Failure::refused(anyhow::anyhow!(
                "{}: no row has a margin of {MARGIN_FLOOR}",
                path.display()
            ))
            .hint("logits of a trained model on text that it knows judge something"));
        }
        let fixture = Fixture::new("foreign", reference, &self.stops, cases);
        let mut engine = self.engine(fixture.reference.capacity)?;
        let mut progress = |_: &str| {};
        let mut gate = self.gate(&mut engine, &mut progress);
        gate.foreign = Some(&foreign);
        Ok(gate.run(&fixture)?)
    }

    fn text(&self) -> Outcome<Vec<u32>> {
        let Some(speaker) = &self.speaker else {
            return Ok(vec![]);
        };
        text_ids(speaker, self.args.text.as_deref(), self.capacity)
    }
}

/// The reference with the adapter that the candidate was made with.
fn adapted(
    (source, mut origin): (Model, Origin),
    candidate: &Model,
    folder: Option<&Path>,
) -> Outcome<(Model, Origin)> {
    let notes = candidate.bundle().map(|b| &b.manifest().source.notes);
    let mut notes = notes.into_iter().flatten();
    let note = notes.find(|note| note.starts_with(ADAPTER_NOTE));
    let Some(folder) = folder else {
        return match note {
            Some(note) if !origin.own => Err(Failure::refused(anyhow::anyhow!(
                "{}: {note}: the source alone does not answer like it",
                candidate.name
            ))
            .hint("--adapter names the adapter's folder")),
            _ => Ok((source, origin)),
        };
    };
    let adapter = Adapter::open(folder, &source.spec)?;
    if !note.is_some_and(|note| note.contains(&adapter.digest)) {
        return Err(Failure::input(anyhow::anyhow!(
            "--adapter {} (BLAKE3 {}): {}",
            folder.display(),
            adapter.digest,
            match note {
                Some(note) => format!("of {}, {note}", candidate.name),
                None => format!("{} has no adapter merged", candidate.name),
            }
        )));
    }
    if source.checkpoint().is_none() {
        return Err(Failure::input(anyhow::anyhow!(
            "--adapter: {} is a bundle, an adapter is added to a checkpoint",
            source.name
        )));
    }
    // Answers of the merged weights are of neither alone.
    origin.digest = origin
        .digest
        .map(|base| text_digest(&format!("{base} {}", adapter.digest)));
    Ok((source.adapted(adapter), origin))
}

/// Refuses to judge a bundle by its own weights where conversion may have lost some.
fn exactly_stored(model: &Model) -> Outcome<()> {
    let Some(bundle) = model.bundle() else {
        return Ok(());
    };
    let roles = model.spec.tensors();
    let ternary = |dtype| matches!(dtype, DType::TQ1_0 | DType::TQ2_0);
    let exact = |t: &ResolvedTensor| {
        let role = roles.iter().find(|d| d.name == t.name).map(|d| d.role);
        role.is_some_and(|role| {
            !is_matrix(role)
                || as_stored(role, t.source).0 == t.stored
                || ternary(t.source) && ternary(t.stored)
        })
    };
    match bundle.manifest().recipe.tensors.iter().find(|t| !exact(t)) {
        None => Ok(()),
        Some(tensor) => Err(Failure::refused(anyhow::anyhow!(
            "{}: {} was {} and is {}: the bundle's own weights cannot tell what was lost",
            model.name,
            tensor.name,
            tensor.source,
            tensor.stored
        ))
        .hint("--source names the checkpoint that the bundle was made from")),
    }
}

/// Reads `input_ids`, `rows` (all, if there is none) and `logits` in F32.
fn read_logits(path: &Path) -> Outcome<ForeignLogits> {
    let name = path.display().to_string();
    let wrong = |problem: String| {
        Failure::input(anyhow::anyhow!("{name}: {problem}"))
            .hint("expected tensors input_ids [T], rows [R] (optional) and F32 logits [R, vocab]")
    };
    let length = std::fs::metadata(path)
        .map_err(|e| wrong(e.to_string()))?
        .len();
    if length > MAX_LOGITS_BYTES {
        return Err(wrong(format!(
            "{length} bytes, expected at most {MAX_LOGITS_BYTES}"
        )));
    }
    let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| wrong(e.to_string()))?;
    let integers = |tensor: &str| -> Outcome<Vec<u64>> {
        let view = file.tensor(tensor).map_err(|e| wrong(e.to_string()))?;
        let data = view.data();
        let value = |b: &[u8]| b.iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b));
        match view.dtype() {
            Dtype::I64 | Dtype::U64 => Ok(data.chunks_exact(8).map(value).collect()),
            Dtype::I32 | Dtype::U32 => Ok(data.chunks_exact(4).map(value).collect()),
            other => Err(wrong(format!("{tensor} is {other:?}, expected integers"))),
        }
    };
    let narrow = |v: u64| u32::try_from(v).map_err(|_| wrong(format!("id {v} is none")));
    let ids: Vec<u32> = integers("input_ids")?
        .into_iter()
        .map(narrow)
        .collect::<Outcome<_>>()?;
    let rows = match file.names().contains(&"rows") {
        true => integers("rows")?.into_iter().map(|v| v as usize).collect(),
        false => (0..ids.len()).collect(),
    };
    let logits = file.tensor("logits").map_err(|e| wrong(e.to_string()))?;
    if logits.dtype() != Dtype::F32 {
        return Err(wrong(format!(
            "logits are {:?}, expected F32",
            logits.dtype()
        )));
    }
    let floats = logits.data().chunks_exact(4);
    let foreign = ForeignLogits {
        ids,
        rows,
        vocab: logits.shape().last().copied().unwrap_or(0),
        logits: floats
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
    };
    foreign.check(&name)?;
    Ok(foreign)
}

/// Puts the transcript where it was asked for and into the bundle's `gates/`. A pass of
/// everything against the source is what makes its recipe verified; a failure of any
/// kind unmakes it.
fn store(args: &args::Gate, candidate: &Model, transcript: &Transcript) -> Outcome<()> {
    if let Some(path) = &args.out {
        write_whole(path, transcript.to_json().as_bytes())?;
    }
    let Some(bundle) = candidate.bundle().filter(|_| args.transcript.is_none()) else {
        return Ok(());
    };
    let path = match transcript.store(bundle.path()) {
        Ok(path) => path,
        // A bundle on a medium that cannot be written is judged all the same.
        Err(error) => {
            output::note(&format!("note: the transcript is not stored: {error}"));
            return Ok(());
        }
    };
    let name = transcript.file_name();
    match transcript.verdict {
        Verdict::Pass | Verdict::PassTie if transcript.is_whole() => {
            set_recipe_status(bundle, Some(&name))?;
        }
        Verdict::Pass | Verdict::PassTie | Verdict::Refused => {}
        Verdict::Fail | Verdict::Error => set_recipe_status(bundle, None)?,
    }
    output::note(&format!("transcript: {}", path.display()));
    Ok(())
}

/// What was found in one run: poisoned references, cases, checks, text.
pub(crate) fn findings(
    red_first: &[RedFirst],
    (cases, results): (&[Case], &[CaseResult]),
    checks: &[Check],
    text: Option<&TextMetrics>,
) -> Outcome<()> {
    let line = |text: String| output::line(&text).or_input();
    for red in red_first {
        line(format!(
            "{:<8} poisoned: {}",
            red.verdict.to_string(),
            red.poison
        ))?;
    }
    for (case, result) in cases.iter().zip(results) {
        let forced = &result.teacher_forced;
        let free = match &result.free_run {
            None => String::new(),
            Some(run) => format!(
                ", free run agrees for {} of {}",
                run.agreed,
                case.steps.len()
            ),
        };
        line(format!(
            "{:<8} {}: {} steps, {} clear, {} flips, {} ties{free}",
            result.verdict.to_string(),
            case.name,
            forced.steps,
            forced.clear,
            forced.flips.len(),
            forced.ties.len()
        ))?;
    }
    for check in checks {
        let status = match check.status {
            Status::Ok => "ok",
            Status::Fail => "FAIL",
            Status::Info => "info",
            Status::Skipped => "skipped",
        };
        line(format!("{status:<8} {}: {}", check.name, check.detail))?;
    }
    if let Some(text) = text {
        line(format!(
            "info     text: {} positions, KL {:.5}, same likeliest token {:.4}, perplexity {:.3} (reference {:.3}), {} of {} clear positions flip",
            text.positions,
            text.kl,
            text.top1,
            text.perplexity_candidate.value,
            text.perplexity_reference.value,
            text.clear_flips,
            text.clear
        ))?;
    }
    Ok(())
}

fn show(transcript: &Transcript) -> Outcome<()> {
    let line = |text: String| output::line(&text).or_input();
    findings(
        &transcript.red_first,
        (&transcript.fixture.cases, &transcript.cases),
        &transcript.checks,
        transcript.text.as_ref(),
    )?;
    if let Some(ladder) = &transcript.ladder {
        let place = ladder
            .layer
            .map_or("no layer".into(), |l| format!("layer {l}"));
        line(format!(
            "ladder   {} step {}: {}, most of it from {place}",
            ladder.case, ladder.step, ladder.cause
        ))?;
        for rung in &ladder.rungs {
            line(format!(
                "         layer {:>3}: storage {:.6} (max {:.2e}), kernel {:.6} (max {:.2e}), own states {:.6} (max {:.2e})",
                rung.layer,
                rung.storage.cosine,
                rung.storage.max_error,
                rung.kernel.cosine,
                rung.kernel.max_error,
                rung.engine.cosine,
                rung.engine.max_error
            ))?;
        }
    }
    for reason in &transcript.provisional {
        line(format!("provisional: {reason}"))?;
    }
    line(format!(
        "{} {} against {}{}",
        transcript.candidate.name,
        transcript.verdict,
        transcript.fixture.reference.model,
        match transcript.weights {
            ReferenceWeights::Source => "",
            ReferenceWeights::Candidate => " (its own weights, decoded)",
            ReferenceWeights::Foreign => " (another program)",
        }
    ))
}

/// The exit code of a verdict.
pub(crate) fn exit(verdict: Verdict, reasons: &[String]) -> Outcome {
    let because = || anyhow::anyhow!("{}", reasons.join("\n"));
    match verdict {
        Verdict::Pass | Verdict::PassTie => Ok(ExitCode::SUCCESS),
        Verdict::Fail => Err(Failure::gate(because())),
        Verdict::Refused => Err(Failure::refused(because())
            .hint("carat fixture sweep finds prompts that the reference is sure of")),
        Verdict::Error => Err(Failure::internal(because())),
    }
}
