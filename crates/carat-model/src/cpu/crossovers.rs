//! Where products of a plan change from few-token to many-token kernels.

use std::time::{Duration, Instant};

use carat_kernels::{Crossovers, Prepared, WeightShape, crossover, is_worth_measuring, measure};
use carat_tensor::packed::{PackedLayout, PackedRef};

use super::{CpuBackend, Weight};
use crate::Op;

impl CpuBackend {
    /// Shapes of the plan's matrix products that are worth measuring, each once,
    /// in order of first use.
    pub fn measurable_shapes(&self) -> Vec<WeightShape> {
        let mut shapes = Vec::new();
        for (layout, _) in self.products() {
            let shape = layout.into();
            let options = self.options;
            if is_worth_measuring(options.isa, options.precision, layout)
                && !shapes.contains(&shape)
            {
                shapes.push(shape);
            }
        }
        shapes
    }

    /// Each product's layout, and the weight's name.
    fn products(&self) -> impl Iterator<Item = (&PackedLayout, &str)> {
        let projections = self.plan.ops.iter().flat_map(|op| match op {
            Op::Linear { projections, .. } => projections.as_slice(),
            _ => &[],
        });
        projections.filter_map(|p| match &self.weights[p.weight.0] {
            Weight::Matrix(layout) => Some((layout, self.plan.weights[p.weight.0].as_str())),
            Weight::Vector(_) => None,
        })
    }

    /// Measures, within about `budget`, from how many tokens on the products of
    /// each [measurable](Self::measurable_shapes) shape are faster as tiles. A
    /// shape for which the time did not suffice is left out, and keeps the
    /// constant of its kernel. Whatever the answer, results are the same.
    pub fn measure_crossovers(&self, budget: Duration) -> Vec<(WeightShape, usize)> {
        let (start, shapes) = (Instant::now(), self.measurable_shapes());
        let mut found = Vec::new();
        for (i, &shape) in shapes.iter().enumerate() {
            let weights: Vec<PackedRef<'_>> = self
                .products()
                .filter(|&(layout, _)| WeightShape::from(layout) == shape)
                .filter_map(|(_, name)| self.store.matrix(name))
                .collect();
            // What one shape leaves over goes to those after it.
            let deadline = start + budget * (i as u32 + 1) / shapes.len() as u32;
            let options = self.options;
            let times = measure(
                options.isa,
                &self.pool,
                options.precision,
                &weights,
                deadline,
            );
            found.extend(times.map(|times| (shape, crossover(&times))));
        }
        found
    }

    /// From now on products change kernels where this table says.
    pub fn set_crossovers(&mut self, crossovers: Crossovers) {
        self.prepared = Prepared::with_crossovers(crossovers);
    }

    /// Where products change kernels.
    pub fn crossovers(&self) -> &Crossovers {
        self.prepared.crossovers()
    }
}
