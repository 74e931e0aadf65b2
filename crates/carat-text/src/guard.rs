//! A fence around third-party code that is fed untrusted files.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `f`, turning a panic inside it into its message.
///
/// The tokenizer pipeline was written for trusted files: a few of its parts
/// index or subtract without checking (a strip longer than its token, a template
/// naming a token it does not define). A file must not be able to end the
/// process, so every call into the pipeline goes through here. The pipeline holds
/// no state that a panic could leave half-changed but its merge cache, which
/// recovers from a poisoned lock by computing anew.
pub(crate) fn fenced<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        let message = payload
            .downcast_ref::<&str>()
            .map(|s| (*s).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "unknown reason".to_owned());
        format!("the tokenizer gave up on this file: {message}")
    })
}
