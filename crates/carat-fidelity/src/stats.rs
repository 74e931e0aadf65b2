//! Estimates with their uncertainty.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Two-sided 95 % point of the normal distribution.
const Z95: f64 = 1.959_964;

/// An estimate with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// The estimate.
    pub value: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

impl Estimate {
    /// The mean of a sample, by the normal approximation; neighbouring positions of
    /// a text count as independent, which they are not quite. `None` of nothing.
    pub fn mean(sample: &[f64]) -> Option<Estimate> {
        let n = sample.len() as f64;
        if sample.is_empty() {
            return None;
        }
        let value = sample.iter().sum::<f64>() / n;
        let squares: f64 = sample.iter().map(|x| (x - value).powi(2)).sum();
        let error = (squares / (n - 1.0).max(1.0) / n).sqrt();
        Some(Estimate {
            value,
            low: value - Z95 * error,
            high: value + Z95 * error,
        })
    }

    /// The share of `hits` among `n`: Wilson's interval, which stays within 0..=1
    /// and has a width even where all or none hit. `None` of nothing.
    pub fn share(hits: usize, n: usize) -> Option<Estimate> {
        if n == 0 {
            return None;
        }
        let (p, n) = (hits as f64 / n as f64, n as f64);
        let z2 = Z95 * Z95;
        let middle = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
        let half = Z95 / (1.0 + z2 / n) * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
        Some(Estimate {
            value: p,
            low: (middle - half).max(0.0),
            high: (middle + half).min(1.0),
        })
    }

    /// The estimate and its ends through a growing function.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Estimate {
        Estimate {
            value: f(self.value),
            low: f(self.low),
            high: f(self.high),
        }
    }
}

impl std::fmt::Display for Estimate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let places = f.precision().unwrap_or(4);
        write!(
            f,
            "{:.places$} ({:.places$} to {:.places$})",
            self.value, self.low, self.high
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_all_is_not_certain() {
        // Wilson at 10 of 10: the lower end is 1 / (1 + z²/n).
        let all = Estimate::share(10, 10).unwrap();
        assert!((all.low - 1.0 / (1.0 + 3.841_459 / 10.0)).abs() < 1e-6);
        assert!(all.value == 1.0 && all.high > 1.0 - 1e-12);
        let half = Estimate::share(50, 100).unwrap();
        assert!((half.low - 0.403_83).abs() < 1e-5 && (half.high - 0.596_17).abs() < 1e-5);
        assert_eq!(Estimate::share(0, 0), None);
    }

    #[test]
    fn a_mean_has_the_standard_error_of_its_sample() {
        let e = Estimate::mean(&[1.0, 2.0, 3.0, 4.0]).unwrap();
        // Standard deviation sqrt(5/3), error sqrt(5/12).
        assert_eq!(e.value, 2.5);
        assert!((e.high - e.value - 1.959_964 * (5.0f64 / 12.0).sqrt()).abs() < 1e-9);
        assert_eq!(Estimate::mean(&[]), None);
        let one = Estimate::mean(&[3.0]).unwrap();
        assert_eq!((one.low, one.high), (3.0, 3.0));
    }
}
