//! Records of before: `carat.compare` version 1, written by a script that ran
//! carat and llama.cpp in turns and kept tokens per second; and version 1 of
//! today's.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    Allowance, ArmInfo, ArmKind, ArmResult, Build, Machine, Measured, Nanos, Protocol, Record,
    Trial, record,
};

/// Schema of these records.
pub(crate) const SCHEMA: &str = "carat.compare";

#[derive(Deserialize)]
struct Comparison {
    date: String,
    model: String,
    threads: usize,
    busy_neighbours: usize,
    prompt_tokens: usize,
    new_tokens: usize,
    carat_commit: String,
    #[serde(rename = "llama_commit")]
    other_commit: String,
    machine: OldMachine,
    rounds: Vec<Round>,
}

#[derive(Deserialize)]
struct OldMachine {
    cpu: String,
    cores: usize,
    os: String,
    amx: bool,
    avx512_vnni: bool,
}

#[derive(Deserialize)]
struct Round {
    carat: Rates,
    #[serde(rename = "llama.cpp")]
    other: Rates,
    load_average: f64,
}

#[derive(Deserialize)]
struct Rates {
    prompt_tps: f64,
    decode_tps: f64,
    backend: Option<String>,
}

/// Restates an old record in the form of today, as version 0. Times follow from
/// the speeds and are right to a nanosecond; what was not noted is `null`.
pub(crate) fn read(value: Value) -> Result<Record, String> {
    let old: Comparison = serde_json::from_value(value).map_err(|e| e.to_string())?;
    let trials = |rates: fn(&Round) -> &Rates| -> Result<Vec<Trial>, String> {
        let rounds = old.rounds.iter().enumerate();
        rounds
            .map(|(round, r)| {
                let rates = rates(r);
                if !(rates.prompt_tps > 0.0 && rates.decode_tps > 0.0) {
                    return Err(format!("round {round}: a speed that is not above 0"));
                }
                let steps = old.new_tokens.saturating_sub(1);
                let span = |tokens: usize, tps: f64| Nanos::from_secs_f64(tokens as f64 / tps);
                Ok(Trial {
                    round,
                    started_ns: Nanos(0),
                    measured: Measured {
                        prompt_tokens: old.prompt_tokens,
                        new_tokens: old.new_tokens,
                        ttft_ns: span(old.prompt_tokens, rates.prompt_tps),
                        decode_ns: span(steps, rates.decode_tps),
                        ..Measured::default()
                    },
                    conditions: Default::default(),
                    flags: Vec::new(),
                    counted: true,
                })
            })
            .collect()
    };
    let info = |name: &str, kind, commit: &str| {
        let program = format!("{name} {commit}");
        let mut info = ArmInfo::new(name, kind, &program, &old.model);
        info.threads = Some(old.threads);
        info
    };
    let mut carat = info("carat", ArmKind::CaratProcess, &old.carat_commit);
    carat.backend = old.rounds.iter().find_map(|r| r.carat.backend.clone());
    let other = info("llama.cpp", ArmKind::LlamaBench, &old.other_commit);
    let arms = vec![
        // The baseline comes first: ratios are over it.
        ArmResult::new(other, trials(|r| &r.other)?),
        ArmResult::new(carat, trials(|r| &r.carat)?),
    ];
    let isas = [
        ("avx512vnni", old.machine.avx512_vnni),
        ("amx", old.machine.amx),
    ];
    let machine = Machine {
        cpu: old.machine.cpu,
        logical_cpus: old.machine.cores,
        platform: old.machine.os,
        isas: isas
            .iter()
            .filter(|(_, has)| *has)
            .map(|(name, _)| (*name).to_owned())
            .collect(),
        load_average: old.rounds.first().map(|r| r.load_average),
        ..Machine::default()
    };
    let protocol = Protocol {
        // The script let the other program's decode begin at an empty cache, as it
        // does by itself: other work than what is measured today.
        version: 0,
        prompt_tokens: old.prompt_tokens,
        new_tokens: old.new_tokens,
        ..Protocol::default()
    };
    let build = Build {
        version: "0.1.0".into(),
        commit: Some(old.carat_commit),
        binary_digest: None,
    };
    let allowed = BTreeSet::from([Allowance::Busy, Allowance::Clock, Allowance::Ungated]);
    let mut converted = Record::new(machine, build, protocol, allowed, arms);
    converted.version = 0;
    converted.schema = record::SCHEMA.into();
    converted.date = old.date;
    converted.notes = vec![
        "restated from carat.compare version 1: decode of llama.cpp began with an empty cache"
            .into(),
        format!("{} other processes computed meanwhile", old.busy_neighbours),
    ];
    Ok(converted)
}

/// Gives what version 1 said its place in version 2; what is no such record is
/// left for whoever reads it to refuse.
pub(crate) fn restate_version_1(record: &mut Value) {
    if let Some(verify) = record.pointer_mut("/cell/verify").map(Value::take) {
        record["verify"] = verify;
        if let Some(cell) = record["cell"].as_object_mut() {
            cell.remove("verify");
        }
    }
    let Some(runs) = record.get_mut("sustained").and_then(Value::as_array_mut) else {
        return;
    };
    for run in runs {
        let mut before = run["before"].clone();
        let samples = run.get_mut("samples").and_then(Value::as_array_mut);
        for (round, sample) in samples.into_iter().flatten().enumerate() {
            let Some(fields) = sample.as_object_mut() else {
                continue;
            };
            let (Some(ended), Some(after)) = (fields.remove("ended_ns"), fields.remove("after"))
            else {
                continue;
            };
            let at = |value: Option<&Value>| value.and_then(Value::as_u64).unwrap_or(0);
            let elapsed = at(Some(&ended)).saturating_sub(at(fields.get("started_ns")));
            let conditions = json!({ "elapsed_ns": elapsed, "before": before, "after": &after });
            fields.insert("conditions".into(), conditions);
            // Neighbours were not looked at, and every trial counted.
            fields.insert("flags".into(), json!([]));
            fields.insert("counted".into(), json!(true));
            fields.insert("round".into(), json!(round));
            before = after;
        }
    }
}
