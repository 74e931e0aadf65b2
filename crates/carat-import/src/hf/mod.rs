//! HF checkpoint folders: configuration, weights and text files.

mod config;
mod open;
mod rope;
#[cfg(test)]
mod tests;
mod text;

use std::path::Path;

pub(crate) use config::Config;
pub(crate) use open::open;
pub(crate) use rope::{Ropes, read_ropes};
use serde_json::Value;

use crate::ImportError;

/// Largest JSON file that is read: the largest tokenizers take some 40 MB.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// Reads a file into memory, refusing unreasonable sizes.
pub(crate) fn read_bounded(path: &Path) -> Result<Vec<u8>, ImportError> {
    let meta = std::fs::metadata(path).map_err(|e| ImportError::io(path, e))?;
    if meta.len() > MAX_JSON_BYTES {
        return Err(ImportError::checkpoint(
            path,
            format!(
                "expected at most {MAX_JSON_BYTES} bytes, found {}",
                meta.len()
            ),
        ));
    }
    std::fs::read(path).map_err(|e| ImportError::io(path, e))
}

/// Reads a JSON file.
pub(crate) fn read_json(path: &Path) -> Result<Value, ImportError> {
    serde_json::from_slice(&read_bounded(path)?).map_err(|source| ImportError::Json {
        path: path.to_owned(),
        source,
    })
}
