//! The likeliest token and how clearly it wins.

use crate::OracleError;

/// What a row of logits says about the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The likeliest token; of equals, the lowest id.
    pub id: u32,
    /// The next likeliest; of equals, the lowest id.
    pub second: u32,
    /// `softmax(logits)[id] - softmax(logits)[second]`, in `0..=1`.
    pub softmax_margin: f32,
    /// `logits[id] - logits[second]`.
    pub logit_margin: f32,
    /// `ln softmax(logits)[id]`.
    pub logprob: f32,
}

impl Step {
    /// Reads a row of logits, one per token id. The softmax is over the whole
    /// row, in f64.
    ///
    /// # Errors
    ///
    /// [`OracleError::TooFewLogits`] below two logits, [`OracleError::NotFinite`]
    /// if any is infinite or not a number.
    pub fn of(logits: &[f32]) -> Result<Step, OracleError> {
        let log_sum = log_sum_exp(logits)?;
        if logits.len() < 2 {
            return Err(OracleError::TooFewLogits {
                found: logits.len(),
            });
        }
        let (mut first, mut second) = if logits[1] > logits[0] {
            (1, 0)
        } else {
            (0, 1)
        };
        for (i, &v) in logits.iter().enumerate().skip(2) {
            if v > logits[first] {
                (first, second) = (i, first);
            } else if v > logits[second] {
                second = i;
            }
        }
        let logprob = |i: usize| f64::from(logits[i]) - log_sum;
        Ok(Step {
            id: first as u32,
            second: second as u32,
            softmax_margin: (logprob(first).exp() - logprob(second).exp()) as f32,
            logit_margin: logits[first] - logits[second],
            logprob: logprob(first) as f32,
        })
    }
}

/// `ln softmax(logits)[id]`.
pub(crate) fn logprob(logits: &[f32], id: u32) -> Result<f32, OracleError> {
    Ok((f64::from(logits[id as usize]) - log_sum_exp(logits)?) as f32)
}

/// `ln Σ exp(logits)` in f64.
fn log_sum_exp(logits: &[f32]) -> Result<f64, OracleError> {
    if let Some((index, &value)) = logits.iter().enumerate().find(|(_, v)| !v.is_finite()) {
        return Err(OracleError::NotFinite { index, value });
    }
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&v| (f64::from(v) - max).exp()).sum();
    Ok(max + sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_of_known_probabilities() {
        // Probabilities 1/8, 1/2, 1/8, 1/4, shifted by a constant that must not matter.
        let logits: Vec<f32> = [0.125f32, 0.5, 0.125, 0.25]
            .iter()
            .map(|p| p.ln() + 100.0)
            .collect();
        let step = Step::of(&logits).unwrap();
        assert_eq!((step.id, step.second), (1, 3));
        // Logits near 100 are rounded to 2^-18 or so: probabilities move by that much at most.
        let eps = 2f32.powi(-17);
        assert!((step.softmax_margin - 0.25).abs() < eps);
        assert!((step.logit_margin - 2f32.ln()).abs() < eps);
        assert!((step.logprob - 0.5f32.ln()).abs() < eps);
        assert!((logprob(&logits, 2).unwrap() - 0.125f32.ln()).abs() < eps);
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        let step = Step::of(&[0.0, 3.0, 3.0, 3.0]).unwrap();
        assert_eq!((step.id, step.second, step.logit_margin), (1, 2, 0.0));
        let step = Step::of(&[3.0, 3.0]).unwrap();
        assert_eq!((step.id, step.second), (0, 1));
    }

    #[test]
    fn what_has_no_likeliest_token_is_an_error() {
        assert!(matches!(
            Step::of(&[1.0]),
            Err(OracleError::TooFewLogits { found: 1 })
        ));
        assert!(matches!(
            Step::of(&[]),
            Err(OracleError::TooFewLogits { found: 0 })
        ));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let row = [0.0, bad, 1.0];
            assert!(matches!(
                Step::of(&row),
                Err(OracleError::NotFinite { index: 1, .. })
            ));
        }
    }
}
