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

    /// Prints the error and gives its exit code.
    pub(crate) fn report(self) -> ExitCode {
        // A reader that went away (`carat … | head`) is not an error.
        let closed_pipe = self.error.chain().any(|cause| {
            cause
                .downcast_ref::<std::io::Error>()
                .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
        });
        if closed_pipe {
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

impl From<carat_engine::EngineError> for Failure {
    fn from(error: carat_engine::EngineError) -> Self {
        use carat_engine::EngineError as E;
        let hint = match error {
            E::PromptTooLong { .. } => Some("shorten the prompt or raise --ctx"),
            E::Schedule { .. } => Some("sizes of at least 1 with commas between, such as 64,1,16"),
            _ => None,
        };
        Failure::input(error).maybe_hint(hint.map(str::to_owned))
    }
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
}
