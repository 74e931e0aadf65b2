//! Benchmark protocol and records.
//!
//! What is measured: prompt tokens per second (`p / TTFT`), decode tokens per
//! second without the first token, both on synthetic prompts that any program
//! can reproduce ([`synthetic_prompt`]), after a warm-up, on the monotonic
//! clock, with the machine's own read bandwidth measured in the same run. A
//! decode speed that would need more bandwidth than was measured is an error,
//! not a record.

mod machine;
mod prompt;
mod run;
mod stats;

pub use machine::{Machine, available_memory_bytes, peak_memory_bytes, read_bandwidth};
pub use prompt::synthetic_prompt;
pub use run::{BenchError, BenchOptions, BenchRecord, Trial, run};
pub use stats::{Spread, spread};
