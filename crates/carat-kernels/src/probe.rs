//! Reading memory as fast as it goes: the bound that products are held against.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use crate::Isa;

/// Bytes of a pass of [`read_bandwidth`]: long enough that starting threads is no
/// part of it.
const PASS_BYTES: usize = 512 << 20;

/// Passes, of which the best counts.
const PASSES: usize = 5;

/// Bytes ahead that are asked for, as in the products.
const AHEAD: usize = 8448;

/// Bytes of a huge page, where the system has them.
const HUGE_PAGE: usize = 2 << 20;

/// Memory to read, in huge pages where the system grants them: weights are
/// mapped from files, which large folios serve as well, and small pages of
/// anonymous memory would make the bound too low.
pub struct ProbeBuffer {
    words: Vec<u64>,
    /// The first word on a page boundary.
    start: usize,
    len: usize,
}

impl ProbeBuffer {
    /// `len` words, written to, so that they are there.
    pub fn new(len: usize) -> ProbeBuffer {
        let spare = HUGE_PAGE / size_of::<u64>();
        let mut words: Vec<u64> = Vec::with_capacity(len + spare);
        let start = words.as_ptr().align_offset(HUGE_PAGE).min(spare);
        advise(words.as_ptr().wrapping_add(start), len);
        words.resize(len + spare, 0x0123_4567_89ab_cdef);
        ProbeBuffer { words, start, len }
    }

    /// Reads everything once; the result depends on every word.
    pub fn read(&self) -> u64 {
        let words = &self.words[self.start..][..self.len];
        match Isa::best().base() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this machine has AVX-512 F.
            Isa::Avx512Vnni => unsafe { sum_avx512(words) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this machine has AVX2.
            Isa::Avx2 => unsafe { sum_avx2(words) },
            _ => sum(words),
        }
    }
}

/// Read bandwidth in bytes per second: `bytes` bytes in all, divided among
/// `threads` threads, again and again. What fits into a cache is read at the
/// cache's speed, as it is by a model of that size.
pub fn read_bandwidth(bytes: usize, threads: usize) -> f64 {
    let threads = threads.max(1);
    // At least one round of the sums below.
    let words = (bytes / size_of::<u64>() / threads).max(8);
    let turns = (PASS_BYTES / size_of::<u64>() / (threads * words)).max(1);
    let buffers: Vec<ProbeBuffer> = (0..threads).map(|_| ProbeBuffer::new(words)).collect();
    let mut best: f64 = 0.0;
    for _ in 0..PASSES {
        let barrier = Barrier::new(threads + 1);
        let elapsed = thread::scope(|scope| {
            let readers: Vec<_> = buffers
                .iter()
                .map(|buffer| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        for _ in 0..turns {
                            std::hint::black_box(buffer.read());
                        }
                    })
                })
                .collect();
            barrier.wait();
            let start = Instant::now();
            for reader in readers {
                // A reader only adds numbers: it cannot panic.
                let _ = reader.join();
            }
            start.elapsed()
        });
        let read = (threads * words * size_of::<u64>()) as f64 * turns as f64;
        best = best.max(read / elapsed.as_secs_f64());
    }
    best
}

/// Asks for huge pages. Refusal is no fault: the probe is slower, that is all.
#[cfg(target_os = "linux")]
fn advise(words: *const u64, len: usize) {
    // SAFETY: advice about memory that the caller's vector has allocated; it
    // changes how pages are backed, not what they hold.
    unsafe {
        libc::madvise(
            words.cast_mut().cast(),
            len * size_of::<u64>(),
            libc::MADV_HUGEPAGE,
        )
    };
}

#[cfg(not(target_os = "linux"))]
fn advise(_words: *const u64, _len: usize) {}

/// The plain form, compiled for AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(words: &[u64]) -> u64 {
    sum(words)
}

/// The plain form, compiled for AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u64]) -> u64 {
    sum(words)
}

/// Sums that do not wait for each other, so that loads set the pace.
#[inline(always)]
fn sum(words: &[u64]) -> u64 {
    const LINE: usize = 8;
    let mut sums = [0u64; 4 * LINE];
    let (chunks, rest) = words.as_chunks::<{ 4 * LINE }>();
    for chunk in chunks {
        for line in 0..4 {
            prefetch(
                chunk
                    .as_ptr()
                    .wrapping_add(line * LINE)
                    .wrapping_byte_add(AHEAD),
            );
        }
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(at: *const u64) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: part of every x86-64; prefetching is harmless anywhere.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn prefetch(_at: *const u64) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_counts() {
        for len in [0, 1, 31, 32, 1000] {
            let mut buffer = ProbeBuffer::new(len);
            let expected = 0x0123_4567_89ab_cdef_u64.wrapping_mul(len as u64);
            assert_eq!(buffer.read(), expected);
            for i in 0..len {
                buffer.words[buffer.start + i] += 1;
                assert_eq!(buffer.read(), expected.wrapping_add(i as u64 + 1));
            }
        }
    }
}
