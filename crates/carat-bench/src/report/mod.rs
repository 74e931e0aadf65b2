//! Records as people read them: one HTML page that is whole in itself (its plots
//! are SVG, it loads nothing and runs no script), and tables in Markdown.

mod content;
mod models;
mod plot;

use std::fmt::Write as _;

use crate::{BenchError, Record};
use content::Section;

/// Style of the page; colours of plots follow the reader's light or dark theme.
const STYLE: &str = include_str!("style.css");

/// A table, the first column of which is left-aligned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// `&`, `<`, `>` and quotes as HTML has them.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // No control character is allowed in XML but these.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

impl Table {
    fn markdown(&self, out: &mut String) {
        let cell = |text: &String| text.replace('|', "\\|").replace('\n', " ");
        let row = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(cell).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        out.push_str(&row(&self.head));
        let rules = (0..self.head.len()).map(|i| if i == 0 { "---" } else { "---:" });
        let rules: Vec<&str> = rules.collect();
        out.push_str(&format!("| {} |\n", rules.join(" | ")));
        for cells in &self.rows {
            out.push_str(&row(cells));
        }
        out.push('\n');
    }

    fn html(&self, out: &mut String) {
        let row = |out: &mut String, tag: &str, cells: &[String]| {
            out.push_str("<tr>");
            for cell in cells {
                let class = match cell.as_str() {
                    "PASS" | "PASS_TIE" => " class=\"pass\"",
                    "FAIL" => " class=\"fail\"",
                    "ungated" => " class=\"ungated\"",
                    _ => "",
                };
                let _ = write!(out, "<{tag}{class}>{}</{tag}>", escape(cell));
            }
            out.push_str("</tr>\n");
        };
        out.push_str("<div class=\"table\"><table>\n<thead>");
        row(out, "th", &self.head);
        out.push_str("</thead>\n<tbody>\n");
        for cells in &self.rows {
            row(out, "td", cells);
        }
        out.push_str("</tbody></table></div>\n");
    }
}

/// The tables of records in Markdown.
pub fn markdown(records: &[Record]) -> String {
    let mut out = String::new();
    for section in content::sections(records) {
        let _ = write!(out, "## {}\n\n", section.title);
        for text in &section.text {
            let _ = write!(out, "{text}\n\n");
        }
        for table in &section.tables {
            table.markdown(&mut out);
        }
    }
    out
}

/// One page with the plots and tables of records.
///
/// # Errors
/// When there is no record to show.
pub fn html(records: &[Record]) -> Result<String, BenchError> {
    let first = records.first().ok_or(BenchError::Empty {
        what: "the number of records",
    })?;
    let mut body = String::new();
    let _ = write!(
        body,
        "<header><h1>carat bench</h1>\n<p>{} · {} · {} record{}</p></header>\n",
        escape(&first.machine.cpu),
        escape(&first.date),
        records.len(),
        if records.len() == 1 { "" } else { "s" }
    );
    for section in content::sections(records) {
        section_html(&section, &mut body);
    }
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>carat bench</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\
         </main>\n</body>\n</html>\n"
    ))
}

fn section_html(section: &Section, out: &mut String) {
    let _ = write!(out, "<section>\n<h2>{}</h2>\n", escape(&section.title));
    for text in &section.text {
        let _ = writeln!(out, "<p>{}</p>", escape(text));
    }
    if !section.plots.is_empty() {
        out.push_str("<div class=\"plots\">\n");
        for plot in &section.plots {
            plot.svg(out);
        }
        out.push_str("</div>\n");
    }
    for table in &section.tables {
        table.html(out);
    }
    out.push_str("</section>\n");
}
