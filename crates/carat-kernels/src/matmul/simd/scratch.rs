//! Buffers of the vector kernels.

use std::cell::RefCell;

use carat_tensor::packed::PANEL_ROWS;

use crate::matmul::job::MAX_JOB_TOKENS;

/// Columns that are unpacked at once: two panels of codes stay in the L1 cache
/// while all tokens of the job pass over them.
pub(super) const BLOCK_COLUMNS: usize = 512;

/// Columns that are decoded to fp32 at once, for the same reason.
pub(super) const BLOCK_FLOATS: usize = 256;

/// Buffers of a thread.
#[repr(C, align(64))]
pub(super) struct Scratch {
    /// Codes of two panels: `[step][panel][64]`.
    pub(super) codes: [u8; BLOCK_COLUMNS * 2 * PANEL_ROWS],
    /// Effective scales: `[group][panel][16]`, groups of 16 at the finest.
    pub(super) scales: [f32; BLOCK_COLUMNS / 16 * 2 * PANEL_ROWS],
    /// Effective minima, likewise.
    pub(super) mins: [f32; BLOCK_COLUMNS / 16 * 2 * PANEL_ROWS],
    /// Decoded weights of a panel: `[column][16]`.
    pub(super) floats: [f32; BLOCK_FLOATS * PANEL_ROWS],
    /// Accumulators: `[token][32]` of two panels, or `[token][4][16]`.
    pub(super) sums: [f32; MAX_JOB_TOKENS * 4 * PANEL_ROWS],
}

thread_local! {
    static SCRATCH: RefCell<Option<Box<Scratch>>> = const { RefCell::new(None) };
}

/// Calls `f` with this thread's scratch.
pub(super) fn with_scratch(f: impl FnOnce(&mut Scratch)) {
    SCRATCH.with_borrow_mut(|scratch| {
        f(scratch.get_or_insert_with(|| {
            Box::new(Scratch {
                codes: [0; _],
                scales: [0.0; _],
                mins: [0.0; _],
                floats: [0.0; _],
                sums: [0.0; _],
            })
        }))
    });
}
