//! I8G16 and I8G32, carat's own: 16 or 32 signed codes with an fp32 scale and an
//! fp32 minimum.
//!
//! ```text
//! scale:f32 min:f32 codes:i8[16 or 32]       w = scale * code + min
//! ```
//!
//! Wide enough to hold a group of any other format without rounding. A group
//! without a minimum stores `-0.0`, which adds to nothing.

use super::legacy::extreme;
use super::{
    FormatError, Groups, InvalidCode, Overflow, block_format, expect_whole_blocks, f32_at,
};
use crate::DType;

/// Bytes before the codes.
const HEADER: usize = 8;

fn unpack(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    into.scales[0] = f32_at(block, 0);
    into.mins[0] = f32_at(block, 4);
    for (code, &byte) in into.codes.iter_mut().zip(&block[HEADER..]) {
        *code = byte as i8;
    }
    Ok(())
}

pub(super) fn unpack_i8g16(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    unpack(block, into)
}

pub(super) fn unpack_i8g32(block: &[u8], into: &mut Groups) -> Result<(), InvalidCode> {
    unpack(block, into)
}

/// Symmetric: the largest magnitude takes code 127 or -127; nearest code, ties
/// away from zero; no minimum. A group whose scale would be subnormal (all values
/// below 1.5e-36) becomes zero.
pub(super) fn encode(values: &[f32], out: &mut [u8]) -> Result<(), Overflow> {
    let scale = extreme(values).abs() / 127.0;
    let (scale, inverse) = if scale < f32::MIN_POSITIVE {
        (0.0, 0.0)
    } else {
        (scale, 1.0 / scale)
    };
    out[..4].copy_from_slice(&scale.to_le_bytes());
    out[4..HEADER].copy_from_slice(&Groups::NO_MIN.to_le_bytes());
    for (byte, &v) in out[HEADER..].iter_mut().zip(values) {
        *byte = (v * inverse).round() as i8 as u8;
    }
    Ok(())
}

/// The integer-group format that [`to_int8_groups`] gives for `dtype`; `None` for
/// floating point.
pub fn int8_group_dtype(dtype: DType) -> Option<DType> {
    block_format(dtype).map(|format| match format.group {
        16 => DType::I8G16,
        _ => DType::I8G32,
    })
}

/// Restates whole blocks of any quantized format as integer groups, without
/// rounding: [`decode`](super::decode) of the result equals that of the input bit
/// for bit, signs of zeros included (a NaN or infinite scale too, up to the NaN's
/// payload). The result is at most 6.4 times as long.
///
/// # Errors
///
/// [`FormatError::NotQuantized`] for floating point;
/// [`FormatError::PartialBlock`] and [`FormatError::InvalidCode`] as in
/// [`check`](super::check).
pub fn to_int8_groups(dtype: DType, bytes: &[u8]) -> Result<(DType, Vec<u8>), FormatError> {
    let (Some(format), Some(target)) = (block_format(dtype), int8_group_dtype(dtype)) else {
        return Err(FormatError::NotQuantized { dtype });
    };
    expect_whole_blocks(dtype, bytes)?;
    let blocks = bytes.len() / dtype.block_bytes();
    let groups_per_block = dtype.block_len() / format.group;
    let mut out = Vec::with_capacity(blocks * groups_per_block * target.block_bytes());
    let mut groups = Groups::new();
    for (index, block) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
        format.unpack(dtype, index, block, &mut groups)?;
        let codes = groups.codes.chunks_exact(format.group);
        for (g, codes) in codes.take(groups_per_block).enumerate() {
            out.extend_from_slice(&groups.scales[g].to_le_bytes());
            out.extend_from_slice(&groups.mins[g].to_le_bytes());
            out.extend(codes.iter().map(|&code| code as u8));
        }
    }
    Ok((target, out))
}
