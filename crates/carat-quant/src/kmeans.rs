//! Palettes: the best `2^bits` values for a group of weights.
//!
//! One-dimensional clustering has an optimal solution: clusters are intervals of
//! the sorted values, and a dynamic programme over their ends finds those of the
//! least squared error. With `E[m][i]` the least error of the first `i + 1` values
//! in `m + 1` clusters,
//!
//! ```text
//! E[m][i] = min over j of  E[m-1][j-1] + cost(j..=i)
//! ```
//!
//! where the best `j` never decreases as `i` grows, so that each `m` takes
//! `n log n` steps (Grønlund et al., 2017, arXiv:1701.07204). Nothing is drawn at
//! random and nothing depends on threads.
//!
//! The weights of a group are rounded to fp16 and, unless told otherwise, to a
//! number of decimals, as the reference does, and equal ones are merged.

use half::f16;

/// Optimal clusters of sorted values: their means, and where each ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Clusters {
    /// Mean of each cluster, ascending.
    pub centroids: Vec<f64>,
    /// First value after each cluster.
    pub ends: Vec<usize>,
}

/// Prefix sums that give the squared error of an interval around its mean.
struct Costs {
    weights: Vec<f64>,
    sums: Vec<f64>,
    squares: Vec<f64>,
}

impl Costs {
    fn new(values: &[f64], weights: &[f64]) -> Costs {
        let mut costs = Costs {
            weights: vec![0.0],
            sums: vec![0.0],
            squares: vec![0.0],
        };
        let (mut w, mut s, mut q) = (0.0, 0.0, 0.0);
        for (&x, &weight) in values.iter().zip(weights) {
            w += weight;
            s += weight * x;
            q += weight * x * x;
            costs.weights.push(w);
            costs.sums.push(s);
            costs.squares.push(q);
        }
        costs
    }

    /// Error of values `from..end`.
    fn of(&self, from: usize, end: usize) -> f64 {
        let weight = self.weights[end] - self.weights[from];
        if weight <= 0.0 {
            return 0.0;
        }
        let sum = self.sums[end] - self.sums[from];
        self.squares[end] - self.squares[from] - sum * sum / weight
    }
}

/// The best `k` clusters of ascending values with positive weights; fewer if there
/// are fewer values.
pub fn cluster(values: &[f64], weights: &[f64], k: usize) -> Clusters {
    let n = values.len();
    let k = k.min(n);
    if k == 0 {
        return Clusters {
            centroids: vec![],
            ends: vec![],
        };
    }
    let costs = Costs::new(values, weights);
    let mut errors: Vec<f64> = (0..n).map(|i| costs.of(0, i + 1)).collect();
    // starts[m - 1][i]: where the last of m + 1 clusters of 0..=i begins.
    let mut starts = vec![vec![0u32; n]; k - 1];
    let mut next = vec![0.0; n];
    for (m, starts) in starts.iter_mut().enumerate() {
        let layer = Layer {
            costs: &costs,
            errors: &errors,
            clusters: m + 2,
        };
        // Fewer values than clusters have no error; their entries are not read.
        next[..=m].fill(0.0);
        layer.fill(m + 1, n, m + 1, n, &mut next, starts);
        std::mem::swap(&mut errors, &mut next);
    }
    let mut ends = vec![n];
    for starts in starts.iter().rev() {
        let end = ends[ends.len() - 1];
        ends.push(starts[end - 1] as usize);
    }
    ends.reverse();
    let mut from = 0;
    let centroids = ends
        .iter()
        .map(|&end| {
            let pairs = || values[from..end].iter().zip(&weights[from..end]);
            let weight: f64 = pairs().map(|(_, w)| w).sum();
            let sum: f64 = pairs().map(|(x, w)| x * w).sum();
            from = end;
            sum / weight
        })
        .collect();
    Clusters { centroids, ends }
}

/// One more cluster.
struct Layer<'a> {
    costs: &'a Costs,
    /// Least errors with one cluster fewer.
    errors: &'a [f64],
    clusters: usize,
}

impl Layer<'_> {
    /// Fills the entries `from..end`, whose last clusters start in `low..high`:
    /// the middle one first, which bounds the others.
    fn fill(
        &self,
        from: usize,
        end: usize,
        low: usize,
        high: usize,
        errors: &mut [f64],
        starts: &mut [u32],
    ) {
        if from >= end {
            return;
        }
        let i = from + (end - from) / 2;
        let first = low.max(self.clusters - 1);
        let mut best = (f64::INFINITY, first);
        for j in first..high.min(i + 1) {
            let error = self.errors[j - 1] + self.costs.of(j, i + 1);
            if error < best.0 {
                best = (error, j);
            }
        }
        errors[i] = best.0;
        starts[i] = best.1 as u32;
        self.fill(from, i, low, best.1 + 1, errors, starts);
        self.fill(i + 1, end, best.1, high, errors, starts);
    }
}

/// The palette of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct Palette {
    /// `2^bits` fp16 values; the last one fills up what is not used.
    pub table: Vec<f32>,
    /// An index for each weight.
    pub codes: Vec<u8>,
}

/// Clusters weights (finite, within fp16) into `2^bits` values.
///
/// `decimals` is how far weights are rounded before they are merged. Weights count
/// by their importance, if given.
pub fn palettize(
    weights: &[f32],
    importance: Option<&[f32]>,
    bits: u8,
    decimals: Option<u32>,
) -> Palette {
    // fp16 in numeric order: negatives are reversed and come first.
    let rank = |w: f32| {
        let bits = f16::from_f32(w).to_bits();
        usize::from(if bits & 0x8000 != 0 {
            !bits
        } else {
            bits | 0x8000
        })
    };
    let value = |rank: usize| {
        let bits = rank as u16;
        let half = f16::from_bits(if bits & 0x8000 == 0 {
            !bits
        } else {
            bits & 0x7fff
        })
        .to_f32();
        match decimals {
            Some(decimals) => {
                let scale = 10f32.powi(decimals as i32);
                (half * scale).round_ties_even() / scale
            }
            None => half,
        }
    };
    let mut mass = vec![0f64; 1 << 16];
    for (i, &w) in weights.iter().enumerate() {
        mass[rank(w)] += importance.map_or(1.0, |m| f64::from(m[i]));
    }
    let (mut values, mut counts) = (Vec::new(), Vec::<f64>::new());
    let mut merged = vec![0u32; 1 << 16];
    for (rank, &mass) in mass.iter().enumerate().filter(|(_, m)| **m > 0.0) {
        let value = f64::from(value(rank));
        if values.last() == Some(&value) {
            let last = counts.len() - 1;
            counts[last] += mass;
        } else {
            values.push(value);
            counts.push(mass);
        }
        merged[rank] = values.len() as u32 - 1;
    }
    let found = cluster(&values, &counts, 1 << bits);
    let mut of_value = vec![0u8; values.len()];
    let mut from = 0;
    for (index, &end) in found.ends.iter().enumerate() {
        of_value[from..end].fill(index as u8);
        from = end;
    }
    let mut table: Vec<f32> = found
        .centroids
        .iter()
        .map(|&c| f16::from_f64(c).to_f32())
        .collect();
    table.resize(1 << bits, table.last().copied().unwrap_or(0.0));
    let codes = weights
        .iter()
        .map(|&w| of_value.get(merged[rank(w)] as usize).copied().unwrap_or(0))
        .collect();
    Palette { table, codes }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Least error over all ways to cut the values.
    fn brute_force(values: &[f64], weights: &[f64], k: usize) -> f64 {
        let costs = Costs::new(values, weights);
        if k == 1 {
            return costs.of(0, values.len());
        }
        (k - 1..values.len())
            .map(|j| brute_force(&values[..j], &weights[..j], k - 1) + costs.of(j, values.len()))
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn clusters_are_optimal() {
        let mut state = 7u64;
        let mut random = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 40) as f64 / (1u64 << 24) as f64
        };
        for n in 1..12 {
            for k in 1..=n {
                let mut values: Vec<f64> = (0..n).map(|_| random() * random()).collect();
                values.sort_by(f64::total_cmp);
                let weights: Vec<f64> = (0..n).map(|_| 1.0 + (random() * 5.0).floor()).collect();
                let found = cluster(&values, &weights, k);
                assert_eq!(found.ends.len(), k);
                let costs = Costs::new(&values, &weights);
                let mut from = 0;
                let mut error = 0.0;
                for &end in &found.ends {
                    assert!(end > from);
                    error += costs.of(from, end);
                    from = end;
                }
                // A dozen sums of numbers below 5, each rounded once.
                assert!(
                    (error - brute_force(&values, &weights, k)).abs() < 1e-14,
                    "{n} {k}"
                );
            }
        }
    }

    #[test]
    fn few_values_are_exact_and_fill_the_table() {
        let p = palettize(&[0.5, -0.25, 0.5, 0.0, -0.0], None, 2, Some(4));
        assert_eq!(p.table, [-0.25, 0.0, 0.5, 0.5]);
        assert_eq!(p.codes, [2, 0, 2, 1, 1]);
    }

    #[test]
    fn importance_moves_the_centroids() {
        let w = [0.0, 0.1, 0.9, 1.0];
        let plain = palettize(&w, None, 1, Some(4));
        assert_eq!(plain.codes, [0, 0, 1, 1]);
        let weighted = palettize(&w, Some(&[1.0, 100.0, 100.0, 1.0]), 1, Some(4));
        assert!(weighted.table[0] > 0.09 && weighted.table[1] < 0.91);
    }
}
