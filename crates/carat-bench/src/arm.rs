//! One side of a comparison.

use carat_bundle::spec::ModelSpec;
use carat_model::{Extent, Op, Plan, StateDecl};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{BenchError, Fidelity, Nanos, Protocol, TrialPrompt, system::Processes};

/// What runs the model of an arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ArmKind {
    /// carat in this process.
    Carat,
    /// carat in a fresh process for every trial.
    CaratProcess,
    /// `llama-bench` in a fresh process for every trial.
    LlamaBench,
    /// A `llama-server`, timed by itself.
    LlamaServer,
    /// A server with the completions of the OpenAI API, timed from outside.
    Openai,
    /// Any command whose output has a declared form.
    Command,
}

/// What an arm is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ArmInfo {
    /// Its name in this run.
    pub name: String,
    /// What runs the model.
    pub kind: ArmKind,
    /// Program and version or commit, as far as known.
    pub program: String,
    /// BLAKE3 of the program's file.
    pub program_digest: Option<String>,
    /// Base name of the model.
    pub model: String,
    /// BLAKE3 of the bundle's manifest or of the model's file.
    pub model_digest: Option<String>,
    /// Bytes of the model's weights.
    pub model_bytes: Option<u64>,
    /// Bits of storage per weight.
    pub bits_per_weight: Option<f64>,
    /// Formats of the matrices, in words.
    pub formats: Option<String>,
    /// Backend, instruction set and threads, in words.
    pub backend: Option<String>,
    /// Threads.
    pub threads: Option<usize>,
    /// Tokens per prefill step.
    pub chunk: Option<usize>,
    /// Whether the build is optimised; `null` if nobody knows.
    pub optimised: Option<bool>,
    /// Ids that a prompt may have.
    pub vocab_size: Option<usize>,
    /// What one token costs.
    pub cost: Option<TokenCost>,
    /// Whether it answers like its checkpoint.
    pub fidelity: Fidelity,
}

impl ArmInfo {
    /// An arm of which nothing else is known yet.
    pub fn new(name: &str, kind: ArmKind, program: &str, model: &str) -> ArmInfo {
        ArmInfo {
            name: name.to_owned(),
            kind,
            program: program.to_owned(),
            program_digest: None,
            model: model.to_owned(),
            model_digest: None,
            model_bytes: None,
            bits_per_weight: None,
            formats: None,
            backend: None,
            threads: None,
            chunk: None,
            optimised: None,
            vocab_size: None,
            cost: None,
            fidelity: Fidelity::unknown("nobody judged it"),
        }
    }
}

/// Work of one token, from the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenCost {
    /// Weight bytes that a decode step reads.
    pub weight_bytes: u64,
    /// KV-cache bytes that a decode step reads, under the protocol's mean context.
    pub kv_bytes: u64,
    /// Additions and multiplications of matrix products for one prompt token, the
    /// head left out.
    pub prompt_operations: u64,
}

impl TokenCost {
    /// From a plan whose decode step reads `weight_bytes` of weights and sees
    /// `context` positions on average.
    pub fn of(plan: &Plan, spec: &ModelSpec, weight_bytes: u64, context: f64) -> TokenCost {
        let tensors = spec.tensors();
        let elements = |id: carat_model::WeightId| {
            let name = &plan.weights[id.0];
            let decl = tensors.iter().find(|d| d.name == *name);
            decl.and_then(|d| d.shape.elements().ok()).unwrap_or(0) as u64
        };
        let mut cost = TokenCost {
            weight_bytes,
            ..TokenCost::default()
        };
        for op in &plan.ops {
            match op {
                Op::Linear { projections, .. } => {
                    for p in projections {
                        // The head runs for the last prompt token alone.
                        if plan.buffers[p.out.0].rows == Extent::Tokens {
                            cost.prompt_operations += 2 * elements(p.weight);
                        }
                    }
                }
                Op::Attention { state, window, .. } => {
                    let StateDecl::Kv {
                        kv_heads, head_dim, ..
                    } = &plan.states[state.0];
                    let seen = window.map_or(context, |w| context.min(w as f64));
                    // Keys and values of 16 bits.
                    cost.kv_bytes += (seen * (2 * 2 * kv_heads * head_dim) as f64) as u64;
                }
                _ => {}
            }
        }
        cost
    }
}

/// What an arm reports of one trial.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Measured {
    /// Prompt tokens that were run within the time to the first token.
    pub prompt_tokens: usize,
    /// New tokens, the first included.
    pub new_tokens: usize,
    /// From the request to the first token.
    pub ttft_ns: Nanos,
    /// From the first token to the last.
    pub decode_ns: Nanos,
    /// Resetting the state before the trial, not in the times above.
    pub reset_ns: Option<Nanos>,
    /// Filling the cache to the protocol's depth, not in the times above.
    #[serde(default)]
    pub fill_ns: Option<Nanos>,
    /// From the start of the program to a model that is ready.
    pub load_ns: Option<Nanos>,
    /// Largest resident size of the arm's process so far, bytes.
    pub peak_memory_bytes: Option<u64>,
    /// Resident size after the trial, bytes.
    pub steady_memory_bytes: Option<u64>,
}

impl Measured {
    /// Prompt tokens per second: `p / TTFT`.
    pub fn prompt_tps(&self) -> Option<f64> {
        self.ttft_ns.rate(self.prompt_tokens)
    }

    /// Decode tokens per second, without the first token.
    pub fn decode_tps(&self) -> Option<f64> {
        self.decode_ns.rate(self.new_tokens.saturating_sub(1))
    }

    /// Seconds per decoded token.
    pub fn tpot_s(&self) -> Option<f64> {
        self.decode_tps().map(|tps| 1.0 / tps)
    }
}

/// One side of a comparison: something that can run a trial.
pub trait Arm {
    /// What it is.
    fn info(&self) -> ArmInfo;

    /// The processes that do its work.
    fn processes(&self) -> Processes {
        Processes::Own
    }

    /// Runs one trial on a state that remembers nothing.
    ///
    /// # Errors
    /// When there is no result.
    fn trial(&mut self, protocol: &Protocol, prompt: &TrialPrompt) -> Result<Measured, BenchError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_injected_span_is_reported_as_it_is() {
        let measured = Measured {
            prompt_tokens: 360,
            new_tokens: 37,
            ttft_ns: Nanos(3_600_000_000),
            decode_ns: Nanos(3_600_000_000),
            ..Measured::default()
        };
        assert_eq!(measured.prompt_tps(), Some(100.0));
        // 36 steps: the first token belongs to the prompt.
        assert_eq!(measured.decode_tps(), Some(10.0));
        assert_eq!(measured.tpot_s(), Some(0.1));
        let json = serde_json::to_value(&measured).unwrap();
        assert_eq!(json["ttft_ns"], 3_600_000_000u64);
        assert_eq!(serde_json::from_value::<Measured>(json).unwrap(), measured);
    }
}
