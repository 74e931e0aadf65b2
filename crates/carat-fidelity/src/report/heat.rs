//! What a scan found, as SVG: a panel for each width of codes.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::html::escape;
use crate::scan::{Line, Mode, Part, Scan, in_layer};

/// Size of a cell, in pixels.
const CELL: (f64, f64) = (46.0, 15.0);
/// Room on the left and above each panel.
const LEFT: f64 = 62.0;
const TOP: f64 = 58.0;
/// Room below, for the legend.
const BOTTOM: f64 = 44.0;

/// A column of a panel: its title, and the line of a row.
struct Column<'c> {
    title: &'c str,
    part: Part,
    mode: Mode,
    /// The unit in the layer of a row, or in the row of the whole model.
    unit: Box<dyn Fn(Option<usize>) -> Option<String> + 'c>,
}

/// Draws a scan.
pub(crate) fn heat_map(scan: &Scan) -> String {
    let matrices = || scan.lines.iter().filter(|l| l.part == Part::Matrix);
    let layers = matrices().filter_map(|l| in_layer(&l.unit)).map(|(i, _)| i);
    let layers = layers.max().map_or(0, |last| last + 1);
    let mut seen = BTreeSet::new();
    let modules: Vec<&str> = matrices()
        .filter_map(|l| in_layer(&l.unit))
        .map(|(_, module)| module)
        .filter(|module| seen.insert(*module))
        .collect();
    let measured = |part, mode| scan.lines.iter().any(|l| (l.part, l.mode) == (part, mode));
    let mut columns = columns(&modules);
    columns.retain(|c| measured(c.part, c.mode));
    // What is measured of all layers together, if anything is.
    let whole = [Part::Module, Part::Model];
    let all = usize::from(whole.into_iter().any(|part| measured(part, Mode::Alone)));
    let extra: Vec<&str> = matrices()
        .filter(|l| in_layer(&l.unit).is_none())
        .map(|l| l.unit.as_str())
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();

    let positive = scan.lines.iter().map(|l| l.harm.kl).filter(|kl| *kl > 0.0);
    let range = positive.fold((f64::INFINITY, 0f64), |(low, high), kl| {
        (low.min(kl), high.max(kl))
    });
    let rows = layers + all + extra.len();
    let panel = LEFT + CELL.0 * columns.len() as f64 + 12.0;
    let width = panel * scan.header.bits.len().max(1) as f64;
    let height = TOP + CELL.1 * rows as f64 + BOTTOM;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"system-ui, sans-serif\" font-size=\"10\">\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\
         <text x=\"8\" y=\"16\" font-size=\"13\">{}: {}, KL and clear flips over {} positions</text>",
        escape(&scan.header.model),
        escape(&scan.header.method),
        scan.header.positions
    );
    for (i, &bits) in scan.header.bits.iter().enumerate() {
        let x = panel * i as f64;
        text(&mut svg, (x + LEFT, 34.0), "start", &format!("{bits} bits"));
        for (j, column) in columns.iter().enumerate() {
            let x = x + LEFT + CELL.0 * (j as f64 + 0.5);
            text(&mut svg, (x, TOP - 6.0), "middle", column.title);
        }
        for row in 0..rows {
            let y = TOP + CELL.1 * row as f64;
            let (label, layer, matrix) = match row {
                row if row < layers => (format!("layer {row}"), Some(row), None),
                row if row < layers + all => ("all layers".into(), None, None),
                row => {
                    let name = extra[row - layers - all];
                    (name.into(), None, Some(name))
                }
            };
            text(&mut svg, (x + LEFT - 5.0, y + 11.0), "end", &label);
            for (j, column) in columns.iter().enumerate() {
                let line = match matrix {
                    // Beside the layers there is one cell.
                    Some(name) if j == 0 => scan.find(Part::Matrix, name, bits, Mode::Alone),
                    Some(_) => None,
                    None => (column.unit)(layer).and_then(|unit| {
                        let part = match (layer, column.part) {
                            (None, Part::Matrix) => Part::Module,
                            (None, _) => Part::Model,
                            (Some(_), part) => part,
                        };
                        scan.find(part, &unit, bits, column.mode)
                    }),
                };
                if let Some(line) = line {
                    cell(&mut svg, (x + LEFT + CELL.0 * j as f64, y), line, range);
                }
            }
        }
    }
    legend(&mut svg, height - 26.0, range);
    svg.push_str("</svg>\n");
    svg
}

/// Modules, the whole layer, and the model without the layer.
fn columns<'c>(modules: &[&'c str]) -> Vec<Column<'c>> {
    let mut out: Vec<Column<'c>> = Vec::new();
    for &module in modules {
        out.push(Column {
            title: module,
            part: Part::Matrix,
            mode: Mode::Alone,
            unit: Box::new(move |layer| {
                Some(layer.map_or(module.into(), |i| format!("layers.{i}.{module}")))
            }),
        });
    }
    let whole =
        |layer: Option<usize>| Some(layer.map_or("model".into(), |i| format!("layers.{i}")));
    out.push(Column {
        title: "layer",
        part: Part::Layer,
        mode: Mode::Alone,
        unit: Box::new(whole),
    });
    out.push(Column {
        title: "all but",
        part: Part::Layer,
        mode: Mode::AllBut,
        unit: Box::new(|layer| layer.map(|i| format!("layers.{i}"))),
    });
    out
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = escape(words);
    let _ = write!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"
    );
}

fn cell(svg: &mut String, (x, y): (f64, f64), line: &Line, range: (f64, f64)) {
    let share = share(line.harm.kl, range);
    let ink = if share > 0.6 { "#fff" } else { "#222" };
    let what = match line.mode {
        Mode::Alone => "alone",
        Mode::AllBut => "is spared",
    };
    let _ = write!(
        svg,
        "<g><title>{} {what}: KL {:.3e} (at most {:.2e}), {} clear flips</title>\
         <rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
        escape(&line.unit),
        line.harm.kl,
        line.harm.kl_max,
        line.harm.flips,
        CELL.0 - 1.0,
        CELL.1 - 1.0,
        colour(share)
    );
    if line.harm.flips > 0 {
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"{ink}\">{}</text>",
            x + CELL.0 / 2.0,
            y + 11.0,
            line.harm.flips
        );
    }
    svg.push_str("</g>");
}

/// Where a divergence lies between the least and the largest, by its logarithm.
fn share(kl: f64, (low, high): (f64, f64)) -> f64 {
    if kl <= low || high <= low {
        return 0.0;
    }
    ((kl / low).ln() / (high / low).ln()).min(1.0)
}

/// From nearly white over orange to dark red; the lightness falls all the way, so that
/// it reads without colours as well.
fn colour(share: f64) -> String {
    const STOPS: [[f64; 3]; 4] = [
        [255.0, 247.0, 236.0],
        [253.0, 187.0, 132.0],
        [215.0, 48.0, 31.0],
        [90.0, 0.0, 0.0],
    ];
    let at = share.clamp(0.0, 1.0) * (STOPS.len() - 1) as f64;
    let (i, rest) = ((at as usize).min(STOPS.len() - 2), at);
    let rest = rest - i as f64;
    let [r, g, b] = [0, 1, 2].map(|c| STOPS[i][c] + rest * (STOPS[i + 1][c] - STOPS[i][c]));
    format!("#{:02x}{:02x}{:02x}", r as u8, g as u8, b as u8)
}

fn legend(svg: &mut String, y: f64, (low, high): (f64, f64)) {
    if high <= 0.0 {
        return;
    }
    const STEPS: usize = 40;
    for i in 0..STEPS {
        let _ = write!(
            svg,
            "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"4.1\" height=\"10\" fill=\"{}\"/>",
            LEFT + 4.0 * i as f64,
            colour(i as f64 / (STEPS - 1) as f64)
        );
    }
    let right = LEFT + 4.0 * STEPS as f64;
    text(svg, (LEFT - 5.0, y + 9.0), "end", &format!("{low:.1e}"));
    let words = format!("{high:.1e} nats; numbers are clear flips; \"all but\" spares the layer");
    text(svg, (right + 5.0, y + 9.0), "start", &words);
}
