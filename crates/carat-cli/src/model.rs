//! Opening whatever MODEL names.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use carat_bundle::{
    Bundle,
    cache::{Cache, CacheKey},
    convert::{ConvertOptions, convert},
    manifest::{ActivationKind, SourceKind, SourceRecord, WeightsKind},
    source::TensorSource,
    spec::ModelSpec,
    text::TextAssets,
    writer::CommandRecord,
};
use carat_engine::{Engine, EngineOptions};
use carat_import::Checkpoint;
use carat_kernels::Isa;
use carat_model::{
    ActPrecision, MemoryWeights, Plan, WeightStore,
    cpu::{CpuBackend, CpuOptions},
};

use crate::{
    args::{ActKind, EngineKind, KvKind, ModelOptions},
    failure::{Failure, OrInput as _, Outcome},
    memory::Needs,
    output,
    progress::Bar,
};

/// Where MODEL is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Located {
    /// A bundle folder.
    Bundle(PathBuf),
    /// A checkpoint: a folder with a config, or a GGUF file.
    Checkpoint(PathBuf),
}

/// Finds MODEL: a path first, then a pulled name.
pub(crate) fn locate(model: &str) -> Outcome<Located> {
    let path = Path::new(model);
    if path.is_dir() {
        if path.join("manifest.json").is_file() {
            return Ok(Located::Bundle(path.into()));
        }
        if path.join("config.json").is_file() {
            return Ok(Located::Checkpoint(path.into()));
        }
        return Err(Failure::input(anyhow::anyhow!(
            "{model}: neither a bundle (manifest.json) nor a checkpoint (config.json)"
        ))
        .hint("give the folder that holds the file, or the .gguf file itself"));
    }
    if path.is_file() {
        return Ok(Located::Checkpoint(path.into()));
    }
    let pulled = carat_hub::default_models_dir().and_then(|dir| carat_hub::find(model, &dir));
    if let Some(path) = pulled {
        return Ok(Located::Checkpoint(path));
    }
    let hint = if carat_hub::pinned().iter().any(|p| p.name == model) {
        format!("carat pull {model}")
    } else {
        "give a bundle folder, a checkpoint folder, a .gguf file or a pulled name (carat pull lists them)"
            .into()
    };
    Err(Failure::input(anyhow::anyhow!(
        "{model}: no such file, folder or pulled model"
    ))
    .hint(hint))
}

/// Opens a checkpoint, with the importer's own hint on failure.
pub(crate) fn open_checkpoint(path: &Path) -> Outcome<Checkpoint> {
    Ok(carat_import::open(path)?)
}

/// What a bundle says of where it came from.
pub(crate) fn source_record(checkpoint: &Checkpoint, digest: Option<String>) -> SourceRecord {
    let origin = &checkpoint.origin;
    SourceRecord {
        kind: match origin.kind {
            carat_import::SourceKind::Gguf => SourceKind::Gguf,
            carat_import::SourceKind::Safetensors => SourceKind::Safetensors,
        },
        name: base_name(&origin.path),
        architecture: origin.architecture.clone(),
        digest,
        revision: origin.revision.clone(),
        weights: match origin.weights {
            carat_import::WeightKind::Dense => WeightsKind::Dense,
            carat_import::WeightKind::Quantized => WeightsKind::Quantized,
            carat_import::WeightKind::Ternary => WeightsKind::Ternary,
            carat_import::WeightKind::TernaryLatent => WeightsKind::TernaryLatent,
        },
        permuted_qk: origin.permuted_qk,
        notes: origin.notes.clone(),
        declared: None,
    }
}

/// Last part of a path: bundles record no location of a machine.
pub(crate) fn base_name(path: &Path) -> String {
    let canonical = path.canonicalize();
    canonical
        .as_deref()
        .unwrap_or(path)
        .file_name()
        .map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
}

/// Converts a checkpoint into a bundle at `target` with the default recipe.
pub(crate) fn convert_checkpoint(
    checkpoint: &Checkpoint,
    digest: Option<String>,
    target: &Path,
    overwrite: bool,
    command: CommandRecord,
) -> Outcome<carat_bundle::ConvertReport> {
    let bar = Bar::new();
    bar.start("converting", Some(1), true);
    let on_progress =
        |p: carat_bundle::convert::ConvertProgress<'_>| bar.report(p.done_bytes, p.total_bytes);
    let options = ConvertOptions {
        name: checkpoint.origin.name.clone(),
        overwrite,
        progress: Some(&on_progress),
        command,
        ..ConvertOptions::default()
    };
    Ok(convert(
        checkpoint.tensors.as_ref(),
        &checkpoint.spec,
        &checkpoint.text,
        source_record(checkpoint, digest),
        &options,
        target,
    )?)
}

/// An opened model.
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) spec: ModelSpec,
    pub(crate) text: TextAssets,
    held: Held,
}

enum Held {
    Bundle(Arc<Bundle>),
    /// `--no-cache` or the oracle: the checkpoint itself.
    Checkpoint(Box<Checkpoint>),
}

impl Model {
    /// Opens MODEL. A checkpoint is converted once into the cache, unless
    /// `as_is` keeps it as it is.
    pub(crate) fn open(model: &str, as_is: bool) -> Outcome<Model> {
        match locate(model)? {
            Located::Bundle(path) => Model::from_bundle(Bundle::open(&path).or_input()?),
            Located::Checkpoint(path) if as_is => {
                let checkpoint = open_checkpoint(&path)?;
                Ok(Model {
                    name: checkpoint
                        .origin
                        .name
                        .clone()
                        .unwrap_or_else(|| base_name(&path)),
                    spec: checkpoint.spec.clone(),
                    text: checkpoint.text.clone(),
                    held: Held::Checkpoint(Box::new(checkpoint)),
                })
            }
            Located::Checkpoint(path) => Model::from_bundle(cached(&path)?),
        }
    }

    /// Opens MODEL as an engine needs it: the oracle walks the checkpoint itself.
    ///
    /// Options that cannot be served are refused first, before anything is converted.
    pub(crate) fn for_engine(options: &ModelOptions) -> Outcome<Model> {
        check_options(options)?;
        let as_is = options.no_cache || options.engine == EngineKind::Oracle;
        Model::open(&options.model, as_is)
    }

    fn from_bundle(bundle: Bundle) -> Outcome<Model> {
        Ok(Model {
            name: bundle.manifest().name.clone(),
            spec: bundle.manifest().spec.clone(),
            text: bundle.text().or_input()?,
            held: Held::Bundle(Arc::new(bundle)),
        })
    }

    /// The bundle, unless a checkpoint is used as it is.
    pub(crate) fn bundle(&self) -> Option<&Bundle> {
        match &self.held {
            Held::Bundle(bundle) => Some(bundle),
            Held::Checkpoint(_) => None,
        }
    }

    /// The checkpoint, if it is used as it is.
    pub(crate) fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.held {
            Held::Bundle(_) => None,
            Held::Checkpoint(checkpoint) => Some(checkpoint),
        }
    }

    /// Tensors in logical form.
    pub(crate) fn tensors(&self) -> &dyn TensorSource {
        match &self.held {
            Held::Bundle(bundle) => bundle.as_ref(),
            Held::Checkpoint(checkpoint) => checkpoint.tensors.as_ref(),
        }
    }

    /// Bytes of all weights as stored.
    pub(crate) fn weight_bytes(&self) -> u64 {
        match &self.held {
            Held::Bundle(bundle) => bundle.manifest().size_report.stored_bytes,
            Held::Checkpoint(checkpoint) => checkpoint
                .spec
                .tensors()
                .iter()
                .filter_map(|d| {
                    let info = checkpoint.tensors.info(&d.name)?;
                    info.shape.bytes(info.dtype).ok()
                })
                .map(|b| b as u64)
                .sum(),
        }
    }

    /// Weight bytes that one decoded token reads: everything but the embedding
    /// table, of which it reads a row, unless the head is tied to it.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        let table = self
            .tensors()
            .info("embed.weight")
            .and_then(|i| i.shape.bytes(i.dtype).ok());
        let table = table.unwrap_or(0) as u64;
        let rows = self.spec.vocab_size.max(1) as u64;
        let skipped = if self.spec.head.tied {
            0
        } else {
            table - table / rows
        };
        self.weight_bytes().saturating_sub(skipped)
    }

    /// The context to open sequences with: as asked, else the model's own, else
    /// (for `extend_to` tokens given by their ids) as long as they need.
    pub(crate) fn context(&self, options: &ModelOptions, extend_to: usize) -> usize {
        let max = self.spec.max_context;
        let context = options.ctx.unwrap_or(max.max(extend_to));
        if context > max {
            output::note(&format!(
                "note: a context of {context} tokens goes beyond the {max} that the model was made for"
            ));
        }
        context
    }

    /// An engine, for a request that will hold `tokens` tokens at most.
    pub(crate) fn engine(
        &self,
        options: &ModelOptions,
        chunk: Option<usize>,
        tokens: usize,
    ) -> Outcome<Engine> {
        if options.engine == EngineKind::Oracle {
            return Err(
                Failure::input(anyhow::anyhow!("this command cannot run on the oracle"))
                    .hint("logits, generate and score can: carat logits MODEL --engine oracle …"),
            );
        }
        let plan = Plan::lower(&self.spec).or_input()?;
        let chunk = chunk.unwrap_or(EngineOptions::DEFAULT_CHUNK);
        if chunk == 0 {
            return Err(Failure::input(anyhow::anyhow!(
                "--chunk 0: a chunk has at least one token"
            )));
        }
        Needs::of(&plan, self.weight_bytes(), tokens, chunk).require(tokens)?;
        let weights: Arc<dyn WeightStore> = match &self.held {
            Held::Bundle(bundle) => Arc::clone(bundle) as Arc<dyn WeightStore>,
            Held::Checkpoint(checkpoint) => Arc::new(
                MemoryWeights::from_source(&checkpoint.spec, checkpoint.tensors.as_ref())
                    .or_input()?,
            ),
        };
        let backend =
            CpuBackend::new(&self.spec, weights, self.cpu_options(options)?).or_input()?;
        Ok(Engine::new(
            Box::new(backend),
            EngineOptions {
                chunk,
                extrapolate: true,
            },
        ))
    }

    /// Instruction set, threads and precision.
    pub(crate) fn cpu_options(&self, options: &ModelOptions) -> Outcome<CpuOptions> {
        let precision = match (
            options.act,
            self.bundle().map(|b| b.manifest().activation.default),
        ) {
            (Some(ActKind::Int8), _) | (None, None | Some(ActivationKind::Int8)) => {
                ActPrecision::Int8
            }
            (Some(ActKind::Bf16), _) | (None, Some(ActivationKind::Bf16)) => ActPrecision::Bf16,
            (Some(ActKind::F32), _) | (None, Some(ActivationKind::F32)) => ActPrecision::F32,
        };
        Ok(CpuOptions {
            isa: Isa::from_env().or_input()?,
            threads: threads(options.threads)?,
            precision,
        })
    }
}

/// Refuses engines, devices and caches that this build does not have, by name.
pub(crate) fn check_options(options: &ModelOptions) -> Outcome<()> {
    let missing =
        |what: String, hint: &str| Err(Failure::input(anyhow::anyhow!("{what}")).hint(hint));
    match options.engine {
        EngineKind::Auto | EngineKind::Sequential | EngineKind::Oracle => {}
        EngineKind::Pipelined => {
            return missing(
                "--engine pipelined: not built yet".into(),
                "use --engine sequential",
            );
        }
        EngineKind::Static => {
            return missing(
                "--engine static: not built yet".into(),
                "use --engine sequential",
            );
        }
    }
    if options.device != "cpu" {
        return missing(
            format!(
                "--device {}: this build runs on the cpu only",
                options.device
            ),
            "leave --device out",
        );
    }
    if options.kv != KvKind::F16 {
        return missing(
            "--kv int8: not built yet".into(),
            "leave --kv out: the cache is fp16",
        );
    }
    if options.ctx == Some(0) {
        return Err(Failure::input(anyhow::anyhow!(
            "--ctx 0: a context has at least one token"
        )));
    }
    threads(options.threads).map(drop)
}

/// Threads to use: as asked, or the physical cores this process may use.
pub(crate) fn threads(asked: Option<usize>) -> Outcome<usize> {
    let max = carat_kernels::MAX_THREADS;
    match asked {
        Some(0) => Err(Failure::input(anyhow::anyhow!(
            "--threads 0: at least one thread runs"
        ))),
        Some(n) if n > max => Err(Failure::input(anyhow::anyhow!(
            "--threads {n}: at most {max}"
        ))),
        Some(n) => Ok(n),
        None => {
            let allowed = std::thread::available_parallelism().map_or(1, usize::from);
            Ok(num_cpus::get_physical().clamp(1, allowed.min(max)))
        }
    }
}

/// The bundle that a checkpoint was converted to, made now if need be.
fn cached(path: &Path) -> Outcome<Bundle> {
    let cache = Cache::open_default().or_input()?;
    let files = carat_import::checkpoint_files(path)?;
    let bar = Bar::new();
    let mut parts = String::new();
    let mut total = 0;
    for file in &files {
        let length = std::fs::metadata(file).map_or(0, |m| m.len());
        bar.start("reading", Some(length), true);
        let digest = cache.file_digest(file, &|done| bar.set(done)).or_input()?;
        parts.push_str(&format!("{} {digest}\n", base_name(file)));
        total += length;
    }
    bar.finish();
    let key = CacheKey::new(&parts, "keep");
    let made = cache.get_or_convert::<Failure>(&key, total, |staging| {
        output::note(&format!(
            "converting {} once into the cache",
            path.display()
        ));
        let checkpoint = open_checkpoint(path)?;
        let digest = carat_import::content_digest(path)?;
        let command = CommandRecord {
            command: "carat convert".into(),
            ..CommandRecord::default()
        };
        convert_checkpoint(&checkpoint, Some(digest), staging, false, command)?;
        Ok(())
    })?;
    Ok(made.bundle)
}
