//! Records: what a figure stands on.

use std::{collections::BTreeSet, io::Write as _, path::Path};

use carat_bundle::file::StagedFile;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    Allowance, ArmResult, BenchError, Machine, Protocol, Ratio, VerifyCost, legacy,
    sustained::Sustained, sweep::Cell,
};

/// [`Record::schema`] of every record.
pub const SCHEMA: &str = "carat.bench.record";
/// [`Record::version`] that this crate writes. Records of version 0 are older
/// ones in another form, which are still read.
///
/// Version 2 has long runs made of trials, costs of steps beside the arms that they
/// are of, and cells that failed.
pub const VERSION: u32 = 2;

/// Largest file of records that is read.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The program that measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Build {
    /// Version of carat.
    pub version: String,
    /// Commit that it was built from, if its caller told.
    pub commit: Option<String>,
    /// BLAKE3 of the running program's file.
    pub binary_digest: Option<String>,
}

impl Build {
    /// This program; `commit` as the caller knows it.
    pub fn current(commit: Option<String>) -> Build {
        let digest =
            |path: std::path::PathBuf| carat_bundle::digest::file_digest(&path, &|_| {}).ok();
        Build {
            version: env!("CARGO_PKG_VERSION").into(),
            commit,
            binary_digest: std::env::current_exe().ok().and_then(digest),
        }
    }
}

/// One line of a file of records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Always `carat.bench.record`.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// Version of the form; 0 for what was converted from older records.
    #[schemars(range(max = VERSION))]
    pub version: u32,
    /// Day (UTC, `YYYY-MM-DD`).
    pub date: String,
    /// What it was measured on.
    pub machine: Machine,
    /// [`Machine::fingerprint`].
    pub machine_fingerprint: String,
    /// What measured it.
    pub build: Build,
    /// What a trial did.
    pub protocol: Protocol,
    /// [`Protocol::digest`].
    pub protocol_digest: String,
    /// What was accepted although it makes figures doubtful.
    pub allowed: BTreeSet<Allowance>,
    /// The arms, which ran in turns.
    pub arms: Vec<ArmResult>,
    /// Every arm but the first over the first.
    pub ratios: Vec<Ratio>,
    /// One run of minutes for each arm, if that is what was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sustained: Vec<Sustained>,
    /// Steps of several rows, if that is what was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub verify: Vec<VerifyCost>,
    /// The cell of a sweep, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cell: Option<Cell>,
    /// Remarks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl Record {
    /// A record of this day and this machine.
    pub fn new(
        machine: Machine,
        build: Build,
        protocol: Protocol,
        allowed: BTreeSet<Allowance>,
        arms: Vec<ArmResult>,
    ) -> Record {
        Record {
            schema: SCHEMA.into(),
            version: VERSION,
            date: today(),
            machine_fingerprint: machine.fingerprint(),
            machine,
            build,
            protocol_digest: protocol.digest(),
            protocol,
            allowed,
            ratios: crate::ratios(&arms),
            arms,
            sustained: Vec::new(),
            verify: Vec::new(),
            cell: None,
            notes: Vec::new(),
        }
    }

    /// The committed JSON schema.
    pub fn json_schema() -> Value {
        schemars::schema_for!(Record).to_value()
    }

    /// Reads one record of any version.
    ///
    /// # Errors
    /// Saying what is wrong with it.
    pub fn parse(line: &str) -> Result<Record, String> {
        let mut value: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let schema = value["schema"].as_str().unwrap_or_default();
        let version = value["version"].as_u64();
        match (schema, version) {
            (SCHEMA, Some(v)) if v <= u64::from(VERSION) => {
                if v < 2 {
                    legacy::restate_version_1(&mut value);
                }
                let record: Record = serde_json::from_value(value).map_err(|e| e.to_string())?;
                record.check()?;
                Ok(record)
            }
            (legacy::SCHEMA, Some(1)) => legacy::read(value),
            _ => Err(format!(
                "schema {schema:?} version {version:?}, expected {SCHEMA:?} up to {VERSION}"
            )),
        }
    }

    /// A digest that is not that of its content belongs to other content.
    fn check(&self) -> Result<(), String> {
        for (what, said, found) in [
            (
                "protocol_digest",
                &self.protocol_digest,
                self.protocol.digest(),
            ),
            (
                "machine_fingerprint",
                &self.machine_fingerprint,
                self.machine.fingerprint(),
            ),
        ] {
            if *said != found {
                return Err(format!("{what} is {said}, its content has {found}"));
            }
        }
        Ok(())
    }
}

/// Reads a file of records, one a line.
///
/// # Errors
/// Naming the file and the line.
pub fn read_records(path: &Path) -> Result<Vec<Record>, BenchError> {
    let wrong = |problem: String| BenchError::file(path, problem);
    let metadata = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?;
    if metadata.len() > MAX_FILE_BYTES {
        let length = metadata.len();
        return Err(wrong(format!(
            "{length} bytes, expected at most {MAX_FILE_BYTES}"
        )));
    }
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(n, line)| Record::parse(line).map_err(|e| wrong(format!("line {}: {e}", n + 1))))
        .collect()
}

/// Adds records to a file, which is replaced whole: a failure leaves it as it was.
///
/// # Errors
/// When it cannot be written.
pub fn append_records(path: &Path, records: &[Record]) -> Result<(), BenchError> {
    let wrong = |problem: String| BenchError::file(path, problem);
    let mut text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(wrong(e.to_string())),
    };
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    for record in records {
        text += &serde_json::to_string(record).map_err(|e| wrong(e.to_string()))?;
        text.push('\n');
    }
    write_whole(path, text.as_bytes())
}

/// Writes a file whole or not at all.
///
/// # Errors
/// When it cannot be written.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), BenchError> {
    let wrong = |problem: String| BenchError::file(path, problem);
    let mut file =
        StagedFile::create(path, bytes.len() as u64).map_err(|e| wrong(e.to_string()))?;
    file.write_all(bytes).map_err(|e| wrong(e.to_string()))?;
    file.publish().map_err(|e| wrong(e.to_string()))
}

/// The day in UTC.
fn today() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    day_of(now.map_or(0, |d| d.as_secs() / 86_400))
}

/// The Gregorian date of a day since 1970-01-01 (Hinnant, `civil_from_days`).
fn day_of(days: u64) -> String {
    let z = days + 719_468;
    let (era, day) = (z / 146_097, z % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let d = day - (153 * month + 2) / 5 + 1;
    let m = if month < 10 { month + 3 } else { month - 9 };
    let y = year + era * 400 + u64::from(m <= 2);
    format!("{y:04}-{m:02}-{d:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        // From `date -u -d @SECONDS`.
        for (days, date) in [
            (0, "1970-01-01"),
            (11_016, "2000-02-29"),
            (20_787, "2026-11-30"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(day_of(days), date);
        }
    }
}
