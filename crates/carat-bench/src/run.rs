//! One benchmark: prompt and decode speed of an engine.

use std::{ops::ControlFlow, time::Duration};

use carat_engine::{Engine, EngineError, GenerateOptions};
use serde::{Deserialize, Serialize};

use crate::{Machine, Spread, peak_memory_bytes, read_bandwidth, spread, synthetic_prompt};

/// What to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchOptions {
    /// Prompt tokens per trial.
    pub prompt_tokens: usize,
    /// New tokens per trial.
    pub new_tokens: usize,
    /// Trials after the warm-up.
    pub repetitions: usize,
    /// Seed of the first prompt; trial `i` uses `seed + i`.
    pub seed: u64,
    /// Pause before each trial.
    pub pause: Duration,
}

impl Default for BenchOptions {
    fn default() -> Self {
        BenchOptions {
            prompt_tokens: 512,
            new_tokens: 128,
            repetitions: 5,
            seed: 0,
            pause: Duration::from_millis(50),
        }
    }
}

/// One measured trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// Prompt tokens per second.
    pub prompt_tps: f64,
    /// Decode tokens per second, without the first token.
    pub decode_tps: f64,
    /// Nanoseconds to the first token.
    pub ttft_ns: u64,
}

/// A benchmark's result with what it was measured on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchRecord {
    /// Backend, instruction set and threads.
    pub backend: String,
    /// Prompt tokens per trial.
    pub prompt_tokens: usize,
    /// New tokens per trial.
    pub new_tokens: usize,
    /// Every trial, in order; the warm-up is not among them.
    pub trials: Vec<Trial>,
    /// Prompt tokens per second.
    pub prompt_tps: Option<Spread>,
    /// Decode tokens per second.
    pub decode_tps: Option<Spread>,
    /// Weight bytes that one decoded token reads.
    pub bytes_per_token: u64,
    /// `bytes_per_token` times the median decode speed, bytes per second.
    pub effective_bandwidth: f64,
    /// Read bandwidth measured after the trials with as many threads, bytes per second.
    pub read_bandwidth: f64,
    /// Nanoseconds from the start of the command to an engine that could take its
    /// first token: opening, checking and mapping, with packing or converting where
    /// there was no bundle. `None` where the caller did not measure it.
    #[serde(default)]
    pub load_ns: Option<u64>,
    /// Largest resident size of the process up to the last trial, bytes: the
    /// bandwidth probe is not in it.
    pub peak_memory_bytes: Option<u64>,
    /// The machine.
    pub machine: Machine,
    /// Whether this is an optimised build.
    pub optimised: bool,
}

/// Why there is no record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Nothing to measure.
    #[error("{what} is 0: there is nothing to measure")]
    Empty {
        /// The setting.
        what: &'static str,
    },
    /// More than anybody would wait for.
    #[error("{what} is {value}, expected at most {max}")]
    TooMany {
        /// The setting.
        what: &'static str,
        /// Its value.
        value: usize,
        /// Most there may be.
        max: usize,
    },
    /// A build whose speed means nothing.
    #[error("this is a debug build: its speed means nothing")]
    DebugBuild,
    /// A speed that the machine's memory cannot give.
    #[error(
        "decode would read {needed:.1} GB/s and the machine reads {measured:.1} GB/s: a count or a clock is wrong"
    )]
    Implausible {
        /// What the decode speed implies, GB/s.
        needed: f64,
        /// What was measured, GB/s.
        measured: f64,
    },
}

/// Most trials of one benchmark.
const MAX_REPETITIONS: usize = 100_000;

/// Weights below this many bytes may stay in a cache, where the bound of the
/// main memory does not apply.
const CACHED_BYTES: u64 = 512 << 20;

/// How often a bound that looks too low is measured again.
const MORE_PROBES: usize = 8;

/// Runs a benchmark on an engine. `bytes_per_token` is what one decode step
/// reads of the weights; `threads` is what the bandwidth is measured with.
pub fn run(
    engine: &mut Engine,
    bytes_per_token: u64,
    threads: usize,
    options: &BenchOptions,
    progress: &mut dyn FnMut(usize),
) -> Result<BenchRecord, BenchError> {
    for (what, value) in [
        ("prompt tokens", options.prompt_tokens),
        ("new tokens", options.new_tokens),
        ("repetitions", options.repetitions),
    ] {
        if value == 0 {
            return Err(BenchError::Empty { what });
        }
    }
    if options.repetitions > MAX_REPETITIONS {
        return Err(BenchError::TooMany {
            what: "repetitions",
            value: options.repetitions,
            max: MAX_REPETITIONS,
        });
    }
    if cfg!(debug_assertions) {
        return Err(BenchError::DebugBuild);
    }
    let machine = Machine::observe();
    let mut trials = Vec::with_capacity(options.repetitions);
    for trial in 0..=options.repetitions {
        progress(trial);
        std::thread::sleep(options.pause);
        let seed = options.seed.wrapping_add(trial as u64);
        let measured = one(engine, options, seed)?;
        if trial > 0 {
            trials.push(measured);
        }
    }
    // Before the probe, whose buffers would be most of it.
    let peak = peak_memory_bytes();
    let mut bandwidth = read_bandwidth(threads);
    let of = |f: fn(&Trial) -> f64| spread(&trials.iter().map(f).collect::<Vec<_>>());
    let (prompt_tps, decode_tps) = (of(|t| t.prompt_tps), of(|t| t.decode_tps));
    let effective = decode_tps.map_or(0.0, |s| s.median) * bytes_per_token as f64;
    let implausible = |bandwidth| effective > bandwidth && bytes_per_token > CACHED_BYTES;
    // Others on the machine slow a probe as they slow a trial: a bound that looks
    // too low is measured again before a result is called wrong.
    for _ in 0..MORE_PROBES {
        if implausible(bandwidth) {
            std::thread::sleep(options.pause);
            bandwidth = bandwidth.max(read_bandwidth(threads));
        }
    }
    if implausible(bandwidth) {
        return Err(BenchError::Implausible {
            needed: effective / 1e9,
            measured: bandwidth / 1e9,
        });
    }
    Ok(BenchRecord {
        backend: engine.backend().describe(),
        prompt_tokens: options.prompt_tokens,
        new_tokens: options.new_tokens,
        trials,
        prompt_tps,
        decode_tps,
        bytes_per_token,
        effective_bandwidth: effective,
        read_bandwidth: bandwidth,
        load_ns: None,
        peak_memory_bytes: peak,
        machine,
        optimised: true,
    })
}

fn one(engine: &mut Engine, options: &BenchOptions, seed: u64) -> Result<Trial, BenchError> {
    let prompt = synthetic_prompt(seed, options.prompt_tokens, engine.vocab_size());
    let mut sequence = engine.open(options.prompt_tokens.saturating_add(options.new_tokens))?;
    let request = GenerateOptions {
        max_new_tokens: options.new_tokens,
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let result = engine.generate(&mut sequence, &prompt, &request, &mut |_| {
        ControlFlow::Continue(())
    });
    engine.close(sequence);
    let generation = result?;
    Ok(Trial {
        prompt_tps: generation.prompt_tps(),
        decode_tps: generation.decode_tps(),
        ttft_ns: generation.timings.first_token.as_nanos() as u64,
    })
}
