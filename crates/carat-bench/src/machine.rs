//! What a number was measured on.

use carat_kernels::ProbeBuffer;
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

/// Bytes that [`read_bandwidth`] reads, in all its threads together: beyond the
/// caches of the machines we know but for a few servers with larger third-level
/// caches, where it flatters the bound and never a result.
const PROBE_BYTES: u64 = 512 << 20;

/// Threads and words per thread of a bandwidth probe. More threads than
/// processors read no faster; a fourth of the free memory is enough to take.
fn probe(threads: usize, processors: usize, free: Option<u64>) -> (usize, usize) {
    let threads = threads.clamp(1, processors.max(1));
    let bytes = free.map_or(PROBE_BYTES, |free| PROBE_BYTES.min(free / 4));
    let words = bytes / 8 / threads as u64;
    // At least one round of the sums below.
    (threads, (words as usize).max(8))
}

/// Read bandwidth in bytes per second: the best of five passes over 512 MiB
/// (or a fourth of the free memory), divided among `threads` threads.
pub fn read_bandwidth(threads: usize) -> f64 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let (threads, words) = probe(threads, processors, available_memory_bytes());
    let buffers: Vec<ProbeBuffer> = (0..threads).map(|_| ProbeBuffer::new(words)).collect();
    let mut best: f64 = 0.0;
    for _ in 0..5 {
        let barrier = Barrier::new(threads + 1);
        let elapsed = std::thread::scope(|scope| {
            let readers: Vec<_> = buffers
                .iter()
                .map(|buffer| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        std::hint::black_box(buffer.read())
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
        best = best.max((threads * words * 8) as f64 / elapsed.as_secs_f64());
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_takes_a_fixed_amount_however_many_threads() {
        let total = |(threads, words): (usize, usize)| (threads * words * 8) as u64;
        let much = Some(1 << 40);
        for threads in [1, 2, 64, 1024, usize::MAX] {
            let taken = probe(threads, 64, much);
            assert!(taken.0 <= 64 && total(taken) <= PROBE_BYTES, "{taken:?}");
            assert!(total(taken) > PROBE_BYTES / 2);
            assert!(total(probe(threads, 64, Some(8 << 20))) <= 2 << 20);
        }
        assert_eq!(probe(0, 0, Some(0)), (1, 8));
        assert_eq!(total(probe(2, 2, None)), PROBE_BYTES);
    }

    #[test]
    fn the_machine_has_a_name_and_a_bandwidth() {
        let machine = Machine::observe();
        assert!(!machine.cpu.is_empty() && machine.logical_cpus > 0);
        // Slower than any memory since 1990, faster than none yet built.
        let bandwidth = read_bandwidth(1);
        assert!(bandwidth > 1e7 && bandwidth < 1e14, "{bandwidth}");
    }
}
