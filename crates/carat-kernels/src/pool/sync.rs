//! The synchronisation types of the pool: `std`'s, or loom's under
//! `cfg(loom)`, so that the same code can be model-checked.

#[cfg(not(loom))]
pub(super) use native::*;

#[cfg(loom)]
pub(super) use model::*;

#[cfg(not(loom))]
mod native {
    use std::time::{Duration, Instant};

    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
    pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
    pub(crate) use std::thread::{Builder, JoinHandle};

    std::thread_local! {
        /// Whether this thread is running a task of a region.
        pub(crate) static IN_TASK: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }

    /// How long a thread spins before it parks, in nanoseconds. Regions of a decode step follow
    /// each other within a few microseconds, so a worker seldom parks while
    /// decoding; on a busy machine 50 us is short enough to hand the core over.
    pub(crate) const SPIN: u64 = 50_000;

    /// Looks at the clock once in this many polls (a poll is one `pause`, up to
    /// about 60 ns; reading the clock costs 25 ns).
    const POLLS_PER_CLOCK: usize = 16;

    /// Polls `done` for at most `limit` nanoseconds; the last answer.
    pub(crate) fn spin_until(limit: u64, done: impl Fn() -> bool) -> bool {
        if done() {
            return true;
        }
        let limit = Duration::from_nanos(limit);
        let start = Instant::now();
        loop {
            for _ in 0..POLLS_PER_CLOCK {
                std::hint::spin_loop();
                if done() {
                    return true;
                }
            }
            if start.elapsed() >= limit {
                return false;
            }
        }
    }

    /// Nanoseconds since its start.
    pub(crate) struct Clock(Instant);

    impl Clock {
        pub(crate) fn new() -> Clock {
            Clock(Instant::now())
        }

        pub(crate) fn now(&self) -> u64 {
            self.0.elapsed().as_nanos() as u64
        }
    }

    pub(crate) fn sleep(nanos: u64) {
        std::thread::sleep(Duration::from_nanos(nanos));
    }

    /// An `UnsafeCell` with loom's interface.
    pub(crate) struct Cell<T>(std::cell::UnsafeCell<T>);

    impl<T> Cell<T> {
        pub(crate) fn new(value: T) -> Cell<T> {
            Cell(std::cell::UnsafeCell::new(value))
        }

        pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(loom)]
mod model {
    pub(crate) use loom::cell::UnsafeCell as Cell;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use loom::thread::{Builder, JoinHandle};
    pub(crate) use std::sync::PoisonError;

    loom::thread_local! {
        pub(crate) static IN_TASK: std::cell::Cell<bool> = std::cell::Cell::new(false);
    }

    pub(crate) const SPIN: u64 = 0;

    /// The model goes straight to parking: that is the path with the races.
    pub(crate) fn spin_until(_limit: u64, done: impl Fn() -> bool) -> bool {
        done()
    }

    /// Shows the squares of 0, 1, 2 ... ms, one at each look: steps that grow, so
    /// that every region a caller waits for is late and a paced worker's burst
    /// is over by the next look. So the model covers pacing, and a replay sees
    /// the same times.
    pub(crate) struct Clock(std::sync::atomic::AtomicU64);

    impl Clock {
        pub(crate) fn new() -> Clock {
            Clock(std::sync::atomic::AtomicU64::new(0))
        }

        pub(crate) fn now(&self) -> u64 {
            let looks = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            looks * looks * 1_000_000
        }
    }

    pub(crate) fn sleep(_nanos: u64) {}
}
