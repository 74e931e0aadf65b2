//! Where the time goes, op by op, and which kernel on which device runs each.

use std::{collections::BTreeMap, ops::ControlFlow};

use carat_engine::Engine;
use carat_kernels::Isa;
use carat_model::{Op, OpSpan, Plan};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{BenchError, Nanos, Protocol, TrialPrompt};

/// Ops of one kind on one kernel, in one phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileRow {
    /// `prefill` or `decode`.
    pub phase: String,
    /// The op.
    pub op: String,
    /// What it works on; layers are shown as `*`.
    pub on: String,
    /// Device and instruction set.
    pub device: String,
    /// Kernels of its products.
    pub kernel: String,
    /// Whether a kernel is of a lesser instruction set than the device's is meant
    /// to run, see [`Isa::falls_back_to`].
    pub fallback: bool,
    /// How often it ran.
    pub calls: usize,
    /// Time of all calls.
    pub time_ns: Nanos,
    /// Of the phase's time, percent.
    pub percent: f64,
}

/// Ops of a trial.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// By falling time, the prefill first.
    pub rows: Vec<ProfileRow>,
    spans: Vec<(&'static str, OpSpan)>,
    ops: Vec<Vec<Described>>,
}

/// An op as it is shown, for one number of rows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Described {
    op: &'static str,
    on: String,
    device: String,
    kernel: String,
}

impl Profile {
    /// Runs a trial and notes every op.
    ///
    /// # Errors
    /// When the engine fails or its backend cannot note ops.
    pub fn measure(
        engine: &mut Engine,
        protocol: &Protocol,
        prompt: &TrialPrompt,
    ) -> Result<Profile, BenchError> {
        let mut sequence = engine.open(protocol.tokens())?;
        let mut run = || -> Result<Vec<(&'static str, OpSpan)>, BenchError> {
            let schedule = engine.schedule();
            let ids = prompt.all();
            if !prompt.fill.is_empty() {
                engine.prefill(&mut sequence, &prompt.fill, &schedule)?;
            }
            engine.set_profiling(true);
            engine.prefill(&mut sequence, &prompt.prompt, &schedule)?;
            let mut spans: Vec<_> = tagged("prefill", engine.take_spans());
            // The last prompt token runs again, as a step of one row like the rest.
            let options = protocol.generate_options();
            engine.generate(&mut sequence, &ids, &options, &mut |_| {
                ControlFlow::Continue(())
            })?;
            spans.extend(tagged("decode", engine.take_spans()));
            Ok(spans)
        };
        let spans = run();
        engine.set_profiling(false);
        engine.close(sequence);
        let spans = spans?;
        if spans.is_empty() {
            return Err(BenchError::Arms("the backend does not note its ops".into()));
        }
        Ok(Profile::new(engine, spans))
    }

    fn new(engine: &Engine, spans: Vec<(&'static str, OpSpan)>) -> Profile {
        let backend = engine.backend();
        let plan = backend.plan();
        let most = spans.iter().map(|(_, s)| s.rows).max().unwrap_or(0);
        let mut ops: Vec<Vec<Described>> = vec![Vec::new(); most + 1];
        let mut sums: BTreeMap<(&str, &Described), (usize, Nanos)> = BTreeMap::new();
        let mut totals: BTreeMap<&str, u64> = BTreeMap::new();
        for (_, span) in &spans {
            if ops[span.rows].is_empty() {
                ops[span.rows] = describe(plan, &backend.placement(span.rows));
            }
        }
        for (phase, span) in &spans {
            let sum = sums.entry((phase, &ops[span.rows][span.op])).or_default();
            let time = Nanos::from(span.time).0;
            sum.0 += 1;
            sum.1.0 += time;
            *totals.entry(phase).or_default() += time;
        }
        let mut rows: Vec<ProfileRow> = sums
            .into_iter()
            .map(|((phase, described), (calls, time_ns))| ProfileRow {
                phase: phase.to_owned(),
                op: described.op.to_owned(),
                on: described.on.clone(),
                fallback: described.falls_back(),
                device: described.device.clone(),
                kernel: described.kernel.clone(),
                calls,
                time_ns,
                percent: 100.0 * time_ns.0 as f64 / totals[phase].max(1) as f64,
            })
            .collect();
        // `prefill` comes after `decode` in the alphabet.
        rows.sort_by(|a, b| b.phase.cmp(&a.phase).then(b.time_ns.cmp(&a.time_ns)));
        Profile { rows, spans, ops }
    }

    /// The trace that Chrome (`about:tracing`) and Perfetto show.
    pub fn chrome_trace(&self) -> Value {
        let events: Vec<Value> = self
            .spans
            .iter()
            .map(|(phase, span)| {
                let described = &self.ops[span.rows][span.op];
                json!({
                    "name": format!("{} {}", described.op, described.on).trim_end(),
                    "cat": phase,
                    "ph": "X",
                    // Microseconds, as the format has them.
                    "ts": span.start.as_nanos() as f64 / 1e3,
                    "dur": span.time.as_nanos() as f64 / 1e3,
                    "pid": 1,
                    "tid": 1,
                    "args": {
                        "device": described.device,
                        "kernel": described.kernel,
                        "rows": span.rows,
                    },
                })
            })
            .collect();
        json!({ "traceEvents": events, "displayTimeUnit": "ms" })
    }
}

impl Described {
    /// A device is `cpu ISA`, a kernel begins with its own instruction set.
    fn falls_back(&self) -> bool {
        let named = |text: &str| Isa::ALL.into_iter().find(|isa| isa.name() == text);
        let Some(isa) = self.device.split_once(' ').and_then(|(_, isa)| named(isa)) else {
            return false;
        };
        let kernels = self.kernel.split(", ");
        let mut serving = kernels.filter_map(|kernel| named(kernel.split(' ').next()?));
        serving.any(|served| isa.falls_back_to(served))
    }
}

fn tagged(phase: &'static str, spans: Vec<OpSpan>) -> Vec<(&'static str, OpSpan)> {
    spans.into_iter().map(|span| (phase, span)).collect()
}

/// Every op of the plan with what `placement` says of it.
fn describe(plan: &Plan, placement: &[String]) -> Vec<Described> {
    let weight = |id: carat_model::WeightId| without_layer(&plan.weights[id.0]);
    plan.ops
        .iter()
        .zip(placement)
        .map(|(op, place)| {
            let on = match op {
                Op::Embed { table, .. } => weight(*table),
                Op::RmsNorm { weight: gain, .. } => weight(*gain),
                Op::Linear { projections, .. } => {
                    let names: Vec<_> = projections.iter().map(|p| weight(p.weight)).collect();
                    names.join(" + ")
                }
                _ => String::new(),
            };
            let (device, kernels) = place.split_once(": ").unwrap_or((place, ""));
            // Projections of one input mostly share a kernel.
            let mut kernels: Vec<&str> = kernels.split(", ").collect();
            kernels.dedup();
            Described {
                op: op.name(),
                on,
                device: device.to_owned(),
                kernel: kernels.join(", "),
            }
        })
        .collect()
}

/// `layers.3.attn.q.weight` as `layers.*.attn.q`.
fn without_layer(name: &str) -> String {
    let name = name.strip_suffix(".weight").unwrap_or(name);
    let parts = name.split('.').map(|part| match part.parse::<usize>() {
        Ok(_) => "*",
        Err(_) => part,
    });
    parts.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lesser_kernel_is_a_fallback_and_a_borrowed_one_is_not() {
        for (device, kernel, falls_back) in [
            ("cpu avx512vnni", "avx512vnni Q8_0 x int8/32 fused", false),
            (
                "cpu amx",
                "amx TQ2_0 x int8/256 tiled, avx512vnni f32",
                false,
            ),
            ("cpu avxvnni", "avx2 f32", false),
            ("cpu avx512vnni", "avx2 TQ1_0 x int8/256 fused", true),
            ("cpu amx", "amx TQ2_0 x int8/256 tiled, avx2 TQ1_0", true),
            ("cpu neondot", "scalar f32 x f16", true),
            ("cpu scalar", "scalar f32", false),
            // Nothing is said, and nothing guessed.
            ("cpu avx2", "", false),
            ("elsewhere", "scalar f32", false),
        ] {
            let described = Described {
                op: "linear",
                on: String::new(),
                device: device.to_owned(),
                kernel: kernel.to_owned(),
            };
            assert_eq!(described.falls_back(), falls_back, "{device}: {kernel}");
        }
    }
}
