//! What a person reads.

use carat_bench::{ArmResult, Nanos, Profile, Record, Spread, Sustained, VerifyCost};

use crate::{
    failure::{OrInput as _, Outcome},
    output::{self, bytes},
};

fn line(text: &str) -> Outcome<()> {
    output::line(text).or_input()
}

/// `median  (low to high)`: the interval, or the range of fewer than five values.
fn rate(spread: Option<Spread>, unit: &str) -> String {
    let Some(s) = spread else {
        return "not available".into();
    };
    let (low, high) = s.interval.map_or((s.min, s.max), |i| (i.low, i.high));
    format!("{:>9.1} {unit}  ({low:.1} to {high:.1})", s.median)
}

fn told(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "not available".into(), show)
}

/// Of a roofline, a line or two.
fn roofline(arm: &ArmResult) -> Outcome<()> {
    let Some(roofline) = &arm.roofline else {
        return Ok(());
    };
    let percent = |p: Option<f64>| told(p, |p| format!("{p:.0} %"));
    line(&format!(
        "read   {} per token: {} of {:.1} GB/s that this machine reads of as much ({})",
        bytes(roofline.bytes_per_token),
        told(roofline.effective_bandwidth, |b| format!(
            "{:.1} GB/s",
            b / 1e9
        )),
        roofline.bounds.read_bandwidth / 1e9,
        percent(roofline.decode_percent)
    ))?;
    let Some(peak) = roofline.bounds.highest_peak() else {
        return Ok(());
    };
    line(&format!(
        "compute {} of {:.0} GOP/s while the prompt is read ({})",
        told(roofline.effective_operations, |o| format!(
            "{:.0} GOP/s",
            o / 1e9
        )),
        peak / 1e9,
        percent(roofline.prefill_percent)
    ))
}

/// One arm.
pub(super) fn single(record: &Record) -> Outcome<()> {
    let arm = &record.arms[0];
    let backend = arm.info.backend.as_deref().unwrap_or("unknown");
    line(&format!("{} on {backend}", arm.info.model))?;
    line(&format!(
        "prompt {:>6} tokens {}",
        record.protocol.prompt_tokens,
        rate(arm.prompt_tps, "tok/s")
    ))?;
    line(&format!(
        "decode {:>6} tokens {}",
        record.protocol.new_tokens,
        rate(arm.decode_tps, "tok/s")
    ))?;
    let seconds =
        |s: Option<Spread>| told(s.map(|s| s.median), |s| Nanos::from_secs_f64(s).to_string());
    line(&format!(
        "TTFT   {}, TPOT {}",
        seconds(arm.ttft_s),
        seconds(arm.tpot_s)
    ))?;
    roofline(arm)?;
    let fidelity = &arm.info.fidelity;
    line(&format!("gate   {} ({})", fidelity.label(), fidelity.basis))?;
    if let Some(load) = arm.load_ns {
        line(&format!("load   {load}"))?;
    }
    if let Some(load) = arm.load {
        let cold = load
            .cold_ns
            .map_or("not available".into(), |c| c.to_string());
        line(&format!(
            "first token {cold} after a cold start, {} after a warm one",
            load.warm_ns
        ))?;
    }
    if let Some(peak) = arm.peak_memory_bytes {
        let steady = arm
            .trials
            .last()
            .and_then(|t| t.measured.steady_memory_bytes);
        let steady = steady.map_or("not available".into(), bytes);
        line(&format!(
            "memory {} at most, {steady} at the end",
            bytes(peak)
        ))?;
    }
    disturbances(&record.arms);
    Ok(())
}

/// Notes about flagged trials.
pub(super) fn disturbances(arms: &[ArmResult]) {
    for arm in arms {
        let mut flagged = arm.trials.iter().filter(|t| !t.flags.is_empty());
        let count = flagged.clone().count();
        let Some(last) = flagged.next_back() else {
            continue;
        };
        output::note(&format!(
            "note: {count} of {} trials of {} were disturbed ({})",
            arm.trials.len(),
            arm.info.name,
            last.flags[0].detail
        ));
    }
}

/// Arms side by side.
pub(super) fn ab(record: &Record) -> Outcome<()> {
    let width = record
        .arms
        .iter()
        .map(|a| a.info.name.len())
        .max()
        .unwrap_or(0);
    for arm in &record.arms {
        line(&format!(
            "{:<width$}  prompt {}  decode {}  {}",
            arm.info.name,
            rate(arm.prompt_tps, "tok/s"),
            rate(arm.decode_tps, "tok/s"),
            arm.info.fidelity.label()
        ))?;
    }
    for ratio in &record.ratios {
        let times = |s: Option<Spread>| {
            told(s.map(|s| s.median), |m| {
                let interval = s.and_then(|s| s.interval);
                let interval = interval.map_or(String::new(), |i| {
                    format!(" ({:.3} to {:.3})", i.low, i.high)
                });
                format!("{m:.3}{interval}")
            })
        };
        line(&format!(
            "{} / {}: prompt {}, decode {}",
            ratio.arm,
            ratio.over,
            times(ratio.prompt_tps),
            times(ratio.decode_tps)
        ))?;
    }
    for arm in record.arms.iter().filter(|a| a.roofline.is_some()) {
        line(&arm.info.name)?;
        roofline(arm)?;
    }
    disturbances(&record.arms);
    Ok(())
}

/// Long runs.
pub(super) fn sustained(runs: &[Sustained]) -> Outcome<()> {
    for run in runs {
        line(&run.arm)?;
        let recovered = match run.recovery.recovered {
            Some(true) => "as cool and fast as before",
            Some(false) => "NOT as cool and fast as before",
            None => "temperature and clock not available",
        };
        line(&format!(
            "  rested {} ({recovered})",
            run.recovery.waited_ns
        ))?;
        let speed = |tps| told(tps, |tps| format!("{tps:.1} tok/s"));
        line(&format!(
            "  first minute {}, plateau {} ({})",
            speed(run.first_minute_tps),
            speed(run.plateau_tps),
            told(run.retained(), |r| format!("{:.0} %", 100.0 * r))
        ))?;
        let dropped = run.samples.iter().filter(|t| !t.counted).count();
        if dropped > 0 {
            let all = run.samples.len();
            line(&format!(
                "  {dropped} of {all} trials were disturbed and are in no median"
            ))?;
        }
        let last = run.samples.last().map(|t| &t.conditions.after);
        line(&format!(
            "  clock {} -> {}, temperature {} -> {}",
            told(run.before.clock_hz, |c| format!("{:.2} GHz", c / 1e9)),
            told(last.and_then(|r| r.clock_hz), |c| format!(
                "{:.2} GHz",
                c / 1e9
            )),
            told(run.before.temperature_c, |t| format!("{t:.0} C")),
            told(last.and_then(|r| r.temperature_c), |t| format!("{t:.0} C")),
        ))?;
        line(&format!(
            "  energy cpu {}, gpu {}; {} per new token",
            told(run.cpu_joules, |j| format!("{j:.0} J")),
            told(run.gpu_joules, |j| format!("{j:.0} J")),
            told(run.joules_per_token, |j| format!("{j:.3} J"))
        ))?;
    }
    Ok(())
}

/// A placement report.
pub(super) fn profile(profile: &Profile) -> Outcome<()> {
    let mut phase = "";
    for row in &profile.rows {
        if row.phase != phase {
            phase = &row.phase;
            line(&format!("{phase}: share, calls, op, device, kernel"))?;
        }
        line(&format!(
            "  {:>5.1} %  {:>6}  {} {}  {}  {}{}",
            row.percent,
            row.calls,
            row.op,
            row.on,
            row.device,
            row.kernel,
            if row.fallback { "  FALLBACK" } else { "" }
        ))?;
    }
    Ok(())
}

/// Steps of several rows.
pub(super) fn verify_costs(costs: &[VerifyCost]) -> Outcome<()> {
    for cost in costs {
        let step = cost.step_s.map(|s| s.median);
        let over = cost.over_one;
        let interval = over.and_then(|s| s.interval);
        line(&format!(
            "{:>4} rows  {:>9}  {} of one{}",
            cost.width,
            told(step, |s| Nanos::from_secs_f64(s).to_string()),
            told(over.map(|s| s.median), |m| format!("{m:.2}")),
            interval.map_or(String::new(), |i| format!(
                "  ({:.2} to {:.2})",
                i.low, i.high
            ))
        ))?;
    }
    Ok(())
}
