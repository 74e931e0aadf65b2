//! Bundles made on the way: a folder of conversions keyed by content.
//!
//! ```text
//! ROOT/bundles/GENERATION/KEY/     one bundle and its seal
//! ROOT/bundles/GENERATION/lock     held while an entry is judged and moved
//! ROOT/digests/ID                  what a source file's digest was
//! ROOT/notes/GENERATION/KEY        small things measured on this machine
//! ```
//!
//! A key is a digest of everything that a conversion depends on: the source's
//! content, the format and version of the writer, the options. So an entry never
//! goes stale; it can only be damaged, or belong to another *generation* (bundle
//! format and tool version), which [`Cache::collect`] removes. Entries appear by
//! one rename. Of two processes that make the same entry at once both succeed,
//! and the entry of the first stays. A damaged entry is found when it is looked
//! up and made anew.

use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use crate::{
    Bundle, BundleError,
    bundle::read_capped,
    check::check_hex,
    digest::file_digest,
    manifest::VERSION,
    stage::{self, Staging},
};

/// Seal of a bundle that lives in the cache.
pub(crate) const SEAL_FILE: &str = "cache-seal.json";
const LOCK_FILE: &str = "lock";
/// A seal and a digest memo are a few hundred bytes.
const MAX_SMALL_FILE: u64 = 64 << 10;
/// Windows of the weights that an entry's quick digest covers, and their length.
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 4096;

/// A folder of conversions.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// Names an entry: a digest of all that the conversion depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CacheKey(String);

impl CacheKey {
    /// The key of a source's conversion. `options` is any text that differs
    /// whenever the conversion's result may differ.
    pub fn new(source_digest: &str, options: &str) -> CacheKey {
        let mut hasher = blake3::Hasher::new();
        for part in [source_digest, &generation(), options] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        CacheKey(hasher.finalize().to_hex().to_string())
    }

    /// 64 hex digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Bundle format and tool version: entries of another generation are of no use.
fn generation() -> String {
    format!("v{VERSION}-{}", env!("CARGO_PKG_VERSION"))
}

/// How a lookup ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheOutcome {
    /// The entry was there.
    Hit,
    /// It was made.
    Made,
    /// It was damaged and made anew.
    Healed,
}

/// A bundle from the cache.
#[derive(Debug)]
pub struct Cached {
    /// The bundle.
    pub bundle: Bundle,
    /// Where it came from.
    pub outcome: CacheOutcome,
}

/// One entry as [`Cache::list`] finds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheEntry {
    /// Its key.
    pub key: String,
    /// Its folder.
    pub path: PathBuf,
    /// Name of the model, if its manifest can be read.
    pub name: Option<String>,
    /// Bundle format and tool version that made it.
    pub generation: String,
    /// Whether this carat would use it.
    pub current: bool,
    /// Bytes on disk.
    pub bytes: u64,
    /// What is wrong with it, if it is of this generation and damaged.
    pub damage: Option<String>,
}

/// Written into an entry before it appears; says what it must look like.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Seal {
    key: String,
    /// BLAKE3 of the manifest, which holds the sizes of everything else.
    manifest: String,
    /// BLAKE3 of some windows of the weights.
    sample: String,
}

impl Seal {
    fn of(key: &CacheKey, bundle: &Bundle) -> Seal {
        Seal {
            key: key.0.clone(),
            manifest: bundle.digest().to_string(),
            sample: sample_digest(bundle.weights()),
        }
    }
}

/// Digest of evenly spread windows, first and last included: finds a file that
/// was cut, zeroed or overwritten in part without reading all of it. It is no
/// proof: `carat verify` reads every byte.
fn sample_digest(bytes: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    let last = bytes.len().saturating_sub(SAMPLE_BYTES);
    for i in 0..SAMPLES {
        let start = (last as u128 * i as u128 / (SAMPLES as u128 - 1)) as usize;
        let end = (start + SAMPLE_BYTES).min(bytes.len());
        hasher.update(&bytes[start..end]);
    }
    hasher.finalize().to_hex().to_string()
}

impl Cache {
    /// A cache in a folder, which is made when first needed.
    pub fn at(root: impl Into<PathBuf>) -> Cache {
        Cache { root: root.into() }
    }

    /// The user's cache: `CARAT_CACHE`, or the platform's folder for caches.
    ///
    /// # Errors
    /// When neither is known.
    pub fn open_default() -> Result<Cache, BundleError> {
        let platform = if cfg!(target_os = "macos") {
            Platform::Mac
        } else if cfg!(windows) {
            Platform::Windows
        } else {
            Platform::Xdg
        };
        default_root(platform, |name| std::env::var_os(name))
            .map(Cache::at)
            .ok_or_else(|| {
                BundleError::io("cache")(std::io::Error::new(
                    std::io::ErrorKind::NotFound,
                    "no cache folder is known: neither CARAT_CACHE nor a home folder is set",
                ))
            })
    }

    /// The cache's folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn bundles(&self) -> PathBuf {
        self.root.join("bundles")
    }

    fn current(&self) -> PathBuf {
        self.bundles().join(generation())
    }

    /// Where an entry is or would be.
    pub fn entry_path(&self, key: &CacheKey) -> PathBuf {
        self.current().join(&key.0)
    }

    /// An entry, if it is there and undamaged.
    pub fn get(&self, key: &CacheKey) -> Option<Bundle> {
        check_entry(&self.entry_path(key), key).ok()
    }

    /// An entry, made by `make` if it is missing or damaged. `make` writes a
    /// bundle at the path it is given, which does not exist yet and is on the
    /// cache's file system. `expected_bytes` of free space are asked for first.
    ///
    /// # Errors
    /// Those of `make`; [`BundleError::NoSpace`]; what the file system says.
    /// No entry is left then.
    pub fn get_or_convert<E: From<BundleError>>(
        &self,
        key: &CacheKey,
        expected_bytes: u64,
        make: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Cached, E> {
        let entry = self.entry_path(key);
        let mut outcome = CacheOutcome::Made;
        if entry.exists() {
            match self.open_or_discard(&entry, key)? {
                Some(bundle) => {
                    return Ok(Cached {
                        bundle,
                        outcome: CacheOutcome::Hit,
                    });
                }
                None => outcome = CacheOutcome::Healed,
            }
        }
        let folder = self.current();
        let staging = Staging::reserve(&folder)?;
        stage::require_space(&folder, &entry, expected_bytes)?;
        make(staging.path())?;
        {
            // Closed again before the rename: Windows moves no mapped file.
            let made = Bundle::open(staging.path())?;
            let seal = serde_json::to_vec_pretty(&Seal::of(key, &made))
                .expect("invariant: a seal is three strings");
            stage::write_file(&staging.path().join(SEAL_FILE), &seal)?;
        }
        stage::sync_dir(staging.path()).map_err(BundleError::io(staging.path()))?;
        let _lock = lock(&folder)?;
        // Somebody else's entry may be there by now and stays, unless it is
        // damaged.
        if !staging.publish(&entry)? && check_entry(&entry, key).is_err() {
            discard(&entry)?;
            staging.publish(&entry)?;
        }
        let bundle = check_entry(&entry, key)?;
        Ok(Cached { bundle, outcome })
    }

    /// Opens an entry, or removes it when it is damaged. Judging and moving
    /// happen under the generation's lock, so nobody removes what another
    /// process has just repaired.
    fn open_or_discard(&self, entry: &Path, key: &CacheKey) -> Result<Option<Bundle>, BundleError> {
        if let Ok(bundle) = check_entry(entry, key) {
            return Ok(Some(bundle));
        }
        let _lock = lock(stage::parent_of(entry))?;
        if let Ok(bundle) = check_entry(entry, key) {
            return Ok(Some(bundle));
        }
        discard(entry)?;
        Ok(None)
    }

    /// All entries of all generations, sorted by path.
    ///
    /// # Errors
    /// When the cache's folder exists but cannot be read.
    pub fn list(&self) -> Result<Vec<CacheEntry>, BundleError> {
        let mut out = Vec::new();
        for folder in folders_in(&self.bundles())? {
            let made_by = file_name(&folder);
            for path in folders_in(&folder)? {
                let key = file_name(&path);
                if check_hex("key", &key).is_err() {
                    continue;
                }
                let current = made_by == generation();
                let opened = Bundle::open(&path);
                let damage = match (&opened, current) {
                    (_, false) => None,
                    (Err(e), true) => Some(e.to_string()),
                    (Ok(_), true) => check_entry(&path, &CacheKey(key.clone()))
                        .err()
                        .map(|e| e.to_string()),
                };
                out.push(CacheEntry {
                    key,
                    name: opened.ok().map(|b| b.manifest().name.clone()),
                    generation: made_by.clone(),
                    current,
                    bytes: size_on_disk(&path),
                    damage,
                    path,
                });
            }
        }
        Ok(out)
    }

    /// Removes every entry, every remembered digest and every note; gives the
    /// bytes freed.
    /// Conversions at work in other processes are left alone.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn clear(&self) -> Result<u64, BundleError> {
        let mut freed = 0;
        for small in [self.root.join("digests"), self.notes()] {
            freed += remove_folder(&small)?;
        }
        for folder in folders_in(&self.bundles())? {
            let current = file_name(&folder) == generation();
            freed += empty_generation(&folder, current, |_| true)?;
        }
        Ok(freed)
    }

    /// Removes entries and notes of other generations, damaged entries, and what
    /// killed writers left; gives the bytes freed.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn collect(&self) -> Result<u64, BundleError> {
        let mut freed = 0;
        for folder in folders_in(&self.bundles())? {
            let current = file_name(&folder) == generation();
            freed += empty_generation(&folder, current, |entry| {
                !current || check_entry(entry, &CacheKey(file_name(entry))).is_err()
            })?;
        }
        for folder in folders_in(&self.notes())? {
            if file_name(&folder) != generation() {
                freed += remove_folder(&folder)?;
            }
        }
        Ok(freed)
    }

    /// A note that [`keep_note`](Cache::keep_note) kept, unless it is damaged.
    pub fn note(&self, key: &CacheKey) -> Option<Vec<u8>> {
        let content = read_capped(&self.note_path(key), MAX_SMALL_FILE).ok()?;
        let (check, note) = content.split_at_checked(NOTE_CHECK)?;
        (check == note_check(key, note).as_bytes()).then(|| note.to_vec())
    }

    /// Keeps a note of up to 32 KiB, in one step, in place of any before it. A
    /// damaged note counts as none, so it is made and kept anew.
    ///
    /// # Errors
    /// [`BundleError::NoSpace`]; what the file system says; a longer note.
    pub fn keep_note(&self, key: &CacheKey, note: &[u8]) -> Result<(), BundleError> {
        let path = self.note_path(key);
        if note.len() as u64 > MAX_SMALL_FILE / 2 {
            let found = format!("{} bytes, at most {}", note.len(), MAX_SMALL_FILE / 2);
            return Err(BundleError::malformed(path, "note", found));
        }
        let folder = stage::parent_of(&path);
        fs::create_dir_all(folder).map_err(BundleError::io(folder))?;
        let content = [note_check(key, note).as_bytes(), note].concat();
        stage::require_space(folder, &path, content.len() as u64)?;
        stage::replace_file(&path, &content)
    }

    fn note_path(&self, key: &CacheKey) -> PathBuf {
        self.notes().join(generation()).join(&key.0)
    }

    fn notes(&self) -> PathBuf {
        self.root.join("notes")
    }

    /// Digest of a source file, remembered by the file's path, size, time of
    /// change and inode, so that a checkpoint of many gigabytes is hashed once.
    /// A file changed in the last two seconds is not remembered: it could change
    /// again without a new time.
    ///
    /// # Errors
    /// When the file cannot be read. A memo that cannot be written is not an
    /// error.
    pub fn file_digest(&self, path: &Path, progress: &dyn Fn(u64)) -> Result<String, BundleError> {
        let before = FileIdentity::of(path)?;
        let memo = self.root.join("digests").join(&before.id);
        if let Some(digest) = read_memo(&memo, &before.id) {
            return Ok(digest);
        }
        let now = SystemTime::now();
        let digest = file_digest(path, progress)?;
        let settled = now
            .duration_since(before.modified)
            .is_ok_and(|age| age > Duration::from_secs(2));
        if settled && FileIdentity::of(path)?.id == before.id {
            let content = format!("{digest}\n{}\n", memo_check(&before.id, &digest));
            // A read-only cache only costs the time of hashing again.
            let _ = fs::create_dir_all(stage::parent_of(&memo))
                .map_err(BundleError::io(&memo))
                .and_then(|()| stage::replace_file(&memo, content.as_bytes()));
        }
        Ok(digest)
    }
}

/// What tells one state of a file from another without reading it.
struct FileIdentity {
    id: String,
    modified: SystemTime,
}

impl FileIdentity {
    fn of(path: &Path) -> Result<FileIdentity, BundleError> {
        let real = fs::canonicalize(path).map_err(BundleError::io(path))?;
        let metadata = fs::metadata(&real).map_err(BundleError::io(path))?;
        let modified = metadata.modified().map_err(BundleError::io(path))?;
        let nanos = modified
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_nanos());
        let mut hasher = blake3::Hasher::new();
        hasher.update(real.as_os_str().as_encoded_bytes());
        hasher.update(&metadata.len().to_le_bytes());
        hasher.update(&nanos.to_le_bytes());
        hasher.update(&inode(&metadata).to_le_bytes());
        Ok(FileIdentity {
            id: hasher.finalize().to_hex().to_string(),
            modified,
        })
    }
}

#[cfg(unix)]
fn inode(metadata: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

#[cfg(not(unix))]
fn inode(_metadata: &fs::Metadata) -> u64 {
    0
}

/// Ties a memo's digest to its file, so that a damaged memo is not believed.
fn memo_check(id: &str, digest: &str) -> String {
    blake3::hash(format!("{id} {digest}").as_bytes())
        .to_hex()
        .to_string()
}

/// Characters of a note's check.
const NOTE_CHECK: usize = 64;

/// Ties a note to its key.
fn note_check(key: &CacheKey, note: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(key.0.as_bytes()).update(note);
    hasher.finalize().to_hex().to_string()
}

/// Removes a folder and all below it; gives the bytes freed.
fn remove_folder(path: &Path) -> Result<u64, BundleError> {
    let freed = size_on_disk(path);
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(BundleError::io(path)(e)),
        _ => Ok(freed),
    }
}

fn read_memo(path: &Path, id: &str) -> Option<String> {
    let content = String::from_utf8(read_capped(path, MAX_SMALL_FILE).ok()?).ok()?;
    let (digest, check) = content.trim_end().split_once('\n')?;
    check_hex("digest", digest).ok()?;
    (check == memo_check(id, digest)).then(|| digest.to_string())
}

/// Opens an entry and compares it with its seal.
fn check_entry(path: &Path, key: &CacheKey) -> Result<Bundle, BundleError> {
    let bundle = Bundle::open(path)?;
    let seal_path = path.join(SEAL_FILE);
    let json = read_capped(&seal_path, MAX_SMALL_FILE)?;
    let seal: Seal = serde_json::from_slice(&json)
        .map_err(|e| BundleError::malformed(&seal_path, "content", e.to_string()))?;
    if seal != Seal::of(key, &bundle) {
        return Err(BundleError::malformed(
            path,
            "content",
            "is not what was sealed",
        ));
    }
    for f in &bundle.manifest().files {
        let full = path.join(&f.path);
        let found = fs::metadata(&full).map_err(BundleError::io(&full))?.len();
        if found != f.bytes {
            return Err(BundleError::malformed(
                full,
                "size",
                format!("the manifest says {} bytes, found {found}", f.bytes),
            ));
        }
    }
    Ok(bundle)
}

/// Takes an entry out of sight in one step, then removes it.
fn discard(entry: &Path) -> Result<(), BundleError> {
    let aside = Staging::reserve(stage::parent_of(entry))?;
    match fs::rename(entry, aside.path()) {
        Err(e) if entry.exists() => Err(BundleError::io(entry)(e)),
        _ => Ok(()),
    }
}

/// Waits for the lock of a generation's folder, which is held only for as long
/// as it takes to look at an entry and rename it.
fn lock(folder: &Path) -> Result<File, BundleError> {
    let path = folder.join(LOCK_FILE);
    let lock = File::create(&path).map_err(BundleError::io(&path))?;
    match lock.lock() {
        // Without locks the worst is that an entry is made once more.
        Err(e) if e.kind() == std::io::ErrorKind::Unsupported => Ok(lock),
        result => result.map_err(BundleError::io(&path)).map(|()| lock),
    }
}

/// Removes the entries of a generation that `unwanted` picks. The folder itself
/// goes too if nothing is left in it, unless it is the one in use.
fn empty_generation(
    folder: &Path,
    current: bool,
    unwanted: impl Fn(&Path) -> bool,
) -> Result<u64, BundleError> {
    let before = size_on_disk(folder);
    stage::sweep(folder);
    let held = lock(folder)?;
    for path in folders_in(folder)? {
        if check_hex("key", &file_name(&path)).is_ok() && unwanted(&path) {
            discard(&path)?;
        }
    }
    drop(held);
    if !current {
        let _ = fs::remove_file(folder.join(LOCK_FILE));
        let _ = fs::remove_dir(folder);
    }
    Ok(before.saturating_sub(size_on_disk(folder)))
}

fn folders_in(path: &Path) -> Result<Vec<PathBuf>, BundleError> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(BundleError::io(path)(e)),
    };
    let mut out: Vec<PathBuf> = entries
        .flatten()
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| e.path())
        .collect();
    out.sort();
    Ok(out)
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Bytes of all files below a path; what cannot be read counts as nothing.
fn size_on_disk(path: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(path) else {
        return 0;
    };
    entries
        .flatten()
        .map(|e| match e.file_type() {
            Ok(t) if t.is_dir() => size_on_disk(&e.path()),
            Ok(t) if t.is_file() => e.metadata().map_or(0, |m| m.len()),
            _ => 0,
        })
        .sum()
}

/// Where a platform keeps caches.
#[derive(Clone, Copy, Debug)]
enum Platform {
    Xdg,
    Mac,
    Windows,
}

fn default_root(platform: Platform, var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| var(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(root) = path("CARAT_CACHE") {
        return Some(root);
    }
    let base = match platform {
        // A relative XDG path is to be ignored.
        Platform::Xdg => path("XDG_CACHE_HOME")
            .filter(|p| p.is_absolute())
            .or_else(|| Some(path("HOME")?.join(".cache"))),
        Platform::Mac => Some(path("HOME")?.join("Library").join("Caches")),
        Platform::Windows => path("LOCALAPPDATA"),
    };
    Some(base?.join("carat"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_follows_the_platform() {
        let with = |platform, vars: &[(&str, &str)]| {
            default_root(platform, |name| {
                let found = vars.iter().find(|(n, _)| *n == name);
                found.map(|(_, v)| OsString::from(v))
            })
        };
        let path = |p: &str| Some(PathBuf::from(p));
        let home = ("HOME", "/h");
        assert_eq!(with(Platform::Xdg, &[home]), path("/h/.cache/carat"));
        assert_eq!(
            with(Platform::Xdg, &[home, ("XDG_CACHE_HOME", "/x")]),
            path("/x/carat")
        );
        assert_eq!(
            with(Platform::Xdg, &[home, ("XDG_CACHE_HOME", "x")]),
            path("/h/.cache/carat")
        );
        assert_eq!(
            with(Platform::Mac, &[home]),
            path("/h/Library/Caches/carat")
        );
        let local = ("LOCALAPPDATA", "/l");
        assert_eq!(with(Platform::Windows, &[local]), path("/l/carat"));
        let own = ("CARAT_CACHE", "/c");
        assert_eq!(with(Platform::Mac, &[home, own]), path("/c"));
        assert_eq!(with(Platform::Xdg, &[("CARAT_CACHE", "")]), None);
    }

    #[test]
    fn the_sample_sees_a_cut_a_hole_and_both_ends() {
        let bytes: Vec<u8> = (0..4u32 << 20).map(|i| (i * 7 + i / 251) as u8).collect();
        let whole = sample_digest(&bytes);
        assert_eq!(whole, sample_digest(&bytes.clone()));
        assert_ne!(whole, sample_digest(&bytes[..bytes.len() - 1]));
        for at in [0, bytes.len() - 1] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert_ne!(whole, sample_digest(&flipped));
        }
        // Windows are 4 MiB / 63 apart: a zeroed 1/16 of the file holds some.
        let mut holed = bytes.clone();
        holed[1 << 20..(1 << 20) + (1 << 18)].fill(0);
        assert_ne!(whole, sample_digest(&holed));
        sample_digest(&[]);
        sample_digest(&[1]);
    }

    #[test]
    fn keys_depend_on_source_and_options() {
        let key = |a, b| CacheKey::new(a, b);
        assert_eq!(key("s", "o"), key("s", "o"));
        assert_ne!(key("s", "o"), key("s", "p"));
        assert_ne!(key("so", ""), key("s", "o"));
        assert!(check_hex("key", key("s", "o").as_str()).is_ok());
    }
}
