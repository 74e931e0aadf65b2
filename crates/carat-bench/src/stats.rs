//! Medians and spreads.

use serde::{Deserialize, Serialize};

/// Summary of repeated measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Middle value (mean of the two middle ones for an even count).
    pub median: f64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

/// Summarises measurements; `None` if there are none.
pub fn spread(values: &[f64]) -> Option<Spread> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
    Some(Spread {
        median,
        mean: sorted.iter().sum::<f64>() / n as f64,
        min,
        max,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[3.0, 1.0, 2.0]).unwrap().median, 2.0);
        assert_eq!(
            spread(&[4.0, 1.0, 2.0, 3.0]),
            Some(Spread {
                median: 2.5,
                mean: 2.5,
                min: 1.0,
                max: 4.0
            })
        );
    }
}
