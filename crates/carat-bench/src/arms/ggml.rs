//! llama.cpp: its benchmark program and its server.

use std::process::Command;

use serde::Deserialize;

use super::{http::Server, process::run};
use crate::{
    Arm, ArmInfo, BenchError, Measured, Nanos, PromptSource, Protocol, TrialPrompt,
    system::Processes,
};

/// `llama-bench`, a fresh process for each half of a trial. It makes its own
/// random ids. The prompt is its test of `p` tokens at the protocol's depth;
/// decode its test of `n - 1` tokens at `depth + p`: the very steps that follow
/// the first token, which the prompt's last logits give.
pub struct LlamaBenchArm {
    info: ArmInfo,
    program: String,
    model: String,
    args: Vec<String>,
    limit: Nanos,
}

/// One test of `llama-bench -o json`.
#[derive(Deserialize)]
struct Test {
    n_prompt: usize,
    n_gen: usize,
    #[serde(default)]
    n_depth: usize,
    samples_ns: Vec<u64>,
    #[serde(default)]
    build_commit: String,
    #[serde(default)]
    model_size: u64,
}

impl LlamaBenchArm {
    /// An arm that runs `program` on a model with further arguments.
    pub fn new(
        info: ArmInfo,
        program: String,
        model: String,
        args: Vec<String>,
        limit: Nanos,
    ) -> LlamaBenchArm {
        LlamaBenchArm {
            info,
            program,
            model,
            args,
            limit,
        }
    }

    /// Runs one test; its nanoseconds.
    fn test(&mut self, prompt: usize, new: usize, depth: usize) -> Result<Nanos, BenchError> {
        let name = &self.info.name;
        let mut command = Command::new(&self.program);
        command.args(["-m", &self.model, "-r", "1", "-o", "json"]);
        for (option, value) in [("-p", prompt), ("-n", new), ("-d", depth)] {
            command.args([option, &value.to_string()]);
        }
        if let Some(threads) = self.info.threads {
            command.args(["-t", &threads.to_string()]);
        }
        let output = run(name, command.args(&self.args), self.limit)?;
        let tests: Vec<Test> = serde_json::from_str(&output.stdout)
            .map_err(|e| BenchError::arm(name, format!("llama-bench: its output: {e}")))?;
        let [test] = &tests[..] else {
            let problem = format!("llama-bench ran {} tests, expected 1", tests.len());
            return Err(BenchError::arm(name, problem));
        };
        let found = (test.n_prompt, test.n_gen, test.n_depth);
        if found != (prompt, new, depth) {
            return Err(BenchError::arm(
                name,
                format!(
                    "llama-bench ran (prompt, new, depth) = {found:?}, expected {:?}",
                    (prompt, new, depth)
                ),
            ));
        }
        let [sample] = test.samples_ns[..] else {
            let problem = format!("{} samples, expected 1", test.samples_ns.len());
            return Err(BenchError::arm(name, problem));
        };
        if !test.build_commit.is_empty() {
            self.info.program = format!("llama.cpp {}", test.build_commit);
        }
        if test.model_size > 0 {
            self.info.model_bytes = Some(test.model_size);
        }
        Ok(Nanos(sample))
    }
}

impl Arm for LlamaBenchArm {
    fn info(&self) -> ArmInfo {
        self.info.clone()
    }

    fn trial(
        &mut self,
        protocol: &Protocol,
        _prompt: &TrialPrompt,
    ) -> Result<Measured, BenchError> {
        let PromptSource::Synthetic { .. } = protocol.prompt else {
            return Err(BenchError::arm(
                &self.info.name,
                "llama-bench makes its own ids and takes no prompt",
            ));
        };
        let steps = protocol.new_tokens - 1;
        let ttft_ns = self.test(protocol.prompt_tokens, 0, protocol.depth)?;
        let decode_ns = match steps {
            0 => Nanos(0),
            _ => self.test(0, steps, protocol.depth + protocol.prompt_tokens)?,
        };
        Ok(Measured {
            prompt_tokens: protocol.prompt_tokens,
            new_tokens: protocol.new_tokens,
            ttft_ns,
            decode_ns,
            ..Measured::default()
        })
    }
}

/// A `llama-server`, asked with ids through its own `/completion` and timed by
/// itself. Its cache of prompts is off; its time for a prompt ends before the
/// first token is sampled, which favours it by that one sample.
pub struct LlamaServerArm {
    server: Server,
}

#[derive(Deserialize)]
struct Completion {
    timings: Timings,
}

#[derive(Deserialize)]
struct Timings {
    prompt_n: usize,
    prompt_ms: f64,
    predicted_n: usize,
    predicted_ms: f64,
}

impl LlamaServerArm {
    /// An arm on a server.
    pub fn new(server: Server) -> LlamaServerArm {
        LlamaServerArm { server }
    }
}

impl Arm for LlamaServerArm {
    fn info(&self) -> ArmInfo {
        self.server.info.clone()
    }

    fn processes(&self) -> Processes {
        self.server.processes()
    }

    fn trial(&mut self, protocol: &Protocol, prompt: &TrialPrompt) -> Result<Measured, BenchError> {
        const PATH: &str = "completion";
        let request = serde_json::json!({
            "prompt": prompt.prompt,
            "n_predict": protocol.new_tokens,
            "temperature": 0,
            "ignore_eos": true,
            "cache_prompt": false,
            "stream": false,
        });
        let answer = self.server.post(protocol, PATH, None, &request)?;
        let answer: Completion =
            serde_json::from_reader(answer).map_err(|e| self.server.wrong(PATH, e))?;
        let timings = answer.timings;
        Ok(self.server.with_memory(Measured {
            prompt_tokens: timings.prompt_n,
            new_tokens: timings.predicted_n,
            ttft_ns: Nanos::from_secs_f64(timings.prompt_ms / 1e3),
            decode_ns: Nanos::from_secs_f64(timings.predicted_ms / 1e3),
            ..Measured::default()
        }))
    }
}
