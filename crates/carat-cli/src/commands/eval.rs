//! `carat eval`.

use std::{ops::ControlFlow, process::ExitCode};

use carat_bundle::declare::SourceDeclarations;
use carat_engine::{Engine, EngineOptions, GenerateOptions, Sequence, StopReason};
use carat_fidelity::eval::{
    EVAL_SCHEMA, EVAL_VERSION, Header, Item, Outcome as Scored, Protocol, Question, Results, Task,
    compare, read_questions, score_choice, score_number,
};
use carat_text::{AddSpecial, Message};
use serde_json::{Value, json};

use super::answer::Speaker;
use crate::{
    args::{self, TaskKind},
    failure::{Failure, OrInput as _, Outcome},
    interrupt,
    memory::Request,
    model::Model,
    output,
    progress::Bar,
};

/// Tokens that the longest choice question may have.
const CHOICE_TOKENS: usize = 4096;

pub(crate) fn run(args: &args::Eval) -> Outcome {
    let task = match args.task {
        TaskKind::Gsm8k => Task::Gsm8k,
        TaskKind::Arithmetic => Task::Arithmetic,
        TaskKind::Choice => Task::Choice,
        TaskKind::LastWord => Task::LastWord,
    };
    let limit = args.limit.unwrap_or(usize::MAX);
    let mut questions = Vec::new();
    for (i, path) in args.data.iter().enumerate() {
        if i == 0 || questions.len() < limit {
            questions.extend(read_questions(path, task, limit - questions.len())?);
        }
    }
    let model = Model::for_engine(&args.model)?;
    let speaker = Speaker::new(&model)?;
    let generates = task.max_new_tokens() > 0;
    let capacity = model.context(&args.model);
    let tokens = capacity.min(CHOICE_TOKENS);
    let request = Request {
        all_rows: !generates,
        ..Request::new(tokens, capacity, EngineOptions::DEFAULT_CHUNK)
    };
    let mut engine = model.engine(&args.model, &request)?;
    let header = header(args, &model, &speaker, &engine, (task, &questions))?;
    let mut results = Results::resume(&args.out, header)?;
    let done = results.items.len();
    if done > 0 {
        output::note(&format!("{done} of {} answered before", questions.len()));
    }

    let bar = Bar::new();
    bar.start("asking", Some(questions.len() as u64), false);
    interrupt::listen();
    interrupt::clear();
    let mut asker = Asker {
        task,
        speaker: &speaker,
        sequence: Some(engine.open(capacity)?),
        capacity,
    };
    for (index, question) in questions.iter().enumerate() {
        if results.has(index) {
            continue;
        }
        if interrupt::pressed() {
            break;
        }
        let item = asker.ask(&mut engine, index, question)?;
        results.push(item)?;
        bar.set(results.items.len() as u64);
    }
    bar.finish();
    report(args, &results)
}

fn header(
    args: &args::Eval,
    model: &Model,
    speaker: &Speaker,
    engine: &Engine,
    (task, questions): (Task, &[Question]),
) -> Outcome<Header> {
    let digest = |text: &str| carat_fidelity::eval::text_digest(text);
    let generates = task.max_new_tokens() > 0;
    let declared = SourceDeclarations::of(&model.spec, &model.text, String::new());
    if generates && task == Task::Gsm8k {
        speaker.require_template()?;
    }
    let protocol = Protocol {
        task,
        n: questions.len(),
        data_digest: digest(&format!("{questions:?}")),
        instruction_digest: digest(task.instruction()),
        template_digest: declared.chat_template.filter(|_| generates),
        thinking: false,
        max_new_tokens: task.max_new_tokens(),
        temperature: 0.0,
        stop_ids: match generates {
            true => speaker.stop_ids().iter().copied().collect(),
            false => vec![],
        },
    };
    Ok(Header {
        schema: EVAL_SCHEMA.into(),
        version: EVAL_VERSION,
        protocol_digest: protocol.digest(),
        protocol,
        model: model.name.clone(),
        bundle_digest: model.bundle().map(|b| b.digest().to_owned()),
        backend: engine.backend().describe(),
        activation: format!("{:?}", model.cpu_options(&args.model)?.precision).to_lowercase(),
    })
}

struct Asker<'a> {
    task: Task,
    speaker: &'a Speaker,
    /// One for all questions: what prompts begin alike is not run again.
    sequence: Option<Sequence>,
    capacity: usize,
}

impl Asker<'_> {
    fn ask(&mut self, engine: &mut Engine, index: usize, question: &Question) -> Outcome<Item> {
        match question {
            Question::Number { text, gold } => self.number(engine, index, (text, gold)),
            Question::Choice { choices, gold } => self.choice(engine, index, (choices, *gold)),
        }
    }

    fn number(
        &mut self,
        engine: &mut Engine,
        index: usize,
        (text, gold): (&str, &str),
    ) -> Outcome<Item> {
        let prompt = format!("{text}{}", self.task.instruction());
        let (_, ids) = self
            .speaker
            .render(&[Message::new("user", prompt)], Some(false))?;
        let options = GenerateOptions {
            max_new_tokens: self.task.max_new_tokens(),
            stop_ids: self.speaker.stop_ids().clone(),
            ..GenerateOptions::default()
        };
        let mut sequence = match self.sequence.take() {
            Some(sequence) => sequence,
            None => engine.open(self.capacity)?,
        };
        let go_on = &mut |_| ControlFlow::Continue(());
        let answer = engine.generate(&mut sequence, &ids, &options, go_on)?;
        self.sequence = Some(sequence);
        let truncated = answer.stop_reason == StopReason::Length;
        let text = self
            .speaker
            .tokenizer
            .decode(&answer.ids, true)
            .or_input()?;
        let (outcome, predicted) = score_number(&text, gold, truncated);
        Ok(Item {
            index,
            outcome,
            predicted,
            gold: gold.into(),
            tokens: answer.ids.len(),
            text,
        })
    }

    fn choice(
        &mut self,
        engine: &mut Engine,
        index: usize,
        (choices, gold): (&[(String, String)], usize),
    ) -> Outcome<Item> {
        let mut scored = Vec::with_capacity(choices.len());
        let mut greedy = false;
        for (context, choice) in choices {
            // The boundary is where the ids part: a word may join what is before it.
            let alone = self.speaker.encode(context, AddSpecial::Yes)?;
            let whole = format!("{context}{choice}");
            let whole = self.speaker.encode(&whole, AddSpecial::Yes)?;
            let same = alone.iter().zip(&whole).take_while(|(a, b)| a == b).count();
            let at = same.clamp(1, whole.len().saturating_sub(1).max(1));
            if at >= whole.len() {
                return Err(Failure::input(anyhow::anyhow!(
                    "question {index}: a choice adds no token"
                )));
            }
            let score = engine.score(&whole[..at], &whole[at..], self.capacity)?;
            greedy = score.is_greedy;
            scored.push((score.logprob, choice.len()));
        }
        let (outcome, best) = match self.task {
            Task::LastWord if greedy => (Scored::Correct, 0),
            Task::LastWord => (Scored::Wrong, 0),
            _ => score_choice(&scored, gold),
        };
        Ok(Item {
            index,
            outcome,
            predicted: (self.task != Task::LastWord).then(|| choices[best].1.clone()),
            gold: choices[gold].1.clone(),
            tokens: 0,
            text: String::new(),
        })
    }
}

fn report(args: &args::Eval, results: &Results) -> Outcome {
    let summary = results.summary();
    let compared = match &args.compare {
        None => None,
        Some(path) => {
            let other = Results::read(path)?;
            let found = compare(results, &other).map_err(|e| {
                Failure::refused(e).hint("compare results of the same task, data and settings")
            })?;
            Some((other, found))
        }
    };
    if args.model.json {
        output::json(&json!({
            "schema": "carat.eval-report",
            "version": 1,
            "out": args.out,
            "model": results.header.model,
            "protocol": results.header.protocol,
            "protocol_digest": results.header.protocol_digest,
            "summary": summary,
            "comparison": compared.as_ref().map_or(Value::Null, |(other, c)| json!({
                "model": other.header.model,
                "summary": other.summary(),
                "pairs": c,
            })),
        }))
        .or_input()?;
    } else {
        output::line(&format!("{}: {summary}", results.header.model)).or_input()?;
        if let Some((other, c)) = &compared {
            output::line(&format!("{}: {}", other.header.model, other.summary())).or_input()?;
            output::line(&format!(
                "of {} questions {} are right in the first only, {} in the second only: p = {:.4} (McNemar)",
                c.pairs, c.first_only, c.second_only, c.p_value
            ))
            .or_input()?;
        }
    }
    if summary.missing > 0 {
        output::note(&format!(
            "{} questions are left: the same command goes on with them",
            summary.missing
        ));
    }
    Ok(ExitCode::SUCCESS)
}
