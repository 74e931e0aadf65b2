//! Records: their committed schema, old ones, comparisons, sweeps and pages. Run
//! with `CARAT_UPDATE=1` to write the schema anew.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use carat_bench::{
    Allowance, ArmInfo, ArmKind, ArmResult, Axis, BenchError, Build, Cell, CellSpec, Change,
    Machine, Measured, Nanos, Protocol, Record, Swept, Trial, compare, read_records, report, sweep,
    system::Reading,
};
use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// An arm whose trials decode at given speeds and read prompts ten times as fast.
fn arm(name: &str, decode_tps: &[f64]) -> ArmResult {
    let trial = |(round, tps): (usize, &f64)| Trial {
        round,
        started_ns: Nanos(0),
        measured: Measured {
            prompt_tokens: 512,
            new_tokens: 128,
            ttft_ns: Nanos::from_secs_f64(512.0 / (10.0 * tps)),
            decode_ns: Nanos::from_secs_f64(127.0 / tps),
            ..Measured::default()
        },
        conditions: Default::default(),
        flags: Vec::new(),
        counted: true,
    };
    let mut info = ArmInfo::new(name, ArmKind::Carat, "carat", "model <&> \"x\"");
    info.model_bytes = Some(97_000_000);
    info.threads = Some(2);
    ArmResult::new(info, decode_tps.iter().enumerate().map(trial).collect())
}

fn record(arms: Vec<ArmResult>) -> Record {
    let build = Build {
        version: "0".into(),
        commit: None,
        binary_digest: None,
    };
    let machine = Machine {
        cpu: "a processor".into(),
        logical_cpus: 2,
        ..Machine::default()
    };
    Record::new(machine, build, Protocol::default(), BTreeSet::new(), arms)
}

const FAST: [f64; 6] = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2];
const SLOW: [f64; 6] = [90.0, 91.0, 89.0, 90.5, 89.5, 90.2];

#[test]
fn the_committed_schema_is_that_of_the_code() {
    let path = root().join("schemas/bench-record.schema.json");
    let current = serde_json::to_string_pretty(&Record::json_schema()).unwrap() + "\n";
    if std::env::var_os("CARAT_UPDATE").is_some() {
        std::fs::write(&path, &current).unwrap();
    }
    let stored = std::fs::read_to_string(&path).expect("the schema");
    assert!(
        stored == current,
        "the schema is stale: run with CARAT_UPDATE=1"
    );
    let schema: Value = serde_json::from_str(&stored).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let value = serde_json::to_value(record(vec![arm("a", &FAST), arm("b", &SLOW)])).unwrap();
    let errors: Vec<String> = validator
        .iter_errors(&value)
        .map(|e| e.to_string())
        .collect();
    assert_eq!(errors, Vec::<String>::new());
    // It is no rubber stamp.
    for (at, wrong) in [
        ("/schema", json!("x")),
        ("/version", json!(3)),
        ("/protocol/prompt/kind", json!("x")),
        ("/arms/0/trials/0/measured/ttft_ns", json!("fast")),
        ("/allowed", json!(["everything"])),
    ] {
        let mut value = value.clone();
        *value.pointer_mut(at).unwrap() = wrong;
        assert!(!validator.is_valid(&value), "{at}");
    }
    let mut value = value;
    value["surprise"] = json!(1);
    assert!(!validator.is_valid(&value));
}

#[test]
fn a_record_comes_back_as_it_was_and_forged_ones_do_not() {
    let record = record(vec![arm("a", &FAST), arm("b", &SLOW)]);
    let line = serde_json::to_string(&record).unwrap();
    assert_eq!(Record::parse(&line).unwrap(), record);
    for (from, to, says) in [
        (
            "\"prompt_tokens\":512,\"new_tokens\":128,\"depth\"",
            "\"prompt_tokens\":5,\"new_tokens\":128,\"depth\"",
            "protocol_digest",
        ),
        ("a processor", "another", "machine_fingerprint"),
        (
            "\"version\":2,\"date\"",
            "\"version\":3,\"date\"",
            "expected",
        ),
        ("\"date\"", "\"dates\"", "dates"),
    ] {
        let forged = line.replacen(from, to, 1);
        assert_ne!(forged, line, "{from}");
        let error = Record::parse(&forged).unwrap_err();
        assert!(error.contains(says), "{from}: {error}");
    }
    for text in ["", "{", "[]", "null", "{\"schema\":\"carat.bench.record\"}"] {
        assert!(Record::parse(text).is_err(), "{text:?}");
    }
}

#[test]
fn every_committed_record_can_still_be_read() {
    let mut count = 0;
    for entry in std::fs::read_dir(root().join("benches/records")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "jsonl") {
            count += read_records(&path).unwrap().len();
        }
    }
    assert!(count >= 9, "{count} records");
}

/// What the older records say themselves is what their restatement says; and since
/// the other program's decode began elsewhere in them, no record of today is held
/// against them.
#[test]
fn old_records_keep_their_figures_and_their_protocol() {
    let path = root().join("benches/records/2026-11-29-smollm2-llamacpp.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    for (line, record) in text.lines().zip(read_records(&path).unwrap()) {
        assert_eq!((record.version, record.protocol.version), (0, 0));
        let mut today = record.clone();
        today.protocol.version = Protocol::default().version;
        assert_ne!(today.protocol.digest(), record.protocol_digest);
        today.protocol_digest = today.protocol.digest();
        let error = compare(&record, &today, &BTreeSet::new()).unwrap_err();
        assert!(error.to_string().starts_with("protocols differ"), "{error}");
        let old: Value = serde_json::from_str(line).unwrap();
        for arm in &record.arms {
            let median = &old["median"][&arm.info.name];
            for (key, spread) in [
                ("prompt_tps", arm.prompt_tps),
                ("decode_tps", arm.decode_tps),
            ] {
                let (old, new) = (median[key].as_f64().unwrap(), spread.unwrap().median);
                // Times are whole nanoseconds of at least 0.1 s.
                assert!((old / new - 1.0).abs() < 1e-7, "{old} {new}");
            }
        }
        let old = old["ratio"]["decode_tps"].as_f64().unwrap();
        let new = record.ratios[0].decode_tps.unwrap().median;
        assert!((old / new - 1.0).abs() < 1e-7, "{old} {new}");
    }
}

/// Version 1 had trials of long runs in another form, and costs of steps inside of
/// cells.
#[test]
fn records_of_version_1_are_read() {
    let mut today = record(vec![arm("a", &FAST)]);
    let trials = today.arms[0].trials.clone();
    let mut old = serde_json::to_value(&today).unwrap();
    old["version"] = json!(1);
    let reading = |joules: u64| {
        let reading = Reading {
            cpu_energy_uj: Some(joules * 1_000_000),
            ..Reading::default()
        };
        serde_json::to_value(reading).unwrap()
    };
    let sample = |n: u64| {
        json!({
            "started_ns": 10 * n, "ended_ns": 10 * n + 7, "after": reading(n + 1),
            "measured": trials[0].measured,
        })
    };
    old["sustained"] = json!([{
        "arm": "a", "recovery": { "waited_ns": 1, "recovered": null }, "before": reading(0),
        "samples": [sample(0), sample(1)], "new_tokens": 256,
        "first_minute_tps": 100.0, "plateau_tps": null, "cpu_joules": 2.0, "gpu_joules": null,
        "joules_per_token": null,
    }]);
    let cost = json!({
        "arm": "a", "width": 4, "depth": 512, "steps_ns": [5], "step_s": null, "over_one": null,
    });
    old["cell"] = json!({
        "axis": "verify-width", "value": 4, "key": "k", "verify": [cost],
    });
    let read = Record::parse(&old.to_string()).unwrap();
    let samples = &read.sustained[0].samples;
    assert_eq!(samples[1].started_ns, Nanos(10));
    assert_eq!(samples[1].conditions.elapsed_ns, Nanos(7));
    let energies = |t: &Trial| {
        let conditions = &t.conditions;
        let [before, after] = [&conditions.before, &conditions.after];
        (before.cpu_energy_uj.unwrap(), after.cpu_energy_uj.unwrap())
    };
    assert_eq!(energies(&samples[0]), (0, 1_000_000));
    assert_eq!(energies(&samples[1]), (1_000_000, 2_000_000));
    assert!(samples.iter().all(|t| t.counted && t.flags.is_empty()));
    assert_eq!(read.verify[0].width, 4);
    // What was read can be written and read again.
    let line = serde_json::to_string(&read).unwrap();
    assert_eq!(Record::parse(&line).unwrap(), read);
    today.sustained.clone_from(&read.sustained);
    assert!(
        report::html(&[today])
            .unwrap()
            .contains("Power of the processors")
    );
}

#[test]
fn a_regression_is_flagged_and_noise_is_not() {
    let none = BTreeSet::new();
    let one = |decode: &[f64]| record(vec![arm("a", decode)]);
    let change = |old: &[f64], new: &[f64]| {
        let compared = compare(&one(old), &one(new), &none).unwrap();
        assert_eq!(compared.len(), 2);
        assert_eq!(compared[0].change, compared[1].change);
        compared[1].change
    };
    assert_eq!(change(&FAST, &SLOW), Change::Regression);
    assert_eq!(change(&SLOW, &FAST), Change::Improvement);
    assert_eq!(change(&FAST, &FAST), Change::Unchanged);
    // A tenth slower, and too noisy to say so.
    let noisy = [60.0, 130.0, 95.0, 70.0, 120.0, 90.0];
    assert_eq!(change(&FAST, &noisy), Change::Unchanged);
    // Certain, and too small to matter.
    let less = FAST.map(|tps| tps * 0.985);
    assert_eq!(change(&FAST, &less), Change::Unchanged);
    assert_eq!(change(&FAST[..4], &SLOW), Change::TooFew);
}

#[test]
fn unlike_records_are_not_compared() {
    let old = record(vec![arm("a", &FAST)]);
    let none = BTreeSet::new();
    let refused = |spoil: &dyn Fn(&mut Record)| {
        let mut new = old.clone();
        spoil(&mut new);
        new.protocol_digest = new.protocol.digest();
        new.machine_fingerprint = new.machine.fingerprint();
        (compare(&old, &new, &none), new)
    };
    let (result, _) = refused(&|r| r.protocol.new_tokens = 600);
    let error = result.unwrap_err().to_string();
    assert!(
        error.starts_with("protocols differ") && error.contains("600"),
        "{error}"
    );
    let (result, new) = refused(&|r| r.machine.cpu = "another".into());
    assert!(matches!(
        result,
        Err(BenchError::Unlike {
            what: "machines",
            ..
        })
    ));
    let allowed = BTreeSet::from([Allowance::Machine]);
    assert!(compare(&old, &new, &allowed).is_ok());
    let (result, _) = refused(&|r| r.arms[0].info.threads = Some(1));
    assert!(matches!(
        result,
        Err(BenchError::Unlike {
            what: "threads",
            ..
        })
    ));
    let (result, _) = refused(&|r| r.arms[0].info.name = "b".into());
    assert!(matches!(
        result,
        Err(BenchError::Unlike { what: "arms", .. })
    ));
}

fn cells() -> Vec<CellSpec> {
    let base = CellSpec {
        axis: Axis::Model,
        value: 0,
        protocol: Protocol::default(),
        chunk: 128,
        threads: 2,
    };
    let mut cells = CellSpec::along(Axis::Context, &[0, 1024, 4096], &base);
    cells.extend(CellSpec::along(Axis::Threads, &[1, 2], &base));
    cells.extend(CellSpec::along(Axis::Model, &[0], &base));
    cells
}

fn of_cell(cell: &CellSpec) -> Record {
    let speed = FAST.map(|tps| tps / (1.0 + cell.value as f64 / 4096.0));
    let mut record = record(vec![arm("a", &speed), arm("b", &SLOW)]);
    record.protocol = cell.protocol.clone();
    record.protocol_digest = record.protocol.digest();
    record
}

#[test]
fn a_sweep_goes_on_where_it_was_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sweep.jsonl");
    let identity = ["machine".to_owned()];
    let mut left = 2;
    let stopped = sweep(&file, &cells(), &identity, &mut |cell| {
        if left == 0 {
            return Err(BenchError::Arms("pulled the plug".into()));
        }
        left -= 1;
        Ok(of_cell(cell))
    });
    assert!(stopped.is_err());
    assert_eq!(read_records(&file).unwrap().len(), 2);
    let mut seen = Vec::new();
    let mut go = |identity: &[String]| {
        seen.clear();
        let count = sweep(&file, &cells(), identity, &mut |cell| {
            seen.push((cell.axis, cell.value));
            Ok(of_cell(cell))
        });
        (count.unwrap().measured, seen.len(), seen.first().copied())
    };
    assert_eq!(go(&identity), (4, 4, Some((Axis::Context, 4096))));
    assert_eq!(go(&identity), (0, 0, None));
    // Another machine, model or program has cells of its own.
    assert_eq!(go(&["another".to_owned()]).0, 6);
    assert_eq!(read_records(&file).unwrap().len(), 12);
}

/// A failure is in the file, is no reason to leave the cell out the next time, and
/// is not shown beside the figures that then replace it.
#[test]
fn failed_cells_are_measured_again_and_skipped_ones_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sweep.jsonl");
    let go = |failing: bool| {
        let swept = sweep(&file, &cells(), &[], &mut |spec| {
            let mut record = of_cell(spec);
            let mut cell = Cell::of(spec);
            match (spec.axis, spec.value) {
                (Axis::Context, 1024) if failing => cell.failed = Some("out of paper".into()),
                (Axis::Threads, 2) => cell.skipped = Some("not built".into()),
                _ => {}
            }
            if cell.failed.is_some() || cell.skipped.is_some() {
                record.arms.clear();
            }
            record.cell = Some(cell);
            Ok(record)
        });
        let page = report::markdown(&read_records(&file).unwrap());
        (swept.unwrap(), page)
    };
    let counts = |measured, skipped, failed, known| Swept {
        measured,
        skipped,
        failed,
        known,
    };
    let (swept, page) = go(true);
    assert_eq!(swept, counts(4, 1, 1, 0));
    assert!(
        page.contains("context 1024: FAILED: out of paper"),
        "{page}"
    );
    assert!(page.contains("threads 2: skipped: not built"), "{page}");
    assert_eq!(go(true).0, counts(0, 0, 1, 5));
    let (swept, page) = go(false);
    assert_eq!(swept, counts(1, 0, 0, 5));
    assert!(!page.contains("FAILED"), "{page}");
    assert!(page.contains("| a | 1024 |"), "{page}");
    assert_eq!(go(false).0, counts(0, 0, 0, 6));
}

/// Every page is well-formed XML, whatever the names in it are, and loads nothing.
#[test]
fn pages_are_well_formed_and_whole_in_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sweep.jsonl");
    sweep(&file, &cells(), &[], &mut |cell| Ok(of_cell(cell))).unwrap();
    let mut records = read_records(&file).unwrap();
    records.push(record(vec![
        arm("<script>alert(1)</script>", &FAST),
        arm("b|\u{1}c", &SLOW),
    ]));
    let committed = root().join("benches/records/2026-11-29-smollm2-llamacpp.jsonl");
    records.extend(read_records(&committed).unwrap());
    let page = report::html(&records).unwrap();
    let options = roxmltree::ParsingOptions {
        allow_dtd: true,
        ..roxmltree::ParsingOptions::default()
    };
    let document = roxmltree::Document::parse_with_options(&page, options).unwrap();
    let count = |name: &str| {
        document
            .descendants()
            .filter(|n| n.has_tag_name(name))
            .count()
    };
    assert_eq!(count("script"), 0);
    let svgs = document
        .descendants()
        .filter(|n| n.tag_name().name() == "svg");
    assert!(svgs.count() >= 12);
    for node in document.descendants() {
        for attribute in ["src", "href"] {
            assert_eq!(node.attribute(attribute), None);
        }
        for attribute in ["x", "y", "cx", "cy", "y1", "y2"] {
            if let Some(value) = node.attribute(attribute) {
                let value: f64 = value.parse().unwrap();
                assert!((0.0..=560.0).contains(&value), "{attribute}={value}");
            }
        }
    }
    let tables = report::markdown(&records);
    for line in tables.lines().filter(|l| l.starts_with('|')) {
        assert!(line.ends_with('|'), "{line}");
    }
    assert!(
        tables.contains("b\\| c") || tables.contains("b\\|"),
        "{tables}"
    );
    assert!(report::html(&[]).is_err());
}
