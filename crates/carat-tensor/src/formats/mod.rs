//! Scalar decoders and encoders: the definition of every format.
//!
//! A quantized block is, in every format, groups of 16 or 32 small integers with
//! a scale and a minimum each. The decoders say which: they unpack a block into
//! those groups, and the value of an element is
//!
//! ```text
//! w = scale * code + minimum        one fp32 multiply, then one fp32 add
//! ```
//!
//! A format without a minimum has `-0.0` there, the one number that changes no
//! fp32 value when added, not even the sign of a zero. Codes fit in `i8` in all
//! formats (codebooks, signs and the eighths of IQ1 are folded into them), and
//! scales and minimums are exact in fp32: products of an 11-bit significand and a
//! factor of at most 8 bits, far from the subnormal range (MXFP4: powers of two).
//! So [`to_int8_groups`] can restate any block without rounding, and [`decode`] of
//! the restated block equals [`decode`] of the original bit for bit.
//!
//! Values are those of the `gguf` Python package, bit for bit, NaN payloads
//! excepted; so are the bytes made by [`encode`] for the formats whose encoder
//! that package has. Encoders refuse what they cannot represent, where the
//! package would store an infinity.
//!
//! ```
//! use carat_tensor::{DType, formats};
//!
//! let values: Vec<f32> = (0..32).map(|i| i as f32 - 16.0).collect();
//! let mut block = vec![0u8; DType::Q8_0.block_bytes()];
//! formats::encode(DType::Q8_0, &values, &mut block)?;
//! let mut decoded = vec![0f32; 32];
//! formats::decode(DType::Q8_0, &block, &mut decoded)?;
//! assert!((decoded[5] - values[5]).abs() < 16.0 / 127.0);
//! # Ok::<(), formats::FormatError>(())
//! ```

use crate::DType;

mod codebook;
mod finite;
mod float;
pub mod float8;
mod int8_groups;
mod iq;
mod iq_tables;
mod k_encode;
mod k_quants;
mod legacy;
mod ternary;

pub use finite::check_finite;
pub(crate) use finite::{floats_finite, single_suspect};
pub use int8_groups::{int8_group_dtype, to_int8_groups};
pub(crate) use ternary::{put_tq1_0_codes, tq1_0_code};
pub use ternary::{tq1_0_to_tq2_0, tq2_0_block, tq2_0_to_tq1_0};

/// Why bytes or values do not fit a format.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum FormatError {
    /// The two sides of a conversion differ in length.
    #[error("{dtype} data has the wrong length: expected {expected} bytes, found {found}")]
    Length {
        /// The format.
        dtype: DType,
        /// Bytes that the number of elements takes.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The data does not end at the end of a block.
    #[error("{found} {unit} are not a whole number of {dtype} blocks of {block}")]
    PartialBlock {
        /// The format.
        dtype: DType,
        /// What is counted: `"bytes"` or `"elements"`.
        unit: &'static str,
        /// Size of one block, in `unit`.
        block: usize,
        /// Size given, in `unit`.
        found: usize,
    },
    /// A code that the format does not define.
    #[error("{dtype} block {block}, element {element}: code {code} is not valid")]
    InvalidCode {
        /// The format.
        dtype: DType,
        /// Index of the block.
        block: usize,
        /// Index of the element within its block.
        element: usize,
        /// The stored code.
        code: u8,
    },
    /// The format has a decoder only.
    #[error("{dtype} has no encoder")]
    EncodeUnsupported {
        /// The format.
        dtype: DType,
    },
    /// A floating-point format has no integer codes.
    #[error("{dtype} is not a quantized format: it has no integer codes")]
    NotQuantized {
        /// The format.
        dtype: DType,
    },
    /// A stored weight is infinite or not a number, by itself or by its scale or
    /// minimum.
    #[error("{dtype} element {index} is {value}: expected a finite number")]
    NotFinite {
        /// The format.
        dtype: DType,
        /// Index of the element in the data.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A value to encode is infinite or not a number.
    #[error("element {index} is {value}: only finite values can be encoded")]
    NonFinite {
        /// Index of the element.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A value to encode is beyond the largest number of the format.
    #[error("elements from {index} on are too large for {dtype}")]
    Overflow {
        /// The format.
        dtype: DType,
        /// First element of the block that overflows.
        index: usize,
    },
}

impl FormatError {
    /// The same fault of a block that was looked at by itself and is number `index`.
    fn in_block(mut self, index: usize) -> FormatError {
        if let FormatError::InvalidCode { block, .. } = &mut self {
            *block = index;
        }
        self
    }
}

/// Elements in the largest block.
const MAX_BLOCK: usize = 256;
/// Elements in the smallest group.
const MIN_GROUP: usize = 16;

/// One block as integer groups: element `i` is
/// `scales[i / group] * codes[i] + mins[i / group]`, with the group length of
/// the format's [`BlockFormat`].
struct Groups {
    codes: [i8; MAX_BLOCK],
    scales: [f32; MAX_BLOCK / MIN_GROUP],
    mins: [f32; MAX_BLOCK / MIN_GROUP],
}

impl Groups {
    /// Minimum of a group that has none: `x + -0.0` is `x` for every `x`.
    const NO_MIN: f32 = -0.0;

    fn new() -> Groups {
        Groups {
            codes: [0; MAX_BLOCK],
            scales: [0.0; MAX_BLOCK / MIN_GROUP],
            mins: [Groups::NO_MIN; MAX_BLOCK / MIN_GROUP],
        }
    }
}

/// A code that the format does not define.
struct InvalidCode {
    element: usize,
    code: u8,
}

/// Largest finite scale exceeded.
struct Overflow;

/// Unpacks one block of exactly `block_bytes` bytes. A format without minimums
/// leaves `mins` alone.
type Unpack = fn(&[u8], &mut Groups) -> Result<(), InvalidCode>;

/// How a quantized format is read: the length of its groups, and its unpacking.
#[derive(Clone, Copy)]
struct BlockFormat {
    group: usize,
    unpack: Unpack,
}

impl BlockFormat {
    fn unpack(
        self,
        dtype: DType,
        index: usize,
        block: &[u8],
        into: &mut Groups,
    ) -> Result<(), FormatError> {
        (self.unpack)(block, into).map_err(|bad| FormatError::InvalidCode {
            dtype,
            block: index,
            element: bad.element,
            code: bad.code,
        })
    }
}

/// The block reader of a quantized format; `None` for floating point.
fn block_format(dtype: DType) -> Option<BlockFormat> {
    let (group, unpack): (usize, Unpack) = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => return None,
        DType::Q4_0 => (32, legacy::unpack_q4_0),
        DType::Q4_1 => (32, legacy::unpack_q4_1),
        DType::Q5_0 => (32, legacy::unpack_q5_0),
        DType::Q5_1 => (32, legacy::unpack_q5_1),
        DType::Q8_0 => (32, legacy::unpack_q8_0),
        DType::Q2_K => (16, k_quants::unpack_q2_k),
        DType::Q3_K => (16, k_quants::unpack_q3_k),
        DType::Q4_K => (32, k_quants::unpack_q4_k),
        DType::Q5_K => (32, k_quants::unpack_q5_k),
        DType::Q6_K => (16, k_quants::unpack_q6_k),
        DType::TQ1_0 => (32, ternary::unpack_tq1_0),
        DType::TQ2_0 => (32, ternary::unpack_tq2_0),
        DType::IQ4_NL => (32, codebook::unpack_iq4_nl),
        DType::IQ4_XS => (32, codebook::unpack_iq4_xs),
        DType::MXFP4 => (32, codebook::unpack_mxfp4),
        DType::IQ2_XXS => (32, iq::unpack_iq2_xxs),
        DType::IQ2_XS => (16, iq::unpack_iq2_xs),
        DType::IQ2_S => (16, iq::unpack_iq2_s),
        DType::IQ3_XXS => (32, iq::unpack_iq3_xxs),
        DType::IQ3_S => (32, iq::unpack_iq3_s),
        DType::IQ1_S => (32, iq::unpack_iq1_s),
        DType::IQ1_M => (16, iq::unpack_iq1_m),
        DType::I8G16 => (16, int8_groups::unpack_i8g16),
        DType::I8G32 => (32, int8_groups::unpack_i8g32),
    };
    Some(BlockFormat { group, unpack })
}

/// Decodes whole blocks of `dtype` into fp32.
///
/// # Errors
///
/// [`FormatError::PartialBlock`] and [`FormatError::Length`] when `bytes` is not
/// exactly what `out.len()` elements take, before anything is written;
/// [`FormatError::InvalidCode`] for a code that the format does not define, in
/// which case the blocks before it have been written.
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    expect_lengths(dtype, out.len(), bytes.len())?;
    let Some(format) = block_format(dtype) else {
        float::decode(dtype, bytes, out);
        return Ok(());
    };
    let mut groups = Groups::new();
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (index, (block, out)) in blocks
        .zip(out.chunks_exact_mut(dtype.block_len()))
        .enumerate()
    {
        format.unpack(dtype, index, block, &mut groups)?;
        let codes = groups.codes.chunks_exact(format.group);
        for (g, (out, codes)) in out.chunks_exact_mut(format.group).zip(codes).enumerate() {
            let (scale, min) = (groups.scales[g], groups.mins[g]);
            for (w, &code) in out.iter_mut().zip(codes) {
                *w = scale * f32::from(code) + min;
            }
        }
    }
    Ok(())
}

/// Whether [`encode`] can write `dtype`.
pub fn can_encode(dtype: DType) -> bool {
    dtype.is_float() || block_encoder(dtype).is_some()
}

/// Writes one block of finite values.
type BlockEncoder = fn(&[f32], &mut [u8]) -> Result<(), Overflow>;

/// The block writer of a quantized format that has one.
fn block_encoder(dtype: DType) -> Option<BlockEncoder> {
    Some(match dtype {
        DType::Q4_0 => legacy::encode_q4_0,
        DType::Q4_1 => legacy::encode_q4_1,
        DType::Q5_0 => legacy::encode_q5_0,
        DType::Q5_1 => legacy::encode_q5_1,
        DType::Q8_0 => legacy::encode_q8_0,
        DType::Q4_K => k_encode::encode_q4_k,
        DType::Q6_K => k_encode::encode_q6_k,
        DType::TQ1_0 => ternary::encode_tq1_0,
        DType::TQ2_0 => ternary::encode_tq2_0,
        DType::I8G16 | DType::I8G32 => int8_groups::encode,
        _ => return None,
    })
}

/// Encodes fp32 values as whole blocks of `dtype`, rounding to the nearest code
/// under the block's scale. Equal input gives equal bytes on every machine.
///
/// # Errors
///
/// [`FormatError::EncodeUnsupported`] for formats that are only read;
/// [`FormatError::PartialBlock`] and [`FormatError::Length`] when `out` is not
/// exactly what `values.len()` elements take; [`FormatError::NonFinite`] for an
/// infinity or NaN: nothing has been written in these cases.
/// [`FormatError::Overflow`] when a value (or the scale of its block) is beyond
/// the format's largest finite number; the blocks before it have been written.
pub fn encode(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    if !can_encode(dtype) {
        return Err(FormatError::EncodeUnsupported { dtype });
    }
    expect_lengths(dtype, values.len(), out.len())?;
    if let Some(index) = values.iter().position(|v| !v.is_finite()) {
        return Err(FormatError::NonFinite {
            index,
            value: values[index],
        });
    }
    let Some(encode_block) = block_encoder(dtype) else {
        return float::encode(dtype, values, out)
            .map_err(|index| FormatError::Overflow { dtype, index });
    };
    let (len, bytes) = (dtype.block_len(), dtype.block_bytes());
    for (index, (values, out)) in values
        .chunks_exact(len)
        .zip(out.chunks_exact_mut(bytes))
        .enumerate()
    {
        encode_block(values, out).map_err(|Overflow| FormatError::Overflow {
            dtype,
            index: index * len,
        })?;
    }
    Ok(())
}

/// Checks that `bytes` are whole blocks of `dtype` and that every code in them
/// is defined. Only TQ2_0 has undefined codes (3); other formats cost no more
/// than a look at the length. Scales are not looked at: that is
/// [`check_finite`].
///
/// # Errors
///
/// [`FormatError::PartialBlock`] or [`FormatError::InvalidCode`].
pub fn check(dtype: DType, bytes: &[u8]) -> Result<(), FormatError> {
    expect_whole_blocks(dtype, bytes)?;
    match dtype {
        DType::TQ2_0 => ternary::check_tq2_0(bytes),
        _ => Ok(()),
    }
}

fn expect_whole_blocks(dtype: DType, bytes: &[u8]) -> Result<(), FormatError> {
    let block = dtype.block_bytes();
    if bytes.len().is_multiple_of(block) {
        Ok(())
    } else {
        Err(FormatError::PartialBlock {
            dtype,
            unit: "bytes",
            block,
            found: bytes.len(),
        })
    }
}

fn expect_lengths(dtype: DType, elements: usize, bytes: usize) -> Result<(), FormatError> {
    let expected = dtype.row_bytes(elements).ok_or(FormatError::PartialBlock {
        dtype,
        unit: "elements",
        block: dtype.block_len(),
        found: elements,
    })?;
    if bytes == expected {
        Ok(())
    } else {
        Err(FormatError::Length {
            dtype,
            expected,
            found: bytes,
        })
    }
}

/// Little-endian `u16` at byte `at`.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Little-endian `u32` at byte `at`.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Little-endian fp32 at byte `at`.
fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(u32_at(bytes, at))
}

/// Little-endian fp16 at byte `at`, widened (exactly).
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    half::f16::from_bits(u16_at(bytes, at)).to_f32()
}

/// Rounds to fp16, ties to even; refuses what would become an infinity.
fn to_f16(value: f32) -> Result<half::f16, Overflow> {
    let rounded = half::f16::from_f32(value);
    if rounded.is_finite() {
        Ok(rounded)
    } else {
        Err(Overflow)
    }
}

/// `1 / scale`, or 0 where no code can be told from another: a zero scale, or one
/// so small (below 2^-128) that its reciprocal overflows. Such a scale is zero in
/// every stored precision but fp32.
fn reciprocal(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}
