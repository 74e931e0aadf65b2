//! Programs that run one trial and end, and carat as one of them.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    Arm, ArmInfo, ArmResult, BenchError, Measured, Nanos, PromptSource, Protocol, TrialPrompt,
};

/// Longest output of a program that is kept.
const MAX_OUTPUT_BYTES: u64 = 64 << 20;

/// What a program left behind.
pub(super) struct Output {
    pub(super) stdout: String,
    pub(super) wall: Duration,
}

/// Kills a program that is still running when nobody waits for it any more.
pub(super) struct Guard(pub(super) Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program to its end.
///
/// # Errors
/// When it cannot be started, fails, writes more than anybody would read, or
/// takes longer than `limit`.
pub(super) fn run(arm: &str, command: &mut Command, limit: Nanos) -> Result<Output, BenchError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let start = Instant::now();
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| BenchError::arm(arm, format!("cannot start {program}: {e}")))?;
    let mut child = Guard(child);
    // Both pipes are read beside the wait, so that neither fills up.
    let stdout = child.0.stdout.take().map(read_all);
    let stderr = child.0.stderr.take().map(read_all);
    let status = loop {
        match child.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if start.elapsed() > limit.into() => {
                return Err(BenchError::Timeout {
                    arm: arm.to_owned(),
                    limit,
                });
            }
            // Rarely enough to cost the program nothing.
            Ok(None) => thread::sleep(Duration::from_millis(5)),
            Err(e) => return Err(BenchError::arm(arm, format!("{program}: {e}"))),
        }
    };
    let wall = start.elapsed();
    let joined = |reader: Option<thread::JoinHandle<Vec<u8>>>| {
        let bytes = reader.and_then(|r| r.join().ok()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let (stdout, stderr) = (joined(stdout), joined(stderr));
    if !status.success() {
        let said = stderr.trim().lines().next_back().unwrap_or("").to_owned();
        return Err(BenchError::arm(arm, format!("{program}: {status}: {said}")));
    }
    Ok(Output { stdout, wall })
}

fn read_all(pipe: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What cannot be read was not said.
        let _ = pipe.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes);
        bytes
    })
}

/// carat in a fresh process for every trial: `carat bench MODEL` with the
/// protocol's sizes and one repetition.
pub struct CaratProcessArm {
    info: ArmInfo,
    /// Program and the arguments of `carat bench`.
    argv: Vec<String>,
    limit: Nanos,
}

impl CaratProcessArm {
    /// An arm that runs `argv` (`carat bench MODEL …`), adding the protocol.
    pub fn new(info: ArmInfo, argv: Vec<String>, limit: Nanos) -> CaratProcessArm {
        CaratProcessArm { info, argv, limit }
    }
}

impl Arm for CaratProcessArm {
    fn info(&self) -> ArmInfo {
        self.info.clone()
    }

    fn trial(&mut self, protocol: &Protocol, prompt: &TrialPrompt) -> Result<Measured, BenchError> {
        let name = &self.info.name;
        let PromptSource::Synthetic { .. } = protocol.prompt else {
            return Err(BenchError::arm(
                name,
                "a fresh process takes synthetic prompts only",
            ));
        };
        let [program, args @ ..] = &self.argv[..] else {
            return Err(BenchError::arm(name, "there is no program to run"));
        };
        let output = run(
            name,
            Command::new(program).args(args).args([
                "--prompt-tokens".to_owned(),
                protocol.prompt_tokens.to_string(),
                "--new-tokens".to_owned(),
                protocol.new_tokens.to_string(),
                "--depth".to_owned(),
                protocol.depth.to_string(),
                "--warmups".to_owned(),
                protocol.warmups.to_string(),
                "--repetitions".to_owned(),
                "1".to_owned(),
                "--seed".to_owned(),
                prompt.seed.to_string(),
                "--no-bounds".to_owned(),
                "--json".to_owned(),
            ]),
            self.limit,
        )?;
        let mut object: Value = serde_json::from_str(&output.stdout)
            .map_err(|e| BenchError::arm(name, format!("its output is no JSON: {e}")))?;
        let result: ArmResult = serde_json::from_value(object["record"].take())
            .map_err(|e| BenchError::arm(name, format!("its output is no result: {e}")))?;
        if result.info.optimised == Some(false) {
            return Err(BenchError::DebugBuild { arm: name.clone() });
        }
        let load_ns = result.load_ns;
        let trial = result.trials.into_iter().next();
        let measured = trial.ok_or_else(|| BenchError::arm(name, "its result has no trial"))?;
        Ok(Measured {
            load_ns,
            ..measured.measured
        })
    }
}
