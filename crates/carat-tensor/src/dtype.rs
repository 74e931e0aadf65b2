use serde::{Deserialize, Serialize};

/// How the elements of a tensor are stored.
///
/// The names are those of the formats' origins: `Q4_K` is what a GGUF file
/// calls it, byte for byte. `I8G16` and `I8G32` are carat's own: a group of 16
/// or 32 signed codes with an fp32 scale and an fp32 minimum, wide enough to
/// hold any other format exactly (`w = scale * code + min`).
#[allow(missing_docs)] // the variants are the formats' own names
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    TQ1_0,
    TQ2_0,
    IQ4_NL,
    IQ4_XS,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ1_S,
    IQ1_M,
    MXFP4,
    I8G16,
    I8G32,
}

impl DType {
    /// Every format, in declaration order.
    pub const ALL: [DType; 27] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::TQ1_0,
        DType::TQ2_0,
        DType::IQ4_NL,
        DType::IQ4_XS,
        DType::IQ2_XXS,
        DType::IQ2_XS,
        DType::IQ2_S,
        DType::IQ3_XXS,
        DType::IQ3_S,
        DType::IQ1_S,
        DType::IQ1_M,
        DType::MXFP4,
        DType::I8G16,
        DType::I8G32,
    ];

    /// Elements in one block.
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q4_0
            | DType::Q4_1
            | DType::Q5_0
            | DType::Q5_1
            | DType::Q8_0
            | DType::IQ4_NL
            | DType::MXFP4
            | DType::I8G32 => 32,
            DType::I8G16 => 16,
            _ => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q4_0 | DType::IQ4_NL => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q8_0 => 34,
            DType::Q2_K => 84,
            DType::Q3_K => 110,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
            DType::TQ1_0 => 54,
            DType::TQ2_0 => 66,
            DType::IQ4_XS => 136,
            DType::IQ2_XXS => 66,
            DType::IQ2_XS => 74,
            DType::IQ2_S => 82,
            DType::IQ3_XXS => 98,
            DType::IQ3_S => 110,
            DType::IQ1_S => 50,
            DType::IQ1_M => 56,
            DType::MXFP4 => 17,
            DType::I8G16 => 16 + 8,
            DType::I8G32 => 32 + 8,
        }
    }

    /// Bytes of a row of `columns` elements, or `None` when `columns` is not a
    /// whole number of blocks or the size overflows.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        if !columns.is_multiple_of(self.block_len()) {
            return None;
        }
        (columns / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Average storage cost of one weight, in bits.
    pub fn bits_per_weight(self) -> f64 {
        self.block_bytes() as f64 * 8.0 / self.block_len() as f64
    }

    /// Whether elements are stored as plain floating point.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }

    /// The format's name, as written in manifests and reports.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::Q4_0 => "Q4_0",
            DType::Q4_1 => "Q4_1",
            DType::Q5_0 => "Q5_0",
            DType::Q5_1 => "Q5_1",
            DType::Q8_0 => "Q8_0",
            DType::Q2_K => "Q2_K",
            DType::Q3_K => "Q3_K",
            DType::Q4_K => "Q4_K",
            DType::Q5_K => "Q5_K",
            DType::Q6_K => "Q6_K",
            DType::TQ1_0 => "TQ1_0",
            DType::TQ2_0 => "TQ2_0",
            DType::IQ4_NL => "IQ4_NL",
            DType::IQ4_XS => "IQ4_XS",
            DType::IQ2_XXS => "IQ2_XXS",
            DType::IQ2_XS => "IQ2_XS",
            DType::IQ2_S => "IQ2_S",
            DType::IQ3_XXS => "IQ3_XXS",
            DType::IQ3_S => "IQ3_S",
            DType::IQ1_S => "IQ1_S",
            DType::IQ1_M => "IQ1_M",
            DType::MXFP4 => "MXFP4",
            DType::I8G16 => "I8G16",
            DType::I8G32 => "I8G32",
        }
    }

    /// The format with this [`name`](DType::name).
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::DType;

    #[test]
    fn names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(json, format!("\"{}\"", dtype.name()));
        }
        assert_eq!(DType::from_name("q4_0"), None);
    }

    #[test]
    fn row_bytes_needs_whole_blocks() {
        assert_eq!(DType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(DType::Q4_K.row_bytes(576), None);
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
    }

    // Ledger section 0: the published sizes of two models follow from these constants.
    #[test]
    fn published_sizes_follow_from_the_block_sizes() {
        let bytes = |d: DType, n: u64| n / d.block_len() as u64 * d.block_bytes() as u64;
        assert_eq!(bytes(DType::TQ2_0, 7_583_301_632), 1_955_069_952);
        assert_eq!(bytes(DType::Q4_K, 73448 * 4096), 169_224_192);
        assert_eq!(bytes(DType::Q6_K, 73448 * 4096), 246_785_280);
        assert_eq!(bytes(DType::Q8_0, 2_516_582_400), 2_673_868_800);
    }
}
