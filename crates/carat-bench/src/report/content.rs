//! What a report shows of records.

use super::{
    Table, models,
    plot::{Plot, Point, Series},
};
use crate::{ArmResult, Axis, Nanos, Record, Spread, Sustained, Trial, system::Reading};

/// A part of a report.
pub(super) struct Section {
    pub(super) title: String,
    pub(super) text: Vec<String>,
    pub(super) plots: Vec<Plot>,
    pub(super) tables: Vec<Table>,
}

pub(super) const NONE: &str = "not available";

pub(super) fn told(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| NONE.into(), show)
}

pub(super) fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| (*w).to_owned()).collect()
}

/// Three or four digits that say something.
pub(super) fn figure(value: f64) -> String {
    match value {
        v if v >= 1000.0 => format!("{v:.0}"),
        v if v >= 100.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

/// The median with its interval, or its range.
pub(super) fn spread_text(spread: Option<Spread>) -> String {
    spread.map_or_else(
        || NONE.into(),
        |s| {
            let (low, high) = s.interval.map_or((s.min, s.max), |i| (i.low, i.high));
            format!("{} ({}–{})", figure(s.median), figure(low), figure(high))
        },
    )
}

pub(super) fn point(x: f64, spread: Spread) -> Point {
    Point {
        x,
        y: spread.median,
        interval: spread.interval.map(|i| (i.low, i.high)),
    }
}

/// Everything that records have to show.
pub(super) fn sections(records: &[Record]) -> Vec<Section> {
    let mut sections = vec![provenance(records)];
    for record in records.iter().filter(|r| r.cell.is_none()) {
        if !record.sustained.is_empty() {
            sections.push(sustained(record));
        } else if !record.verify.is_empty() {
            let text = vec![protocol_text(record)];
            sections.push(verify("Cost of several rows".into(), text, &[record]));
        } else if !record.arms.is_empty() {
            sections.push(arms(record));
        }
    }
    for axis in Axis::ALL {
        let cells = cells_of(records, axis);
        if !cells.is_empty() {
            sections.push(along(axis, &cells));
        }
    }
    sections
}

/// The cells of an axis. One that failed and was measured again is the later one.
fn cells_of(records: &[Record], axis: Axis) -> Vec<&Record> {
    let mut cells: Vec<&Record> = Vec::new();
    let key = |r: &Record| r.cell.as_ref().map(|c| c.key.clone());
    for record in records {
        if record.cell.as_ref().is_some_and(|c| c.axis == axis) {
            cells.retain(|r| key(r) != key(record));
            cells.push(record);
        }
    }
    cells
}

/// What was measured on what, by what.
fn provenance(records: &[Record]) -> Section {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for r in records {
        let m = &r.machine;
        let row = vec![
            m.cpu.clone(),
            m.logical_cpus.to_string(),
            m.isas.last().cloned().unwrap_or_else(|| NONE.into()),
            m.governor.clone().unwrap_or_else(|| NONE.into()),
            r.build.commit.clone().unwrap_or_else(|| NONE.into()),
            r.date.clone(),
        ];
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    Section {
        title: "Machine and build".into(),
        text: vec![
            "Figures are medians with 95 % bootstrap intervals, or with their range where there \
             are fewer than five rounds. A speed says nothing about answers: the gate's verdict \
             stands beside it, and “ungated” means that nobody has judged the bundle."
                .into(),
        ],
        plots: Vec::new(),
        tables: vec![Table {
            head: words(&[
                "processor",
                "processors",
                "best ISA",
                "governor",
                "commit",
                "date",
            ]),
            rows,
        }],
    }
}

/// Size, fidelity and speed of arms.
pub(super) fn arm_table(arms: &[ArmResult]) -> Table {
    let row = |arm: &ArmResult| {
        let info = &arm.info;
        let roofline = |f: fn(&crate::Roofline) -> Option<f64>| {
            told(arm.roofline.as_ref().and_then(f), |p| format!("{p:.0} %"))
        };
        vec![
            info.name.clone(),
            told(info.model_bytes.map(|b| b as f64 / 1e6), |mb| {
                format!("{} MB", figure(mb))
            }),
            told(info.bits_per_weight, figure),
            info.fidelity.label().to_owned(),
            spread_text(arm.prompt_tps),
            roofline(|r| r.prefill_percent),
            spread_text(arm.decode_tps),
            roofline(|r| r.decode_percent),
        ]
    };
    Table {
        head: words(&[
            "arm",
            "size",
            "bits/weight",
            "gate",
            "prefill tok/s",
            "of peak",
            "decode tok/s",
            "of bandwidth",
        ]),
        rows: arms.iter().map(row).collect(),
    }
}

fn protocol_text(record: &Record) -> String {
    let p = &record.protocol;
    let allowed: Vec<&str> = record.allowed.iter().map(|a| a.name()).collect();
    let allowed = match allowed.is_empty() {
        true => String::new(),
        false => format!(" Allowed: {}.", allowed.join(", ")),
    };
    format!(
        "{} prompt and {} new tokens after {} in the cache; protocol {}.{allowed}",
        p.prompt_tokens,
        p.new_tokens,
        p.depth,
        &record.protocol_digest[..12]
    )
}

/// Arms that took turns.
fn arms(record: &Record) -> Section {
    let rounds = |title: &str, of: fn(&crate::Measured) -> Option<f64>| Plot {
        title: title.into(),
        x: "round".into(),
        y: "tokens per second".into(),
        log_x: false,
        lines: true,
        series: record
            .arms
            .iter()
            .map(|arm| Series {
                name: arm.info.name.clone(),
                points: arm
                    .trials
                    .iter()
                    .filter(|t| t.counted)
                    .filter_map(|t| {
                        Some(Point {
                            x: t.round as f64 + 1.0,
                            y: of(&t.measured)?,
                            interval: None,
                        })
                    })
                    .collect(),
            })
            .collect(),
    };
    let mut tables = vec![arm_table(&record.arms)];
    if !record.ratios.is_empty() {
        tables.push(Table {
            head: words(&["ratio, pair by pair", "prefill", "decode"]),
            rows: record
                .ratios
                .iter()
                .map(|r| {
                    vec![
                        format!("{} / {}", r.arm, r.over),
                        spread_text(r.prompt_tps),
                        spread_text(r.decode_tps),
                    ]
                })
                .collect(),
        });
    }
    let names: Vec<&str> = record.arms.iter().map(|a| a.info.name.as_str()).collect();
    let dropped: usize = record.arms[0].trials.iter().filter(|t| !t.counted).count();
    let mut text = vec![protocol_text(record)];
    if dropped > 0 {
        text.push(format!("{dropped} disturbed rounds are left out."));
    }
    text.extend(record.notes.iter().cloned());
    Section {
        title: names.join(" against "),
        text,
        plots: vec![
            rounds("Prefill, round by round", crate::Measured::prompt_tps),
            rounds("Decode, round by round", crate::Measured::decode_tps),
        ],
        tables,
    }
}

/// One axis of a sweep.
fn along(axis: Axis, cells: &[&Record]) -> Section {
    let value = |r: &Record| r.cell.as_ref().map_or(0, |c| c.value);
    let mut cells = cells.to_vec();
    cells.sort_by_key(|r| value(r));
    let mut text: Vec<String> = cells
        .first()
        .map(|r| protocol_text(r))
        .into_iter()
        .collect();
    for record in &cells {
        let Some(cell) = &record.cell else { continue };
        for (what, why) in [("skipped", &cell.skipped), ("FAILED", &cell.failed)] {
            if let Some(why) = why {
                text.push(format!("{} {}: {what}: {why}", axis.name(), cell.value));
            }
        }
    }
    let title = format!("By {}", axis.name());
    if axis == Axis::VerifyWidth {
        return verify(title, text, &cells);
    }
    if axis == Axis::Model {
        let arms: Vec<ArmResult> = cells.iter().flat_map(|r| r.arms.clone()).collect();
        return models::section(title, text, &arms);
    }
    let mut names: Vec<String> = Vec::new();
    for arm in cells.iter().flat_map(|r| &r.arms) {
        if !names.contains(&arm.info.name) {
            names.push(arm.info.name.clone());
        }
    }
    let plot = |title: &str, of: fn(&ArmResult) -> Option<Spread>| Plot {
        title: format!("{title} by {}", axis.name()),
        x: axis.unit().into(),
        y: "tokens per second".into(),
        log_x: true,
        lines: true,
        series: names
            .iter()
            .map(|name| Series {
                name: name.clone(),
                points: cells
                    .iter()
                    .filter_map(|r| {
                        let arm = r.arms.iter().find(|a| a.info.name == *name)?;
                        Some(point(value(r) as f64, of(arm)?))
                    })
                    .collect(),
            })
            .collect(),
    };
    let mut rows = Vec::new();
    for record in &cells {
        for mut row in arm_table(&record.arms).rows {
            row.insert(1, value(record).to_string());
            rows.push(row);
        }
    }
    let mut head = arm_table(&[]).head;
    head.insert(1, axis.unit().into());
    let measured = !names.is_empty();
    Section {
        title,
        text,
        plots: if measured {
            vec![
                plot("Prefill", |a| a.prompt_tps),
                plot("Decode", |a| a.decode_tps),
            ]
        } else {
            Vec::new()
        },
        tables: if measured {
            vec![Table { head, rows }]
        } else {
            Vec::new()
        },
    }
}

/// Steps of several rows.
fn verify(title: String, mut text: Vec<String>, cells: &[&Record]) -> Section {
    text.push(
        "A draft of k tokens is checked in one step of k + 1 rows; it pays if more tokens than \
         the step costs are kept."
            .into(),
    );
    let costs: Vec<_> = cells.iter().flat_map(|r| &r.verify).collect();
    let mut names: Vec<&str> = Vec::new();
    for cost in &costs {
        if !names.contains(&cost.arm.as_str()) {
            names.push(&cost.arm);
        }
    }
    let series = names.iter().map(|name| Series {
        name: (*name).to_owned(),
        points: costs
            .iter()
            .filter(|c| c.arm == *name)
            .filter_map(|c| Some(point(c.width as f64, c.over_one?)))
            .collect(),
    });
    let rows = costs.iter().map(|c| {
        vec![
            c.arm.clone(),
            c.width.to_string(),
            told(c.step_s.map(|s| s.median), |s| {
                Nanos::from_secs_f64(s).to_string()
            }),
            spread_text(c.over_one),
        ]
    });
    Section {
        title,
        text,
        plots: vec![Plot {
            title: "Cost of a step over a step of one row".into(),
            x: "rows of the step".into(),
            y: "times a step of one row".into(),
            log_x: false,
            lines: true,
            series: series.collect(),
        }],
        tables: vec![Table {
            head: words(&["arm", "rows", "step", "over one row"]),
            rows: rows.collect(),
        }],
    }
}

/// Long runs: trajectories.
fn sustained(record: &Record) -> Section {
    type Value = fn(&Trial) -> Option<f64>;
    let ended = |t: &Trial| (t.started_ns.0 + t.conditions.elapsed_ns.0) as f64 / 60e9;
    let trajectory = |title: &str, y: &str, of: Value| Plot {
        title: title.into(),
        x: "minutes".into(),
        y: y.into(),
        log_x: false,
        lines: true,
        series: record
            .sustained
            .iter()
            .map(|run| Series {
                name: run.arm.clone(),
                points: run
                    .samples
                    .iter()
                    .filter_map(|s| {
                        Some(Point {
                            x: ended(s),
                            y: of(s)?,
                            interval: None,
                        })
                    })
                    .collect(),
            })
            .filter(|s: &Series| !s.points.is_empty())
            .collect(),
    };
    let all: [(&str, &str, Value); 6] = [
        ("Decode", "tokens per second", |t| t.measured.decode_tps()),
        ("Clock", "GHz", |t| {
            t.conditions.after.clock_hz.map(|hz| hz / 1e9)
        }),
        ("Temperature", "degrees Celsius", |t| {
            hottest(&t.conditions.after)
        }),
        ("Power of the processors", "watts", |t| {
            t.conditions.cpu_watts()
        }),
        ("Power of the GPU", "watts", |t| {
            t.conditions.after.gpu.as_ref()?.power_w
        }),
        ("Battery", "percent", |t| {
            Some(t.conditions.after.battery.as_ref()?.percent)
        }),
    ];
    let mut text = vec![protocol_text(record)];
    let mut plots = Vec::new();
    for (title, y, of) in all {
        let plot = trajectory(title, y, of);
        match plot.series.is_empty() {
            true => text.push(format!("{title}: {NONE}.")),
            false => plots.push(plot),
        }
    }
    for run in &record.sustained {
        let dropped = run.samples.iter().filter(|t| !t.counted).count();
        if dropped > 0 {
            let all = run.samples.len();
            text.push(format!(
                "{}: {dropped} of {all} trials were disturbed and are in no median.",
                run.arm
            ));
        }
    }
    text.extend(record.notes.iter().cloned());
    let row = |run: &Sustained| {
        let verdict = record.arms.iter().find(|a| a.info.name == run.arm);
        vec![
            run.arm.clone(),
            verdict.map_or(NONE, |a| a.info.fidelity.label()).to_owned(),
            run.new_tokens.to_string(),
            told(run.first_minute_tps, figure),
            told(run.plateau_tps, figure),
            told(run.retained(), |r| format!("{:.0} %", 100.0 * r)),
            told(run.cpu_joules, |j| format!("{j:.0} J")),
            told(run.gpu_joules, |j| format!("{j:.0} J")),
            told(run.joules_per_token, |j| format!("{j:.3} J")),
            match run.recovery.recovered {
                Some(true) => "recovered".into(),
                Some(false) => "NOT recovered".into(),
                None => NONE.into(),
            },
        ]
    };
    Section {
        title: "Sustained".into(),
        text,
        plots,
        tables: vec![Table {
            head: words(&[
                "arm",
                "gate",
                "new tokens",
                "first minute tok/s",
                "plateau tok/s",
                "kept",
                "CPU",
                "GPU",
                "per token",
                "rest before",
            ]),
            rows: record.sustained.iter().map(row).collect(),
        }],
    }
}

fn hottest(reading: &Reading) -> Option<f64> {
    let gpu = reading.gpu.as_ref().and_then(|g| g.temperature_c);
    [reading.temperature_c, gpu]
        .into_iter()
        .flatten()
        .reduce(f64::max)
}
