//! Content digests: SHA-256, and git's blob id for files that a hub keeps in git.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use crate::{HubError, Progress};

/// A published digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Digest {
    /// SHA-256 of the content.
    Sha256([u8; 32]),
    /// SHA-1 of `blob LEN\0` and the content, as git names files.
    GitBlob([u8; 20]),
}

impl Digest {
    /// Reads a digest from hex: 64 digits are SHA-256, 40 a git blob id.
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        match text.len() {
            64 => unhex(text).map(Self::Sha256),
            40 => unhex(text).map(Self::GitBlob),
            _ => None,
        }
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "sha256",
            Self::GitBlob(_) => "git blob id",
        }
    }

    pub(crate) fn hex(&self) -> String {
        match self {
            Self::Sha256(bytes) => hex(bytes),
            Self::GitBlob(bytes) => hex(bytes),
        }
    }

    /// Compares with `found`; `file` names the culprit.
    pub(crate) fn check(&self, found: &Self, file: &str) -> Result<(), HubError> {
        if self == found {
            return Ok(());
        }
        Err(HubError::Digest {
            file: file.to_owned(),
            kind: self.kind(),
            expected: self.hex(),
            found: found.hex(),
        })
    }
}

/// Computes a digest of the same kind as the one expected.
pub(crate) enum Hasher {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hasher {
    /// A hasher for content of `bytes` bytes.
    pub(crate) fn like(digest: &Digest, bytes: u64) -> Self {
        match digest {
            Digest::Sha256(_) => Self::Sha256(Sha256::new()),
            Digest::GitBlob(_) => {
                let mut sha = Sha1::new();
                sha.update(format!("blob {bytes}\0").as_bytes());
                Self::GitBlob(sha)
            }
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(sha) => sha.update(bytes),
            Self::GitBlob(sha) => sha.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        match self {
            Self::Sha256(sha) => Digest::Sha256(sha.finalize().into()),
            Self::GitBlob(sha) => Digest::GitBlob(sha.finalize().into()),
        }
    }
}

/// Bytes read or written at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 18;

/// The digest, of `like`'s kind, of the file at `path`.
pub(crate) fn hash_file(
    path: &Path,
    like: &Digest,
    progress: &dyn Progress,
) -> Result<Digest, HubError> {
    let mut file = File::open(path).map_err(HubError::io("open", path))?;
    let bytes = file
        .metadata()
        .map_err(HubError::io("examine", path))?
        .len();
    let mut hasher = Hasher::like(like, bytes);
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let n = file.read(&mut chunk).map_err(HubError::io("read", path))?;
        if n == 0 {
            return Ok(hasher.finish());
        }
        hasher.update(&chunk[..n]);
        progress.advance(n as u64);
    }
}

/// SHA-256 of `bytes`, in hex.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hex.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Exactly `2 N` hex digits of either case.
fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = (high * 16 + low) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoProgress;

    #[test]
    fn known_digests() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hello");
        std::fs::write(&path, b"hello\n").unwrap();
        // `printf 'hello\n' | sha256sum` and `git hash-object` of the same.
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let blob = "ce013625030ba8dba906f756967f9e9ca394464a";
        for expected in [sha256, blob] {
            let digest = Digest::from_hex(&expected.to_uppercase()).unwrap();
            let found = hash_file(&path, &digest, &NoProgress).unwrap();
            assert_eq!(found.hex(), expected);
            digest.check(&found, "hello").unwrap();
        }
    }

    #[test]
    fn malformed_digests_are_none() {
        for text in [
            "",
            "12",
            &"g".repeat(64),
            &"é".repeat(32),
            &"a".repeat(63),
            &"+1".repeat(20),
        ] {
            assert_eq!(Digest::from_hex(text), None, "{text}");
        }
    }
}
