//! Errors as a person sees them.

use std::{fmt::Write as _, process::ExitCode};

/// What a failed command returns to the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// A gate failed.
    Gate = 1,
    /// The input or the command line is wrong.
    Input = 2,
    /// carat itself is wrong.
    Internal = 3,
    /// carat declines, though it could.
    Refused = 4,
}

/// An error with its exit code and, if there is one, the next step.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    error: anyhow::Error,
    hint: Option<String>,
}

/// What commands return.
pub(crate) type Outcome<T = ExitCode> = Result<T, Failure>;

impl Failure {
    /// Wrong input.
    pub(crate) fn input(error: impl Into<anyhow::Error>) -> Self {
        Failure {
            exit: Exit::Input,
            error: error.into(),
            hint: None,
        }
    }

    /// Something carat declines to do.
    pub(crate) fn refused(error: impl Into<anyhow::Error>) -> Self {
        Failure {
            exit: Exit::Refused,
            error: error.into(),
            hint: None,
        }
    }

    /// A failed check.
    pub(crate) fn gate(error: impl Into<anyhow::Error>) -> Self {
        Failure {
            exit: Exit::Gate,
            error: error.into(),
            hint: None,
        }
    }

    /// A bug.
    pub(crate) fn internal(error: impl Into<anyhow::Error>) -> Self {
        Failure {
            exit: Exit::Internal,
            error: error.into(),
            hint: None,
        }
    }

    /// Adds the next step.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the next step, where there is one.
    pub(crate) fn maybe_hint(self, hint: Option<String>) -> Self {
        match hint {
            Some(hint) => self.hint(hint),
            None => self,
        }
    }

    /// What went wrong, without its causes.
    pub(crate) fn message(&self) -> String {
        self.error.to_string()
    }

    /// The error of a measurement, if that is what failed.
    pub(crate) fn bench(&self) -> Option<&carat_bench::BenchError> {
        self.error.downcast_ref()
    }

    /// Says what failed before what went wrong.
    pub(crate) fn within(self, what: impl std::fmt::Display) -> Self {
        let error = self.error.context(what.to_string());
        Failure { error, ..self }
    }

    /// Adds the next step, unless there is one already.
    pub(crate) fn or_hint(self, hint: &str) -> Self {
        match self.hint {
            Some(_) => self,
            None => self.hint(hint),
        }
    }

    /// The lines for standard error.
    fn render(&self) -> String {
        let mut text = format!("error: {}", self.error);
        // Sources that the message already contains would only be said twice.
        let mut said = self.error.to_string();
        for cause in self.error.chain().skip(1) {
            let cause = cause.to_string();
            if !said.contains(&cause) {
                let _ = write!(text, "\ncaused by: {cause}");
            }
            said = cause;
        }
        if let Some(hint) = &self.hint {
            let _ = write!(text, "\nhint: {hint}");
        }
        text
    }

    /// The input or output error at the root, if that is what failed.
    pub(crate) fn io_kind(&self) -> Option<std::io::ErrorKind> {
        let mut causes = self.error.chain();
        causes.find_map(|cause| Some(cause.downcast_ref::<std::io::Error>()?.kind()))
    }

    /// Prints the error and gives its exit code.
    pub(crate) fn report(self) -> ExitCode {
        // A reader that went away (`carat … | head`) is not an error.
        if self.io_kind() == Some(std::io::ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        crate::output::note(&self.render());
        ExitCode::from(self.exit as u8)
    }
}

impl From<carat_bundle::BundleError> for Failure {
    fn from(error: carat_bundle::BundleError) -> Self {
        use carat_bundle::BundleError as E;
        let hint = match error {
            E::Exists { .. } => Some("choose another folder; --force replaces a bundle"),
            E::NoSpace { .. } => Some("free some space or choose another folder"),
            _ => None,
        };
        Failure::input(error).maybe_hint(hint.map(str::to_owned))
    }
}

impl From<carat_import::ImportError> for Failure {
    fn from(error: carat_import::ImportError) -> Self {
        let hint = error.hint().map(str::to_owned);
        Failure::input(error).maybe_hint(hint)
    }
}

impl From<carat_quant::QuantError> for Failure {
    fn from(error: carat_quant::QuantError) -> Self {
        Failure::input(error)
            .hint("carat recipe schema prints the keys, carat recipe show NAME an example")
    }
}

impl From<carat_text::TextError> for Failure {
    fn from(error: carat_text::TextError) -> Self {
        use carat_text::TextError as E;
        let hint = match error {
            E::MissingTokenizer => Some("a checkpoint folder needs tokenizer.json to speak text"),
            E::UnusableVocabulary { .. } => {
                Some("logits, generate and score work on token ids, without a tokenizer")
            }
            _ => None,
        };
        Failure::input(error).maybe_hint(hint.map(str::to_owned))
    }
}

/// What to do about logits that are no numbers.
const BAD_WEIGHTS: &str = "a weight may be no finite number: carat verify looks at all of them";

impl From<carat_engine::EngineError> for Failure {
    fn from(error: carat_engine::EngineError) -> Self {
        use carat_engine::EngineError as E;
        let hint = match error {
            E::Model(error) => return error.into(),
            E::PromptTooLong { .. } => Some("shorten the prompt or raise --ctx"),
            E::Schedule { .. } => Some("sizes of at least 1 with commas between, such as 64,1,16"),
            E::NotANumber { .. } => {
                return Failure::input(error).hint(BAD_WEIGHTS);
            }
            _ => None,
        };
        Failure::input(error).maybe_hint(hint.map(str::to_owned))
    }
}

impl From<carat_bench::BenchError> for Failure {
    fn from(error: carat_bench::BenchError) -> Self {
        use carat_bench::BenchError as E;
        let hint = match &error {
            E::Engine(_) => None,
            E::DebugBuild { .. } => Some("cargo build --release".to_owned()),
            E::Ungated { .. } => Some(
                "`carat gate` judges a bundle; --allow ungated measures without a verdict".into(),
            ),
            E::Disturbed { allowance, .. } => Some(format!(
                "try again on a quiet machine; --allow {} takes it as it is",
                allowance.name()
            )),
            E::NotRecovered { .. } => {
                Some("rest longer with --idle and --cap; --allow clock begins all the same".into())
            }
            E::Context { .. } => Some("ask for fewer with -p and -n".into()),
            E::Unlike { what, .. } if *what == "machines" => {
                Some("--allow machine compares them all the same".into())
            }
            E::Empty { .. } | E::TooMany { .. } => {
                Some("sizes of at least 1 with -p, -n and -r".into())
            }
            _ => None,
        };
        match error {
            E::Engine(error) => error.into(),
            E::DebugBuild { .. }
            | E::Implausible { .. }
            | E::TokenCount { .. }
            | E::Ungated { .. }
            | E::Disturbed { .. }
            | E::NotRecovered { .. }
            | E::Unlike { .. } => Failure::refused(error).maybe_hint(hint),
            _ => Failure::input(error).maybe_hint(hint),
        }
    }
}

impl From<carat_model::ModelError> for Failure {
    fn from(error: carat_model::ModelError) -> Self {
        use carat_model::ModelError as E;
        match error {
            E::OutOfMemory { .. } | E::CacheTooLong { .. } => {
                Failure::refused(error).hint("ask for less with --ctx N, or free memory")
            }
            // What a command asked of the backend and no input could have caused.
            E::Batch(_) | E::Capacity { .. } | E::Truncate { .. } => Failure::internal(error),
            _ => Failure::input(error),
        }
    }
}

impl From<carat_oracle::OracleError> for Failure {
    fn from(error: carat_oracle::OracleError) -> Self {
        use carat_oracle::OracleError as E;
        match error {
            E::NotFinite { .. } => Failure::input(error).hint(BAD_WEIGHTS),
            E::UnknownSequence { .. } | E::RepeatedSequence { .. } => Failure::internal(error),
            _ => Failure::input(error),
        }
    }
}

impl From<carat_fidelity::FidelityError> for Failure {
    fn from(error: carat_fidelity::FidelityError) -> Self {
        use carat_fidelity::FidelityError as E;
        match error {
            E::Oracle(error) => error.into(),
            E::Engine(error) => error.into(),
            E::Bundle(error) => error.into(),
            E::Malformed { .. } => {
                Failure::input(error).hint("carat fixture make, gate and scan write such files")
            }
            E::Mismatch { .. } => Failure::input(error)
                .hint("--source names the checkpoint that the model was made from"),
            _ => Failure::input(error),
        }
    }
}

/// Runs a command; a panic becomes an internal error like any other.
pub(crate) fn guard(command: impl FnOnce() -> Outcome) -> Outcome {
    use std::{
        backtrace::{Backtrace, BacktraceStatus},
        panic,
        sync::{Arc, Mutex},
    };
    let place = Arc::new(Mutex::new(None));
    let told = Arc::clone(&place);
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if let Ok(mut told) = told.lock() {
            *told = info.location().map(ToString::to_string);
        }
        // Whoever asks for one with RUST_BACKTRACE.
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            crate::output::note(&trace.to_string());
        }
    }));
    // Nothing that the command left half done is used after it.
    let result = panic::catch_unwind(panic::AssertUnwindSafe(command));
    panic::set_hook(before);
    result.unwrap_or_else(|payload| {
        let said = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("a panic without a message");
        let place = place.lock().ok().and_then(|mut p| p.take());
        let place = place.unwrap_or_else(|| "an unknown place".into());
        Err(Failure::internal(anyhow::anyhow!("{said} (at {place})"))
            .hint("this is a fault of carat: please report it with the command that showed it"))
    })
}

/// Shorthand for `map_err(Failure::input)` on any error.
pub(crate) trait OrInput<T> {
    /// The error is the input's fault.
    fn or_input(self) -> Outcome<T>;
}

impl<T, E: Into<anyhow::Error>> OrInput<T> for Result<T, E> {
    fn or_input(self) -> Outcome<T> {
        self.map_err(Failure::input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_not_said_twice_and_the_hint_is_last() {
        let root = std::io::Error::other("disk on fire");
        let error = anyhow::Error::new(root)
            .context("weights.bin: disk on fire")
            .context("cannot load");
        let failure = Failure::input(error).hint("buy a new disk");
        assert_eq!(
            failure.render(),
            "error: cannot load\ncaused by: weights.bin: disk on fire\nhint: buy a new disk"
        );
    }

    #[test]
    fn a_panic_is_an_internal_error() {
        let failure = guard(|| panic!("seventeen is not {}", 18)).unwrap_err();
        assert_eq!(failure.exit, Exit::Internal);
        let text = failure.render();
        assert!(text.contains("seventeen is not 18 (at "), "{text}");
        assert!(
            text.contains("failure.rs:") && text.contains("hint: "),
            "{text}"
        );
        assert!(guard(|| Ok(ExitCode::SUCCESS)).is_ok());
        let failure = guard(|| Err(Failure::refused(anyhow::anyhow!("no")))).unwrap_err();
        assert_eq!(failure.exit, Exit::Refused);
    }

    /// A sweep leaves out what a model has no room for, and nothing else.
    #[test]
    fn a_missing_room_is_told_from_other_failures() {
        use carat_bench::BenchError as E;
        let room = || E::Context {
            prompt: 512,
            new: 1,
            depth: 4096,
            context: 2048,
        };
        let failure = Failure::from(room());
        assert!(matches!(failure.bench(), Some(E::Context { .. })));
        let inside = failure.within("context=4096");
        assert_eq!(inside.exit, Exit::Input);
        let text = inside.render();
        assert!(
            text.starts_with("error: context=4096\ncaused by: 512 prompt"),
            "{text}"
        );
        assert!(text.contains("after 4096 in the cache"), "{text}");
        let other = Failure::from(E::Arms("no".into()));
        assert!(!matches!(other.bench(), Some(E::Context { .. })));
        assert!(Failure::input(anyhow::anyhow!("no")).bench().is_none());
    }

    #[test]
    fn faults_of_carat_are_told_from_faults_of_the_input() {
        use carat_engine::EngineError;
        use carat_model::ModelError;
        let exit = |error: EngineError| Failure::from(error).exit;
        assert_eq!(exit(EngineError::NotANumber { position: 3 }), Exit::Input);
        assert_eq!(
            exit(ModelError::Batch("has no rows".into()).into()),
            Exit::Internal
        );
        assert_eq!(
            exit(
                ModelError::OutOfMemory {
                    bytes: 9,
                    tokens: 1
                }
                .into()
            ),
            Exit::Refused
        );
        assert_eq!(exit(EngineError::EmptyPrompt), Exit::Input);
        let range = ModelError::TokenOutOfRange {
            id: 9,
            row: 0,
            vocab: 9,
        };
        assert_eq!(exit(range.into()), Exit::Input);
        let infinite = carat_oracle::OracleError::NotFinite {
            index: 0,
            value: f32::NAN,
        };
        assert_eq!(Failure::from(infinite).exit, Exit::Input);
    }
}
