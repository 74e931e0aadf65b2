//! Files of results that grow line by line: a header, then one item a line. What a
//! killed run left of its last line is dropped by the run that goes on.

use std::fs::File;
use std::io::{BufRead as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::FidelityError;

/// Longest line.
pub(crate) const MAX_LINE_BYTES: u64 = 4 << 20;

/// What a file holds.
#[derive(Debug)]
pub(crate) struct Lines<H, I> {
    /// `None` of an empty file, or one whose header was cut.
    pub(crate) header: Option<H>,
    pub(crate) items: Vec<I>,
    /// Bytes of the lines that were read.
    kept: u64,
}

/// What else is wrong with a header, or with an item after those before it.
pub(crate) struct Rules<H, I> {
    pub(crate) header: fn(&H) -> Result<(), String>,
    pub(crate) item: fn(&H, &[I], &I) -> Result<(), String>,
}

/// Reads a file; `cut` leaves a last line out that has no end.
pub(crate) fn read<H: DeserializeOwned, I: DeserializeOwned>(
    path: &Path,
    cut: bool,
    rules: &Rules<H, I>,
) -> Result<Lines<H, I>, FidelityError> {
    let io = |source| FidelityError::Io {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(io)?;
    let mut reader = std::io::BufReader::new(file);
    let mut out = Lines {
        header: None,
        items: vec![],
        kept: 0,
    };
    for number in 1.. {
        let wrong = |problem: String| {
            let problem = format!("line {number}: {problem}");
            FidelityError::malformed(path.display().to_string(), problem)
        };
        let mut line = Vec::new();
        let mut limited = std::io::Read::take(&mut reader, MAX_LINE_BYTES);
        let length = limited.read_until(b'\n', &mut line).map_err(io)? as u64;
        if length == MAX_LINE_BYTES {
            return Err(wrong(format!("is longer than {MAX_LINE_BYTES} bytes")));
        }
        if length == 0 || cut && line.last() != Some(&b'\n') {
            break;
        }
        match &out.header {
            None => {
                let found: H = serde_json::from_slice(&line).map_err(|e| wrong(e.to_string()))?;
                (rules.header)(&found).map_err(wrong)?;
                out.header = Some(found);
            }
            Some(header) => {
                let item: I = serde_json::from_slice(&line).map_err(|e| wrong(e.to_string()))?;
                (rules.item)(header, &out.items, &item).map_err(wrong)?;
                out.items.push(item);
            }
        }
        out.kept += length;
    }
    Ok(out)
}

/// A file that is gone on with.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Goes on behind the lines that were read, or begins with a header.
    pub(crate) fn resume<H: Serialize, I>(
        path: &Path,
        lines: &Lines<H, I>,
        header: &H,
    ) -> Result<Journal, FidelityError> {
        let keep = lines.header.as_ref().map_or(0, |_| lines.kept);
        let open = || {
            let mut options = std::fs::OpenOptions::new();
            let mut file = options
                .create(true)
                .truncate(false)
                .write(true)
                .open(path)?;
            file.set_len(keep)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        let file = open().map_err(|source| FidelityError::Io {
            path: path.to_owned(),
            source,
        })?;
        let mut out = Journal {
            path: path.to_owned(),
            file,
        };
        if keep == 0 {
            out.push(header)?;
        }
        Ok(out)
    }

    /// Adds a line, in one write.
    pub(crate) fn push(&mut self, item: &impl Serialize) -> Result<(), FidelityError> {
        let line = serde_json::to_string(item).expect("invariant: plain data");
        let written = self.file.write_all(format!("{line}\n").as_bytes());
        written.map_err(|source| FidelityError::Io {
            path: self.path.clone(),
            source,
        })
    }
}

/// Reads what there is of a file to go on with: nothing, if there is no file.
pub(crate) fn before<H: DeserializeOwned, I: DeserializeOwned>(
    path: &Path,
    rules: &Rules<H, I>,
) -> Result<Lines<H, I>, FidelityError> {
    match std::fs::metadata(path) {
        Ok(meta) if meta.len() > 0 => read(path, true, rules),
        _ => Ok(Lines {
            header: None,
            items: vec![],
            kept: 0,
        }),
    }
}
