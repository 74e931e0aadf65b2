//! From a checkpoint to a bundle: every weight kept exactly, unless a quantizer is
//! given that says otherwise.

use std::{
    collections::{BTreeSet, HashSet},
    path::{Path, PathBuf},
};

use carat_tensor::{DType, formats, packed};

use crate::{
    BundleError,
    declare::{Deviation, Deviations, Expectations, SourceDeclarations},
    layout::{grid_bytes, layout_for, stored_bytes},
    manifest::{
        ActivationContract, Form, Layout, Manifest, ResolvedTensor, SEGMENT_ALIGN, SkippedTensor,
        SourceRecord, TENSOR_ALIGN, WeightsKind, format_summary, is_matrix, segment_of,
    },
    source::{TensorInfo, TensorSource},
    spec::{ModelSpec, TensorDecl, TensorRole},
    ternary,
    text::TextAssets,
    writer::{BundleWriter, CommandRecord, TensorToStore, WriterOptions},
};

/// How tensors are stored that no quantizer changes. No recipe of these changes a
/// weight's value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Recipe {
    /// Each tensor as it is stored, see [`as_stored`].
    #[default]
    Keep,
    /// As `Keep`, but ternary matrices with five trits to a byte: 1.69 bits a
    /// weight instead of 2.06, more arithmetic to read them.
    Dense,
}

impl Recipe {
    /// All of them.
    pub const ALL: [Recipe; 2] = [Recipe::Keep, Recipe::Dense];

    /// The name in commands and manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Recipe::Keep => "keep",
            Recipe::Dense => "dense",
        }
    }

    /// The recipe of that name.
    pub fn named(name: &str) -> Option<Recipe> {
        Recipe::ALL.into_iter().find(|recipe| recipe.name() == name)
    }

    /// The format in which a tensor is stored, and why.
    pub fn stored(self, role: TensorRole, source: DType) -> (DType, &'static str) {
        let ternary = is_matrix(role) && matches!(source, DType::TQ1_0 | DType::TQ2_0);
        if self == Recipe::Dense && ternary {
            return (DType::TQ1_0, "ternary, five trits to a byte");
        }
        as_stored(role, source)
    }
}

/// A recipe that changes weights on their way into a bundle.
pub trait Quantize: Sync {
    /// What it is called.
    fn name(&self) -> &str;

    /// Its text, to be kept beside the bundle.
    fn text(&self) -> Option<&str>;

    /// In which form a tensor is stored, and why; `None` if it is not changed.
    /// Decided before a weight is read.
    ///
    /// # Errors
    /// Says why the tensor cannot be stored as asked.
    fn form(&self, decl: &TensorDecl, source: DType) -> Result<Option<(Form, String)>, String>;

    /// How grids are arranged: in sections, or packed for kernels.
    fn grid_layout(&self) -> Layout;

    /// A tensor's bytes in its form, row by row (grids in sections), from the source's.
    ///
    /// # Errors
    /// Says why its weights cannot be quantized.
    fn apply(&self, decl: &TensorDecl, source: DType, data: &[u8]) -> Result<Vec<u8>, String>;
}

/// How far a conversion is.
#[derive(Clone, Copy, Debug)]
pub struct ConvertProgress<'a> {
    /// The tensor at work.
    pub tensor: &'a str,
    /// Bytes of weights written.
    pub done_bytes: u64,
    /// Bytes of weights in all.
    pub total_bytes: u64,
}

/// Called before each tensor and once at the end.
pub type Progress<'a> = dyn Fn(ConvertProgress<'_>) + 'a;

/// Settings of [`convert()`].
pub struct ConvertOptions<'a> {
    /// Name of the model; the source's name if `None`.
    pub name: Option<String>,
    /// Threads that convert and pack; the result does not depend on it.
    pub threads: usize,
    /// Replace a bundle at the target.
    pub overwrite: bool,
    /// False for truncated models, which must not be published.
    pub shippable: bool,
    /// Told how far the conversion is.
    pub progress: Option<&'a Progress<'a>>,
    /// How tensors are stored that `quantize` leaves alone.
    pub recipe: Recipe,
    /// What changes weights.
    pub quantize: Option<&'a dyn Quantize>,
    /// Arithmetic on activations that the manifest declares.
    pub activation: ActivationContract,
    /// Tensors of the source that the importer leaves out, with its reasons.
    pub skipped: Vec<SkippedTensor>,
    /// What `spec` and `text` change on purpose against `origin.declared`.
    pub deviations: Deviations,
    /// The command that runs, for `recipe.toml`.
    pub command: CommandRecord,
}

impl Default for ConvertOptions<'_> {
    fn default() -> Self {
        ConvertOptions {
            name: None,
            threads: WriterOptions::default().threads,
            overwrite: false,
            shippable: true,
            progress: None,
            recipe: Recipe::default(),
            quantize: None,
            activation: ActivationContract::default(),
            skipped: Vec::new(),
            deviations: Deviations::default(),
            command: CommandRecord {
                command: "carat convert".into(),
                ..CommandRecord::default()
            },
        }
    }
}

/// What a conversion made.
#[derive(Clone, Debug)]
pub struct ConvertReport {
    /// The bundle's folder.
    pub path: PathBuf,
    /// Its digest, see [`Bundle::digest`](crate::Bundle::digest).
    pub digest: String,
    /// Its manifest: resolved recipe, size report, skipped tensors.
    pub manifest: Manifest,
}

/// The format in which the default recipe stores a tensor, and why.
pub fn as_stored(role: TensorRole, source: DType) -> (DType, &'static str) {
    if !is_matrix(role) {
        let reason = match source {
            DType::F32 => "vector, as stored",
            _ => "vector, widened exactly",
        };
        return (DType::F32, reason);
    }
    if source == DType::TQ1_0 {
        let reason = "same codes and scales in the layout that is fastest everywhere";
        return (DType::TQ2_0, reason);
    }
    if source.is_float() || packed::supports(source) {
        return (source, "as stored");
    }
    match formats::int8_group_dtype(source) {
        Some(groups) => (groups, "restated exactly as integer groups, which run"),
        None => (source, "as stored"),
    }
}

/// Writes a source as a bundle: no weight changes its value unless a quantizer
/// changes it. Tensors are read, restated or quantized, packed and written one at
/// a time, so memory stays at a tensor or two. Equal inputs give byte-identical
/// bundles.
///
/// # Errors
/// When the spec is no model, when the source's tensors are not exactly the
/// spec's (in names and shapes), when a tensor's bytes are not valid, when
/// `origin` calls weights ternary that are not, or when writing fails. Nothing
/// is left at the target then.
pub fn convert(
    source: &dyn TensorSource,
    spec: &ModelSpec,
    text: &TextAssets,
    mut origin: SourceRecord,
    options: &ConvertOptions<'_>,
    target: &Path,
) -> Result<ConvertReport, BundleError> {
    spec.validate()?;
    let plan = plan(source, spec, options)?;
    check_weights_kind(source, &plan, origin.weights)?;

    let source_formats = format_summary(plan.iter().map(|t| (t.decl.role, t.info.dtype)));
    let declared = match origin.declared.take() {
        Some(declared) => SourceDeclarations {
            formats: source_formats,
            ..declared
        },
        None => SourceDeclarations::of(spec, text, source_formats),
    };
    let stored_formats = format_summary(plan.iter().map(|t| (t.decl.role, t.stored)));
    let mut deviations = options.deviations.clone();
    if deviations.formats.is_none() && declared.formats != stored_formats {
        deviations.formats = Some(Deviation {
            source: declared.formats.clone(),
            bundle: stored_formats,
            reason: match options.quantize {
                Some(quantize) => format!("recipe {}", quantize.name()),
                None => "formats without a layout that runs are restated exactly".into(),
            },
        });
    }
    origin.declared = Some(declared);

    let total_bytes = planned_bytes(source, &plan)?;
    let mut writer = BundleWriter::create(
        target,
        WriterOptions {
            overwrite: options.overwrite,
            expected_bytes: total_bytes,
            threads: options.threads,
        },
    )?;
    let report = |tensor: &str, done_bytes: u64| {
        if let Some(progress) = options.progress {
            progress(ConvertProgress {
                tensor,
                done_bytes,
                total_bytes,
            });
        }
    };
    let mut done_bytes = 0;
    for t in &plan {
        report(&t.decl.name, done_bytes);
        let data = source.read(&t.decl.name)?;
        let mut tensor = TensorToStore {
            name: &t.decl.name,
            role: t.decl.role,
            dtype: t.info.dtype,
            shape: &t.decl.shape,
            data: &data,
        };
        let made;
        if let Some(quantize) = t.quantize {
            made = quantize
                .apply(&t.decl, t.info.dtype, &data)
                .map_err(|problem| BundleError::tensor(source.origin(), &t.decl.name, problem))?;
            tensor.data = &made;
        }
        let entry = match t.stored {
            Form::Grid(grid) => {
                let (name, role, shape) = (tensor.name, tensor.role, tensor.shape);
                writer.add_grid(name, role, shape, grid, t.grid_layout, tensor.data)?
            }
            Form::Block(dtype) if t.quantize.is_some() => {
                tensor.dtype = dtype;
                writer.add_tensor(tensor)?
            }
            Form::Block(dtype) => writer.add_converted(tensor, dtype)?,
        };
        done_bytes = entry.offset + entry.bytes;
    }
    report("", total_bytes);

    let finished = writer.finish(crate::writer::ManifestParts {
        name: options.name.clone().unwrap_or_else(|| origin.name.clone()),
        shippable: options.shippable,
        spec: spec.clone(),
        text: text.clone(),
        source: origin,
        recipe: match options.quantize {
            Some(quantize) => quantize.name().into(),
            None => options.recipe.name().into(),
        },
        recipe_text: options.quantize.and_then(|q| q.text()).map(Into::into),
        resolved: plan
            .iter()
            .map(|t| ResolvedTensor {
                name: t.decl.name.clone(),
                source: t.info.dtype,
                stored: match t.stored {
                    Form::Block(dtype) => dtype,
                    Form::Grid(_) => DType::F32,
                },
                grid: match t.stored {
                    Form::Block(_) => None,
                    Form::Grid(grid) => Some(grid),
                },
                reason: t.reason.clone(),
            })
            .collect(),
        activation: options.activation,
        skipped: options.skipped.clone(),
        expectations: Expectations {
            deviations,
            ..Expectations::default()
        },
        command: options.command.clone(),
    })?;
    Ok(ConvertReport {
        path: finished.path,
        digest: finished.digest,
        manifest: finished.manifest,
    })
}

/// One tensor's way from source to bundle.
struct Planned<'a> {
    decl: TensorDecl,
    info: TensorInfo,
    stored: Form,
    /// Arrangement, if that is a grid.
    grid_layout: Layout,
    reason: String,
    /// What changes its weights, if anything does.
    quantize: Option<&'a dyn Quantize>,
}

/// Matches the source's tensors with the spec's, one to one.
fn plan<'a>(
    source: &dyn TensorSource,
    spec: &ModelSpec,
    options: &ConvertOptions<'a>,
) -> Result<Vec<Planned<'a>>, BundleError> {
    let declared = spec.tensors();
    let needed: HashSet<&str> = declared.iter().map(|d| d.name.as_str()).collect();
    let skipped: BTreeSet<&str> = options.skipped.iter().map(|s| s.name.as_str()).collect();
    for name in source.names() {
        if !needed.contains(name.as_str()) && !skipped.contains(name.as_str()) {
            return Err(BundleError::tensor(
                source.origin(),
                name,
                "is not one that the model needs",
            ));
        }
    }
    let mut out = Vec::with_capacity(declared.len());
    for decl in declared {
        let info = source
            .info(&decl.name)
            .ok_or_else(|| BundleError::tensor(source.origin(), &decl.name, "is missing"))?;
        if info.shape != decl.shape {
            return Err(BundleError::tensor(
                source.origin(),
                &decl.name,
                format!("expected shape {}, found {}", decl.shape, info.shape),
            ));
        }
        let changed = match options.quantize {
            Some(quantize) => quantize
                .form(&decl, info.dtype)
                .map_err(|problem| BundleError::tensor(source.origin(), &decl.name, problem))?,
            None => None,
        };
        let quantize = changed.as_ref().and(options.quantize);
        let (stored, reason) = changed.unwrap_or_else(|| {
            let (dtype, reason) = options.recipe.stored(decl.role, info.dtype);
            (Form::Block(dtype), reason.to_owned())
        });
        out.push(Planned {
            decl,
            info,
            stored,
            grid_layout: quantize.map_or(Layout::Sections, Quantize::grid_layout),
            reason,
            quantize,
        });
    }
    Ok(out)
}

/// Size of `weights.bin`, which the plan determines.
fn planned_bytes(source: &dyn TensorSource, plan: &[Planned<'_>]) -> Result<u64, BundleError> {
    let mut end = 0u64;
    let mut segment = "";
    for t in plan {
        let name = &t.decl.name;
        let fault = |problem: String| BundleError::tensor(source.origin(), name, problem);
        let bytes = match t.stored {
            Form::Grid(grid) => grid_bytes(t.decl.role, grid, &t.decl.shape, t.grid_layout),
            Form::Block(dtype) => {
                let layout = layout_for(t.decl.role, dtype, &t.decl.shape);
                stored_bytes(layout, dtype, &t.decl.shape)
            }
        }
        .map_err(fault)?;
        let align = if segment_of(name) == segment {
            TENSOR_ALIGN
        } else {
            SEGMENT_ALIGN
        };
        segment = segment_of(name);
        end = end
            .checked_next_multiple_of(align)
            .and_then(|start| start.checked_add(bytes))
            .filter(|&e| e <= u64::MAX - SEGMENT_ALIGN)
            .ok_or_else(|| fault("the model's size overflows".into()))?;
    }
    Ok(end.next_multiple_of(SEGMENT_ALIGN))
}

/// Weights are called ternary only if most of the linear ones are, by format or
/// by value, and a ternary model's full-precision master never is.
fn check_weights_kind(
    source: &dyn TensorSource,
    plan: &[Planned<'_>],
    kind: WeightsKind,
) -> Result<(), BundleError> {
    let (mut ternary, mut all) = (0, 0);
    for t in plan.iter().filter(|t| t.decl.role == TensorRole::Linear) {
        all += 1;
        ternary += usize::from(is_ternary(source, &t.decl.name, t.info.dtype, kind)?);
    }
    if !kind_is_honest(kind, ternary, all) {
        return Err(BundleError::malformed(
            source.origin(),
            "weights",
            format!("called {kind:?}, but {ternary} of {all} linear tensors are ternary"),
        ));
    }
    Ok(())
}

/// Whether a linear tensor of a source counts as ternary. Floats are looked at
/// only where the claim rests on them.
pub(crate) fn is_ternary(
    source: &dyn TensorSource,
    name: &str,
    dtype: DType,
    claim: WeightsKind,
) -> Result<bool, BundleError> {
    if matches!(dtype, DType::TQ1_0 | DType::TQ2_0) {
        return Ok(true);
    }
    if claim != WeightsKind::Ternary || !dtype.is_float() {
        return Ok(false);
    }
    let columns = source.info(name).map_or(0, |info| info.shape.columns());
    let values = ternary::classify(dtype, columns, &source.read(name)?);
    Ok(values != ternary::Values::Other)
}

/// Whether what is said of the weights fits the number of ternary linears.
pub(crate) fn kind_is_honest(kind: WeightsKind, ternary: usize, all: usize) -> bool {
    match kind {
        WeightsKind::Ternary => 2 * ternary > all,
        WeightsKind::TernaryLatent | WeightsKind::Dense => ternary == 0,
        WeightsKind::Quantized => true,
    }
}
