//! Plots as SVG, with colours from the page's style.

use std::fmt::Write as _;

use super::escape;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 52.0;
/// Room for the title; each row of the legend adds to it.
const TOP: f64 = 38.0;
const LEGEND_ROW: f64 = 18.0;
/// Width of a letter at 12 px, on the safe side for the fonts in the style.
const LETTER: f64 = 6.8;
/// Colours of the style.
const COLOURS: usize = 6;

/// A point with the bounds of its interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) interval: Option<(f64, f64)>,
}

/// Points of one thing.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<Point>,
}

/// A plot of numbers over numbers; the vertical axis begins at 0.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: String,
    pub(super) y: String,
    /// Places by the logarithm, 0 included (as `log2(1 + x)`), with a tick at
    /// each value.
    pub(super) log_x: bool,
    /// Whether lines connect the points of a series.
    pub(super) lines: bool,
    pub(super) series: Vec<Series>,
}

/// Round numbers from 0 to at least `max`, about five.
fn ticks(min: f64, max: f64) -> Vec<f64> {
    let span = (max - min).max(f64::MIN_POSITIVE);
    let rough = span / 5.0;
    let magnitude = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|s| s * magnitude)
        .find(|s| *s >= rough * 0.999)
        .unwrap_or(magnitude);
    let first = (min / step).floor();
    let last = (max / step - 1e-9).ceil();
    let count = (last - first).clamp(1.0, 20.0) as usize;
    (0..=count).map(|i| (first + i as f64) * step).collect()
}

/// A tick's label, without digits that say nothing.
fn label(value: f64) -> String {
    let text = match value.abs() {
        v if v >= 1e6 => format!("{}M", value / 1e6),
        v if v >= 1e4 => format!("{}k", value / 1e3),
        _ => format!("{:.4}", value),
    };
    match text.contains('.') && !text.ends_with(['k', 'M']) {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A name that fits, and the whole of it in the title of its mark.
fn shorten(name: &str, most: usize) -> String {
    match name.chars().count() > most {
        true => name.chars().take(most - 1).chain(['…']).collect(),
        false => name.to_owned(),
    }
}

impl Plot {
    fn place(&self, x: f64) -> f64 {
        if self.log_x { (1.0 + x).log2() } else { x }
    }

    /// Names of series in rows, each with its column's offset.
    fn legend(&self) -> Vec<Vec<(usize, f64, String)>> {
        let mut rows: Vec<Vec<(usize, f64, String)>> = Vec::new();
        let mut at = f64::INFINITY;
        for (i, series) in self.series.iter().enumerate() {
            let name = shorten(&series.name, 60);
            let width = 26.0 + LETTER * name.chars().count() as f64;
            if at + width > WIDTH - RIGHT {
                rows.push(Vec::new());
                at = 16.0;
            }
            if let Some(row) = rows.last_mut() {
                row.push((i, at, name));
            }
            at += width;
        }
        rows
    }

    /// Horizontal ticks: each value of a logarithmic axis that has room.
    fn x_ticks(&self, scale: &dyn Fn(f64) -> f64) -> Vec<f64> {
        let mut values: Vec<f64> = self
            .series
            .iter()
            .flat_map(|s| s.points.iter().map(|p| p.x))
            .collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let (Some(&min), Some(&max)) = (values.first(), values.last()) else {
            return values;
        };
        if !self.log_x {
            let inside = |v: &f64| *v >= min - 1e-9 && *v <= max + 1e-9;
            let ticks: Vec<f64> = ticks(min, max).into_iter().filter(inside).collect();
            return if ticks.len() < 2 {
                vec![min, max]
            } else {
                ticks
            };
        }
        let mut kept: Vec<f64> = Vec::new();
        for value in values {
            let room = |last: &f64| {
                let letters = (label(*last).len() + label(value).len()) as f64 / 2.0;
                scale(value) - scale(*last) > LETTER * letters + 6.0
            };
            if kept.last().is_none_or(room) {
                kept.push(value);
            }
        }
        kept
    }

    /// Appends the plot.
    pub(super) fn svg(&self, out: &mut String) {
        let legend = self.legend();
        let top = TOP + LEGEND_ROW * legend.len() as f64 + 6.0;
        let points = || self.series.iter().flat_map(|s| s.points.iter());
        let places = || points().map(|p| self.place(p.x));
        let (min, max) = (
            places().fold(f64::INFINITY, f64::min),
            places().fold(f64::NEG_INFINITY, f64::max),
        );
        let highest = points()
            .map(|p| p.interval.map_or(p.y, |i| i.1.max(p.y)))
            .fold(0.0, f64::max);
        let y_ticks = ticks(0.0, if highest > 0.0 { highest } else { 1.0 });
        let y_max = y_ticks.last().copied().unwrap_or(1.0);
        // A single place lies in the middle.
        let (pad, span) = if max > min {
            (0.04, max - min)
        } else {
            (0.5, 1.0)
        };
        let width = WIDTH - LEFT - RIGHT;
        let at_x = |x: f64| {
            let share = (self.place(x) - min) / span;
            LEFT + width * (pad + share * (1.0 - 2.0 * pad))
        };
        let bottom = HEIGHT - BOTTOM;
        let at_y = |y: f64| bottom - (bottom - top) * (y / y_max);

        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
             aria-label=\"{0}\">\n<text class=\"title\" x=\"16\" y=\"24\">{0}</text>\n",
            escape(&self.title)
        );
        for (row, names) in legend.iter().enumerate() {
            let y = TOP + LEGEND_ROW * (row as f64 + 0.5);
            for (i, x, name) in names {
                let _ = writeln!(
                    out,
                    "<circle class=\"f{}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\"/>\
                     <text class=\"name\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                    i % COLOURS,
                    x + 4.0,
                    y,
                    x + 13.0,
                    y + 4.0,
                    escape(name)
                );
            }
        }
        for tick in &y_ticks {
            let y = at_y(*tick);
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 8.0,
                y + 4.0,
                label(*tick)
            );
        }
        for tick in self.x_ticks(&at_x) {
            let x = at_x(tick);
            let _ = writeln!(
                out,
                "<line class=\"axis\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{}\"/>\
                 <text text-anchor=\"middle\" x=\"{x:.1}\" y=\"{}\">{}</text>",
                bottom + 4.0,
                bottom + 18.0,
                label(tick)
            );
        }
        let middle = (top + bottom) / 2.0;
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\
             <text text-anchor=\"middle\" x=\"{}\" y=\"{}\">{}</text>\
             <text text-anchor=\"middle\" transform=\"rotate(-90 16 {middle})\" x=\"16\" y=\"{middle}\">{}</text>",
            WIDTH - RIGHT,
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 12.0,
            escape(&self.x),
            escape(&self.y)
        );
        for (i, series) in self.series.iter().enumerate() {
            let colour = i % COLOURS;
            if self.lines && series.points.len() > 1 {
                let path: Vec<String> = series
                    .points
                    .iter()
                    .map(|p| format!("{:.1},{:.1}", at_x(p.x), at_y(p.y)))
                    .collect();
                let path = path.join(" ");
                let _ = writeln!(
                    out,
                    "<polyline class=\"line s{colour}\" points=\"{path}\"/>"
                );
            }
            for p in &series.points {
                let (x, y) = (at_x(p.x), at_y(p.y));
                if let Some((low, high)) = p.interval {
                    let (low, high) = (at_y(low), at_y(high));
                    let _ = writeln!(
                        out,
                        "<line class=\"bar s{colour}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>"
                    );
                }
                let _ = writeln!(
                    out,
                    "<circle class=\"f{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"><title>{}: {} at {}</title></circle>",
                    escape(&series.name),
                    label(p.y),
                    label(p.x)
                );
            }
        }
        out.push_str("</svg>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_data() {
        assert_eq!(ticks(0.0, 97.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(0.0, 100.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(0.0, 1.0).last(), Some(&1.0));
        for max in [1e-6, 0.3, 7.0, 1234.0, 9e9] {
            let ticks = ticks(0.0, max);
            assert!(
                ticks[ticks.len() - 1] >= max * 0.999_999,
                "{max}: {ticks:?}"
            );
            assert!((3..=8).contains(&ticks.len()), "{max}: {ticks:?}");
        }
    }

    #[test]
    fn labels_have_no_needless_digits() {
        for (value, text) in [
            (0.0, "0"),
            (2.5, "2.5"),
            (1200.0, "1200"),
            (32768.0, "32.768k"),
            (2e6, "2M"),
        ] {
            assert_eq!(label(value), text);
        }
    }
}
