//! Matrix products with packed weights: `y[m, n] = x[m, k] · W[n, k]ᵀ + bias`.
//!
//! # Numerics
//!
//! These sequences are the definition; every ISA and every number of tokens
//! gives the same bits (NaN payloads excepted), so a token's result never
//! depends on what else is in the batch, nor on the number of threads.
//!
//! **Int8 activations** ([`ActPrecision::Int8`], quantized weights). The input
//! is quantized per token and group of 32, see [`Prepared`]: codes `q` and scale
//! `sx`. For an output row, over the weight's groups `g` of 16 or 32 columns in
//! order, from `acc = 0`, all in fp32 with fused multiply-adds:
//!
//! ```text
//! isum = Σ (code - offset) · q             exact in int32
//! acc  = fma(isum, scale_g * sx_g, acc)    scale_g: effective scale, e.g. d * sub-scale
//! acc  = fma(min_g, Σ q * sx_g, acc)       only in formats with a minimum
//! ```
//!
//! **Int8 activations, ternary weights.** The same with groups of 256 columns on
//! both sides: `isum` runs over a whole block, whose scale is the weight's. Trits of
//! which a row or the tensor has one scale meet tokens with one scale:
//!
//! ```text
//! acc = acc + isum_b                       over blocks of 256 columns, in fp32
//! y   = acc * (scale * sx)                 scale of the row, scale of the token
//! ```
//!
//! which is the exact sum over the row up to 132,104 columns, since it stays below
//! 2^24. The last block may be short.
//!
//! **Float activations** ([`ActPrecision::F32`], [`ActPrecision::Bf16`], and
//! always if the weight is of plain floats). Weights are decoded to fp32, then
//! `a[k % 4] = fma(w[k], x[k], a[k % 4])` for `k` in order, from zero, and
//! `y = (a[0] + a[1]) + (a[2] + a[3])`.
//!
//! **Grids** ([`carat_tensor::grid`]) follow the same two definitions. Those of
//! integers have groups of 32 columns, or of 16 where a block is no multiple of 32,
//! offset 128, and with zero points the minimum `-(scale_g * zero_point)`; E2M1 counts as
//! integers of twice its value under half the scale. Palettes and eight-bit floats take
//! float activations under every precision, as plain floats do: their values are exact.
//!
//! The bias is added last.
//!
//! Subnormal numbers are kept: kernels leave the rounding and flushing modes
//! alone, since flushing would break equality with the scalar twin. Scales of
//! real models and [`prepared`](Prepared) scales are never subnormal, their
//! products hardly ever, so it costs nothing.

mod blocks;
mod crossover;
mod error;
mod job;
mod prepared;
mod scalar;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod simd;

#[cfg(test)]
mod grid_tests;
#[cfg(test)]
mod path_tests;
#[cfg(test)]
mod tests;

use carat_tensor::Form;
use carat_tensor::packed::{PackedRef, read_row};

use crate::{Isa, Pool};
use crossover::on_units;
pub use crossover::{
    Crossovers, PathTimes, WeightShape, crossover, default_crossover, is_worth_measuring, measure,
};
pub use error::MatmulError;
use error::require;
use job::{Job, Kernel, MAX_JOB_TOKENS, Output, Paths};
pub use prepared::{ActPrecision, Prepared};
use prepared::{Need, need};

/// One product of [`matmul`].
pub struct Product<'a> {
    /// The weight `[n, k]`.
    pub weight: PackedRef<'a>,
    /// Added to each output: `[n]`.
    pub bias: Option<&'a [f32]>,
    /// Result, `[m, n]` row-major.
    pub out: &'a mut [f32],
}

/// Packed bytes (times a factor for many tokens) that are worth a task of their
/// own: some microseconds of work, against about one for the region.
const TASK_COST: usize = 32 << 10;

/// Tasks per thread: enough for stealing to even out a pre-empted thread, and
/// two threads whose processors differ in speed.
const TASKS_PER_THREAD: usize = 32;

/// Products of one parallel region.
const REGION_PRODUCTS: usize = 16;

/// Multiplies the prepared input with each of the weights. Without tokens there
/// is nothing to do.
///
/// One parallel region covers the panels of all products (of 16 at a time).
/// Allocates nothing after each thread's first call.
///
/// # Errors
///
/// If this machine lacks the instruction set, a weight's columns, a bias or an
/// output does not fit the input, or the input was not prepared for a weight's
/// format (see [`Prepared::prepare_for`]). No output is written then.
pub fn matmul(
    isa: Isa,
    pool: &Pool,
    x: &Prepared,
    products: &mut [Product<'_>],
) -> Result<(), MatmulError> {
    // Kernels are called unchecked from here on.
    if !isa.is_available() {
        return Err(MatmulError::Isa(isa));
    }
    for product in &*products {
        check(x, product)?;
    }
    if x.tokens() > 0 {
        for region in products.chunks_mut(REGION_PRODUCTS) {
            run_region(isa, pool, x, region);
        }
    }
    Ok(())
}

/// Refuses a product that does not fit the input.
fn check(x: &Prepared, product: &Product<'_>) -> Result<(), MatmulError> {
    let layout = product.weight.layout();
    if layout.columns() != x.columns() {
        return Err(MatmulError::Columns {
            expected: x.columns(),
            found: layout.columns(),
        });
    }
    require("an output", x.tokens(), layout.rows(), product.out.len())?;
    if let Some(bias) = product.bias {
        require("a bias", 1, layout.rows(), bias.len())?;
    }
    if !x.has(x.need(layout.form())) {
        return Err(MatmulError::NotPrepared(layout.form()));
    }
    Ok(())
}

/// A product and its share of a region.
#[derive(Clone, Copy)]
struct Part<'a> {
    kernel: Kernel,
    fused: bool,
    weight: PackedRef<'a>,
    bias: Option<&'a [f32]>,
    out: *mut f32,
    /// Panels that a task takes together.
    unit: usize,
    /// Work of a unit.
    cost: usize,
}

/// The parts of a region, shared by its tasks.
struct Parts<'a>([Option<Part<'a>>; REGION_PRODUCTS]);

// SAFETY: the pointers in it are only written through `Output`s of disjoint
// places, one per task (see `run_region`).
unsafe impl Sync for Parts<'_> {}

/// The products must fit the input ([`check`]), which has a token at least.
fn run_region(isa: Isa, pool: &Pool, x: &Prepared, products: &mut [Product<'_>]) {
    let m = x.tokens();
    let mut parts = Parts([None; REGION_PRODUCTS]);
    let mut total = 0;
    for (part, product) in parts.0.iter_mut().zip(products) {
        let layout = product.weight.layout();
        let need = x.need(layout.form());
        let tiled = x.takes_tiles(isa, layout.into());
        let kernel = kernel(isa, layout.form(), need, tiled);
        let unit = if tiled { kernel.panels } else { 1 };
        // Reading is what one token costs; with many it is the arithmetic.
        let cost = unit * layout.panel_bytes() * m.div_ceil(4);
        total += layout.panels().div_ceil(unit) * cost;
        *part = Some(Part {
            kernel,
            fused: !tiled,
            weight: product.weight,
            bias: product.bias,
            out: product.out.as_mut_ptr(),
            unit,
            cost,
        });
    }
    let token_chunks = m.div_ceil(MAX_JOB_TOKENS);
    let ranges = if pool.threads() == 1 {
        1
    } else {
        let tasks = (total / TASK_COST).clamp(1, pool.threads() * TASKS_PER_THREAD);
        // Chunks of tokens are tasks as well, but sharing of panels matters more.
        tasks.div_ceil(token_chunks.min(2))
    };
    let parts = &parts;
    let task = |index: usize| {
        let (range, chunk) = (index / token_chunks, index % token_chunks);
        // Whole chunks, which tiles of the input are cut into.
        let first_token = chunk * MAX_JOB_TOKENS;
        let tokens = first_token..m.min(first_token + MAX_JOB_TOKENS);
        // The range of the region's work, cut as evenly as units allow: a unit
        // belongs to the range in which it starts.
        let first = mul_div(total, range, ranges);
        let end = mul_div(total, range + 1, ranges);
        let mut base = 0;
        for part in parts.0.iter().flatten() {
            let layout = part.weight.layout();
            let units = layout.panels().div_ceil(part.unit);
            let unit_at = |at: usize| at.saturating_sub(base).div_ceil(part.cost).min(units);
            let (from, to) = (unit_at(first), unit_at(end));
            base += units * part.cost;
            if from == to {
                continue;
            }
            let panels = from * part.unit..(to * part.unit).min(layout.panels());
            // SAFETY: `out` is `[m, rows]` (`check`) and borrowed for the
            // region; ranges of panels times ranges of tokens of different
            // tasks are disjoint.
            let out = unsafe { Output::new(part.out, m, layout.rows(), &panels, &tokens) };
            (part.kernel.run)(&Job {
                weight: part.weight,
                bias: part.bias,
                x,
                fused: part.fused,
                panels,
                tokens: tokens.clone(),
                out,
            });
        }
    };
    pool.run(ranges * token_chunks, &task);
}

/// `a * b / c` without overflow.
fn mul_div(a: usize, b: usize, c: usize) -> usize {
    (a as u128 * b as u128 / c as u128) as usize
}

/// The kernel of a path for a weight's format and a form of the input.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))] // tiles only there
fn kernel(isa: Isa, form: Form, need: Need, tiled: bool) -> Kernel {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => simd::amx_kernel(form, need, tiled),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => simd::avx512_kernel(form, need),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => simd::avxvnni_kernel(form, need),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => simd::avx2_kernel(form, need),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot => simd::neon_kernel(form, need),
        _ => scalar::kernel(need),
    }
}

/// The paths of a format, and where the change between them is by default.
fn paths(isa: Isa, form: Form, need: Need) -> Paths {
    if on_units(isa, need) {
        return Paths::Both {
            least: 1,
            default: TILE_UNIT_TOKENS,
        };
    }
    kernel(isa, form, need, false).paths
}

/// Fewest tokens that are worth the tile unit: four cost 1.0 to 1.3 times one
/// straight from the weight and 1.4 to 1.6 through tiles, five about 1.4 to 1.7 either way.
const TILE_UNIT_TOKENS: usize = 5;

/// What a product of `m` tokens will run, for plans: the kernel's instruction set,
/// which may be another than the one asked for, weight format, activations, and
/// whether codes are used straight from the weight (`fused`) or unpacked once for
/// many tokens (`tiled`).
pub fn kernel_name(
    isa: Isa,
    shape: WeightShape,
    precision: ActPrecision,
    m: usize,
    crossovers: &Crossovers,
) -> String {
    let form = shape.form;
    let need = need(precision, form);
    let tiled = crossovers.tiled(shape, paths(isa, form, need), m);
    let activations = match (need, precision) {
        (Need::Floats, ActPrecision::Bf16) => "bf16",
        (Need::Floats, _) => "f32",
        (Need::Groups, _) => "int8/32",
        (Need::Blocks, _) => "int8/256",
        (Need::Rows, _) => "int8/row",
    };
    let path = if tiled { "tiled" } else { "fused" };
    let isa = kernel(isa, form, need, tiled).isa;
    format!("{isa} {form} x {activations} {path}")
}

/// Decodes rows of a weight: `out[i] = scale * W[ids[i]]`, the factor applied
/// in fp32 after decoding.
///
/// # Errors
///
/// If an id is not a row or `out` is not `[ids, columns]`; `out` is not written then.
pub fn gather_rows(
    weight: PackedRef<'_>,
    ids: &[u32],
    scale: f32,
    out: &mut [f32],
) -> Result<(), MatmulError> {
    let (rows, columns) = (weight.layout().rows(), weight.layout().columns());
    require("an output", ids.len(), columns, out.len())?;
    if let Some(&id) = ids.iter().find(|&&id| id as usize >= rows) {
        return Err(MatmulError::Row { id, rows });
    }
    for (&id, out) in ids.iter().zip(out.chunks_exact_mut(columns)) {
        read_row(weight, id as usize, out);
        for v in out {
            *v *= scale;
        }
    }
    Ok(())
}
