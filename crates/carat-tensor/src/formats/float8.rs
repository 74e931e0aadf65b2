//! Floats of four and eight bits: E2M1, E4M3 and E5M2 of the OCP specification.

/// A small float: the sign is the top bit, the rest counts its magnitudes up.
#[derive(Debug)]
pub struct MiniFloat {
    /// Magnitudes in the order of their codes.
    magnitudes: &'static [f32],
    /// Position of the sign bit.
    sign: u32,
    /// The code's magnitude bits that are not a number, if any: from here on.
    nan_from: usize,
}

/// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
pub static FP4: MiniFloat = MiniFloat {
    magnitudes: &magnitudes::<8>(1, 1),
    sign: 3,
    nan_from: 8,
};
/// E4M3 without infinities: the largest is 448, magnitude 127 is no number.
pub static E4M3: MiniFloat = MiniFloat {
    magnitudes: &magnitudes::<128>(3, 7),
    sign: 7,
    nan_from: 127,
};
/// E5M2: the largest is 57344; infinity decodes to no number here.
pub static E5M2: MiniFloat = MiniFloat {
    magnitudes: &magnitudes::<128>(2, 15),
    sign: 7,
    nan_from: 124,
};

/// Magnitudes of a float with so many fraction bits and this exponent bias.
const fn magnitudes<const N: usize>(fraction_bits: u32, bias: i32) -> [f32; N] {
    let mut out = [0.0; N];
    let mut code = 0;
    while code < N {
        let exponent = (code >> fraction_bits) as i32;
        let mut fraction = (code & ((1 << fraction_bits) - 1)) as i32;
        // A zero exponent is subnormal: that of one, without the leading bit.
        let power = if exponent == 0 { 1 } else { exponent };
        if exponent > 0 {
            fraction += 1 << fraction_bits;
        }
        // fraction * 2^(power - bias - fraction_bits): a normal fp32 number.
        let scale = f32::from_bits(((power - bias - fraction_bits as i32 + 127) as u32) << 23);
        out[code] = fraction as f32 * scale;
        code += 1;
    }
    out
}

impl MiniFloat {
    /// The largest finite magnitude.
    pub fn max(&self) -> f32 {
        self.magnitudes[self.nan_from - 1]
    }

    /// The value of a code.
    pub fn decode(&self, code: u8) -> f32 {
        let magnitude = usize::from(code) & ((1 << self.sign) - 1);
        if magnitude >= self.nan_from {
            return f32::NAN;
        }
        let value = self.magnitudes[magnitude];
        if code >> self.sign & 1 == 1 {
            -value
        } else {
            value
        }
    }

    /// The nearest code, ties to the even one; beyond the largest number, that.
    /// NaN becomes zero: encoders refuse it before.
    pub fn encode(&self, value: f32) -> u8 {
        let finite = &self.magnitudes[..self.nan_from];
        let magnitude = value.abs();
        let above = finite.partition_point(|&m| m < magnitude);
        let code = if above == 0 || value.is_nan() {
            0
        } else if above == finite.len() {
            above - 1
        } else {
            // Exact: both neighbours are within a factor of two, or zero.
            let (down, up) = (magnitude - finite[above - 1], finite[above] - magnitude);
            if up < down || (up == down && above % 2 == 0) {
                above
            } else {
                above - 1
            }
        };
        code as u8 | u8::from(value.is_sign_negative()) << self.sign
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_those_of_the_specification() {
        let fp4: Vec<f32> = (0..8).map(|c| FP4.decode(c)).collect();
        assert_eq!(fp4, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(FP4.decode(0xf), -6.0);
        assert_eq!((E4M3.max(), E5M2.max()), (448.0, 57344.0));
        assert_eq!(E4M3.decode(1), 2f32.powi(-9));
        assert_eq!(E5M2.decode(1), 2f32.powi(-16));
        assert_eq!(E4M3.decode(0x38), 1.0);
        assert_eq!(E5M2.decode(0x3c), 1.0);
        assert!(E4M3.decode(0x7f).is_nan() && E5M2.decode(0xfc).is_nan());
    }

    #[test]
    fn every_code_comes_back_and_ties_go_to_even() {
        for float in [&FP4, &E4M3, &E5M2] {
            for code in 0..=(1u16 << (float.sign + 1)) - 1 {
                let value = float.decode(code as u8);
                if !value.is_nan() {
                    assert_eq!(u16::from(float.encode(value)), code);
                }
            }
        }
        assert_eq!(
            [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0].map(|v| FP4.encode(v)),
            [0, 2, 2, 4, 4, 6, 6, 7]
        );
        assert_eq!(FP4.encode(-5.1), 0xf);
    }
}
