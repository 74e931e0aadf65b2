//! How sure a row of logits is.

/// The two best tokens of a row and the gaps between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranking {
    /// Most likely id (the lowest, among equals).
    pub best: u32,
    /// Second most likely id.
    pub second: u32,
    /// Softmax probability of the best minus that of the second.
    pub softmax_margin: f64,
    /// Logit of the best minus that of the second.
    pub logit_margin: f64,
}

impl Ranking {
    /// Ranks a row; `None` if it has fewer than two numbers.
    pub fn of(logits: &[f32]) -> Option<Ranking> {
        let mut best: Option<usize> = None;
        let mut second: Option<usize> = None;
        for (i, value) in logits.iter().enumerate() {
            if value.is_nan() {
                continue;
            }
            if best.is_none_or(|b| *value > logits[b]) {
                second = best;
                best = Some(i);
            } else if second.is_none_or(|s| *value > logits[s]) {
                second = Some(i);
            }
        }
        let (best, second) = (best?, second?);
        let gap = f64::from(logits[best]) - f64::from(logits[second]);
        let norm = log_sum_exp(logits);
        let p = |i: usize| (f64::from(logits[i]) - norm).exp();
        Some(Ranking {
            best: best as u32,
            second: second as u32,
            softmax_margin: p(best) - p(second),
            logit_margin: gap,
        })
    }
}

/// The first of the largest numbers of a row; `None` if there is no number.
pub(crate) fn argmax(logits: &[f32]) -> Option<u32> {
    // Two passes that vectorise beat one with a branch per element.
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let at = logits.iter().position(|v| *v == max)?;
    Some(at as u32)
}

/// `ln Σ e^x` over the numbers of a row, in f64, shifted by the maximum.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !max.is_finite() {
        return f64::from(max);
    }
    let max = f64::from(max);
    let numbers = logits.iter().filter(|x| !x.is_nan());
    max + numbers
        .map(|x| (f64::from(*x) - max).exp())
        .sum::<f64>()
        .ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_ties_by_the_lowest_id() {
        let r = Ranking::of(&[1.0, 3.0, 3.0, f32::NAN, 2.0]).unwrap();
        assert_eq!(
            (r.best, r.second, r.softmax_margin, r.logit_margin),
            (1, 2, 0.0, 0.0)
        );
        assert!(Ranking::of(&[1.0]).is_none());
        assert!(Ranking::of(&[f32::NAN; 4]).is_none());
    }

    #[test]
    fn argmax_agrees_with_the_ranking() {
        assert_eq!(argmax(&[1.0, f32::NAN, 3.0, 3.0]), Some(2));
        assert_eq!(argmax(&[f32::NEG_INFINITY; 2]), Some(0));
        assert_eq!(argmax(&[f32::NAN; 2]), None);
        assert_eq!(argmax(&[]), None);
    }

    #[test]
    fn margins_are_differences_of_probabilities_and_of_logits() {
        // p = e^ln3 / (3 + 1) = 0.75 and 0.25.
        let r = Ranking::of(&[0.0, 3f32.ln()]).unwrap();
        assert!((r.softmax_margin - 0.5).abs() < 1e-7);
        assert!((r.logit_margin - f64::from(3f32.ln())).abs() < 1e-12);
    }

    #[test]
    fn huge_logits_do_not_overflow() {
        let r = Ranking::of(&[3e38, -3e38, 2.9e38]).unwrap();
        assert_eq!((r.best, r.second, r.softmax_margin), (0, 2, 1.0));
    }
}
