//! Many runs along axes: one file of records that a stopped sweep goes on from.

use std::{collections::BTreeSet, path::Path};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{BenchError, Protocol, Record, VerifyCost, append_records, read_records};

/// What a sweep varies.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Axis {
    /// Tokens in the cache before the prompt.
    Context,
    /// Prompt tokens.
    Prompt,
    /// Tokens per prefill step.
    Chunk,
    /// Threads.
    Threads,
    /// Sequences at once.
    Batch,
    /// Rows of a verify step.
    VerifyWidth,
    /// The models themselves, such as one checkpoint in several formats and
    /// granularities.
    Model,
}

impl Axis {
    /// Every axis, in the order of reports.
    pub const ALL: [Axis; 7] = [
        Axis::Context,
        Axis::Prompt,
        Axis::Chunk,
        Axis::Threads,
        Axis::Batch,
        Axis::VerifyWidth,
        Axis::Model,
    ];

    /// The name in commands and records.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Context => "context",
            Axis::Prompt => "prompt",
            Axis::Chunk => "chunk",
            Axis::Threads => "threads",
            Axis::Batch => "batch",
            Axis::VerifyWidth => "verify-width",
            Axis::Model => "model",
        }
    }

    /// What its values count.
    pub const fn unit(self) -> &'static str {
        match self {
            Axis::Context => "tokens in the cache",
            Axis::Prompt => "prompt tokens",
            Axis::Chunk => "tokens per prefill step",
            Axis::Threads => "threads",
            Axis::Batch => "sequences",
            Axis::VerifyWidth => "rows of a step",
            Axis::Model => "model",
        }
    }

    /// Values that are swept where none are given.
    pub const fn values(self) -> &'static [usize] {
        match self {
            Axis::Context => &[0, 1024, 4096, 16384, 32768],
            Axis::Prompt => &[1, 16, 64, 256, 512, 1024],
            Axis::Chunk => &[1, 8, 32, 64, 128, 256, 512],
            Axis::Threads => &[1, 2, 4, 8, 16, 32],
            Axis::Batch => &[1, 2, 4, 8],
            Axis::VerifyWidth => &[1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16],
            Axis::Model => &[0],
        }
    }
}

/// What makes a record a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// The axis.
    pub axis: Axis,
    /// The value on it.
    pub value: usize,
    /// BLAKE3 of everything that would make it another cell.
    pub key: String,
    /// Why it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Steps of a verify width.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub verify: Vec<VerifyCost>,
}

/// A cell that is to be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellSpec {
    /// The axis.
    pub axis: Axis,
    /// The value on it.
    pub value: usize,
    /// Its protocol: that of the sweep with the value put in.
    pub protocol: Protocol,
    /// Tokens per prefill step.
    pub chunk: usize,
    /// Threads.
    pub threads: usize,
}

impl CellSpec {
    /// The cells of an axis around a base.
    pub fn along(axis: Axis, values: &[usize], base: &CellSpec) -> Vec<CellSpec> {
        let cell = |&value: &usize| {
            let mut cell = CellSpec {
                axis,
                value,
                ..base.clone()
            };
            match axis {
                Axis::Context => cell.protocol.depth = value,
                Axis::Prompt => cell.protocol.prompt_tokens = value,
                Axis::Chunk => cell.chunk = value,
                Axis::Threads => cell.threads = value,
                Axis::Batch | Axis::VerifyWidth | Axis::Model => {}
            }
            cell
        };
        values.iter().map(cell).collect()
    }

    /// BLAKE3 of everything that would make it another cell. `identity` names
    /// models, machine, program and rounds.
    pub fn key(&self, identity: &[String]) -> String {
        let everything = (
            self.axis,
            self.value,
            self.protocol.digest(),
            self.chunk,
            self.threads,
            identity,
        );
        let json = serde_json::to_vec(&everything).unwrap_or_default();
        blake3::hash(&json).to_hex().to_string()
    }
}

/// Measures what a file of records does not have yet, and adds each cell to it
/// as soon as it is done. Gives the number of cells measured now.
///
/// # Errors
/// When the file cannot be read or written, or `measure` fails; what was
/// measured before stays.
pub fn sweep(
    file: &Path,
    cells: &[CellSpec],
    identity: &[String],
    measure: &mut dyn FnMut(&CellSpec) -> Result<Record, BenchError>,
) -> Result<usize, BenchError> {
    let known: BTreeSet<String> = match file.exists() {
        true => read_records(file)?
            .into_iter()
            .filter_map(|r| Some(r.cell?.key))
            .collect(),
        false => BTreeSet::new(),
    };
    let mut measured = 0;
    for spec in cells {
        let key = spec.key(identity);
        if known.contains(&key) {
            continue;
        }
        let mut record = measure(spec)?;
        let cell = record.cell.take();
        record.cell = Some(Cell {
            axis: spec.axis,
            value: spec.value,
            key,
            skipped: cell.as_ref().and_then(|c| c.skipped.clone()),
            verify: cell.map_or_else(Vec::new, |c| c.verify),
        });
        append_records(file, &[record])?;
        measured += 1;
    }
    Ok(measured)
}
