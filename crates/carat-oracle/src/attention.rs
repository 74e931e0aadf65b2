//! Grouped-query softmax attention.

use carat_bundle::spec::AttentionSpec;

use crate::parallel;

/// Query rows per unit of parallel work.
const ROWS_PER_UNIT: usize = 8;

/// Values summed in one go before the sum joins the total: bounds the growth of
/// rounding error with the context. Counted from the first visible position.
const POSITIONS_PER_SUM: usize = 64;

/// Keys and values of one sequence in one layer, in position order.
#[derive(Clone, Debug, Default)]
pub(crate) struct KvCache {
    /// `[positions, kv_heads, head_dim]`, rotated.
    pub(crate) keys: Vec<f32>,
    /// `[positions, kv_heads, head_dim]`
    pub(crate) values: Vec<f32>,
}

impl KvCache {
    /// Forgets all positions from `positions` on, of `width` values each.
    pub(crate) fn truncate(&mut self, positions: usize, width: usize) {
        self.keys.truncate(positions * width);
        self.values.truncate(positions * width);
    }
}

/// Query rows of one sequence, next to each other.
pub(crate) struct Queries<'q> {
    /// Position of the first row.
    pub(crate) position: usize,
    /// Keys and values of all positions up to the last row's.
    pub(crate) cache: &'q KvCache,
    /// `[rows, heads, head_dim]`, rotated.
    pub(crate) q: &'q [f32],
    /// `[rows, heads, head_dim]`, overwritten.
    pub(crate) out: &'q mut [f32],
}

/// Attends from every query row to the positions it sees: its own and earlier
/// ones within the window. A row's sums run over those positions in ascending
/// order, so they do not depend on what is computed beside it.
pub(crate) fn attend(spec: &AttentionSpec, threads: usize, batch: Vec<Queries<'_>>) {
    let width = spec.heads * spec.head_dim;
    let mut units = Vec::new();
    for queries in batch {
        let chunk = ROWS_PER_UNIT * width;
        for (i, (q, out)) in queries
            .q
            .chunks(chunk)
            .zip(queries.out.chunks_mut(chunk))
            .enumerate()
        {
            let position = queries.position + i * ROWS_PER_UNIT;
            units.push(Queries {
                position,
                cache: queries.cache,
                q,
                out,
            });
        }
    }
    let visible: usize = units.iter().map(|u| u.position + 1).sum();
    // A thread is worth its start from a few tenths of a millisecond of work.
    let threads = if visible * width < 1 << 20 {
        1
    } else {
        threads
    };
    parallel::for_each(threads, units.into_iter(), |unit| {
        let mut scores = Vec::new();
        let rows = unit
            .q
            .chunks_exact(width)
            .zip(unit.out.chunks_exact_mut(width));
        for (i, (q, out)) in rows.enumerate() {
            let position = unit.position + i;
            let heads = q
                .chunks_exact(spec.head_dim)
                .zip(out.chunks_exact_mut(spec.head_dim));
            for (head, (q, out)) in heads.enumerate() {
                attend_head(spec, unit.cache, position, head, q, &mut scores, out);
            }
        }
    });
}

/// `out = softmax(scale * q · keys) · values` of one head at one position.
fn attend_head(
    spec: &AttentionSpec,
    cache: &KvCache,
    position: usize,
    head: usize,
    q: &[f32],
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    let width = spec.kv_heads * spec.head_dim;
    let first = spec.window.map_or(0, |w| (position + 1).saturating_sub(w));
    let at = head / spec.group() * spec.head_dim;
    let seen = first * width..(position + 1) * width;
    let keys = cache.keys[seen.clone()].chunks_exact(width);
    let values = &cache.values[seen];

    scores.clear();
    scores.extend(keys.map(|key| {
        let score = dot(q, &key[at..at + spec.head_dim]) * spec.scale;
        match spec.logit_softcap {
            Some(cap) => cap * (score / cap).tanh(),
            None => score,
        }
    }));
    softmax(scores);

    out.fill(0.0);
    let mut sum = vec![0f32; spec.head_dim];
    let runs = scores
        .chunks(POSITIONS_PER_SUM)
        .zip(values.chunks(POSITIONS_PER_SUM * width));
    for (weights, values) in runs {
        sum.fill(0.0);
        for (weight, value) in weights.iter().zip(values.chunks_exact(width)) {
            for (s, v) in sum.iter_mut().zip(&value[at..at + spec.head_dim]) {
                *s += weight * v;
            }
        }
        for (o, s) in out.iter_mut().zip(&sum) {
            *o += s;
        }
    }
}

/// `exp(x - max) / Σ exp(x - max)`, the sum in f64.
fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0f64;
    for v in x.iter_mut() {
        *v = (*v - max).exp();
        sum += f64::from(*v);
    }
    let sum = sum as f32;
    for v in x.iter_mut() {
        *v /= sum;
    }
}

/// Sixteen running sums, added in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let (a16, b16) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: f32 = a16
        .remainder()
        .iter()
        .zip(b16.remainder())
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in a16.zip(b16) {
        for ((s, a), b) in sums.iter_mut().zip(a).zip(b) {
            *s += a * b;
        }
    }
    let mut half = 8;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0] + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> AttentionSpec {
        AttentionSpec {
            heads: 4,
            kv_heads: 2,
            head_dim: 6,
            qkv_bias: false,
            out_bias: false,
            qk_norm: None,
            rope: None,
            window: None,
            scale: 0.5,
            logit_softcap: None,
        }
    }

    /// Values in -1..1 from a small generator.
    fn noise(n: usize, mut seed: u64) -> Vec<f32> {
        (0..n)
            .map(|_| {
                seed = seed
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// The definition, in f64.
    fn reference(spec: &AttentionSpec, cache: &KvCache, position: usize, q: &[f32]) -> Vec<f64> {
        let width = spec.kv_heads * spec.head_dim;
        let mut out = vec![0f64; q.len()];
        for head in 0..spec.heads {
            let at = |s: usize, d: usize| s * width + head / 2 * spec.head_dim + d;
            let visible: Vec<usize> = (0..=position)
                .filter(|s| spec.window.is_none_or(|w| position - s < w))
                .collect();
            let score = |s: usize| {
                let x: f64 = (0..spec.head_dim)
                    .map(|d| {
                        f64::from(q[head * spec.head_dim + d]) * f64::from(cache.keys[at(s, d)])
                    })
                    .sum::<f64>()
                    * f64::from(spec.scale);
                spec.logit_softcap
                    .map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh())
                    .exp()
            };
            let total: f64 = visible.iter().map(|&s| score(s)).sum();
            for d in 0..spec.head_dim {
                out[head * spec.head_dim + d] = visible
                    .iter()
                    .map(|&s| score(s) / total * f64::from(cache.values[at(s, d)]))
                    .sum();
            }
        }
        out
    }

    #[test]
    fn matches_the_definition_with_window_and_softcap() {
        let positions = 150;
        let cache = KvCache {
            keys: noise(positions * 12, 1),
            values: noise(positions * 12, 2),
        };
        let q = noise(positions * 24, 3);
        for (window, logit_softcap) in [
            (None, None),
            (Some(1), None),
            (Some(70), None),
            (Some(1000), Some(0.3)),
        ] {
            let spec = AttentionSpec {
                window,
                logit_softcap,
                ..spec()
            };
            let mut out = vec![f32::NAN; q.len()];
            let batch = vec![Queries {
                position: 0,
                cache: &cache,
                q: &q,
                out: &mut out,
            }];
            attend(&spec, 2, batch);
            for position in 0..positions {
                let row = position * 24..(position + 1) * 24;
                let expected = reference(&spec, &cache, position, &q[row.clone()]);
                for (o, e) in out[row].iter().zip(expected) {
                    // Scores below 3 carry about 10 roundings of eps/2 each, which exp turns
                    // into a relative error of the weights; weights sum to 1, values are below
                    // 1, and 64 + 3 additions round partial sums below 1.
                    let bound = (10.0 * 3.0 + 67.0 + 4.0) * 0.5 * f64::from(f32::EPSILON);
                    assert!((f64::from(*o) - e).abs() <= bound, "{o} is not {e}");
                }
            }
        }
    }

    #[test]
    fn rows_do_not_depend_on_company_or_threads() {
        let positions = 97;
        let cache = KvCache {
            keys: noise(positions * 12, 4),
            values: noise(positions * 12, 5),
        };
        let q = noise(positions * 24, 6);
        let mut whole = vec![0f32; q.len()];
        attend(
            &spec(),
            1,
            vec![Queries {
                position: 0,
                cache: &cache,
                q: &q,
                out: &mut whole,
            }],
        );
        for (threads, step) in [(1, 1), (2, 5), (3, 31), (2, 97)] {
            let mut parts = vec![0f32; q.len()];
            let batch = parts
                .chunks_mut(step * 24)
                .zip(q.chunks(step * 24))
                .enumerate()
                .map(|(i, (out, q))| Queries {
                    position: i * step,
                    cache: &cache,
                    q,
                    out,
                })
                .collect();
            attend(&spec(), threads, batch);
            assert_eq!(parts, whole, "{threads} threads, steps of {step}");
        }
    }

    #[test]
    fn softmax_survives_large_scores() {
        let mut x = [1000.0, 1000.0, -1000.0];
        softmax(&mut x);
        assert_eq!(x, [0.5, 0.5, 0.0]);
    }
}
