//! What the gate's tests share: the repository's models, damaged in memory.
#![allow(dead_code)] // each test file uses its part

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

use carat_bundle::{
    source::{SourceError, TensorInfo, TensorSource},
    spec::{ModelSpec, TensorRole},
};
use carat_engine::{Engine, EngineOptions, GenerateOptions};
use carat_fidelity::{
    CandidateRecord, Case, CaseKind, Fixture, Gate, GateReference, OracleKind, Question, Reference,
    ReferenceWeights, Transcript, answer,
};
use carat_import::Checkpoint;
use carat_kernels::Isa;
use carat_model::{
    ActPrecision, Backend, MemoryWeights,
    cpu::{CpuBackend, CpuOptions},
};
use carat_oracle::{Oracle, OracleOptions};
use carat_tensor::{DType, formats};
use carat_text::{StopSet, Tokenizer};
use serde_json::Value;

/// Capacity of every sequence.
pub(crate) const CAPACITY: usize = 512;

pub(crate) fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

/// Tensors in memory, from a checkpoint and changed at will.
#[derive(Clone)]
pub(crate) struct Tensors(pub(crate) BTreeMap<String, (TensorInfo, Vec<u8>)>);

impl Tensors {
    pub(crate) fn of(source: &dyn TensorSource) -> Tensors {
        let one = |name: String| {
            let info = source.info(&name).unwrap();
            let bytes = source.read(&name).unwrap().into_owned();
            (name, (info, bytes))
        };
        Tensors(source.names().into_iter().map(one).collect())
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        let (info, bytes) = &self.0[name];
        let mut out = vec![0.0; info.shape.elements().unwrap()];
        formats::decode(info.dtype, bytes, &mut out).unwrap();
        out
    }

    /// Replaces a tensor by `values` in a format.
    pub(crate) fn set(&mut self, name: &str, dtype: DType, values: &[f32]) {
        let (info, bytes) = self.0.get_mut(name).unwrap();
        info.dtype = dtype;
        bytes.clear();
        bytes.resize(info.shape.bytes(dtype).unwrap(), 0);
        formats::encode(dtype, values, bytes).unwrap();
    }

    /// Changes a tensor's values in its format.
    pub(crate) fn edit(&mut self, name: &str, change: impl FnOnce(&mut [f32])) {
        let mut values = self.floats(name);
        change(&mut values);
        self.set(name, self.0[name].0.dtype, &values);
    }

    /// Every matrix of these roles through an encoder.
    pub(crate) fn quantized(
        &self,
        spec: &ModelSpec,
        roles: &[TensorRole],
        dtype: DType,
        before: impl Fn(&mut [f32]),
    ) -> Tensors {
        let mut out = self.clone();
        for decl in spec.tensors() {
            if roles.contains(&decl.role) {
                let mut values = self.floats(&decl.name);
                before(&mut values);
                out.set(&decl.name, dtype, &values);
            }
        }
        out
    }
}

impl TensorSource for Tensors {
    fn origin(&self) -> &str {
        "memory"
    }
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.0.get(name).map(|(info, _)| info.clone())
    }
    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        let missing = || SourceError::Missing {
            origin: "memory".into(),
            name: name.into(),
        };
        let (_, bytes) = self.0.get(name).ok_or_else(missing)?;
        Ok(Cow::Borrowed(bytes))
    }
}

/// A checkpoint with what its answers need.
pub(crate) struct Model {
    pub(crate) spec: ModelSpec,
    pub(crate) tensors: Tensors,
    pub(crate) stops: BTreeSet<u32>,
    pub(crate) tokenizer: Tokenizer,
}

impl Model {
    pub(crate) fn open(file: &str) -> Model {
        let checkpoint: Checkpoint = carat_import::open(&models().join(file)).unwrap();
        let tokenizer = Tokenizer::from_assets(&checkpoint.text).unwrap();
        let stops = StopSet::from_assets(&tokenizer, &checkpoint.text);
        Model {
            tensors: Tensors::of(checkpoint.tensors.as_ref()),
            stops: stops.ids().clone(),
            spec: checkpoint.spec,
            tokenizer,
        }
    }

    pub(crate) fn oracle(&self) -> Oracle<'_> {
        Oracle::new(&self.spec, &self.tensors, OracleOptions::new(CAPACITY)).unwrap()
    }

    /// Greedy answers of the oracle as cases of a fixture.
    pub(crate) fn cases(
        &self,
        oracle: &Oracle<'_>,
        engine: &mut Engine,
        prompts: &[Prompt],
    ) -> Vec<Case> {
        let questions: Vec<Question> = prompts
            .iter()
            .map(|p| Question {
                ids: p.ids.clone(),
                max_new_tokens: p.tokens,
            })
            .collect();
        let steps = answer(oracle, &questions, &self.stops, &mut |_, ids, tokens| {
            Ok(draft(engine, &self.stops, ids, tokens))
        })
        .unwrap();
        let case = |(p, steps): (&Prompt, Vec<carat_fidelity::Step>)| {
            let stop = steps.last().is_some_and(|s| self.stops.contains(&s.id));
            let mut case = Case {
                name: p.name.clone(),
                kind: p.kind,
                prompt_ids: p.ids.clone(),
                prompt: None,
                answer: None,
                must_stop: stop,
                steps,
                knife_edges: vec![],
            };
            case.declare_knife_edges(carat_fidelity::MARGIN_FLOOR);
            case
        };
        prompts.iter().zip(steps).map(case).collect()
    }

    pub(crate) fn fixture(&self, cases: Vec<Case>) -> Fixture {
        let reference = Reference {
            oracle: OracleKind::Own,
            dtype: "f32".into(),
            model: "wren".into(),
            digest: None,
            revision: None,
            revision_honoured: false,
            template_digest: None,
            vocab_size: self.spec.vocab_size,
            capacity: CAPACITY,
        };
        Fixture::new("test", reference, &self.stops, cases)
    }
}

/// A greedy guess of an engine.
pub(crate) fn draft(
    engine: &mut Engine,
    stops: &BTreeSet<u32>,
    ids: &[u32],
    tokens: usize,
) -> Vec<u32> {
    let mut sequence = engine.open(CAPACITY).unwrap();
    let options = GenerateOptions {
        max_new_tokens: tokens,
        stop_ids: stops.clone(),
        ..GenerateOptions::default()
    };
    let go_on = &mut |_| ControlFlow::Continue(());
    let out = engine.generate(&mut sequence, ids, &options, go_on);
    engine.close(sequence);
    out.unwrap().ids
}

/// Something to ask.
pub(crate) struct Prompt {
    pub(crate) name: String,
    pub(crate) kind: CaseKind,
    pub(crate) ids: Vec<u32>,
    pub(crate) tokens: usize,
}

/// The repository's prompts, with up to `tokens` tokens of answer.
pub(crate) fn prompts(tokens: usize) -> Vec<Prompt> {
    let file = std::fs::read_to_string(models().join("prompts.jsonl")).unwrap();
    file.lines()
        .enumerate()
        .map(|(n, line)| {
            let row: Value = serde_json::from_str(line).unwrap();
            let chat = row["kind"] == "chat";
            Prompt {
                name: format!("{} {n}", if chat { "chat" } else { "raw" }),
                kind: if chat { CaseKind::Chat } else { CaseKind::List },
                ids: serde_json::from_value(row["prompt_ids"].clone()).unwrap(),
                tokens,
            }
        })
        .collect()
}

/// A backend on weights in memory.
pub(crate) fn backend(spec: &ModelSpec, tensors: &Tensors, precision: ActPrecision) -> CpuBackend {
    let weights = Arc::new(MemoryWeights::from_source(spec, tensors).unwrap());
    let options = CpuOptions {
        isa: Isa::from_env().unwrap_or_else(|e| panic!("{e}")),
        threads: 2,
        precision,
        kv: carat_model::KvFormat::F16,
    };
    CpuBackend::new(spec, weights, options).unwrap()
}

pub(crate) fn engine_on(backend: impl Backend + 'static) -> Engine {
    Engine::new(Box::new(backend), EngineOptions::default())
}

pub(crate) fn engine(spec: &ModelSpec, tensors: &Tensors) -> Engine {
    engine_on(backend(spec, tensors, ActPrecision::Int8))
}

/// What is judged.
pub(crate) struct Candidate<'c> {
    pub(crate) engine: Engine,
    pub(crate) spec: &'c ModelSpec,
    pub(crate) tensors: &'c Tensors,
    pub(crate) stops: &'c BTreeSet<u32>,
}

/// Runs the gate on a candidate against the model's oracle.
pub(crate) fn gate(
    model: &Model,
    oracle: &Oracle<'_>,
    fixture: &Fixture,
    mut candidate: Candidate<'_>,
    text: &[u32],
) -> Transcript {
    let gate = Gate {
        engine: &mut candidate.engine,
        spec: candidate.spec,
        tensors: candidate.tensors,
        stops: candidate.stops,
        precision: ActPrecision::Int8,
        record: record(),
        reference: Some(GateReference {
            oracle,
            tensors: &model.tensors,
            weights: ReferenceWeights::Source,
        }),
        text,
        foreign: None,
        progress: &mut |_| {},
    };
    gate.run(fixture).unwrap()
}

pub(crate) fn record() -> CandidateRecord {
    CandidateRecord {
        name: "test".into(),
        digest: Some("0".repeat(64)),
        source_digest: None,
        formats: "in memory".into(),
        backend: "cpu".into(),
        activation: "int8".into(),
    }
}

/// A schema as it is committed, which has to be the current one.
pub(crate) fn committed(name: &str, current: &Value) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../schemas")
        .join(name);
    let text = serde_json::to_string_pretty(current).unwrap() + "\n";
    if std::env::var_os("CARAT_UPDATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).expect(name);
    assert!(stored == text, "{name} is stale: run with CARAT_UPDATE=1");
    serde_json::from_str(&stored).unwrap()
}

/// What a schema finds wrong.
pub(crate) fn errors(schema: &Value, instance: &Value) -> Vec<String> {
    let validator = jsonschema::validator_for(schema).unwrap();
    let errors = validator.iter_errors(instance);
    errors.map(|e| e.to_string()).collect()
}
