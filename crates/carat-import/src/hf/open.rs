//! From an HF folder to a checkpoint.

use std::{collections::BTreeSet, path::Path};

use carat_bundle::{manifest::SkippedTensor, spec::ModelSpec};
use carat_tensor::DType;
use serde_json::Value;

use super::{Config, read_json, text};
use crate::{
    Checkpoint, ImportError, OpenOptions, Origin, SourceKind, WeightKind,
    digest::checkpoint_files,
    families::{self, HfFamily, Root},
    hub_layout::hub_place,
    safetensors_dir,
    source::{Layout, RawTensors, assemble},
    weights,
};

/// The file that describes the model.
const CONFIG: &str = "config.json";

pub(crate) fn open(folder: &Path, options: &OpenOptions) -> Result<Checkpoint, ImportError> {
    let path = folder.join(CONFIG);
    if !path.is_file() {
        return Err(ImportError::checkpoint(
            folder,
            format!("not a checkpoint: expected {CONFIG} and safetensors, or a .gguf file"),
        ));
    }
    let json = read_json(&path)?;
    let family = family(&path, &json)?;
    let mut raw = safetensors_dir::open(folder)?;
    let root = root(family, &raw);
    let embedding = raw
        .0
        .get(&family.names.name(root, "embed.weight"))
        .and_then(|t| t.dtype.as_ref().ok().copied())
        .unwrap_or(DType::F32);
    let Read {
        spec,
        mut notes,
        declared_dtype,
        ternary_declared,
    } = read_config(&path, &json, family, embedding, options)?;
    spec.validate().map_err(|source| ImportError::Spec {
        path: path.clone(),
        source,
    })?;
    let names = |canonical: &str| family.names.name(root, canonical);
    let mut skipped: Vec<_> = drop_tied_head(folder, &spec, &mut raw, &names)?
        .into_iter()
        .collect();
    let tensors = assemble(
        folder,
        &spec,
        raw,
        &Layout {
            name: &names,
            permuted_qk: false,
            consumed: &BTreeSet::new(),
            tolerated: &|name| family.names.tolerates(name),
        },
        &mut skipped,
    )?;
    let mut weights = weights::classify(folder, &spec, &tensors)?;
    if ternary_declared && weights == WeightKind::Dense {
        weights = WeightKind::TernaryLatent;
    }
    if weights == WeightKind::TernaryLatent {
        notes.push(weights::LATENT_NOTE.into());
    }
    let name = json.get("_name_or_path").and_then(Value::as_str);
    let place = hub_place(folder);
    Ok(Checkpoint {
        spec,
        tensors: Box::new(tensors),
        text: text::assets(folder, &json)?,
        origin: Origin {
            path: folder.to_owned(),
            kind: SourceKind::Safetensors,
            architecture: architecture(&json).unwrap_or_default().to_owned(),
            name: name
                .filter(|n| !n.is_empty())
                .map(str::to_owned)
                .or_else(|| place.name.clone()),
            repository: place.name,
            files: checkpoint_files(folder)?,
            weights,
            permuted_qk: false,
            declared_dtype,
            notes,
            skipped,
            revision: place.revision,
        },
    })
}

fn architecture(json: &Value) -> Option<&str> {
    json.get("model_type").and_then(Value::as_str)
}

pub(super) fn family(path: &Path, json: &Value) -> Result<&'static HfFamily, ImportError> {
    let Some(found) = architecture(json) else {
        return Err(ImportError::key(
            path,
            "model_type",
            "expected a string, found none",
        ));
    };
    families::HF
        .iter()
        .find(|f| f.types.contains(&found))
        .copied()
        .ok_or_else(|| ImportError::UnknownArchitecture {
            path: path.to_owned(),
            found: found.to_owned(),
            known: families::hf_architectures(),
        })
}

/// Where this checkpoint keeps the family's tensors.
fn root(family: &HfFamily, raw: &RawTensors) -> Root {
    let has_embedding = |root: &&Root| {
        let name = family.names.name(**root, "embed.weight");
        raw.0.contains_key(&name)
    };
    let roots = family.names.roots;
    roots
        .iter()
        .find(has_embedding)
        .copied()
        .unwrap_or(Root::PLAIN)
}

/// What `config.json` says.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) spec: ModelSpec,
    pub(super) notes: Vec<String>,
    pub(super) declared_dtype: Option<String>,
    /// The linears are quantized to ternary at run time.
    pub(super) ternary_declared: bool,
}

pub(super) fn read_config(
    path: &Path,
    json: &Value,
    family: &HfFamily,
    embedding: DType,
    options: &OpenOptions,
) -> Result<Read, ImportError> {
    let outer = Config::new(path, json, &options.ignore_keys)?;
    let dtype = match outer.text("dtype")? {
        Some(d) => Some(d),
        None => outer.text("torch_dtype")?,
    };
    let ternary_declared = quantization(&outer)?;
    let inner = match family.sub_config {
        Some(key) => outer.object(key)?,
        None => None,
    };
    let spec = match inner {
        None => {
            let spec = (family.describe)(&outer, embedding)?;
            outer.finish()?;
            spec
        }
        Some(inner) => {
            let spec = (family.describe)(&inner, embedding)?;
            inner.finish()?;
            multimodal(&outer, &spec)?;
            outer.note("only the language model was imported; image inputs are not supported");
            spec
        }
    };
    Ok(Read {
        spec,
        notes: outer.take_notes(),
        declared_dtype: dtype.map(str::to_owned),
        ternary_declared,
    })
}

/// Keys beside the language model's object in multimodal configs.
fn multimodal(outer: &Config<'_>, spec: &ModelSpec) -> Result<(), ImportError> {
    for key in [
        "vision_config",
        "mm_tokens_per_image",
        "image_token_index",
        "boi_token_index",
        "eoi_token_index",
        "image_token_id",
        "boi_token_id",
        "eoi_token_id",
    ] {
        outer.skip(key);
    }
    outer.only("tie_word_embeddings", &[spec.head.tied.into()])?;
    outer.finish()
}

/// Reads `quantization_config`: absent, or the online ternary quantization of a
/// latent master. Everything else stores its weights in a way that only its own
/// library reads.
fn quantization(cfg: &Config<'_>) -> Result<bool, ImportError> {
    let Some(q) = cfg.object("quantization_config")? else {
        return Ok(false);
    };
    let method = q.text("quant_method")?.unwrap_or("");
    let mode = q.text("quantization_mode")?;
    if method == "bitnet" && mode == Some("online") {
        return Ok(true);
    }
    Err(q.error(
        "quant_method",
        format!(
            "expected unquantized weights (or bitnet in online mode), found {method:?}{}",
            mode.map(|m| format!(" in mode {m:?}")).unwrap_or_default()
        ),
    ))
}

/// A tied checkpoint may carry the head as well: it must then be the embedding.
fn drop_tied_head(
    folder: &Path,
    spec: &ModelSpec,
    raw: &mut RawTensors,
    names: &dyn Fn(&str) -> String,
) -> Result<Option<SkippedTensor>, ImportError> {
    if !spec.head.tied {
        return Ok(None);
    }
    let (head, embed) = (names("head.weight"), names("embed.weight"));
    let Some(stored) = raw.0.remove(&head) else {
        return Ok(None);
    };
    let same = raw.0.get(&embed).is_some_and(|e| {
        e.dtype == stored.dtype && e.shape == stored.shape && e.data() == stored.data()
    });
    if !same {
        return Err(ImportError::tensor(
            folder,
            head,
            format!("expected a copy of {embed:?}, since tie_word_embeddings is true"),
        ));
    }
    Ok(Some(SkippedTensor {
        name: head,
        reason: format!("a copy of {embed:?}"),
    }))
}
