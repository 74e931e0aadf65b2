//! Numbers of the file format: value types and tensor types.

use carat_tensor::DType;

/// First bytes of every file.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment of the tensor data where the file does not say.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment accepted: padding beyond this is an attack, not a layout.
pub(super) const MAX_ALIGNMENT: u64 = 1 << 20;
/// Key under which a file states its alignment.
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
/// Most dimensions of a tensor.
pub(super) const MAX_DIMS: usize = 4;
/// Deepest nesting of arrays.
pub(super) const MAX_NESTING: usize = 4;

pub(super) const VALUE_U8: u32 = 0;
pub(super) const VALUE_I8: u32 = 1;
pub(super) const VALUE_U16: u32 = 2;
pub(super) const VALUE_I16: u32 = 3;
pub(super) const VALUE_U32: u32 = 4;
pub(super) const VALUE_I32: u32 = 5;
pub(super) const VALUE_F32: u32 = 6;
pub(super) const VALUE_BOOL: u32 = 7;
pub(super) const VALUE_STRING: u32 = 8;
pub(super) const VALUE_ARRAY: u32 = 9;
pub(super) const VALUE_U64: u32 = 10;
pub(super) const VALUE_I64: u32 = 11;
pub(super) const VALUE_F64: u32 = 12;

/// Tensor types that can be read and written, with their numbers in the file.
pub(super) const TENSOR_TYPES: [(u32, DType); 25] = [
    (0, DType::F32),
    (1, DType::F16),
    (2, DType::Q4_0),
    (3, DType::Q4_1),
    (6, DType::Q5_0),
    (7, DType::Q5_1),
    (8, DType::Q8_0),
    (10, DType::Q2_K),
    (11, DType::Q3_K),
    (12, DType::Q4_K),
    (13, DType::Q5_K),
    (14, DType::Q6_K),
    (16, DType::IQ2_XXS),
    (17, DType::IQ2_XS),
    (18, DType::IQ3_XXS),
    (19, DType::IQ1_S),
    (20, DType::IQ4_NL),
    (21, DType::IQ3_S),
    (22, DType::IQ2_S),
    (23, DType::IQ4_XS),
    (29, DType::IQ1_M),
    (30, DType::BF16),
    (34, DType::TQ1_0),
    (35, DType::TQ2_0),
    (39, DType::MXFP4),
];

/// The format with number `id` in the file.
pub fn dtype_of_id(id: u32) -> Option<DType> {
    TENSOR_TYPES.iter().find(|(i, _)| *i == id).map(|(_, d)| *d)
}

/// The number in the file of a format; `None` for carat's own formats.
pub fn id_of_dtype(dtype: DType) -> Option<u32> {
    TENSOR_TYPES
        .iter()
        .find(|(_, d)| *d == dtype)
        .map(|(i, _)| *i)
}
