//! Servers: started, waited for, and asked over HTTP.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde::Deserialize;
use serde_json::{Value, json};

use super::process::Guard;
use crate::{
    Arm, ArmInfo, BenchError, Measured, Nanos, Protocol, TrialPrompt, machine::memory_of,
    system::Processes,
};

/// Longest answer that is read.
const MAX_ANSWER_BYTES: u64 = 256 << 20;
/// Longest line of a stream.
const MAX_LINE_BYTES: u64 = 4 << 20;

/// Posts JSON; the answer's body.
fn post(
    arm: &str,
    url: &str,
    key: Option<&str>,
    body: &Value,
    limit: Nanos,
) -> Result<impl Read + use<>, BenchError> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(limit.into()))
        .http_status_as_error(false)
        .build()
        .into();
    let mut request = agent.post(url).header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let response = request.send(body.to_string()).map_err(|e| match e {
        ureq::Error::Timeout(_) => BenchError::Timeout {
            arm: arm.to_owned(),
            limit,
        },
        e => BenchError::arm(arm, format!("{url}: {e}")),
    })?;
    let status = response.status();
    let mut answer = response.into_body().into_reader().take(MAX_ANSWER_BYTES);
    if !status.is_success() {
        let mut said = String::new();
        // The status alone says enough if the rest cannot be read.
        let _ = (&mut answer).take(300).read_to_string(&mut said);
        return Err(BenchError::arm(
            arm,
            format!("{url}: {status}: {}", said.trim()),
        ));
    }
    Ok(answer)
}

/// A server that was started for an arm and ends with it.
pub struct ServerProcess {
    child: Guard,
}

impl ServerProcess {
    /// Starts a server and waits until `GET url/health` succeeds.
    ///
    /// # Errors
    /// When it cannot be started, ends, or is not ready within `limit`.
    pub fn start(
        arm: &str,
        program: &str,
        args: &[String],
        url: &str,
        limit: Nanos,
    ) -> Result<ServerProcess, BenchError> {
        let child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| BenchError::arm(arm, format!("cannot start {program}: {e}")))?;
        let mut server = ServerProcess {
            child: Guard(child),
        };
        let health = format!("{}/health", url.trim_end_matches('/'));
        let start = Instant::now();
        while start.elapsed() < limit.into() {
            if let Ok(Some(status)) = server.child.0.try_wait() {
                let problem = format!("{program} ended before it was ready: {status}");
                return Err(BenchError::arm(arm, problem));
            }
            if ureq::get(&health).call().is_ok() {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Err(BenchError::Timeout {
            arm: arm.to_owned(),
            limit,
        })
    }

    fn id(&self) -> u32 {
        self.child.0.id()
    }
}

/// A server under measurement.
pub struct Server {
    pub(super) info: ArmInfo,
    url: String,
    process: Option<ServerProcess>,
    limit: Nanos,
}

impl Server {
    /// The server at `url`; a process that was started for it ends with it.
    pub fn new(info: ArmInfo, url: String, process: Option<ServerProcess>, limit: Nanos) -> Server {
        Server {
            info,
            url,
            process,
            limit,
        }
    }

    pub(super) fn processes(&self) -> Processes {
        let process = self.process.as_ref();
        process.map_or(Processes::Unknown, |p| Processes::With(p.id()))
    }

    /// Posts JSON to a path below the address; the answer's body.
    pub(super) fn post(
        &self,
        protocol: &Protocol,
        path: &str,
        key: Option<&str>,
        body: &Value,
    ) -> Result<impl Read + use<>, BenchError> {
        if protocol.depth > 0 {
            return Err(BenchError::arm(
                &self.info.name,
                "a server cannot fill its cache outside the timer: depth 0 only",
            ));
        }
        post(&self.info.name, &self.address(path), key, body, self.limit)
    }

    /// What is wrong with an answer.
    pub(super) fn wrong(&self, path: &str, problem: impl std::fmt::Display) -> BenchError {
        BenchError::arm(
            &self.info.name,
            format!("{}: {problem}", self.address(path)),
        )
    }

    fn address(&self, path: &str) -> String {
        format!("{}/{path}", self.url.trim_end_matches('/'))
    }

    /// A trial's figures with the memory of the process that was started.
    pub(super) fn with_memory(&self, measured: Measured) -> Measured {
        let memory = self.process.as_ref();
        let memory = memory.map_or_else(Default::default, |p| memory_of(&p.id().to_string()));
        Measured {
            peak_memory_bytes: memory.peak,
            steady_memory_bytes: memory.resident,
            ..measured
        }
    }
}

/// Any server with the completions of the OpenAI API. It is timed from outside:
/// TTFT ends with the first piece of text, decode with the last.
pub struct OpenaiArm {
    server: Server,
    key: Option<String>,
}

/// A piece of a stream.
#[derive(Deserialize)]
struct Piece {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
}

impl OpenaiArm {
    /// An arm on a server whose address is that of the API (that which ends in
    /// `/v1`); its `info.model` is the name that the server knows the model by.
    pub fn new(server: Server, key: Option<String>) -> OpenaiArm {
        OpenaiArm { server, key }
    }
}

impl Arm for OpenaiArm {
    fn info(&self) -> ArmInfo {
        self.server.info.clone()
    }

    fn processes(&self) -> Processes {
        self.server.processes()
    }

    fn trial(&mut self, protocol: &Protocol, prompt: &TrialPrompt) -> Result<Measured, BenchError> {
        const PATH: &str = "completions";
        let server = &self.server;
        let request = json!({
            "model": server.info.model,
            "prompt": prompt.prompt,
            "max_tokens": protocol.new_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": { "include_usage": true },
            // Not in the API, but known to the servers that can go on past the end.
            "ignore_eos": true,
        });
        let start = Instant::now();
        let answer = server.post(protocol, PATH, self.key.as_deref(), &request)?;
        let wrong = |problem: String| server.wrong(PATH, problem);
        let mut reader = BufReader::new(answer);
        let (mut first, mut last, mut usage) = (None, None, None);
        loop {
            let mut line = Vec::new();
            let read = (&mut reader)
                .take(MAX_LINE_BYTES)
                .read_until(b'\n', &mut line)
                .map_err(|e| wrong(e.to_string()))?;
            let now = start.elapsed();
            if read == 0 {
                break;
            }
            // Comments and empty lines lie between events.
            let line = String::from_utf8_lossy(&line);
            let Some(data) = line.trim().strip_prefix("data:") else {
                continue;
            };
            if data.trim() == "[DONE]" {
                break;
            }
            let piece: Piece =
                serde_json::from_str(data.trim()).map_err(|e| wrong(format!("event: {e}")))?;
            if piece.choices.iter().any(|c| !c.text.is_empty()) {
                first.get_or_insert(now);
                last = Some(now);
            }
            usage = piece.usage.or(usage);
        }
        let (Some(first), Some(last)) = (first, last) else {
            return Err(wrong("the answer has no text".into()));
        };
        let usage = usage.ok_or_else(|| wrong("the answer does not tell its tokens".into()))?;
        Ok(server.with_memory(Measured {
            prompt_tokens: usage.prompt_tokens,
            new_tokens: usage.completion_tokens,
            ttft_ns: first.into(),
            decode_ns: (last - first).into(),
            ..Measured::default()
        }))
    }
}
