//! The card.

use std::fmt::Write as _;

use super::{Report, size};
use crate::transcript::{ReferenceWeights, Status};

/// Text in a cell of a Markdown table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

/// A Markdown card: the bundle and its verdict, speed beside fidelity.
pub fn card(report: &Report<'_>) -> String {
    let mut out = format!("# {}\n\n", report.name);
    let _ = writeln!(
        out,
        "| | |\n|---|---|\n| verdict | **{}** |\n| size | {}, {:.2} bits per weight |\n| weights | {} |\n| activations | {} |\n| made from | {} |\n| digest | `{}` |\n",
        report.verdict(),
        size(report.bytes),
        report.bits_per_weight,
        cell(&report.compression),
        cell(&report.activation),
        cell(&report.source),
        report.digest
    );
    if !report.speeds.is_empty() {
        out.push_str("| machine | workload | prompt tok/s | decode tok/s | fidelity |\n|---|---|---|---|---|\n");
        for speed in &report.speeds {
            let number = |n: Option<f64>| n.map_or("–".into(), |n| format!("{n:.1}"));
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} |",
                cell(&speed.machine),
                cell(&speed.workload),
                number(speed.prompt_tps),
                number(speed.decode_tps),
                report.verdict()
            );
        }
        out.push('\n');
    }
    for t in &report.transcripts {
        let against = match t.weights {
            ReferenceWeights::Source => "its source in fp32",
            ReferenceWeights::Candidate => "its own weights in fp32",
            ReferenceWeights::Foreign => "another program's logits",
        };
        let _ = writeln!(
            out,
            "## Gate `{}`: {} against {against}\n\n| case | verdict | steps | clear | flips | ties |\n|---|---|---|---|---|---|",
            t.fixture.name, t.verdict
        );
        for case in &t.cases {
            let forced = &case.teacher_forced;
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} |",
                cell(&case.name),
                case.verdict,
                forced.steps,
                forced.clear,
                forced.flips.len(),
                forced.ties.len()
            );
        }
        out.push('\n');
        for reason in &t.reasons {
            let _ = writeln!(out, "* {}", cell(reason));
        }
        for lack in &t.provisional {
            let _ = writeln!(out, "* provisional: {}", cell(lack));
        }
        for check in t.checks.iter().filter(|c| c.status == Status::Skipped) {
            let _ = writeln!(out, "* skipped: {} ({})", check.name, cell(&check.detail));
        }
        let _ = writeln!(out, "\nCheck it again: `{}`\n", t.recheck);
    }
    out
}
