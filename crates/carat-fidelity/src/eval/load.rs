//! Tasks as data: one JSON object a line.

use std::fmt;
use std::io::{BufRead as _, Read as _};
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{MAX_LINE_BYTES, gold_number};
use crate::FidelityError;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Word problems, answered in words and then `#### number`.
    Gsm8k,
    /// The tiny models' own problems, which they were taught to answer so.
    Arithmetic,
    /// A continuation among given ones, by log-likelihood (ARC, HellaSwag, PIQA,
    /// WinoGrande, MMLU).
    Choice,
    /// The last word of a passage, as the greedy continuation.
    LastWord,
}

impl Task {
    /// What goes behind each question.
    pub fn instruction(self) -> &'static str {
        match self {
            Task::Gsm8k => {
                "\n\nSolve this step by step. End your answer with #### and the number, on a line of its own."
            }
            Task::Arithmetic | Task::Choice | Task::LastWord => "",
        }
    }

    /// New tokens that an answer may have.
    pub fn max_new_tokens(self) -> usize {
        match self {
            Task::Gsm8k => 640,
            Task::Arithmetic => 110,
            Task::Choice | Task::LastWord => 0,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Task::Gsm8k => "gsm8k",
            Task::Arithmetic => "arithmetic",
            Task::Choice => "choice",
            Task::LastWord => "last_word",
        })
    }
}

/// A question with its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// To be answered in words.
    Number {
        /// The question.
        text: String,
        /// The right number, normalised.
        gold: String,
    },
    /// To be continued by one of several.
    Choice {
        /// What comes before.
        context: String,
        /// What may follow, as it stands in the text.
        choices: Vec<String>,
        /// Index of the right one.
        gold: usize,
    },
}

/// Fields that a line may have.
#[derive(Deserialize)]
struct Line {
    question: Option<String>,
    answer: Option<serde_json::Value>,
    context: Option<String>,
    choices: Option<Vec<String>>,
    gold: Option<usize>,
    text: Option<String>,
}

/// Reads the first `limit` questions of a file.
///
/// A line has `question` and `answer` (the worked solution with `#### number`) for
/// problems; `context`, `choices` and `gold` (the index of the right one) for choices;
/// `text` for the last word of it.
///
/// # Errors
/// Names the line and what is missing in it.
pub fn read_questions(
    path: &Path,
    task: Task,
    limit: usize,
) -> Result<Vec<Question>, FidelityError> {
    let io = |source| FidelityError::Io {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(io)?;
    let mut reader = std::io::BufReader::new(file);
    let mut out = Vec::new();
    for number in 1.. {
        if out.len() == limit {
            break;
        }
        let mut line = String::new();
        let read = (&mut reader).take(MAX_LINE_BYTES).read_line(&mut line);
        let read = read.map_err(io)? as u64;
        let wrong = |problem: String| {
            let problem = format!("line {number}: {problem}");
            FidelityError::malformed(path.display().to_string(), problem)
        };
        if read == 0 {
            break;
        }
        if read == MAX_LINE_BYTES {
            return Err(wrong(format!("is longer than {MAX_LINE_BYTES} bytes")));
        }
        if line.trim().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_str(&line).map_err(|e| wrong(e.to_string()))?;
        out.push(question(task, line).map_err(wrong)?);
    }
    if out.is_empty() {
        let problem = "has no questions";
        return Err(FidelityError::malformed(
            path.display().to_string(),
            problem,
        ));
    }
    Ok(out)
}

fn question(task: Task, line: Line) -> Result<Question, String> {
    let missing = |field: &str| format!("has no {field}");
    match task {
        Task::Gsm8k | Task::Arithmetic => {
            let text = line.question.ok_or_else(|| missing("question"))?;
            let answer = line.answer.ok_or_else(|| missing("answer"))?;
            let answer = match answer {
                serde_json::Value::String(text) => text,
                value => format!("#### {value}"),
            };
            let gold = gold_number(&answer)
                .ok_or_else(|| "its answer has no #### with a number".to_owned())?;
            Ok(Question::Number { text, gold })
        }
        Task::Choice => {
            let context = line.context.ok_or_else(|| missing("context"))?;
            let choices = line.choices.ok_or_else(|| missing("choices"))?;
            let gold = line.gold.ok_or_else(|| missing("gold"))?;
            if gold >= choices.len() || choices.iter().any(String::is_empty) {
                return Err(format!("gold is {gold} of {} choices", choices.len()));
            }
            if context.is_empty() {
                return Err("its context is empty".into());
            }
            Ok(Question::Choice {
                context,
                choices,
                gold,
            })
        }
        Task::LastWord => {
            let text = line.text.ok_or_else(|| missing("text"))?;
            let (context, word) = text
                .trim_end()
                .rsplit_once(' ')
                .filter(|(context, word)| !context.is_empty() && !word.is_empty())
                .ok_or_else(|| "its text has fewer than two words".to_owned())?;
            Ok(Question::Choice {
                context: context.into(),
                choices: vec![format!(" {word}")],
                gold: 0,
            })
        }
    }
}
