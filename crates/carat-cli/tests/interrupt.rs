//! Ctrl-C while a long prompt is read: it counts before the first token is made.
#![cfg(unix)]

mod common;

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use common::Place;
use serde_json::{Value, json};

#[test]
fn the_first_press_ends_a_prompt_that_is_still_read() {
    let place = Place::new();
    let bundle = place.bundle();
    // Beyond the model's own context: seconds of reading on any machine.
    let prompt = "The quick brown fox. ".repeat(8_000);
    let mut child = Command::new(env!("CARGO_BIN_EXE_carat"))
        .args(["run", &bundle, "--raw", "--ctx", "200000", "--json"])
        .args(["--max-new-tokens", "2", "--threads", "1"])
        .env("CARAT_CACHE", place.path("cache"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It listens before it reads, so once all is written it listens.
    let mut input = child.stdin.take().unwrap();
    input.write_all(prompt.as_bytes()).unwrap();
    drop(input);
    std::thread::sleep(Duration::from_millis(500));
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["interrupted"], true, "{answer}");
    assert_eq!(answer["ids"], json!([]), "no token was made: {answer}");
    assert_eq!(answer["stop_reason"], "stop");
}
