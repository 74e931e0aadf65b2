//! What the machine can do at most, measured in the same run.

use std::thread;

use carat_kernels::{Arithmetic, PeakLoop};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{ArmResult, BenchError, TokenCost, machine::read_bandwidth_of};

/// How often a bound that looks too low is measured again: others on the machine
/// slow a probe as they slow a trial.
const MORE_PROBES: usize = 8;

/// Arithmetic peak of one instruction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    /// Instruction set.
    pub isa: String,
    /// `f32` or `int8`.
    pub arithmetic: String,
    /// The instruction.
    pub instruction: String,
    /// Additions and multiplications per second of all threads.
    pub operations_per_second: f64,
}

/// What the machine can do at most with a number of threads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// Threads that were measured together.
    pub threads: usize,
    /// Bytes that were read again and again: as many as a token reads, at most
    /// 512 MiB.
    pub read_bytes: u64,
    /// Bytes per second.
    pub read_bandwidth: f64,
    /// One for each instruction set and arithmetic.
    pub peaks: Vec<Peak>,
}

/// How close to the bounds an arm came.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Roofline {
    /// The bounds.
    pub bounds: Bounds,
    /// Weight and KV-cache bytes that a decoded token reads.
    pub bytes_per_token: u64,
    /// That times the decode speed, bytes per second.
    pub effective_bandwidth: Option<f64>,
    /// Of the read bandwidth, percent.
    pub decode_percent: Option<f64>,
    /// Operations of matrix products per second while the prompt was read.
    pub effective_operations: Option<f64>,
    /// Of the highest peak, percent.
    pub prefill_percent: Option<f64>,
}

/// Peak of every loop that this machine has, with `threads` threads at once.
pub fn peaks(threads: usize) -> Vec<Peak> {
    let threads = threads.clamp(1, thread::available_parallelism().map_or(1, usize::from));
    let measure = |peak: &PeakLoop| Peak {
        isa: peak.isa.name().to_owned(),
        arithmetic: match peak.arithmetic {
            Arithmetic::F32 => "f32".to_owned(),
            Arithmetic::Int8 => "int8".to_owned(),
        },
        instruction: peak.instruction.to_owned(),
        operations_per_second: peak.rate(threads),
    };
    PeakLoop::available().iter().map(measure).collect()
}

impl Bounds {
    /// Measures the bounds for a model that reads `bytes` bytes per token.
    pub fn measure(bytes: u64, threads: usize) -> Bounds {
        Bounds {
            threads,
            read_bytes: bytes,
            read_bandwidth: read_bandwidth_of(bytes, threads),
            peaks: peaks(threads),
        }
    }

    /// Keeps the higher of each of two measurements.
    fn raise(&mut self, more: Bounds) {
        self.read_bandwidth = self.read_bandwidth.max(more.read_bandwidth);
        for (peak, more) in self.peaks.iter_mut().zip(more.peaks) {
            peak.operations_per_second = peak.operations_per_second.max(more.operations_per_second);
        }
    }

    /// The highest peak of any arithmetic.
    pub fn highest_peak(&self) -> Option<f64> {
        let peaks = self.peaks.iter().map(|p| p.operations_per_second);
        peaks.reduce(f64::max)
    }
}

impl Roofline {
    /// Sets the medians of an arm against bounds.
    pub fn new(arm: &ArmResult, cost: &TokenCost, bounds: Bounds) -> Roofline {
        let bytes = cost.weight_bytes.saturating_add(cost.kv_bytes);
        let rate = |spread: Option<crate::Spread>, cost: u64| {
            spread.map(|s| s.median * cost as f64).filter(|r| *r > 0.0)
        };
        let effective_bandwidth = rate(arm.decode_tps, bytes);
        let effective_operations = rate(arm.prompt_tps, cost.prompt_operations);
        let percent = |part: Option<f64>, whole: Option<f64>| {
            part.zip(whole).map(|(part, whole)| 100.0 * part / whole)
        };
        Roofline {
            bytes_per_token: bytes,
            effective_bandwidth,
            decode_percent: percent(effective_bandwidth, Some(bounds.read_bandwidth)),
            effective_operations,
            prefill_percent: percent(effective_operations, bounds.highest_peak()),
            bounds,
        }
    }

    /// A figure above its bound.
    fn implausible(&self, arm: &ArmResult) -> Option<BenchError> {
        let above = |what, needed: Option<f64>, measured: Option<f64>, scale: f64, unit| {
            let (needed, measured) = needed.zip(measured)?;
            (needed > measured).then(|| BenchError::Implausible {
                arm: arm.info.name.clone(),
                what,
                needed: needed / scale,
                measured: measured / scale,
                unit,
            })
        };
        let bandwidth = Some(self.bounds.read_bandwidth);
        above("decode", self.effective_bandwidth, bandwidth, 1e9, "GB/s").or_else(|| {
            let peak = self.bounds.highest_peak();
            above("prefill", self.effective_operations, peak, 1e9, "GOP/s")
        })
    }
}

/// Gives every arm whose cost is known its roofline; bounds of equal threads and
/// sizes are measured once.
///
/// # Errors
/// When a figure is above what the machine can do: then a count or a clock is
/// wrong, and there is no record.
pub fn bound(
    arms: &mut [ArmResult],
    measure: &mut dyn FnMut(u64, usize) -> Bounds,
) -> Result<(), BenchError> {
    let mut known: Vec<Bounds> = Vec::new();
    for arm in arms {
        let (Some(cost), Some(threads)) = (arm.info.cost, arm.info.threads) else {
            continue;
        };
        let bytes = cost.weight_bytes.saturating_add(cost.kv_bytes);
        let found = known
            .iter()
            .position(|b| (b.read_bytes, b.threads) == (bytes, threads));
        let at = found.unwrap_or_else(|| {
            known.push(measure(bytes, threads));
            known.len() - 1
        });
        let mut roofline = Roofline::new(arm, &cost, known[at].clone());
        for _ in 0..MORE_PROBES {
            if roofline.implausible(arm).is_none() {
                break;
            }
            let more = measure(bytes, threads);
            known[at].raise(more);
            roofline = Roofline::new(arm, &cost, known[at].clone());
        }
        if let Some(error) = roofline.implausible(arm) {
            return Err(error);
        }
        arm.roofline = Some(roofline);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ArmInfo, ArmKind, Measured, Nanos, Trial};

    fn arm(ttft: Nanos, decode: Nanos) -> ArmResult {
        let mut info = ArmInfo::new("a", ArmKind::Carat, "carat", "m");
        info.threads = Some(1);
        info.cost = Some(TokenCost {
            weight_bytes: 1_000_000_000,
            kv_bytes: 0,
            prompt_operations: 2_000_000_000,
        });
        let trial = Trial {
            round: 0,
            started_ns: Nanos(0),
            measured: Measured {
                prompt_tokens: 10,
                new_tokens: 11,
                ttft_ns: ttft,
                decode_ns: decode,
                ..Measured::default()
            },
            conditions: Default::default(),
            flags: vec![],
            counted: true,
        };
        ArmResult::new(info, vec![trial])
    }

    fn bounds(bytes: u64, threads: usize) -> Bounds {
        Bounds {
            threads,
            read_bytes: bytes,
            read_bandwidth: 1e12,
            peaks: vec![Peak {
                isa: "none".into(),
                arithmetic: "int8".into(),
                instruction: "none".into(),
                operations_per_second: 1e13,
            }],
        }
    }

    #[test]
    fn percent_of_the_roofline() {
        // 10 tokens a second of 1 GB each; 10 prompt tokens of 2 GOP in 0.1 s.
        let mut arms = [arm(Nanos::from_millis(100), Nanos::from_millis(1000))];
        bound(&mut arms, &mut bounds).unwrap();
        let roofline = arms[0].roofline.clone().unwrap();
        assert_eq!(roofline.effective_bandwidth, Some(1e10));
        assert_eq!(roofline.decode_percent, Some(1.0));
        assert_eq!(roofline.effective_operations, Some(2e11));
        assert_eq!(roofline.prefill_percent, Some(2.0));
    }

    #[test]
    fn a_figure_above_the_bound_is_an_error() {
        for (ttft, decode, says) in [
            (Nanos::from_millis(100), Nanos(10_000), "decode would need"),
            (Nanos(20), Nanos::from_millis(1000), "prefill would need"),
        ] {
            let mut arms = [arm(ttft, decode)];
            let error = bound(&mut arms, &mut bounds).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert!(arms[0].roofline.is_none());
        }
    }

    #[test]
    fn a_machine_has_peaks() {
        let peaks = peaks(1);
        assert_eq!(peaks.len(), PeakLoop::available().len());
        for peak in peaks {
            // Slower than any processor with such an instruction, emulated ones
            // included; and faster than any.
            let rate = peak.operations_per_second;
            assert!(rate > 1e6 && rate < 1e15, "{peak:?}");
        }
    }
}
