//! Rounds: every arm in turn, again and again.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Allowance, Arm, ArmInfo, ArmKind, BenchError, Conditions, Flag, Measured, Nanos, Prompts,
    Protocol, Roofline, Spread, paired_ratio, spread,
    stats::median,
    system::{Clock, Reading, Sensors},
};

/// Disturbed rounds are repeated, at most this many times the rounds asked for.
const MOST_ROUNDS: usize = 3;

/// How a protocol is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// What a trial does.
    pub protocol: Protocol,
    /// The prompts that the protocol names.
    pub prompts: Prompts,
    /// Undisturbed rounds.
    pub rounds: usize,
    /// What is accepted although it makes figures doubtful.
    pub allowed: BTreeSet<Allowance>,
    /// Ids that a prompt may have, where no arm tells.
    pub vocab_size: Option<usize>,
}

impl Default for RunOptions {
    fn default() -> Self {
        RunOptions {
            protocol: Protocol::default(),
            prompts: Prompts::synthetic(),
            rounds: 5,
            allowed: BTreeSet::new(),
            vocab_size: None,
        }
    }
}

/// One trial of an arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Trial {
    /// The round, from 0: trials of one round were run one after the other.
    pub round: usize,
    /// From the start of the run.
    pub started_ns: Nanos,
    /// What the arm reports.
    pub measured: Measured,
    /// The machine around it.
    pub conditions: Conditions,
    /// What makes its figures doubtful.
    pub flags: Vec<Flag>,
    /// Whether its round is in the summaries.
    pub counted: bool,
}

/// An arm with its trials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ArmResult {
    /// What it is.
    pub info: ArmInfo,
    /// Every trial in order, without the warm-ups.
    pub trials: Vec<Trial>,
    /// Prompt tokens per second.
    pub prompt_tps: Option<Spread>,
    /// Decode tokens per second, without the first token.
    pub decode_tps: Option<Spread>,
    /// Seconds to the first token.
    pub ttft_s: Option<Spread>,
    /// Seconds per decoded token.
    pub tpot_s: Option<Spread>,
    /// From the start of the command to an engine that could take its first
    /// token; `null` if nobody measured it.
    pub load_ns: Option<Nanos>,
    /// Opening the model and its first token, with and without the file in memory.
    pub load: Option<LoadTimes>,
    /// Largest resident size up to the last trial, bytes.
    pub peak_memory_bytes: Option<u64>,
    /// How close to the bounds of the machine it came.
    pub roofline: Option<Roofline>,
}

/// Opening a model up to its first token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadTimes {
    /// With the weights out of the page cache; `null` where they could not be put
    /// out of it, as the bytes that the system then read show.
    pub cold_ns: Option<Nanos>,
    /// With the weights in the page cache.
    pub warm_ns: Nanos,
}

impl ArmResult {
    /// Summarises the trials that count.
    pub fn new(info: ArmInfo, trials: Vec<Trial>) -> ArmResult {
        let mut result = ArmResult {
            info,
            prompt_tps: None,
            decode_tps: None,
            ttft_s: None,
            tpot_s: None,
            load_ns: trials.iter().find_map(|t| t.measured.load_ns),
            load: None,
            peak_memory_bytes: trials
                .iter()
                .filter_map(|t| t.measured.peak_memory_bytes)
                .max(),
            roofline: None,
            trials,
        };
        result.prompt_tps = spread(&result.values(Measured::prompt_tps));
        result.decode_tps = spread(&result.values(Measured::decode_tps));
        result.ttft_s = spread(&result.values(|m| Some(m.ttft_ns.as_secs_f64())));
        result.tpot_s = spread(&result.values(Measured::tpot_s));
        result
    }

    /// Leaves out the memory of a process that has not run this arm alone.
    pub fn forget_memory(&mut self) {
        self.peak_memory_bytes = None;
        for trial in &mut self.trials {
            trial.measured.peak_memory_bytes = None;
            trial.measured.steady_memory_bytes = None;
        }
    }

    /// A figure of every trial that counts.
    pub fn values(&self, figure: impl Fn(&Measured) -> Option<f64>) -> Vec<f64> {
        let counted = self.trials.iter().filter(|t| t.counted);
        counted.filter_map(|t| figure(&t.measured)).collect()
    }
}

/// One arm over another, pair by pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ratio {
    /// The arm above the line.
    pub arm: String,
    /// The arm below it.
    pub over: String,
    /// Of prompt tokens per second.
    pub prompt_tps: Option<Spread>,
    /// Of decode tokens per second.
    pub decode_tps: Option<Spread>,
}

/// Every arm but the first over the first.
pub fn ratios(arms: &[ArmResult]) -> Vec<Ratio> {
    let Some((first, others)) = arms.split_first() else {
        return Vec::new();
    };
    let of = |a: &ArmResult, f: fn(&Measured) -> Option<f64>| {
        paired_ratio(&a.values(f), &first.values(f))
    };
    let ratio = |arm: &ArmResult| Ratio {
        arm: arm.info.name.clone(),
        over: first.info.name.clone(),
        prompt_tps: of(arm, Measured::prompt_tps),
        decode_tps: of(arm, Measured::decode_tps),
    };
    others.iter().map(ratio).collect()
}

/// Refuses arms that cannot be told apart, debug builds and arms of unknown
/// fidelity.
///
/// # Errors
/// Naming the arm.
pub fn check_arms(arms: &[ArmInfo], allowed: &BTreeSet<Allowance>) -> Result<(), BenchError> {
    if arms.is_empty() {
        return Err(BenchError::Arms("there is no arm".into()));
    }
    let mut names = BTreeSet::new();
    for info in arms {
        if !names.insert(&info.name) {
            return Err(BenchError::Arms(format!(
                "two arms are called {}",
                info.name
            )));
        }
        if info.optimised == Some(false) {
            return Err(BenchError::DebugBuild {
                arm: info.name.clone(),
            });
        }
        if info.fidelity.verdict.is_none() && !allowed.contains(&Allowance::Ungated) {
            return Err(BenchError::Ungated {
                arm: info.name.clone(),
                problem: info.fidelity.basis.clone(),
            });
        }
    }
    Ok(())
}

/// Runs every arm in turn (A, B, A, B, …) until enough rounds were undisturbed.
/// `progress` is told the rounds that are done; warm-ups count as round 0.
///
/// # Errors
/// When an arm is refused or fails, does other work than the protocol says, or
/// the machine is not quiet for long enough.
pub fn run(
    arms: &mut [Box<dyn Arm + '_>],
    options: &RunOptions,
    clock: &dyn Clock,
    sensors: &mut dyn Sensors,
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<ArmResult>, BenchError> {
    let protocol = &options.protocol;
    protocol.check(options.rounds)?;
    let infos: Vec<ArmInfo> = arms.iter().map(|a| a.info()).collect();
    check_arms(&infos, &options.allowed)?;
    let vocab_size = vocab_size(&infos, options)?;
    let mut runner = Runner {
        options,
        vocab_size,
        clock,
        sensors,
        start: clock.now(),
    };
    for (arm, info) in arms.iter_mut().zip(&infos) {
        runner.warm_up(arm.as_mut(), info)?;
    }
    let mut trials: Vec<Vec<Trial>> = vec![Vec::new(); arms.len()];
    for round in 0..options.rounds.saturating_mul(MOST_ROUNDS) {
        progress(round);
        for ((arm, info), trials) in arms.iter_mut().zip(&infos).zip(&mut trials) {
            trials.push(runner.trial(arm.as_mut(), info, round, None)?);
        }
        if judge(&mut trials, &options.allowed) >= options.rounds {
            break;
        }
    }
    let quiet = judge(&mut trials, &options.allowed);
    if quiet < options.rounds {
        return Err(disturbed(&trials, quiet, options));
    }
    // Arms of one process have its memory together.
    let shared = infos.iter().filter(|i| i.kind == ArmKind::Carat).count() > 1;
    let result = |(info, trials)| {
        let mut result = ArmResult::new(info, trials);
        if shared && result.info.kind == ArmKind::Carat {
            result.forget_memory();
        }
        result
    };
    Ok(infos.into_iter().zip(trials).map(result).collect())
}

/// Refuses other work than the protocol's.
pub(crate) fn check_counts(
    arm: &str,
    protocol: &Protocol,
    measured: &Measured,
) -> Result<(), BenchError> {
    for (what, expected, found) in [
        (
            "prompt tokens",
            protocol.prompt_tokens,
            measured.prompt_tokens,
        ),
        ("new tokens", protocol.new_tokens, measured.new_tokens),
    ] {
        if expected != found {
            return Err(BenchError::TokenCount {
                arm: arm.to_owned(),
                what,
                expected,
                found,
            });
        }
    }
    Ok(())
}

/// Ids that every arm knows.
pub(crate) fn vocab_size(infos: &[ArmInfo], options: &RunOptions) -> Result<usize, BenchError> {
    if infos.iter().all(|i| i.kind == ArmKind::LlamaBench) {
        // It makes its own ids.
        return Ok(1);
    }
    let told = infos.iter().filter_map(|i| i.vocab_size);
    told.chain(options.vocab_size).min().ok_or_else(|| {
        BenchError::Arms(
            "no arm tells the size of its vocabulary: which ids may a prompt have?".into(),
        )
    })
}

/// Carries out trials.
pub(crate) struct Runner<'a> {
    pub(crate) options: &'a RunOptions,
    pub(crate) vocab_size: usize,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) sensors: &'a mut dyn Sensors,
    /// What trials are timed from.
    pub(crate) start: Nanos,
}

impl Runner<'_> {
    /// The trials of an arm before those that count.
    pub(crate) fn warm_up(&mut self, arm: &mut dyn Arm, info: &ArmInfo) -> Result<(), BenchError> {
        // No round has a number that high: a warm-up never has the prompt of a trial.
        let first = self.options.rounds.saturating_mul(MOST_ROUNDS);
        for warmup in 0..self.options.protocol.warmups {
            self.trial(arm, info, first + warmup, None)?;
        }
        Ok(())
    }

    /// A trial. Where trials follow each other without end, the reading after one
    /// is that before the next: `last`, with its time.
    pub(crate) fn trial(
        &mut self,
        arm: &mut dyn Arm,
        info: &ArmInfo,
        round: usize,
        last: Option<(Nanos, Reading)>,
    ) -> Result<Trial, BenchError> {
        let protocol = &self.options.protocol;
        let prompts = &self.options.prompts;
        let prompt = prompts.ids(protocol, round as u64, self.vocab_size);
        self.clock.sleep(protocol.pause_ns);
        let (started, before) = last.unwrap_or_else(|| {
            let reading = self.sensors.read(&arm.processes());
            (self.clock.now(), reading)
        });
        let measured = arm.trial(protocol, &prompt)?;
        let elapsed_ns = self.clock.now().since(started);
        let after = self.sensors.read(&arm.processes());
        check_counts(&info.name, protocol, &measured)?;
        Ok(Trial {
            round,
            started_ns: started.since(self.start),
            measured,
            conditions: Conditions {
                elapsed_ns,
                before,
                after,
            },
            flags: Vec::new(),
            counted: false,
        })
    }
}

/// Flags every trial against the median clock of the whole run and the fastest
/// arm's of its round, counts the rounds in which nothing but what is allowed
/// happened to any arm, and gives their number.
fn judge(arms: &mut [Vec<Trial>], allowed: &BTreeSet<Allowance>) -> usize {
    let clocks = arms.iter().flatten().flat_map(|t| t.conditions.clocks());
    let mut clocks: Vec<f64> = clocks.collect();
    let reference = (!clocks.is_empty()).then(|| median(&mut clocks));
    let quiet = |trial: &Trial| trial.flags.iter().all(|f| allowed.contains(&f.kind));
    let rounds = arms.iter().map(Vec::len).min().unwrap_or(0);
    let mut count = 0;
    for round in 0..rounds {
        let clocks = arms.iter().filter_map(|t| t[round].conditions.mean_clock());
        let fastest = clocks.reduce(f64::max);
        for trials in arms.iter_mut() {
            let trial = &mut trials[round];
            trial.flags = trial.conditions.flags(reference, fastest);
        }
        let counted = arms.iter().all(|trials| quiet(&trials[round]));
        count += usize::from(counted);
        for trials in arms.iter_mut() {
            trials[round].counted = counted;
        }
    }
    count
}

fn disturbed(arms: &[Vec<Trial>], quiet: usize, options: &RunOptions) -> BenchError {
    let flags = arms.iter().flatten().flat_map(|t| t.flags.iter());
    let last = flags.rev().find(|f| !options.allowed.contains(&f.kind));
    BenchError::Disturbed {
        quiet,
        rounds: arms.iter().map(Vec::len).min().unwrap_or(0),
        wanted: options.rounds,
        last: last.map_or_else(String::new, |f| f.detail.clone()),
        allowance: last.map_or(Allowance::Busy, |f| f.kind),
    }
}
