//! A plan at work: the bridge to `carat_bundle::convert`.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use carat_bundle::{
    convert::Quantize,
    manifest::{Form, Layout},
    spec::TensorDecl,
};
use carat_tensor::{
    DType, GridMatrix, formats,
    grid::{Code, Grid, Scale, Spread},
};

use crate::{
    Plan, Recipe, Treatment,
    kept::on_grid,
    matrix::{Method, Source, quantize},
};

/// What a bundle is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The CPU engine: grids that a block format holds exactly in the same bytes are
    /// stored in it, others are packed for the kernels of grids.
    Native,
    /// The recipe's own codes, scales, zero points and tables, for other programs
    /// and for the oracle.
    Portable,
}

/// Importance of the columns of matrices, by tensor name.
pub type Importance = HashMap<String, Vec<f32>>;

/// Names of the matrices that were on their grid already and kept it, as far as a
/// quantizer has come.
#[derive(Clone, Debug, Default)]
pub struct Kept(Arc<Mutex<BTreeSet<String>>>);

impl Kept {
    /// The names so far.
    pub fn names(&self) -> Vec<String> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().cloned().collect()
    }

    fn add(&self, name: &str) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(name.to_owned());
    }
}

/// A resolved recipe that quantizes the tensors of one model.
#[derive(Debug)]
pub struct Quantizer {
    name: String,
    text: String,
    target: Target,
    tensors: HashMap<String, (Treatment, String)>,
    importance: Importance,
    keep_grids: bool,
    kept: Kept,
    pool: rayon::ThreadPool,
}

impl Quantizer {
    /// A quantizer on so many threads, which change nothing but the time.
    ///
    /// # Errors
    ///
    /// If the system refuses threads.
    pub fn new(
        recipe: &Recipe,
        plan: &Plan,
        target: Target,
        threads: usize,
    ) -> std::io::Result<Quantizer> {
        Ok(Quantizer {
            name: recipe.name().to_owned(),
            text: recipe.text().to_owned(),
            target,
            tensors: plan
                .tensors
                .iter()
                .map(|t| (t.decl.name.clone(), (t.treatment, t.rule.clone())))
                .collect(),
            importance: Importance::new(),
            keep_grids: recipe.keeps_grids(),
            kept: Kept::default(),
            pool: rayon::ThreadPoolBuilder::new()
                .num_threads(threads.max(1))
                .build()
                .map_err(std::io::Error::other)?,
        })
    }

    /// Weighs columns where errors are compared, in clip searches and palettes.
    #[must_use]
    pub fn with_importance(mut self, importance: Importance) -> Quantizer {
        self.importance = importance;
        self
    }

    /// Where the names of matrices are to be had that keep their grid.
    pub fn kept(&self) -> Kept {
        self.kept.clone()
    }

    /// The matrix as it is, if it is on its grid already and the recipe lets it be.
    pub(crate) fn on_grid(
        &self,
        name: &str,
        method: &Method,
        source: Source<'_>,
    ) -> Option<GridMatrix> {
        let found = self.keep_grids.then(|| on_grid(method, source)).flatten();
        if found.is_some() {
            self.kept.add(name);
        }
        found
    }

    fn treatment(&self, decl: &TensorDecl) -> Option<(Treatment, &str)> {
        let (treatment, rule) = self.tensors.get(&decl.name)?;
        Some((*treatment, rule))
    }

    /// What happens to the tensor of that name.
    pub(crate) fn treatment_of(&self, name: &str) -> Option<Treatment> {
        self.tensors.get(name).map(|(treatment, _)| *treatment)
    }

    /// Runs work on this quantizer's threads.
    pub(crate) fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.pool.install(work)
    }

    /// A quantized matrix in the bytes of the target.
    pub(crate) fn store(&self, matrix: &GridMatrix) -> Result<Vec<u8>, String> {
        match (self.target, native_form(matrix.grid)) {
            (Target::Native, Ok(Form::Block(dtype))) => Ok(to_blocks(matrix, dtype)),
            _ => matrix.to_bytes().map_err(|e| e.to_string()),
        }
    }
}

/// The block format that holds a grid's values exactly, at its own width of codes:
/// scales that are shared by more than a block are repeated.
pub fn block_format(grid: Grid) -> Option<DType> {
    let whole = |block: u16| match grid.spread {
        Spread::Block(n) => n % block == 0,
        Spread::Tensor | Spread::Channel => true,
        Spread::Rows(_) => false,
    };
    match grid.code {
        Code::Int(4) if !grid.zero_points && grid.scale == Scale::F16 && whole(32) => {
            Some(DType::Q4_0)
        }
        Code::Int(8) if !grid.zero_points && grid.scale == Scale::F16 && whole(32) => {
            Some(DType::Q8_0)
        }
        Code::Int(8) if grid.zero_points && grid.scale != Scale::F16 => None,
        Code::Int(8) if whole(32) => Some(DType::I8G32),
        Code::Int(8) if whole(16) => Some(DType::I8G16),
        Code::Trit if grid.scale == Scale::F16 && whole(256) => Some(DType::TQ2_0),
        Code::Fp4 if grid.scale == Scale::E8M0 && whole(32) => Some(DType::MXFP4),
        _ => None,
    }
}

/// The form in which the CPU engine reads a grid: the block format of the same size,
/// which has kernels of its own, else the grid itself. Only ternary blocks of more than
/// 256 columns take more: a scale for each 256, as TQ2_0.
///
/// # Errors
///
/// Says why no kernel reads it.
pub fn native_form(grid: Grid) -> Result<Form, String> {
    let same_size = match (grid.code, grid.spread) {
        (Code::Trit, Spread::Block(_)) => true,
        (Code::Int(4 | 8), Spread::Block(32)) => grid.scale == Scale::F16 && !grid.zero_points,
        _ => false,
    };
    if let Some(dtype) = block_format(grid).filter(|_| same_size) {
        return Ok(Form::Block(dtype));
    }
    match grid.spread {
        Spread::Block(n) if n % 16 != 0 => Err(format!(
            "kernels of the CPU engine read blocks of 16 columns and multiples, not {grid}"
        )),
        _ => Ok(Form::Grid(grid)),
    }
}

/// A quantized matrix in blocks of `dtype`, which [`block_format`] gave.
pub fn to_blocks(matrix: &GridMatrix, dtype: DType) -> Vec<u8> {
    let length = dtype.block_len();
    let per_row = matrix.columns / length;
    let run = match matrix.grid.spread {
        Spread::Block(n) => usize::from(n),
        _ => matrix.columns,
    };
    let mut out = Vec::with_capacity(matrix.codes.len() / length * dtype.block_bytes());
    for (i, codes) in matrix.codes.chunks_exact(length).enumerate() {
        let (row, column) = (i / per_row, i % per_row * length);
        let at = match matrix.grid.spread {
            Spread::Tensor => 0,
            _ => row * (matrix.columns / run) + column / run,
        };
        let scale = matrix.scales[at];
        let half = half::f16::from_f32(scale).to_le_bytes();
        match dtype {
            DType::Q8_0 => {
                out.extend(half);
                out.extend(codes);
            }
            DType::Q4_0 => {
                out.extend(half);
                let (low, high) = codes.split_at(16);
                out.extend(low.iter().zip(high).map(|(low, high)| {
                    (low.wrapping_add(8) & 15) | (high.wrapping_add(8) & 15) << 4
                }));
            }
            DType::MXFP4 => {
                // GGUF's table of magnitudes is doubled, and so is the bias of its
                // exponent: `e` is the same byte in both.
                out.push((scale.to_bits() >> 23) as u8);
                let (low, high) = codes.split_at(16);
                out.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
            }
            DType::TQ2_0 => out.extend(formats::tq2_0_block(codes, half)),
            _ => {
                // Exact with an fp16 scale: it has 11 bits, a code 8, and so each
                // product 19 and their difference at most 20.
                let zero = matrix.zero_points.get(at).copied().unwrap_or(0);
                out.extend(scale.to_le_bytes());
                out.extend((-(scale * f32::from(zero))).to_le_bytes());
                out.extend(codes);
            }
        }
    }
    out
}

impl Quantize for Quantizer {
    fn name(&self) -> &str {
        &self.name
    }

    fn text(&self) -> Option<&str> {
        Some(&self.text)
    }

    fn form(&self, decl: &TensorDecl, source: DType) -> Result<Option<(Form, String)>, String> {
        let Some((treatment, rule)) = self.treatment(decl) else {
            return Err(format!(
                "recipe {} was resolved for another model",
                self.name
            ));
        };
        let method = match treatment {
            Treatment::Keep => return Ok(None),
            Treatment::Float16 if source == DType::F16 => return Ok(None),
            Treatment::Float16 => {
                return Ok(Some((Form::Block(DType::F16), "rounded to fp16".into())));
            }
            Treatment::Quantize(method) => method,
        };
        let grid = method.grid();
        let reason = format!("{treatment} ({rule})");
        if self.target == Target::Portable {
            return Ok(Some((Form::Grid(grid), reason)));
        }
        let form = native_form(grid);
        let form = form.map_err(|problem| format!("{problem} (asked for by {rule})"))?;
        Ok(Some((form, reason)))
    }

    fn grid_layout(&self) -> Layout {
        match self.target {
            Target::Native => Layout::Packed16,
            Target::Portable => Layout::Sections,
        }
    }

    fn apply(&self, decl: &TensorDecl, source: DType, data: &[u8]) -> Result<Vec<u8>, String> {
        let ([rows, columns], Some((treatment, _))) = (decl.shape.dims(), self.treatment(decl))
        else {
            return Err("is not a matrix of the recipe's model".into());
        };
        let method = match treatment {
            Treatment::Keep => return Ok(data.to_vec()),
            Treatment::Float16 => return to_f16(source, data),
            Treatment::Quantize(method) => method,
        };
        let source = Source {
            dtype: source,
            rows: *rows,
            columns: *columns,
            data,
        };
        let kept = || self.on_grid(&decl.name, &method, source);
        if let Some(matrix) = self.pool.install(kept) {
            return self.store(&matrix);
        }
        let importance = self.importance.get(&decl.name).map(Vec::as_slice);
        if importance.is_some_and(|m| m.len() != *columns) {
            return Err(format!("importance is not of {columns} columns"));
        }
        let matrix = self
            .pool
            .install(|| quantize(&method, source, importance))
            .map_err(|e| e.to_string())?;
        self.store(&matrix)
    }
}

/// Rounds to fp16; what is beyond it is refused.
fn to_f16(source: DType, data: &[u8]) -> Result<Vec<u8>, String> {
    // Enough for any block at a time, little enough to stay in the cache.
    const BLOCKS: usize = 64;
    let mut out = Vec::with_capacity(data.len() / source.block_bytes() * source.block_len() * 2);
    let mut values = vec![0.0; BLOCKS * source.block_len()];
    for part in data.chunks(BLOCKS * source.block_bytes()) {
        let values = &mut values[..part.len() / source.block_bytes() * source.block_len()];
        formats::decode(source, part, values).map_err(|e| e.to_string())?;
        let at = out.len();
        out.resize(at + values.len() * 2, 0);
        formats::encode(DType::F16, values, &mut out[at..]).map_err(|e| e.to_string())?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::{Linear, RangeSearch, Scheme};

    #[test]
    fn blocks_hold_what_the_grid_holds() {
        let (rows, columns) = (6, 512);
        let data: Vec<u8> = (0..rows * columns)
            .map(|i| ((i * 7919 % 1013) as f32 - 450.0) / 1024.0)
            .flat_map(f32::to_le_bytes)
            .collect();
        let source = Source {
            dtype: DType::F32,
            rows,
            columns,
            data: &data,
        };
        let schemes = [
            Scheme::Symmetric,
            Scheme::SymmetricWithClipping,
            Scheme::Asymmetric,
        ];
        let mut formats_seen = std::collections::BTreeSet::new();
        for code in [Code::Int(8), Code::Int(4), Code::Trit, Code::Fp4] {
            for scale in [Scale::F16, Scale::F32, Scale::E8M0] {
                for spread in [16, 32, 64, 256]
                    .map(Spread::Block)
                    .into_iter()
                    .chain([Spread::Tensor, Spread::Channel])
                {
                    for scheme in schemes {
                        let linear = Linear {
                            code,
                            scheme,
                            scale,
                            search: RangeSearch::MinMax,
                        };
                        let method = Method::Linear { linear, spread };
                        let Some(dtype) = Some(method.grid())
                            .filter(Grid::is_valid)
                            .and_then(block_format)
                        else {
                            continue;
                        };
                        let matrix = quantize(&method, source, None).unwrap();
                        let mut expected = vec![0.0; rows * columns];
                        for (row, out) in expected.chunks_exact_mut(columns).enumerate() {
                            matrix.decode_row(row, out);
                        }
                        let mut found = vec![0.0; rows * columns];
                        formats::decode(dtype, &to_blocks(&matrix, dtype), &mut found).unwrap();
                        assert!(found == expected, "{} as {dtype}", matrix.grid);
                        formats_seen.insert(dtype);
                    }
                }
            }
        }
        assert_eq!(formats_seen.len(), 6, "{formats_seen:?}");
    }
}
