//! What a checkpoint consists of, and its digest.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use crate::{ImportError, gguf, safetensors_dir, source::file_name};

/// Files beside the weights that decide what a bundle contains.
const TEXT_FILES: &[&str] = &[
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];
const TEMPLATES: &str = "additional_chat_templates";

/// The files that make up the checkpoint at `path`, sorted: all parts of a GGUF
/// model, or a folder's configuration, text files and weights.
pub fn checkpoint_files(path: &Path) -> Result<Vec<PathBuf>, ImportError> {
    if !path.is_dir() {
        let parts = gguf::open_split(path)?;
        return Ok(parts.into_iter().map(|(p, _)| p).collect());
    }
    let mut files = safetensors_dir::weight_files(path)?;
    files.extend(
        TEXT_FILES
            .iter()
            .map(|f| path.join(f))
            .filter(|f| f.is_file()),
    );
    let templates = path.join(TEMPLATES);
    if templates.is_dir() {
        let entries = std::fs::read_dir(&templates).map_err(|e| ImportError::io(&templates, e))?;
        for entry in entries {
            let file = entry.map_err(|e| ImportError::io(&templates, e))?.path();
            if file.extension().is_some_and(|e| e == "jinja") {
                files.push(file);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// BLAKE3 over names and contents of [`checkpoint_files`], in hexadecimal. Equal
/// digests mean equal bytes under equal names, wherever they lie.
pub fn content_digest(path: &Path) -> Result<String, ImportError> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    for file in checkpoint_files(path)? {
        let name = match file.strip_prefix(path) {
            // Portable: the same on systems with another separator.
            Ok(rest) if !rest.as_os_str().is_empty() => rest
                .components()
                .map(|c| c.as_os_str().to_string_lossy())
                .collect::<Vec<_>>()
                .join("/"),
            _ => file_name(&file),
        };
        let io = |e| ImportError::io(&file, e);
        let mut reader = File::open(&file).map_err(io)?;
        let bytes = reader.metadata().map_err(io)?.len();
        // Lengths keep one file's end apart from the next one's name.
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&bytes.to_le_bytes());
        loop {
            match reader.read(&mut buffer).map_err(io)? {
                0 => break,
                n => hasher.update(&buffer[..n]),
            };
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}
