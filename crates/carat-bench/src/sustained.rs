//! Minutes of trials: what is left when a machine is warm.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Allowance, Arm, BenchError, Nanos, RunOptions, Trial, check_arms,
    conditions::STEADY_CLOCK,
    run::Runner,
    stats::median,
    system::{Clock, Processes, Reading, Sensors},
};

/// A machine has recovered when its hottest sensor is within this of where it
/// was before the first arm, degrees Celsius: the step of common sensors is 1.
const RECOVERED_CELSIUS: f64 = 2.0;
/// Time between two looks at a machine that cools down.
const LOOK: Nanos = Nanos::from_millis(1000);
/// The first minute, which a plateau is held against.
const MINUTE: Nanos = Nanos::from_millis(60_000);

/// How long, and how rested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SustainOptions {
    /// Trials begin for this long.
    pub duration: Nanos,
    /// Idle time before each arm, at least.
    pub idle: Nanos,
    /// And at most, if the machine does not cool down.
    pub cap: Nanos,
}

impl Default for SustainOptions {
    fn default() -> Self {
        SustainOptions {
            duration: Nanos::from_millis(10 * 60_000),
            idle: Nanos::from_millis(3 * 60_000),
            cap: Nanos::from_millis(10 * 60_000),
        }
    }
}

/// Rest before an arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recovery {
    /// How long the machine was idle.
    pub waited_ns: Nanos,
    /// Whether temperature and clock were back where they had been; `null` where
    /// the system tells neither.
    pub recovered: Option<bool>,
}

/// A long run of one arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sustained {
    /// The arm's name.
    pub arm: String,
    /// Rest before it.
    pub recovery: Recovery,
    /// The machine at its start.
    pub before: Reading,
    /// Every trial after the warm-ups, from the start of the arm. One follows the
    /// other, so the reading after one is that before the next. Counted are those
    /// that no other process disturbed; clocks and heat are what the run is about.
    pub samples: Vec<Trial>,
    /// New tokens of all trials.
    pub new_tokens: usize,
    /// Median decode tokens per second of the counted trials that began in the
    /// first minute.
    pub first_minute_tps: Option<f64>,
    /// The same of those that began in the last third; `null` for runs of less
    /// than three minutes.
    pub plateau_tps: Option<f64>,
    /// Energy of the processors' packages over the run, joules (RAPL).
    pub cpu_joules: Option<f64>,
    /// Energy of the GPU, joules: its power (NVML) over time.
    pub gpu_joules: Option<f64>,
    /// Both energies, as far as they are known, over the new tokens; reading the
    /// prompts is in it.
    pub joules_per_token: Option<f64>,
}

/// The end of a trial, from the start of its arm.
fn end(trial: &Trial) -> Nanos {
    Nanos(trial.started_ns.0 + trial.conditions.elapsed_ns.0)
}

/// The trials that a long run is summed up by: those that began in its first
/// minute, and, if it lasted three or more, in its last third.
fn parts(samples: &[Trial]) -> [Vec<&Trial>; 2] {
    let end = samples.last().map_or(Nanos(0), end);
    let first = samples.iter().filter(|t| t.started_ns < MINUTE);
    let last_third = Nanos(end.0 / 3 * 2);
    let long = end.0 >= 3 * MINUTE.0;
    let last = samples
        .iter()
        .filter(|t| long && t.started_ns >= last_third);
    [first.collect(), last.collect()]
}

/// Refuses a run that others disturbed in most of what it is summed up by.
fn check_quiet(samples: &[Trial]) -> Result<(), BenchError> {
    for part in parts(samples) {
        let quiet = part.iter().filter(|t| t.counted).count();
        let wanted = part.len().div_ceil(2);
        if quiet < wanted {
            let mut flags = part.iter().rev().flat_map(|t| &t.flags);
            let last = flags.find(|f| f.kind == Allowance::Busy);
            return Err(BenchError::Disturbed {
                quiet,
                rounds: part.len(),
                wanted,
                last: last.map_or_else(String::new, |f| f.detail.clone()),
                allowance: Allowance::Busy,
            });
        }
    }
    Ok(())
}

impl Sustained {
    fn new(arm: &str, recovery: Recovery, before: Reading, samples: Vec<Trial>) -> Sustained {
        let new_tokens = samples.iter().map(|s| s.measured.new_tokens).sum();
        let [first_minute_tps, plateau_tps] = parts(&samples).map(|part| {
            let kept = part.iter().filter(|t| t.counted);
            let mut rates: Vec<f64> = kept.filter_map(|t| t.measured.decode_tps()).collect();
            (!rates.is_empty()).then(|| median(&mut rates))
        });
        let energy = |r: &Reading| r.cpu_energy_uj;
        let last = samples.last().and_then(|s| energy(&s.conditions.after));
        let cpu_joules = energy(&before)
            .zip(last)
            .map(|(from, to)| to.saturating_sub(from) as f64 / 1e6);
        let gpu_joules = gpu_joules(&before, &samples);
        let joules = [cpu_joules, gpu_joules].into_iter().flatten();
        let joules = joules.reduce(|a, b| a + b);
        Sustained {
            arm: arm.to_owned(),
            recovery,
            new_tokens,
            first_minute_tps,
            plateau_tps,
            cpu_joules,
            gpu_joules,
            joules_per_token: joules
                .filter(|_| new_tokens > 0)
                .map(|j| j / new_tokens as f64),
            before,
            samples,
        }
    }

    /// Plateau over first minute.
    pub fn retained(&self) -> Option<f64> {
        Some(self.plateau_tps? / self.first_minute_tps?)
    }
}

/// Power times time, by trapezoids between readings; `None` if one is missing.
fn gpu_joules(before: &Reading, samples: &[Trial]) -> Option<f64> {
    let power = |r: &Reading| r.gpu.as_ref()?.power_w;
    let mut joules = 0.0;
    let (mut time, mut last) = (Nanos(0), power(before)?);
    for sample in samples {
        let (now, ended) = (power(&sample.conditions.after)?, end(sample));
        joules += (last + now) / 2.0 * ended.since(time).as_secs_f64();
        (time, last) = (ended, now);
    }
    (!samples.is_empty()).then_some(joules)
}

/// Waits until the machine is as it was.
fn recover(
    baseline: &Reading,
    options: &SustainOptions,
    clock: &dyn Clock,
    sensors: &mut dyn Sensors,
) -> Recovery {
    let start = clock.now();
    clock.sleep(options.idle);
    loop {
        let now = sensors.read(&Processes::Own);
        let cool = baseline
            .temperature_c
            .zip(now.temperature_c)
            .map(|(then, now)| now <= then + RECOVERED_CELSIUS);
        let fast = baseline
            .clock_hz
            .zip(now.clock_hz)
            .map(|(then, now)| now >= (1.0 - STEADY_CLOCK) * then);
        let recovered = [cool, fast].into_iter().flatten().reduce(|a, b| a && b);
        let waited_ns = clock.now().since(start);
        if recovered != Some(false) || waited_ns >= options.cap {
            return Recovery {
                waited_ns,
                recovered,
            };
        }
        clock.sleep(LOOK);
    }
}

/// Runs each arm for minutes, one after the other, each on a rested machine: its
/// warm-ups, the rest, then trials without end. `progress` is told the arm and how
/// long it has run.
///
/// # Errors
/// When an arm is refused or fails, the machine has not recovered before it, or
/// others disturbed most of what it is summed up by.
pub fn sustain(
    arms: &mut [Box<dyn Arm + '_>],
    run: &RunOptions,
    options: &SustainOptions,
    clock: &dyn Clock,
    sensors: &mut dyn Sensors,
    progress: &mut dyn FnMut(&str, Nanos),
) -> Result<Vec<Sustained>, BenchError> {
    run.protocol.check(1)?;
    let infos: Vec<_> = arms.iter().map(|a| a.info()).collect();
    check_arms(&infos, &run.allowed)?;
    let vocab_size = crate::run::vocab_size(&infos, run)?;
    let baseline = sensors.read(&Processes::Own);
    let mut results = Vec::new();
    for (arm, info) in arms.iter_mut().zip(&infos) {
        let mut runner = Runner {
            options: run,
            vocab_size,
            clock,
            sensors: &mut *sensors,
            start: clock.now(),
        };
        runner.warm_up(arm.as_mut(), info)?;
        let recovery = recover(&baseline, options, clock, runner.sensors);
        if recovery.recovered == Some(false) && !run.allowed.contains(&Allowance::Clock) {
            return Err(BenchError::NotRecovered {
                arm: info.name.clone(),
                waited: recovery.waited_ns,
            });
        }
        let before = runner.sensors.read(&arm.processes());
        runner.start = clock.now();
        let mut last = (runner.start, before.clone());
        let mut samples: Vec<Trial> = Vec::new();
        loop {
            let elapsed = clock.now().since(runner.start);
            progress(&info.name, elapsed);
            if elapsed >= options.duration && !samples.is_empty() {
                break;
            }
            let mut trial = runner.trial(arm.as_mut(), info, samples.len(), Some(last))?;
            trial.flags = trial.conditions.flags(None, None);
            let disturbed = trial.flags.iter().any(|f| f.kind == Allowance::Busy);
            trial.counted = !disturbed || run.allowed.contains(&Allowance::Busy);
            last = (clock.now(), trial.conditions.after.clone());
            samples.push(trial);
        }
        check_quiet(&samples)?;
        results.push(Sustained::new(&info.name, recovery, before, samples));
    }
    Ok(results)
}
