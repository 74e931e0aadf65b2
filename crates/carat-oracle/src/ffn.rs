//! Feed-forward.

use carat_bundle::spec::Activation;

use crate::linear::Linear;
use crate::parallel;

/// Weights of `down · (act(gate · x) * (up · x))`.
pub(crate) struct GatedWeights<'w> {
    pub(crate) gate: Linear<'w>,
    pub(crate) up: Linear<'w>,
    pub(crate) down: Linear<'w>,
}

/// The activation's value, in fp32 as the references compute it.
fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            const SQRT_2_OVER_PI: f32 = 0.797_884_6;
            0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)).tanh())
        }
    }
}

/// `act(gate · x) * (up · x)`: `x` is `[rows, hidden]`, the result `[rows, inner]`.
pub(crate) fn inner(
    weights: &GatedWeights<'_>,
    activation: Activation,
    threads: usize,
    x: &[f32],
) -> Vec<f32> {
    /// Values per unit of parallel work.
    const UNIT: usize = 1 << 14;
    let mut gate = weights.gate.apply(threads, x);
    let up = weights.up.apply(threads, x);
    let units: Vec<_> = gate.chunks_mut(UNIT).zip(up.chunks(UNIT)).collect();
    parallel::for_each(threads, units.into_iter(), |(gate, up)| {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = activate(activation, *g) * u;
        }
    });
    gate
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_match_their_definitions_in_f64() {
        for i in -400..=400 {
            let x = i as f32 / 20.0;
            let d = f64::from(x);
            let silu = d / (1.0 + (-d).exp());
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (d + 0.044715 * d.powi(3));
            let gelu = 0.5 * d * (1.0 + inner.tanh());
            // Silu: exp, sum and quotient, relative. GELU: 1 + tanh cancels below zero, so
            // its error is absolute in x, from a tanh good to 2 eps and few roundings.
            let eps = f64::from(f32::EPSILON);
            assert!(
                (f64::from(activate(Activation::Silu, x)) - silu).abs() <= 3.0 * eps * silu.abs()
            );
            assert!(
                (f64::from(activate(Activation::GeluTanh, x)) - gelu).abs() <= 4.0 * eps * d.abs()
            );
        }
        assert_eq!(activate(Activation::Silu, -200.0), -0.0);
        assert_eq!(activate(Activation::GeluTanh, 200.0), 200.0);
    }
}
