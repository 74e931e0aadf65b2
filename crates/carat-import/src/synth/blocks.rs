//! Random blocks of the formats.
//!
//! Codes are uniform over what a format has, scales vary from block to block (and
//! from group to group) as they do in trained files. From the spread of both
//! follows the scale that gives values of a wanted root mean square.

use carat_tensor::DType;
use half::f16;

/// The golden ratio's fraction, odd: the increment of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64: a bijection in which each input bit moves half of
/// the output bits.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Random numbers of one block.
struct Stream(u64);

impl Stream {
    fn new(key: u64, block: u64) -> Stream {
        Stream(mix(key ^ mix(block.wrapping_add(GOLDEN))))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// Uniform in `0.75..1.25`: 24 bits, exactly representable.
    fn near_one(&mut self) -> f32 {
        0.75 + (self.next() >> 40) as f32 / (1u32 << 25) as f32
    }

    fn fill(&mut self, out: &mut [u8]) {
        for bytes in out.chunks_mut(8) {
            bytes.copy_from_slice(&self.next().to_le_bytes()[..bytes.len()]);
        }
    }
}

/// Root mean square of [`Stream::near_one`]: sqrt(1 + 0.5^2 / 12).
const NEAR_ONE_RMS: f32 = 1.010_363;

/// What tells the random numbers of a tensor from those of others.
pub(super) fn key(seed: u64, tensor: &str) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes()).update(tensor.as_bytes());
    let mut key = [0; 8];
    hasher.finalize_xof().fill(&mut key);
    u64::from_le_bytes(key)
}

/// A gain of a norm.
pub(super) fn gain(key: u64, at: u64) -> f32 {
    Stream::new(key, at).near_one()
}

/// Formats that [`random`] makes.
#[cfg(test)]
pub(super) const FORMATS: [DType; 6] = [
    DType::F32,
    DType::Q4_0,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q6_K,
    DType::TQ2_0,
];

/// Fills `out`, whole blocks from block `first` of a tensor on, with values of
/// this root mean square. Formats that no shape uses stay zero.
pub(super) fn random(dtype: DType, rms: f32, key: u64, first: u64, out: &mut [u8]) {
    let fill: fn(&mut Stream, f32, &mut [u8]) = match dtype {
        DType::F32 => f32_value,
        DType::Q4_0 => q4_0,
        DType::Q8_0 => q8_0,
        DType::Q4_K => q4_k,
        DType::Q6_K => q6_k,
        DType::TQ2_0 => tq2_0,
        _ => return,
    };
    for (block, at) in out.chunks_exact_mut(dtype.block_bytes()).zip(first..) {
        fill(&mut Stream::new(key, at), rms / NEAR_ONE_RMS, block);
    }
}

fn put_f16(value: f32, out: &mut [u8]) {
    out.copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// `rms` or its negative, half the time each.
fn signed(stream: &mut Stream, value: f32) -> f32 {
    if stream.next() & 1 == 0 {
        value
    } else {
        -value
    }
}

fn f32_value(stream: &mut Stream, rms: f32, out: &mut [u8]) {
    let magnitude = rms * stream.near_one();
    out.copy_from_slice(&signed(stream, magnitude).to_le_bytes());
}

/// `d (q - 8)`, q uniform in 0..16: mean square 21.5. The sign of d takes the bias
/// of the codes out of the tensor's mean.
fn q4_0(stream: &mut Stream, rms: f32, out: &mut [u8]) {
    let d = rms / 4.636_809 * stream.near_one();
    put_f16(signed(stream, d), &mut out[..2]);
    stream.fill(&mut out[2..]);
}

/// `d q`, q uniform in -127..=127 (-127 twice as often): mean square 5460.5.
fn q8_0(stream: &mut Stream, rms: f32, out: &mut [u8]) {
    let d = rms / 73.895 * stream.near_one();
    put_f16(d, &mut out[..2]);
    stream.fill(&mut out[2..]);
    for code in &mut out[2..] {
        // Encoders never make -128.
        *code = (*code as i8).max(-127) as u8;
    }
}

/// `d s q - dmin m` with q uniform in 0..16, s and m uniform in 32..64 and
/// `dmin = 7.5 d`, so that the mean is 0. With E\[s²\] = 2341.5, E\[q²\] = 77.5 and
/// E\[s\] = 47.5 the mean square is
/// `d² (2341.5 * 77.5 - 15 * 7.5 * 47.5² + 7.5² * 2341.5) = 59346 d²`.
fn q4_k(stream: &mut Stream, rms: f32, out: &mut [u8]) {
    let d = rms / 243.61 * stream.near_one();
    put_f16(d, &mut out[..2]);
    put_f16(d * 7.5, &mut out[2..4]);
    stream.fill(&mut out[4..]);
    // Bit 5 of each scale and minimum: of groups 0 to 3 in the low six bits of
    // these bytes, of groups 4 to 7 in the top bit.
    for byte in &mut out[4..12] {
        *byte |= 0xa0;
    }
}

/// `d s (q - 32)`, q uniform in 0..64, the magnitude of s in 64..128, of either
/// sign: mean square `d² * 9461.5 * 341.5`.
fn q6_k(stream: &mut Stream, rms: f32, out: &mut [u8]) {
    let d = rms / 1797.53 * stream.near_one();
    stream.fill(&mut out[..208]);
    for scale in &mut out[192..208] {
        let magnitude = (*scale & 0x3f) as i8 + 64;
        *scale = (if *scale < 128 { magnitude } else { -magnitude }) as u8;
    }
    put_f16(d, &mut out[208..]);
}

/// The bytes that hold four codes of 0, 1 or 2.
const TRITS: [u8; 81] = {
    let mut out = [0; 81];
    let mut n = 0;
    while n < 81 {
        out[n] = ((n % 3) | ((n / 3 % 3) << 2) | ((n / 9 % 3) << 4) | ((n / 27) << 6)) as u8;
        n += 1;
    }
    out
};

/// `d (q - 1)`, q uniform in 0..3: mean square 2/3.
fn tq2_0(stream: &mut Stream, rms: f32, out: &mut [u8]) {
    let d = rms * 1.224_745 * stream.near_one();
    put_f16(d, &mut out[64..]);
    for bytes in out[..64].chunks_exact_mut(4) {
        let mut bits = stream.next();
        for byte in bytes {
            // 16 bits choose one of 81: shares differ by less than 0.2 %.
            *byte = TRITS[(((bits & 0xffff) * 81) >> 16) as usize];
            bits >>= 16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carat_tensor::formats;

    const BLOCKS: usize = 4096;

    fn made(dtype: DType, rms: f32) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = vec![0; BLOCKS * dtype.block_bytes()];
        random(dtype, rms, key(1, "x"), 0, &mut bytes);
        let mut values = vec![0.0; BLOCKS * dtype.block_len()];
        formats::decode(dtype, &bytes, &mut values).unwrap();
        (bytes, values)
    }

    #[test]
    fn values_have_the_spread_asked_for_and_no_bias() {
        for dtype in FORMATS {
            for rms in [1.0 / 64.0, 1.0] {
                let (_, values) = made(dtype, rms);
                let n = values.len() as f64;
                let sum: f64 = values.iter().map(|&v| f64::from(v)).sum();
                let squares: f64 = values.iter().map(|&v| f64::from(v).powi(2)).sum();
                let found = (squares / n).sqrt() / f64::from(rms);
                let mean = sum / n / f64::from(rms);
                // Scales are independent over blocks (F32: over values), with a
                // relative spread of their squares of 0.29 at most; codes add 1 or
                // less per value. Five standard errors of half that, plus the
                // rounding of a subnormal fp16 scale (2^-25 on 8.7e-6).
                let blocks = BLOCKS as f64;
                let bound = 2.5 * (0.29f64.powi(2) / blocks + 1.0 / n).sqrt() + 0.0035;
                assert!((found - 1.0).abs() < bound, "{dtype} {rms}: rms {found}");
                // Means of blocks are of the size of 0.22 at most (Q4_0: a bias of
                // half a code; Q4_K: 0.4 over eight groups); five standard errors.
                let bound = 5.0 * (0.05 / blocks + 1.0 / n).sqrt();
                assert!(mean.abs() < bound, "{dtype} {rms}: mean {mean}");
            }
        }
    }

    #[test]
    fn a_block_does_not_depend_on_where_a_chunk_begins() {
        for dtype in FORMATS {
            let (whole, _) = made(dtype, 1.0);
            let from = 1000;
            let mut part = vec![0; 5 * dtype.block_bytes()];
            random(dtype, 1.0, key(1, "x"), from as u64, &mut part);
            let at = from * dtype.block_bytes();
            assert_eq!(whole[at..at + part.len()], part, "{dtype}");
            let mut other = part.clone();
            random(dtype, 1.0, key(2, "x"), from as u64, &mut other);
            assert_ne!(other, part, "{dtype}");
            random(dtype, 1.0, key(1, "y"), from as u64, &mut other);
            assert_ne!(other, part, "{dtype}");
        }
    }

    #[test]
    fn ternary_codes_are_never_3_and_evenly_spread() {
        let (bytes, values) = made(DType::TQ2_0, 1.0);
        formats::check(DType::TQ2_0, &bytes).unwrap();
        let n = values.len() as f64;
        for sign in [-1.0, 0.0, 1.0] {
            let of = |v: f32| if v == 0.0 { 0.0 } else { v.signum() };
            let share = values.iter().filter(|v| of(**v) == sign).count() as f64 / n;
            // Five standard errors of a binomial share, and the table's 0.2 %.
            let bound = 5.0 * (2.0 / 9.0 / n).sqrt() + 0.002;
            assert!((share - 1.0 / 3.0).abs() < bound, "{sign}: {share}");
        }
    }

    #[test]
    fn scales_are_as_the_formulas_have_them() {
        let (bytes, _) = made(DType::Q4_K, 1.0);
        for block in bytes.chunks_exact(144) {
            for g in 0..4 {
                let (scale, min) = (block[4 + g] & 0x3f, block[8 + g] & 0x3f);
                assert!((32..64).contains(&scale) && (32..64).contains(&min));
                assert!(block[4 + g] >> 6 >= 2 && block[8 + g] >> 6 >= 2);
            }
        }
        let (bytes, _) = made(DType::Q6_K, 1.0);
        for block in bytes.chunks_exact(210) {
            for &scale in &block[192..208] {
                assert!((64..128).contains(&(scale as i8).unsigned_abs()));
            }
        }
    }
}
