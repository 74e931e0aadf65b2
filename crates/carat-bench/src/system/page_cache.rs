//! Files that are not in memory.

use std::path::Path;

/// Asks the system to forget a file's pages. It keeps those that are mapped;
/// [`storage_bytes_read`] tells afterwards whether it did.
#[cfg(target_os = "linux")]
pub fn evict(path: &Path) {
    use rustix::fs::{Advice, fadvise};
    if let Ok(file) = std::fs::File::open(path) {
        // Pages that are not yet written are kept.
        let _ = file.sync_all();
        let _ = fadvise(&file, 0, None, Advice::DontNeed);
    }
}

/// Nobody has tried elsewhere.
#[cfg(not(target_os = "linux"))]
pub fn evict(_path: &Path) {}

/// Bytes that this process has made the system read from storage so far.
pub fn storage_bytes_read() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("read_bytes:"))?;
    line.trim().parse().ok()
}
