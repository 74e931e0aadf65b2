//! `carat demo`: the whole way on the small ternary model that ships with carat.

use std::path::PathBuf;

use carat_bench::{Bounds, Protocol};
use carat_bundle::{
    verify::{VerifyOptions, verify},
    writer::CommandRecord,
};
use carat_engine::{EngineOptions, GenerateOptions};
use carat_fidelity::Status;
use carat_text::Message;

use super::{
    answer::{Speaker, footer, stream},
    bench, gate,
};
use crate::{
    args::{self, EngineKind, ModelOptions, SourceOptions},
    failure::{Failure, OrInput as _, Outcome},
    memory::Request,
    model::{Conversion, Model, content_digest, convert_checkpoint, open_checkpoint, threads},
    output::{self, bytes},
};

const MODEL: &[u8] = include_bytes!("../../../../models/wren-ternary-tq2_0.gguf");
const QUESTION: &str = "What is the capital of France?";

/// A folder that goes away with the demo.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // Leftovers in the temporary folder are the system's to clean.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn run() -> Outcome {
    let scratch = Scratch(std::env::temp_dir().join(format!("carat-demo-{}", std::process::id())));
    std::fs::create_dir_all(&scratch.0).or_input()?;
    let gguf = scratch.0.join("wren-ternary-tq2_0.gguf");
    std::fs::write(&gguf, MODEL).or_input()?;
    let say = |text: &str| output::line(text).or_input();

    say("1. inspect: a real 7-million-parameter model with ternary weights (TQ2_0)")?;
    let checkpoint = open_checkpoint(&gguf, &SourceOptions::default())?;
    say(&format!(
        "   {} layers, hidden {}, vocabulary {}, {} weights in {}",
        checkpoint.spec.layers.len(),
        checkpoint.spec.hidden_size,
        checkpoint.spec.vocab_size,
        format!("{:?}", checkpoint.origin.weights).to_lowercase(),
        bytes(MODEL.len() as u64)
    ))?;
    if checkpoint.origin.permuted_qk {
        say("   q and k rows are permuted in the file: undone, and recorded")?;
    }

    say("2. convert to a bundle, and verify it")?;
    let bundle_path = scratch.0.join("wren.carat");
    let command = CommandRecord {
        command: "carat demo".into(),
        ..CommandRecord::default()
    };
    let digest = content_digest(&gguf)?;
    let report = convert_checkpoint(
        &checkpoint,
        Conversion::default(),
        Some(digest),
        &bundle_path,
        command,
    )?;
    let size = report.manifest.size_report.stored_bytes;
    say(&format!(
        "   {} ({:.2} bits per weight)",
        bytes(size),
        report.manifest.size_report.bits_per_weight
    ))?;
    let verified = verify(&bundle_path, &VerifyOptions::default());
    if !verified.passed() {
        return Err(Failure::gate(anyhow::anyhow!(
            "the bundle does not verify:\n{verified}"
        )));
    }
    say(&format!(
        "   verified: {} checks hold",
        verified.checks.len()
    ))?;

    let options = ModelOptions {
        model: bundle_path.to_string_lossy().into_owned(),
        engine: EngineKind::Auto,
        device: "cpu".into(),
        act: None,
        kv: None,
        ctx: None,
        threads: None,
        no_cache: false,
        source: SourceOptions::default(),
        json: false,
    };
    let model = Model::for_engine(&options)?;
    let speaker = Speaker::new(&model)?;
    let capacity = model.spec.max_context;
    let chunk = EngineOptions::DEFAULT_CHUNK;
    let mut engine = model.engine(&options, &Request::new(capacity, capacity, chunk))?;

    say("3. gate: what it answers against the fp32 oracle, which shares no kernel with it")?;
    let asked = args::Gate {
        model: options.clone(),
        reference_model: Some(gguf.to_string_lossy().into_owned()),
        adapter: None,
        fixture: None,
        reference: None,
        transcript: None,
        text: None,
        out: None,
    };
    let judged = gate::judge(&asked, &model)?;
    let forced = || judged.cases.iter().map(|c| &c.teacher_forced);
    let checks = judged.checks.iter().filter(|c| c.status == Status::Ok);
    say(&format!(
        "   {} prompts, {} steps, {} of them clear (margin at least 0.1): {} flips, {} ties; {} checks hold",
        judged.cases.len(),
        forced().map(|f| f.steps).sum::<usize>(),
        forced().map(|f| f.clear).sum::<usize>(),
        forced().map(|f| f.flips.len()).sum::<usize>(),
        forced().map(|f| f.ties.len()).sum::<usize>(),
        checks.count()
    ))?;

    say("4. answer")?;
    say(&format!("   > {QUESTION}"))?;
    output::piece("   ").or_input()?;
    let messages = [Message::new("user", QUESTION)];
    let (_, ids) = speaker.render(&messages, Some(false))?;
    let mut sequence = engine.open(capacity)?;
    let request = GenerateOptions {
        max_new_tokens: 100,
        stop_ids: speaker.stop_ids().clone(),
        ..GenerateOptions::default()
    };
    let answer = stream(
        &mut engine,
        &mut sequence,
        &speaker,
        &ids,
        &request,
        &[],
        false,
    )?;
    engine.close(sequence);
    say("")?;
    say(&format!("   {}", footer(&answer, false)))?;

    say("5. speed")?;
    if cfg!(debug_assertions) {
        say("   not measured: this is a debug build")?;
    } else {
        let protocol = Protocol {
            prompt_tokens: 256,
            new_tokens: 64,
            ..Protocol::default()
        };
        let options = bench::tolerant(protocol, 3);
        let chunk = EngineOptions::DEFAULT_CHUNK;
        let threads = threads(None)?;
        let mut measured = bench::measure_one(&model, &mut engine, &options, threads, chunk)?;
        carat_bench::bound(std::slice::from_mut(&mut measured), &mut Bounds::measure)?;
        let median = |s: Option<carat_bench::Spread>| s.map_or(0.0, |s| s.median);
        say(&format!(
            "   prompt {:.0} tok/s, decode {:.0} tok/s on {}",
            median(measured.prompt_tps),
            median(measured.decode_tps),
            engine.backend().describe()
        ))?;
    }
    say(&format!(
        "size {}   verdict {}",
        bytes(size),
        judged.verdict
    ))?;
    gate::exit(judged.verdict, &judged.reasons)
}
