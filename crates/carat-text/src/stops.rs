//! Where an answer ends.
//!
//! Checkpoints declare the end of an answer in up to four places which often
//! disagree: a tokenizer that names the end of a *document* while chat turns end
//! with another token is enough to make a model talk forever. So every
//! declaration counts, and each id remembers who declared it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use carat_bundle::text::{TextAssets, is_turn_end};

use crate::error::TextError;
use crate::template::{ChatTemplate, Message, RenderInput};
use crate::tokenizer::{AddSpecial, Tokenizer};

/// Why an id ends an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum StopReason {
    /// The tokenizer's end-of-sequence token.
    Tokenizer,
    /// Listed in `generation_config.json`.
    GenerationConfig,
    /// Listed in `config.json` or GGUF metadata.
    Config,
    /// An added token of the vocabulary whose name closes a turn.
    TurnEnd,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tokenizer => "tokenizer",
            Self::GenerationConfig => "generation_config",
            Self::Config => "config",
            Self::TurnEnd => "turn end",
        })
    }
}

/// Everything that ends an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopSet {
    ids: BTreeSet<u32>,
    strings: Vec<String>,
    reasons: BTreeMap<u32, Vec<StopReason>>,
}

impl StopSet {
    /// The union of all declarations of a checkpoint. A declared end that is no
    /// single token of the vocabulary becomes a stop string.
    pub fn from_assets(tokenizer: &Tokenizer, assets: &TextAssets) -> Self {
        let mut out = Self::default();
        let config = &assets.config;
        if let Some(eos) = &config.eos {
            match tokenizer.token_to_id(&eos.content).or(eos.id) {
                Some(id) => out.add_id(id, StopReason::Tokenizer),
                None => out.add_string(&eos.content),
            }
        }
        for id in &config.generation_eos_ids {
            out.add_id(*id, StopReason::GenerationConfig);
        }
        for id in &config.config_eos_ids {
            out.add_id(*id, StopReason::Config);
        }
        // Some files do not call their turn ends special.
        for id in tokenizer.added_ids() {
            if tokenizer.id_to_token(id).is_some_and(|t| is_turn_end(&t)) {
                out.add_id(id, StopReason::TurnEnd);
            }
        }
        out
    }

    /// Adds an id.
    pub fn add_id(&mut self, id: u32, reason: StopReason) {
        self.ids.insert(id);
        let reasons = self.reasons.entry(id).or_default();
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }

    /// Adds a stop string; empty ones and repetitions are ignored.
    pub fn add_string(&mut self, stop: &str) {
        if !stop.is_empty() && !self.strings.iter().any(|s| s == stop) {
            self.strings.push(stop.to_owned());
        }
    }

    /// The ids, ascending.
    pub fn ids(&self) -> &BTreeSet<u32> {
        &self.ids
    }

    /// Strings that end an answer when they appear in its text.
    pub fn strings(&self) -> &[String] {
        &self.strings
    }

    /// Whether the id ends an answer.
    pub fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// Who declared the id, in the order of this crate's search.
    pub fn reasons(&self, id: u32) -> &[StopReason] {
        self.reasons.get(&id).map_or(&[], Vec::as_slice)
    }

    /// The byte offset at which the earliest stop string begins.
    pub fn find_string(&self, text: &str) -> Option<usize> {
        self.strings.iter().filter_map(|s| text.find(s)).min()
    }

    /// How many trailing bytes of `text` could be the beginning of a stop string:
    /// what a stream must hold back.
    pub fn held_back(&self, text: &str) -> usize {
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        let from = text.len().saturating_sub(longest.saturating_sub(1));
        (from..text.len())
            .filter(|at| text.is_char_boundary(*at))
            .find(|at| {
                let tail = &text[*at..];
                self.strings.iter().any(|s| s.starts_with(tail))
            })
            .map_or(0, |at| text.len() - at)
    }
}

/// Something about the stops that would make a model talk on, or that is worth
/// saying when a checkpoint is converted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopFinding {
    /// The declared end-of-sequence token never occurs in a rendered chat; turns
    /// end with other tokens, which are in the stop set.
    DeclaredEosUnused {
        /// The declared token.
        declared: String,
        /// What ends an answer in the template.
        turn_ends: Vec<String>,
    },
    /// Nothing in the stop set occurs after an answer in a rendered chat: the
    /// model has learnt no way to stop.
    NoStopAfterAnswer {
        /// What the template puts behind an answer.
        tail: String,
    },
    /// A declared id is not a token of the vocabulary.
    UnknownId {
        /// The id.
        id: u32,
    },
    /// The template could not be rendered for the check.
    NotRendered {
        /// Why.
        problem: String,
    },
}

impl fmt::Display for StopFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeclaredEosUnused {
                declared,
                turn_ends,
            } => write!(
                f,
                "the tokenizer declares {declared:?} as its end but the chat template never writes it; \
                 answers end with {}",
                turn_ends.join(", ")
            ),
            Self::NoStopAfterAnswer { tail } => write!(
                f,
                "no stop follows an answer in the chat template (it writes {tail:?}): answers would not end"
            ),
            Self::UnknownId { id } => {
                write!(f, "stop id {id} is not in the tokenizer's vocabulary")
            }
            Self::NotRendered { problem } => {
                write!(
                    f,
                    "the stops could not be checked against the chat template: {problem}"
                )
            }
        }
    }
}

/// Checks that the stops can occur: renders a finished exchange and looks at what
/// follows the answer.
pub fn check_stops(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    stops: &StopSet,
) -> Vec<StopFinding> {
    const ANSWER: &str = "Seventeen magpies.";
    let mut findings: Vec<StopFinding> = stops
        .ids()
        .iter()
        .filter(|id| tokenizer.id_to_token(**id).is_none())
        .map(|id| StopFinding::UnknownId { id: *id })
        .collect();
    let messages = [
        Message::new("user", "How many birds?"),
        Message::new("assistant", ANSWER),
    ];
    let rendered = template.render(&RenderInput {
        messages: &messages,
        ..RenderInput::default()
    });
    let tail = match rendered.and_then(|text| tail_after(&text, ANSWER, template)) {
        Ok(tail) => tail,
        Err(e) => {
            findings.push(StopFinding::NotRendered {
                problem: e.to_string(),
            });
            return findings;
        }
    };
    let following = tokenizer.encode(&tail, AddSpecial::No).unwrap_or_default();
    let turn_ends: Vec<String> = following
        .iter()
        .filter(|id| stops.contains(**id))
        .filter_map(|id| tokenizer.id_to_token(*id))
        .collect();
    if turn_ends.is_empty() && stops.find_string(&tail).is_none() {
        findings.push(StopFinding::NoStopAfterAnswer { tail });
    } else if let Some(declared) = tokenizer.eos().and_then(|id| tokenizer.id_to_token(id))
        && !tail.contains(&declared)
    {
        findings.push(StopFinding::DeclaredEosUnused {
            declared,
            turn_ends,
        });
    }
    findings
}

fn tail_after(text: &str, answer: &str, template: &ChatTemplate) -> Result<String, TextError> {
    match text.rfind(answer) {
        Some(at) => Ok(text[at + answer.len()..].to_owned()),
        None => Err(TextError::Render {
            name: template.name().to_owned(),
            problem: "the answer is not in the rendered chat".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turn_ends_by_name() {
        for t in [
            "<end_of_turn>",
            "<|im_end|>",
            "<|eot_id|>",
            "<|endoftext|>",
            "<|eot_token|>",
            "<|end_of_text|>",
            "<|END_OF_TURN_TOKEN|>",
        ] {
            let expected = !matches!(t, "<|END_OF_TURN_TOKEN|>");
            assert_eq!(is_turn_end(t), expected, "{t}");
        }
        assert!(!is_turn_end("endoftext"));
        assert!(!is_turn_end("<|im_start|>"));
        assert!(!is_turn_end("<|vision_end|>"));
    }

    #[test]
    fn stop_strings_are_found_and_held_back() {
        let mut s = StopSet::default();
        s.add_string("\n\nUser:");
        s.add_string("###");
        s.add_string("");
        assert_eq!(s.strings().len(), 2);
        assert_eq!(s.find_string("a ### b\n\nUser:"), Some(2));
        assert_eq!(s.held_back("hello\n"), 1);
        assert_eq!(s.held_back("hello\n\nUse"), 5);
        assert_eq!(s.held_back("hello #"), 1);
        assert_eq!(s.held_back("héllo"), 0);
        assert_eq!(s.held_back(""), 0);
        assert_eq!(StopSet::default().held_back("anything"), 0);
    }

    #[test]
    fn reasons_add_up() {
        let mut s = StopSet::default();
        s.add_id(7, StopReason::Tokenizer);
        s.add_id(7, StopReason::TurnEnd);
        s.add_id(7, StopReason::TurnEnd);
        assert_eq!(s.reasons(7), [StopReason::Tokenizer, StopReason::TurnEnd]);
        assert!(s.reasons(8).is_empty());
    }
}
