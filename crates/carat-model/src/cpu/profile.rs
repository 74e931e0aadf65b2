//! Times of ops.

use std::time::Instant;

use crate::OpSpan;

/// Most spans that are kept (40 bytes each): a thousand tokens of any model.
const MAX_SPANS: usize = 1 << 21;

/// Spans since profiling began.
pub(super) struct Profile {
    began: Instant,
    pub(super) spans: Vec<OpSpan>,
}

impl Profile {
    pub(super) fn begin() -> Profile {
        Profile {
            began: Instant::now(),
            spans: Vec::new(),
        }
    }

    /// Notes an op that began at `start` and ends now.
    pub(super) fn note(&mut self, op: usize, rows: usize, start: Instant) {
        if self.spans.len() < MAX_SPANS {
            self.spans.push(OpSpan {
                op,
                rows,
                start: start.duration_since(self.began),
                time: start.elapsed(),
            });
        }
    }
}
