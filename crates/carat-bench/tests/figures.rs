//! The tables of docs/benchmarks.md are those of the committed records. Run with
//! `CARAT_UPDATE=1` (or `scripts/update_figures`) to write them anew.

use std::path::Path;

use carat_bench::{Record, Spread, read_records};

/// Three digits that say something, as the page has them.
fn tps(spread: Option<Spread>) -> String {
    match spread.expect("a speed").median {
        v if v >= 1000.0 => format!("{v:.0}"),
        v if v >= 100.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// The second arm over the first, with the interval of the pairs.
fn ratio(spread: Option<Spread>) -> String {
    let spread = spread.expect("a ratio");
    let interval = spread
        .interval
        .map_or(String::new(), |i| format!(" ({:.1}–{:.1})", i.low, i.high));
    format!("{:.1}{interval}", spread.median)
}

/// The table of a file of comparisons.
fn table(records: &[Record]) -> String {
    let [base, new] = &records[0].arms[..] else {
        panic!("expected two arms");
    };
    let names = format!("{} / {}", new.info.name, base.info.name);
    let mut out = format!(
        "| model | threads | prefill tok/s, {names} | ratio | decode tok/s, {names} | ratio | gate |\n\
         |---|---|---|---|---|---|---|\n"
    );
    for record in records {
        let [base, new] = &record.arms[..] else {
            panic!("expected two arms");
        };
        out += &format!(
            "| {} | {} | {} / {} | {} | {} / {} | {} | {} |\n",
            new.info.model,
            new.info.threads.expect("threads"),
            tps(new.prompt_tps),
            tps(base.prompt_tps),
            ratio(record.ratios[0].prompt_tps),
            tps(new.decode_tps),
            tps(base.decode_tps),
            ratio(record.ratios[0].decode_tps),
            new.info.fidelity.label(),
        );
    }
    out
}

#[test]
fn the_tables_of_the_page_are_those_of_the_records() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = root.join("docs/benchmarks.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- figures: ", "<!-- end of figures -->");
    let mut current = String::new();
    let mut rest = page.as_str();
    let mut tables = 0;
    while let Some(at) = rest.find(begin) {
        let (before, marked) = rest.split_at(at);
        let (marker, after) = marked.split_once('\n').expect("a line");
        let file = marker.trim_start_matches(begin).trim_end_matches(" -->");
        let records = read_records(&root.join("benches/records").join(file)).unwrap();
        let (_, after) = after.split_once(end).expect("an end of figures");
        current += &format!("{before}{marker}\n{}{end}", table(&records));
        rest = after;
        tables += 1;
    }
    current += rest;
    assert!(tables >= 3, "{tables} tables");
    if std::env::var_os("CARAT_UPDATE").is_some() {
        std::fs::write(&path, &current).unwrap();
        return;
    }
    assert!(
        page == current,
        "docs/benchmarks.md is not what the records say: run scripts/update_figures"
    );
}
