//! Medians, spreads and intervals.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::prompt::SplitMix64;

/// Resamples of a bootstrap: the bounds of a 95 % interval are then the 250th
/// value from either end, whose own noise is below that of the data.
const RESAMPLES: usize = 10_000;

/// Seed of every bootstrap: the same values always give the same interval.
const BOOTSTRAP_SEED: u64 = 0x6361_7261_7400;

/// Fewest values that an interval is given for. The whole range of `n` values
/// holds the median with a chance of `1 - 2^(1 - n)`: 94 % for five, and 88 % for
/// four, where no interval could keep the promise.
pub const FEWEST_FOR_INTERVAL: usize = 5;

/// A 95 % interval: percentile bootstrap of the median.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// Summary of repeated measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// Middle value (mean of the two middle ones for an even count).
    pub median: f64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Where the median would lie in 95 of 100 repetitions; `null` for fewer
    /// than five values.
    #[serde(default)]
    pub interval: Option<Interval>,
}

/// Summarises measurements; `None` if there are none.
pub fn spread(values: &[f64]) -> Option<Spread> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    let interval = (values.len() >= FEWEST_FOR_INTERVAL)
        .then(|| bootstrap(|random| median(&mut resample(values, random))));
    Some(Spread {
        median: median(&mut sorted),
        mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
        min,
        max,
        interval,
    })
}

/// Summary of `a[i] / b[i]`: values that were measured side by side, so that
/// what disturbed both cancels. `None` if their numbers differ or there are none.
pub fn paired_ratio(a: &[f64], b: &[f64]) -> Option<Spread> {
    if a.len() != b.len() {
        return None;
    }
    spread(&a.iter().zip(b).map(|(a, b)| a / b).collect::<Vec<_>>())
}

/// `median(new) / median(old)` of values measured apart from each other, with
/// the interval of independent resamples of both sides; `None` if a side has
/// too few values for one.
pub fn unpaired_ratio(new: &[f64], old: &[f64]) -> Option<(f64, Interval)> {
    if new.len().min(old.len()) < FEWEST_FOR_INTERVAL {
        return None;
    }
    let interval = bootstrap(|random| {
        let mut new = resample(new, random);
        let mut old = resample(old, random);
        median(&mut new) / median(&mut old)
    });
    Some((
        median(&mut new.to_vec()) / median(&mut old.to_vec()),
        interval,
    ))
}

fn bootstrap(mut statistic: impl FnMut(&mut SplitMix64) -> f64) -> Interval {
    let mut random = SplitMix64::new(BOOTSTRAP_SEED);
    let mut values: Vec<f64> = (0..RESAMPLES).map(|_| statistic(&mut random)).collect();
    values.sort_by(f64::total_cmp);
    let tail = RESAMPLES / 40;
    Interval {
        low: values[tail],
        high: values[RESAMPLES - 1 - tail],
    }
}

fn resample(values: &[f64], random: &mut SplitMix64) -> Vec<f64> {
    let n = values.len() as u64;
    // The bias of a remainder is below n / 2^64.
    (0..n)
        .map(|_| values[(random.draw() % n) as usize])
        .collect()
}

/// The middle value; 0 of none.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
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
                max: 4.0,
                interval: None,
            })
        );
    }

    #[test]
    fn an_interval_is_repeatable_and_narrows_with_more_values() {
        let noise = |n: usize| -> Vec<f64> {
            let mut random = SplitMix64::new(3);
            (0..n)
                .map(|_| 100.0 + (random.draw() >> 40) as f64 / (1u64 << 24) as f64)
                .collect()
        };
        let width = |n| {
            let i = spread(&noise(n)).unwrap().interval.unwrap();
            i.high - i.low
        };
        assert_eq!(spread(&noise(20)), spread(&noise(20)));
        assert!(width(400) < width(20) && width(400) > 0.0);
        // Values without spread leave no doubt.
        let i = spread(&[2.0; 5]).unwrap().interval.unwrap();
        assert_eq!((i.low, i.high), (2.0, 2.0));
    }

    /// The interval's ends are order statistics whatever the values are: of n
    /// values the k-th, for the least k with P(Binomial(n, k/n) > n/2) > 2.5 %.
    /// For 25 values that is the eighth (3.0 %, the seventh has 1.0 %), and from
    /// the 8th to the 18th of 25 hold the median with P(8 <= Binomial(25, 1/2) <=
    /// 17) = 95.7 %.
    #[test]
    fn an_interval_covers_as_often_as_it_says() {
        let values: Vec<f64> = (1..=25).map(f64::from).collect();
        let i = spread(&values).unwrap().interval.unwrap();
        assert_eq!((i.low, i.high), (8.0, 18.0));
    }

    #[test]
    fn pairs_cancel_what_disturbed_both() {
        let b: [f64; 6] = [10.0, 20.0, 5.0, 40.0, 13.0, 7.0];
        let a: Vec<f64> = b.iter().map(|b| b * 1.5).collect();
        let ratio = paired_ratio(&a, &b).unwrap();
        let interval = ratio.interval.unwrap();
        assert_eq!((interval.low, ratio.median, interval.high), (1.5, 1.5, 1.5));
        // Apart from each other the same values say much less.
        let (ratio, interval) = unpaired_ratio(&a, &b).unwrap();
        assert_eq!(ratio, 1.5);
        assert!(interval.low < 1.0 && interval.high > 2.0);
        assert_eq!(paired_ratio(&a, &b[1..]), None);
        assert_eq!(unpaired_ratio(&a[..4], &b), None);
    }
}
