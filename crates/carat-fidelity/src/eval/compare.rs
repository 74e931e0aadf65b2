//! Two bundles on the same questions.

use serde::Serialize;

use super::{Outcome, Results};
use crate::FidelityError;

/// A paired comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Questions that both answered.
    pub pairs: usize,
    /// Right in both.
    pub both: usize,
    /// Right in the first only.
    pub first_only: usize,
    /// Right in the second only.
    pub second_only: usize,
    /// Probability of a split at least as uneven if neither were better: McNemar's
    /// test in its exact, binomial form.
    pub p_value: f64,
}

/// Compares results question by question.
///
/// # Errors
/// [`FidelityError::Mismatch`] where the protocols differ: such a difference would say
/// nothing of the models.
pub fn compare(first: &Results, second: &Results) -> Result<Comparison, FidelityError> {
    if let Some(field) = first.header.protocol.differs(&second.header.protocol) {
        return Err(FidelityError::Mismatch {
            field: "protocol",
            expected: first.header.protocol_digest.clone(),
            found: format!("{} ({field})", second.header.protocol_digest),
        });
    }
    let mut out = Comparison {
        pairs: 0,
        both: 0,
        first_only: 0,
        second_only: 0,
        p_value: 1.0,
    };
    for a in &first.items {
        let Some(b) = second.items.iter().find(|b| b.index == a.index) else {
            continue;
        };
        out.pairs += 1;
        match (a.outcome == Outcome::Correct, b.outcome == Outcome::Correct) {
            (true, true) => out.both += 1,
            (true, false) => out.first_only += 1,
            (false, true) => out.second_only += 1,
            (false, false) => {}
        }
    }
    out.p_value = mcnemar(out.first_only, out.second_only);
    Ok(out)
}

/// `min(1, 2 P(X ≤ min(b, c)))` of `X ~ Binomial(b + c, 1/2)`.
fn mcnemar(b: usize, c: usize) -> f64 {
    let n = b + c;
    // ln of the binomial coefficient times 2^-n, summed term by term.
    let mut term = -(n as f64) * std::f64::consts::LN_2;
    let mut sum = 0f64;
    for k in 0..=b.min(c) {
        sum += term.exp();
        term += ((n - k) as f64).ln() - ((k + 1) as f64).ln();
    }
    (2.0 * sum).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exact_test_on_small_tables() {
        // 2 * (1 + 10) / 2^10 and 2 / 2^5; an even split is no difference.
        assert!((mcnemar(1, 9) - 22.0 / 1024.0).abs() < 1e-12);
        assert!((mcnemar(5, 0) - 2.0 / 32.0).abs() < 1e-12);
        assert_eq!(mcnemar(4, 4), 1.0);
        assert_eq!(mcnemar(0, 0), 1.0);
        assert!((mcnemar(41, 0) - 2f64.powi(-40)).abs() < 1e-20);
    }
}
