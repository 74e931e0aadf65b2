//! The one type of every duration.

use std::{fmt, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A duration on the monotonic clock in whole nanoseconds. Every span of this
/// crate has this type, from the clock to the record, so that no unit is
/// guessed on the way and no second is dropped.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Whole milliseconds.
    pub const fn from_millis(ms: u64) -> Nanos {
        Nanos(ms.saturating_mul(1_000_000))
    }

    /// The nearest nanosecond of a number of seconds; negative and undefined
    /// ones are 0.
    pub fn from_secs_f64(seconds: f64) -> Nanos {
        // `as` saturates and makes 0 of NaN.
        Nanos((seconds * 1e9).round() as u64)
    }

    /// Seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Milliseconds.
    pub fn as_millis_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// `count / self` per second; `None` where there is no count or no time.
    pub fn rate(self, count: usize) -> Option<f64> {
        (self.0 > 0 && count > 0).then(|| count as f64 / self.as_secs_f64())
    }

    /// The time since an earlier mark of the same clock.
    pub fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl From<Duration> for Nanos {
    fn from(duration: Duration) -> Nanos {
        Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Nanos> for Duration {
    fn from(nanos: Nanos) -> Duration {
        Duration::from_nanos(nanos.0)
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0..1_000 => write!(f, "{} ns", self.0),
            1_000..1_000_000 => write!(f, "{:.1} us", self.0 as f64 / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", self.as_millis_f64()),
            _ => write!(f, "{:.2} s", self.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_not_dropped() {
        let span = Nanos::from(Duration::new(3, 600_000_000));
        assert_eq!(span, Nanos(3_600_000_000));
        assert_eq!(span.to_string(), "3.60 s");
        assert_eq!(span.as_secs_f64(), 3.6);
        assert_eq!(span.rate(360), Some(100.0));
        assert_eq!(serde_json::to_string(&span).unwrap(), "3600000000");
        assert_eq!(Nanos::from(Duration::MAX), Nanos(u64::MAX));
        assert_eq!(Nanos::from_secs_f64(3.6), span);
        assert_eq!(Nanos::from_secs_f64(f64::NAN), Nanos(0));
    }

    #[test]
    fn no_rate_without_time_or_count() {
        assert_eq!(Nanos(0).rate(5), None);
        assert_eq!(Nanos(5).rate(0), None);
    }
}
