//! From how many tokens on a product goes through tiles.
//!
//! With few tokens codes are used straight from the weight (*fused*: unpacked
//! again for every pass of a few tokens), with many they are unpacked once into
//! tiles for all of them (*tiled*: on vectors, or on the tile unit where there
//! is one). Both give the same bits, so where to change is a matter of time
//! alone. It depends on the format, the shape, the instruction set and the
//! threads: [`measure`] finds out, and [`Crossovers`] carries the answer to
//! [`matmul`](super::matmul()) with the input that it is for.

use std::time::{Duration, Instant};

use carat_tensor::Form;
use carat_tensor::packed::{PANEL_ROWS, PackedLayout, PackedRef};

use super::prepared::{Need, need};
use super::{ActPrecision, Paths, Prepared, Product, matmul, paths};
use crate::{Isa, Pool};

/// What a crossover belongs to, besides the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightShape {
    /// Format of the weight.
    pub form: Form,
    /// Its rows, N.
    pub rows: usize,
    /// Its columns, K.
    pub columns: usize,
}

impl From<&PackedLayout> for WeightShape {
    fn from(layout: &PackedLayout) -> Self {
        WeightShape {
            form: layout.form(),
            rows: layout.rows(),
            columns: layout.columns(),
        }
    }
}

/// From how many tokens on products go through tiles, by shape of the weight.
///
/// A shape that is not in the table has the constant of its kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Crossovers {
    /// In place of everything else.
    forced: Option<usize>,
    shapes: Vec<(WeightShape, usize)>,
}

impl Crossovers {
    /// The same number of tokens for all shapes: with 0 or 1 everything is
    /// tiled, with `usize::MAX` nothing is.
    pub fn forced(tiled_from: usize) -> Crossovers {
        Crossovers {
            forced: Some(tiled_from),
            shapes: Vec::new(),
        }
    }

    /// Sets the crossover of a shape.
    pub fn set(&mut self, shape: WeightShape, tiled_from: usize) {
        match self.shapes.iter_mut().find(|(known, _)| *known == shape) {
            Some((_, from)) => *from = tiled_from,
            None => self.shapes.push((shape, tiled_from)),
        }
    }

    /// Whether a weight of this shape times `m` tokens goes through tiles.
    pub(super) fn tiled(&self, shape: WeightShape, paths: Paths, m: usize) -> bool {
        match paths {
            Paths::Fused => false,
            Paths::Tiled => true,
            Paths::Both { least, default } => {
                let known = || self.shapes.iter().find(|(known, _)| *known == shape);
                let from = self.forced.or_else(|| known().map(|&(_, from)| from));
                m >= from.unwrap_or(default).max(least)
            }
        }
    }

    /// Which paths `m` tokens may take in weights of a format and number of
    /// columns, whatever their rows: `[fused, tiled]`. One is true at least.
    pub(super) fn wanted(&self, form: Form, columns: usize, paths: Paths, m: usize) -> [bool; 2] {
        let mut wanted = [false; 2];
        let others = self.shapes.iter().map(|&(shape, _)| shape);
        // No weight has 0 rows: this one stands for those not in the table.
        let unknown = WeightShape {
            form,
            rows: 0,
            columns,
        };
        for shape in others.chain([unknown]) {
            if (shape.form, shape.columns) == (form, columns) {
                wanted[usize::from(self.tiled(shape, paths, m))] = true;
            }
        }
        wanted
    }
}

/// The constant crossover of a format's kernel, where there are two paths.
pub fn default_crossover(isa: Isa, form: Form, precision: ActPrecision) -> Option<usize> {
    match paths(isa, form, need(precision, form)) {
        Paths::Both { default, .. } => Some(default),
        Paths::Fused | Paths::Tiled => None,
    }
}

/// Tokens that [`measure`] tries.
const MEASURED_TOKENS: [usize; 17] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 32];

/// Best times of both paths for a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathTimes {
    /// Tokens.
    pub m: usize,
    /// Straight from the weight.
    pub fused: Duration,
    /// Through tiles.
    pub tiled: Duration,
}

/// The fewest of the measured tokens from which on tiles were never slower; one
/// more than the most that were measured if they were slower even there.
///
/// ```
/// use carat_kernels::{PathTimes, crossover};
/// use std::time::Duration;
///
/// let time = |m, fused, tiled| PathTimes {
///     m,
///     fused: Duration::from_micros(fused),
///     tiled: Duration::from_micros(tiled),
/// };
/// assert_eq!(crossover(&[time(1, 10, 30), time(2, 30, 29), time(3, 30, 31), time(4, 40, 35)]), 4);
/// assert_eq!(crossover(&[time(1, 10, 30), time(4, 20, 30)]), 5);
/// ```
pub fn crossover(times: &[PathTimes]) -> usize {
    let mut from = times.iter().map(|t| t.m + 1).max().unwrap_or(1);
    for time in times.iter().rev().take_while(|t| t.tiled <= t.fused) {
        from = time.m;
    }
    from
}

/// Packed bytes of a weight below which nothing is measured: its product takes
/// some tens of microseconds on either path, little more than a region costs.
pub(super) const MEASURED_BYTES: usize = 512 << 10;

/// Bytes of a weight that one measurement multiplies: enough to share among
/// threads, and some 0.1 ms of reading.
const WINDOW_BYTES: usize = 1 << 20;

/// Windows that measurements take turns on: together more than the L2 cache of
/// any machine holds, as the weights of a model are.
const WINDOWS: usize = 24;

/// Rounds of a measurement: the best of these counts.
const ROUNDS: usize = 5;

/// Whether [`measure`] has something to find out about weights of a layout.
pub fn is_worth_measuring(isa: Isa, precision: ActPrecision, layout: &PackedLayout) -> bool {
    let large = layout.bytes() >= MEASURED_BYTES && layout.rows() >= PANEL_ROWS;
    large && isa.is_available() && default_crossover(isa, layout.form(), precision).is_some()
}

/// Measures both paths for weights of one shape (the layers of a model), in
/// turns and window after window, so that weights come from where they come
/// from in a model.
///
/// `None` if there is nothing to find out (see [`is_worth_measuring`]), no weight,
/// or the deadline comes before the third round is done.
///
/// # Panics
///
/// If the weights have not all one layout.
pub fn measure(
    isa: Isa,
    pool: &Pool,
    precision: ActPrecision,
    weights: &[PackedRef<'_>],
    deadline: Instant,
) -> Option<Vec<PathTimes>> {
    let layout = *weights.first()?.layout();
    assert!(weights.iter().all(|w| *w.layout() == layout), "one layout");
    if !is_worth_measuring(isa, precision, &layout) {
        return None;
    }
    // Whole panels, the last (perhaps partial) one left out.
    let panels = (WINDOW_BYTES / layout.panel_bytes()).clamp(1, layout.rows() / PANEL_ROWS);
    let window = PackedLayout::of(layout.form(), panels * PANEL_ROWS, layout.columns()).ok()?;
    let places = layout.rows() / PANEL_ROWS / panels;
    let windows: Vec<PackedRef<'_>> = (0..places)
        .flat_map(|place| weights.iter().map(move |weight| (weight, place)))
        .take(WINDOWS)
        .filter_map(|(weight, place)| {
            let bytes = &weight.bytes()[place * window.bytes()..][..window.bytes()];
            PackedRef::new(window, bytes).ok()
        })
        .collect();
    let most = MEASURED_TOKENS[MEASURED_TOKENS.len() - 1];
    let x: Vec<f32> = (0..most * layout.columns())
        .map(|i| (i * 37 % 251) as f32 / 125.0 - 1.0)
        .collect();
    let mut out = vec![0.0; most * window.rows()];
    let mut inputs =
        [usize::MAX, 1].map(|from| Prepared::with_crossovers(Crossovers::forced(from)));
    let mut next = 0;
    let mut time = |path: usize, inputs: &mut [Prepared; 2], m: usize| {
        let x = &x[..m * layout.columns()];
        let input = &mut inputs[path];
        let forms = [layout.form()];
        input
            .prepare_for(isa, pool, precision, forms, x, m, layout.columns())
            .ok()?;
        let product = Product {
            weight: windows[next % windows.len()],
            bias: None,
            out: &mut out[..m * window.rows()],
        };
        next += 1;
        let start = Instant::now();
        matmul(isa, pool, input, &mut [product]).ok()?;
        Some(start.elapsed())
    };
    // Brings the windows in from the file.
    for _ in 0..windows.len() {
        time(0, &mut inputs, 1)?;
        if Instant::now() >= deadline {
            return None;
        }
    }
    let mut times = MEASURED_TOKENS.map(|m| PathTimes {
        m,
        fused: Duration::MAX,
        tiled: Duration::MAX,
    });
    for round in 0..ROUNDS {
        for best in &mut times {
            let (fused, tiled) = (time(0, &mut inputs, best.m)?, time(1, &mut inputs, best.m)?);
            best.fused = best.fused.min(fused);
            best.tiled = best.tiled.min(tiled);
            if Instant::now() >= deadline {
                return (round >= 2).then(|| times.to_vec());
            }
        }
    }
    Some(times.to_vec())
}

/// Whether a form of the input is made of blocks, which the tile unit takes.
pub(super) fn on_units(isa: Isa, need: Need) -> bool {
    isa == Isa::Amx && need == Need::Blocks
}
