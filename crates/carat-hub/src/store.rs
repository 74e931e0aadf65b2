//! The folder of pulled models.
//!
//! ```text
//! MODELS/pinned/NAME/FILE.gguf                 a pinned model and its licence files
//! MODELS/hub/ORG/NAME/COMMIT/checkpoint/…      a whole checkpoint
//! MODELS/hub/ORG/NAME/COMMIT/gguf/FILE.gguf    single GGUF files (with their shards)
//! MODELS/hub/ORG/NAME/refs/REVISION            text: the commit that a branch or tag was
//! MODELS/.staging/…                            what is still incomplete
//! MODELS/.locks/…                              empty files, locked while a pull runs
//! ```
//!
//! What stands under its final name is whole and checked: content is written
//! to the staging folder, synced, and renamed.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::HubError;
use crate::digest::sha256_hex;
use crate::name::{HubName, is_commit};

/// Paths inside one folder of models.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    root: PathBuf,
}

impl Store {
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
        }
    }

    /// Folder of a pinned model.
    pub(crate) fn pinned(&self, name: &str) -> PathBuf {
        self.root.join("pinned").join(name)
    }

    /// Folder of one commit of a repository.
    pub(crate) fn commit(&self, name: &HubName, commit: &str) -> PathBuf {
        self.repo(name).join(commit)
    }

    /// Staging folder for `key`, which `file_key` makes.
    pub(crate) fn staging(&self, key: &str) -> PathBuf {
        self.root.join(".staging").join(key)
    }

    fn repo(&self, name: &HubName) -> PathBuf {
        self.root.join("hub").join(&name.org).join(&name.name)
    }

    fn reference(&self, name: &HubName) -> PathBuf {
        self.repo(name).join("refs").join(file_key(name.revision()))
    }

    /// Commit that the name's revision was when it was pulled last.
    pub(crate) fn known_commit(&self, name: &HubName) -> Option<String> {
        if is_commit(name.revision()) {
            return Some(name.revision().to_owned());
        }
        let path = self.reference(name);
        if fs::metadata(&path).ok()?.len() > 64 {
            return None;
        }
        let commit = fs::read_to_string(path).ok()?.trim().to_owned();
        is_commit(&commit).then_some(commit)
    }

    /// Records which commit the name's revision is.
    pub(crate) fn record_commit(&self, name: &HubName, commit: &str) -> Result<(), HubError> {
        if is_commit(name.revision()) {
            return Ok(());
        }
        let path = self.reference(name);
        let staged = self.staging(&file_key(&format!(
            "ref {}@{}",
            name.repo(),
            name.revision()
        )));
        create_parent(&staged)?;
        let mut file = File::create(&staged).map_err(HubError::io("create", &staged))?;
        writeln!(file, "{commit}").map_err(HubError::io("write", &staged))?;
        publish_file(file, &staged, &path)
    }

    /// Takes the lock of `key`, or says that another process holds it.
    pub(crate) fn lock(&self, key: &str, name: &str) -> Result<Lock, HubError> {
        let path = self.root.join(".locks").join(key);
        create_parent(&path)?;
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(HubError::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { _file: file }),
            Err(TryLockError::WouldBlock) => Err(HubError::Busy {
                name: name.to_owned(),
            }),
            // File systems without locks exist; a second pull on one is at worst
            // wasted work, because content is checked before it is published.
            Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {
                Ok(Lock { _file: file })
            }
            Err(TryLockError::Error(source)) => Err(HubError::io("lock", &path)(source)),
        }
    }
}

/// A held lock; dropping it, or the end of the process, frees it.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// One path component that stands for any text, and for no other text.
pub(crate) fn file_key(text: &str) -> String {
    use std::fmt::Write as _;
    /// Longer keys than this are replaced by a digest: file systems stop at 255.
    const MAX_KEY: usize = 200;
    let mut key = String::with_capacity(text.len());
    for byte in text.bytes() {
        // Capitals are escaped too: file systems that ignore case would mix up
        // `V1` and `v1`. So are dots at the start.
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => key.push(char::from(byte)),
            b'.' if !key.is_empty() => key.push('.'),
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(key, "%{byte:02X}");
            }
        }
    }
    if key.len() > MAX_KEY {
        // `%_` begins no other key, because hex digits follow every other `%`.
        return format!("%_{}", sha256_hex(text.as_bytes()));
    }
    key
}

/// Creates the folder that `path` lies in.
pub(crate) fn create_parent(path: &Path) -> Result<(), HubError> {
    match path.parent() {
        Some(parent) => create_folder(parent),
        None => Ok(()),
    }
}

/// Creates a folder and those above it.
pub(crate) fn create_folder(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(HubError::io("create folder", path))
}

/// Removes a file; that there is none is fine.
pub(crate) fn remove_file(path: &Path) -> Result<(), HubError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(HubError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Removes a folder with all in it; that there is none is fine.
pub(crate) fn remove_folder(path: &Path) -> Result<(), HubError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(HubError::io("remove folder", path)(error))
        }
        _ => Ok(()),
    }
}

/// Syncs `file`, which lies at `staged`, and gives it its final name. A file
/// there is replaced.
pub(crate) fn publish_file(file: File, staged: &Path, path: &Path) -> Result<(), HubError> {
    file.sync_all().map_err(HubError::io("sync", staged))?;
    // Windows refuses to rename an open file.
    drop(file);
    publish(staged, path)
}

/// Gives a file or folder, whose content is synced, its final name, and syncs
/// the folder above.
pub(crate) fn publish(staged: &Path, path: &Path) -> Result<(), HubError> {
    create_parent(path)?;
    fs::rename(staged, path).map_err(HubError::io("rename to", path))?;
    match path.parent() {
        Some(parent) => sync_folder(parent),
        None => Ok(()),
    }
}

/// Makes names in a folder durable. Only Unix can open a folder for that;
/// elsewhere the rename itself is journalled.
pub(crate) fn sync_folder(path: &Path) -> Result<(), HubError> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    let folder = File::open(path).map_err(HubError::io("open folder", path))?;
    match folder.sync_all() {
        // Some network file systems cannot sync folders.
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => Ok(()),
        result => result.map_err(HubError::io("sync folder", path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_one_component_and_distinct() {
        assert_eq!(file_key("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(file_key("..").chars().next(), Some('%'));
        assert_ne!(file_key("V1"), file_key("v1"));
        assert_ne!(file_key("a%2Fb"), file_key("a/b"));
        let long = "A".repeat(200);
        assert!(file_key(&long).len() < 100);
        assert_ne!(file_key(&long), file_key(&long[1..]));
    }

    #[test]
    fn references_round_trip_and_hostile_ones_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let name = HubName::parse("a/b@refs/pr/1").unwrap();
        assert_eq!(store.known_commit(&name), None);
        let commit = "0123456789abcdef0123456789abcdef01234567";
        store.record_commit(&name, commit).unwrap();
        assert_eq!(store.known_commit(&name).as_deref(), Some(commit));
        fs::write(store.reference(&name), "../../../etc").unwrap();
        assert_eq!(store.known_commit(&name), None);
        fs::write(store.reference(&name), "0".repeat(1 << 16)).unwrap();
        assert_eq!(store.known_commit(&name), None);
    }

    #[test]
    fn a_lock_is_exclusive_until_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let lock = store.lock("k", "model").unwrap();
        assert!(matches!(
            store.lock("k", "model"),
            Err(HubError::Busy { .. })
        ));
        store.lock("other", "model").unwrap();
        drop(lock);
        store.lock("k", "model").unwrap();
    }
}
