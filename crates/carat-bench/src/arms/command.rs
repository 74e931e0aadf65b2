//! Any command, with a declaration of how its output is read.

use std::process::Command;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::process::run;
use crate::{Arm, ArmInfo, BenchError, Measured, Nanos, Protocol, TrialPrompt};

/// Unit of a time in a command's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Seconds.
    S,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// Nanoseconds.
    Ns,
    /// Tokens per second of the phase.
    TokensPerSecond,
}

/// Where a figure is in a command's output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Field {
    /// A JSON pointer (RFC 6901) into the one JSON value that the output is.
    Json {
        /// Such as `/timings/prompt_ms`.
        json: String,
    },
    /// The number that follows this text, on the last line that has it.
    After {
        /// Such as `prompt eval time =`.
        after: String,
    },
}

/// How a command's output is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Parser {
    /// Prompt tokens that were run.
    pub prompt_tokens: Field,
    /// New tokens, the first included.
    pub new_tokens: Field,
    /// Time to the first token, or prompt tokens per second.
    pub ttft: Field,
    /// Its unit.
    pub ttft_unit: Unit,
    /// Time from the first token to the last, or decode tokens per second.
    pub decode: Field,
    /// Its unit.
    pub decode_unit: Unit,
}

impl Field {
    fn read(&self, text: &str, json: Option<&Value>) -> Result<f64, String> {
        let found = match self {
            Field::Json { json: pointer } => {
                let value = json.ok_or("the output is not one JSON value")?;
                let value = value.pointer(pointer);
                let value = value.ok_or_else(|| format!("the output has no {pointer}"))?;
                value
                    .as_f64()
                    .ok_or_else(|| format!("{pointer} is no number"))?
            }
            Field::After { after } => {
                let rest = text
                    .lines()
                    .rev()
                    .find_map(|line| Some(line.split_once(after.as_str())?.1))
                    .ok_or_else(|| format!("the output has no {after:?}"))?;
                let number: String = rest
                    .trim_start_matches([' ', '\t', ':', '='])
                    .chars()
                    .take_while(|c| c.is_ascii_digit() || matches!(c, '.' | 'e' | 'E' | '+' | '-'))
                    .collect();
                let number = number.parse();
                number.map_err(|_| format!("no number follows {after:?}"))?
            }
        };
        if found.is_finite() && found >= 0.0 {
            Ok(found)
        } else {
            Err(format!("{found} is no count and no time"))
        }
    }
}

impl Parser {
    /// Reads an output.
    ///
    /// # Errors
    /// When a figure is missing or none.
    pub fn read(&self, output: &str) -> Result<Measured, String> {
        let json = serde_json::from_str(output).ok();
        let read = |field: &Field| field.read(output, json.as_ref());
        let count = |field: &Field| match read(field)? {
            n if n.fract() == 0.0 => Ok(n as usize),
            n => Err(format!("{n} is no count")),
        };
        let prompt_tokens = count(&self.prompt_tokens)?;
        let new_tokens = count(&self.new_tokens)?;
        let time = |field: &Field, unit: Unit, tokens: usize| {
            let value = read(field)?;
            Ok::<_, String>(Nanos::from_secs_f64(match unit {
                Unit::S => value,
                Unit::Ms => value / 1e3,
                Unit::Us => value / 1e6,
                Unit::Ns => value / 1e9,
                Unit::TokensPerSecond if value > 0.0 => tokens as f64 / value,
                Unit::TokensPerSecond => return Err("a speed of 0 tokens per second".into()),
            }))
        };
        Ok(Measured {
            prompt_tokens,
            new_tokens,
            ttft_ns: time(&self.ttft, self.ttft_unit, prompt_tokens)?,
            decode_ns: time(&self.decode, self.decode_unit, new_tokens.saturating_sub(1))?,
            ..Measured::default()
        })
    }
}

/// A command in a fresh process for every trial.
pub struct CommandArm {
    info: ArmInfo,
    argv: Vec<String>,
    parser: Parser,
    limit: Nanos,
}

impl CommandArm {
    /// An arm that runs `argv`. In each word `{prompt_tokens}`, `{new_tokens}`,
    /// `{depth}`, `{seed}`, `{threads}` and `{prompt_ids}` (with commas between)
    /// are replaced.
    pub fn new(info: ArmInfo, argv: Vec<String>, parser: Parser, limit: Nanos) -> CommandArm {
        CommandArm {
            info,
            argv,
            parser,
            limit,
        }
    }
}

impl Arm for CommandArm {
    fn info(&self) -> ArmInfo {
        self.info.clone()
    }

    fn trial(&mut self, protocol: &Protocol, prompt: &TrialPrompt) -> Result<Measured, BenchError> {
        let name = &self.info.name;
        let threads = self.info.threads.unwrap_or(1);
        let fill = |word: &String| {
            let mut word = word
                .replace("{prompt_tokens}", &protocol.prompt_tokens.to_string())
                .replace("{new_tokens}", &protocol.new_tokens.to_string())
                .replace("{depth}", &protocol.depth.to_string())
                .replace("{seed}", &prompt.seed.to_string())
                .replace("{threads}", &threads.to_string());
            if word.contains("{prompt_ids}") {
                let ids: Vec<String> = prompt.prompt.iter().map(u32::to_string).collect();
                word = word.replace("{prompt_ids}", &ids.join(","));
            }
            word
        };
        let words: Vec<String> = self.argv.iter().map(fill).collect();
        let [program, args @ ..] = &words[..] else {
            return Err(BenchError::arm(name, "there is no command to run"));
        };
        let output = run(name, Command::new(program).args(args), self.limit)?;
        let read = self.parser.read(&output.stdout);
        let measured = read.map_err(|problem| BenchError::arm(name, problem))?;
        // Parts of a whole: a unit that was declared wrong shows here.
        let timed = measured.ttft_ns.0.saturating_add(measured.decode_ns.0);
        let wall = Nanos::from(output.wall);
        if timed > wall.0 {
            return Err(BenchError::arm(
                name,
                format!(
                    "it reports {} of work in {wall}: is a unit wrong?",
                    Nanos(timed)
                ),
            ));
        }
        Ok(measured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parser(ttft_unit: Unit, decode_unit: Unit) -> Parser {
        let after = |s: &str| Field::After { after: s.into() };
        Parser {
            prompt_tokens: after("prompt tokens"),
            new_tokens: after("new tokens"),
            ttft: after("prompt took"),
            ttft_unit,
            decode: after("decode"),
            decode_unit,
        }
    }

    #[test]
    fn text_and_json_are_read_in_their_units() {
        let text = "prompt tokens: 8\nnew tokens = 5\nprompt took 3.6 s\ndecode 4 tok/s\n";
        let measured = parser(Unit::S, Unit::TokensPerSecond).read(text).unwrap();
        assert_eq!(measured.ttft_ns, Nanos(3_600_000_000));
        assert_eq!(measured.decode_ns, Nanos(1_000_000_000));
        assert_eq!((measured.prompt_tokens, measured.new_tokens), (8, 5));

        let json = |s: &str| Field::Json { json: s.into() };
        let parser = Parser {
            prompt_tokens: json("/p"),
            new_tokens: json("/n"),
            ttft: json("/t/0"),
            ttft_unit: Unit::Ms,
            decode: json("/t/1"),
            decode_unit: Unit::Us,
        };
        let measured = parser
            .read(r#"{"p": 8, "n": 5, "t": [3600, 2.5]}"#)
            .unwrap();
        assert_eq!(measured.ttft_ns, Nanos(3_600_000_000));
        assert_eq!(measured.decode_ns, Nanos(2500));
        for (text, says) in [
            (r#"{"n": 5, "t": [3600, 2.5]}"#, "no /p"),
            (r#"{"p": "8", "n": 5, "t": [3600, 2.5]}"#, "no number"),
            (r#"{"p": 8.5, "n": 5, "t": [3600, 2.5]}"#, "no count"),
            (r#"{"p": 8, "n": 5, "t": [-1, 2.5]}"#, "no time"),
            ("p 8", "not one JSON value"),
        ] {
            let error = parser.read(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
