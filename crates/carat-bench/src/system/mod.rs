//! The machine while it is measured: clocks, heat, power and neighbours.

mod battery;
mod counters;
mod gpu;
mod page_cache;
mod sensors;

pub use battery::BatteryReading;
pub use gpu::GpuReading;
pub use page_cache::{evict, storage_bytes_read};
pub use sensors::{Processes, Reading, Sensors, SystemSensors};

use std::time::{Duration, Instant};

use crate::Nanos;

/// Time as a run sees it: tests put their own in its place.
pub trait Clock {
    /// Now, counted from some moment before the run, never backwards.
    fn now(&self) -> Nanos;
    /// Waits.
    fn sleep(&self, time: Nanos);
}

/// The monotonic clock of the system.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl SystemClock {
    /// A clock that begins now.
    pub fn start() -> SystemClock {
        SystemClock(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Nanos {
        self.0.elapsed().into()
    }

    fn sleep(&self, time: Nanos) {
        std::thread::sleep(Duration::from(time));
    }
}
