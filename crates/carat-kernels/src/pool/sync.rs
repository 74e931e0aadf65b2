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

    /// How long a thread spins before it parks. Regions of a decode step follow
    /// each other within a few microseconds, so a worker seldom parks while
    /// decoding; on a busy machine 50 us is short enough to hand the core over.
    const SPIN: Duration = Duration::from_micros(50);

    /// Looks at the clock once in this many polls (a poll is one `pause`, up to
    /// about 60 ns; reading the clock costs 25 ns).
    const POLLS_PER_CLOCK: usize = 16;

    /// Polls `done` for at most [`SPIN`]; the last answer.
    pub(crate) fn spin_until(done: impl Fn() -> bool) -> bool {
        if done() {
            return true;
        }
        let start = Instant::now();
        loop {
            for _ in 0..POLLS_PER_CLOCK {
                std::hint::spin_loop();
                if done() {
                    return true;
                }
            }
            if start.elapsed() >= SPIN {
                return false;
            }
        }
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

    /// The model goes straight to parking: that is the path with the races.
    pub(crate) fn spin_until(done: impl Fn() -> bool) -> bool {
        done()
    }
}
