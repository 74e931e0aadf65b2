//! Buffers of floats that vectors never straddle two cache lines of.

use std::ops::{Deref, DerefMut};

/// Floats of a cache line.
const LINE: usize = 16;

#[repr(C, align(64))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Line([f32; LINE]);

/// Floats that start on a cache line, in memory that is kept when they shrink.
#[derive(Default)]
pub struct Floats {
    lines: Vec<Line>,
    len: usize,
}

impl Floats {
    /// Changes the number of floats. They hold what they held before, or zeros,
    /// or what a longer buffer held there.
    pub fn resize(&mut self, len: usize) {
        let lines = len.div_ceil(LINE);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; LINE]));
        }
        self.len = len;
    }

    /// [`resize`](Floats::resize), and the floats.
    pub(crate) fn sized(&mut self, len: usize) -> &mut [f32] {
        self.resize(len);
        self
    }

    /// Bytes of memory in use.
    pub fn bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn floats_start_on_a_line_and_keep_their_memory() {
        let mut floats = Floats::default();
        assert!(floats.is_empty());
        floats.resize(33);
        assert_eq!(floats.as_ptr().align_offset(64), 0);
        assert_eq!(*floats, [0.0; 33]);
        floats.fill(2.0);
        let bytes = floats.bytes();
        floats.resize(5);
        assert_eq!(*floats, [2.0; 5]);
        floats.resize(33);
        assert_eq!((floats[32], floats.bytes()), (2.0, bytes));
    }
}
