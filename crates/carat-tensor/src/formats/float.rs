//! F32, F16 and BF16: one element to a block.

use super::{Overflow, to_f16};
use crate::DType;

/// Applies `widen` to every element of `N` bytes.
fn decode_each<const N: usize>(bytes: &[u8], out: &mut [f32], widen: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (w, &element) in out.iter_mut().zip(elements) {
        *w = widen(element);
    }
}

/// Widens plain floating point; `bytes` is exactly `out.len()` elements.
pub(super) fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F16 => decode_each(bytes, out, |b| half::f16::from_le_bytes(b).to_f32()),
        DType::BF16 => decode_each(bytes, out, |b| {
            f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
        }),
        _ => decode_each(bytes, out, f32::from_le_bytes),
    }
}

/// Applies `narrow` to every element; the index of the first that overflows.
fn encode_each<const N: usize>(
    values: &[f32],
    out: &mut [u8],
    narrow: impl Fn(f32) -> Result<[u8; N], Overflow>,
) -> Result<(), usize> {
    let (elements, _) = out.as_chunks_mut::<N>();
    for (index, (element, &v)) in elements.iter_mut().zip(values).enumerate() {
        *element = narrow(v).map_err(|Overflow| index)?;
    }
    Ok(())
}

/// Rounds finite values to the nearest element, ties to even; `out` is exactly
/// `values.len()` elements. The error is the index of a value that overflows.
pub(super) fn encode(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), usize> {
    match dtype {
        DType::F16 => encode_each(values, out, |v| Ok(to_f16(v)?.to_le_bytes())),
        DType::BF16 => encode_each(values, out, |v| {
            let rounded = half::bf16::from_f32(v);
            if rounded.is_finite() {
                Ok(rounded.to_le_bytes())
            } else {
                Err(Overflow)
            }
        }),
        _ => encode_each(values, out, |v| Ok(v.to_le_bytes())),
    }
}
