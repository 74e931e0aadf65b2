mod pace;
mod placement;
mod sync;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

use std::any::Any;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use pace::{Contention, Pace};
use sync::{
    Arc, AtomicBool, AtomicU32, AtomicU64, Builder, Cell, Condvar, IN_TASK, JoinHandle, Mutex,
    MutexGuard, Ordering, PoisonError, SPIN, fence, spin_until,
};

/// The most threads a pool can have.
pub const MAX_THREADS: usize = 1024;

/// Tasks of one region: two task numbers and the epoch share one word.
const REGION_TASKS: usize = u16::MAX as usize;

/// Chunks per thread of [`Pool::run_ranges`]: small enough that stealing evens
/// out a pre-empted thread, large enough to keep claims (about 20 ns) cheap.
const CHUNKS_PER_THREAD: usize = 8;

type Task<'a> = &'a (dyn Fn(usize) + Sync);
type Payload = Box<dyn Any + Send>;

/// A fork-join thread pool for short regions (a decode step has 150 to 250).
///
/// `threads - 1` workers live as long as the pool; the caller of
/// [`run`](Pool::run) is the last thread. Each thread first takes the tasks of
/// its own range from the front, then steals from the back of the others', so
/// a thread that the system has pre-empted delays a region by one task at
/// most. A thread without work spins for 50 us and then parks, the caller too:
/// on a busy machine the core goes to whoever has work. A worker that was
/// pre-empted while a region waited for it works in short bursts for a while
/// (see `pool/pace.rs`).
///
/// Which thread runs a task is not determined; a kernel's result must not
/// depend on it.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// let pool = carat_kernels::Pool::new(2);
/// let sum = AtomicUsize::new(0);
/// pool.run(100, &|task| {
///     sum.fetch_add(task, Ordering::Relaxed);
/// });
/// assert_eq!(sum.into_inner(), 4950);
/// ```
pub struct Pool {
    shared: Arc<Shared>,
    /// Held for the length of a region.
    region: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Number of the current region; workers wait for it to change.
    epoch: AtomicU32,
    stop: AtomicBool,
    /// Tasks of the current region whose end is not reported yet.
    unfinished: AtomicU32,
    /// One per thread: `epoch << 32 | first << 16 | end` of its unclaimed tasks.
    ranges: Vec<Padded<AtomicU64>>,
    /// The function of the current region. Written by the caller while no task
    /// is claimed, read by whoever holds a claim.
    task: Cell<Option<*const (dyn Fn(usize) + Sync)>>,
    /// What the first task that panicked threw.
    panic: Mutex<Option<Payload>>,
    contention: Contention,
    parked_workers: AtomicU32,
    caller_parked: AtomicBool,
    park: Mutex<()>,
    work_ready: Condvar,
    region_done: Condvar,
}

// SAFETY: everything but `task` is `Sync` by itself. `task` holds a pointer to
// a `Sync` closure and is written only in `run_region`, before the ranges of
// the new epoch are published (release) and after every claim of the previous
// region was reported back (`unfinished` is 0, acquire); it is read only
// between a claim (acquire) and the report of that claim.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `task` is only followed while the closure
// it points to is borrowed by a running `run_region`.
unsafe impl Send for Shared {}

/// Two cache lines, since the adjacent-line prefetcher fetches pairs.
#[repr(align(128))]
struct Padded<T>(T);

impl Pool {
    /// A pool of `threads` threads, the caller of [`run`](Pool::run) included.
    ///
    /// 0 counts as 1, and more than [`MAX_THREADS`] as that. If the system
    /// refuses to start a thread, the pool has fewer; see
    /// [`threads`](Pool::threads).
    pub fn new(threads: usize) -> Pool {
        let threads = threads.clamp(1, MAX_THREADS);
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            unfinished: AtomicU32::new(0),
            ranges: (0..threads).map(|_| Padded(AtomicU64::new(0))).collect(),
            task: Cell::new(None),
            panic: Mutex::new(None),
            contention: Contention::new(),
            parked_workers: AtomicU32::new(0),
            caller_parked: AtomicBool::new(false),
            park: Mutex::new(()),
            work_ready: Condvar::new(),
            region_done: Condvar::new(),
        });
        let mut workers = Vec::with_capacity(threads - 1);
        for thread in 1..threads {
            let shared = shared.clone();
            let spawned = Builder::new()
                .name(format!("carat-pool-{thread}"))
                .spawn(move || shared.work(thread));
            match spawned {
                Ok(worker) => workers.push(worker),
                Err(_) => break,
            }
        }
        Pool {
            shared,
            region: Mutex::new(()),
            workers,
        }
    }

    /// Threads that run tasks, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(0)`, `f(1)`, … `f(tasks - 1)`, each once, on all threads, and
    /// returns when all have ended.
    ///
    /// One task, or a pool of one thread, runs on the caller without any
    /// synchronisation. So does a `run` from within a task (of this or of any
    /// other pool). Calls from several threads take turns.
    ///
    /// # Panics
    ///
    /// If a task panics: the others still run, then the first payload is thrown
    /// on the caller. The pool stays usable.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let thrown = if tasks <= 1 || self.workers.is_empty() || IN_TASK.with(|t| t.get()) {
            let mut first = None;
            for task in 0..tasks {
                call(f, task, |payload| {
                    first.get_or_insert(payload);
                });
            }
            first
        } else {
            let _turn = lock(&self.region);
            let mut first = None;
            for base in (0..tasks).step_by(REGION_TASKS) {
                let count = REGION_TASKS.min(tasks - base);
                let thrown = if base == 0 {
                    self.run_region(count, f)
                } else {
                    self.run_region(count, &|task| f(base + task))
                };
                first = first.or(thrown);
            }
            first
        };
        if let Some(payload) = thrown {
            resume_unwind(payload);
        }
    }

    /// Cuts `0..len` into consecutive ranges of at least `min_len` items (the
    /// last may be shorter) and runs `f` on each, on all threads: about eight
    /// ranges per thread, or one if `len <= min_len`.
    ///
    /// Where the cuts fall depends on the number of threads; `f` must treat
    /// each item alike.
    ///
    /// # Panics
    ///
    /// As [`run`](Pool::run).
    pub fn run_ranges(&self, len: usize, min_len: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
        if len == 0 {
            return;
        }
        if self.workers.is_empty() {
            return f(0..len);
        }
        let chunk = len
            .div_ceil(self.threads() * CHUNKS_PER_THREAD)
            .max(min_len)
            .max(1);
        self.run(len.div_ceil(chunk), &|task| {
            let start = task * chunk;
            f(start..len.min(start + chunk));
        });
    }

    /// Cuts `data` into chunks of `chunk` items (the last may be shorter) and
    /// runs `f(index of the chunk's first item, chunk)` on each, on all threads.
    ///
    /// # Panics
    ///
    /// If `chunk` is 0; and as [`run`](Pool::run).
    pub fn run_chunks_mut<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        f: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        assert!(chunk > 0, "chunks must not be empty");
        let len = data.len();
        let data = DisjointMut::new(data);
        self.run(len.div_ceil(chunk), &|task| {
            let start = task * chunk;
            // SAFETY: each task has its own range, and each runs once.
            let chunk = unsafe { data.range(start..len.min(start + chunk)) };
            f(start, chunk);
        });
    }

    /// One region of 2 to [`REGION_TASKS`] tasks; `self.region` is held.
    fn run_region(&self, tasks: usize, f: Task<'_>) -> Option<Payload> {
        let shared = &*self.shared;
        let threads = self.threads();
        // SAFETY: only the lifetime changes. The pointer is followed by holders
        // of a claim only, and this function returns after all claims have been
        // reported.
        let erased =
            unsafe { std::mem::transmute::<Task<'_>, *const (dyn Fn(usize) + Sync + 'static)>(f) };
        // SAFETY: no task is claimed now (`unfinished` was 0 when the last
        // region ended, and the ranges of its epoch are empty), so nobody reads.
        shared.task.with_mut(|task| unsafe { *task = Some(erased) });
        shared.unfinished.store(tasks as u32, Ordering::Relaxed);
        let epoch = shared.epoch.load(Ordering::Relaxed).wrapping_add(1);
        for (thread, range) in shared.ranges[..threads].iter().enumerate() {
            let first = tasks * thread / threads;
            let end = tasks * (thread + 1) / threads;
            range.0.store(pack(epoch, first, end), Ordering::Release);
        }
        shared.epoch.store(epoch, Ordering::Release);
        // Pairs with the fence of a worker about to park: either it sees the
        // new epoch, or this thread sees that it is parked.
        fence(Ordering::SeqCst);
        if shared.parked_workers.load(Ordering::Relaxed) != 0 {
            // The lock waits for a worker between its last look and its sleep.
            drop(lock(&shared.park));
            shared.work_ready.notify_all();
        }
        let start = shared.contention.region_starts();
        shared.run_tasks(epoch, 0, || false);
        shared.contention.caller_waits(start);
        shared.wait_for_end();
        lock(&shared.panic).take()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        {
            // Under the lock, so that no worker is between its last look and
            // its sleep.
            let _park = lock(&self.shared.park);
            let next = self.shared.epoch.load(Ordering::Relaxed).wrapping_add(1);
            self.shared.epoch.store(next, Ordering::Release);
        }
        self.shared.work_ready.notify_all();
        for worker in self.workers.drain(..) {
            // Tasks are called under `catch_unwind`, so a worker never panics.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .finish_non_exhaustive()
    }
}

/// How a thread left a region.
enum Left {
    /// Nothing was left to claim.
    AtEnd,
    /// A rest was due; there may be more.
    Early,
}

impl Shared {
    /// The life of a worker.
    fn work(&self, thread: usize) {
        let mut seen = 0;
        let mut pace = Pace::new(&self.contention);
        loop {
            let changed = || self.epoch.load(Ordering::Acquire) != seen;
            if !spin_until(SPIN, changed) {
                let mut park = lock(&self.park);
                self.parked_workers.fetch_add(1, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                while !changed() {
                    park = wait(&self.work_ready, park);
                }
                self.parked_workers.fetch_sub(1, Ordering::Relaxed);
            }
            seen = self.epoch.load(Ordering::Acquire);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            // A paced worker may leave a region early: it rests and comes back.
            while let Left::Early = self.take_part(seen, thread, &mut pace) {
                pace.rest_if_due();
            }
        }
    }

    /// A worker's part in region `epoch`: claims and runs tasks until none is
    /// left to claim, or a rest is due.
    fn take_part(&self, epoch: u32, thread: usize, pace: &mut Pace<'_>) -> Left {
        let (left, kept_waiting) = self.run_tasks(epoch, thread, || pace.is_rest_due());
        if kept_waiting {
            pace.kept_caller_waiting();
        }
        left
    }

    /// Claims and runs tasks of region `epoch` until none is left to claim or
    /// `is_rest_due`. Also returns whether the caller had parked to wait for the
    /// last of these tasks.
    fn run_tasks(&self, epoch: u32, thread: usize, is_rest_due: impl Fn() -> bool) -> (Left, bool) {
        let was_in_task = IN_TASK.with(|t| t.replace(true));
        let threads = self.ranges.len();
        let mut done = 0;
        let mut left = Left::AtEnd;
        'ranges: for offset in 0..threads {
            let range = &self.ranges[(thread + offset) % threads].0;
            loop {
                if is_rest_due() {
                    left = Left::Early;
                    break 'ranges;
                }
                let Some(task) = claim(range, epoch, offset == 0) else {
                    break;
                };
                // SAFETY: a claim is held, so the caller is inside `run_region`
                // and does not write `task`; what it wrote came before the range.
                let f = self.task.with(|task| unsafe { *task });
                if let Some(f) = f {
                    // SAFETY: the closure is borrowed until `run_region` returns,
                    // which waits for this claim.
                    call(unsafe { &*f }, task, |payload| {
                        lock(&self.panic).get_or_insert(payload);
                    });
                }
                done += 1;
            }
        }
        IN_TASK.with(|t| t.set(was_in_task));
        if done == 0 {
            return (left, false);
        }
        // From here on a claim is no longer held: only `self` may be used.
        if self.unfinished.fetch_sub(done, Ordering::AcqRel) == done {
            // Pairs with the fence of a caller about to park.
            fence(Ordering::SeqCst);
            if self.caller_parked.load(Ordering::Relaxed) {
                drop(lock(&self.park));
                self.region_done.notify_all();
                return (left, true);
            }
        }
        (left, false)
    }

    /// Returns when every task of the region has ended.
    fn wait_for_end(&self) {
        let ended = || self.unfinished.load(Ordering::Acquire) == 0;
        if spin_until(self.contention.patience().unwrap_or(SPIN), ended) {
            return;
        }
        let mut park = lock(&self.park);
        self.caller_parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while !ended() {
            park = wait(&self.region_done, park);
        }
        self.caller_parked.store(false, Ordering::Relaxed);
    }
}

/// A mutable slice of which tasks of a region borrow parts that do not overlap.
pub(crate) struct DisjointMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out disjoint `&mut` parts (see `range`), which may go to
// other threads when `T` may.
unsafe impl<T: Send> Sync for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> DisjointMut<'a, T> {
        DisjointMut {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// A part of the slice.
    ///
    /// # Safety
    ///
    /// While the result lives, no other part that overlaps it is borrowed.
    ///
    /// # Panics
    ///
    /// If the range exceeds the slice.
    #[allow(clippy::mut_from_ref)] // the caller promises what the signature cannot
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} of {} items",
            self.len
        );
        // SAFETY: inside the slice (asserted), which is mutably borrowed for
        // `'a`; no overlap by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Takes a task from the front of a range, or from the back when stealing.
///
/// The epoch in the word makes the claim fail if the region has ended. It would
/// be mistaken only after a worker had slept, between its load and its
/// exchange, through exactly 2^32 regions.
fn claim(range: &AtomicU64, epoch: u32, own: bool) -> Option<usize> {
    let mut word = range.load(Ordering::Acquire);
    loop {
        let (first, end) = ((word >> 16) as u16 as usize, word as u16 as usize);
        if (word >> 32) as u32 != epoch || first >= end {
            return None;
        }
        let (rest, task) = if own {
            (pack(epoch, first + 1, end), first)
        } else {
            (pack(epoch, first, end - 1), end - 1)
        };
        match range.compare_exchange(word, rest, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(task),
            Err(now) => word = now,
        }
    }
}

fn pack(epoch: u32, first: usize, end: usize) -> u64 {
    u64::from(epoch) << 32 | (first as u64) << 16 | end as u64
}

/// Calls `f(task)`; what it throws goes to `caught`.
fn call(f: Task<'_>, task: usize, caught: impl FnOnce(Payload)) {
    // A closure that panics leaves broken state behind only in what it
    // borrows; the caller learns of it, since the panic goes on there.
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| f(task))) {
        caught(payload);
    }
}

/// Locks; nothing is left half-done under any of these locks, so poison means
/// nothing.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a>(condvar: &Condvar, guard: MutexGuard<'a, ()>) -> MutexGuard<'a, ()> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
