//! From a `.gguf` file to a checkpoint.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use carat_tensor::DType;

use super::{Meta, text};
use crate::{
    Checkpoint, ImportError, OpenOptions, Origin, SourceKind, WeightKind,
    families::{self, Described, GgufFamily, Root},
    gguf::{self, Gguf, Value},
    hub_layout::hub_place,
    source::{Layout, RawTensors, Stored, assemble, file_name},
    weights,
};

pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Checkpoint, ImportError> {
    let parts = gguf::open_split(path)?;
    let files = parts.iter().map(|(p, _)| p.clone()).collect();
    let ggufs: Vec<(&Path, &Gguf)> = parts.iter().map(|(p, g)| (p.as_path(), g)).collect();
    checkpoint(path, &ggufs, files, options)
}

/// A checkpoint from parsed files, the first of which has the metadata.
pub(crate) fn checkpoint(
    path: &Path,
    parts: &[(&Path, &Gguf)],
    files: Vec<std::path::PathBuf>,
    options: &OpenOptions,
) -> Result<Checkpoint, ImportError> {
    let head = parts[0].1;
    let raw = merge(parts)?;
    let architecture = head
        .get("general.architecture")
        .ok_or_else(|| {
            ImportError::key(
                path,
                "general.architecture",
                "expected a string, found nothing",
            )
        })?
        .as_str()
        .ok_or_else(|| ImportError::key(path, "general.architecture", "expected a string"))?;
    let family: &GgufFamily = families::GGUF
        .iter()
        .find(|f| f.architecture == architecture)
        .ok_or_else(|| ImportError::UnknownArchitecture {
            path: path.to_owned(),
            found: architecture.to_owned(),
            known: families::gguf_architectures(),
        })?;
    let meta = Meta::new(path, head, architecture, &raw);
    let Described { spec, permuted_qk } = (family.describe)(&meta)?;
    let (consumed, mut notes) = meta.finish(&options.ignore_keys)?;
    spec.validate().map_err(|source| ImportError::Spec {
        path: path.to_owned(),
        source,
    })?;
    let mut skipped = Vec::new();
    let tensors = assemble(
        path,
        &spec,
        raw,
        &Layout {
            name: &|canonical| family.names.name(Root::PLAIN, canonical),
            permuted_qk,
            consumed: &consumed,
            tolerated: &|name| family.names.tolerates(name),
        },
        &mut skipped,
    )?;
    if permuted_qk {
        notes.push(
            "rows of q and k are stored interleaved within heads; the logical order was restored"
                .into(),
        );
    }
    let weights = weights::classify(path, &spec, &tensors)?;
    if weights == WeightKind::TernaryLatent {
        notes.push(weights::LATENT_NOTE.into());
    }
    let text = text::assets(path, head, &mut notes)?;
    let place = hub_place(path);
    let text_of = |key: &str| head.get(key).and_then(Value::as_str).map(str::to_owned);
    Ok(Checkpoint {
        spec,
        tensors: Box::new(tensors),
        text,
        origin: Origin {
            path: path.to_owned(),
            kind: SourceKind::Gguf,
            architecture: architecture.to_owned(),
            name: text_of("general.name")
                .or_else(|| text_of("general.basename"))
                .or_else(|| place.name.clone()),
            repository: place.name,
            files,
            weights,
            permuted_qk,
            declared_dtype: declared_dtype(head),
            notes,
            skipped,
            revision: place.revision,
        },
    })
}

fn merge(parts: &[(&Path, &Gguf)]) -> Result<RawTensors, ImportError> {
    let mut out = BTreeMap::new();
    for (file, gguf) in parts {
        for t in gguf.tensors() {
            let stored = Stored {
                bytes: gguf.shared_bytes().clone(),
                start: t.offset as usize,
                len: t.bytes as usize,
                dtype: Ok(t.dtype),
                shape: t.shape.clone(),
            };
            if out.insert(t.name.clone(), stored).is_some() {
                return Err(ImportError::tensor(
                    file,
                    &t.name,
                    "appears in an earlier part too",
                ));
            }
        }
    }
    Ok(RawTensors(out))
}

/// `general.file_type` in words; files often state it wrongly, so it is only reported.
fn declared_dtype(gguf: &Gguf) -> Option<String> {
    let id = gguf.get("general.file_type")?.as_u64()?;
    let name = match id {
        0 => DType::F32.name(),
        1 => DType::F16.name(),
        2 => DType::Q4_0.name(),
        3 => DType::Q4_1.name(),
        7 => DType::Q8_0.name(),
        8 => DType::Q5_0.name(),
        9 => DType::Q5_1.name(),
        10 | 21 => DType::Q2_K.name(),
        11..=13 => DType::Q3_K.name(),
        14 | 15 => DType::Q4_K.name(),
        16 | 17 => DType::Q5_K.name(),
        18 => DType::Q6_K.name(),
        32 => DType::BF16.name(),
        36 => DType::TQ1_0.name(),
        37 => DType::TQ2_0.name(),
        _ => return Some(format!("file type {id}")),
    };
    Some(name.to_owned())
}

/// Imports from memory, as the fuzz targets do.
pub(crate) fn from_bytes(bytes: Vec<u8>) -> Result<Checkpoint, ImportError> {
    let path = Path::new("memory.gguf");
    let gguf = Gguf::parse(Arc::new(bytes)).map_err(|source| ImportError::Gguf {
        path: path.to_owned(),
        source,
    })?;
    let name = Path::new(&file_name(path)).to_owned();
    checkpoint(path, &[(path, &gguf)], vec![name], &OpenOptions::default())
}
