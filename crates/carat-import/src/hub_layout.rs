//! What the place of a checkpoint on disk tells about the repository that it was
//! downloaded from.
//!
//! Known are the hub's own cache (`models--ORG--NAME/snapshots/COMMIT/…`), the
//! records that its client leaves in a folder (`.cache/huggingface/download`), and
//! carat's folder of pulled models (`hub/ORG/NAME/COMMIT/checkpoint` and
//! `hub/ORG/NAME/COMMIT/gguf/…`).

use std::path::{Path, PathBuf};

use crate::source::file_name;

/// A hub download.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct HubPlace {
    /// Name of the repository without its organisation.
    pub(crate) name: Option<String>,
    /// Its commit.
    pub(crate) revision: Option<String>,
}

/// Reads the place of a checkpoint's folder or file; empty where it tells nothing.
pub(crate) fn hub_place(path: &Path) -> HubPlace {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut parts: Vec<&str> = Vec::new();
    for component in absolute.components() {
        match component.as_os_str().to_str() {
            Some("..") => _ = parts.pop(),
            Some(part) => parts.push(part),
            // No layout has names that are not UTF-8.
            None => parts.push(""),
        }
    }
    let whole = path.is_dir();
    // The nearest folder that is a commit, with what is around it.
    for (at, commit) in parts.iter().enumerate().rev() {
        if !is_commit(commit) {
            continue;
        }
        let place = |name: &str| HubPlace {
            name: Some(name.to_owned()).filter(|n| !n.is_empty()),
            revision: Some((*commit).to_owned()),
        };
        match (&parts[..at], &parts[at + 1..]) {
            ([.., repo, "snapshots"], below) if !whole || below.is_empty() => {
                let name = repo
                    .strip_prefix("models--")
                    .map(|r| r.rsplit_once("--").map_or(r, |(_, name)| name));
                return place(name.unwrap_or_default());
            }
            ([.., "hub", _org, name], ["checkpoint"]) if whole => return place(name),
            ([.., "hub", _org, name], ["gguf", _, ..]) if !whole => return place(name),
            _ => {}
        }
    }
    HubPlace {
        name: None,
        revision: recorded_revision(path),
    }
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The commit in the record of a download into a folder of the user's choice.
fn recorded_revision(path: &Path) -> Option<String> {
    let (folder, file): (PathBuf, String) = if path.is_dir() {
        (path.to_owned(), "config.json".into())
    } else {
        (path.parent()?.to_owned(), file_name(path))
    };
    let record = folder
        .join(".cache/huggingface/download")
        .join(format!("{file}.metadata"));
    let text = std::fs::read_to_string(record).ok()?;
    let commit = text.lines().next()?;
    is_commit(commit).then(|| commit.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn at(layout: &str, file: bool) -> (Option<String>, bool) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(layout.replace("COMMIT", COMMIT));
        if file {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, b"").unwrap();
        } else {
            std::fs::create_dir_all(&path).unwrap();
        }
        let place = hub_place(&path);
        (place.name, place.revision.as_deref() == Some(COMMIT))
    }

    #[test]
    fn known_layouts() {
        let named = |name: &str| (Some(name.to_owned()), true);
        assert_eq!(at("hub/org/m-1/COMMIT/checkpoint", false), named("m-1"));
        assert_eq!(at("hub/org/m/COMMIT/gguf/m.gguf", true), named("m"));
        assert_eq!(at("hub/org/m/COMMIT/gguf/q4/m.gguf", true), named("m"));
        assert_eq!(at("models--org--m/snapshots/COMMIT", false), named("m"));
        let file = at("models--org--m/snapshots/COMMIT/q4/m.gguf", true);
        assert_eq!(file, named("m"));
        assert!(at("snapshots/COMMIT", false).1);
    }

    #[test]
    fn other_places_tell_nothing() {
        assert_eq!(at("models/COMMIT/checkpoint", false), (None, false));
        assert_eq!(at("hub/org/m/COMMIT/other", false), (None, false));
        assert_eq!(at("hub/org/m/COMMIT/m.gguf", true), (None, false));
        assert_eq!(at("hub/org/m/main/checkpoint", false), (None, false));
        assert_eq!(at("models--o--m/snapshots/COMMIT/x", false), (None, false));
        assert_eq!(hub_place(Path::new("no/such")), HubPlace::default());
    }
}
