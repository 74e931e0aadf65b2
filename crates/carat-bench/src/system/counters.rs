//! Plain numbers from the files of `/proc` and `/sys`.

use std::path::{Path, PathBuf};

use crate::Nanos;

/// `USER_HZ`, the unit of `/proc/stat`: 100 on every architecture that Rust's
/// standard library knows Linux on.
const TICK: u64 = 10_000_000;

/// A small file's text, trimmed.
pub(super) fn text(path: impl AsRef<Path>) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// A small file's number.
pub(super) fn number(path: impl AsRef<Path>) -> Option<f64> {
    text(path)?.parse().ok().filter(|n: &f64| n.is_finite())
}

/// Entries of a folder whose names begin with `prefix`, sorted.
pub(super) fn entries(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(read) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = read
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with(prefix))
        })
        .collect();
    found.sort();
    found
}

/// Time that all processors together spent on anything, time stolen by other
/// guests of the same host included.
pub(super) fn busy(root: &Path) -> Option<Nanos> {
    let stat = text(root.join("proc/stat"))?;
    let mut fields = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace();
    // user nice system idle iowait irq softirq steal
    let fields: Vec<u64> = fields
        .by_ref()
        .take(8)
        .map_while(|f| f.parse().ok())
        .collect();
    let [user, nice, system, _, _, irq, softirq, steal] = fields[..] else {
        return None;
    };
    Some(ticks(user + nice + system + irq + softirq + steal))
}

/// Time that a process and those of its children that it has waited for spent.
pub(super) fn spent_by(root: &Path, pid: &str) -> Option<Nanos> {
    let stat = text(root.join("proc").join(pid).join("stat"))?;
    // The name in brackets may hold anything, spaces and brackets too.
    let (_, rest) = stat.rsplit_once(')')?;
    // Fields 14 to 17; the first after the name is the third.
    let fields: Vec<u64> = rest
        .split_whitespace()
        .skip(11)
        .take(4)
        .map_while(|f| f.parse().ok())
        .collect();
    (fields.len() == 4).then(|| ticks(fields.iter().sum()))
}

fn ticks(count: u64) -> Nanos {
    Nanos(count.saturating_mul(TICK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_processors_and_processes() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir_all(root.join("proc/7")).unwrap();
        let write = |path: &str, text: &str| std::fs::write(root.join(path), text).unwrap();
        write("proc/stat", "cpu  10 1 2 900 30 3 4 5 99 0\ncpu0 1 2\n");
        assert_eq!(busy(root), Some(Nanos(25 * TICK)));
        write(
            "proc/7/stat",
            "7 (a) b (c) S 1 7 7 0 -1 4194304 100 0 0 0 11 12 13 14 20 0 1 0 5\n",
        );
        assert_eq!(spent_by(root, "7"), Some(Nanos(50 * TICK)));
        // Absent and cut files are no zero.
        write("proc/stat", "cpu  10 1 2\n");
        write("proc/7/stat", "7 (x) S 1 7\n");
        assert_eq!((busy(root), spent_by(root, "7")), (None, None));
        assert_eq!(spent_by(root, "8"), None);
    }
}
