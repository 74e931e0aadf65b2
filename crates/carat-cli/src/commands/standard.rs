//! The standard prompts, and the fixtures that are made of them.

use std::ops::ControlFlow;

use carat_bundle::declare::SourceDeclarations;
use carat_engine::{Engine, EngineError, GenerateOptions, Sequence};
use carat_fidelity::{
    Case, CaseKind, Fixture, MARGIN_FLOOR, OracleKind, Question, Reference, Step, answer, follow,
};
use carat_oracle::Oracle;
use carat_text::{AddSpecial, Message};

use super::answer::Speaker;
use crate::{
    failure::{Failure, OrInput as _, Outcome},
    model::Model,
};

/// Public-domain prose, for long prompts and for statistics.
pub(crate) const PASSAGE: &str = include_str!("../../data/passage.txt");

/// Continuations that nothing is unsure of.
const LISTS: [&str; 4] = [
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "A, B, C, D, E, F, G, H,",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    "one two three four five six one two three four five six one two three",
];
/// Questions with short answers.
const CHATS: [&str; 4] = [
    "What is the capital of France?",
    "Who are you?",
    "What is 7 plus 5?",
    "Hello!",
];
/// Questions with long answers, the best first; a model that cannot go on in prose may
/// still count.
const FREE_FORM: [&str; 3] = [
    "Why is the sky blue?",
    "Tell me a story about a fox and a crow.",
    "Count from 1 to 60.",
];

/// Tokens of a list's continuation.
const LIST_TOKENS: usize = 24;
/// Tokens within which a chat has to stop.
const CHAT_TOKENS: usize = 64;
/// Tokens of a free-form answer at most, and at least.
const FREE_TOKENS: (usize, usize) = (128, 100);
/// Lengths of the long prompt, past a context bucket of 256, and tokens after it.
const LONG_PROMPTS: [usize; 2] = [330, 345];
const LONG_TOKENS: usize = 16;

/// A prompt to try.
#[derive(Clone)]
pub(crate) struct Prompt {
    /// Name of its case.
    pub(crate) name: String,
    pub(crate) kind: CaseKind,
    pub(crate) ids: Vec<u32>,
    pub(crate) text: Option<String>,
    /// Tokens of the answer at most.
    pub(crate) tokens: usize,
}

/// A prompt with its answer.
pub(crate) struct Tried {
    pub(crate) prompt: Prompt,
    pub(crate) case: Case,
}

/// The oracle with what makes it fast and what it says in words.
pub(crate) struct Maker<'m> {
    pub(crate) source: &'m Model,
    pub(crate) oracle: &'m Oracle<'m>,
    /// Drafts answers.
    pub(crate) engine: &'m mut Engine,
    pub(crate) speaker: &'m Speaker,
    /// BLAKE3 of the reference's files.
    pub(crate) digest: Option<String>,
    pub(crate) revision: Option<String>,
}

impl Prompt {
    /// The text raw, with a beginning of sequence (where that is another thing) and
    /// as a chat (where there is a template).
    pub(crate) fn styles(
        speaker: &Speaker,
        (name, kind): (&str, CaseKind),
        text: &str,
        tokens: usize,
    ) -> Outcome<Vec<Prompt>> {
        let raw = speaker.encode(text, AddSpecial::No)?;
        let begun = speaker.encode(text, AddSpecial::Yes)?;
        let make = |style: &str, ids, text: String| Prompt {
            name: format!("{name} ({style})"),
            kind,
            ids,
            text: Some(text),
            tokens,
        };
        let mut out = Vec::new();
        if begun != raw {
            out.push(make("begun", begun, text.into()));
        }
        if !raw.is_empty() {
            out.push(make("raw", raw, text.into()));
        }
        out.extend(Prompt::chat(speaker, (name, kind), text, tokens)?);
        Ok(out)
    }

    /// A question to the model; none without a template.
    pub(crate) fn chat(
        speaker: &Speaker,
        (name, kind): (&str, CaseKind),
        text: &str,
        tokens: usize,
    ) -> Outcome<Option<Prompt>> {
        if speaker.require_template().is_err() {
            return Ok(None);
        }
        let (text, ids) = speaker.render(&[Message::new("user", text)], Some(false))?;
        Ok(Some(Prompt {
            name: format!("{name} (chat)"),
            kind,
            ids,
            text: Some(text),
            tokens,
        }))
    }
}

/// Everything that the standard set is chosen from.
pub(crate) fn candidates(speaker: &Speaker, capacity: usize) -> Outcome<Vec<Prompt>> {
    let mut out = Vec::new();
    for (i, text) in LISTS.iter().enumerate() {
        let name = (&*format!("list {i}"), CaseKind::List);
        out.extend(Prompt::styles(speaker, name, text, LIST_TOKENS)?);
    }
    for (i, text) in CHATS.iter().enumerate() {
        let name = (&*format!("turn {i}"), CaseKind::Chat);
        out.extend(Prompt::chat(speaker, name, text, CHAT_TOKENS)?);
    }
    for (i, text) in FREE_FORM.iter().enumerate() {
        let name = (&*format!("free {i}"), CaseKind::FreeForm);
        let chat = Prompt::chat(speaker, name, text, FREE_TOKENS.0)?;
        let styles = || Prompt::styles(speaker, name, text, FREE_TOKENS.0);
        out.extend(match chat {
            Some(prompt) => vec![prompt],
            None => styles()?,
        });
    }
    let passage = speaker.encode(PASSAGE, AddSpecial::No)?;
    for tokens in LONG_PROMPTS {
        if let Some(ids) = passage.get(..tokens) {
            out.push(Prompt {
                name: format!("long {tokens}"),
                kind: CaseKind::Long,
                ids: ids.to_vec(),
                text: None,
                tokens: LONG_TOKENS,
            });
        }
    }
    out.retain(|p| p.ids.len() + p.tokens < capacity);
    Ok(out)
}

/// Of each kind the prompt that judges best: the largest smallest margin, of lists
/// among the whole ones, of chats among those that stop; of free-form answers the first
/// that is long enough.
pub(crate) fn choose(tried: Vec<Tried>) -> Vec<Case> {
    let worth = |case: &Case| match case.kind {
        CaseKind::Chat if !case.must_stop => f64::NEG_INFINITY,
        CaseKind::FreeForm => case.steps.len().min(FREE_TOKENS.1) as f64,
        CaseKind::List => case.steps.len() as f64 + case.min_margin(),
        _ => case.min_margin(),
    };
    let mut best: Vec<Case> = Vec::new();
    for kind in [
        CaseKind::List,
        CaseKind::Chat,
        CaseKind::Long,
        CaseKind::FreeForm,
    ] {
        // Of equals the last counts, so the order is turned.
        let of_kind = tried
            .iter()
            .rev()
            .map(|t| &t.case)
            .filter(|c| c.kind == kind);
        let found = of_kind.max_by(|a, b| worth(a).total_cmp(&worth(b)));
        best.extend(found.filter(|c| worth(c).is_finite()).cloned());
    }
    best
}

impl Maker<'_> {
    /// The standard set.
    pub(crate) fn standard(&mut self, name: &str) -> Outcome<Fixture> {
        let prompts = candidates(self.speaker, self.oracle.capacity())?;
        let mut cases = choose(self.answers(prompts)?);
        cases.extend(self.probes()?);
        self.fixture(name, cases)
    }

    /// A fixture of cases, whose steps below the floor are declared.
    pub(crate) fn fixture(&self, name: &str, mut cases: Vec<Case>) -> Outcome<Fixture> {
        for case in &mut cases {
            case.declare_knife_edges(MARGIN_FLOOR);
        }
        let text = &self.source.text;
        let declared = SourceDeclarations::of(&self.source.spec, text, String::new());
        let reference = Reference {
            oracle: OracleKind::Own,
            dtype: "f32".into(),
            model: self.source.name.clone(),
            revision_honoured: self.revision.is_some() && self.digest.is_some(),
            digest: self.digest.clone(),
            revision: self.revision.clone(),
            template_digest: declared.chat_template,
            vocab_size: self.source.spec.vocab_size,
            capacity: self.oracle.capacity(),
        };
        Ok(Fixture::new(
            name,
            reference,
            self.speaker.stop_ids(),
            cases,
        ))
    }

    /// The oracle's answers to prompts.
    pub(crate) fn answers(&mut self, prompts: Vec<Prompt>) -> Outcome<Vec<Tried>> {
        let questions: Vec<Question> = prompts
            .iter()
            .map(|p| Question {
                ids: p.ids.clone(),
                max_new_tokens: p.tokens,
            })
            .collect();
        let stops = self.speaker.stop_ids();
        let (engine, capacity) = (&mut *self.engine, self.oracle.capacity());
        // One sequence per prompt, which keeps what the next draft begins with.
        let mut open: Vec<Option<Sequence>> = questions.iter().map(|_| None).collect();
        let answers = answer(self.oracle, &questions, stops, &mut |i, ids, tokens| {
            let mut sequence = match open[i].take() {
                Some(sequence) => sequence,
                None => engine.open(capacity)?,
            };
            let options = GenerateOptions {
                max_new_tokens: tokens,
                stop_ids: stops.clone(),
                ..GenerateOptions::default()
            };
            let go_on = &mut |_| ControlFlow::Continue(());
            let drafted = match engine.generate(&mut sequence, ids, &options, go_on) {
                Ok(generation) => generation.ids,
                // A drafter that is broken drafts nothing; it is not judged here.
                Err(EngineError::NotANumber { .. }) => vec![],
                Err(error) => return Err(error.into()),
            };
            open[i] = Some(sequence);
            Ok(drafted)
        })?;
        for sequence in open.into_iter().flatten() {
            engine.close(sequence);
        }
        let tried = prompts
            .into_iter()
            .zip(answers)
            .filter(|(_, s)| !s.is_empty());
        tried
            .map(|(prompt, steps)| {
                let stopped = steps.last().is_some_and(|s| stops.contains(&s.id));
                let case = self.case(&prompt, steps, stopped)?;
                Ok(Tried { prompt, case })
            })
            .collect()
    }

    fn case(&self, prompt: &Prompt, steps: Vec<Step>, must_stop: bool) -> Outcome<Case> {
        let ids: Vec<u32> = steps.iter().map(Step::next).collect();
        let text = self.speaker.tokenizer.decode(&ids, false).or_input()?;
        Ok(Case {
            name: prompt.name.clone(),
            kind: prompt.kind,
            prompt_ids: prompt.ids.clone(),
            prompt: prompt.text.clone(),
            answer: Some(text),
            must_stop,
            steps,
            knife_edges: vec![],
        })
    }

    /// Given tokens whose likeliest followers are ids that answers seldom reach: a
    /// whole conversation with the marks of its turns (or the passage), and
    /// repetitions from all over the vocabulary.
    fn probes(&self) -> Outcome<Vec<Case>> {
        let text = match self.speaker.require_template() {
            Ok(template) => {
                let messages = [
                    Message::new("user", CHATS[0]),
                    Message::new("assistant", "The capital of France is Paris."),
                    Message::new("user", CHATS[2]),
                    Message::new("assistant", "7 plus 5 is 12."),
                ];
                let input = carat_text::RenderInput {
                    messages: &messages,
                    enable_thinking: Some(false),
                    ..carat_text::RenderInput::default()
                };
                // A template may refuse a conversation that ends with an answer.
                template.render(&input).ok()
            }
            Err(_) => None,
        };
        let text = text.unwrap_or_else(|| PASSAGE.chars().take(400).collect());
        let vocab = self.source.spec.vocab_size;
        let mut given = vec![self.speaker.encode(&text, AddSpecial::No)?];
        given.extend((1..=8).map(|part| repetition(vocab, part)));
        for ids in &mut given {
            ids.truncate(self.oracle.capacity());
        }
        if given.iter().any(|ids| ids.len() < 2) {
            return Ok(vec![]);
        }
        let mut out = Vec::new();
        for (i, steps) in follow(self.oracle, &given)?.into_iter().enumerate() {
            let prompt = Prompt {
                name: format!("probe {i}"),
                kind: CaseKind::Probe,
                ids: given[i][..1].to_vec(),
                text: None,
                tokens: 0,
            };
            let case = self.case(&prompt, steps, false)?;
            // A repetition that the model does not take up probes nothing.
            let reached = |s: &&Step| i == 0 || s.id as usize * 8 / vocab == i - 1;
            let mut reached = case.steps.iter().filter(reached);
            if reached.any(|s| s.is_clear(MARGIN_FLOOR)) {
                out.push(case);
            }
        }
        Ok(out)
    }
}

/// Two tokens in turn, from the upper end of an eighth (1 to 8) of the vocabulary:
/// models that know how to copy are sure of such ids.
fn repetition(vocab: usize, part: usize) -> Vec<u32> {
    const TIMES: usize = 6;
    let end = (vocab * part / 8) as u32;
    [end.saturating_sub(3), end.saturating_sub(10)].repeat(TIMES)
}

/// Refuses a set of which some prompt has a step below the floor.
pub(crate) fn require_clear(cases: &[Case]) -> Outcome<()> {
    let weak: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            let bare = Case {
                knife_edges: vec![],
                ..case.clone()
            };
            bare.weakness(MARGIN_FLOOR)
        })
        .collect();
    if weak.is_empty() {
        return Ok(());
    }
    Err(Failure::refused(anyhow::anyhow!("{}", weak.join("\n")))
        .hint("leave --strict out to declare such steps knife-edges, or try other prompts"))
}
