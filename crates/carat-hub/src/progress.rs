//! How a pull tells how far it is.

/// Receives a pull's progress. One thing at a time: `begin`, any number of
/// `advance`, `end`. A pull that fails may leave out the `end`.
pub trait Progress {
    /// A transfer or check of `what` starts; `total` is its size in bytes, where known.
    fn begin(&self, what: &str, total: Option<u64>);
    /// `bytes` more are done.
    fn advance(&self, bytes: u64);
    /// The thing begun last is done.
    fn end(&self);
}

/// Tells nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn begin(&self, _what: &str, _total: Option<u64>) {}
    fn advance(&self, _bytes: u64) {}
    fn end(&self) {}
}
