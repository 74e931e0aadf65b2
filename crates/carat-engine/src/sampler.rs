//! From logits to a token.

use crate::{
    EngineError,
    margin::{argmax, log_sum_exp},
};

/// How the next token is chosen. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Softmax temperature; 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of the most likely with this probability mass.
    pub top_p: f32,
    /// Keep what is at least this fraction of the most likely.
    pub min_p: f32,
    /// Logits of seen tokens are divided (or multiplied, if negative) by this.
    pub repetition_penalty: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl SamplingOptions {
    /// Whether the most likely token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    fn validate(&self) -> Result<(), EngineError> {
        let check = |name, value: f32, ok: bool, expected| {
            if ok {
                Ok(())
            } else {
                Err(EngineError::Sampling {
                    name,
                    value: value.to_string(),
                    expected,
                })
            }
        };
        let t = self.temperature;
        check(
            "temperature",
            t,
            t.is_finite() && t >= 0.0,
            "a number of at least 0",
        )?;
        check(
            "top-p",
            self.top_p,
            self.top_p > 0.0 && self.top_p <= 1.0,
            "above 0 and at most 1",
        )?;
        check(
            "min-p",
            self.min_p,
            (0.0..=1.0).contains(&self.min_p),
            "between 0 and 1",
        )?;
        let r = self.repetition_penalty;
        check(
            "repetition penalty",
            r,
            r.is_finite() && r > 0.0,
            "a positive number",
        )
    }
}

/// splitmix64: a full-period generator with one word of state.
#[derive(Clone, Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1): the top 53 bits.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Chooses tokens; one per sequence, since it holds random state.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    random: SplitMix64,
    scratch: Vec<f32>,
    order: Vec<u32>,
}

impl Sampler {
    /// Checks the options.
    pub fn new(options: SamplingOptions) -> Result<Self, EngineError> {
        options.validate()?;
        let random = SplitMix64(options.seed);
        Ok(Sampler {
            options,
            random,
            scratch: Vec::new(),
            order: Vec::new(),
        })
    }

    /// Chooses from a row of logits. `seen` are the ids the repetition penalty
    /// applies to. `None` if no logit is a number.
    ///
    /// Order of the filters: penalty, temperature, top-k, top-p, min-p, draw.
    pub fn sample(&mut self, logits: &[f32], seen: &[u32]) -> Option<u32> {
        let penalty = self.options.repetition_penalty;
        let penalised = penalty != 1.0 && !seen.is_empty();
        if self.options.is_greedy() && !penalised {
            return argmax(logits);
        }
        self.scratch.clear();
        self.scratch.extend_from_slice(logits);
        if penalised {
            // Once per distinct token, whatever its count.
            for &id in seen {
                let (Some(to), Some(&from)) =
                    (self.scratch.get_mut(id as usize), logits.get(id as usize))
                else {
                    continue;
                };
                *to = if from > 0.0 {
                    from / penalty
                } else {
                    from * penalty
                };
            }
        }
        if self.options.is_greedy() {
            return argmax(&self.scratch);
        }
        let values = &mut self.scratch;
        // Shifted by the largest before the division, or a low temperature would
        // make several logits infinite and tell them apart no more.
        let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if max.is_finite() {
            for v in values.iter_mut() {
                *v = (*v - max) / self.options.temperature;
            }
        }
        self.order.clear();
        self.order
            .extend((0..values.len() as u32).filter(|i| !values[*i as usize].is_nan()));
        if self.order.is_empty() {
            return None;
        }
        let descending = |a: &u32, b: &u32| {
            values[*b as usize]
                .total_cmp(&values[*a as usize])
                .then(a.cmp(b))
        };
        let k = self.options.top_k;
        if k > 0 && k < self.order.len() {
            self.order.select_nth_unstable_by(k - 1, descending);
            self.order.truncate(k);
        }
        self.order.sort_unstable_by(descending);
        let kept: Vec<f32> = self.order.iter().map(|i| values[*i as usize]).collect();
        let norm = log_sum_exp(&kept);
        let probabilities: Vec<f64> = if norm.is_infinite() {
            // Infinite logits: all the mass is on the first.
            (0..kept.len())
                .map(|i| if i == 0 { 1.0 } else { 0.0 })
                .collect()
        } else {
            kept.iter().map(|v| (f64::from(*v) - norm).exp()).collect()
        };
        let floor = probabilities[0] * f64::from(self.options.min_p);
        let mut mass = 0.0;
        let mut count = 0;
        for p in &probabilities {
            if count > 0 && (mass >= f64::from(self.options.top_p) || *p < floor) {
                break;
            }
            mass += p;
            count += 1;
        }
        let mut draw = self.random.unit() * mass;
        for (id, p) in self.order.iter().zip(&probabilities).take(count) {
            draw -= p;
            if draw < 0.0 {
                return Some(*id);
            }
        }
        // Rounding can leave a sliver of mass: it belongs to the last kept.
        self.order.get(count - 1).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(options: SamplingOptions) -> Sampler {
        Sampler::new(options).unwrap()
    }

    #[test]
    fn default_is_greedy_and_ignores_the_seed() {
        let mut s = sampler(SamplingOptions {
            seed: 7,
            ..Default::default()
        });
        assert_eq!(s.sample(&[0.1, 5.0, -1.0], &[]), Some(1));
        assert_eq!(s.sample(&[f32::NAN; 3], &[]), None);
    }

    #[test]
    fn draws_follow_the_distribution() {
        // p = 1/6, 2/6, 3/6 over 60,000 draws: chi-square with 2 degrees of
        // freedom exceeds 13.8 once in a thousand; the seed is fixed.
        let logits = [1f32.ln(), 2f32.ln(), 3f32.ln()];
        let mut s = sampler(SamplingOptions {
            temperature: 1.0,
            seed: 1,
            ..Default::default()
        });
        let mut counts = [0f64; 3];
        let n = 60_000;
        for _ in 0..n {
            counts[s.sample(&logits, &[]).unwrap() as usize] += 1.0;
        }
        let chi: f64 = counts
            .iter()
            .zip([1.0, 2.0, 3.0])
            .map(|(c, w)| {
                let e = n as f64 * w / 6.0;
                (c - e).powi(2) / e
            })
            .sum();
        assert!(chi < 13.8, "{counts:?}");
    }

    #[test]
    fn the_lowest_temperature_is_still_a_choice_of_the_largest() {
        for temperature in [1e-40, f32::MIN_POSITIVE, 1e-20] {
            let mut s = sampler(SamplingOptions {
                temperature,
                ..Default::default()
            });
            assert_eq!(s.sample(&[2.0, 1.0, 3.0, f32::NAN], &[]), Some(2));
            assert_eq!(s.sample(&[-3.0, -1.0, -2.0], &[]), Some(1));
            assert_eq!(s.sample(&[1.0, f32::INFINITY, 2.0], &[]), Some(1));
            assert_eq!(s.sample(&[f32::NEG_INFINITY; 2], &[]), Some(0));
        }
    }

    #[test]
    fn filters_keep_only_what_they_say() {
        let logits: Vec<f32> = [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
        let seen_ids = |options: SamplingOptions| {
            let mut s = sampler(SamplingOptions {
                temperature: 1.0,
                ..options
            });
            let mut ids: Vec<_> = (0..2_000).filter_map(|_| s.sample(&logits, &[])).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        assert_eq!(
            seen_ids(SamplingOptions {
                top_k: 2,
                ..Default::default()
            }),
            [0, 1]
        );
        assert_eq!(
            seen_ids(SamplingOptions {
                top_p: 0.5,
                ..Default::default()
            }),
            [0, 1]
        );
        assert_eq!(
            seen_ids(SamplingOptions {
                min_p: 0.45,
                ..Default::default()
            }),
            [0, 1, 2]
        );
        assert_eq!(seen_ids(SamplingOptions::default()), [0, 1, 2, 3]);
    }

    #[test]
    fn the_penalty_moves_logits_towards_less_likely_once_per_token() {
        let mut s = sampler(SamplingOptions {
            repetition_penalty: 2.0,
            ..Default::default()
        });
        assert_eq!(s.sample(&[4.0, 3.0], &[0, 0, 0]), Some(1));
        assert_eq!(
            s.sample(&[4.0, 1.5], &[0, 0, 0]),
            Some(0),
            "4/2 is above 1.5, 4/8 is not"
        );
        assert_eq!(s.sample(&[-1.0, -1.5], &[0]), Some(1));
    }

    #[test]
    fn bad_settings_are_errors() {
        for options in [
            SamplingOptions {
                temperature: -1.0,
                ..Default::default()
            },
            SamplingOptions {
                temperature: f32::NAN,
                ..Default::default()
            },
            SamplingOptions {
                top_p: 0.0,
                ..Default::default()
            },
            SamplingOptions {
                min_p: 1.5,
                ..Default::default()
            },
            SamplingOptions {
                repetition_penalty: 0.0,
                ..Default::default()
            },
        ] {
            assert!(matches!(
                Sampler::new(options),
                Err(EngineError::Sampling { .. })
            ));
        }
    }
}
