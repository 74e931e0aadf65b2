//! From an answer to right or wrong.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a question came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Right.
    Correct,
    /// Another value.
    Wrong,
    /// No result is named.
    Unmarked,
    /// A result is named otherwise than asked.
    OffFormat,
    /// Cut off by its length before a result.
    Truncated,
}

/// The mark that answers end with.
const MARK: &str = "####";

/// The last `#### number` of a text, as `####\s*([\-0-9\.,]+)` finds it.
fn marked(text: &str) -> Option<&str> {
    let mut end = text.len();
    while let Some(at) = text[..end].rfind(MARK) {
        let rest = text[at + MARK.len()..].trim_start();
        let other = |c: char| !(c.is_ascii_digit() || "-.,".contains(c));
        let number = &rest[..rest.find(other).unwrap_or(rest.len())];
        if !number.is_empty() {
            return Some(number);
        }
        end = at;
    }
    None
}

/// `1,234.00` and `$1234.` are `1234`.
fn normal(number: &str) -> String {
    let kept: String = number
        .trim()
        .chars()
        .filter(|c| !",$".contains(*c))
        .collect();
    let kept = kept.trim_end_matches('.');
    match kept.split_once('.') {
        Some((whole, zeros)) if !zeros.is_empty() && zeros.chars().all(|c| c == '0') => {
            whole.into()
        }
        _ => kept.into(),
    }
}

/// The number that a worked solution ends with: what follows its `####`.
pub fn gold_number(solution: &str) -> Option<String> {
    let (_, rest) = solution.rsplit_once(MARK)?;
    let line = rest.trim_start().lines().next()?.trim();
    (!line.is_empty()).then(|| normal(line))
}

/// Scores an answer that is to end with `#### number`: the outcome, and what was taken
/// for the number.
pub fn score_number(text: &str, gold: &str, truncated: bool) -> (Outcome, Option<String>) {
    let Some(found) = marked(text).map(normal) else {
        let named = text.contains(MARK) || text.contains("\\boxed{");
        let outcome = match (truncated, named) {
            (true, _) => Outcome::Truncated,
            (false, true) => Outcome::OffFormat,
            (false, false) => Outcome::Unmarked,
        };
        return (outcome, None);
    };
    let outcome = match found == normal(gold) {
        true => Outcome::Correct,
        // A number that more tokens would have changed is no wrong answer.
        false if truncated => Outcome::Truncated,
        false => Outcome::Wrong,
    };
    (outcome, Some(found))
}

/// Scores a choice by the log-likelihood of each answer over its length in bytes,
/// which keeps long answers in the race.
pub fn score_choice(choices: &[(f64, usize)], gold: usize) -> (Outcome, usize) {
    let worth = |(logprob, bytes): &(f64, usize)| logprob / (*bytes).max(1) as f64;
    let mut best = 0;
    for (i, choice) in choices.iter().enumerate() {
        if worth(choice) > worth(&choices[best]) {
            best = i;
        }
    }
    let outcome = match best == gold {
        true => Outcome::Correct,
        false => Outcome::Wrong,
    };
    (outcome, best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Outcome::*;

    #[test]
    fn answers_are_read_as_the_protocol_says() {
        for (text, truncated, expected, found) in [
            ("so 6 * 7 = 42\n#### 42", false, Correct, Some("42")),
            ("####42", false, Correct, Some("42")),
            ("#### 42.", false, Correct, Some("42")),
            ("#### 42.0", false, Correct, Some("42")),
            ("#### 42.00 dollars", false, Correct, Some("42")),
            ("#### 41\nNo:\n#### 42", false, Correct, Some("42")),
            ("#### 42\nor rather\n#### 43", false, Wrong, Some("43")),
            ("#### 4,2", false, Correct, Some("42")),
            ("#### -42", false, Wrong, Some("-42")),
            ("#### 42.5", false, Wrong, Some("42.5")),
            ("#### $42", false, OffFormat, None),
            ("\\boxed{42}", false, OffFormat, None),
            ("#### forty-two", false, OffFormat, None),
            ("The answer is 42.", false, Unmarked, None),
            ("The answer is", true, Truncated, None),
            ("#### 4", true, Truncated, Some("4")),
            ("#### 42", true, Correct, Some("42")),
            ("", false, Unmarked, None),
        ] {
            let (outcome, predicted) = score_number(text, "42", truncated);
            assert_eq!(
                (outcome, predicted.as_deref()),
                (expected, found),
                "{text:?}"
            );
        }
        assert_eq!(score_number("#### 1,234", "$1,234.00", false).0, Correct);
    }

    #[test]
    fn a_worked_solution_ends_with_its_number() {
        assert_eq!(gold_number("5 + 7 = 12\n#### 12").as_deref(), Some("12"));
        assert_eq!(gold_number("#### 1,000 \n").as_deref(), Some("1000"));
        assert_eq!(gold_number("no mark"), None);
        assert_eq!(gold_number("#### "), None);
    }

    #[test]
    fn choices_are_weighed_by_length() {
        // -6 over 6 bytes beats -5 over 2.
        assert_eq!(score_choice(&[(-5.0, 2), (-6.0, 6)], 1), (Correct, 1));
        assert_eq!(score_choice(&[(-1.0, 1), (-1.0, 1)], 1), (Wrong, 0));
    }
}
