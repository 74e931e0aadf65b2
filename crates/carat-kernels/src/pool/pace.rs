//! Keeping pace on a busy machine.
//!
//! When another program competes for the cores, the system sooner or later
//! pre-empts a worker in the middle of a task, and the region waits for it for
//! a whole time slice (some milliseconds: hundreds of tasks). A worker that has
//! made a region wait like that is **paced** for a while: it works in bursts
//! shorter than a time slice and rests between tasks, of its own accord, for
//! longer than it worked. The system has then no reason to pre-empt it while it
//! holds a task, and the other program gets its share meanwhile. While paced, a
//! worker also keeps off the caller's processor, where it could only take the
//! caller's time, and the caller polls longer before it parks, since a core
//! that falls idle at once draws the other program to it.
//!
//! A worker that rests takes no part in a region, like one that is late, so
//! none of this can change a result.

use super::placement::Placement;
use super::sync::{Clock, sleep};

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A paced worker's burst, in nanoseconds: well below the shortest time slice
/// of common schedulers (0.7 ms to 4 ms). Measured best of 0.1 to 2 ms.
const BURST: u64 = 400_000;

/// A paced worker's rest: twice the burst, so that its share of the processor
/// stays under the half that two competitors get.
const REST: u64 = 2 * BURST;

/// How much longer than planned a region must wait for its last task before
/// that counts as a pre-emption: above interrupts and page faults (tens of
/// microseconds), below a time slice.
const LATE: u64 = 200_000;

/// For how long a worker is paced after its first late task. Each further one
/// soon after doubles it up to [`LONGEST_WINDOW`]: a calm machine loses 20 ms
/// to a chance interruption, a busy one a time slice every second.
const FIRST_WINDOW: u64 = 20_000_000;
const LONGEST_WINDOW: u64 = 1_000_000_000;

/// How long a caller polls before it parks while a worker is paced.
const PATIENCE: u64 = BURST;

/// What the caller tells the workers. Hints only: any value is safe.
pub(super) struct Contention {
    clock: Clock,
    /// When the end of the current region is late.
    late_at: AtomicU64,
    /// Workers that are paced.
    paced: AtomicU32,
    /// The caller's processor, kept while a worker is paced.
    caller_cpu: AtomicU32,
}

impl Contention {
    pub(super) fn new() -> Contention {
        Contention {
            clock: Clock::new(),
            late_at: AtomicU64::new(u64::MAX),
            paced: AtomicU32::new(0),
            caller_cpu: AtomicU32::new(u32::MAX),
        }
    }

    /// The caller starts a region; the result goes to
    /// [`caller_waits`](Contention::caller_waits).
    pub(super) fn region_starts(&self) -> u64 {
        if self.paced.load(Ordering::Relaxed) != 0 {
            let cpu = Placement::current_cpu().unwrap_or(u32::MAX);
            self.caller_cpu.store(cpu, Ordering::Relaxed);
        }
        self.clock.now()
    }

    /// The caller found nothing more to claim. Tasks of a region are alike, so
    /// those still running should end within the time the caller took for its
    /// own.
    pub(super) fn caller_waits(&self, start: u64) {
        let now = self.clock.now();
        let late = now.saturating_add(now.saturating_sub(start)) + LATE;
        self.late_at.store(late, Ordering::Relaxed);
    }

    /// Nanoseconds that the caller polls before it parks, if not the usual time.
    pub(super) fn patience(&self) -> Option<u64> {
        (self.paced.load(Ordering::Relaxed) != 0).then_some(PATIENCE)
    }
}

/// A worker's own state.
pub(super) struct Pace<'a> {
    contention: &'a Contention,
    placement: Placement,
    /// Set while paced: when that ends, and when the current burst ends.
    paced: Option<Paced>,
    /// Length of the last window, and until when a late task doubles it.
    window: u64,
    alert_until: u64,
}

struct Paced {
    until: u64,
    burst_ends: u64,
}

impl<'a> Pace<'a> {
    pub(super) fn new(contention: &'a Contention) -> Pace<'a> {
        Pace {
            contention,
            placement: Placement::new(),
            paced: None,
            window: FIRST_WINDOW,
            alert_until: 0,
        }
    }

    /// Whether the worker should claim nothing more before it has rested.
    pub(super) fn is_rest_due(&self) -> bool {
        self.paced
            .as_ref()
            .is_some_and(|paced| self.contention.clock.now() >= paced.burst_ends)
    }

    /// Rests if that is due. No task may be claimed meanwhile.
    pub(super) fn rest_if_due(&mut self) {
        if !self.is_rest_due() {
            return;
        }
        let clock = &self.contention.clock;
        let Some(paced) = &mut self.paced else { return };
        if clock.now() >= paced.until {
            self.paced = None;
            self.contention.paced.fetch_sub(1, Ordering::Relaxed);
            self.placement.allow_all();
            return;
        }
        sleep(REST);
        self.placement
            .keep_off(self.contention.caller_cpu.load(Ordering::Relaxed));
        paced.burst_ends = clock.now() + BURST;
    }

    /// This worker ended the last task of a region for which the caller had
    /// already parked.
    pub(super) fn kept_caller_waiting(&mut self) {
        let now = self.contention.clock.now();
        if now < self.contention.late_at.load(Ordering::Relaxed) {
            return;
        }
        self.window = if now < self.alert_until {
            (2 * self.window).min(LONGEST_WINDOW)
        } else {
            FIRST_WINDOW
        };
        if self.paced.is_none() {
            self.contention.paced.fetch_add(1, Ordering::Relaxed);
        }
        self.paced = Some(Paced {
            until: now + self.window,
            burst_ends: now,
        });
        self.alert_until = now + 2 * self.window;
    }
}

impl Drop for Pace<'_> {
    fn drop(&mut self) {
        if self.paced.is_some() {
            self.contention.paced.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_late_worker_is_paced_and_windows_double() {
        let contention = Contention::new();
        let mut pace = Pace::new(&contention);
        contention.caller_waits(contention.region_starts());
        pace.kept_caller_waiting();
        assert!(pace.paced.is_none(), "in time");
        assert_eq!(contention.patience(), None);

        contention.late_at.store(0, Ordering::Relaxed);
        for doubled in 0..8 {
            pace.kept_caller_waiting();
            assert_eq!(
                pace.window,
                (FIRST_WINDOW << doubled).min(LONGEST_WINDOW),
                "window {doubled}"
            );
        }
        assert!(pace.is_rest_due());
        assert_eq!(contention.patience(), Some(PATIENCE));
        let start = contention.clock.now();
        pace.rest_if_due();
        assert!(contention.clock.now() - start >= REST);

        if let Some(paced) = &mut pace.paced {
            (paced.until, paced.burst_ends) = (0, 0);
        }
        pace.rest_if_due();
        assert!(pace.paced.is_none() && !pace.is_rest_due());
        assert_eq!(contention.patience(), None);

        pace.alert_until = 0;
        pace.kept_caller_waiting();
        assert_eq!(pace.window, FIRST_WINDOW);
        drop(pace);
        assert_eq!(contention.patience(), None);
    }
}
