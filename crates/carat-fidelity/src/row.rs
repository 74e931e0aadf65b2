//! Arithmetic on rows of logits, in f64.

use crate::fixture::{Step, TopToken};

/// Likely tokens that a fixture keeps per step.
const TOP: usize = 5;

/// `ln softmax` of a row; `None` where a logit is not finite.
pub(crate) fn log_softmax(logits: &[f32]) -> Option<Vec<f64>> {
    if logits.iter().any(|v| !v.is_finite()) {
        return None;
    }
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&v| (f64::from(v) - max).exp()).sum();
    let norm = max + sum.ln();
    Some(logits.iter().map(|&v| f64::from(v) - norm).collect())
}

/// `Σ p (ln p - ln q)` of two rows of [`log_softmax`].
pub(crate) fn kl(p: &[f64], q: &[f64]) -> f64 {
    let terms = p.iter().zip(q).map(|(p, q)| p.exp() * (p - q));
    // Rounding may leave a tiny negative sum of equal rows.
    terms.sum::<f64>().max(0.0)
}

/// The first of the largest values; `None` where one is not finite, since then
/// nothing can be called the likeliest.
pub(crate) fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if !v.is_finite() {
            return None;
        }
        if *v > logits[best] {
            best = i;
        }
    }
    (!logits.is_empty()).then_some(best as u32)
}

/// What a row of logits says as a step of a fixture; `None` where a logit is not
/// finite or there are fewer than two. Of equals, the lowest id comes first.
pub(crate) fn step_of(logits: &[f32]) -> Option<Step> {
    if logits.len() < 2 {
        return None;
    }
    let logprobs = log_softmax(logits)?;
    let mut top: Vec<usize> = Vec::with_capacity(TOP + 1);
    for i in 0..logits.len() {
        let at = top.partition_point(|&t| logits[t] >= logits[i]);
        if at < TOP {
            top.insert(at, i);
            top.truncate(TOP);
        }
    }
    let (first, second) = (top[0], top[1]);
    // What a file keeps: six decimals are beyond any use of a margin.
    let round = |x: f64| (x * 1e6).round() / 1e6;
    Some(Step {
        id: first as u32,
        second: second as u32,
        fed: None,
        margin: round(logprobs[first].exp() - logprobs[second].exp()),
        logit_margin: round(f64::from(logits[first]) - f64::from(logits[second])),
        top: top
            .iter()
            .map(|&i| TopToken {
                id: i as u32,
                logprob: round(logprobs[i]),
            })
            .collect(),
    })
}

/// Cosine of two vectors; 0 if one of them is zero, NaN if one is not finite.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let (mut ab, mut aa, mut bb) = (0f64, 0f64, 0f64);
    for (&a, &b) in a.iter().zip(b) {
        let (a, b) = (f64::from(a), f64::from(b));
        ab += a * b;
        aa += a * a;
        bb += b * b;
    }
    if ab == 0.0 && aa.is_finite() && bb.is_finite() {
        return 0.0;
    }
    ab / (aa.sqrt() * bb.sqrt())
}

/// Euclidean length.
pub(crate) fn norm(a: &[f32]) -> f64 {
    a.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_both_margins_and_the_likeliest_ids() {
        // Probabilities 1/8, 1/2, 1/8, 1/4.
        let logits: Vec<f32> = [0.125f32, 0.5, 0.125, 0.25].map(f32::ln).to_vec();
        let step = step_of(&logits).unwrap();
        assert_eq!((step.id, step.second), (1, 3));
        assert_eq!(step.margin, 0.25);
        // Six decimals are kept.
        assert!((step.logit_margin - std::f64::consts::LN_2).abs() < 1e-6);
        let ids: Vec<u32> = step.top.iter().map(|t| t.id).collect();
        assert_eq!(ids, [1, 3, 0, 2], "of equals the lowest id first");
        assert!((step.top[0].logprob - 0.5f64.ln()).abs() < 1e-6);
        assert!(step_of(&[1.0, f32::NAN]).is_none());
        assert!(step_of(&[1.0]).is_none());
    }

    #[test]
    fn divergence_of_known_distributions() {
        let p = log_softmax(&[0.5f32.ln(), 0.5f32.ln()]).unwrap();
        let q = log_softmax(&[0.25f32.ln(), 0.75f32.ln()]).unwrap();
        let exact = 0.5 * (2f64.ln()) + 0.5 * (2f64 / 3.0).ln();
        // Logarithms of these probabilities in fp32 are off by 2^-25 at most.
        assert!((kl(&p, &q) - exact).abs() < 1e-7);
        assert_eq!(kl(&p, &p), 0.0);
    }

    #[test]
    fn what_is_not_finite_has_no_best() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), Some(1));
        assert_eq!(argmax(&[1.0, f32::INFINITY]), None);
        assert_eq!(argmax(&[]), None);
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 2.0]), 0.0);
        assert!((cosine(&[1.0, 1.0], &[2.0, 2.0]) - 1.0).abs() < 1e-12);
        assert!(cosine(&[f32::NAN], &[1.0]).is_nan());
    }
}
