//! A new record against an old one.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Allowance, BenchError, Interval, Measured, Record, stats::unpaired_ratio};

/// A change below this share is not worth a person's time, however sure it is:
/// two builds of the same code differ by as much through the layout of code.
const LEAST_CHANGE: f64 = 0.02;

/// What a comparison says about a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// The whole interval is below 1, and the change is at least 2 %.
    Regression,
    /// The whole interval is above 1, and the change is at least 2 %.
    Improvement,
    /// Neither.
    Unchanged,
    /// Too few trials on a side to say.
    TooFew,
}

/// A figure of an arm in both records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The arm, by its name in both.
    pub arm: String,
    /// `prompt_tps` or `decode_tps`.
    pub figure: String,
    /// Median of the old record.
    pub old: f64,
    /// Median of the new record.
    pub new: f64,
    /// `new / old` with its 95 % interval; `None` for too few trials.
    pub ratio: Option<(f64, Interval)>,
    /// What that says.
    pub change: Change,
}

/// Compares the arms that both records have by name.
///
/// # Errors
/// When the records are not of the same work on the same machine, or have no
/// arm in common.
pub fn compare(
    old: &Record,
    new: &Record,
    allowed: &BTreeSet<Allowance>,
) -> Result<Vec<Comparison>, BenchError> {
    let unlike = |what, old: &str, new: &str| {
        Err(BenchError::Unlike {
            what,
            old: old.to_owned(),
            new: new.to_owned(),
        })
    };
    if old.protocol_digest != new.protocol_digest {
        let (old, new) = (&old.protocol, &new.protocol);
        let show = |p: &crate::Protocol| serde_json::to_string(p).unwrap_or_default();
        return unlike("protocols", &show(old), &show(new));
    }
    if old.machine_fingerprint != new.machine_fingerprint && !allowed.contains(&Allowance::Machine)
    {
        let show = |m: &crate::Machine| {
            let fingerprint = m.fingerprint();
            format!(
                "{} ({} processors, {})",
                m.cpu,
                m.logical_cpus,
                &fingerprint[..12]
            )
        };
        return unlike("machines", &show(&old.machine), &show(&new.machine));
    }
    let mut found = Vec::new();
    for old_arm in &old.arms {
        let Some(new_arm) = new.arms.iter().find(|a| a.info.name == old_arm.info.name) else {
            continue;
        };
        if old_arm.info.threads != new_arm.info.threads {
            let show = |n: Option<usize>| format!("{}: {n:?}", old_arm.info.name);
            return unlike(
                "threads",
                &show(old_arm.info.threads),
                &show(new_arm.info.threads),
            );
        }
        type Figure = fn(&Measured) -> Option<f64>;
        let figures: [(&str, Figure); 2] = [
            ("prompt_tps", Measured::prompt_tps),
            ("decode_tps", Measured::decode_tps),
        ];
        for (figure, of) in figures {
            let (old, new) = (old_arm.values(of), new_arm.values(of));
            let (Some(o), Some(n)) = (crate::spread(&old), crate::spread(&new)) else {
                continue;
            };
            let ratio = unpaired_ratio(&new, &old);
            found.push(Comparison {
                arm: old_arm.info.name.clone(),
                figure: figure.to_owned(),
                old: o.median,
                new: n.median,
                ratio,
                change: ratio.map_or(Change::TooFew, |(ratio, i)| judge(ratio, i)),
            });
        }
    }
    if found.is_empty() {
        let names = |r: &Record| {
            let names = r.arms.iter().map(|a| a.info.name.clone());
            names.collect::<Vec<_>>().join(", ")
        };
        return unlike("arms", &names(old), &names(new));
    }
    Ok(found)
}

fn judge(ratio: f64, interval: Interval) -> Change {
    if interval.high < 1.0 && ratio < 1.0 - LEAST_CHANGE {
        Change::Regression
    } else if interval.low > 1.0 && ratio > 1.0 + LEAST_CHANGE {
        Change::Improvement
    } else {
        Change::Unchanged
    }
}
