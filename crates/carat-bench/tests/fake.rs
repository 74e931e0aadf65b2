//! Runs of arms with injected times on a machine with injected readings.

use std::{cell::Cell, collections::BTreeSet, rc::Rc};

use carat_bench::{
    Allowance, Arm, ArmInfo, ArmKind, BenchError, Fidelity, Measured, Nanos, Protocol, RunOptions,
    SustainOptions, TrialPrompt, run, sustain,
    system::{Clock, Processes, Reading, Sensors},
};

/// A clock that only its owner moves.
#[derive(Clone, Default)]
struct FakeClock(Rc<Cell<u64>>);

impl FakeClock {
    fn pass(&self, time: Nanos) {
        self.0.set(self.0.get() + time.0);
    }
}

impl Clock for FakeClock {
    fn now(&self) -> Nanos {
        Nanos(self.0.get())
    }

    fn sleep(&self, time: Nanos) {
        self.pass(time);
    }
}

/// Readings that follow from the time.
struct FakeSensors<'a> {
    clock: FakeClock,
    read: Box<dyn Fn(Nanos) -> Reading + 'a>,
}

impl Sensors for FakeSensors<'_> {
    fn read(&mut self, _: &Processes) -> Reading {
        (self.read)(self.clock.now())
    }
}

/// An arm whose trials take given times.
struct FakeArm {
    info: ArmInfo,
    clock: FakeClock,
    ttft: Nanos,
    decode: Nanos,
    /// New tokens beyond what was asked for.
    more: usize,
    log: Log,
}

impl Arm for FakeArm {
    fn info(&self) -> ArmInfo {
        self.info.clone()
    }

    fn trial(&mut self, protocol: &Protocol, prompt: &TrialPrompt) -> Result<Measured, BenchError> {
        let entry = (self.info.name.clone(), prompt.prompt.clone());
        self.log.borrow_mut().push(entry);
        self.clock.pass(self.ttft);
        self.clock.pass(self.decode);
        Ok(Measured {
            prompt_tokens: prompt.prompt.len(),
            new_tokens: protocol.new_tokens + self.more,
            ttft_ns: self.ttft,
            decode_ns: self.decode,
            ..Measured::default()
        })
    }
}

/// Which arm had which prompt, in order.
type Log = Rc<std::cell::RefCell<Vec<(String, Vec<u32>)>>>;

fn arm(name: &str, clock: &FakeClock, log: &Log, ttft: Nanos, decode: Nanos) -> FakeArm {
    let mut info = ArmInfo::new(name, ArmKind::Command, "fake", "model");
    info.vocab_size = Some(100);
    info.optimised = Some(true);
    info.fidelity = Fidelity {
        verdict: Some("PASS".into()),
        basis: "said so".into(),
    };
    FakeArm {
        info,
        clock: clock.clone(),
        ttft,
        decode,
        more: 0,
        log: Rc::clone(log),
    }
}

const SPAN: Nanos = Nanos(3_600_000_000);

fn options(rounds: usize) -> RunOptions {
    RunOptions {
        protocol: Protocol {
            prompt_tokens: 36,
            new_tokens: 37,
            ..Protocol::default()
        },
        rounds,
        ..RunOptions::default()
    }
}

fn steady(_: Nanos) -> Reading {
    Reading {
        clock_hz: Some(3e9),
        ..Reading::default()
    }
}

/// Two arms, of which the second takes 3.6 s for either part, the first twice that.
fn two(clock: &FakeClock, log: &Log) -> Vec<Box<dyn Arm>> {
    let slow = Nanos(2 * SPAN.0);
    vec![
        Box::new(arm("a", clock, log, slow, slow)),
        Box::new(arm("b", clock, log, SPAN, SPAN)),
    ]
}

#[test]
fn arms_take_turns_and_report_the_injected_span() {
    let (clock, log) = (FakeClock::default(), Log::default());
    let mut sensors = FakeSensors {
        clock: clock.clone(),
        read: Box::new(steady),
    };
    let mut arms = two(&clock, &log);
    let results = run(&mut arms, &options(5), &clock, &mut sensors, &mut |_| {}).unwrap();
    let b = &results[1];
    assert_eq!(b.trials[0].measured.ttft_ns, SPAN);
    assert_eq!(b.ttft_s.unwrap().median, 3.6);
    assert_eq!(b.prompt_tps.unwrap().median, 10.0);
    assert_eq!(b.decode_tps.unwrap().median, 10.0);
    assert_eq!(b.tpot_s.unwrap().median, 0.1);
    // The runner's own clock agrees, pauses left out.
    assert_eq!(b.trials[0].conditions.elapsed_ns, Nanos(2 * SPAN.0));
    let ratio = &carat_bench::ratios(&results)[0];
    assert_eq!((ratio.arm.as_str(), ratio.over.as_str()), ("b", "a"));
    assert_eq!(ratio.decode_tps.unwrap().median, 2.0);
    // One warm-up of each, then A, B, A, B, … with the same prompt in a round and
    // another in every other.
    let log = log.borrow();
    let names: Vec<&str> = log.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names.concat(), "ab".repeat(6));
    let prompts: BTreeSet<_> = log.chunks(2).map(|pair| &pair[0].1).collect();
    assert_eq!(prompts.len(), 6);
    assert!(log.chunks(2).skip(1).all(|pair| pair[0].1 == pair[1].1));
    assert_eq!(log[2].1, carat_bench::synthetic_prompt(0, 36, 100));
}

#[test]
fn a_throttled_round_is_flagged_and_repeated() {
    let (clock, log) = (FakeClock::default(), Log::default());
    // Slow between the 40th and the 60th second: in the middle of the run.
    let mut sensors = FakeSensors {
        clock: clock.clone(),
        read: Box::new(|now| Reading {
            clock_hz: Some(if (40.0..60.0).contains(&now.as_secs_f64()) {
                2e9
            } else {
                3e9
            }),
            ..Reading::default()
        }),
    };
    let mut arms = two(&clock, &log);
    let results = run(&mut arms, &options(5), &clock, &mut sensors, &mut |_| {}).unwrap();
    for arm in &results {
        let counted: Vec<bool> = arm.trials.iter().map(|t| t.counted).collect();
        assert!(counted.len() > 5 && counted.contains(&false), "{counted:?}");
        assert_eq!(counted.iter().filter(|c| **c).count(), 5);
        assert_eq!(arm.values(Measured::decode_tps).len(), 5);
    }
    let flagged = results.iter().flat_map(|a| &a.trials);
    let flags: Vec<_> = flagged.flat_map(|t| &t.flags).collect();
    assert!(flags.iter().all(|f| f.kind == Allowance::Clock));
    assert!(flags[0].detail.contains("2.00 GHz"), "{flags:?}");
}

#[test]
fn a_machine_that_is_never_quiet_is_refused_unless_that_is_allowed() {
    // Somebody else computes as long as the arms do.
    let busy = |now: Nanos| Reading {
        busy_ns: Some(Nanos(2 * now.0)),
        own_ns: Some(now),
        ..Reading::default()
    };
    let go = |allowed: &[Allowance]| {
        let (clock, log) = (FakeClock::default(), Log::default());
        let mut sensors = FakeSensors {
            clock: clock.clone(),
            read: Box::new(busy),
        };
        let mut options = options(2);
        options.allowed = allowed.iter().copied().collect();
        run(
            &mut two(&clock, &log),
            &options,
            &clock,
            &mut sensors,
            &mut |_| {},
        )
    };
    let error = go(&[Allowance::Clock]).unwrap_err();
    assert!(matches!(
        error,
        BenchError::Disturbed {
            allowance: Allowance::Busy,
            ..
        }
    ));
    assert!(error.to_string().contains("0 of 6 rounds"), "{error}");
    let results = go(&[Allowance::Busy]).unwrap();
    assert_eq!(results[0].trials.len(), 2);
    assert!(results[0].trials[0].counted && !results[0].trials[0].flags.is_empty());
}

#[test]
fn arms_that_would_flatter_are_refused() {
    let refused = |spoil: &dyn Fn(&mut FakeArm)| {
        let (clock, log) = (FakeClock::default(), Log::default());
        let mut sensors = FakeSensors {
            clock: clock.clone(),
            read: Box::new(steady),
        };
        let mut b = arm("b", &clock, &log, SPAN, SPAN);
        spoil(&mut b);
        let a = arm("a", &clock, &log, SPAN, SPAN);
        let mut arms: Vec<Box<dyn Arm>> = vec![Box::new(a), Box::new(b)];
        run(&mut arms, &options(1), &clock, &mut sensors, &mut |_| {})
            .unwrap_err()
            .to_string()
    };
    let says = |spoil: &dyn Fn(&mut FakeArm), text: &str| {
        let error = refused(spoil);
        assert!(error.contains(text), "{error}");
    };
    says(&|b| b.more = 1, "arm b: 38 new tokens, expected 37");
    says(
        &|b| b.info.optimised = Some(false),
        "arm b: this is a debug build",
    );
    says(
        &|b| b.info.fidelity = Fidelity::unknown("no gates"),
        "fidelity is unknown",
    );
    says(&|b| b.info.name = "a".into(), "two arms are called a");
}

#[test]
fn a_long_run_has_a_plateau_its_energy_and_a_rest_before_it() {
    let (clock, log) = (FakeClock::default(), Log::default());
    // Hot after the first arm, cooling by a degree in ten seconds of its own time;
    // 50 W all the time.
    let mut sensors = FakeSensors {
        clock: clock.clone(),
        read: Box::new(|now| {
            let seconds = now.as_secs_f64();
            Reading {
                temperature_c: Some(if seconds < 500.0 {
                    40.0
                } else {
                    (40.0 + (800.0 - seconds) / 10.0).max(40.0)
                }),
                cpu_energy_uj: Some((seconds * 50e6) as u64),
                ..Reading::default()
            }
        }),
    };
    let long = SustainOptions {
        duration: Nanos::from_millis(600_000),
        idle: Nanos::from_millis(10_000),
        cap: Nanos::from_millis(400_000),
    };
    let mut arms = two(&clock, &log);
    let runs = sustain(
        &mut arms,
        &options(1),
        &long,
        &clock,
        &mut sensors,
        &mut |_, _| {},
    )
    .unwrap();
    assert_eq!(runs.len(), 2);
    assert_eq!(runs[0].recovery.waited_ns, long.idle);
    assert_eq!(runs[0].recovery.recovered, Some(true));
    // The second waits until the sensor is within 2 degrees of 40.
    let waited = runs[1].recovery.waited_ns.as_secs_f64();
    assert!(
        waited > 10.0 && runs[1].recovery.recovered == Some(true),
        "{waited}"
    );
    for run in &runs {
        let last = run.samples.last().unwrap();
        let ended = Nanos(last.started_ns.0 + last.conditions.elapsed_ns.0);
        assert!(ended >= long.duration);
        assert_eq!(run.retained(), Some(1.0));
        let seconds = ended.as_secs_f64();
        let joules = run.cpu_joules.unwrap();
        assert!((joules - 50.0 * seconds).abs() < 0.01, "{joules}");
        let tokens = run.new_tokens as f64;
        assert_eq!(run.joules_per_token, Some(joules / tokens));
        assert_eq!(run.gpu_joules, None);
    }
    // 37 new tokens in 7.2 s and a pause at 50 W.
    let per_token = runs[1].joules_per_token.unwrap();
    assert!((per_token - 7.25 * 50.0 / 37.0).abs() < 1e-3, "{per_token}");
    // Before each arm its warm-up, with a prompt that no trial has.
    let log = log.borrow();
    for (run, name) in runs.iter().zip(["a", "b"]) {
        let own: Vec<_> = log.iter().filter(|(n, _)| n == name).collect();
        assert_eq!(own.len(), 1 + run.samples.len());
        assert_eq!(own[1].1, carat_bench::synthetic_prompt(0, 36, 100));
        assert_ne!(own[0].1, own[1].1);
    }
}

/// Others compute during the first arm's last third, and not otherwise.
#[test]
fn a_long_run_leaves_disturbed_trials_out_or_is_refused() {
    let go = |from: f64, allowed: &[Allowance]| {
        let (clock, log) = (FakeClock::default(), Log::default());
        let mut sensors = FakeSensors {
            clock: clock.clone(),
            read: Box::new(move |now| {
                let busy = (now.as_secs_f64() - from).max(0.0);
                Reading {
                    busy_ns: Some(Nanos(now.0 + Nanos::from_secs_f64(busy).0)),
                    own_ns: Some(now),
                    ..Reading::default()
                }
            }),
        };
        let long = SustainOptions {
            duration: Nanos::from_millis(600_000),
            idle: Nanos(0),
            cap: Nanos(0),
        };
        let mut options = options(1);
        options.allowed = allowed.iter().copied().collect();
        let mut arms = two(&clock, &log);
        let arm = &mut arms[..1];
        sustain(arm, &options, &long, &clock, &mut sensors, &mut |_, _| {})
    };
    // The last 60 of 600 seconds: less than half of the plateau.
    let run = go(560.0, &[]).unwrap().remove(0);
    let (counted, dropped): (Vec<_>, Vec<_>) = run.samples.iter().partition(|t| t.counted);
    assert!(!dropped.is_empty() && dropped.iter().all(|t| !t.flags.is_empty()));
    assert!(counted.len() > 3 * dropped.len());
    assert_eq!(run.plateau_tps, Some(5.0));
    // Most of it.
    let error = go(420.0, &[]).unwrap_err();
    assert!(
        matches!(
            error,
            BenchError::Disturbed {
                allowance: Allowance::Busy,
                ..
            }
        ),
        "{error}"
    );
    let run = go(420.0, &[Allowance::Busy]).unwrap().remove(0);
    assert!(run.samples.iter().all(|t| t.counted));
    assert!(!run.samples.last().unwrap().flags.is_empty());
}

#[test]
fn a_machine_that_stays_hot_is_not_called_recovered() {
    let (clock, log) = (FakeClock::default(), Log::default());
    let mut sensors = FakeSensors {
        clock: clock.clone(),
        read: Box::new(|now| Reading {
            temperature_c: Some(40.0 + now.as_secs_f64()),
            ..Reading::default()
        }),
    };
    let long = SustainOptions {
        duration: Nanos(1),
        idle: Nanos::from_millis(5_000),
        cap: Nanos::from_millis(30_000),
    };
    let mut arms = two(&clock, &log);
    let mut go = |options: &RunOptions| {
        let progress = &mut |_: &str, _| {};
        sustain(&mut arms, options, &long, &clock, &mut sensors, progress)
    };
    let error = go(&options(1)).unwrap_err();
    assert!(
        matches!(&error, BenchError::NotRecovered { arm, .. } if arm == "a"),
        "{error}"
    );
    let mut hot = options(1);
    hot.allowed.insert(Allowance::Clock);
    let runs = go(&hot).unwrap();
    assert_eq!(runs[0].recovery.recovered, Some(false));
    assert_eq!(runs[0].recovery.waited_ns, long.cap);
    // Too short for a plateau, and without a sensor for energy.
    assert_eq!(
        (runs[0].plateau_tps, runs[0].joules_per_token),
        (None, None)
    );
    assert_eq!(runs[0].first_minute_tps, Some(5.0));
}
