//! Many runs along axes: one file of records that a stopped sweep goes on from.

use std::{collections::BTreeSet, path::Path};

use carat_engine::EngineOptions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{BenchError, Protocol, Record, append_records, read_records};

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
            Axis::Chunk => &EngineOptions::CHUNKS,
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
    /// Why there is nothing to measure: what is not built, what the machine does
    /// not have, what the model has no room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Why measuring it failed. Such a cell is measured again by the next sweep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl Cell {
    /// Where a cell is filed; [`sweep`] knows its key.
    pub fn of(spec: &CellSpec) -> Cell {
        Cell {
            axis: spec.axis,
            value: spec.value,
            key: String::new(),
            skipped: None,
            failed: None,
        }
    }
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Cells that were measured now.
    pub measured: usize,
    /// Cells for which there was nothing to measure.
    pub skipped: usize,
    /// Cells that failed now.
    pub failed: usize,
    /// Cells that were there already.
    pub known: usize,
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
/// as soon as it is done; `measure` says in the record's cell if it was skipped or
/// failed. Failed cells are measured again.
///
/// # Errors
/// When the file cannot be read or written, or `measure` gives up; what was
/// measured before stays.
pub fn sweep(
    file: &Path,
    cells: &[CellSpec],
    identity: &[String],
    measure: &mut dyn FnMut(&CellSpec) -> Result<Record, BenchError>,
) -> Result<Swept, BenchError> {
    let known: BTreeSet<String> = match file.exists() {
        true => read_records(file)?
            .into_iter()
            .filter_map(|r| r.cell.filter(|c| c.failed.is_none()))
            .map(|cell| cell.key)
            .collect(),
        false => BTreeSet::new(),
    };
    let mut swept = Swept::default();
    for spec in cells {
        let key = spec.key(identity);
        if known.contains(&key) {
            swept.known += 1;
            continue;
        }
        let mut record = measure(spec)?;
        let cell = record.cell.take().unwrap_or_else(|| Cell::of(spec));
        match (&cell.failed, &cell.skipped) {
            (Some(_), _) => swept.failed += 1,
            (None, Some(_)) => swept.skipped += 1,
            (None, None) => swept.measured += 1,
        }
        record.cell = Some(Cell { key, ..cell });
        append_records(file, &[record])?;
    }
    Ok(swept)
}
