//! What weights are judged on without a bundle: the checkpoint, its oracle, answers and
//! a text.

use std::path::Path;

use carat_bundle::spec::ModelSpec;
use carat_engine::EngineOptions;
use carat_fidelity::Fixture;
use carat_oracle::{Oracle, OracleOptions};
use carat_text::AddSpecial;

use super::{
    answer::Speaker,
    fixture::{Origin, TOKENS_AT_ONCE, same_source},
    standard::{Maker, PASSAGE},
};
use crate::{
    args::ModelOptions,
    failure::{Failure, Outcome},
    memory::{Needs, Request},
    model::{Model, check_options, content_digest, threads},
};

/// Tokens of text that statistics are made of.
const TEXT_TOKENS: usize = 384;
/// Largest file of text: its first page is what is asked.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// A checkpoint, and what it is asked.
pub(crate) struct Ground<'g> {
    options: &'g ModelOptions,
    /// The checkpoint as it is.
    pub(crate) source: Model,
    /// Where it comes from.
    pub(crate) origin: Origin,
    /// Tokens of the longest sequence.
    pub(crate) capacity: usize,
    fixture: Option<Fixture>,
    speaker: Option<Speaker>,
}

impl<'g> Ground<'g> {
    /// Opens a checkpoint and the fixture that was given.
    pub(crate) fn open(options: &'g ModelOptions, fixture: Option<&Path>) -> Outcome<Ground<'g>> {
        check_options(options)?;
        let source = Model::open(&options.model, &options.source, true)?;
        let Some(checkpoint) = source.checkpoint() else {
            return Err(Failure::input(anyhow::anyhow!(
                "{} is a bundle: what a recipe does is known from the checkpoint",
                options.model
            ))
            .hint("give the checkpoint that the bundle was made from"));
        };
        let origin = Origin {
            digest: Some(content_digest(&checkpoint.origin.path)?),
            revision: checkpoint.origin.revision.clone(),
            own: false,
        };
        let fixture = fixture.map(Fixture::read).transpose()?;
        if let Some(fixture) = &fixture {
            same_source(fixture, &origin, &options.model)?;
        }
        let has_text = source.text.tokenizer_json.is_some();
        let speaker = has_text.then(|| Speaker::new(&source)).transpose()?;
        let capacity = match &fixture {
            Some(fixture) => fixture.reference.capacity,
            None => source.context(options),
        };
        Ok(Ground {
            options,
            source,
            origin,
            capacity,
            fixture,
            speaker,
        })
    }

    /// How oracles work here.
    pub(crate) fn oracle_options(&self) -> Outcome<OracleOptions> {
        let options = OracleOptions::new(self.capacity);
        Ok(OracleOptions {
            threads: match self.options.threads {
                None => options.threads,
                asked => threads(asked)?,
            },
            ..options
        })
    }

    /// The reference, beside which `rows` rows of log-probabilities are kept.
    pub(crate) fn reference(&self, rows: usize) -> Outcome<Oracle<'_>> {
        self.source
            .oracle(self.options, self.capacity, TOKENS_AT_ONCE, rows)
    }

    /// Refuses another oracle on weights of `spec`, if it does not fit.
    pub(crate) fn require(&self, spec: &ModelSpec) -> Outcome<()> {
        let options = self.oracle_options()?;
        Needs::of_oracle(spec, &options, TOKENS_AT_ONCE, 0).require(TOKENS_AT_ONCE, 0)
    }

    /// The fixture that was given, or the standard set, drafted by the engine.
    pub(crate) fn fixture(&self, oracle: &Oracle<'_>) -> Outcome<Fixture> {
        if let Some(fixture) = &self.fixture {
            return Ok(fixture.clone());
        }
        let Some(speaker) = &self.speaker else {
            return Err(Failure::input(anyhow::anyhow!(
                "{}: without a tokenizer there are no standard prompts",
                self.options.model
            ))
            .hint("--fixture names a file of answers"));
        };
        let drafter = Model::for_engine(self.options)?;
        let capacity = oracle.capacity();
        let tokens = capacity.min(TOKENS_AT_ONCE);
        let request = Request::new(tokens, capacity, EngineOptions::DEFAULT_CHUNK);
        let mut maker = Maker {
            source: &self.source,
            oracle,
            engine: &mut drafter.engine(self.options, &request)?,
            speaker,
            digest: self.origin.digest.clone(),
            revision: self.origin.revision.clone(),
        };
        maker.standard("standard")
    }

    /// Whether a fixture was given.
    pub(crate) fn given_fixture(&self) -> Option<&Fixture> {
        self.fixture.as_ref()
    }

    /// Ids of a text, or of the passage that ships with carat; none without a tokenizer.
    pub(crate) fn text(&self, file: Option<&Path>) -> Outcome<Vec<u32>> {
        match &self.speaker {
            Some(speaker) => text_ids(speaker, file, self.capacity),
            None if file.is_none() => Ok(vec![]),
            None => Err(Failure::input(anyhow::anyhow!(
                "--text: {} has no tokenizer",
                self.options.model
            ))),
        }
    }
}

/// Ids of the first tokens of a text, or of the passage that ships with carat.
pub(crate) fn text_ids(
    speaker: &Speaker,
    file: Option<&Path>,
    capacity: usize,
) -> Outcome<Vec<u32>> {
    let text = match file {
        None => PASSAGE.to_owned(),
        Some(path) => read_text(path)?,
    };
    let mut ids = speaker.encode(&text, AddSpecial::Yes)?;
    ids.truncate(TEXT_TOKENS.min(capacity));
    Ok(ids)
}

fn read_text(path: &Path) -> Outcome<String> {
    let wrong = |problem: String| {
        Failure::input(anyhow::anyhow!("cannot read {}: {problem}", path.display()))
    };
    let length = std::fs::metadata(path)
        .map_err(|e| wrong(e.to_string()))?
        .len();
    if length > MAX_TEXT_BYTES {
        return Err(wrong(format!(
            "{length} bytes, expected at most {MAX_TEXT_BYTES}"
        )));
    }
    std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))
}
