//! What a number was measured on.

use carat_kernels::Isa;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The machine under a measurement. What the system does not tell is `null`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Processor, as the system names it.
    pub cpu: String,
    /// Logical processors that this process may use.
    pub logical_cpus: usize,
    /// Operating system and architecture.
    pub platform: String,
    /// Version of the system's kernel.
    pub kernel: Option<String>,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Bytes of the last cache that the first processor sees.
    pub last_cache_bytes: Option<u64>,
    /// Instruction sets that kernels are written for and that it has.
    pub isas: Vec<String>,
    /// Frequency governor of the first processor.
    pub governor: Option<String>,
    /// Load average over the last minute at the start.
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
        let text = |path: &str| Some(std::fs::read_to_string(path).ok()?.trim().to_owned());
        Machine {
            cpu,
            logical_cpus: std::thread::available_parallelism().map_or(1, usize::from),
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            kernel: text("/proc/sys/kernel/osrelease"),
            memory_bytes: proc_kib("/proc/meminfo", "MemTotal:"),
            last_cache_bytes: last_cache_bytes(),
            isas: Isa::available().map(|isa| isa.name().to_owned()).collect(),
            governor: text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            load_average: text("/proc/loadavg")
                .and_then(|s| s.split_whitespace().next()?.parse().ok()),
        }
    }

    /// BLAKE3 of what makes this machine another one (64 hex digits): everything
    /// but its load, its exact memory and its kernel's version.
    pub fn fingerprint(&self) -> String {
        let lasting = (
            &self.cpu,
            self.logical_cpus,
            &self.platform,
            self.last_cache_bytes,
            &self.isas,
            &self.governor,
        );
        let json = serde_json::to_vec(&lasting).unwrap_or_default();
        blake3::hash(&json).to_hex().to_string()
    }
}

/// Size of the highest level of cache that Linux lists for the first processor.
fn last_cache_bytes() -> Option<u64> {
    let caches = (0..8).filter_map(|index| {
        let size = std::fs::read_to_string(format!(
            "/sys/devices/system/cpu/cpu0/cache/index{index}/size"
        ));
        size.ok()?.trim().strip_suffix('K')?.parse::<u64>().ok()
    });
    caches.max()?.checked_mul(1024)
}

/// Memory that can be had without swapping, where the system tells.
pub fn available_memory_bytes() -> Option<u64> {
    proc_kib("/proc/meminfo", "MemAvailable:")
}

/// Resident sizes of a process, where the system tells.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    /// Now, bytes.
    pub(crate) resident: Option<u64>,
    /// At most so far, bytes.
    pub(crate) peak: Option<u64>,
}

/// Of the process with an id, or `self`.
pub(crate) fn memory_of(pid: &str) -> Memory {
    let status = format!("/proc/{pid}/status");
    Memory {
        resident: proc_kib(&status, "VmRSS:"),
        peak: proc_kib(&status, "VmHWM:"),
    }
}

/// Resident size of this process now, where the system tells.
pub fn resident_memory_bytes() -> Option<u64> {
    memory_of("self").resident
}

/// Largest resident size of this process so far, where the system tells.
pub fn peak_memory_bytes() -> Option<u64> {
    memory_of("self").peak
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

/// Bytes and threads of a bandwidth probe. More threads than processors read no
/// faster; a fourth of the free memory is enough to take.
fn probe(bytes: u64, threads: usize, processors: usize, free: Option<u64>) -> (usize, usize) {
    let most = free.map_or(PROBE_BYTES, |free| PROBE_BYTES.min(free / 4));
    (
        bytes.min(most) as usize,
        threads.clamp(1, processors.max(1)),
    )
}

/// Read bandwidth in bytes per second: the best of five passes over 512 MiB
/// (or a fourth of the free memory), divided among `threads` threads.
pub fn read_bandwidth(threads: usize) -> f64 {
    read_bandwidth_of(PROBE_BYTES, threads)
}

/// As [`read_bandwidth`], over `bytes` bytes again and again: what fits into a
/// cache is read at the cache's speed, as it is by a model of that size.
pub fn read_bandwidth_of(bytes: u64, threads: usize) -> f64 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let (bytes, threads) = probe(bytes, threads, processors, available_memory_bytes());
    carat_kernels::read_bandwidth(bytes, threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_takes_a_fixed_amount_however_many_threads() {
        let much = Some(1 << 40);
        for threads in [1, 2, 64, 1024, usize::MAX] {
            let (bytes, taken) = probe(u64::MAX, threads, 64, much);
            assert!(taken <= 64 && bytes as u64 == PROBE_BYTES, "{taken}");
            assert_eq!(probe(PROBE_BYTES, threads, 64, Some(8 << 20)).0, 2 << 20);
        }
        assert_eq!(probe(PROBE_BYTES, 0, 0, Some(0)), (0, 1));
        assert_eq!(probe(PROBE_BYTES, 2, 2, None), (PROBE_BYTES as usize, 2));
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
