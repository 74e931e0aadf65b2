//! Rotary position embedding.

use carat_bundle::spec::RopeSpec;

/// Sines and cosines of a run of rows, one row per token.
pub(crate) struct RopeTable {
    /// `rotary_dim / 2`.
    pairs: usize,
    /// `[rows, pairs]`
    cos: Vec<f32>,
    /// `[rows, pairs]`
    sin: Vec<f32>,
}

impl RopeTable {
    /// Tables for tokens at `positions`, with frequencies from
    /// [`RopeSpec::inv_freq`].
    pub(crate) fn new(
        spec: &RopeSpec,
        inv_freq: &[f32],
        positions: impl ExactSizeIterator<Item = usize>,
    ) -> RopeTable {
        let pairs = inv_freq.len();
        let factor = spec.attention_factor();
        let mut cos = Vec::with_capacity(positions.len() * pairs);
        let mut sin = Vec::with_capacity(positions.len() * pairs);
        for position in positions {
            for &frequency in inv_freq {
                // The angle is the references' fp32 product; its sine and cosine are
                // rounded from f64, so that no system's fp32 routines show.
                let angle = f64::from(position as f32 * frequency);
                cos.push(angle.cos() as f32 * factor);
                sin.push(angle.sin() as f32 * factor);
            }
        }
        RopeTable { pairs, cos, sin }
    }

    /// Rotates every head of `x` (`[rows, heads, head_dim]`), whose first row is
    /// the table's row `first`: `(a, b) -> (a cos - b sin, b cos + a sin)` on
    /// elements `i` and `i + pairs` of a head.
    pub(crate) fn rotate(&self, first: usize, heads: usize, head_dim: usize, x: &mut [f32]) {
        let angles = self
            .cos
            .chunks_exact(self.pairs)
            .zip(self.sin.chunks_exact(self.pairs));
        for (row, (cos, sin)) in x.chunks_exact_mut(heads * head_dim).zip(angles.skip(first)) {
            for head in row.chunks_exact_mut(head_dim) {
                let (low, rest) = head.split_at_mut(self.pairs);
                for (((a, b), c), s) in low.iter_mut().zip(rest).zip(cos).zip(sin) {
                    (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carat_bundle::spec::RopeScaling;

    fn table(positions: &[usize]) -> RopeTable {
        let spec = RopeSpec {
            rotary_dim: 4,
            theta: 100.0,
            scaling: RopeScaling::None,
        };
        RopeTable::new(&spec, &spec.inv_freq(8), positions.iter().copied())
    }

    #[test]
    fn pairs_turn_by_position_times_frequency_and_the_rest_stays() {
        // inv_freq = [1, 0.1]; one row at position 3, two heads of 6 with 4 rotating.
        let head = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut x = [head, head].concat();
        table(&[0, 3]).rotate(1, 2, 6, &mut x);
        let turn = |a: f64, b: f64, angle: f64| {
            (
                a * angle.cos() - b * angle.sin(),
                b * angle.cos() + a * angle.sin(),
            )
        };
        let (x0, x2) = turn(1.0, 3.0, 3.0);
        let (x1, x3) = turn(2.0, 4.0, f64::from(3.0f32 * 0.1f32));
        let expected = [x0, x1, x2, x3, 5.0, 6.0].repeat(2);
        for (x, e) in x.iter().zip(expected) {
            // cos, sin, two products and a sum, each within eps/2 of terms below 5.
            assert!(
                (f64::from(*x) - e).abs() <= 4.0 * 5.0 * f64::from(f32::EPSILON),
                "{x} {e}"
            );
        }
    }

    #[test]
    fn scores_depend_on_distance_only() {
        let dot = |p: usize, q: usize| {
            let (mut a, mut b) = ([0.3f32, -1.0, 0.7, 0.2], [1.1f32, 0.4, -0.6, 0.9]);
            table(&[p]).rotate(0, 1, 4, &mut a);
            table(&[q]).rotate(0, 1, 4, &mut b);
            a.iter()
                .zip(b)
                .map(|(a, b)| f64::from(*a) * f64::from(b))
                .sum::<f64>()
        };
        // Both vectors are shorter than 2: their products carry at most a few eps.
        assert!((dot(2, 5) - dot(4, 7)).abs() < 16.0 * f64::from(f32::EPSILON));
        assert!((dot(2, 5) - dot(2, 6)).abs() > 0.01);
    }
}
