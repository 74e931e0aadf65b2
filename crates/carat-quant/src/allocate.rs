//! How many bits each matrix gets, under a budget of bytes.
//!
//! What a matrix costs at a width is measured with the others intact (a scan); the sum
//! of these costs is what is made small. That errors add up is an assumption, which
//! holds the better the smaller they are: the recipe that comes out is simulated, not
//! believed.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use carat_bundle::spec::ModelSpec;

use crate::{QuantError, Recipe, Treatment};

/// A way to store one matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priced {
    /// Bits of a code.
    pub bits: u8,
    /// Bytes of all of it.
    pub bytes: u64,
    /// What it does to the model, such as a divergence in nats.
    pub cost: f64,
}

/// A budget below the least that the options take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the smallest options take {least} bytes, the budget is {budget}")]
pub struct TooSmall {
    /// Bytes of the smallest options.
    pub least: u64,
    /// The budget.
    pub budget: u64,
}

/// Chooses one option for each matrix so that the sum of costs is small and that of
/// bytes at most `budget`; indices into each list.
///
/// Starts with the smallest options and buys the step that saves most cost for its
/// bytes, along the lower convex hull of each matrix, as long as one fits. That is the
/// optimum for every budget at which a step ends exactly, and otherwise within the
/// saving of one step of it. Equal steps go in the order of the lists.
///
/// # Errors
/// Where not even the smallest options fit.
///
/// # Panics
/// If a matrix has no option.
pub fn allocate(matrices: &[Vec<Priced>], budget: u64) -> Result<Vec<usize>, TooSmall> {
    let hulls: Vec<Vec<usize>> = matrices.iter().map(|options| hull(options)).collect();
    let mut at = vec![0usize; hulls.len()];
    let bytes = |m: usize, step: usize| matrices[m][hulls[m][step]].bytes;
    let cost = |m: usize, step: usize| matrices[m][hulls[m][step]].cost;
    let least = (0..hulls.len()).map(|m| bytes(m, 0)).sum::<u64>();
    let mut left = budget
        .checked_sub(least)
        .ok_or(TooSmall { least, budget })?;
    loop {
        let mut best: Option<(f64, usize, u64)> = None;
        for m in (0..hulls.len()).filter(|&m| at[m] + 1 < hulls[m].len()) {
            let more = bytes(m, at[m] + 1) - bytes(m, at[m]);
            let saving = (cost(m, at[m]) - cost(m, at[m] + 1)) / more as f64;
            if more <= left && best.is_none_or(|(most, ..)| saving > most) {
                best = Some((saving, m, more));
            }
        }
        let Some((_, m, more)) = best else {
            break;
        };
        at[m] += 1;
        left -= more;
    }
    Ok(at.iter().zip(&hulls).map(|(&i, hull)| hull[i]).collect())
}

/// The options on the lower convex hull of cost over bytes, the smallest first: each
/// costs less than the one before and saves less for its bytes.
fn hull(options: &[Priced]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..options.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (options[a], options[b]);
        a.bytes.cmp(&b.bytes).then(a.cost.total_cmp(&b.cost))
    });
    let mut out: Vec<usize> = Vec::new();
    let slope = |a: usize, b: usize| {
        let (a, b) = (options[a], options[b]);
        (a.cost - b.cost) / (b.bytes - a.bytes) as f64
    };
    for i in order {
        let last = out.last().map(|&l| options[l]);
        if last.is_some_and(|l| options[i].bytes == l.bytes || options[i].cost >= l.cost) {
            continue;
        }
        while let [.., a, b] = out[..]
            && slope(a, b) <= slope(b, i)
        {
            out.pop();
        }
        out.push(i);
    }
    assert!(!out.is_empty(), "a matrix has options");
    out
}

/// Formats that differ in their width only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Palettes for 8 rows: 2, 3, 4, 6 or 8 bits.
    Palette,
    /// Integers in blocks of 32: 4 or 8 bits.
    Linear,
}

impl Family {
    /// All of them.
    pub const ALL: [Family; 2] = [Family::Palette, Family::Linear];

    /// The name in commands.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Palette => "palette",
            Family::Linear => "linear",
        }
    }

    /// The widths there are.
    pub const fn widths(self) -> &'static [u8] {
        match self {
            Family::Palette => &[2, 3, 4, 6, 8],
            Family::Linear => &[4, 8],
        }
    }

    /// The recipe's section.
    const fn section(self) -> &'static str {
        match self {
            Family::Palette => "kmeans_palettization_config",
            Family::Linear => "quantization_config",
        }
    }

    /// The settings of a module, as a YAML flow.
    fn module(self, bits: u8) -> String {
        let weight = match (self, bits) {
            (Family::Palette, bits) => format!(
                "{{n_bits: {bits}, granularity: {{type: per_grouped_channel, axis: 0, group_size: 8}}}}"
            ),
            (Family::Linear, bits) => {
                let scheme = match bits {
                    4 => "q4_0",
                    _ => "symmetric_with_clipping",
                };
                format!(
                    "{{dtype: int{bits}, qscheme: {scheme}, granularity: {{type: per_block, axis: 1, block_size: 32}}}}"
                )
            }
        };
        let activations = match self {
            Family::Palette => "",
            Family::Linear => ", op_input_spec: null, op_output_spec: null",
        };
        format!("{{op_state_spec: {{weight: {weight}}}{activations}}}")
    }

    /// A recipe with one width for all matrices.
    pub fn uniform(self, bits: u8) -> String {
        format!(
            "{}:\n  global_config: {}\n",
            self.section(),
            self.module(bits)
        )
    }

    /// Bytes of each matrix of a model at one width, codes and tables and scales, by names
    /// such as `layers.3.attn.q`.
    ///
    /// # Errors
    /// Where a matrix does not fit the family.
    pub fn sizes(self, bits: u8, spec: &ModelSpec) -> Result<BTreeMap<String, u64>, QuantError> {
        let plan = Recipe::parse(self.name(), &self.uniform(bits))?.resolve(spec)?;
        let mut out = BTreeMap::new();
        for t in plan.tensors {
            let (Treatment::Quantize(method), [rows, columns]) = (t.treatment, t.decl.shape.dims())
            else {
                continue;
            };
            let parts = method.grid().parts(*rows, *columns);
            let parts = parts.map_err(|e| QuantError::Tensor {
                name: self.name().into(),
                tensor: t.decl.name.clone(),
                problem: e.to_string(),
            })?;
            let bytes = parts.codes + parts.scales + parts.zero_points + parts.tables;
            let name = t.decl.name.strip_suffix(".weight");
            out.insert(name.unwrap_or(&t.decl.name).to_owned(), bytes as u64);
        }
        Ok(out)
    }

    /// A recipe with a width for each matrix, by names such as `layers.3.attn.q`.
    /// `description` is one line of plain words.
    pub fn mixed(self, description: &str, widths: &[(String, u8)]) -> String {
        // By width and module, the layers.
        let mut rules: BTreeMap<(u8, &str), Vec<&str>> = BTreeMap::new();
        let mut counts: BTreeMap<u8, usize> = BTreeMap::new();
        for (name, bits) in widths {
            *counts.entry(*bits).or_default() += 1;
            let part = name.strip_prefix("layers.").and_then(|n| n.split_once('.'));
            let (layer, module) = part.unwrap_or(("", name));
            rules.entry((*bits, module)).or_default().push(layer);
        }
        let common = counts.iter().max_by_key(|(_, n)| **n);
        let common = common.map_or(self.widths()[0], |(bits, _)| *bits);
        let mut text = format!(
            "carat:\n  description: {description:?}\n{}:\n  global_config: {}\n",
            self.section(),
            self.module(common)
        );
        rules.retain(|(bits, _), _| *bits != common);
        if !rules.is_empty() {
            text.push_str("  module_name_configs:\n");
        }
        for ((bits, module), layers) in rules {
            let module = regex::escape(module);
            let name = match layers[..] {
                [""] => module,
                [layer] => format!(r"layers\.{layer}\.{module}"),
                _ => format!(r"layers\.({})\.{module}", layers.join("|")),
            };
            let _ = writeln!(text, "    '{name}': {}", self.module(bits));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn priced(options: &[(u64, f64)]) -> Vec<Priced> {
        options
            .iter()
            .map(|&(bytes, cost)| Priced {
                bits: 0,
                bytes,
                cost,
            })
            .collect()
    }

    fn sums(matrices: &[Vec<Priced>], chosen: &[usize]) -> (u64, f64) {
        let pairs = matrices.iter().zip(chosen).map(|(m, &i)| m[i]);
        pairs.fold((0, 0.0), |(b, c), p| (b + p.bytes, c + p.cost))
    }

    /// The least cost within a budget, by trying everything.
    fn least(matrices: &[Vec<Priced>], budget: u64) -> f64 {
        match matrices.split_first() {
            None => 0.0,
            Some((first, rest)) => first
                .iter()
                .filter(|p| p.bytes <= budget)
                .map(|p| p.cost + least(rest, budget - p.bytes))
                .fold(f64::INFINITY, f64::min),
        }
    }

    #[test]
    fn it_is_the_optimum_but_for_one_step() {
        let mut state = 7u64;
        let mut next = |n: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for _ in 0..200 {
            let matrices: Vec<Vec<Priced>> = (0..4)
                .map(|_| {
                    let one = |i: u64| (10 * (i + 1) + next(8), next(1000) as f64 / (i + 1) as f64);
                    priced(&(0..4).map(one).collect::<Vec<_>>())
                })
                .collect();
            let most_saving = matrices
                .iter()
                .flatten()
                .map(|p| p.cost)
                .fold(0.0, f64::max);
            for budget in (20..200).step_by(7) {
                let Ok(chosen) = allocate(&matrices, budget) else {
                    assert!(least(&matrices, budget).is_infinite());
                    continue;
                };
                let (bytes, cost) = sums(&matrices, &chosen);
                assert!(bytes <= budget);
                let best = least(&matrices, budget);
                assert!(cost <= best + most_saving, "{cost} {best}");
            }
            // With room for everything each matrix has its best option.
            let all = allocate(&matrices, u64::MAX).unwrap();
            for (matrix, &i) in matrices.iter().zip(&all) {
                assert!(matrix.iter().all(|p| matrix[i].cost <= p.cost));
            }
        }
    }

    #[test]
    fn bytes_go_where_they_save_most() {
        let sensitive = priced(&[(10, 8.0), (20, 1.0)]);
        let dull = priced(&[(10, 0.2), (20, 0.1)]);
        let matrices = [dull, sensitive];
        assert_eq!(allocate(&matrices, 30).unwrap(), [0, 1]);
        assert_eq!(allocate(&matrices, 40).unwrap(), [1, 1]);
        let error = allocate(&matrices, 19).unwrap_err();
        assert_eq!((error.least, error.budget), (20, 19));
        // What costs more for more bytes is never bought, nor what a mixture beats.
        let odd = priced(&[(10, 2.0), (12, 3.0), (14, 1.9), (16, 0.5)]);
        assert_eq!(hull(&odd), [0, 3]);
    }

    #[test]
    fn recipes_say_what_was_chosen() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/wren-dense");
        let spec = carat_import::open(&path).unwrap().spec;
        let matrices = spec.tensors().into_iter().map(|t| t.name);
        let matrices: Vec<String> = matrices
            .filter(|name| !name.contains("norm"))
            .filter_map(|name| Some(name.strip_suffix(".weight")?.to_owned()))
            .collect();
        for family in Family::ALL {
            let choices = family.widths();
            let widths: Vec<(String, u8)> = matrices
                .iter()
                .enumerate()
                .map(|(i, name)| (name.clone(), choices[i * i % 7 % choices.len()]))
                .collect();
            let text = family.mixed("what a scan found: \"less\"", &widths);
            let recipe = crate::Recipe::parse("mixed", &text);
            let recipe = recipe.unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!(recipe.description(), Some("what a scan found: \"less\""));
            let plan = recipe.resolve(&spec).unwrap();
            assert!(plan.unmatched.is_empty(), "{:?}", plan.unmatched);
            for (name, bits) in &widths {
                let name = format!("{name}.weight");
                let planned = plan.tensors.iter().find(|t| t.decl.name == name).unwrap();
                let crate::Treatment::Quantize(method) = planned.treatment else {
                    panic!("{name}: {}", planned.treatment);
                };
                assert_eq!(method.grid().code.bits(), usize::from(*bits), "{name}");
            }
            for bits in choices {
                crate::Recipe::parse("uniform", &family.uniform(*bits)).unwrap();
            }
        }
    }
}
