//! Single files that appear whole or not at all.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use crate::{
    BundleError,
    stage::{self, Staging},
};

/// A file in the making, beside its target and under another name. Dropped
/// before [`publish`](StagedFile::publish) it is removed; what a killed process
/// left is removed by the next staged write into the same folder.
///
/// ```
/// use std::io::Write as _;
/// use carat_bundle::file::StagedFile;
///
/// let folder = tempfile::tempdir()?;
/// let target = folder.path().join("answer.txt");
/// let mut file = StagedFile::create(&target, 2)?;
/// file.write_all(b"42")?;
/// assert!(!target.exists());
/// file.publish()?;
/// assert_eq!(std::fs::read(&target)?, b"42");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StagedFile {
    target: PathBuf,
    // Before the staging, so that it is closed when that removes it.
    file: File,
    staging: Staging,
}

impl StagedFile {
    /// Begins a file of about `bytes` bytes, for which there must be room. The
    /// folder is created if it is missing.
    pub fn create(target: &Path, bytes: u64) -> Result<StagedFile, BundleError> {
        let parent = stage::parent_of(target);
        let staging = Staging::reserve(parent)?;
        stage::require_space(parent, target, bytes)?;
        let file = File::create_new(staging.path()).map_err(BundleError::io(target))?;
        Ok(StagedFile {
            target: target.to_owned(),
            file,
            staging,
        })
    }

    /// Waits until everything is on disk, then gives the file its name, in place
    /// of a file that has it already.
    pub fn publish(self) -> Result<(), BundleError> {
        let StagedFile {
            target,
            file,
            staging,
        } = self;
        file.sync_all().map_err(BundleError::io(&target))?;
        drop(file);
        std::fs::rename(staging.path(), &target).map_err(BundleError::io(&target))?;
        let parent = stage::parent_of(&target);
        stage::sync_dir(parent).map_err(BundleError::io(parent))
    }
}

impl Write for StagedFile {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.file.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn it_is_there_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("new/parents/file");
        let mut file = StagedFile::create(&target, 4).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        for content in ["first", "second"] {
            let mut file = StagedFile::create(&target, 6).unwrap();
            file.write_all(content.as_bytes()).unwrap();
            file.publish().unwrap();
            assert_eq!(fs::read_to_string(&target).unwrap(), content);
        }
        let folder = target.parent().unwrap();
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
    }

    #[test]
    fn what_a_killed_writer_left_goes_with_the_next() {
        let dir = tempfile::tempdir().unwrap();
        // A file and a lock that nobody holds.
        fs::write(dir.path().join(".carat-staging-1-0-0"), b"half").unwrap();
        fs::write(dir.path().join(".carat-staging-1-0-0.lock"), b"").unwrap();
        drop(StagedFile::create(&dir.path().join("file"), 1).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
