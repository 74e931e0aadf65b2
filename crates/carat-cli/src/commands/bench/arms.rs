//! Arms from their descriptions.

use std::net::TcpListener;

use carat_bench::{
    Arm, ArmInfo, ArmKind, ArmKindSpec, ArmSpec, Axis, BenchError, Fidelity, Nanos, Protocol,
    TokenCost,
    arms::{
        CaratProcessArm, CommandArm, EngineArm, LlamaBenchArm, LlamaServerArm, OpenaiArm, Server,
        ServerProcess,
    },
};
use carat_bundle::{digest::file_digest, manifest::format_summary};
use carat_engine::{Engine, EngineOptions, Schedule};
use carat_model::Plan;

use crate::{
    args::{ActKind, EngineKind, ModelOptions, SourceOptions},
    failure::{Failure, OrInput as _, Outcome},
    memory::Request,
    model::{Model, threads},
};

/// An arm whose model is open and whose engine, if it has one, is ready.
pub(super) struct Prepared {
    pub(super) info: ArmInfo,
    kind: ArmKindSpec,
    engine: Option<Engine>,
    limit: Nanos,
}

/// What is known of a model that carat runs.
pub(super) fn describe(
    name: &str,
    kind: ArmKind,
    model: &Model,
    threads: usize,
    chunk: usize,
    protocol: &Protocol,
) -> Outcome<ArmInfo> {
    let plan = Plan::lower(&model.spec).or_input()?;
    let program = concat!("carat ", env!("CARGO_PKG_VERSION"));
    let tensors = model.spec.tensors();
    let elements = tensors.iter().filter_map(|d| d.shape.elements().ok());
    let parameters: u64 = elements.map(|n| n as u64).sum();
    let bytes = model.weight_bytes();
    let formats = tensors
        .iter()
        .filter_map(|d| Some((d.role, model.tensors().info(&d.name)?.dtype)));
    Ok(ArmInfo {
        program_digest: std::env::current_exe()
            .ok()
            .and_then(|path| file_digest(&path, &|_| {}).ok()),
        model_digest: model.bundle().map(|b| b.digest().to_owned()),
        model_bytes: Some(bytes),
        bits_per_weight: Some(8.0 * bytes as f64 / parameters.max(1) as f64),
        formats: Some(format_summary(formats)),
        threads: Some(threads),
        chunk: Some(chunk),
        cost: Some(TokenCost::of(
            &plan,
            &model.spec,
            model.bytes_per_token(),
            protocol.mean_context(),
        )),
        fidelity: match model.bundle() {
            Some(bundle) => Fidelity::of_bundle(bundle.path(), bundle.digest()),
            None => Fidelity::unknown("a checkpoint that was packed in memory"),
        },
        ..ArmInfo::new(name, kind, program, &model.name)
    })
}

/// Options of a model without any.
pub(super) fn model_options(
    model: &str,
    act: Option<&str>,
    threads: Option<usize>,
) -> Outcome<ModelOptions> {
    let act = match act {
        None => None,
        Some("int8") => Some(ActKind::Int8),
        Some("bf16") => Some(ActKind::Bf16),
        Some("f32") => Some(ActKind::F32),
        Some(other) => {
            return Err(Failure::input(anyhow::anyhow!(
                "{model}: act={other}, expected int8, bf16 or f32"
            )));
        }
    };
    Ok(ModelOptions {
        model: model.to_owned(),
        engine: EngineKind::Auto,
        device: "cpu".into(),
        act,
        kv: None,
        ctx: None,
        threads,
        no_cache: false,
        source: SourceOptions::default(),
        json: false,
    })
}

/// Refuses a trial that the context has no room for.
pub(super) fn check_context(
    model: &Model,
    options: &ModelOptions,
    protocol: &Protocol,
) -> Outcome<()> {
    let context = model.context(options);
    if protocol.tokens() <= context {
        return Ok(());
    }
    Err(BenchError::Context {
        prompt: protocol.prompt_tokens,
        new: protocol.new_tokens,
        depth: protocol.depth,
        context,
    }
    .into())
}

/// Sizes that arms run with, where they name none of their own or the size is what
/// is swept.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    pub(super) threads: Option<usize>,
    pub(super) chunk: Option<usize>,
    /// The axis that is swept.
    pub(super) swept: Option<Axis>,
}

impl Sizes {
    fn of(self, axis: Axis, own: Option<usize>, given: Option<usize>) -> Option<usize> {
        match self.swept == Some(axis) {
            true => given,
            false => own.or(given),
        }
    }

    fn chunk(self, own: Option<usize>) -> Option<usize> {
        self.of(Axis::Chunk, own, self.chunk)
    }

    fn threads(self, own: Option<usize>) -> Option<usize> {
        self.of(Axis::Threads, own, self.threads)
    }
}

/// Opens what an arm needs.
pub(super) fn prepare(
    spec: &ArmSpec,
    sizes: Sizes,
    protocol: &Protocol,
    limit: Nanos,
) -> Outcome<Prepared> {
    let name = spec.label();
    let threads = threads(sizes.threads(spec.threads))?;
    let foreign = |kind, model: &str| {
        let base = std::path::Path::new(model).file_name();
        let base = base.map_or(model.into(), |n| n.to_string_lossy());
        ArmInfo {
            threads: Some(threads),
            ..ArmInfo::new(&name, kind, "unknown", &base)
        }
    };
    // Both kinds of carat: what is opened is the same.
    let carat = |kind, model: &str, chunk: Option<usize>, act: Option<&str>| {
        let options = model_options(model, act, Some(threads))?;
        let chunk = chunk.unwrap_or(EngineOptions::DEFAULT_CHUNK);
        Schedule::prefill(chunk)?;
        let opened = Model::for_engine(&options)?;
        check_context(&opened, &options, protocol)?;
        let mut info = describe(&name, kind, &opened, threads, chunk, protocol)?;
        info.vocab_size = Some(opened.spec.vocab_size);
        Ok::<_, Failure>((info, opened, options, chunk))
    };
    let mut engine = None;
    let info = match &spec.kind {
        ArmKindSpec::Carat { model, chunk, act } => {
            let (mut info, opened, options, chunk) =
                carat(ArmKind::Carat, model, sizes.chunk(*chunk), act.as_deref())?;
            let request = Request::new(protocol.tokens(), protocol.tokens(), chunk);
            engine = Some(opened.engine(&options, &request)?);
            info.optimised = Some(!cfg!(debug_assertions));
            info
        }
        ArmKindSpec::CaratProcess {
            model, chunk, act, ..
        } => {
            let kind = ArmKind::CaratProcess;
            carat(kind, model, sizes.chunk(*chunk), act.as_deref())?.0
        }
        ArmKindSpec::LlamaBench { model, .. } => {
            let mut info = foreign(ArmKind::LlamaBench, model);
            info.model_digest = Some(file_digest(std::path::Path::new(model), &|_| {}).or_input()?);
            info
        }
        ArmKindSpec::LlamaServer { url, model, .. } => {
            let target = model.as_deref().or(url.as_deref());
            let target = target.ok_or_else(|| BenchError::Spec {
                text: name.clone(),
                problem: "neither url nor model is given".into(),
            })?;
            foreign(ArmKind::LlamaServer, target)
        }
        ArmKindSpec::Openai { model, .. } => ArmInfo::new(&name, ArmKind::Openai, "unknown", model),
        ArmKindSpec::Command { argv, model, .. } => {
            let mut info = foreign(ArmKind::Command, model);
            info.program = argv.first().cloned().unwrap_or_default();
            info
        }
    };
    Ok(Prepared {
        info,
        kind: spec.kind.clone(),
        engine,
        limit,
    })
}

impl Prepared {
    /// The engine of an arm of this process.
    pub(super) fn engine(&mut self) -> Option<&mut Engine> {
        self.engine.as_mut()
    }

    /// The arm; servers are started now.
    pub(super) fn arm(&mut self) -> Outcome<Box<dyn Arm + '_>> {
        let (info, limit) = (self.info.clone(), self.limit);
        let threads = info.threads.unwrap_or(1).to_string();
        Ok(match &self.kind {
            ArmKindSpec::Carat { .. } => {
                let engine = self.engine.as_mut();
                let engine = engine.ok_or_else(|| {
                    Failure::internal(anyhow::anyhow!("{}: its engine is not open", info.name))
                })?;
                Box::new(EngineArm::new(info, engine))
            }
            ArmKindSpec::CaratProcess {
                model,
                program,
                act,
                chunk: _,
            } => {
                let own = std::env::current_exe().or_input()?;
                let program = program.clone();
                let program = program.unwrap_or_else(|| own.to_string_lossy().into_owned());
                let mut argv = vec![program, "bench".into(), model.clone()];
                argv.extend(["--threads".into(), threads]);
                for (option, value) in [
                    ("--chunk", info.chunk.map(|c| c.to_string())),
                    ("--act", act.clone()),
                ] {
                    if let Some(value) = value {
                        argv.extend([option.into(), value]);
                    }
                }
                Box::new(CaratProcessArm::new(info, argv, limit))
            }
            ArmKindSpec::LlamaBench {
                model,
                program,
                args,
            } => Box::new(LlamaBenchArm::new(
                info,
                program.clone(),
                model.clone(),
                args.clone(),
                limit,
            )),
            ArmKindSpec::LlamaServer { url: Some(url), .. } => Box::new(LlamaServerArm::new(
                Server::new(info, url.clone(), None, limit),
            )),
            ArmKindSpec::LlamaServer {
                url: None,
                model,
                program,
                args,
            } => {
                // A port that nobody has just now.
                let listener = TcpListener::bind("127.0.0.1:0").or_input()?;
                let port = listener.local_addr().or_input()?.port();
                drop(listener);
                let url = format!("http://127.0.0.1:{port}");
                let port = port.to_string();
                let model = model.clone().unwrap_or_default();
                let mut argv: Vec<String> = ["-m", &model, "-t", &threads, "--port", &port]
                    .map(str::to_owned)
                    .into();
                argv.extend(args.iter().cloned());
                let process = ServerProcess::start(&info.name, program, &argv, &url, limit)?;
                let server = Server::new(info, url, Some(process), limit);
                Box::new(LlamaServerArm::new(server))
            }
            ArmKindSpec::Openai {
                url, key_variable, ..
            } => {
                let key = key_variable.as_deref().map(std::env::var);
                let key = key.transpose().or_input()?;
                let server = Server::new(info, url.clone(), None, limit);
                Box::new(OpenaiArm::new(server, key))
            }
            ArmKindSpec::Command { argv, parser, .. } => {
                Box::new(CommandArm::new(info, argv.clone(), parser.clone(), limit))
            }
        })
    }
}
