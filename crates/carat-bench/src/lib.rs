//! A benchmark protocol that cannot flatter, its records, and pictures of them.
//!
//! A [`Protocol`] says what a trial does; its digest is what makes two figures
//! comparable. [`Arm`]s run trials: carat in this process or a fresh one,
//! llama.cpp, a server, any command ([`arms`]). [`run()`] lets arms take turns and
//! keeps every round with the machine's clocks, heat, power and neighbours
//! ([`system`]); disturbed rounds are repeated, and refused if the machine is
//! never quiet. [`Bounds`] of memory and arithmetic are measured in the same run,
//! and a figure above them is an error, not a [`Record`].
//!
//! What it is not: a judge of answers. It asks a bundle's gate transcripts for
//! their verdict ([`Fidelity`]) and shows it beside the speed.

mod arm;
pub mod arms;
mod bounds;
mod compare;
mod conditions;
mod error;
mod fidelity;
mod legacy;
mod machine;
mod nanos;
mod profile;
mod prompt;
mod protocol;
mod record;
pub mod report;
mod run;
mod spec;
mod stats;
mod sustained;
mod sweep;
pub mod system;
mod verify_cost;

pub use arm::{Arm, ArmInfo, ArmKind, Measured, TokenCost};
pub use bounds::{Bounds, Peak, Roofline, bound, peaks};
pub use compare::{Change, Comparison, compare};
pub use conditions::{Allowance, Conditions, Flag};
pub use error::BenchError;
pub use fidelity::Fidelity;
pub use machine::{
    Machine, available_memory_bytes, peak_memory_bytes, read_bandwidth, read_bandwidth_of,
    resident_memory_bytes,
};
pub use nanos::Nanos;
pub use profile::{Profile, ProfileRow};
pub use prompt::synthetic_prompt;
pub use protocol::{PromptSource, Prompts, Protocol, SamplingRule, TrialPrompt};
pub use record::{Build, Record, SCHEMA, VERSION, append_records, read_records, write_whole};
pub use run::{ArmResult, LoadTimes, Ratio, RunOptions, Trial, check_arms, ratios, run};
pub use spec::{ArmKindSpec, ArmSpec};
pub use stats::{FEWEST_FOR_INTERVAL, Interval, Spread, paired_ratio, spread, unpaired_ratio};
pub use sustained::{Recovery, SustainOptions, Sustained, sustain};
pub use sweep::{Axis, Cell, CellSpec, Swept, sweep};
pub use verify_cost::{VerifyCost, verify_cost};
