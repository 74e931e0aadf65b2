//! The two places text goes: results to standard output, the rest to standard error.

use std::io::{self, IsTerminal as _, Write as _};

/// A line for the person at the terminal.
pub(crate) fn note(line: &str) {
    // Nobody to tell if standard error is gone.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// A line of the result.
pub(crate) fn line(text: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}

/// A piece of a streamed answer, shown at once.
pub(crate) fn piece(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// One JSON object: the whole of standard output under `--json`.
pub(crate) fn json(value: &serde_json::Value) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value)?;
    writeln!(out)
}

/// Whether a person is likely to look at progress.
pub(crate) fn is_interactive() -> bool {
    io::stderr().is_terminal()
}

/// `12.3 MB` (powers of ten, as speeds and files are quoted).
pub(crate) fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = "B";
    for next in ["kB", "MB", "GB", "TB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    if unit == "B" {
        format!("{n} B")
    } else {
        format!("{value:.2} {unit}")
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes_read_as_people_quote_them() {
        assert_eq!(super::bytes(999), "999 B");
        assert_eq!(super::bytes(2_823_392), "2.82 MB");
        assert_eq!(super::bytes(2_371_080_000), "2.37 GB");
    }
}
