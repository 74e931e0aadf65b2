//! Folders (and files) that appear whole or not at all.
//!
//! A writer fills a folder `.carat-staging-*` beside the target, on the same
//! file system, and renames it when everything in it is on disk. A lock file
//! beside that folder, held for as long as the writer lives, tells a staging
//! folder at work from one whose writer was killed: the system drops the lock
//! with the process, and the next writer in that place removes what has none.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::BundleError;

const PREFIX: &str = ".carat-staging-";
const LOCK_SUFFIX: &str = ".lock";

/// A path beside a target at which a folder may be built. Dropping it removes
/// whatever is still there.
#[derive(Debug)]
pub(crate) struct Staging {
    path: PathBuf,
    lock_path: PathBuf,
    /// Folders that were made to hold it, outermost first; they go again if
    /// nothing ends up in them.
    made: Vec<PathBuf>,
    /// Held open and locked for the staging's life.
    _lock: File,
}

impl Staging {
    /// Reserves a fresh path in `parent` (created if missing) and removes what
    /// killed writers left there. The path itself does not exist yet.
    pub(crate) fn reserve(parent: &Path) -> Result<Staging, BundleError> {
        let mut made: Vec<PathBuf> = parent
            .ancestors()
            .take_while(|p| !p.as_os_str().is_empty() && !p.exists())
            .map(Path::to_path_buf)
            .collect();
        made.reverse();
        fs::create_dir_all(parent).map_err(|e| {
            remove_empty(&made);
            BundleError::io(parent)(e)
        })?;
        sweep(parent);
        // A sweeper in another process may take the lock between our creating
        // and locking it, and removes the file then; we start over.
        for _ in 0..64 {
            let path = parent.join(format!("{PREFIX}{}", unique()));
            let lock_path = lock_of(&path);
            let lock = match File::create_new(&lock_path) {
                Ok(lock) => lock,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(BundleError::io(parent)(e)),
            };
            let locked = match lock.try_lock() {
                // Without locks on this file system nobody sweeps it either.
                Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => Ok(()),
                other => other,
            };
            match locked {
                Ok(()) if lock_path.exists() => {
                    return Ok(Staging {
                        path,
                        lock_path,
                        made,
                        _lock: lock,
                    });
                }
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(e)) => {
                    let _ = fs::remove_file(&lock_path);
                    return Err(BundleError::io(&lock_path)(e));
                }
            }
        }
        Err(BundleError::io(parent)(io::Error::other(
            "no staging folder could be reserved",
        )))
    }

    /// The path that may be filled.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the finished folder to `target`, replacing a folder that is there.
    /// Both names are on one file system. Where the system can exchange two
    /// folders in one step there is a whole bundle at `target` at every moment.
    pub(crate) fn replace(self, target: &Path) -> Result<(), BundleError> {
        if !target.exists() {
            match fs::rename(&self.path, target) {
                Ok(()) => return sync_parent(target),
                Err(_) if target.exists() => {}
                Err(e) => return Err(BundleError::io(target)(e)),
            }
        }
        if exchange(&self.path, target).is_err() {
            // Two steps: the old folder goes aside under a name that the next
            // writer sweeps.
            let aside = Staging::reserve(target.parent().unwrap_or(Path::new(".")))?;
            fs::rename(target, &aside.path).map_err(BundleError::io(target))?;
            if let Err(e) = fs::rename(&self.path, target) {
                let _ = fs::rename(&aside.path, target);
                return Err(BundleError::io(target)(e));
            }
        }
        // The old folder is now at our own path (or aside) and goes with `self`.
        sync_parent(target)
    }

    /// Moves the finished folder to `target` unless something is there already;
    /// false means that somebody else was first, and the folder is kept here.
    pub(crate) fn publish(&self, target: &Path) -> Result<bool, BundleError> {
        // Some systems rename over an empty folder, some don't; this never
        // removes a folder with anything in it.
        let _ = fs::remove_dir(target);
        match fs::rename(&self.path, target) {
            Ok(()) => sync_parent(target).map(|()| true),
            Err(_) if target.exists() => Ok(false),
            Err(e) => Err(BundleError::io(target)(e)),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Nothing can be reported from here; the next writer sweeps what stays.
        if fs::remove_dir_all(&self.path).is_err() {
            // A file may have been moved here in a folder's stead.
            let _ = fs::remove_file(&self.path);
        }
        let _ = fs::remove_file(&self.lock_path);
        remove_empty(&self.made);
    }
}

fn remove_empty(folders: &[PathBuf]) {
    for folder in folders.iter().rev() {
        let _ = fs::remove_dir(folder);
    }
}

fn lock_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(LOCK_SUFFIX);
    PathBuf::from(name)
}

/// A name that no other writer on this machine uses. It never gets into a
/// bundle.
fn unique() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    let n = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("{}-{n}-{nanos:x}", std::process::id())
}

/// Removes the staging folders in `parent` whose writer is gone. Failures are
/// left for the next time.
pub(crate) fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if !name.starts_with(PREFIX) || !name.ends_with(LOCK_SUFFIX) {
            continue;
        }
        let lock_path = entry.path();
        let Ok(lock) = File::open(&lock_path) else {
            continue;
        };
        if lock.try_lock().is_err() {
            continue;
        }
        let folder = parent.join(name.trim_end_matches(LOCK_SUFFIX));
        let gone = !folder.exists()
            || fs::remove_dir_all(&folder).is_ok()
            || fs::remove_file(&folder).is_ok();
        if gone {
            let _ = fs::remove_file(&lock_path);
        }
    }
}

/// Writes the names in a folder to disk.
#[cfg(unix)]
pub(crate) fn sync_dir(path: &Path) -> io::Result<()> {
    use io::ErrorKind::{InvalidInput, Unsupported};
    match File::open(path)?.sync_all() {
        // Some file systems have no such operation on folders.
        Err(e) if matches!(e.kind(), InvalidInput | Unsupported) => Ok(()),
        result => result,
    }
}

/// Writes the names in a folder to disk; here the system does it by itself.
#[cfg(not(unix))]
pub(crate) fn sync_dir(_path: &Path) -> io::Result<()> {
    Ok(())
}

fn sync_parent(target: &Path) -> Result<(), BundleError> {
    let parent = parent_of(target);
    sync_dir(parent).map_err(BundleError::io(parent))
}

/// The folder that holds `path`; `.` for a bare name.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

#[cfg(any(target_os = "linux", target_os = "macos"))]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).map_err(io::Error::from)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Bytes that an ordinary user may still write below `path`, where the system
/// tells.
#[cfg(unix)]
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    stat.f_frsize.checked_mul(stat.f_bavail)
}

/// Bytes that an ordinary user may still write below `path`: not known here.
#[cfg(not(unix))]
pub(crate) fn free_bytes(_path: &Path) -> Option<u64> {
    None
}

/// Refuses when `needed` bytes do not fit below `parent`.
pub(crate) fn require_space(parent: &Path, target: &Path, needed: u64) -> Result<(), BundleError> {
    match free_bytes(parent) {
        Some(available) if available < needed => Err(BundleError::NoSpace {
            path: target.to_path_buf(),
            needed,
            available,
        }),
        _ => Ok(()),
    }
}

/// Writes a file and waits until it is on disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), BundleError> {
    use std::io::Write;
    let mut file = File::create(path).map_err(BundleError::io(path))?;
    file.write_all(bytes)
        .and_then(|()| file.sync_all())
        .map_err(BundleError::io(path))
}

/// Replaces a file in one step: readers see the old content or the new one.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), BundleError> {
    let parent = parent_of(path);
    let temporary = parent.join(format!("{PREFIX}{}.file", unique()));
    let written = write_file(&temporary, bytes)
        .and_then(|()| fs::rename(&temporary, path).map_err(BundleError::io(path)));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written?;
    sync_dir(parent).map_err(BundleError::io(parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_staging_folder_survives_the_sweep_and_a_dead_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let live = Staging::reserve(dir.path()).unwrap();
        fs::create_dir(live.path()).unwrap();
        // What a killed writer leaves: a folder and a lock file nobody holds.
        let dead = dir.path().join(".carat-staging-1-0-0");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("weights.bin"), b"half").unwrap();
        fs::write(lock_of(&dead), b"").unwrap();
        let other = Staging::reserve(dir.path()).unwrap();
        assert!(live.path().exists());
        assert!(!dead.exists() && !lock_of(&dead).exists());
        drop((live, other));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn publish_lets_the_first_win() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let make = |content: &str| {
            let s = Staging::reserve(dir.path()).unwrap();
            fs::create_dir(s.path()).unwrap();
            fs::write(s.path().join("x"), content).unwrap();
            s
        };
        let (first, second) = (make("first"), make("second"));
        assert!(first.publish(&target).unwrap());
        assert!(!second.publish(&target).unwrap());
        assert_eq!(fs::read(target.join("x")).unwrap(), b"first");
        make("third").replace(&target).unwrap();
        assert_eq!(fs::read(target.join("x")).unwrap(), b"third");
        drop((first, second));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn space_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        if free_bytes(dir.path()).is_none() {
            return; // this system doesn't tell
        }
        let e = require_space(dir.path(), Path::new("out"), u64::MAX).unwrap_err();
        assert!(
            matches!(
                e,
                BundleError::NoSpace {
                    needed: u64::MAX,
                    ..
                }
            ),
            "{e}"
        );
        require_space(dir.path(), Path::new("out"), 0).unwrap();
    }
}
