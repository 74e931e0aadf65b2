//! Digests of source files.

use std::path::Path;

use crate::{BundleError, mmap::map_file};

/// Bytes hashed between two reports of progress.
const STEP_BYTES: usize = 16 << 20;

/// BLAKE3 of a file's content (64 hex digits). `progress` is told the bytes
/// hashed so far.
///
/// # Errors
/// When the file cannot be read.
pub fn file_digest(path: &Path, progress: &dyn Fn(u64)) -> Result<String, BundleError> {
    let metadata = std::fs::metadata(path).map_err(BundleError::io(path))?;
    let mut hasher = blake3::Hasher::new();
    // A file of no bytes cannot be mapped everywhere.
    if metadata.is_dir() || metadata.len() > 0 {
        let map = map_file(path).map_err(BundleError::io(path))?;
        let mut done = 0;
        for part in map.chunks(STEP_BYTES) {
            hasher.update(part);
            done += part.len() as u64;
            progress(done);
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// One digest for a source of several files, given as (base name, digest). A
/// single file's digest stands for itself. The order of the files is of no
/// matter, their names are.
pub fn combined_digest(files: &[(String, String)]) -> String {
    if let [(_, digest)] = files {
        return digest.clone();
    }
    let mut sorted: Vec<_> = files.iter().collect();
    sorted.sort();
    let mut hasher = blake3::Hasher::new();
    for (name, digest) in sorted {
        // Lengths keep ("ab", "c") apart from ("a", "bc").
        for part in [name, digest] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_digest_is_that_of_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for content in [&b""[..], b"abc", &[7; 40 << 20][..]] {
            std::fs::write(&path, content).unwrap();
            let last = std::cell::Cell::new(0);
            let digest = file_digest(&path, &|n| last.set(n)).unwrap();
            assert_eq!(digest, blake3::hash(content).to_hex().to_string());
            assert_eq!(last.get(), content.len() as u64);
        }
        let e = file_digest(dir.path(), &|_| {}).unwrap_err();
        assert!(e.to_string().contains("is a folder"), "{e}");
    }

    #[test]
    fn combined_digests_know_names_but_no_order() {
        let d = |s: &str| blake3::hash(s.as_bytes()).to_hex().to_string();
        let (a, b) = (("a".to_string(), d("1")), ("b".to_string(), d("2")));
        let ab = combined_digest(&[a.clone(), b.clone()]);
        assert_eq!(ab, combined_digest(&[b.clone(), a.clone()]));
        assert_ne!(
            ab,
            combined_digest(&[("a".into(), b.1.clone()), ("b".into(), a.1.clone())])
        );
        assert_eq!(combined_digest(std::slice::from_ref(&a)), a.1);
    }
}
