//! Progress bars: only for a person, only for what takes a while.

use std::{
    sync::{Mutex, mpsc},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar that shows up once the work has lasted a second, and never when
/// standard error is not a terminal.
pub(crate) struct Bar {
    bar: Mutex<ProgressBar>,
    started: std::time::Instant,
}

const DELAY: Duration = Duration::from_secs(1);

impl Bar {
    pub(crate) fn new() -> Self {
        Bar {
            bar: Mutex::new(ProgressBar::hidden()),
            started: std::time::Instant::now(),
        }
    }

    fn with(&self, f: impl FnOnce(&ProgressBar)) {
        if let Ok(bar) = self.bar.lock() {
            f(&bar);
        }
    }

    /// Starts a piece of work of `total` bytes or items, if known.
    pub(crate) fn start(&self, what: &str, total: Option<u64>, unit_bytes: bool) {
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        bar.set_draw_target(ProgressDrawTarget::hidden());
        let template = match (total.is_some(), unit_bytes) {
            (true, true) => "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            (true, false) => "{msg} {bar:30} {pos}/{len} {eta}",
            (false, true) => "{msg} {spinner} {bytes}",
            (false, false) => "{msg} {spinner} {pos}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        if let Ok(mut slot) = self.bar.lock() {
            slot.finish_and_clear();
            *slot = bar;
        }
    }

    /// Says how far the current piece is, whose size is only known now.
    pub(crate) fn report(&self, done: u64, total: u64) {
        self.with(|bar| bar.set_length(total));
        self.set(done);
    }

    /// Moves on.
    pub(crate) fn advance(&self, by: u64) {
        self.with(|bar| {
            bar.inc(by);
            self.reveal(bar);
        });
    }

    /// Moves to.
    pub(crate) fn set(&self, position: u64) {
        self.with(|bar| {
            bar.set_position(position);
            self.reveal(bar);
        });
    }

    fn reveal(&self, bar: &ProgressBar) {
        if bar.is_hidden() && self.started.elapsed() >= DELAY && crate::output::is_interactive() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Ends the bar and removes it from the screen.
    pub(crate) fn finish(&self) {
        self.with(ProgressBar::finish_and_clear);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Shows that work of unknown length goes on, once it has lasted a second. It
/// turns by itself, since such work has no place to report from.
pub(crate) struct Spinner {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

const TICK: Duration = Duration::from_millis(100);

impl Spinner {
    pub(crate) fn start(what: &str) -> Self {
        let (stop, stopped) = mpsc::channel::<()>();
        if !crate::output::is_interactive() {
            return Spinner {
                stop: None,
                thread: None,
            };
        }
        let what = what.to_owned();
        let turn = move || {
            let bar = ProgressBar::hidden();
            let mut wait = DELAY;
            // Ends when the other side is dropped.
            while stopped.recv_timeout(wait) == Err(mpsc::RecvTimeoutError::Timeout) {
                if bar.is_hidden() {
                    if let Ok(style) = ProgressStyle::with_template("{msg} {spinner} {elapsed}") {
                        bar.set_style(style);
                    }
                    bar.set_message(what.clone());
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                }
                bar.tick();
                wait = TICK;
            }
            bar.finish_and_clear();
        };
        Spinner {
            stop: Some(stop),
            // A system without another thread to spare gets no spinner.
            thread: Builder::new().name("spinner".into()).spawn(turn).ok(),
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It draws and nothing else: there is no result to lose.
            let _ = thread.join();
        }
    }
}
