//! Names: what the user asks for, and what a hub says its files are called.

use std::path::PathBuf;

use crate::HubError;

/// Revision taken when none is given.
pub(crate) const DEFAULT_REVISION: &str = "main";

/// Longest organisation or repository name, in bytes.
const MAX_REPO_PART: usize = 96;
/// Longest revision, in bytes.
const MAX_REVISION: usize = 200;
/// Longest path inside a repository, in bytes.
const MAX_PATH: usize = 512;
/// Most components of such a path.
const MAX_DEPTH: usize = 8;
/// Longest component; with the suffix of a partial file it stays below 255,
/// which is the limit of common file systems.
const MAX_COMPONENT: usize = 240;

/// `org/name[:file][@revision]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubName {
    pub(crate) org: String,
    pub(crate) name: String,
    /// One GGUF file, as a `/`-separated path; else the whole checkpoint.
    pub(crate) file: Option<String>,
    pub(crate) revision: Option<String>,
}

impl HubName {
    /// Reads a hub name; the revision may stand before or after the file.
    pub(crate) fn parse(text: &str) -> Result<Self, HubError> {
        let bad = |reason: &str| HubError::BadName {
            name: shorten(text),
            reason: reason.to_owned(),
        };
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (text, None),
        };
        let (repo, mut revision) = match repo.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (repo, None),
        };
        let file = match file {
            Some(file) => match file.rsplit_once('@') {
                Some(_) if revision.is_some() => return Err(bad("it has two revisions")),
                Some((file, after)) => {
                    revision = Some(after);
                    Some(file)
                }
                None => Some(file),
            },
            None => None,
        };
        let Some((org, name)) = repo.split_once('/') else {
            return Err(bad(
                "no pinned model has this name, and a hub name has the form org/name",
            ));
        };
        for part in [org, name] {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if part.is_empty() || part.len() > MAX_REPO_PART || !part.chars().all(allowed) {
                return Err(bad(
                    "organisation and repository are letters, digits, `-`, `_` and `.`",
                ));
            }
            if component_problem(part).is_some() || part.starts_with(['.', '-']) {
                return Err(bad(
                    "organisation and repository cannot begin or end like this",
                ));
            }
        }
        if let Some(file) = file {
            safe_path(file).map_err(bad)?;
            if !is_gguf(file) {
                return Err(bad("the file after the colon must be a .gguf file"));
            }
        }
        if let Some(revision) = revision {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
            if revision.is_empty()
                || revision.len() > MAX_REVISION
                || !revision.chars().all(allowed)
                || revision.starts_with(['/', '-', '.'])
                || revision.contains("..")
            {
                return Err(bad("a revision is a branch, a tag or a commit"));
            }
        }
        Ok(Self {
            org: org.to_owned(),
            name: name.to_owned(),
            file: file.map(str::to_owned),
            revision: revision.map(str::to_owned),
        })
    }

    /// `org/name`.
    pub(crate) fn repo(&self) -> String {
        format!("{}/{}", self.org, self.name)
    }

    /// The revision asked for, or the default one.
    pub(crate) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(DEFAULT_REVISION)
    }

    /// The name in its one spelling: `org/name[:file][@revision]`.
    pub(crate) fn canonical(&self) -> String {
        let mut text = self.repo();
        if let Some(file) = &self.file {
            text.push(':');
            text.push_str(file);
        }
        if let Some(revision) = &self.revision {
            text.push('@');
            text.push_str(revision);
        }
        text
    }
}

/// Whether a file name ends in `.gguf`, of any case.
pub(crate) fn is_gguf(file: &str) -> bool {
    has_suffix(file, ".gguf")
}

/// Whether `file` ends in `suffix`, ASCII case ignored, with something before it.
pub(crate) fn has_suffix(file: &str, suffix: &str) -> bool {
    let (file, suffix) = (file.as_bytes(), suffix.as_bytes());
    file.len() > suffix.len() && file[file.len() - suffix.len()..].eq_ignore_ascii_case(suffix)
}

/// Whether `text` is a full commit id: 40 lower-case hex digits.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Turns a `/`-separated path of a repository into a relative path that stays
/// inside the folder it is joined to and that every common file system can
/// hold; else says which rule the path breaks.
pub(crate) fn safe_path(path: &str) -> Result<PathBuf, &'static str> {
    if path.is_empty() {
        return Err("an empty path");
    }
    if path.len() > MAX_PATH {
        return Err("a path of more than 512 bytes");
    }
    let mut safe = PathBuf::new();
    for (depth, component) in path.split('/').enumerate() {
        if depth == MAX_DEPTH {
            return Err("a path of more than 8 levels");
        }
        if let Some(problem) = component_problem(component) {
            return Err(problem);
        }
        safe.push(component);
    }
    Ok(safe)
}

/// Whether a listed name tries to leave its folder. No git tree can hold such
/// a name, so that a listing with one is forged.
pub(crate) fn escapes(path: &str) -> bool {
    path.starts_with(['/', '\\'])
        || path.contains('\0')
        || path.split(['/', '\\']).any(|component| component == "..")
        || path.as_bytes().get(1) == Some(&b':')
}

/// Which rule one component of a path breaks, if any. Rules of Windows hold
/// everywhere: a folder of models may move.
fn component_problem(component: &str) -> Option<&'static str> {
    if component.is_empty() || component == "." || component == ".." {
        return Some("an empty, `.` or `..` component");
    }
    if component.len() > MAX_COMPONENT {
        return Some("a name of more than 240 bytes");
    }
    if component
        .chars()
        .any(|c| c.is_control() || "\\:*?\"<>|".contains(c))
    {
        return Some("a character that file systems reserve");
    }
    if component.ends_with(['.', ' ']) {
        return Some("a name that ends in a dot or a space");
    }
    let stem = component.split('.').next().unwrap_or(component);
    let device = ["con", "prn", "aux", "nul"]
        .iter()
        .any(|d| stem.eq_ignore_ascii_case(d))
        || (stem.len() == 4
            && stem.as_bytes()[3].is_ascii_digit()
            && stem.get(..3).is_some_and(|port| {
                port.eq_ignore_ascii_case("com") || port.eq_ignore_ascii_case("lpt")
            }));
    device.then_some("the name of a device")
}

/// `text` with its end cut off if it is long: hostile names go into messages.
pub(crate) fn shorten(text: &str) -> String {
    const MOST: usize = 120;
    if text.chars().count() <= MOST {
        return text.to_owned();
    }
    text.chars().take(MOST).chain(['…']).collect()
}

/// Place of a file in a set of shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    prefix: String,
    suffix: String,
    width: usize,
    /// Number of shards in the set.
    pub(crate) count: u32,
    /// This one's number, from 1.
    pub(crate) index: u32,
}

impl Shard {
    /// Reads `prefix-00001-of-00003.ext`.
    pub(crate) fn parse(file: &str) -> Option<Self> {
        let (stem, extension) = file.rsplit_once('.')?;
        let (rest, count_text) = stem.rsplit_once("-of-")?;
        let (prefix, index_text) = rest.rsplit_once('-')?;
        let number = |text: &str| -> Option<u32> {
            let digits = (1..=6).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
            if digits { text.parse().ok() } else { None }
        };
        let (index, count) = (number(index_text)?, number(count_text)?);
        if index == 0 || index > count || index_text.len() != count_text.len() {
            return None;
        }
        Some(Self {
            prefix: prefix.to_owned(),
            suffix: format!("-of-{count_text}.{extension}"),
            width: index_text.len(),
            count,
            index,
        })
    }

    /// Names of all shards of this set, in order.
    pub(crate) fn all(&self) -> impl Iterator<Item = String> + '_ {
        (1..=self.count).map(|i| format!("{}-{i:0w$}{}", self.prefix, self.suffix, w = self.width))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> (String, Option<String>, Option<String>) {
        let name = HubName::parse(text).unwrap();
        (name.repo(), name.file, name.revision)
    }

    #[test]
    fn hub_names() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(parsed("a/b"), ("a/b".into(), None, None));
        assert_eq!(
            parsed("a/b.c-1_2@v1.0"),
            ("a/b.c-1_2".into(), None, some("v1.0"))
        );
        assert_eq!(parsed("a/b:q4.gguf"), ("a/b".into(), some("q4.gguf"), None));
        assert_eq!(
            parsed("a/b@refs/pr/1:x/q.GGUF"),
            ("a/b".into(), some("x/q.GGUF"), some("refs/pr/1"))
        );
        assert_eq!(
            parsed("a/b:q.gguf@main"),
            ("a/b".into(), some("q.gguf"), some("main"))
        );
        assert_eq!(
            HubName::parse("a/b@r:q.gguf").unwrap().canonical(),
            "a/b:q.gguf@r"
        );
    }

    #[test]
    fn malformed_hub_names() {
        for text in [
            "",
            "a",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "a/.b",
            "-a/b",
            "a b/c",
            "a/b:",
            "a/b@",
            "a/b:model.bin",
            "a/b:../q.gguf",
            "a/b:/q.gguf",
            "a/b:x//q.gguf",
            "a/b@../x",
            "a/b@-x",
            "a/b@x:q.gguf@y",
            "a/b:c:q.gguf",
            "a/b:x\\q.gguf",
            "con/b",
            "a/b?c",
            "a/b@x y",
            "é/b",
            "a/b.",
            &format!("a/{}", "b".repeat(97)),
        ] {
            assert!(
                matches!(HubName::parse(text), Err(HubError::BadName { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn unsafe_paths() {
        for path in [
            "",
            "/etc/x",
            "..",
            "a/../b",
            "./a",
            "a//b",
            "a/",
            "a\\b",
            "c:x",
            "a\0b",
            "a\nb",
            "nul",
            "NUL.txt",
            "com1.json",
            "lPT9",
            "a.",
            "a ",
            "a|b",
            "1/2/3/4/5/6/7/8/9",
            &"x".repeat(241),
            &"x/".repeat(300),
        ] {
            assert!(safe_path(path).is_err(), "{path:?}");
        }
        for path in [
            "config.json",
            "a/b/c.gguf",
            "комета.gguf",
            "com.json",
            "console",
            "a b.json",
        ] {
            assert_eq!(safe_path(path).unwrap(), PathBuf::from(path));
        }
        for path in [
            "../x",
            "a/../../x",
            "/x",
            "\\\\host\\x",
            "a\\..\\x",
            "c:\\x",
            "x\0",
        ] {
            assert!(escapes(path), "{path:?}");
        }
        for path in ["a..b", "a/..b/c", "odd:name.png", ".gitattributes"] {
            assert!(!escapes(path), "{path:?}");
        }
    }

    #[test]
    fn shards() {
        let shard = Shard::parse("x/model-00002-of-00003.safetensors").unwrap();
        assert_eq!((shard.index, shard.count), (2, 3));
        assert_eq!(
            shard.all().nth(2).unwrap(),
            "x/model-00003-of-00003.safetensors"
        );
        for file in [
            "model.gguf",
            "m-0-of-2.gguf",
            "m-3-of-2.gguf",
            "m-01-of-002.gguf",
            "m-1-of-9999999.gguf",
            "m-+1-of-02.gguf",
            "m-1-of-.gguf",
            "1-of-2.gguf",
        ] {
            assert_eq!(Shard::parse(file), None, "{file}");
        }
    }

    proptest! {
        #[test]
        fn safe_paths_stay_inside(path in "[a-c./\\\\:\u{0}é -]{0,24}") {
            if let Ok(safe) = safe_path(&path) {
                prop_assert!(safe.components().all(|c| matches!(c, std::path::Component::Normal(_))));
                prop_assert!(!escapes(&path));
            }
        }

        #[test]
        fn parsing_never_panics_and_round_trips(text in "\\PC{0,60}|[a-c/@:.]{0,12}gguf") {
            if let Ok(name) = HubName::parse(&text) {
                prop_assert_eq!(HubName::parse(&name.canonical()).unwrap(), name);
            }
            let _ = Shard::parse(&text);
        }
    }
}
