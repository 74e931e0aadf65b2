//! Is the bundle known to answer like its checkpoint?

use std::path::Path;

use carat_bundle::manifest::GATES_DIR;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Longest transcript that is read.
const MAX_TRANSCRIPT_BYTES: u64 = 64 << 20;
/// Most files of a bundle's `gates/` that are looked at.
const MAX_TRANSCRIPTS: usize = 256;

/// What is known about an arm's fidelity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fidelity {
    /// The gate's verdict, such as `PASS`; `null` if nobody judged it.
    pub verdict: Option<String>,
    /// The transcript that says so, or why there is none.
    pub basis: String,
}

impl Fidelity {
    /// Nobody judged it.
    pub fn unknown(why: impl Into<String>) -> Fidelity {
        Fidelity {
            verdict: None,
            basis: why.into(),
        }
    }

    /// The word beside a speed.
    pub fn label(&self) -> &str {
        self.verdict.as_deref().unwrap_or("ungated")
    }

    /// Looks into the `gates/` folder of a bundle whose manifest has the given
    /// digest. A transcript (`schemas/gate-transcript.schema.json`) counts if it
    /// is of that digest and judged against the checkpoint or another program,
    /// not against the bundle's own weights; of several the worst verdict counts.
    pub fn of_bundle(bundle: &Path, digest: &str) -> Fidelity {
        let folder = bundle.join(GATES_DIR);
        let Ok(read) = std::fs::read_dir(&folder) else {
            return Fidelity::unknown("the bundle has no gates/");
        };
        let mut paths: Vec<_> = read.filter_map(|e| Some(e.ok()?.path())).collect();
        paths.retain(|p| p.extension().is_some_and(|e| e == "json"));
        paths.sort();
        let judged = paths.iter().take(MAX_TRANSCRIPTS).filter_map(|path| {
            let transcript = read_transcript(path)?;
            let name = path.file_name()?.to_string_lossy().into_owned();
            let own = transcript.candidate.digest.as_deref() == Some(digest);
            let judged = transcript.weights != "candidate";
            (own && judged).then_some((transcript.verdict, name))
        });
        match judged.max_by_key(|(verdict, _)| severity(verdict)) {
            Some((verdict, name)) => Fidelity {
                verdict: Some(verdict),
                basis: format!("{GATES_DIR}/{name}"),
            },
            None => Fidelity::unknown(format!("no transcript in {GATES_DIR}/ is of this bundle")),
        }
    }
}

/// What a transcript must have; whatever else it has is the gate's business.
#[derive(Deserialize)]
struct Transcript {
    verdict: String,
    weights: String,
    candidate: Candidate,
}

#[derive(Deserialize)]
struct Candidate {
    digest: Option<String>,
}

fn read_transcript(path: &Path) -> Option<Transcript> {
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > MAX_TRANSCRIPT_BYTES {
        return None;
    }
    let transcript: Transcript = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    // A verdict is a word of the gate's, not a text to be printed.
    let word = |c: char| c.is_ascii_uppercase() || c == '_';
    let verdict = &transcript.verdict;
    (verdict.len() <= 16 && !verdict.is_empty() && verdict.chars().all(word)).then_some(transcript)
}

fn severity(verdict: &str) -> u8 {
    match verdict {
        "PASS" => 0,
        "PASS_TIE" => 1,
        "FAIL" => 3,
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_counts_for_its_own_bundle_only() {
        let dir = tempfile::tempdir().unwrap();
        let of = || Fidelity::of_bundle(dir.path(), "abc");
        assert_eq!(of().label(), "ungated");
        std::fs::create_dir(dir.path().join("gates")).unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(dir.path().join("gates").join(name), text).unwrap();
        };
        let transcript = |verdict: &str, weights: &str, digest: &str| {
            format!(
                r#"{{"verdict": "{verdict}", "weights": "{weights}", "candidate": {{"digest": "{digest}", "x": 1}}}}"#
            )
        };
        write("other.json", &transcript("PASS", "source", "xyz"));
        write("own.json", &transcript("PASS", "candidate", "abc"));
        write("broken.json", "{");
        write("array.json", "[1]");
        write("text.json", &transcript("<b>", "source", "abc"));
        write("a.txt", &transcript("PASS", "source", "abc"));
        assert_eq!(of().verdict, None);
        write("a.json", &transcript("PASS", "source", "abc"));
        assert_eq!(
            (of().label(), of().basis.as_str()),
            ("PASS", "gates/a.json")
        );
        write("b.json", &transcript("FAIL", "foreign", "abc"));
        assert_eq!(of().label(), "FAIL");
    }
}
