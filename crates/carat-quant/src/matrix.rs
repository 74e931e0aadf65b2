//! Quantizes a whole matrix, in parallel; the result does not depend on threads.

use carat_tensor::{
    DType, GridMatrix, formats,
    grid::{Code, Grid, GridError, Scale, Spread},
};
use half::f16;
use rayon::prelude::*;

use crate::{
    kmeans,
    linear::{Linear, Overflow, RangeSearch, Scheme, Stats},
};

/// How a matrix is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// A code for each weight under the scale of its group.
    Linear {
        /// How a group is quantized.
        linear: Linear,
        /// What a group is.
        spread: Spread,
    },
    /// An index for each weight into the palette of its group.
    Palette {
        /// Bits of an index: 1, 2, 3, 4, 6 or 8.
        bits: u8,
        /// The whole tensor, or so many rows.
        spread: Spread,
        /// Divide each row by its largest magnitude first.
        scaled: bool,
        /// Decimals to which weights are rounded before equal ones are merged.
        decimals: Option<u32>,
    },
}

impl Method {
    /// The format of the result.
    pub fn grid(&self) -> Grid {
        match *self {
            Method::Linear { linear, spread } => Grid {
                zero_points: linear.has_zero_points(),
                ..Grid::new(linear.code, spread, linear.scale)
            },
            Method::Palette {
                bits,
                spread,
                scaled,
                ..
            } => Grid {
                scaled,
                ..Grid::new(Code::Lut(bits), spread, Scale::F16)
            },
        }
    }
}

/// A matrix as its source stores it.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Format of the elements.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Row-major whole blocks.
    pub data: &'a [u8],
}

/// Why a matrix cannot be quantized.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MatrixError {
    /// The shape does not fit the method's groups.
    #[error(transparent)]
    Grid(#[from] GridError),
    /// The bytes are not what the source's format says.
    #[error("{0}")]
    Source(String),
    /// A weight is infinite or not a number.
    #[error("row {row}: a weight is {value}: only finite weights can be quantized")]
    NonFinite {
        /// Its row.
        row: usize,
        /// The weight.
        value: f32,
    },
    /// Weights, or their scale, are beyond what the format can hold.
    #[error("row {row}: weights are too large for {grid}")]
    Overflow {
        /// First row of the group.
        row: usize,
        /// The format.
        grid: Grid,
    },
    /// The method's search needs all weights of a group at once.
    #[error("a clip search or a Q4_0 grid works within a row, not over {grid}")]
    TensorSearch {
        /// The format.
        grid: Grid,
    },
}

impl<'a> Source<'a> {
    /// The bytes of a row, once the length has been checked.
    fn row(&self, row: usize) -> &'a [u8] {
        let bytes = self.data.len() / self.rows;
        &self.data[row * bytes..][..bytes]
    }

    /// Decodes a row, finite values only.
    fn decode(&self, row: usize, out: &mut [f32]) -> Result<(), MatrixError> {
        formats::decode(self.dtype, self.row(row), out)
            .map_err(|e| MatrixError::Source(format!("row {row}: {e}")))?;
        match out.iter().find(|w| !w.is_finite()) {
            Some(&value) => Err(MatrixError::NonFinite { row, value }),
            None => Ok(()),
        }
    }

    /// The range of the whole matrix. Sums are added row by row, in order.
    fn stats(&self) -> Result<Stats, MatrixError> {
        let rows: Vec<Stats> = (0..self.rows)
            .into_par_iter()
            .map_init(
                || vec![0.0; self.columns],
                |buffer, row| {
                    self.decode(row, buffer)?;
                    Ok(Stats::of(buffer))
                },
            )
            .collect::<Result<_, MatrixError>>()?;
        Ok(rows.into_iter().fold(Stats::default(), Stats::and))
    }
}

/// Quantizes a matrix. `importance` weighs the columns where errors are compared:
/// in clip searches and palettes.
///
/// # Errors
///
/// [`MatrixError`], never for a finite matrix of whole groups in fp16's range.
///
/// # Panics
///
/// If `importance` has not one value per column.
pub fn quantize(
    method: &Method,
    source: Source<'_>,
    importance: Option<&[f32]>,
) -> Result<GridMatrix, MatrixError> {
    let grid = method.grid();
    let parts = grid.parts(source.rows, source.columns)?;
    assert!(importance.is_none_or(|m| m.len() == source.columns));
    let expected = source
        .dtype
        .row_bytes(source.columns)
        .and_then(|row| row.checked_mul(source.rows));
    if expected != Some(source.data.len()) || source.data.is_empty() {
        return Err(MatrixError::Source(format!(
            "{} of [{}, {}] cannot have {} bytes",
            source.dtype,
            source.rows,
            source.columns,
            source.data.len()
        )));
    }
    debug_assert!(parts.total() > 0);
    let mut out = GridMatrix {
        grid,
        rows: source.rows,
        columns: source.columns,
        codes: vec![0; source.rows * source.columns],
        scales: vec![],
        zero_points: vec![],
        tables: vec![],
        tensor_scale: 1.0,
    };
    match *method {
        Method::Linear { linear, spread } => {
            linear_rows(&linear, spread, source, importance, &mut out)?;
        }
        Method::Palette {
            bits,
            spread,
            scaled,
            decimals,
        } => {
            let rows = match spread {
                Spread::Rows(n) => usize::from(n),
                _ => source.rows,
            };
            let task = Palettes {
                source,
                importance,
                bits,
                scaled,
                decimals,
                grid,
            };
            let groups: Vec<_> = out
                .codes
                .par_chunks_mut(rows * source.columns)
                .enumerate()
                .map(|(i, codes)| task.group(i * rows, codes))
                .collect::<Result<_, _>>()?;
            for (table, scales) in groups {
                out.tables.extend(table);
                out.scales.extend(scales);
            }
        }
    }
    Ok(out)
}

/// Fills codes, scales and zero points.
fn linear_rows(
    linear: &Linear,
    spread: Spread,
    source: Source<'_>,
    importance: Option<&[f32]>,
    out: &mut GridMatrix,
) -> Result<(), MatrixError> {
    let grid = out.grid;
    let columns = source.columns;
    let overflow = |row: usize| move |Overflow| MatrixError::Overflow { row, grid };
    if spread == Spread::Tensor {
        if linear.search != RangeSearch::MinMax || linear.scheme == Scheme::Q4_0 {
            return Err(MatrixError::TensorSearch { grid });
        }
        let stats = source.stats()?;
        let params = linear.params_of(&stats).map_err(overflow(0))?;
        out.tensor_scale = linear.tensor_scale(&stats);
        let tensor_scale = out.tensor_scale;
        out.codes
            .par_chunks_mut(columns)
            .enumerate()
            .try_for_each_init(
                || vec![0.0; columns],
                |buffer, (row, codes)| {
                    source.decode(row, buffer)?;
                    linear.codes(buffer, params, tensor_scale, codes);
                    Ok::<(), MatrixError>(())
                },
            )?;
        out.scales = vec![params.scale];
        out.zero_points = vec![params.zero_point; usize::from(grid.zero_points)];
        return Ok(());
    }
    if linear.scale == Scale::E4M3 {
        out.tensor_scale = linear.tensor_scale(&source.stats()?);
    }
    let run = match spread {
        Spread::Block(n) => usize::from(n),
        _ => columns,
    };
    let tensor_scale = out.tensor_scale;
    let rows: Vec<Vec<_>> = out
        .codes
        .par_chunks_mut(columns)
        .enumerate()
        .map_init(
            || vec![0.0; columns],
            |buffer, (row, codes)| {
                source.decode(row, buffer)?;
                let groups = buffer.chunks(run).zip(codes.chunks_mut(run)).enumerate();
                groups
                    .map(|(i, (values, codes))| {
                        let importance = importance.map(|m| &m[i * run..][..values.len()]);
                        linear
                            .group(values, importance, tensor_scale, codes)
                            .map_err(overflow(row))
                    })
                    .collect::<Result<Vec<_>, MatrixError>>()
            },
        )
        .collect::<Result<_, _>>()?;
    out.scales = rows.iter().flatten().map(|p| p.scale).collect();
    if grid.zero_points {
        out.zero_points = rows.iter().flatten().map(|p| p.zero_point).collect();
    }
    Ok(())
}

/// What palettes are made of.
struct Palettes<'a> {
    source: Source<'a>,
    importance: Option<&'a [f32]>,
    bits: u8,
    scaled: bool,
    decimals: Option<u32>,
    grid: Grid,
}

impl Palettes<'_> {
    /// The table and the row scales of a group of rows that starts at `first`.
    fn group(&self, first: usize, codes: &mut [u8]) -> Result<(Vec<f32>, Vec<f32>), MatrixError> {
        let columns = self.source.columns;
        let mut weights = vec![0.0; codes.len()];
        let mut scales = Vec::new();
        for (row, values) in weights.chunks_exact_mut(columns).enumerate() {
            self.source.decode(first + row, values)?;
            let largest = Stats::of(values);
            let largest = largest.max.max(-largest.min);
            if f16::from_f32(largest).is_infinite() {
                return Err(MatrixError::Overflow {
                    row: first + row,
                    grid: self.grid,
                });
            }
            if self.scaled {
                let scale = match f16::from_f32(largest).to_f32() {
                    0.0 => 1.0,
                    scale => scale,
                };
                values
                    .iter_mut()
                    .for_each(|w| *w = f16::from_f32(*w).to_f32() / scale);
                scales.push(scale);
            }
        }
        let importance: Option<Vec<f32>> = self
            .importance
            .map(|m| m.iter().copied().cycle().take(codes.len()).collect());
        let palette = kmeans::palettize(&weights, importance.as_deref(), self.bits, self.decimals);
        codes.copy_from_slice(&palette.codes);
        Ok((palette.table, scales))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(rows: usize, columns: usize) -> Vec<u8> {
        (0..rows * columns)
            .map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 2048.0)
            .flat_map(f32::to_le_bytes)
            .collect()
    }

    fn methods() -> Vec<Method> {
        let linear = |code, scheme, scale, spread| Method::Linear {
            linear: Linear {
                code,
                scheme,
                scale,
                search: RangeSearch::MinMax,
            },
            spread,
        };
        let palette = |bits, spread, scaled| Method::Palette {
            bits,
            spread,
            scaled,
            decimals: Some(4),
        };
        vec![
            linear(
                Code::Int(4),
                Scheme::Symmetric,
                Scale::F16,
                Spread::Block(32),
            ),
            linear(
                Code::Int(4),
                Scheme::Asymmetric,
                Scale::F16,
                Spread::Channel,
            ),
            linear(Code::Int(8), Scheme::Asymmetric, Scale::F32, Spread::Tensor),
            linear(Code::Trit, Scheme::AbsMean, Scale::F16, Spread::Tensor),
            linear(Code::Fp4, Scheme::Symmetric, Scale::E4M3, Spread::Block(16)),
            linear(
                Code::Fp8E4M3,
                Scheme::Symmetric,
                Scale::F16,
                Spread::Channel,
            ),
            palette(4, Spread::Rows(8), false),
            palette(6, Spread::Tensor, true),
        ]
    }

    #[test]
    fn threads_do_not_change_a_byte_and_the_size_is_that_of_the_grid() {
        let data = floats(48, 64);
        let source = Source {
            dtype: DType::F32,
            rows: 48,
            columns: 64,
            data: &data,
        };
        for method in methods() {
            let with = |threads| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap()
                    .install(|| quantize(&method, source, None).unwrap())
            };
            let (one, three) = (with(1), with(3));
            assert_eq!(one, three);
            let bytes = one.to_bytes().unwrap();
            assert_eq!(bytes.len(), one.grid.parts(48, 64).unwrap().total());
            let back = GridMatrix::from_bytes(one.grid, 48, 64, &bytes).unwrap();
            assert_eq!(back, one);
        }
    }

    #[test]
    fn what_cannot_be_quantized_is_named() {
        let mut data = floats(8, 32);
        let method = methods()[0];
        fn source(data: &[u8]) -> Source<'_> {
            Source {
                dtype: DType::F32,
                rows: 8,
                columns: 32,
                data,
            }
        }
        let short = quantize(&method, source(&data[4..]), None).unwrap_err();
        assert!(
            short.to_string().contains("cannot have 1020 bytes"),
            "{short}"
        );
        data[4 * 100..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        let nan = quantize(&method, source(&data), None).unwrap_err();
        assert!(matches!(nan, MatrixError::NonFinite { row: 3, .. }));
        data[4 * 100..][..4].copy_from_slice(&1e9f32.to_le_bytes());
        for method in [method, methods()[6]] {
            let large = quantize(&method, source(&data), None).unwrap_err();
            assert!(matches!(large, MatrixError::Overflow { .. }), "{large}");
        }
    }
}
