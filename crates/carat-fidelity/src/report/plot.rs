//! Margins along an answer, as SVG.

use std::fmt::Write as _;

use super::{Fate, Report, fates};
use crate::fixture::Case;
use crate::transcript::CaseResult;

/// Height of the plot, in pixels, for margins from 0 to 1.
const HEIGHT: f64 = 90.0;
/// Room for the scale on the left.
const LEFT: f64 = 30.0;
/// Room above and below.
const PAD: f64 = 6.0;

/// One bar per step: as high as the reference is sure, coloured by what the candidate
/// said, with the floor as a line.
pub(super) fn margins(report: &Report<'_>, case: &Case, result: &CaseResult, floor: f64) -> String {
    let n = case.steps.len().max(1);
    let bar = (900.0 / n as f64).clamp(3.0, 18.0);
    let (width, bottom) = (LEFT + bar * n as f64 + PAD, PAD + HEIGHT);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {width:.0} {:.0}\" style=\"width:{width:.0}px\" role=\"img\" aria-label=\"margins of {}\">",
        bottom + PAD,
        super::html::escape(&case.name)
    );
    for (value, label) in [(0.0, "0"), (0.5, "0.5"), (1.0, "1")] {
        let y = bottom - value * HEIGHT;
        let _ = write!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{width:.0}\" y1=\"{y:.1}\" y2=\"{y:.1}\" class=\"grid\"/><text x=\"{}\" y=\"{:.1}\" class=\"scale\">{label}</text>",
            LEFT - 4.0,
            y + 3.5
        );
    }
    for (i, (step, fate)) in case
        .steps
        .iter()
        .zip(fates(case, result, floor))
        .enumerate()
    {
        let height = (step.margin * HEIGHT).max(1.5);
        let class = match fate {
            Fate::Agrees => "agrees",
            Fate::Unsure => "unsure",
            Fate::Tie => "tie",
            Fate::Flip => "flip",
        };
        let said = result.found.get(i).copied().flatten();
        let said = said.map_or("nothing finite".into(), |id| report.text(&[id]));
        let title = format!(
            "step {i}: {:?}, margin {:.4}; candidate {said:?}; then {:?}",
            report.text(&[step.id]),
            step.margin,
            report.text(&[step.second])
        );
        let _ = write!(
            svg,
            "<rect x=\"{:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{height:.2}\" class=\"{class}\"><title>{}</title></rect>",
            LEFT + bar * i as f64,
            bottom - height,
            bar - 1.0,
            super::html::escape(&title)
        );
    }
    let y = bottom - floor * HEIGHT;
    let _ = write!(
        svg,
        "<line x1=\"{LEFT}\" x2=\"{width:.0}\" y1=\"{y:.1}\" y2=\"{y:.1}\" class=\"floor\"/></svg>"
    );
    svg
}
