//! Ctrl-C: the first press ends the answer, a second one the program.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

static PRESSED: AtomicBool = AtomicBool::new(false);
static INSTALLED: OnceLock<bool> = OnceLock::new();

/// Starts listening; safe to call again.
pub(crate) fn listen() {
    INSTALLED.get_or_init(|| {
        ctrlc::set_handler(|| {
            if PRESSED.swap(true, Ordering::SeqCst) {
                // 128 + SIGINT, as shells expect.
                std::process::exit(130);
            }
        })
        .is_ok()
    });
}

/// Whether Ctrl-C was pressed since the last [`clear`].
pub(crate) fn pressed() -> bool {
    PRESSED.load(Ordering::SeqCst)
}

/// Forgets a press.
pub(crate) fn clear() {
    PRESSED.store(false, Ordering::SeqCst);
}
