//! Arms outside of this process: fake programs and servers on this machine.
#![cfg(unix)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    sync::mpsc,
    thread,
    time::Duration,
};

use carat_bench::{
    Arm, ArmInfo, ArmKind, BenchError, Measured, Nanos, Prompts, Protocol, TrialPrompt,
    arms::{CommandArm, Field, LlamaBenchArm, LlamaServerArm, OpenaiArm, Parser, Server, Unit},
};
use serde_json::{Value, json};

const LIMIT: Nanos = Nanos::from_millis(20_000);

fn protocol() -> Protocol {
    Protocol {
        prompt_tokens: 8,
        new_tokens: 5,
        depth: 0,
        ..Protocol::default()
    }
}

fn prompt(protocol: &Protocol) -> TrialPrompt {
    Prompts::synthetic().ids(protocol, 0, 1000)
}

/// A script in a folder of its own.
fn script(body: &str) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program");
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (dir, path)
}

/// `llama-bench` as far as its arguments and its JSON go: a prompt token takes
/// 2 ms, a new one 100 ms.
const LLAMA_BENCH: &str = r#"
while [ $# -gt 0 ]; do
  case $1 in -p) p=$2;; -n) n=$2;; -d) d=$2;; -t) t=$2;; esac
  shift
done
[ "$t" = 3 ] || { echo "wrong threads" >&2; exit 1; }
ns=$((p * 2000000 + n * 100000000))
echo "[{\"n_prompt\": $p, \"n_gen\": $n, \"n_depth\": $d, \"samples_ns\": [$ns],"
echo " \"build_commit\": \"0c1e570\", \"model_size\": 1234, \"avg_ts\": 1.0}]"
"#;

fn llama_bench(program: String, threads: usize) -> LlamaBenchArm {
    let mut info = ArmInfo::new("l", ArmKind::LlamaBench, "unknown", "m.gguf");
    info.threads = Some(threads);
    LlamaBenchArm::new(info, program, "m.gguf".into(), vec![], LIMIT)
}

#[test]
fn llama_bench_does_the_same_steps() {
    let (_dir, program) = script(LLAMA_BENCH);
    let mut arm = llama_bench(program.clone(), 3);
    let protocol = Protocol {
        depth: 16,
        ..protocol()
    };
    let measured = arm.trial(&protocol, &prompt(&protocol)).unwrap();
    assert_eq!(measured.ttft_ns, Nanos::from_millis(16));
    assert_eq!(measured.decode_ns, Nanos::from_millis(400));
    assert_eq!(measured.decode_tps(), Some(10.0));
    assert_eq!(arm.info().program, "llama.cpp 0c1e570");
    assert_eq!(arm.info().model_bytes, Some(1234));
    let error = llama_bench(program.clone(), 4).trial(&protocol, &prompt(&protocol));
    assert!(error.unwrap_err().to_string().contains("wrong threads"));
    // It would not run the text that the protocol names.
    let (given, source) = Prompts::given(vec![1, 2, 3]);
    let text = Protocol {
        prompt: source,
        ..protocol
    };
    let error = llama_bench(program, 3).trial(&text, &given.ids(&text, 0, 1000));
    assert!(error.unwrap_err().to_string().contains("its own ids"));
}

#[test]
fn a_llama_bench_that_does_something_else_is_refused() {
    for (answer, says) in [
        (
            r#"[{"n_prompt": 7, "n_gen": 0, "samples_ns": [1]}]"#,
            "expected (8, 0, 0)",
        ),
        (
            r#"[{"n_prompt": 8, "n_gen": 0, "samples_ns": [1, 2]}]"#,
            "2 samples",
        ),
        ("[]", "0 tests"),
        ("hello", "its output"),
    ] {
        let (_dir, program) = script(&format!("echo '{answer}'"));
        let error = llama_bench(program, 3).trial(&protocol(), &prompt(&protocol()));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(says), "{answer}: {error}");
    }
}

fn command(body: &str, limit: Nanos) -> Result<Measured, BenchError> {
    let (_dir, program) = script(body);
    let after = |s: &str| Field::After { after: s.into() };
    let parser = Parser {
        prompt_tokens: after("prompt"),
        new_tokens: after("new"),
        ttft: after("first"),
        ttft_unit: Unit::Ms,
        decode: after("rest"),
        decode_unit: Unit::Ms,
    };
    let info = ArmInfo::new("c", ArmKind::Command, "script", "m");
    let words = [
        "{prompt_tokens}",
        "{new_tokens}",
        "{seed}",
        "{threads}",
        "{prompt_ids}",
    ];
    let argv = std::iter::once(program)
        .chain(words.map(str::to_owned))
        .collect();
    CommandArm::new(info, argv, parser, limit).trial(&protocol(), &prompt(&protocol()))
}

#[test]
fn any_command_with_a_declared_parser() {
    let ids: Vec<String> = prompt(&protocol())
        .prompt
        .iter()
        .map(u32::to_string)
        .collect();
    let body = format!(
        "[ \"$5\" = {} ] || exit 3\nsleep 0.02\necho prompt $1\necho new: $2\necho first = 1.5\necho rest 2",
        ids.join(",")
    );
    let measured = command(&body, LIMIT).unwrap();
    assert_eq!((measured.prompt_tokens, measured.new_tokens), (8, 5));
    assert_eq!(measured.ttft_ns, Nanos(1_500_000));
    assert_eq!(measured.decode_ns, Nanos(2_000_000));
}

#[test]
fn commands_that_hang_fail_or_lie_about_time() {
    let error = command("exec sleep 60", Nanos::from_millis(200)).unwrap_err();
    assert!(matches!(error, BenchError::Timeout { .. }), "{error}");
    let error = command("echo no such model >&2; exit 7", LIMIT).unwrap_err();
    assert!(error.to_string().contains("no such model"), "{error}");
    // An hour of work in some milliseconds.
    let lie = "echo prompt 8; echo new 5; echo first 3600000; echo rest 1";
    let error = command(lie, LIMIT).unwrap_err().to_string();
    assert!(error.contains("is a unit wrong?"), "{error}");
}

/// A server that answers one request and hands it on.
fn server(answer: impl FnOnce(&mut dyn Write) + Send + 'static) -> (String, mpsc::Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let line = line.trim().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        sender.send(serde_json::from_slice(&body).unwrap()).unwrap();
        answer(&mut stream);
    });
    (url, receiver)
}

fn respond(out: &mut dyn Write, kind: &str, status: &str) {
    write!(
        out,
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    out.flush().unwrap();
}

fn openai(url: String, limit: Nanos) -> OpenaiArm {
    let info = ArmInfo::new("o", ArmKind::Openai, "unknown", "m");
    let server = Server::new(info, format!("{url}/v1"), None, limit);
    OpenaiArm::new(server, Some("key".into()))
}

#[test]
fn an_openai_server_is_timed_from_its_first_piece_to_its_last() {
    let (url, requests) = server(|out| {
        respond(out, "text/event-stream", "200 OK");
        let mut event = |wait: u64, text: &str| {
            thread::sleep(Duration::from_millis(wait));
            write!(out, "{text}\n\n").unwrap();
            out.flush().unwrap();
        };
        event(60, ": still reading");
        event(0, r#"data: {"choices": [{"text": "a"}]}"#);
        event(80, r#"data: {"choices": [{"text": "b"}]}"#);
        event(
            0,
            r#"data: {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 5}}"#,
        );
        event(0, "data: [DONE]");
    });
    let measured = openai(url, LIMIT)
        .trial(&protocol(), &prompt(&protocol()))
        .unwrap();
    assert_eq!((measured.prompt_tokens, measured.new_tokens), (8, 5));
    // Sleeps last at least as long as they say.
    assert!(measured.ttft_ns >= Nanos::from_millis(60), "{measured:?}");
    assert!(measured.decode_ns >= Nanos::from_millis(75), "{measured:?}");
    let request = requests.recv().unwrap();
    assert_eq!(request["max_tokens"], 5);
    assert_eq!(request["temperature"], 0);
    assert_eq!(request["prompt"], json!(prompt(&protocol()).prompt));
}

#[test]
fn servers_that_refuse_hang_or_say_nothing() {
    let (url, _requests) = server(|out| {
        respond(out, "text/plain", "404 Not Found");
        write!(out, "no such model").unwrap();
    });
    let error = openai(url, LIMIT).trial(&protocol(), &prompt(&protocol()));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("404") && error.contains("no such model"),
        "{error}"
    );

    let (url, _requests) = server(|out| {
        respond(out, "text/event-stream", "200 OK");
        write!(out, "data: [DONE]\n\n").unwrap();
    });
    let error = openai(url, LIMIT).trial(&protocol(), &prompt(&protocol()));
    assert!(error.unwrap_err().to_string().contains("no text"));

    let (url, _requests) = server(|_| thread::sleep(Duration::from_secs(3)));
    let error = openai(url, Nanos::from_millis(200)).trial(&protocol(), &prompt(&protocol()));
    assert!(
        matches!(error, Err(BenchError::Timeout { .. })),
        "{error:?}"
    );

    let deep = Protocol {
        depth: 4,
        ..protocol()
    };
    let error = openai("http://127.0.0.1:1".into(), LIMIT).trial(&deep, &prompt(&deep));
    assert!(error.unwrap_err().to_string().contains("depth 0"));
}

#[test]
fn a_llama_server_times_itself() {
    let (url, requests) = server(|out| {
        respond(out, "application/json", "200 OK");
        let timings = json!({
            "prompt_n": 8, "prompt_ms": 3600.0, "predicted_n": 5, "predicted_ms": 400.0,
        });
        write!(out, "{}", json!({ "content": "", "timings": timings })).unwrap();
    });
    let info = ArmInfo::new("s", ArmKind::LlamaServer, "unknown", "m.gguf");
    let mut arm = LlamaServerArm::new(Server::new(info, url, None, LIMIT));
    let measured = arm.trial(&protocol(), &prompt(&protocol())).unwrap();
    assert_eq!(measured.ttft_ns, Nanos(3_600_000_000));
    assert_eq!(measured.decode_tps(), Some(10.0));
    assert_eq!(requests.recv().unwrap()["cache_prompt"], false);
}
