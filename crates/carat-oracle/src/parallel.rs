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
    let extra = threads.min(items.len()).saturating_sub(1);
    if extra == 0 {
        items.for_each(work);
        return;
    }
    let queue = Mutex::new(items);
    let drain = || {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            match next {
                Some(item) => work(item),
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

/// [`for_each`] with work that can fail: the error of the first failed item, in
/// item order, whichever thread met it.
pub(crate) fn try_for_each<T: Send, E: Send>(
    threads: usize,
    items: impl ExactSizeIterator<Item = T> + Send,
    work: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let first: Mutex<Option<(usize, E)>> = Mutex::new(None);
    for_each(threads, items.enumerate(), |(index, item)| {
        if let Err(error) = work(item) {
            let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
            if first.as_ref().is_none_or(|(at, _)| index < *at) {
                *first = Some((index, error));
            }
        }
    });
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
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

    #[test]
    fn the_first_error_in_item_order_is_reported() {
        for threads in [1, 2, 8] {
            let result = try_for_each(threads, 0..100, |i| if i >= 40 { Err(i) } else { Ok(()) });
            assert_eq!(result, Err(40), "{threads} threads");
        }
    }
}
