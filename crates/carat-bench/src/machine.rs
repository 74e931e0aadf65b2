//! What a number was measured on.

use std::{sync::Barrier, time::Instant};

use serde::{Deserialize, Serialize};

/// The machine under a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor, as the system names it.
    pub cpu: String,
    /// Logical processors that this process may use.
    pub logical_cpus: usize,
    /// Operating system and architecture.
    pub platform: String,
    /// Memory in bytes, where the system tells.
    pub memory_bytes: Option<u64>,
    /// Load average over the last minute at the start, where the system tells.
    pub load_average: Option<f64>,
}

impl Machine {
    /// Looks at this machine.
    pub fn observe() -> Machine {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo
            .lines()
            .find_map(|l| l.strip_prefix("model name")?.split_once(':'))
            .map_or_else(
                || std::env::consts::ARCH.to_owned(),
                |(_, name)| name.trim().to_owned(),
            );
        Machine {
            cpu,
            logical_cpus: std::thread::available_parallelism().map_or(1, usize::from),
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            memory_bytes: proc_kib("/proc/meminfo", "MemTotal:"),
            load_average: std::fs::read_to_string("/proc/loadavg")
                .ok()
                .and_then(|s| s.split_whitespace().next()?.parse().ok()),
        }
    }
}

/// Memory that can be had without swapping, where the system tells.
pub fn available_memory_bytes() -> Option<u64> {
    proc_kib("/proc/meminfo", "MemAvailable:")
}

/// Largest resident size of this process so far, where the system tells.
pub fn peak_memory_bytes() -> Option<u64> {
    proc_kib("/proc/self/status", "VmHWM:")
}

fn proc_kib(path: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// Read bandwidth in bytes per second: the best of three passes of `threads`
/// threads over 256 MiB each, beyond the caches of the machines we know but for
/// a few servers with larger third-level caches, which then flatters the bound
/// and never a result.
pub fn read_bandwidth(threads: usize) -> f64 {
    const WORDS: usize = (256 << 20) / 8;
    let threads = threads.max(1);
    let buffers: Vec<Vec<u64>> = (0..threads).map(|t| vec![t as u64 + 1; WORDS]).collect();
    let mut best: f64 = 0.0;
    for _ in 0..3 {
        let barrier = Barrier::new(threads + 1);
        let elapsed = std::thread::scope(|scope| {
            let readers: Vec<_> = buffers
                .iter()
                .map(|buffer| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        std::hint::black_box(sum(buffer))
                    })
                })
                .collect();
            barrier.wait();
            let start = Instant::now();
            for reader in readers {
                // A reader only adds numbers: it cannot panic.
                let _ = reader.join();
            }
            start.elapsed()
        });
        best = best.max((threads * WORDS * 8) as f64 / elapsed.as_secs_f64());
    }
    best
}

/// Eight independent sums, so that the loads and not the additions set the pace.
fn sum(words: &[u64]) -> u64 {
    let mut acc = [0u64; 8];
    for chunk in words.chunks_exact(8) {
        for (a, w) in acc.iter_mut().zip(chunk) {
            *a = a.wrapping_add(*w);
        }
    }
    acc.iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_a_name_and_a_bandwidth() {
        let machine = Machine::observe();
        assert!(!machine.cpu.is_empty() && machine.logical_cpus > 0);
        // Slower than any memory since 1990, faster than none yet built.
        let bandwidth = read_bandwidth(1);
        assert!(bandwidth > 1e7 && bandwidth < 1e14, "{bandwidth}");
    }
}
