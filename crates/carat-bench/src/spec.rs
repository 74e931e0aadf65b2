//! Arms as a person names them.

use std::path::Path;

use serde::Deserialize;

use crate::{BenchError, arms::Parser};

/// Largest description that is read.
const MAX_SPEC_BYTES: u64 = 1 << 20;

/// Where an arm runs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ArmKindSpec {
    /// carat in this process.
    Carat {
        /// MODEL.
        model: String,
        /// Tokens per prefill step.
        chunk: Option<usize>,
        /// `int8`, `bf16` or `f32`.
        act: Option<String>,
    },
    /// carat in a fresh process for every trial.
    CaratProcess {
        /// MODEL.
        model: String,
        /// Another program than this one.
        program: Option<String>,
        /// Tokens per prefill step.
        chunk: Option<usize>,
        /// `int8`, `bf16` or `f32`.
        act: Option<String>,
    },
    /// `llama-bench`.
    LlamaBench {
        /// A `.gguf` file.
        model: String,
        /// The program.
        #[serde(default = "llama_bench")]
        program: String,
        /// Further arguments.
        #[serde(default)]
        args: Vec<String>,
    },
    /// `llama-server`: a running one by `url`, or one that is started.
    LlamaServer {
        /// Base address of a running server.
        url: Option<String>,
        /// A `.gguf` file for one that is started.
        model: Option<String>,
        /// The program.
        #[serde(default = "llama_server")]
        program: String,
        /// Further arguments.
        #[serde(default)]
        args: Vec<String>,
    },
    /// A server with the completions of the OpenAI API.
    Openai {
        /// Address up to and with `/v1`.
        url: String,
        /// Name of the model there.
        model: String,
        /// Environment variable that holds the key.
        key_variable: Option<String>,
    },
    /// Any command.
    Command {
        /// Program and arguments, with `{prompt_tokens}` and so on.
        argv: Vec<String>,
        /// Name of the model, for people.
        #[serde(default)]
        model: String,
        /// How its output is read.
        parser: Parser,
    },
}

fn llama_bench() -> String {
    "llama-bench".into()
}

fn llama_server() -> String {
    "llama-server".into()
}

/// An arm as a person names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArmSpec {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Threads, if given.
    pub threads: Option<usize>,
    /// What runs it.
    pub kind: ArmKindSpec,
}

/// As it stands in a file: the settings of all kinds beside those of one.
#[derive(Deserialize)]
struct FileSpec {
    name: Option<String>,
    threads: Option<usize>,
    #[serde(flatten)]
    kind: toml::Table,
}

impl ArmSpec {
    /// Parses `[NAME=]KIND:TARGET[,key=value…]`, a `.toml` file that describes
    /// one arm, or MODEL. KIND is `carat`, `carat-process`, `llama-bench`,
    /// `llama-server` or `openai`; TARGET is MODEL, a `.gguf` file, or an
    /// address with `,model=NAME`.
    ///
    /// # Errors
    /// Saying what cannot be followed.
    pub fn parse(text: &str) -> Result<ArmSpec, BenchError> {
        let wrong = |problem: String| BenchError::Spec {
            text: text.to_owned(),
            problem,
        };
        let (name, rest) = match text.split_once('=') {
            // A `=` behind a `,` or `:` belongs to a setting or a target.
            Some((name, rest)) if !name.contains([':', ',', '/']) && !name.is_empty() => {
                (Some(name.to_owned()), rest)
            }
            _ => (None, text),
        };
        if rest.ends_with(".toml") {
            let mut spec = ArmSpec::read(Path::new(rest))?;
            spec.name = name.or(spec.name);
            return Ok(spec);
        }
        let mut parts = rest.split(',');
        let target = parts.next().unwrap_or_default();
        let (kind, target) = match target.split_once(':') {
            Some((kind, target)) if KINDS.contains(&kind) => (kind, target),
            _ => ("carat", target),
        };
        let mut table = toml::Table::new();
        let is_address = target.starts_with("http://") || target.starts_with("https://");
        let key = if is_address { "url" } else { "model" };
        table.insert("kind".into(), kind.into());
        table.insert(key.into(), target.into());
        let mut threads = None;
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(wrong(format!("{part:?}: expected key=value")));
            };
            let number = || {
                let number = value.parse::<u32>();
                number.map_err(|_| wrong(format!("{key}={value}: expected a number")))
            };
            match key {
                "threads" => threads = Some(number()? as usize),
                "chunk" => drop(table.insert(key.into(), i64::from(number()?).into())),
                _ => drop(table.insert(key.into(), value.into())),
            }
        }
        let kind = kind_of(table).map_err(wrong)?;
        Ok(ArmSpec {
            name,
            threads,
            kind,
        })
    }

    /// Reads a `.toml` file.
    fn read(path: &Path) -> Result<ArmSpec, BenchError> {
        let wrong = |problem: String| BenchError::file(path, problem);
        let metadata = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?;
        if metadata.len() > MAX_SPEC_BYTES {
            let length = metadata.len();
            return Err(wrong(format!(
                "{length} bytes, expected at most {MAX_SPEC_BYTES}"
            )));
        }
        let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
        let spec: FileSpec = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        Ok(ArmSpec {
            name: spec.name,
            threads: spec.threads,
            kind: kind_of(spec.kind).map_err(wrong)?,
        })
    }

    /// What to call it among others.
    pub fn label(&self) -> String {
        if let Some(name) = &self.name {
            return name.clone();
        }
        let base = |path: &str| {
            let name = Path::new(path).file_name();
            name.map_or_else(|| path.to_owned(), |n| n.to_string_lossy().into_owned())
        };
        match &self.kind {
            ArmKindSpec::Carat { model, .. } => base(model),
            ArmKindSpec::CaratProcess { model, .. } => format!("carat-process:{}", base(model)),
            ArmKindSpec::LlamaBench { model, .. } => format!("llama-bench:{}", base(model)),
            ArmKindSpec::LlamaServer { url, model, .. } => {
                let target = url.as_deref().or(model.as_deref()).unwrap_or_default();
                format!("llama-server:{}", base(target))
            }
            ArmKindSpec::Openai { model, .. } => format!("openai:{model}"),
            ArmKindSpec::Command { argv, .. } => base(argv.first().map_or("command", |w| w)),
        }
    }
}

/// Kinds that have a short form.
const KINDS: [&str; 5] = [
    "carat",
    "carat-process",
    "llama-bench",
    "llama-server",
    "openai",
];

fn kind_of(table: toml::Table) -> Result<ArmKindSpec, String> {
    table
        .try_into()
        .map_err(|e: toml::de::Error| e.message().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> ArmSpec {
        ArmSpec::parse(text).unwrap()
    }

    #[test]
    fn short_forms() {
        let plain = parse("models/a.gguf");
        assert_eq!(plain.label(), "a.gguf");
        assert!(
            matches!(&plain.kind, ArmKindSpec::Carat { model, .. } if model == "models/a.gguf")
        );
        // A pulled name with a file is a MODEL like any other.
        let pulled = parse("org/name:a.gguf");
        assert!(
            matches!(&pulled.kind, ArmKindSpec::Carat { model, .. } if model == "org/name:a.gguf")
        );
        let named = parse("fast=carat:a.gguf,threads=2,chunk=64,act=f32");
        assert_eq!((named.label().as_str(), named.threads), ("fast", Some(2)));
        assert_eq!(
            named.kind,
            ArmKindSpec::Carat {
                model: "a.gguf".into(),
                chunk: Some(64),
                act: Some("f32".into()),
            }
        );
        let program = parse("llama-bench:a.gguf,program=/opt/llama-bench");
        assert_eq!(program.label(), "llama-bench:a.gguf");
        let server = parse("openai:http://127.0.0.1:8080/v1,model=m");
        assert_eq!(server.label(), "openai:m");
        let server = parse("llama-server:http://127.0.0.1:8080");
        assert!(matches!(
            server.kind,
            ArmKindSpec::LlamaServer {
                url: Some(_),
                model: None,
                ..
            }
        ));
    }

    #[test]
    fn what_cannot_be_followed_is_refused() {
        for (text, says) in [
            ("a.gguf,threads", "expected key=value"),
            ("a.gguf,threads=many", "expected a number"),
            ("a.gguf,colour=red", "unknown field"),
            ("openai:http://x/v1", "missing field"),
            ("no-such-file.toml", "No such file"),
        ] {
            let error = ArmSpec::parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_command_is_described_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arm.toml");
        let text = r#"
            name = "other"
            threads = 2
            kind = "command"
            argv = ["prog", "-p", "{prompt_tokens}"]
            [parser]
            prompt_tokens = { json = "/p" }
            new_tokens = { json = "/n" }
            ttft = { json = "/ttft" }
            ttft_unit = "ms"
            decode = { after = "decode:" }
            decode_unit = "tokens_per_second"
        "#;
        std::fs::write(&path, text).unwrap();
        let spec = ArmSpec::parse(path.to_str().unwrap()).unwrap();
        assert_eq!((spec.label().as_str(), spec.threads), ("other", Some(2)));
        assert!(matches!(spec.kind, ArmKindSpec::Command { .. }));
        std::fs::write(&path, format!("colour = 1\n{text}")).unwrap();
        let error = ArmSpec::parse(path.to_str().unwrap()).unwrap_err();
        assert!(error.to_string().contains("colour"), "{error}");
    }
}
