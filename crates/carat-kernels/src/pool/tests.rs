use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::ThreadId;
use std::time::Duration;

use super::Pool;

fn counters(n: usize) -> Vec<AtomicUsize> {
    (0..n).map(|_| AtomicUsize::new(0)).collect()
}

#[test]
fn each_task_runs_once() {
    for threads in [1, 2, 3, 5, 8] {
        let pool = Pool::new(threads);
        assert_eq!(pool.threads(), threads);
        for tasks in [0, 1, 2, 3, 7, 64, 1000, 65_535, 65_536, 140_000] {
            let counts = counters(tasks);
            pool.run(tasks, &|task| {
                counts[task].fetch_add(1, Ordering::Relaxed);
            });
            for (task, count) in counts.iter().enumerate() {
                assert_eq!(
                    count.load(Ordering::Relaxed),
                    1,
                    "task {task} of {tasks} on {threads} threads"
                );
            }
        }
    }
}

#[test]
fn ranges_cover_all_items_once() {
    for threads in [1, 2, 3] {
        let pool = Pool::new(threads);
        for len in [0, 1, 5, 16, 17, 1000] {
            for min_len in [0, 1, 16, 5000] {
                let counts = counters(len);
                let smallest = AtomicUsize::new(0);
                pool.run_ranges(len, min_len, &|range| {
                    if range.end != len && range.len() < min_len {
                        smallest.store(range.len(), Ordering::Relaxed);
                    }
                    for count in &counts[range] {
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                assert_eq!(smallest.into_inner(), 0, "a range below {min_len} items");
            }
        }
    }
}

#[test]
fn zero_threads_count_as_one() {
    assert_eq!(Pool::new(0).threads(), 1);
}

/// Each of two tasks waits for the other: they can only end on two threads.
#[test]
fn tasks_run_at_the_same_time() {
    let pool = Pool::new(2);
    for _ in 0..50 {
        let barrier = Barrier::new(2);
        pool.run(2, &|_| {
            barrier.wait();
        });
    }
}

#[test]
fn workers_wake_after_they_have_parked() {
    let pool = Pool::new(2);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        let barrier = Barrier::new(2);
        pool.run(2, &|_| {
            barrier.wait();
        });
    }
}

/// The caller parks while a worker is still busy, and is woken.
#[test]
fn the_caller_waits_for_a_slow_worker() {
    let pool = Pool::new(2);
    let caller = std::thread::current().id();
    for _ in 0..5 {
        let barrier = Barrier::new(2);
        let slow_ended = AtomicBool::new(false);
        pool.run(2, &|_| {
            barrier.wait();
            if std::thread::current().id() != caller {
                std::thread::sleep(Duration::from_millis(5));
                slow_ended.store(true, Ordering::Relaxed);
            }
        });
        assert!(slow_ended.into_inner());
    }
}

/// A thread that is stuck in its first task loses the rest of its range.
#[test]
fn tasks_of_a_stuck_thread_are_stolen() {
    let pool = Pool::new(2);
    let counts = counters(64);
    let rest = AtomicUsize::new(0);
    pool.run(64, &|task| {
        if task == 0 {
            while rest.load(Ordering::Acquire) < 63 {
                std::thread::yield_now();
            }
        } else {
            rest.fetch_add(1, Ordering::Release);
        }
        counts[task].fetch_add(1, Ordering::Relaxed);
    });
    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
}

#[test]
fn a_panic_reaches_the_caller_after_all_tasks() {
    for threads in [1, 2, 4] {
        let pool = Pool::new(threads);
        for tasks in [1, 2, 20] {
            let counts = counters(tasks);
            let thrown = catch_unwind(AssertUnwindSafe(|| {
                pool.run(tasks, &|task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                    if task == tasks / 2 {
                        std::panic::panic_any("task failed");
                    }
                });
            }))
            .unwrap_err();
            assert_eq!(thrown.downcast_ref::<&str>(), Some(&"task failed"));
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            // Usable afterwards.
            let sum = AtomicUsize::new(0);
            pool.run(10, &|task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 45);
        }
    }
}

#[test]
fn a_run_within_a_task_is_inline() {
    let pool = Pool::new(2);
    let other = Pool::new(2);
    let counts = counters(4 * 8);
    pool.run(4, &|outer| {
        let thread: ThreadId = std::thread::current().id();
        let inner_pool = if outer % 2 == 0 { &pool } else { &other };
        inner_pool.run(8, &|inner| {
            assert_eq!(std::thread::current().id(), thread);
            counts[outer * 8 + inner].fetch_add(1, Ordering::Relaxed);
        });
    });
    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
}

/// Each caller's tasks add to a plain counter of its own region: two regions at
/// once would see more tasks running than the pool has threads.
#[test]
fn callers_take_turns() {
    let pool = Arc::new(Pool::new(2));
    let running = Arc::new(AtomicUsize::new(0));
    let callers: Vec<_> = (0..3)
        .map(|_| {
            let (pool, running) = (pool.clone(), running.clone());
            std::thread::spawn(move || {
                let mut most = 0;
                let mut total = 0;
                for _ in 0..200 {
                    let (seen, ran) = (AtomicUsize::new(0), AtomicUsize::new(0));
                    pool.run(5, &|_| {
                        let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                        seen.fetch_max(now, Ordering::SeqCst);
                        std::thread::yield_now();
                        running.fetch_sub(1, Ordering::SeqCst);
                        ran.fetch_add(1, Ordering::Relaxed);
                    });
                    most = most.max(seen.into_inner());
                    total += ran.into_inner();
                }
                (most, total)
            })
        })
        .collect();
    for caller in callers {
        let (most, total) = caller.join().unwrap();
        assert!(most <= 2, "{most} tasks at once on two threads");
        assert_eq!(total, 1000);
    }
}

#[test]
fn drop_joins_the_workers() {
    let alive = Arc::new(());
    {
        let pool = Pool::new(4);
        let held = alive.clone();
        pool.run(16, &move |_| {
            let _ = &held;
        });
    }
    assert_eq!(Arc::strong_count(&alive), 1);
    // A pool that never ran, and one whose workers have parked.
    drop(Pool::new(3));
    let pool = Pool::new(3);
    std::thread::sleep(Duration::from_millis(2));
    drop(pool);
}

/// A worker that was late works in bursts, but comes back after each rest:
/// tasks that need two threads still end.
#[test]
fn a_paced_worker_comes_back() {
    let pool = Pool::new(2);
    let caller = std::thread::current().id();
    for _ in 0..20 {
        let started = AtomicUsize::new(0);
        pool.run(2, &|_| {
            started.fetch_add(1, Ordering::SeqCst);
            while started.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            if std::thread::current().id() != caller {
                std::thread::sleep(std::time::Duration::from_millis(3));
            }
        });
    }
}
