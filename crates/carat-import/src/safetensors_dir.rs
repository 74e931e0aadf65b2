//! The weights of an HF folder: one `model.safetensors`, or shards that
//! `model.safetensors.index.json` lists.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use carat_tensor::{DType, Shape};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::{
    ImportError,
    source::{Bytes, RawTensors, Stored},
};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The files that hold a folder's weights: the single file, or the index
/// followed by its shards in order of name.
pub fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, ImportError> {
    let index = folder.join(INDEX);
    let single = folder.join(SINGLE);
    if index.is_file() {
        let map = read_index(&index)?;
        let mut shards: Vec<&String> = map.values().collect();
        shards.sort();
        shards.dedup();
        let mut files = vec![index];
        files.extend(shards.into_iter().map(|s| folder.join(s)));
        Ok(files)
    } else if single.is_file() {
        Ok(vec![single])
    } else {
        Err(ImportError::checkpoint(
            folder,
            format!("no weights: expected {SINGLE} or {INDEX}"),
        ))
    }
}

/// Maps every weight file and lists the tensors.
pub(crate) fn open(folder: &Path) -> Result<RawTensors, ImportError> {
    let files = weight_files(folder)?;
    let mut out = BTreeMap::new();
    if !files[0].ends_with(INDEX) {
        add_file(&files[0], &mut out, None)?;
        return Ok(RawTensors(out));
    }
    let map = read_index(&files[0])?;
    for shard in &files[1..] {
        if !shard.is_file() {
            return Err(ImportError::checkpoint(
                shard,
                format!("shard is missing, {INDEX} lists it"),
            ));
        }
        add_file(shard, &mut out, Some(&map))?;
    }
    if let Some((tensor, shard)) = map.iter().find(|(t, _)| !out.contains_key(*t)) {
        return Err(ImportError::tensor(
            &folder.join(shard),
            tensor,
            format!("{INDEX} lists it in this shard, which does not hold it"),
        ));
    }
    Ok(RawTensors(out))
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, ImportError> {
    let json = crate::hf::read_json(path)?;
    let map = json
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| {
            ImportError::key(
                path,
                "weight_map",
                "expected an object of tensor names and shards",
            )
        })?;
    let mut out = BTreeMap::new();
    for (tensor, shard) in map {
        let key = || format!("weight_map.{tensor}");
        let Some(shard) = shard.as_str() else {
            return Err(ImportError::key(path, key(), "expected a file name"));
        };
        // A shard lies beside its index: anything else could read other files.
        let plain = !shard.is_empty()
            && !shard.starts_with('.')
            && !shard.contains(['/', '\\', ':', '\0'])
            && shard.ends_with(".safetensors");
        if !plain {
            return Err(ImportError::key(
                path,
                key(),
                format!("expected a plain .safetensors file name, found {shard:?}"),
            ));
        }
        out.insert(tensor.clone(), shard.to_owned());
    }
    Ok(out)
}

fn add_file(
    path: &Path,
    out: &mut BTreeMap<String, Stored>,
    index: Option<&BTreeMap<String, String>>,
) -> Result<(), ImportError> {
    let map = carat_bundle::mmap::map_file(path).map_err(|e| ImportError::io(path, e))?;
    let bytes = Bytes(Arc::new(map));
    let shard = crate::source::file_name(path);
    for (name, stored) in tensors_of(&bytes).map_err(|source| ImportError::Safetensors {
        path: path.to_owned(),
        source,
    })? {
        if let Some(index) = index {
            match index.get(&name) {
                Some(s) if *s == shard => {}
                Some(other) => {
                    return Err(ImportError::tensor(
                        path,
                        name,
                        format!("{INDEX} lists it in {other}"),
                    ));
                }
                None => {
                    return Err(ImportError::tensor(
                        path,
                        name,
                        format!("{INDEX} does not list it"),
                    ));
                }
            }
        }
        out.insert(name, stored);
    }
    Ok(())
}

/// Tensors of one file's bytes. The safetensors crate validates the header:
/// sizes, offsets without gaps or overlaps, lengths against the file.
pub(crate) fn tensors_of(
    bytes: &Bytes,
) -> Result<Vec<(String, Stored)>, safetensors::SafeTensorError> {
    let (header_bytes, metadata) = SafeTensors::read_metadata(bytes.as_slice())?;
    let data_start = 8 + header_bytes;
    Ok(metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let (start, end) = info.data_offsets;
            let stored = Stored {
                bytes: bytes.clone(),
                start: data_start + start,
                len: end - start,
                dtype: match info.dtype {
                    Dtype::F32 => Ok(DType::F32),
                    Dtype::F16 => Ok(DType::F16),
                    Dtype::BF16 => Ok(DType::BF16),
                    other => Err(format!("{other:?}")),
                },
                shape: Shape(info.shape.clone()),
            };
            (name, stored)
        })
        .collect())
}
