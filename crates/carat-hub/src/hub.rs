//! Pulls from a hub: a whole checkpoint, or one GGUF file with its shards.

use std::fs;
use std::path::{Path, PathBuf};

use crate::download::{Remote, fetch};
use crate::http::{Client, DEFAULT_ENDPOINT};
use crate::listing::{INDEX, Listing};
use crate::name::{HubName, Shard, is_commit, safe_path};
use crate::store::{Store, file_key, publish, remove_file, remove_folder, sync_folder};
use crate::{HubError, Progress, PullOptions, Pulled};

const CHECKPOINT: &str = "checkpoint";
const GGUF: &str = "gguf";

/// Pulls the hub model `name`.
pub(crate) fn pull(name: &HubName, options: &PullOptions) -> Result<Pulled, HubError> {
    let store = Store::new(&options.models_dir);
    let pulled = |path: PathBuf, commit: &str, already_there: bool| Pulled {
        name: name.canonical(),
        path,
        already_there,
        revision: Some(commit.to_owned()),
    };
    // A commit never changes, so that a copy of it needs no question.
    if is_commit(name.revision())
        && let Some(path) = find(name, &store)
    {
        return Ok(pulled(path, name.revision(), true));
    }
    let from_environment = std::env::var("HF_ENDPOINT")
        .ok()
        .filter(|text| !text.trim().is_empty());
    let endpoint = options.hub_endpoint.clone().or(from_environment);
    let endpoint = endpoint.as_deref().unwrap_or(DEFAULT_ENDPOINT);
    let client = Client::new(endpoint, options.token.as_deref())?;
    let _lock = store.lock(&file_key(&name.repo()), &name.repo())?;

    let listing = Listing::fetch(&client, name)?;
    let target = store.commit(name, &listing.commit);
    // Remainders of other commits go when this one is complete.
    let stages = store.staging(&file_key(&format!(
        "{} {}",
        name.repo(),
        name.file.as_deref().unwrap_or(CHECKPOINT)
    )));
    let job = Job {
        client: &client,
        listing: &listing,
        stage: stages.join(&listing.commit),
        progress: options.progress,
    };
    let (path, already_there) = match &name.file {
        Some(file) => job.gguf(file, &target.join(GGUF))?,
        None => job.checkpoint(&target.join(CHECKPOINT))?,
    };
    store.record_commit(name, &listing.commit)?;
    remove_folder(&stages)?;
    Ok(pulled(path, &listing.commit, already_there))
}

/// Where the hub model `name` lies, if it was pulled.
pub(crate) fn find(name: &HubName, store: &Store) -> Option<PathBuf> {
    let commit = store.known_commit(name)?;
    let folder = store.commit(name, &commit);
    match &name.file {
        None => Some(folder.join(CHECKPOINT)).filter(|path| path.is_dir()),
        Some(file) => {
            let shards = match Shard::parse(file) {
                Some(shard) => shard.all().take(MAX_SHARDS).collect(),
                None => vec![file.clone()],
            };
            let folder = folder.join(GGUF);
            let paths: Vec<PathBuf> = shards
                .iter()
                .map(|shard| safe_path(shard).ok().map(|safe| folder.join(safe)))
                .collect::<Option<_>>()?;
            paths
                .iter()
                .all(|path| path.is_file())
                .then(|| paths.first().cloned())?
        }
    }
}

/// As many shards as a pull accepts.
const MAX_SHARDS: usize = 4096;

struct Job<'a> {
    client: &'a Client,
    listing: &'a Listing,
    /// Staging folder of this commit.
    stage: PathBuf,
    progress: &'a dyn Progress,
}

impl Job<'_> {
    /// Fetches a checkpoint and publishes it as the folder `target`.
    fn checkpoint(&self, target: &Path) -> Result<(PathBuf, bool), HubError> {
        let selected = self.listing.checkpoint()?;
        if target.is_dir() {
            let all = selected.small.iter().chain(&selected.weights);
            if all.into_iter().all(|file| self.is_there(file, target)) {
                return Ok((target.to_path_buf(), true));
            }
            // Someone cut or removed files of it.
            remove_folder(target)?;
        }
        for file in &selected.small {
            self.fetch(file)?;
        }
        let weights = if selected.indexed {
            let path = self.stage.join(INDEX);
            let index = fs::read(&path).map_err(HubError::io("read", &path))?;
            self.listing.indexed_weights(&index)?
        } else {
            selected.weights
        };
        for file in &weights {
            self.fetch(file)?;
        }
        self.drop_strangers(selected.small.iter().chain(&weights))?;
        sync_folder(&self.stage)?;
        publish(&self.stage, target)?;
        Ok((target.to_path_buf(), false))
    }

    /// Fetches a GGUF file with all its shards into the folder `target`; the
    /// path is the first shard's.
    fn gguf(&self, file: &str, target: &Path) -> Result<(PathBuf, bool), HubError> {
        let files = self.listing.gguf(file)?;
        let paths: Vec<PathBuf> = files
            .iter()
            .map(|file| self.path_in(target, file))
            .collect::<Result<_, _>>()?;
        let absent = || {
            files
                .iter()
                .zip(&paths)
                .filter(|(file, _)| !self.is_there(file, target))
        };
        let already_there = absent().next().is_none();
        let wanted: Vec<_> = absent().collect();
        for (file, _) in &wanted {
            self.fetch(file)?;
        }
        // All are checked; the first shard comes last, since readers begin there.
        for (file, path) in wanted.iter().rev() {
            publish(&self.path_in(&self.stage, file)?, path)?;
        }
        let first = paths.into_iter().next();
        let first = first.ok_or_else(|| HubError::NotFound {
            host: format!("repository {}", self.listing.repo),
            what: format!("file {file}"),
            known: Vec::new(),
        })?;
        Ok((first, already_there))
    }

    fn fetch(&self, file: &str) -> Result<(), HubError> {
        let listed = self.listing.files.get(file);
        let remote = Remote {
            repo: &self.listing.repo,
            commit: &self.listing.commit,
            path: file,
            bytes: listed.and_then(|listed| listed.bytes),
            digest: listed.and_then(|listed| listed.digest.as_ref()),
        };
        fetch(
            self.client,
            &remote,
            &self.path_in(&self.stage, file)?,
            self.progress,
        )
    }

    fn path_in(&self, folder: &Path, file: &str) -> Result<PathBuf, HubError> {
        let safe = safe_path(file).map_err(|reason| HubError::HostileName {
            repo: self.listing.repo.clone(),
            file: crate::name::shorten(file),
            reason,
        })?;
        Ok(folder.join(safe))
    }

    /// Whether a published file has its listed size.
    fn is_there(&self, file: &str, folder: &Path) -> bool {
        let listed = self.listing.files.get(file).and_then(|listed| listed.bytes);
        let metadata = self
            .path_in(folder, file)
            .ok()
            .and_then(|path| fs::metadata(path).ok());
        metadata.is_some_and(|m| m.is_file() && listed.is_none_or(|bytes| bytes == m.len()))
    }

    /// Removes from the staging folder what does not belong to the checkpoint:
    /// files of an older selection.
    fn drop_strangers<'f>(
        &self,
        files: impl Iterator<Item = &'f String> + Clone,
    ) -> Result<(), HubError> {
        let entries = fs::read_dir(&self.stage).map_err(HubError::io("list", &self.stage))?;
        for entry in entries {
            let entry = entry.map_err(HubError::io("list", &self.stage))?;
            if !files.clone().any(|file| entry.file_name() == file.as_str()) {
                remove_file(&entry.path())?;
            }
        }
        Ok(())
    }
}
