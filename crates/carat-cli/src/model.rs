//! Opening whatever MODEL names.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use carat_bundle::{
    Bundle,
    cache::{Cache, CacheKey},
    convert::{ConvertOptions, Quantize, Recipe, as_stored, convert},
    layout::{layout_for, stored_bytes},
    manifest::{
        ActivationContract, ActivationKind, Layout, SourceKind, SourceRecord, WeightsKind,
        is_matrix,
    },
    source::TensorSource,
    spec::{ModelSpec, TensorDecl},
    text::TextAssets,
    writer::CommandRecord,
};
use carat_engine::{Engine, EngineOptions, Sequence};
use carat_import::{
    Checkpoint,
    adapter::{Adapted, Adapter, Merged},
};
use carat_kernels::Isa;
use carat_model::{
    ActPrecision, KvFormat, MemoryWeights, Plan, WeightStore,
    cpu::{CpuBackend, CpuOptions},
};
use carat_oracle::{Oracle, OracleOptions};
use carat_quant::{Calibrated, Quantizer, Truncated, Untied, recipe::schema::Calibration};
use carat_text::{ChatTemplate, StopSet, Tokenizer, check_stops};

use crate::{
    args::{ActKind, EngineKind, KvKind, ModelOptions, SourceOptions},
    crossovers,
    failure::{Failure, OrInput as _, Outcome},
    memory::{Needs, Request},
    output,
    progress::{Bar, Spinner},
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
pub(crate) fn open_checkpoint(path: &Path, source: &SourceOptions) -> Outcome<Checkpoint> {
    let options = carat_import::OpenOptions {
        ignore_keys: source.ignore_keys.clone(),
    };
    Ok(carat_import::open_with(path, &options)?)
}

/// Whether the declared stops can occur in the model's own chats: what is worth
/// saying, in words. Nothing without a tokenizer or a template.
pub(crate) fn stop_findings(text: &TextAssets) -> Vec<String> {
    let (Ok(tokenizer), Ok(Some(template))) = (
        Tokenizer::from_assets(text),
        ChatTemplate::from_assets(text),
    ) else {
        return vec![];
    };
    let stops = StopSet::from_assets(&tokenizer, text);
    check_stops(&template, &tokenizer, &stops)
        .iter()
        .map(ToString::to_string)
        .collect()
}

/// What a bundle says of where it came from.
pub(crate) fn source_record(checkpoint: &Checkpoint, digest: Option<String>) -> SourceRecord {
    let origin = &checkpoint.origin;
    SourceRecord {
        kind: match origin.kind {
            carat_import::SourceKind::Gguf => SourceKind::Gguf,
            carat_import::SourceKind::Safetensors => SourceKind::Safetensors,
        },
        name: source_name(checkpoint),
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
        notes: [origin.notes.clone(), stop_findings(&checkpoint.text)].concat(),
        declared: None,
    }
}

/// What to call a checkpoint: the last part of its path, unless a download put
/// it into a folder that says nothing.
fn source_name(checkpoint: &Checkpoint) -> String {
    let origin = &checkpoint.origin;
    match &origin.repository {
        Some(name) if origin.path.is_dir() => name.clone(),
        _ => base_name(&origin.path),
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

/// BLAKE3 of a checkpoint's files.
pub(crate) fn content_digest(path: &Path) -> Outcome<String> {
    let _busy = Spinner::start("reading the checkpoint");
    Ok(carat_import::content_digest(path)?)
}

/// How the note of a merged adapter begins.
pub(crate) const ADAPTER_NOTE: &str = "adapter ";

/// How the note of a calibration begins.
pub(crate) const CALIBRATION_NOTE: &str = "calibrated on ";

/// Whether any matrix of a checkpoint is stored in integers.
fn has_integers(
    spec: &ModelSpec,
    tensors: &dyn TensorSource,
    quantize: Option<&dyn Quantize>,
) -> bool {
    let is_integer = |decl: &TensorDecl| {
        let dtype = tensors.info(&decl.name)?.dtype;
        let form = quantize.and_then(|q| q.form(decl, dtype).ok()?);
        Some(match form {
            Some((form, _)) => form.is_integer(),
            None => !as_stored(decl.role, dtype).0.is_float(),
        })
    };
    let mut matrices = spec.tensors().into_iter().filter(|d| is_matrix(d.role));
    matrices.any(|decl| is_integer(&decl) == Some(true))
}

/// The arithmetic on activations that stored matrices are made for: weights in
/// floats are multiplied in floats.
pub(crate) fn activation(integers: bool) -> ActivationContract {
    let default = ActivationContract::default();
    if integers {
        return default;
    }
    ActivationContract {
        default: ActivationKind::F32,
        ..default
    }
}

/// How a checkpoint becomes a bundle.
#[derive(Default)]
pub(crate) struct Conversion<'a> {
    /// How tensors are stored that `quantize` leaves alone.
    pub(crate) recipe: Recipe,
    /// What changes weights.
    pub(crate) quantize: Option<&'a dyn Quantize>,
    /// What changes weights once it has seen a text, instead of `quantize`.
    pub(crate) calibrate: Option<Calibrate>,
    /// The model has a head of its own, which its source does not.
    pub(crate) untie_head: bool,
    /// What is added to matrices first.
    pub(crate) adapter: Option<&'a Adapter>,
    /// Layers to keep, if not all.
    pub(crate) layers: Option<usize>,
    /// Replace a bundle at the target.
    pub(crate) overwrite: bool,
    /// Threads, if not as many as there are.
    pub(crate) threads: Option<usize>,
}

/// A quantizer and the text that it is to see.
pub(crate) struct Calibrate {
    pub(crate) quantizer: Quantizer,
    pub(crate) settings: Calibration,
    /// Ids that the model reads together.
    pub(crate) sequences: Vec<Vec<u32>>,
    /// For the bundle's notes.
    pub(crate) note: String,
}

/// Converts a checkpoint into a bundle at `target`.
pub(crate) fn convert_checkpoint(
    checkpoint: &Checkpoint,
    how: Conversion<'_>,
    digest: Option<String>,
    target: &Path,
    command: CommandRecord,
) -> Outcome<carat_bundle::ConvertReport> {
    // A bundle with a vocabulary that cannot be read would fail its own verification.
    if checkpoint.text.tokenizer_json.is_some() {
        Tokenizer::from_assets(&checkpoint.text)?;
    }
    let bar = Bar::new();
    bar.start("converting", Some(1), true);
    let on_progress =
        |p: carat_bundle::convert::ConvertProgress<'_>| bar.report(p.done_bytes, p.total_bytes);
    let mut spec = checkpoint.spec.clone();
    let mut skipped = checkpoint.origin.skipped.clone();
    let (merged, untied);
    let mut tensors = checkpoint.tensors.as_ref();
    let mut origin = source_record(checkpoint, digest);
    if let Some(adapter) = how.adapter {
        merged = Merged {
            source: tensors,
            adapter,
        };
        tensors = &merged;
        origin.notes.push(format!(
            "{ADAPTER_NOTE}{} (BLAKE3 {}) is merged into {} matrices",
            adapter.name,
            adapter.digest,
            adapter.matrices()
        ));
    }
    if how.untie_head && spec.head.tied {
        spec.head.tied = false;
        untied = Untied(tensors);
        tensors = &untied;
    }
    if let Some(layers) = how.layers {
        let cut = Truncated::new(&spec, layers);
        spec = cut.spec;
        skipped.extend(cut.skipped);
    }
    let (oracle, calibrated);
    let mut quantize: Option<&dyn Quantize> = how.quantize;
    if let Some(calibrate) = how.calibrate {
        let sequences: Vec<&[u32]> = calibrate.sequences.iter().map(Vec::as_slice).collect();
        let longest = sequences.iter().map(|s| s.len()).max().unwrap_or(1);
        let options = OracleOptions {
            // One layer at a time is needed, once.
            resident_bytes: 0,
            threads: threads(how.threads)?,
            ..OracleOptions::new(longest)
        };
        let tokens = sequences.iter().map(|s| s.len()).sum();
        Needs::of_oracle(&spec, &options, tokens, 0).require(tokens, 0)?;
        oracle = Oracle::new(&spec, tensors, options)?;
        origin.notes.push(calibrate.note);
        let (quantizer, settings) = (calibrate.quantizer, &calibrate.settings);
        calibrated = Calibrated::new(quantizer, settings, &oracle, tensors, &sequences)?;
        quantize = Some(&calibrated);
    }
    let defaults = ConvertOptions::default();
    let options = ConvertOptions {
        name: checkpoint.origin.name.clone(),
        overwrite: how.overwrite,
        progress: Some(&on_progress),
        recipe: how.recipe,
        quantize,
        shippable: how.layers.is_none(),
        activation: activation(has_integers(&spec, tensors, quantize)),
        skipped,
        command,
        threads: how.threads.unwrap_or(defaults.threads),
        ..defaults
    };
    Ok(convert(
        tensors,
        &spec,
        &checkpoint.text,
        origin,
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
    pub(crate) fn open(model: &str, source: &SourceOptions, as_is: bool) -> Outcome<Model> {
        match locate(model)? {
            Located::Bundle(path) => Model::from_bundle(Bundle::open(&path).or_input()?),
            Located::Checkpoint(path) if as_is => {
                let checkpoint = open_checkpoint(&path, source)?;
                Ok(Model {
                    name: checkpoint
                        .origin
                        .name
                        .clone()
                        .unwrap_or_else(|| source_name(&checkpoint)),
                    spec: checkpoint.spec.clone(),
                    text: checkpoint.text.clone(),
                    held: Held::Checkpoint(Box::new(checkpoint)),
                })
            }
            Located::Checkpoint(path) => Model::from_bundle(cached(&path, source)?),
        }
    }

    /// Opens MODEL as an engine needs it: the oracle walks the checkpoint itself.
    ///
    /// Options that cannot be served are refused first, before anything is converted.
    pub(crate) fn for_engine(options: &ModelOptions) -> Outcome<Model> {
        check_options(options)?;
        let as_is = options.no_cache || options.engine == EngineKind::Oracle;
        Model::open(&options.model, &options.source, as_is)
    }

    fn from_bundle(bundle: Bundle) -> Outcome<Model> {
        Ok(Model {
            name: bundle.manifest().name.clone(),
            spec: bundle.manifest().spec.clone(),
            text: bundle.text().or_input()?,
            held: Held::Bundle(Arc::new(bundle)),
        })
    }

    /// The checkpoint with an adapter merged into its weights.
    pub(crate) fn adapted(self, adapter: Adapter) -> Model {
        let held = match self.held {
            Held::Checkpoint(checkpoint) => {
                let mut checkpoint = *checkpoint;
                checkpoint.tensors = Box::new(Adapted {
                    source: checkpoint.tensors,
                    adapter,
                });
                Held::Checkpoint(Box::new(checkpoint))
            }
            bundle => bundle,
        };
        Model { held, ..self }
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

    /// Bytes of a tensor as an engine holds it: of a checkpoint, what the default
    /// recipe makes of it.
    fn held_bytes(&self, decl: &TensorDecl) -> u64 {
        self.tensors().info(&decl.name).map_or(0, |info| {
            let (dtype, _) = as_stored(decl.role, info.dtype);
            let layout = layout_for(decl.role, dtype, &info.shape);
            // What has no size in that form is refused when it is packed.
            stored_bytes(layout, dtype, &info.shape).unwrap_or(0)
        })
    }

    /// Bytes of all weights as an engine holds them.
    pub(crate) fn weight_bytes(&self) -> u64 {
        match &self.held {
            Held::Bundle(bundle) => bundle.manifest().size_report.stored_bytes,
            Held::Checkpoint(checkpoint) => {
                let tensors = checkpoint.spec.tensors();
                tensors.iter().map(|decl| self.held_bytes(decl)).sum()
            }
        }
    }

    /// Weight bytes that one decoded token reads: everything but the embedding
    /// table, of which it reads a row, unless the head is tied to it.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        let tensors = self.spec.tensors();
        let table = tensors
            .iter()
            .find(|decl| decl.name == "embed.weight")
            .map_or(0, |decl| self.held_bytes(decl));
        let rows = self.spec.vocab_size.max(1) as u64;
        let skipped = if self.spec.head.tied {
            0
        } else {
            table - table / rows
        };
        self.weight_bytes().saturating_sub(skipped)
    }

    /// The context to open sequences with: as asked, else the model's own. What does
    /// not fit in it is refused by every command alike ([`require_context`]); only
    /// `--ctx` goes beyond what the model was made for, and says so.
    pub(crate) fn context(&self, options: &ModelOptions) -> usize {
        let max = self.spec.max_context;
        let context = options.ctx.unwrap_or(max);
        if context > max {
            output::note(&format!(
                "note: a context of {context} tokens goes beyond the {max} that the model was made for"
            ));
        }
        context
    }

    /// An engine, for a request: what does not fit is refused first.
    pub(crate) fn engine(&self, options: &ModelOptions, request: &Request) -> Outcome<Engine> {
        if options.engine == EngineKind::Oracle {
            return Err(
                Failure::input(anyhow::anyhow!("this command cannot run on the oracle"))
                    .hint("logits, generate and score can: carat logits MODEL --engine oracle …"),
            );
        }
        self.require_kernels()?;
        let plan = Plan::lower(&self.spec).or_input()?;
        let cpu = self.cpu_options(options)?;
        if request.chunk == 0 {
            return Err(Failure::input(anyhow::anyhow!(
                "--chunk 0: a chunk has at least one token"
            )));
        }
        Needs::of(&plan, self.weight_bytes(), cpu.kv, request).require(request.tokens, 0)?;
        let weights: Arc<dyn WeightStore> = match &self.held {
            Held::Bundle(bundle) => Arc::clone(bundle) as Arc<dyn WeightStore>,
            Held::Checkpoint(checkpoint) => Arc::new(packed(checkpoint)?),
        };
        let mut backend = CpuBackend::new(&self.spec, weights, cpu)?;
        backend.set_crossovers(crossovers::table(&backend).crossovers());
        Ok(Engine::new(
            Box::new(backend),
            EngineOptions {
                chunk: request.chunk,
                extrapolate: true,
            },
        ))
    }

    /// Where products of the engine change kernels. `None` for a checkpoint: it
    /// would have to be packed first.
    pub(crate) fn crossovers(&self, options: &ModelOptions) -> Outcome<Option<crossovers::Table>> {
        let Held::Bundle(bundle) = &self.held else {
            return Ok(None);
        };
        self.require_kernels()?;
        let weights = Arc::clone(bundle) as Arc<dyn WeightStore>;
        let backend = CpuBackend::new(&self.spec, weights, self.cpu_options(options)?)?;
        Ok(Some(crossovers::table(&backend)))
    }

    /// Refuses a bundle that is not laid out for kernels.
    fn require_kernels(&self) -> Outcome<()> {
        let tensors = self.bundle().map_or(&[][..], |b| &b.manifest().tensors);
        match tensors.iter().find(|t| t.layout == Layout::Sections) {
            None => Ok(()),
            Some(t) => Err(Failure::input(anyhow::anyhow!(
                "tensor {:?} is stored as {} in sections, which no kernel of the CPU engine reads",
                t.name,
                t.form()
            ))
            .hint("--engine oracle reads it; carat convert --target native makes what runs")),
        }
    }

    /// Refuses another request on an engine of this model, if it does not fit.
    pub(crate) fn require(
        &self,
        engine: &Engine,
        sequence: &Sequence,
        request: &Request,
    ) -> Outcome<()> {
        let backend = engine.backend();
        let cache = engine.cache_tokens_for(sequence, request.tokens)?;
        let weights = self.weight_bytes();
        // Mapped weights count as free memory of the system, packed ones do not.
        let packed = self.checkpoint().map_or(0, |_| weights);
        let held = (backend.resident_bytes() as u64).saturating_add(packed);
        Needs::with_cache(backend.plan(), weights, backend.kv_format(), request, cache)
            .require(request.tokens, held)
    }

    /// The oracle with sequences of up to `capacity` tokens, for work on `tokens`
    /// tokens at a time that keeps `kept_rows` rows of logits.
    pub(crate) fn oracle(
        &self,
        options: &ModelOptions,
        capacity: usize,
        tokens: usize,
        kept_rows: usize,
    ) -> Outcome<Oracle<'_>> {
        let oracle_options = OracleOptions {
            threads: match options.threads {
                None => OracleOptions::new(capacity).threads,
                asked => threads(asked)?,
            },
            ..OracleOptions::new(capacity)
        };
        Needs::of_oracle(&self.spec, &oracle_options, tokens, kept_rows).require(tokens, 0)?;
        Ok(Oracle::new(&self.spec, self.tensors(), oracle_options)?)
    }

    /// Instruction set, threads and precision.
    pub(crate) fn cpu_options(&self, options: &ModelOptions) -> Outcome<CpuOptions> {
        let contract = self.bundle().map(|b| b.manifest().activation);
        let precision = precision(options, contract.unwrap_or_default());
        if let Some(contract) = contract.filter(|_| precision == ActPrecision::Int8) {
            check_groups(contract)?;
        }
        Ok(CpuOptions {
            isa: Isa::from_env().or_input()?,
            threads: threads(options.threads)?,
            precision,
            kv: kv_format(options, precision),
        })
    }
}

/// The precision of activations: as asked, else as the weights are made for.
pub(crate) fn precision(options: &ModelOptions, contract: ActivationContract) -> ActPrecision {
    match (options.act, contract.default) {
        (Some(ActKind::Int8), _) | (None, ActivationKind::Int8) => ActPrecision::Int8,
        (Some(ActKind::Bf16), _) | (None, ActivationKind::Bf16) => ActPrecision::Bf16,
        (Some(ActKind::F32), _) | (None, ActivationKind::F32) => ActPrecision::F32,
    }
}

/// The format of keys and values: as asked, else as suits the activations.
pub(crate) fn kv_format(options: &ModelOptions, precision: ActPrecision) -> KvFormat {
    match (options.kv, precision) {
        (Some(KvKind::F32), _) | (None, ActPrecision::F32) => KvFormat::F32,
        _ => KvFormat::F16,
    }
}

/// Refuses ids that are more than the context holds.
pub(crate) fn require_context(ids: usize, context: usize) -> Outcome<()> {
    match ids > context {
        false => Ok(()),
        true => Err(carat_engine::EngineError::PromptTooLong {
            prompt: ids,
            context,
        }
        .into()),
    }
}

/// Activations per scale that the kernels share under int8: in general, and
/// before ternary weights.
const ACTIVATION_GROUPS: (u32, u32) = (32, 256);

/// Refuses a bundle whose activation groups no kernel has: another group would be
/// other arithmetic than the bundle was made for.
fn check_groups(activation: ActivationContract) -> Outcome<()> {
    for (field, found, expected) in [
        ("group", activation.group, ACTIVATION_GROUPS.0),
        (
            "ternary_group",
            activation.ternary_group,
            ACTIVATION_GROUPS.1,
        ),
    ] {
        if found != expected {
            return Err(Failure::input(anyhow::anyhow!(
                "manifest.json: activation.{field} is {found}, this engine has {expected}"
            ))
            .hint("--act f32 and --act bf16 have no groups"));
        }
    }
    Ok(())
}

/// Packs a checkpoint's weights in memory.
fn packed(checkpoint: &Checkpoint) -> Outcome<MemoryWeights> {
    let source = checkpoint.tensors.as_ref();
    let bytes = |decl: &TensorDecl| {
        let info = source.info(&decl.name)?;
        info.shape.bytes(info.dtype).ok()
    };
    let tensors = checkpoint.spec.tensors();
    let total: usize = tensors.iter().filter_map(bytes).sum();
    let bar = Bar::new();
    bar.start("packing", Some(total as u64), true);
    Ok(MemoryWeights::from_source_with(
        &checkpoint.spec,
        source,
        &mut |done| bar.set(done),
    )?)
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
    if options.kv == Some(KvKind::Int8) {
        return missing(
            "--kv int8: not built yet".into(),
            "--kv f16 is the smallest cache there is",
        );
    }
    if options.engine == EngineKind::Oracle
        && let Some(act) = options.act.filter(|act| *act != ActKind::F32)
    {
        let name = format!("{act:?}").to_lowercase();
        return missing(
            format!("--act {name}: the oracle computes in fp32"),
            "leave --act out",
        );
    }
    if options.ctx == Some(0) {
        return Err(Failure::input(anyhow::anyhow!(
            "--ctx 0: a context has at least one token"
        )));
    }
    threads(options.threads).map(drop)
}

/// Refuses an option of steps where the oracle runs, which has none.
pub(crate) fn no_steps(options: &ModelOptions, given: &[(&str, bool)]) -> Outcome<()> {
    let given = given.iter().find(|(_, given)| *given);
    match (options.engine, given) {
        (EngineKind::Oracle, Some((name, _))) => Err(Failure::input(anyhow::anyhow!(
            "{name}: the oracle has no steps to choose the size of"
        ))
        .hint(format!("leave {name} out"))),
        _ => Ok(()),
    }
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
fn cached(path: &Path, source: &SourceOptions) -> Outcome<Bundle> {
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
    // A key that one command ignores is still an error to the next one.
    let mut ignored: Vec<&str> = source.ignore_keys.iter().map(String::as_str).collect();
    ignored.sort_unstable();
    let mut recipe = Recipe::Keep.name().to_owned();
    for key in ignored {
        recipe.push_str(&format!(" --ignore-key={key}"));
    }
    let key = CacheKey::new(&parts, &recipe);
    let made = cache.get_or_convert::<Failure>(&key, total, |staging| {
        output::note(&format!(
            "converting {} once into the cache",
            path.display()
        ));
        let checkpoint = open_checkpoint(path, source)?;
        let digest = content_digest(path)?;
        let command = CommandRecord {
            command: "carat convert".into(),
            ..CommandRecord::default()
        };
        convert_checkpoint(
            &checkpoint,
            Conversion::default(),
            Some(digest),
            staging,
            command,
        )?;
        Ok(())
    })?;
    Ok(made.bundle)
}
