//! Minutes of trials: what is left when a machine is warm.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Arm, BenchError, Measured, Nanos, RunOptions, check_arms, spread,
    system::{Clock, Processes, Reading, Sensors},
};

/// A machine has recovered when its hottest sensor is within this of where it
/// was before the first arm, degrees Celsius: the step of common sensors is 1.
const RECOVERED_CELSIUS: f64 = 2.0;
/// And its clock within this share.
const RECOVERED_CLOCK: f64 = 0.98;
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

/// A trial of a long run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// From the start of the arm to the start of the trial.
    pub started_ns: Nanos,
    /// From the start of the arm to its end.
    pub ended_ns: Nanos,
    /// What the arm reports.
    pub measured: Measured,
    /// The machine right after it.
    pub after: Reading,
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
    /// Every trial.
    pub samples: Vec<Sample>,
    /// New tokens of all trials.
    pub new_tokens: usize,
    /// Median decode tokens per second of the trials that began in the first minute.
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

impl Sustained {
    fn new(arm: &str, recovery: Recovery, before: Reading, samples: Vec<Sample>) -> Sustained {
        let new_tokens = samples.iter().map(|s| s.measured.new_tokens).sum();
        let end = samples.last().map_or(Nanos(0), |s| s.ended_ns);
        let median = |keep: &dyn Fn(&Sample) -> bool| {
            let kept = samples.iter().filter(|s| keep(s));
            let rates: Vec<f64> = kept.filter_map(|s| s.measured.decode_tps()).collect();
            spread(&rates).map(|s| s.median)
        };
        let long = end.0 >= 3 * MINUTE.0;
        let last_third = Nanos(end.0 / 3 * 2);
        let energy = |r: &Reading| r.cpu_energy_uj;
        let last = samples.last().and_then(|s| energy(&s.after));
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
            first_minute_tps: median(&|s| s.started_ns < MINUTE),
            plateau_tps: long
                .then(|| median(&|s| s.started_ns >= last_third))
                .flatten(),
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
fn gpu_joules(before: &Reading, samples: &[Sample]) -> Option<f64> {
    let power = |r: &Reading| r.gpu.as_ref()?.power_w;
    let mut joules = 0.0;
    let (mut time, mut last) = (Nanos(0), power(before)?);
    for sample in samples {
        let now = power(&sample.after)?;
        joules += (last + now) / 2.0 * sample.ended_ns.since(time).as_secs_f64();
        (time, last) = (sample.ended_ns, now);
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
            .map(|(then, now)| now >= RECOVERED_CLOCK * then);
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

/// Runs each arm for minutes, one after the other, each on a rested machine.
/// `progress` is told the arm and how long it has run.
///
/// # Errors
/// When an arm is refused or fails.
pub fn sustain(
    arms: &mut [Box<dyn Arm + '_>],
    run: &RunOptions,
    options: &SustainOptions,
    clock: &dyn Clock,
    sensors: &mut dyn Sensors,
    progress: &mut dyn FnMut(&str, Nanos),
) -> Result<Vec<Sustained>, BenchError> {
    let protocol = &run.protocol;
    protocol.check(1)?;
    let infos: Vec<_> = arms.iter().map(|a| a.info()).collect();
    check_arms(&infos, &run.allowed)?;
    let vocab_size = crate::run::vocab_size(&infos, run)?;
    let baseline = sensors.read(&Processes::Own);
    let mut results = Vec::new();
    for (arm, info) in arms.iter_mut().zip(&infos) {
        let recovery = recover(&baseline, options, clock, sensors);
        let before = sensors.read(&arm.processes());
        let start = clock.now();
        let mut samples = Vec::new();
        loop {
            let started_ns = clock.now().since(start);
            progress(&info.name, started_ns);
            if started_ns >= options.duration && !samples.is_empty() {
                break;
            }
            let trial = samples.len() as u64;
            let prompt = run.prompts.ids(protocol, trial, vocab_size);
            let measured = arm.trial(protocol, &prompt)?;
            crate::run::check_counts(&info.name, protocol, &measured)?;
            samples.push(Sample {
                started_ns,
                measured,
                ended_ns: clock.now().since(start),
                after: sensors.read(&arm.processes()),
            });
        }
        results.push(Sustained::new(&info.name, recovery, before, samples));
    }
    Ok(results)
}
