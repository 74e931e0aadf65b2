//! What `run`, `chat` and `demo` share: from messages to a streamed answer.

use std::{collections::BTreeSet, ops::ControlFlow};

use carat_engine::{Engine, GenerateOptions, Generation, SamplingOptions, Sequence, StopReason};
use carat_text::{
    AddSpecial, ChatTemplate, Message, RenderInput, ReplyOptions, StopSet, StreamDecoder,
    THINKING_MIN_CAP, TextError, Tokenizer, generation_cap, is_instruct, parse_reply_with,
};
use serde_json::{Value, json};

use crate::{
    args::{AnswerOptions, SamplingArgs},
    failure::{Failure, OrInput as _, Outcome},
    interrupt,
    model::Model,
    output,
    progress::Bar,
};

/// Text sides of a model, loaded once.
pub(crate) struct Speaker {
    pub(crate) tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// Said where a chat is asked for and there is no template.
    missing: TextError,
    pub(crate) stops: StopSet,
    pub(crate) thinks: bool,
    vocab: usize,
}

impl Speaker {
    pub(crate) fn new(model: &Model) -> Outcome<Speaker> {
        let tokenizer = Tokenizer::from_assets(&model.text)?;
        let template = ChatTemplate::from_assets(&model.text).or_input()?;
        let missing = TextError::MissingTemplate {
            name: Some(model.name.clone()),
            instruct: is_instruct(&model.text, Some(&model.name)),
        };
        let stops = StopSet::from_assets(&tokenizer, &model.text);
        let thinks = carat_text::is_thinking_model(&model.text);
        Ok(Speaker {
            tokenizer,
            template,
            missing,
            stops,
            thinks,
            vocab: model.spec.vocab_size,
        })
    }

    /// The chat template, or the error that says why there is no chat.
    pub(crate) fn require_template(&self) -> Outcome<&ChatTemplate> {
        self.template.as_ref().ok_or_else(|| {
            Failure::input(anyhow::anyhow!("{}", self.missing))
                .hint("use --raw to continue text as it is, or a model with a chat template")
        })
    }

    /// Text and ids of a conversation that asks for an answer.
    pub(crate) fn render(
        &self,
        messages: &[Message],
        think: Option<bool>,
    ) -> Outcome<(String, Vec<u32>)> {
        let text = self
            .require_template()?
            .render(&RenderInput {
                messages,
                add_generation_prompt: true,
                enable_thinking: think,
                ..RenderInput::default()
            })
            .or_input()?;
        // The template writes its own beginning-of-sequence token.
        let ids = self.encode(&text, AddSpecial::No)?;
        Ok((text, ids))
    }

    /// Ids of text, checked against the model's vocabulary.
    pub(crate) fn encode(&self, text: &str, special: AddSpecial) -> Outcome<Vec<u32>> {
        let ids = self.tokenizer.encode(text, special).or_input()?;
        match ids.iter().find(|id| **id as usize >= self.vocab) {
            None => Ok(ids),
            Some(id) => Err(Failure::input(anyhow::anyhow!(
                "the text has token {id}, outside the model's vocabulary of {}",
                self.vocab
            ))),
        }
    }

    /// Whether a prompt ends inside an open thinking block.
    fn opens_thinking(&self, prompt: &[u32]) -> Outcome<bool> {
        let tail = &prompt[prompt.len().saturating_sub(16)..];
        Ok(ChatTemplate::opens_thinking(
            &self.tokenizer.decode(tail, false).or_input()?,
        ))
    }

    pub(crate) fn stop_ids(&self) -> &BTreeSet<u32> {
        self.stops.ids()
    }
}

/// Sampling for text: what the user says, else what the checkpoint recommends,
/// else greedy.
pub(crate) fn sampling(model: &Model, args: &SamplingArgs) -> SamplingOptions {
    let defaults = &model.text.config.sampling;
    let mut out = super::generate::sampling(args);
    let draws = defaults.do_sample.unwrap_or(false);
    if draws && args.temperature.is_none() {
        out.temperature = defaults.temperature.unwrap_or(1.0);
    }
    if !out.is_greedy() && draws {
        out.top_k = args
            .top_k
            .or(defaults.top_k.map(|k| k as usize))
            .unwrap_or(out.top_k);
        out.top_p = args.top_p.or(defaults.top_p).unwrap_or(out.top_p);
        out.min_p = args.min_p.or(defaults.min_p).unwrap_or(out.min_p);
    }
    out.repetition_penalty = args
        .repetition_penalty
        .or(defaults.repetition_penalty)
        .unwrap_or(out.repetition_penalty);
    if !out.is_greedy() && args.seed.is_none() {
        // A different answer each time is what drawing is for.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        out.seed = now.map_or(0, |d| d.as_nanos() as u64);
    }
    out
}

/// New tokens an answer may have: as asked, else room for a long answer, and for
/// a model that is going to think no less than thinking takes. What is asked for
/// is an upper bound and is kept, however little it is ([`warn_of_short_answers`]);
/// an answer that it cuts off says so.
fn cap(asked: Option<usize>, thinks: bool, room: usize) -> usize {
    const DEFAULT: usize = 1024;
    asked
        .unwrap_or_else(|| generation_cap(DEFAULT, thinks))
        .min(room)
}

/// Says once that the tokens asked for are fewer than thinking may take.
pub(crate) fn warn_of_short_answers(speaker: &Speaker, options: &AnswerOptions) {
    if let Some(asked) = options.max_new_tokens
        && speaker.thinks
        && !options.no_think
        && asked < THINKING_MIN_CAP
    {
        output::note(&format!(
            "note: with --max-new-tokens {asked} an answer may end while the model still thinks \
             (it is given {THINKING_MIN_CAP} if nothing is said; --no-think asks for none)"
        ));
    }
}

/// Holds back text that may be the beginning of a stop text.
pub(crate) struct StopWatch {
    stops: StopSet,
    held: String,
    stopped: bool,
}

impl StopWatch {
    /// Watches for the set's stop texts and for `more`.
    pub(crate) fn new(mut stops: StopSet, more: &[String]) -> Self {
        for text in more {
            stops.add_string(text);
        }
        StopWatch {
            stops,
            held: String::new(),
            stopped: false,
        }
    }

    /// Whether a stop text has appeared.
    pub(crate) fn stopped(&self) -> bool {
        self.stopped
    }

    /// Takes a piece, gives what may be shown: everything before a stop text,
    /// and nothing that could still become one.
    pub(crate) fn pass(&mut self, piece: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(piece);
        if let Some(at) = self.stops.find_string(&self.held) {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self.stops.held_back(&self.held);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back when the answer ended without a stop text.
    pub(crate) fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Text of an answer as its ids come, up to a stop text.
pub(crate) struct TextStream<'t> {
    decoder: StreamDecoder<'t>,
    watch: StopWatch,
    text: String,
}

impl<'t> TextStream<'t> {
    /// Ends at the set's stop texts and at `more`.
    pub(crate) fn new(decoder: StreamDecoder<'t>, stops: StopSet, more: &[String]) -> Self {
        TextStream {
            decoder,
            watch: StopWatch::new(stops, more),
            text: String::new(),
        }
    }

    /// Takes an id, gives what may be shown now.
    pub(crate) fn push(&mut self, id: u32) -> Result<String, TextError> {
        let piece = self.decoder.push(id)?.unwrap_or_default();
        let shown = self.watch.pass(&piece);
        self.text.push_str(&shown);
        Ok(shown)
    }

    /// Ends the answer, gives what was held back.
    pub(crate) fn finish(&mut self) -> Result<String, TextError> {
        let tail = self.decoder.flush()?.unwrap_or_default();
        let mut shown = self.watch.pass(&tail);
        shown.push_str(&self.watch.rest());
        self.text.push_str(&shown);
        Ok(shown)
    }

    /// Whether a stop text has appeared.
    pub(crate) fn stopped(&self) -> bool {
        self.watch.stopped()
    }

    /// All text so far.
    pub(crate) fn into_text(self) -> String {
        self.text
    }
}

/// A finished answer.
pub(crate) struct Answer {
    pub(crate) text: String,
    /// The prompt ended inside an open thinking block.
    thinking_open: bool,
    pub(crate) generation: Generation,
    pub(crate) interrupted: bool,
}

impl Answer {
    /// Thinking, content and tool calls.
    pub(crate) fn reply(&self) -> carat_text::Reply {
        let options = ReplyOptions {
            thinking_open: self.thinking_open,
            bare_json_calls: false,
        };
        parse_reply_with(&self.text, &options)
    }
}

pub(crate) fn go_on(yes: bool) -> ControlFlow<()> {
    if yes {
        ControlFlow::Continue(())
    } else {
        ControlFlow::Break(())
    }
}

/// Streams an answer to standard output (unless `quiet`).
pub(crate) fn stream(
    engine: &mut Engine,
    sequence: &mut Sequence,
    speaker: &Speaker,
    prompt: &[u32],
    options: &GenerateOptions,
    stop_texts: &[String],
    quiet: bool,
) -> Outcome<Answer> {
    let thinking_open = speaker.opens_thinking(prompt)?;
    let decoder = StreamDecoder::for_reply(&speaker.tokenizer);
    let mut text = TextStream::new(decoder, speaker.stops.clone(), stop_texts);
    let show = |piece: &str| match quiet || piece.is_empty() {
        true => Ok(()),
        false => output::piece(piece),
    };
    let bar = Bar::new();
    bar.start("reading the prompt", Some(prompt.len() as u64), false);
    let mut read = |done: usize| {
        bar.set(done as u64);
        if done == prompt.len() {
            bar.finish();
        }
        go_on(!interrupt::pressed())
    };
    let mut failed: anyhow::Result<()> = Ok(());
    let mut generation =
        engine.generate_with(sequence, prompt, options, &mut read, &mut |emitted| {
            if !emitted.is_stop {
                failed = text
                    .push(emitted.id)
                    .map_err(anyhow::Error::from)
                    .and_then(|piece| Ok(show(&piece)?));
            }
            go_on(failed.is_ok() && !text.stopped() && !interrupt::pressed())
        })?;
    failed.or_input()?;
    show(&text.finish()?).or_input()?;
    if text.stopped() && generation.stop_reason == StopReason::Length {
        // Its last piece was only certain at the end.
        generation.stop_reason = StopReason::Stop;
    }
    let interrupted = interrupt::pressed();
    interrupt::clear();
    Ok(Answer {
        text: text.into_text(),
        thinking_open,
        generation,
        interrupted,
    })
}

/// The footer under an answer.
pub(crate) fn footer(answer: &Answer, thinks: bool) -> String {
    let g = &answer.generation;
    let reused = match g.reused_tokens {
        0 => String::new(),
        n => format!(" ({n} reused)"),
    };
    let mut line = format!(
        "[{} prompt tokens{reused}, {:.1} tok/s · {} new tokens, {:.1} tok/s]",
        g.prompt_tokens,
        g.prompt_tps(),
        g.ids.len(),
        g.decode_tps()
    );
    if answer.interrupted {
        line.push_str(" interrupted");
    } else if g.stop_reason == StopReason::Length {
        line.push_str(" cut off at the token limit");
        let reply = answer.reply();
        if thinks && reply.thinking_truncated {
            line.push_str(" while thinking: there is no answer yet (raise --max-new-tokens)");
        }
    }
    line
}

/// The machine-readable form of an answer.
pub(crate) fn answer_json(answer: &Answer) -> Value {
    let reply = answer.reply();
    let g = &answer.generation;
    json!({
        "schema": "carat.answer",
        "version": 1,
        "text": answer.text,
        "content": reply.content,
        "thinking": reply.thinking,
        "thinking_truncated": reply.thinking_truncated,
        "tool_calls": reply
            .tool_calls
            .iter()
            .map(|c| json!({ "name": c.name, "arguments": c.arguments }))
            .collect::<Vec<_>>(),
        "ids": g.ids,
        "stop_reason": g.stop_reason,
        "interrupted": answer.interrupted,
        "prompt_tokens": g.prompt_tokens,
        "reused_tokens": g.reused_tokens,
        "prompt_tps": g.prompt_tps(),
        "decode_tps": g.decode_tps(),
        "ttft_ns": g.timings.first_token.as_nanos() as u64,
    })
}

/// Whether thinking is asked for: `--no-think` says no, else the template decides.
pub(crate) fn thinking(options: &AnswerOptions) -> Option<bool> {
    options.no_think.then_some(false)
}

/// Generation options of the answering commands.
pub(crate) fn generate_options(
    model: &Model,
    speaker: &Speaker,
    options: &AnswerOptions,
    prompt: usize,
    capacity: usize,
) -> GenerateOptions {
    let thinks = speaker.thinks && !options.no_think;
    GenerateOptions {
        max_new_tokens: cap(
            options.max_new_tokens,
            thinks,
            capacity.saturating_sub(prompt),
        ),
        stop_ids: speaker.stop_ids().clone(),
        sampling: sampling(model, &options.sampling),
        ..GenerateOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::{StopSet, StopWatch, cap};

    #[test]
    fn thinking_gets_its_room_unless_less_is_asked_for() {
        assert_eq!(cap(None, true, 100_000), 4096);
        assert_eq!(cap(None, false, 100_000), 1024);
        assert_eq!(cap(Some(256), true, 100_000), 256);
        assert_eq!(cap(Some(9000), true, 100_000), 9000);
        assert_eq!(cap(None, true, 1000), 1000, "the context is the limit");
    }

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<_> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut watch = StopWatch::new(StopSet::default(), &stops);
        let mut shown: String = pieces.iter().map(|p| watch.pass(p)).collect();
        shown.push_str(&watch.rest());
        (shown, watch.stopped())
    }

    #[test]
    fn a_stop_text_is_never_shown_however_it_is_cut() {
        for pieces in [
            vec!["abc<end>def"],
            vec!["abc<", "en", "d>", "def"],
            vec!["abc<end", ">"],
        ] {
            assert_eq!(run(&["<end>"], &pieces), ("abc".into(), true), "{pieces:?}");
        }
        assert_eq!(run(&["<end>"], &["abc<en", "x"]), ("abc<enx".into(), false));
        assert_eq!(run(&["<end>"], &["abc<en"]), ("abc<en".into(), false));
        assert_eq!(
            run(&["b", "ab"], &["xab"]),
            ("x".into(), true),
            "the earliest wins"
        );
        assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), true));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), false));
    }
}
