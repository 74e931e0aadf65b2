//! What a task of a region gets.

use std::marker::PhantomData;
use std::ops::Range;

use carat_tensor::packed::{PANEL_ROWS, PackedRef};

use super::Prepared;
use crate::Isa;

/// Most tokens of a job: bounds its accumulators.
pub(super) const MAX_JOB_TOKENS: usize = 128;

/// The ways a kernel can go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Paths {
    /// Codes straight from the weight only.
    Fused,
    /// Codes through tiles only.
    Tiled,
    /// Straight with any number of tokens, or through tiles.
    Both {
        /// Fewest tokens that tiles take: a job of fewer goes straight.
        least: usize,
        /// Fewest tokens that go through tiles unless something else is known.
        default: usize,
    },
}

/// A kernel; through tiles it takes `panels` panels together.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    /// The instruction set that it is written in.
    pub(super) isa: Isa,
    pub(super) paths: Paths,
    pub(super) panels: usize,
    pub(super) run: fn(&Job<'_>),
}

/// Panels of a product times tokens.
pub(super) struct Job<'a> {
    pub(super) weight: PackedRef<'a>,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) x: &'a Prepared,
    /// Codes are used straight from the weight; else they go through tiles.
    pub(super) fused: bool,
    pub(super) panels: Range<usize>,
    pub(super) tokens: Range<usize>,
    pub(super) out: Output<'a>,
}

impl Job<'_> {
    /// Stores one token's sums of a panel whose rows have a scale, as the token has.
    #[inline(always)]
    pub(super) fn store_scaled(
        &self,
        token: usize,
        panel: usize,
        sums: &[f32; PANEL_ROWS],
        scales: &[f32; PANEL_ROWS],
    ) {
        let mut values = [0.0; PANEL_ROWS];
        let of_token = self.x.token_scale(token);
        for ((value, sum), scale) in values.iter_mut().zip(sums).zip(scales) {
            *value = sum * (scale * of_token);
        }
        self.store(token, panel, &values);
    }

    /// Calls `pass` with panels and tokens that cover the job, `most` tokens at
    /// a time: all panels at once if one pass takes all tokens, else one panel
    /// for all passes, so that its bytes come from memory once.
    #[inline(always)]
    pub(super) fn passes(&self, most: usize, mut pass: impl FnMut(Range<usize>, Range<usize>)) {
        if self.tokens.len() <= most {
            return pass(self.panels.clone(), self.tokens.clone());
        }
        for panel in self.panels.clone() {
            for first in self.tokens.clone().step_by(most) {
                pass(panel..panel + 1, first..self.tokens.end.min(first + most));
            }
        }
    }

    /// Stores one token's values of a panel, after adding the bias.
    #[inline(always)]
    pub(super) fn store(&self, token: usize, panel: usize, values: &[f32; PANEL_ROWS]) {
        let first = panel * PANEL_ROWS;
        let rows = PANEL_ROWS.min(self.weight.layout().rows() - first);
        match self.bias {
            None => self.out.store(token, first, &values[..rows]),
            Some(bias) => {
                let mut sums = *values;
                for (sum, bias) in sums.iter_mut().zip(&bias[first..first + rows]) {
                    *sum += bias;
                }
                self.out.store(token, first, &sums[..rows]);
            }
        }
    }
}

/// The part of a `[tokens, rows]` output that a job may write.
pub(super) struct Output<'a> {
    out: *mut f32,
    stride: usize,
    rows: Range<usize>,
    tokens: Range<usize>,
    marker: PhantomData<&'a mut [f32]>,
}

impl Output<'_> {
    /// Rows of `panels` times `tokens` of an output `[m, rows]`.
    ///
    /// # Safety
    ///
    /// `out` must point to `m * rows` floats that live and are borrowed for the
    /// lifetime of the result, and no other live `Output` may share a place.
    pub(super) unsafe fn new(
        out: *mut f32,
        m: usize,
        rows: usize,
        panels: &Range<usize>,
        tokens: &Range<usize>,
    ) -> Self {
        assert!(tokens.end <= m);
        Output {
            out,
            stride: rows,
            rows: panels.start * PANEL_ROWS..rows.min(panels.end * PANEL_ROWS),
            tokens: tokens.clone(),
            marker: PhantomData,
        }
    }

    #[inline(always)]
    fn store(&self, token: usize, first: usize, values: &[f32]) {
        assert!(self.tokens.contains(&token));
        assert!(self.rows.start <= first && first + values.len() <= self.rows.end);
        // SAFETY: token and rows are this job's (asserted), hence inside the
        // output and shared with nobody, as the constructor's caller promised.
        unsafe {
            let at = self.out.add(token * self.stride + first);
            match <&[f32; PANEL_ROWS]>::try_from(values) {
                // A length that is known spares a call.
                Ok(values) => at.cast::<[f32; PANEL_ROWS]>().write(*values),
                Err(_) => std::ptr::copy_nonoverlapping(values.as_ptr(), at, values.len()),
            }
        }
    }
}
