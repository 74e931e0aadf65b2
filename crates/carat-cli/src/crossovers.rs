//! Where a model's products change kernels on this machine: measured once, kept
//! in the cache.

use std::time::Duration;

use carat_bundle::cache::{Cache, CacheKey};
use carat_kernels::{Crossovers, WeightShape};
use carat_model::cpu::CpuBackend;

use crate::output;

/// What the first start of a model on a machine may take longer.
const BUDGET: Duration = Duration::from_millis(500);

/// Where a table is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Of the cache.
    Kept,
    /// Measured just now.
    Measured,
}

/// Crossovers of the shapes that are worth measuring.
pub(crate) struct Table {
    /// From how many tokens on a shape goes through tiles; `None` where the time
    /// did not suffice, and the kernel's constant stands.
    pub(crate) shapes: Vec<(WeightShape, Option<usize>)>,
    pub(crate) origin: Origin,
}

impl Table {
    pub(crate) fn crossovers(&self) -> Crossovers {
        let mut crossovers = Crossovers::default();
        for &(shape, from) in &self.shapes {
            if let Some(from) = from {
                crossovers.set(shape, from);
            }
        }
        crossovers
    }

    /// One line a shape, as it is kept.
    fn to_note(&self) -> String {
        let line = |(shape, from): &(WeightShape, Option<usize>)| {
            let from = from.map_or("-".to_owned(), |n| n.to_string());
            format!("{} {from}\n", name(shape))
        };
        self.shapes.iter().map(line).collect()
    }

    /// What was kept for these shapes; `None` if it is anything else.
    fn of_note(note: &[u8], shapes: &[WeightShape]) -> Option<Table> {
        let mut lines = std::str::from_utf8(note).ok()?.lines();
        let kept = |shape: &WeightShape| {
            let from = lines
                .next()?
                .strip_prefix(&name(shape))?
                .strip_prefix(' ')?;
            let from = match from {
                "-" => None,
                from => Some(from.parse().ok()?),
            };
            Some((*shape, from))
        };
        let shapes = shapes.iter().map(kept).collect::<Option<Vec<_>>>()?;
        lines.next().is_none().then_some(Table {
            shapes,
            origin: Origin::Kept,
        })
    }
}

/// A shape in a line: format, rows, columns.
pub(crate) fn name(shape: &WeightShape) -> String {
    format!("{} {} x {}", shape.form, shape.rows, shape.columns)
}

/// The table of a backend's products: from the cache, or measured now and kept.
/// Without a cache, or with a full one, it is measured each time.
pub(crate) fn table(backend: &CpuBackend) -> Table {
    let shapes = backend.measurable_shapes();
    if shapes.is_empty() {
        return Table {
            shapes: Vec::new(),
            origin: Origin::Kept,
        };
    }
    let options = backend.options();
    let names: Vec<String> = shapes.iter().map(name).collect();
    // All that a crossover depends on; the cache adds the program's version.
    let key = CacheKey::new(
        &carat_bench::Machine::observe().fingerprint(),
        &format!(
            "crossovers of {}, {} threads, {:?}: {}",
            options.isa,
            options.threads,
            options.precision,
            names.join(", ")
        ),
    );
    let cache = Cache::open_default().ok();
    let note = cache.as_ref().and_then(|cache| cache.note(&key));
    if let Some(table) = note.and_then(|note| Table::of_note(&note, &shapes)) {
        return table;
    }
    let found = backend.measure_crossovers(BUDGET);
    let from = |shape: WeightShape| {
        let known = found.iter().find(|(of, _)| *of == shape);
        (shape, known.map(|&(_, from)| from))
    };
    let table = Table {
        shapes: shapes.into_iter().map(from).collect(),
        origin: Origin::Measured,
    };
    if let Some(Err(error)) = cache.map(|c| c.keep_note(&key, table.to_note().as_bytes())) {
        output::note(&format!(
            "note: what was measured of this machine cannot be kept: {error}"
        ));
    }
    table
}

#[cfg(test)]
mod tests {
    use carat_tensor::DType;

    use super::*;

    #[test]
    fn a_note_is_read_for_its_shapes_only() {
        let shape = |rows| WeightShape {
            form: DType::TQ2_0.into(),
            rows,
            columns: 256,
        };
        let shapes = [shape(16), shape(160)];
        let table = Table {
            shapes: vec![(shapes[0], Some(5)), (shapes[1], None)],
            origin: Origin::Measured,
        };
        let note = table.to_note();
        let read = |note: &str, shapes: &[WeightShape]| {
            Table::of_note(note.as_bytes(), shapes).map(|t| t.shapes)
        };
        assert_eq!(read(&note, &shapes), Some(table.shapes));
        assert_eq!(read(&note, &shapes[..1]), None);
        assert_eq!(read(&note, &[shapes[1], shapes[0]]), None);
        assert_eq!(read(&note.replace('5', "-5"), &shapes), None);
        assert_eq!(read(&format!("{note}more"), &shapes), None);
        assert_eq!(read("", &shapes), None);
        assert_eq!(Table::of_note(&[0xff], &shapes).map(|t| t.shapes), None);
    }
}
