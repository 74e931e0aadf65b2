//! Was the machine itself during a trial?

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Nanos, system::Reading};

/// A clock further than this from the run's median, or from another arm's in the
/// same round, is another clock. Each is the best of many short measurements,
/// whose own spread is below 1 %, but of one moment: processors of servers go up
/// and down by a step or two of 100 MHz (some 4 %) with what other guests of the
/// host do, at random, which is part of every interval. A throttled processor
/// loses far more; and a change of 5 % between arms would be taken for a
/// difference between them.
///
/// The fastest reading of a run is no measure: one lucky moment would condemn all
/// the others.
pub(crate) const STEADY_CLOCK: f64 = 0.05;

/// Processors that others may keep busy during a trial. A fifth of one slows an
/// arm that wants all of two processors down by up to a tenth, in the rounds that
/// it hits; system daemons on an idle machine stay well below.
const QUIET_CORES: f64 = 0.2;

/// Times of processors and processes come in ticks of 10 ms; both ends of both
/// may be off by one.
const TICK_ERROR: Nanos = Nanos::from_millis(40);

/// What a person may declare to be acceptable, by name.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Allowance {
    /// Other processes compute meanwhile.
    Busy,
    /// Clocks change, or the processor is throttled.
    Clock,
    /// Arms whose fidelity is unknown.
    Ungated,
    /// Records of different machines.
    Machine,
}

impl Allowance {
    /// Every one.
    pub const ALL: [Allowance; 4] = [
        Allowance::Busy,
        Allowance::Clock,
        Allowance::Ungated,
        Allowance::Machine,
    ];

    /// The name in commands and records.
    pub const fn name(self) -> &'static str {
        match self {
            Allowance::Busy => "busy",
            Allowance::Clock => "clock",
            Allowance::Ungated => "ungated",
            Allowance::Machine => "machine",
        }
    }
}

/// The machine around a trial.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Conditions {
    /// From the first reading to the second.
    pub elapsed_ns: Nanos,
    /// Right before the trial.
    pub before: Reading,
    /// Right after it.
    pub after: Reading,
}

/// Something that makes a trial's figures doubtful.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Flag {
    /// What kind of disturbance, by the name of what would allow it.
    pub kind: Allowance,
    /// What was seen.
    pub detail: String,
}

impl Conditions {
    /// Processors that other processes kept busy, where that can be told.
    pub fn others(&self) -> Option<f64> {
        let busy = self.after.busy_ns?.since(self.before.busy_ns?);
        let own = self.after.own_ns?.since(self.before.own_ns?);
        let elapsed = self.elapsed_ns.as_secs_f64();
        (elapsed > 0.0).then(|| busy.since(own).since(TICK_ERROR).as_secs_f64() / elapsed)
    }

    /// Mean power of the processors' packages, watts.
    pub fn cpu_watts(&self) -> Option<f64> {
        let (before, after) = (self.before.cpu_energy_uj?, self.after.cpu_energy_uj?);
        let seconds = self.elapsed_ns.as_secs_f64();
        (seconds > 0.0).then(|| after.saturating_sub(before) as f64 / 1e6 / seconds)
    }

    /// The clocks right before and right after the trial, as far as known, Hz.
    pub fn clocks(&self) -> impl Iterator<Item = f64> {
        let clocks = [self.before.clock_hz, self.after.clock_hz];
        clocks.into_iter().flatten()
    }

    /// Their mean, Hz.
    pub fn mean_clock(&self) -> Option<f64> {
        let count = self.clocks().count();
        (count > 0).then(|| self.clocks().sum::<f64>() / count as f64)
    }

    /// What speaks against the trial, given the median clock of the whole run and
    /// the fastest mean clock of its round.
    pub fn flags(&self, run_hz: Option<f64>, round_hz: Option<f64>) -> Vec<Flag> {
        let mut flags = Vec::new();
        let mut another_clock = |hz: f64, than: f64, place: &str| {
            let detail = format!("clock {:.2} GHz, {:.2} GHz {place}", hz / 1e9, than / 1e9);
            flags.push(Flag {
                kind: Allowance::Clock,
                detail,
            });
        };
        let off = |hz: f64, than: f64| (hz / than - 1.0).abs();
        let furthest = run_hz.and_then(|run| {
            let clocks = self.clocks().filter(|hz| off(*hz, run) > STEADY_CLOCK);
            let furthest = clocks.max_by(|a, b| off(*a, run).total_cmp(&off(*b, run)))?;
            Some((furthest, run))
        });
        if let Some((hz, run)) = furthest {
            another_clock(hz, run, "in most of the run");
        } else if let (Some(hz), Some(round)) = (self.mean_clock(), round_hz)
            && hz < (1.0 - STEADY_CLOCK) * round
        {
            another_clock(hz, round, "in another arm of the round");
        }
        if let (Some(before), Some(after)) =
            (self.before.throttle_events, self.after.throttle_events)
            && after > before
        {
            flags.push(Flag {
                kind: Allowance::Clock,
                detail: format!("throttled for heat {} times", after - before),
            });
        }
        if let Some(others) = self.others().filter(|cores| *cores > QUIET_CORES) {
            flags.push(Flag {
                kind: Allowance::Busy,
                detail: format!("other processes kept {others:.1} processors busy"),
            });
        }
        flags
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(clock_after: f64, busy_ms: u64, own_ms: u64) -> Conditions {
        let reading = |clock, busy, own| Reading {
            clock_hz: Some(clock),
            busy_ns: Some(Nanos::from_millis(busy)),
            own_ns: Some(Nanos::from_millis(own)),
            throttle_events: Some(5),
            ..Reading::default()
        };
        Conditions {
            elapsed_ns: Nanos::from_millis(1000),
            before: reading(3e9, 100, 100),
            after: reading(clock_after, 100 + busy_ms, 100 + own_ms),
        }
    }

    #[test]
    fn a_throttled_trial_is_flagged() {
        let steady = conditions(2.95e9, 1000, 1000);
        assert_eq!(steady.flags(Some(3e9), Some(3e9)), []);
        let slow = conditions(2.7e9, 1000, 1000).flags(Some(3e9), None);
        assert_eq!(slow.len(), 1);
        assert_eq!(slow[0].kind, Allowance::Clock);
        assert!(slow[0].detail.contains("2.70 GHz"), "{slow:?}");
        // Steady in itself, and slower than the rest of the run.
        let mut all_slow = conditions(2.7e9, 1000, 1000);
        all_slow.before.clock_hz = Some(2.7e9);
        assert_eq!(all_slow.flags(Some(2.7e9), None), []);
        assert_eq!(all_slow.flags(Some(3e9), None).len(), 1);
        // Faster than most is no better.
        let fast = conditions(3.3e9, 1000, 1000).flags(Some(3e9), None);
        assert!(fast[0].detail.contains("3.30 GHz"), "{fast:?}");
        // Within bounds of the run, and not of the arm beside it.
        let beside = all_slow.flags(Some(2.8e9), Some(2.9e9));
        assert!(beside[0].detail.contains("another arm"), "{beside:?}");
        let mut hot = conditions(3e9, 1000, 1000);
        hot.after.throttle_events = Some(7);
        assert!(hot.flags(Some(3e9), None)[0].detail.contains("2 times"));
    }

    #[test]
    fn another_heavy_process_is_flagged_and_unknown_ones_are_not_guessed() {
        assert_eq!(conditions(3e9, 1200, 1000).others(), Some(0.16));
        assert_eq!(conditions(3e9, 1200, 1000).flags(None, None), []);
        let busy = conditions(3e9, 2000, 1000).flags(None, None);
        assert_eq!(busy[0].kind, Allowance::Busy);
        assert!(busy[0].detail.contains("1.0 processors"), "{busy:?}");
        let mut unknown = conditions(3e9, 2000, 1000);
        unknown.after.own_ns = None;
        assert_eq!(
            (unknown.others(), unknown.flags(None, None).len()),
            (None, 0)
        );
    }
}
