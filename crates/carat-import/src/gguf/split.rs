//! Models spread over several files (`name-00001-of-00003.gguf`, …).

use std::path::{Path, PathBuf};

use super::{Gguf, Value};
use crate::ImportError;

/// Files that one model may be spread over at most.
const MAX_PARTS: u64 = 1 << 12;

/// Opens a file and, if it is the first of several, the others beside it.
///
/// Metadata belongs to the first file. Opening another part than the first, a
/// missing part, or parts whose tensors do not add up to the declared total is
/// an error.
pub fn open_split(path: &Path) -> Result<Vec<(PathBuf, Gguf)>, ImportError> {
    let first = Gguf::open(path)?;
    let number = |file: &Path, gguf: &Gguf, key: &str| match gguf.get(key) {
        None => Ok(None),
        Some(v) => v.as_u64().map(Some).ok_or_else(|| {
            ImportError::key(
                file,
                key,
                format!("expected a whole number, found {}", v.type_name()),
            )
        }),
    };
    let count = number(path, &first, "split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![(path.to_owned(), first)]);
    }
    if count > MAX_PARTS {
        return Err(ImportError::key(
            path,
            "split.count",
            format!("expected at most {MAX_PARTS}, found {count}"),
        ));
    }
    let stem = path
        .file_name()
        .and_then(|n| n.to_str())
        .and_then(|n| n.strip_suffix(&format!("-00001-of-{count:05}.gguf")))
        .ok_or_else(|| {
            ImportError::checkpoint(
                path,
                format!(
                    "is one of {count} parts: expected the first, named \
                     NAME-00001-of-{count:05}.gguf"
                ),
            )
        })?;
    let mut parts = vec![(path.to_owned(), first)];
    for i in 2..=count {
        let file = path.with_file_name(format!("{stem}-{i:05}-of-{count:05}.gguf"));
        if !file.is_file() {
            return Err(ImportError::checkpoint(
                &file,
                format!("part {i} of {count} is missing"),
            ));
        }
        let gguf = Gguf::open(&file)?;
        parts.push((file, gguf));
    }
    for (i, (file, gguf)) in parts.iter().enumerate() {
        let found = number(file, gguf, "split.no")?;
        if found != Some(i as u64) {
            let found = found.map_or("nothing".to_owned(), |n| n.to_string());
            return Err(ImportError::key(
                file,
                "split.no",
                format!("expected {i}, found {found}"),
            ));
        }
    }
    if let Some(declared) = parts[0]
        .1
        .get("split.tensors.count")
        .and_then(Value::as_u64)
    {
        let found: usize = parts.iter().map(|(_, g)| g.tensors().len()).sum();
        if declared != found as u64 {
            return Err(ImportError::key(
                path,
                "split.tensors.count",
                format!("expected {declared} tensors in all parts together, found {found}"),
            ));
        }
    }
    Ok(parts)
}
