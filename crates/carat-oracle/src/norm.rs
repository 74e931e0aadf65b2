//! RMS norm.

use carat_bundle::spec::NormSpec;

/// `x / sqrt(mean(x²) + eps) * (weight + weight_offset)` on every row of
/// `x` (`[rows, weight.len()]`), in place.
pub(crate) fn rms_norm(spec: &NormSpec, weight: &[f32], x: &mut [f32]) {
    for row in x.chunks_exact_mut(weight.len()) {
        let mean = sum_of_squares(row) / row.len() as f64;
        let scale = 1.0 / (mean as f32 + spec.eps).sqrt();
        for (v, w) in row.iter_mut().zip(weight) {
            *v = (*v * scale) * (w + spec.weight_offset);
        }
    }
}

/// Σ x² in f64: four running sums (so that additions overlap), added in a fixed order.
fn sum_of_squares(x: &[f32]) -> f64 {
    let mut sums = [0f64; 4];
    let quads = x.chunks_exact(4);
    let tail: f64 = quads
        .remainder()
        .iter()
        .map(|&v| f64::from(v).powi(2))
        .sum();
    for quad in quads {
        for (s, &v) in sums.iter_mut().zip(quad) {
            *s += f64::from(v) * f64::from(v);
        }
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3]) + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_scaled_to_unit_mean_square_times_gain() {
        let spec = NormSpec {
            eps: 0.25,
            weight_offset: 1.0,
        };
        // Mean squares 2 and 0: factors 1/sqrt(2.25) = 2/3 and 1/sqrt(0.25) = 2.
        let mut x = vec![0.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        rms_norm(&spec, &[9.0, 0.0, 0.5, 9.0], &mut x);
        let expected = [0.0, 4.0 / 3.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        for (x, e) in x.iter().zip(expected) {
            // Three roundings (root, reciprocal, products) of half an ulp each, doubled.
            assert!(
                (x - e).abs() <= 3.0 * f32::EPSILON * e.abs(),
                "{x} is not {e}"
            );
        }
    }

    #[test]
    fn odd_widths_count_their_tail() {
        let x: Vec<f32> = (1..=7).map(|v| v as f32).collect();
        assert_eq!(sum_of_squares(&x), 140.0);
    }
}
