//! The page.

use std::fmt::Write as _;

use super::{Report, plot, size};
use crate::Transcript;
use crate::fixture::Case;
use crate::transcript::{CaseResult, ReferenceWeights, Status};
use crate::verdict::{Divergence, Verdict};

const STYLE: &str = include_str!("style.css");

/// Text as it may stand in HTML, in elements and attributes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::PassTie => "edge",
        Verdict::Refused => "edge",
        Verdict::Fail | Verdict::Error => "fail",
    }
}

fn badge(verdict: Verdict) -> String {
    format!("<span class=\"badge {}\">{verdict}</span>", class(verdict))
}

/// One self-contained page: no script, nothing fetched.
pub fn html(report: &Report<'_>) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>{0}: {1}</title><style>{STYLE}</style></head><body>\n<h1>{0}</h1>\n",
        escape(&report.name),
        report.verdict()
    );
    head(&mut page, report);
    for transcript in &report.transcripts {
        gate(&mut page, report, transcript);
    }
    page.push_str("</body></html>\n");
    page
}

fn row(page: &mut String, name: &str, value: &str) {
    let _ = writeln!(page, "<tr><th>{}</th><td>{value}</td></tr>", escape(name));
}

fn head(page: &mut String, report: &Report<'_>) {
    match report.transcripts.first() {
        Some(t) => {
            let _ = writeln!(
                page,
                "<p class=\"lead\">{} {}</p>",
                badge(t.verdict),
                claim(t)
            );
        }
        None => page.push_str("<p class=\"lead\">Nobody has gated this bundle.</p>\n"),
    }
    page.push_str("<table class=\"facts\">\n");
    row(
        page,
        "size",
        &format!(
            "{} for {:.2} million weights, {:.2} bits per weight",
            size(report.bytes),
            report.weights as f64 / 1e6,
            report.bits_per_weight
        ),
    );
    row(page, "weights", &escape(&report.compression));
    row(page, "activations", &escape(&report.activation));
    row(page, "made from", &escape(&report.source));
    row(
        page,
        "digest",
        &format!("<code>{}</code>", escape(&report.digest)),
    );
    page.push_str("</table>\n");
    if !report.speeds.is_empty() {
        page.push_str("<h2>Speed, with what it is worth</h2>\n<table><tr><th>machine</th><th>workload</th><th>prompt tok/s</th><th>decode tok/s</th><th>fidelity</th></tr>\n");
        for speed in &report.speeds {
            let number = |n: Option<f64>| n.map_or("–".into(), |n| format!("{n:.1}"));
            let _ = writeln!(
                page,
                "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td></tr>",
                escape(&speed.machine),
                escape(&speed.workload),
                number(speed.prompt_tps),
                number(speed.decode_tps),
                report.verdict()
            );
        }
        page.push_str("</table>\n");
    }
}

/// What the verdict is about, in a sentence.
fn claim(t: &Transcript) -> String {
    let reference = &t.fixture.reference;
    let against = match t.weights {
        ReferenceWeights::Source => format!("the fp32 reference on {}", reference.model),
        ReferenceWeights::Candidate => "the fp32 reference on the bundle’s own weights".into(),
        ReferenceWeights::Foreign => format!("the logits of another program ({})", reference.model),
    };
    let steps: usize = t.cases.iter().map(|c| c.teacher_forced.steps).sum();
    let clear: usize = t.cases.iter().map(|c| c.teacher_forced.clear).sum();
    let flips: usize = t.cases.iter().map(|c| c.teacher_forced.flips.len()).sum();
    let ties: usize = t.cases.iter().map(|c| c.teacher_forced.ties.len()).sum();
    escape(&format!(
        "against {against}: {flips} flips in {clear} clear steps, {ties} ties in {} others.",
        steps - clear
    ))
}

fn list(page: &mut String, title: &str, items: &[String]) {
    if items.is_empty() {
        return;
    }
    let _ = writeln!(page, "<p>{title}</p><ul>");
    for item in items {
        let _ = writeln!(page, "<li>{}</li>", escape(item));
    }
    page.push_str("</ul>\n");
}

fn gate(page: &mut String, report: &Report<'_>, t: &Transcript) {
    let _ = writeln!(
        page,
        "<h2>Gate “{}” {}</h2>",
        escape(&t.fixture.name),
        badge(t.verdict)
    );
    list(page, "Why:", &t.reasons);
    list(page, "Provisional, since", &t.provisional);
    page.push_str("<p class=\"key\"><i class=\"agrees\"></i> agrees <i class=\"unsure\"></i> agrees, not judged <i class=\"tie\"></i> differs below the floor <i class=\"flip\"></i> differs where the reference is sure. A bar is as high as the gap between the two likeliest tokens; the line is the floor.</p>\n");
    for (case, result) in t.fixture.cases.iter().zip(&t.cases) {
        case_section(page, report, (case, result), t.fixture.floor);
    }
    checks(page, t);
    if let Some(ladder) = &t.ladder {
        let place = ladder
            .layer
            .map_or("no layer".into(), |l| format!("layer {l}"));
        let _ = writeln!(
            page,
            "<h3>Where it starts</h3><p>At step {} of {}: <b>{}</b>, most of it from {place}.</p><table><tr><th>layer</th><th>storage</th><th>kernel</th><th>own states</th></tr>",
            ladder.step,
            escape(&ladder.case),
            ladder.cause
        );
        for rung in &ladder.rungs {
            let cell = |d: &crate::Distance| format!("{:.6} (max {:.2e})", d.cosine, d.max_error);
            let _ = writeln!(
                page,
                "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
                rung.layer,
                cell(&rung.storage),
                cell(&rung.kernel),
                cell(&rung.engine)
            );
        }
        page.push_str("</table>\n");
    }
    let _ = writeln!(
        page,
        "<p class=\"small\">{} on {} with {} activations. Fixture <code>{}</code>. Check it again without the reference: <code>{}</code></p>",
        escape(&t.producer),
        escape(&t.candidate.backend),
        escape(&t.candidate.activation),
        escape(&t.fixture_digest),
        escape(&t.recheck)
    );
}

fn case_section(
    page: &mut String,
    report: &Report<'_>,
    (case, result): (&Case, &CaseResult),
    floor: f64,
) {
    let forced = &result.teacher_forced;
    let _ = writeln!(
        page,
        "<section><h3>{} {}</h3><p class=\"small\">{} prompt tokens, {} steps, {} clear, {} flips, {} ties{}</p>",
        escape(&case.name),
        badge(result.verdict),
        case.prompt_ids.len(),
        forced.steps,
        forced.clear,
        forced.flips.len(),
        forced.ties.len(),
        match case.must_stop {
            true => "; the last step is the stop",
            false => "",
        }
    );
    if let Some(prompt) = &case.prompt {
        let prompt = escape(prompt);
        let _ = writeln!(
            page,
            "<details class=\"small\"><summary>prompt</summary><blockquote>{prompt}</blockquote></details>"
        );
    }
    let svg = plot::margins(report, case, result, floor);
    let _ = writeln!(page, "<div class=\"plot\">{svg}</div>");
    let run = result.free_run.as_ref();
    match run.and_then(|r| r.divergence.as_ref()) {
        Some(at) => side_by_side(page, report, (case, result), at),
        None if run.is_some() => {
            let text = escape(&report.text(&case.fed()));
            let _ = writeln!(page, "<blockquote>{text}</blockquote>");
        }
        None => {}
    }
    page.push_str("</section>\n");
}

/// Both answers, marked where they part.
fn side_by_side(
    page: &mut String,
    report: &Report<'_>,
    (case, result): (&Case, &CaseResult),
    at: &Divergence,
) {
    let reference = case.fed();
    let tie = match result.free_run.as_ref().map(|r| r.verdict) {
        Some(Verdict::PassTie) => " class=\"tie\"",
        _ => "",
    };
    let marked = |ids: &[u32]| {
        let same = at.step.min(ids.len());
        let (same, rest) = ids.split_at(same);
        let (first, rest) = rest.split_at(rest.len().min(1));
        let first = match first {
            [] => "∎".into(),
            first => escape(&report.text(first)),
        };
        let (same, rest) = (escape(&report.text(same)), escape(&report.text(rest)));
        format!("{same}<mark{tie}>{first}</mark>{rest}")
    };
    let _ = writeln!(
        page,
        "<p class=\"small\">The answers part at step {} (margin {:.4}).</p><div class=\"two\"><div><b>reference</b><blockquote>{}</blockquote></div><div><b>bundle</b><blockquote>{}</blockquote></div></div>",
        at.step,
        at.margin,
        marked(&reference),
        marked(&result.answer)
    );
}

fn checks(page: &mut String, t: &Transcript) {
    page.push_str("<h3>Everything else</h3>\n<table>\n");
    let mut line = |class: &str, status: &str, name: &str, detail: &str| {
        let _ = writeln!(
            page,
            "<tr><td><span class=\"badge {class}\">{status}</span></td><td>{}</td><td>{}</td></tr>",
            escape(&name.replace('_', " ")),
            escape(detail)
        );
    };
    for red in &t.red_first {
        let went_red = red.verdict == Verdict::Fail;
        let (class, status) = if went_red {
            ("pass", "went red")
        } else {
            ("fail", "stayed green")
        };
        line(class, status, "poisoned reference", &red.poison);
    }
    for check in &t.checks {
        let (class, status) = match check.status {
            Status::Ok => ("pass", "ok"),
            Status::Fail => ("fail", "FAIL"),
            Status::Info => ("none", "info"),
            Status::Skipped => ("none", "skipped"),
        };
        line(class, status, &check.name, &check.detail);
    }
    if let Some(m) = &t.text {
        let detail = format!(
            "{} positions. KL {:.5} nats, largest {:.4}. Same likeliest token at {:.4}. Perplexity {:.3} against {:.3}, ratio {:.4}. {} of {} clear positions differ. Intervals are 95 %.",
            m.positions,
            m.kl,
            m.kl_max,
            m.top1,
            m.perplexity_candidate.value,
            m.perplexity_reference.value,
            m.perplexity_ratio,
            m.clear_flips,
            m.clear
        );
        line("none", "info", "real text", &detail);
    }
    page.push_str("</table>\n");
}
