//! The command line of what looks at recipes before they are stored.

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum};

use crate::args::ModelOptions;

/// How a target keeps the embedding table, whatever the recipe says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TableKind {
    /// As the recipe says
    Recipe,
    /// fp16
    F16,
    /// 8-bit codes with one scale for the whole table
    Int8,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Simulate {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// What is done to the weights: a preset or a file
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) recipe: String,
    /// Answers made by `carat fixture`; the standard set is made if not given
    #[arg(long, value_name = "F")]
    pub(crate) fixture: Option<PathBuf>,
    /// How the target keeps the embedding table. With --act and --kv it is the
    /// arithmetic that is judged beside fp32
    #[arg(long, value_enum, default_value = "recipe")]
    pub(crate) embedding: TableKind,
    /// Importance matrix (a GGUF file of llama.cpp's) that weighs errors in clip
    /// searches and palettes
    #[arg(long, value_name = "FILE.gguf")]
    pub(crate) imatrix: Option<PathBuf>,
    /// Text for divergence and perplexity; a passage that ships with carat if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Where the result goes
    #[arg(long, value_name = "F.json")]
    pub(crate) out: Option<PathBuf>,
}

/// Formats that differ in their width only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FamilyKind {
    /// Palettes for 8 rows, of 2, 3, 4, 6 or 8 bits
    Palette,
    /// Integers in blocks of 32, of 4 or 8 bits
    Linear,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Scan {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// How weights are damaged
    #[arg(long, value_enum, default_value = "palette")]
    pub(crate) family: FamilyKind,
    /// Widths of codes
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "4,6")]
    pub(crate) bits: Vec<u8>,
    /// Answers made by `carat fixture`, whose steps are asked beside the text
    #[arg(long, value_name = "F")]
    pub(crate) fixture: Option<PathBuf>,
    /// Text that is asked at every position; a passage that ships with carat if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Measure each matrix alone, but no layer, kind of module or remainder: enough
    /// for `carat allocate`
    #[arg(long)]
    pub(crate) matrices: bool,
    /// Measurements, one a line; a file of the same scan is gone on with
    #[arg(long, value_name = "F.jsonl")]
    pub(crate) out: PathBuf,
    /// A picture of it
    #[arg(long, value_name = "F.svg")]
    pub(crate) heat_map: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Allocate {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// What `carat scan` measured, at two widths or more
    #[arg(long, value_name = "F.jsonl")]
    pub(crate) scan: PathBuf,
    /// Bytes that all weights may take, such as 4500000, 900MB or 1.2GB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) budget: u64,
    /// The recipe to write
    #[arg(long, value_name = "FILE.yaml")]
    pub(crate) out: PathBuf,
}

/// Bytes, with a unit of powers of ten or without.
fn parse_bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 4] = [
        ("kB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("B", 1),
    ];
    let text = text.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?.trim_end(), *unit)))
        .unwrap_or((text, 1));
    if unit == 1 {
        return number.parse().map_err(|_| expected(text));
    }
    let value: f64 = number.parse().map_err(|_| expected(text))?;
    let bytes = value * unit as f64;
    // Above 2^53 a float skips whole bytes; nothing is that large.
    match (0.0..9e15).contains(&bytes) {
        true => Ok(bytes as u64),
        false => Err(expected(text)),
    }
}

fn expected(text: &str) -> String {
    format!("{text:?} is no size, expected bytes, or a number with kB, MB or GB")
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(parse_bytes("4500000"), Ok(4_500_000));
        assert_eq!(parse_bytes("900MB"), Ok(900_000_000));
        assert_eq!(parse_bytes("1.25 GB"), Ok(1_250_000_000));
        assert_eq!(parse_bytes("12B"), Ok(12));
        for wrong in [
            "", "MB", "-1", "-1MB", "1.5", "nan MB", "inf GB", "1e40 GB", "7 MiB",
        ] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
