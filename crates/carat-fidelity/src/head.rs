//! Every row of the vocabulary tables, and the head's product.
//!
//! Answers reach few of a vocabulary's rows. A head that is dead beyond some id, or
//! an embedding row that nobody asked for, passes every answer that does not need
//! it: so the rows are compared themselves.

use carat_bundle::source::{SourceError, TensorSource};
use carat_bundle::spec::ModelSpec;
use carat_engine::Engine;
use carat_model::ActPrecision;
use carat_tensor::{DType, formats};

use crate::transcript::{Check, ROWS};
use crate::verdict::Verdict;
use crate::{FidelityError, row};

/// Rows decoded at a time.
const BLOCK: usize = 512;

/// Least cosine of a row with what it was made from. A symmetric grid of `L` steps
/// to either side moves a weight by at most `absmax / (2L)`, so a group of `n` by
/// `e = √n / (2L)` of its length at most, which turns it by `asin e`: for 4 bits
/// (L = 7) in groups of 32 that is a cosine of 0.915. What has less has lost the row.
const MIN_COSINE: f64 = 0.9;

/// Most that a row's length may change, as a share: the same `e` for the same grid,
/// 0.404, rounded up.
const MAX_LENGTH_CHANGE: f64 = 0.42;

/// Tables that are indexed by token.
fn tables(spec: &ModelSpec) -> &'static [&'static str] {
    if spec.head.tied {
        &["embed.weight"]
    } else {
        &["head.weight", "embed.weight"]
    }
}

/// Decoded rows of a table, a block at a time.
struct Table<'t> {
    name: &'static str,
    dtype: DType,
    bytes: std::borrow::Cow<'t, [u8]>,
    row_bytes: usize,
    columns: usize,
    origin: &'t str,
}

impl<'t> Table<'t> {
    fn open(
        source: &'t dyn TensorSource,
        spec: &ModelSpec,
        name: &'static str,
    ) -> Result<Table<'t>, FidelityError> {
        let malformed = |problem: String| SourceError::Malformed {
            origin: source.origin().into(),
            name: name.into(),
            problem,
        };
        let info = source.info(name).ok_or_else(|| SourceError::Missing {
            origin: source.origin().into(),
            name: name.into(),
        })?;
        let columns = spec.hidden_size;
        let expected = [spec.vocab_size, columns];
        if info.shape.dims() != expected {
            let problem = format!("shape {}, expected {expected:?}", info.shape);
            return Err(malformed(problem).into());
        }
        let row_bytes = info.dtype.row_bytes(columns);
        let row_bytes =
            row_bytes.ok_or_else(|| malformed("its rows are not whole blocks".into()))?;
        let bytes = source.read(name)?;
        if bytes.len() != row_bytes * spec.vocab_size {
            return Err(malformed(format!("{} bytes", bytes.len())).into());
        }
        Ok(Table {
            name,
            dtype: info.dtype,
            bytes,
            row_bytes,
            columns,
            origin: source.origin(),
        })
    }

    fn rows(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// Rows `first ..` of at most [`BLOCK`], `[rows, columns]`.
    fn block(&self, first: usize) -> Result<Vec<f32>, FidelityError> {
        let rows = BLOCK.min(self.rows() - first);
        let bytes = &self.bytes[first * self.row_bytes..][..rows * self.row_bytes];
        let mut out = vec![0.0; rows * self.columns];
        formats::decode(self.dtype, bytes, &mut out).map_err(|e| SourceError::Malformed {
            origin: self.origin.into(),
            name: self.name.into(),
            problem: e.to_string(),
        })?;
        Ok(out)
    }
}

/// How the worst row of a table compares.
#[derive(Clone, Copy)]
struct Worst {
    row: usize,
    cosine: f64,
    length_change: f64,
}

impl Worst {
    const NONE: Worst = Worst {
        row: 0,
        cosine: 1.0,
        length_change: 0.0,
    };

    /// Takes another row in, if it is worse.
    fn see(&mut self, at: usize, expected: &[f32], found: &[f32]) {
        let (old, new) = (row::norm(expected), row::norm(found));
        // A row of zeros that stays one is as it was.
        let (cosine, length_change) = match old == 0.0 && new == 0.0 {
            true => (1.0, 0.0),
            false => (row::cosine(expected, found), (new - old).abs() / old),
        };
        let new = Worst {
            row: at,
            cosine,
            length_change,
        };
        // What is not a number is worse than anything.
        let worse = match (new.holds(), self.holds()) {
            (false, true) => true,
            (true, false) => false,
            _ => cosine.is_nan() || cosine < self.cosine,
        };
        if worse {
            *self = new;
        }
    }

    fn holds(&self) -> bool {
        self.cosine >= MIN_COSINE && self.length_change <= MAX_LENGTH_CHANGE
    }
}

/// Compares every row of head and embedding with the reference's.
pub(crate) fn rows(
    expected: (&ModelSpec, &dyn TensorSource),
    found: (&ModelSpec, &dyn TensorSource),
) -> Result<Check, FidelityError> {
    let vocab = found.0.vocab_size;
    let (mut parts, mut bad, mut least) = (Vec::new(), 0usize, 1f64);
    let names = tables(expected.0).iter().zip(tables(found.0));
    for (&old, &new) in names {
        let (a, b) = (
            Table::open(expected.1, expected.0, old)?,
            Table::open(found.1, found.0, new)?,
        );
        let (mut worst, mut lost) = (Worst::NONE, 0usize);
        for first in (0..vocab).step_by(BLOCK) {
            let (a_rows, b_rows) = (a.block(first)?, b.block(first)?);
            let pairs = a_rows
                .chunks_exact(a.columns)
                .zip(b_rows.chunks_exact(b.columns));
            for (i, (a, b)) in pairs.enumerate() {
                let mut one = Worst::NONE;
                one.see(first + i, a, b);
                lost += usize::from(!one.holds());
                worst.see(first + i, a, b);
            }
        }
        bad += lost;
        least = least.min(if worst.cosine.is_nan() {
            -1.0
        } else {
            worst.cosine
        });
        let Worst {
            row,
            cosine,
            length_change,
        } = worst;
        parts.push(format!(
            "{new}: {lost} of {vocab} rows lost, worst row {row} (cosine {cosine:.5}, length {:+.1} %)",
            100.0 * length_change
        ));
    }
    let check = Check::holds(ROWS, bad == 0, parts.join("; "));
    Ok(check
        .value("rows_lost", bad as f64)
        .value("cosine_min", least))
}

/// What [`rows`] says of a head one of whose rows is zero.
pub(crate) fn poisoned(
    spec: &ModelSpec,
    tensors: &dyn TensorSource,
) -> Result<Verdict, FidelityError> {
    let table = Table::open(tensors, spec, tables(spec)[0])?;
    let rows = table.block(spec.vocab_size.saturating_sub(BLOCK))?;
    // The last row that is not zero anyway, as padding may be.
    let Some(row) = rows
        .chunks_exact(table.columns)
        .rfind(|row| row.iter().any(|v| *v != 0.0))
    else {
        return Ok(Verdict::Fail);
    };
    let mut worst = Worst::NONE;
    worst.see(0, row, &vec![0.0; row.len()]);
    Ok(if worst.holds() {
        Verdict::Pass
    } else {
        Verdict::Fail
    })
}

/// Hidden states that the head is tried on.
const PROBES: usize = 2;

/// The engine's head on random hidden states, over the whole vocabulary, against
/// the product of the same weights in f64.
///
/// The bound of a logit is what rounding its activations and sums may do: int8 moves
/// an activation by `absmax / 254` of its group, bf16 by `2^-9` of itself, and a sum
/// of k products in fp32 by `k 2^-24` of their absolute sum.
pub(crate) fn logits(
    engine: &mut Engine,
    spec: &ModelSpec,
    tensors: &dyn TensorSource,
    precision: ActPrecision,
) -> Result<Check, FidelityError> {
    const NAME: &str = "head_logits";
    let table = Table::open(tensors, spec, tables(spec)[0])?;
    let k = table.columns;
    let hidden = random(PROBES * k);
    let found = engine.head(&hidden)?;
    let states: Vec<Vec<f64>> = hidden
        .chunks_exact(k)
        .map(|h| h.iter().map(|&v| f64::from(v)).collect())
        .collect();
    let moved: Vec<Vec<f64>> = states
        .iter()
        .map(|h| moved_by(precision, table.dtype, h))
        .collect();
    let sums = k as f64 * 2f64.powi(-24);
    let scale = f64::from(spec.head.scale);
    let (mut worst, mut at, mut beyond) = (0f64, 0usize, 0usize);
    for first in (0..spec.vocab_size).step_by(BLOCK) {
        for (i, weights) in table.block(first)?.chunks_exact(k).enumerate() {
            for (p, (state, moved)) in states.iter().zip(&moved).enumerate() {
                let (mut product, mut size, mut bound) = (0f64, 0f64, 0f64);
                for ((&w, x), m) in weights.iter().zip(state).zip(moved) {
                    let w = f64::from(w);
                    product += w * x;
                    size += (w * x).abs();
                    bound += w.abs() * m;
                }
                let mut expected = product * scale;
                if let Some(cap) = spec.head.softcap.map(f64::from) {
                    // Its slope is 1 at most: the bound stays one.
                    expected = cap * (expected / cap).tanh();
                }
                // The rest is for the factor and the cap, some ulps of the result.
                let slack = 8.0 * 2f64.powi(-24) * (expected.abs() + size * scale.abs());
                let bound = (bound + sums * size) * scale.abs() + slack;
                let logit = f64::from(found[p * spec.vocab_size + first + i]);
                let share = (logit - expected).abs() / bound.max(f64::MIN_POSITIVE);
                beyond += usize::from(share.is_nan() || share > 1.0);
                if share.is_nan() || share > worst {
                    (worst, at) = (share, first + i);
                }
            }
        }
    }
    let detail = format!(
        "{PROBES} states, {} logits: {beyond} beyond the bound of rounding, the largest error is {worst:.3} of it (id {at})",
        spec.vocab_size
    );
    let check = Check::holds(NAME, beyond == 0, detail);
    Ok(check.value("share_of_bound", worst))
}

/// How far each activation may be moved by rounding.
fn moved_by(precision: ActPrecision, weights: DType, h: &[f64]) -> Vec<f64> {
    match precision {
        ActPrecision::Bf16 => h.iter().map(|x| x.abs() * 2f64.powi(-9)).collect(),
        // Weights in floats take fp32 activations.
        ActPrecision::Int8 if !weights.is_float() => {
            let group = match weights {
                DType::TQ1_0 | DType::TQ2_0 => 256,
                _ => 32,
            };
            let absmax = |g: &[f64]| g.iter().fold(0f64, |m, x| m.max(x.abs()));
            h.chunks(group)
                .flat_map(|g| vec![absmax(g) / 254.0 * (1.0 + 1e-5); g.len()])
                .collect()
        }
        _ => vec![0.0; h.len()],
    }
}

/// Values of a bell shape (sums of four uniform ones), the same on every machine.
fn random(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut uniform = move || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let four = |_| uniform() + uniform() + uniform() + uniform();
    (0..n).map(four).map(|v| v * 1.732).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_lost_when_it_is_zero_turned_shrunk_or_no_number() {
        let row = [1.0f32, -2.0, 0.5, 3.0];
        let holds = |found: &[f32]| {
            let mut worst = Worst::NONE;
            worst.see(0, &row, found);
            worst.holds()
        };
        assert!(holds(&row));
        assert!(holds(&[1.0, -2.0, 0.4, 3.1]));
        assert!(!holds(&[0.0; 4]));
        assert!(!holds(&[3.0, -2.0, 0.5, 1.0]));
        assert!(!holds(&row.map(|v| v * 0.5)));
        assert!(!holds(&[f32::NAN, -2.0, 0.5, 3.0]));
        let mut worst = Worst::NONE;
        worst.see(0, &row, &row.map(|v| v * 0.5));
        worst.see(1, &row, &[1.0, -2.0, 0.4, 3.1]);
        assert_eq!(
            (worst.row, worst.holds()),
            (0, false),
            "a lost row stays the worst"
        );
        let mut zeros = Worst::NONE;
        zeros.see(0, &[0.0; 4], &[0.0; 4]);
        assert!(zeros.holds(), "zeros that stay are no loss");
        zeros.see(1, &[0.0; 4], &row);
        assert!(!zeros.holds(), "something from nothing is");
    }
}
