//! Arithmetic of targets that round what they multiply.

use std::borrow::Cow;

/// How the inputs of a matrix product are rounded before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// As they are: the reference.
    #[default]
    F32,
    /// To bfloat16, nearest, ties to even.
    Bf16,
    /// To signed 8-bit codes under one scale for so many columns of a row:
    /// `scale = absmax / 127`, `code = round_half_even(x * (127 / absmax))`.
    Int8 {
        /// Columns that share a scale.
        group: usize,
    },
}

impl Rounding {
    /// Rows of `columns` values, rounded.
    pub(crate) fn apply(self, x: &[f32], columns: usize) -> Cow<'_, [f32]> {
        match self {
            Rounding::F32 => Cow::Borrowed(x),
            Rounding::Bf16 => x
                .iter()
                .map(|&v| half::bf16::from_f32(v).to_f32())
                .collect(),
            Rounding::Int8 { group } => {
                let mut out = x.to_vec();
                for row in out.chunks_mut(columns.max(1)) {
                    row.chunks_mut(group.max(1)).for_each(to_codes);
                }
                Cow::Owned(out)
            }
        }
    }
}

/// Rounds what shares a scale.
fn to_codes(x: &mut [f32]) {
    let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    // Below this the inverse is no number; what is not finite stays as it is.
    if largest < f32::MIN_POSITIVE {
        x.fill(0.0);
    } else if x.iter().all(|v| v.is_finite()) {
        let (scale, inverse) = (largest / 127.0, 127.0 / largest);
        for v in x {
            *v = scale * (*v * inverse).round_ties_even();
        }
    }
}

/// Arithmetic of another machine, walked in fp32: what it rounds is rounded here.
/// The order of its additions is not imitated, which tells near-ties apart only.
#[derive(Clone, Copy)]
pub struct Imitation<'i> {
    /// Keys and values.
    pub cache: crate::CachePrecision,
    /// Inputs of the product with a matrix, by its name such as `layers.0.attn.q.weight`.
    pub inputs: &'i (dyn Fn(&str) -> Rounding + Sync),
}

impl Imitation<'static> {
    /// Nothing is rounded.
    pub const NONE: Imitation<'static> = Imitation {
        cache: crate::CachePrecision::F32,
        inputs: &|_| Rounding::F32,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_rounded_to_their_own_steps() {
        let x = [
            127.0, -1.5, 0.5, 2.5, 1e-3, 0.2e-3, 0.0, -0.6e-3, 12.7, 0.04,
        ];
        let rounded = Rounding::Int8 { group: 4 }.apply(&x, 10);
        assert_eq!(rounded[..4], [127.0, -2.0, 0.0, 2.0]);
        let step = 1e-3f32 / 127.0;
        for (found, exact) in rounded[4..8].iter().zip(&x[4..8]) {
            assert!(
                (found - exact).abs() <= step / 2.0 * 1.0001,
                "{found} {exact}"
            );
        }
        // The last group is what is left of a row.
        assert_eq!(rounded[8..], [12.7, 0.0]);
        assert_eq!(
            Rounding::Int8 { group: 4 }.apply(&[0.0; 4], 4)[..],
            [0.0; 4]
        );
        assert!(Rounding::Int8 { group: 2 }.apply(&[f32::NAN, 1.0], 2)[0].is_nan());
        assert_eq!(Rounding::Bf16.apply(&[1.0 + 1.0 / 1024.0], 1)[..], [1.0]);
        assert!(matches!(Rounding::F32.apply(&x, 10), Cow::Borrowed(_)));
    }
}
