//! Work shared out among scoped threads.
//!
//! Items are independent and their boundaries never depend on the number of
//! threads, so neither do results.

use std::sync::{Mutex, PoisonError};

/// Runs `work` on every item, on up to `threads` threads including this one.
pub(crate) fn for_each<T: Send>(
    threads: usize,
    items: impl ExactSizeIterator<Item = T> + Send,
    work: impl Fn(T) + Sync,
) {
    for_each_with(threads, items, || (), |(), item| work(item));
}

/// [`for_each`] with something that each thread has for itself, such as scratch.
pub(crate) fn for_each_with<T: Send, S>(
    threads: usize,
    items: impl ExactSizeIterator<Item = T> + Send,
    own: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let extra = threads.min(items.len()).saturating_sub(1);
    if extra == 0 {
        let mut own = own();
        items.for_each(|item| work(&mut own, item));
        return;
    }
    let queue = Mutex::new(items);
    let drain = || {
        let mut own = own();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            match next {
                Some(item) => work(&mut own, item),
                None => return,
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..extra {
            scope.spawn(drain);
        }
        drain();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once() {
        for threads in [1, 2, 3, 8] {
            let mut counts = [0u32; 37];
            for_each(threads, counts.iter_mut(), |c| *c += 1);
            assert!(counts.iter().all(|&c| c == 1), "{threads} threads");
        }
    }
}
