//! Runs the `carat` binary in a place of its own.

#![allow(dead_code)] // each test program uses its part

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

/// A folder for one test, with the cache and the pulled models inside.
pub(crate) struct Place {
    dir: TempDir,
}

/// What a command left behind.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
    line: String,
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The ternary model of the repository.
pub(crate) fn wren() -> String {
    text(root().join("models/wren-ternary-tq2_0.gguf"))
}

/// The dense model of the repository.
pub(crate) fn wren_dense() -> PathBuf {
    root().join("models/wren-dense")
}

/// A small random model without a tokenizer.
pub(crate) fn random() -> PathBuf {
    root().join("tests/golden/llama-gqa-headdim")
}

pub(crate) fn text(path: impl AsRef<Path>) -> String {
    path.as_ref().to_str().expect("a UTF-8 path").to_owned()
}

/// A record of `prompts.jsonl` by the first words of its first message.
pub(crate) fn record(begins: &str) -> Value {
    let file = std::fs::read_to_string(root().join("models/prompts.jsonl")).unwrap();
    file.lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .find(|r| {
            let content = r["messages"][0]["content"].as_str();
            content.is_some_and(|c| c.starts_with(begins))
                && r["messages"].as_array().is_some_and(|m| m.len() == 1)
        })
        .unwrap_or_else(|| panic!("no record begins with {begins:?}"))
}

/// The answer of a record as text, without its closing token.
pub(crate) fn answer_of(record: &Value) -> String {
    let text = record["ternary"]["text"].as_str().unwrap();
    text.strip_suffix("<|im_end|>").unwrap_or(text).to_owned()
}

impl Place {
    pub(crate) fn new() -> Place {
        Place {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The path of a file with `content`.
    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        text(path)
    }

    /// The path of a JSON file.
    pub(crate) fn json(&self, name: &str, value: &Value) -> String {
        self.file(name, value.to_string())
    }

    /// A copy of a folder of files.
    pub(crate) fn copy(&self, from: &Path, name: &str) -> PathBuf {
        let to = self.path(name);
        std::fs::create_dir(&to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        to
    }

    /// A copy of a checkpoint whose JSON file is edited.
    pub(crate) fn edited(&self, from: &Path, file: &str, edit: impl FnOnce(&mut Value)) -> String {
        let copy = self.copy(from, "edited");
        let path = copy.join(file);
        let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut value);
        std::fs::write(&path, value.to_string()).unwrap();
        text(copy)
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, "")
    }

    /// Runs carat with `input` on standard input.
    pub(crate) fn run_with(&self, args: &[&str], input: &str) -> Ran {
        let mut child = Command::new(env!("CARGO_BIN_EXE_carat"))
            .args(args)
            .env("CARAT_CACHE", self.path("cache"))
            .env("CARAT_MODELS", self.path("models"))
            .env("HOME", self.dir.path())
            .env("RUST_BACKTRACE", "0")
            .env_remove("COLUMNS")
            .env_remove("HF_TOKEN")
            .current_dir(self.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A command that fails early does not read its input.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let ran = Ran {
            code: output.status.code().expect("carat was killed by a signal"),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
            line: format!("carat {}", args.join(" ")),
        };
        assert!(!ran.err.contains("panicked"), "{ran:?}");
        assert_ne!(ran.code, 3, "an internal error: {ran:?}");
        ran
    }

    /// Runs carat with `--json` and gives its one object.
    pub(crate) fn object(&self, args: &[&str], schema: &str) -> Value {
        let mut args = args.to_vec();
        args.push("--json");
        let ran = self.run(&args).ok();
        let value: Value = serde_json::from_str(&ran.out)
            .unwrap_or_else(|e| panic!("{e}: not one JSON object: {ran:?}"));
        assert_eq!(value["schema"], schema, "{ran:?}");
        assert_eq!(value["version"], 1, "{ran:?}");
        value
    }

    /// Names of what lies in this place, without the cache.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|n| n != "cache")
            .collect();
        names.sort();
        names
    }

    /// A bundle of the ternary model.
    pub(crate) fn bundle(&self) -> String {
        let out = text(self.path("wren.carat"));
        self.run(&["convert", &wren(), &out]).ok();
        out
    }
}

impl Ran {
    /// The command succeeded.
    pub(crate) fn ok(self) -> Ran {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// The command failed as carat fails: with the code, `error:` and no result.
    pub(crate) fn fails(self, code: i32) -> Ran {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.contains("error: "), "{self:?}");
        self
    }

    /// Standard error has the text.
    pub(crate) fn says(self, part: &str) -> Ran {
        assert!(self.err.contains(part), "no {part:?} in {self:?}");
        self
    }

    /// Standard error has a hint with the text.
    pub(crate) fn hints(self, part: &str) -> Ran {
        let hint = self.err.lines().find_map(|l| l.strip_prefix("hint: "));
        assert!(
            hint.is_some_and(|h| h.contains(part)),
            "no hint with {part:?} in {self:?}"
        );
        self
    }
}
