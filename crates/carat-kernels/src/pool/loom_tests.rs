//! Model checks of the pool: every interleaving (up to a number of
//! pre-emptions) of a few tasks on two or three threads. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p carat-kernels --release pool_loom`.
//!
//! A lost wake-up shows as a deadlock, a use of the closure after its region
//! as a race on the checked cell, a leaked worker as a leaked `Arc`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Pool;

fn model(preemptions: usize, check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(check);
}

/// Runs one region and checks that each task ran once. The counters are plain
/// `std` atomics: they are observed, not part of the model.
fn run_once(pool: &Pool, tasks: usize) {
    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, &|task| {
        counts[task].fetch_add(1, Ordering::Relaxed);
    });
    for count in counts {
        assert_eq!(count.into_inner(), 1);
    }
}

#[test]
fn pool_loom_two_regions_on_two_threads() {
    model(3, || {
        let pool = Pool::new(2);
        run_once(&pool, 2);
        run_once(&pool, 3);
    });
}

#[test]
fn pool_loom_three_threads() {
    model(2, || {
        let pool = Pool::new(3);
        run_once(&pool, 3);
    });
}

/// Tasks that wait for each other end only if the worker is woken.
#[test]
fn pool_loom_a_parked_worker_is_woken() {
    model(2, || {
        let pool = Pool::new(2);
        let arrived = loom::sync::Mutex::new(0);
        let all = loom::sync::Condvar::new();
        pool.run(2, &|_| {
            let mut count = arrived.lock().unwrap();
            *count += 1;
            all.notify_all();
            while *count < 2 {
                count = all.wait(count).unwrap();
            }
        });
    });
}

#[test]
fn pool_loom_drop_joins_an_idle_worker() {
    model(4, || drop(Pool::new(2)));
}

#[test]
fn pool_loom_two_callers_take_turns() {
    model(2, || {
        let pool = loom::sync::Arc::new(Pool::new(2));
        let other = {
            let pool = pool.clone();
            loom::thread::spawn(move || run_once(&pool, 2))
        };
        run_once(&pool, 2);
        other.join().unwrap();
    });
}

/// What a task wrote is visible to the caller after the region: loom checks the
/// cells' accesses for races.
#[test]
fn pool_loom_results_are_visible() {
    struct Slots([loom::cell::UnsafeCell<usize>; 2]);
    // SAFETY: each task writes its own slot, and the caller reads after the
    // region; loom reports any overlap.
    unsafe impl Sync for Slots {}
    model(2, || {
        let pool = Pool::new(2);
        let slots = Arc::new(Slots([0, 0].map(loom::cell::UnsafeCell::new)));
        for round in 1..3 {
            // SAFETY: see `Slots`.
            pool.run(2, &|task| {
                slots.0[task].with_mut(|v| unsafe { *v += round })
            });
            for slot in &slots.0 {
                // SAFETY: see `Slots`.
                let value = slot.with(|v| unsafe { *v });
                assert_eq!(value, (1..=round).sum::<usize>());
            }
        }
    });
}
