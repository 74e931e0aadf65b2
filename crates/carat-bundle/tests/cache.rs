//! The cache: made once, healed when damaged, shared between processes.

mod common;

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use carat_bundle::{
    BundleError, Cache,
    cache::{CacheKey, CacheOutcome},
};
use common::*;

fn key() -> CacheKey {
    CacheKey::new("source", "keep")
}

fn get(cache: &Cache) -> CacheOutcome {
    let cached = cache
        .get_or_convert::<BundleError>(&key(), 1, |path| {
            convert_tiny(path);
            Ok(())
        })
        .unwrap();
    assert_eq!(cached.bundle.path(), cache.entry_path(&key()));
    let report = carat_bundle::verify(cached.bundle.path(), &Default::default());
    assert!(report.passed(), "{report}");
    cached.outcome
}

/// Everything below a folder that is no bundle entry.
fn leftovers(cache: &Cache) -> Vec<String> {
    let folder = cache.entry_path(&key());
    let folder = folder.parent().unwrap();
    if !folder.exists() {
        return Vec::new();
    }
    fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.starts_with('.'))
        .collect()
}

#[test]
fn an_entry_is_made_once() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path().join("cache"));
    assert!(cache.get(&key()).is_none());
    assert_eq!(cache.list().unwrap(), vec![]);
    assert_eq!(get(&cache), CacheOutcome::Made);
    assert_eq!(get(&cache), CacheOutcome::Hit);
    assert!(cache.get(&key()).is_some());
    assert!(cache.get(&CacheKey::new("source", "other")).is_none());
    let list = cache.list().unwrap();
    assert_eq!(list.len(), 1);
    let entry = &list[0];
    assert_eq!(entry.key, key().as_str());
    assert_eq!(entry.name.as_deref(), Some("tiny.gguf"));
    assert!(entry.current && entry.damage.is_none());
    let files = contents(&entry.path);
    assert_eq!(
        entry.bytes,
        files.values().map(|b| b.len() as u64).sum::<u64>()
    );
    assert_eq!(leftovers(&cache), Vec::<String>::new());
}

#[test]
fn damage_is_found_and_healed() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    get(&cache);
    let entry = cache.entry_path(&key());
    let truncate = |name: &str| {
        let path = entry.join(name);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    };
    type Damage<'a> = Box<dyn Fn() + 'a>;
    let damages: Vec<(&str, Damage<'_>)> = vec![
        ("weights cut", Box::new(|| truncate("weights.bin"))),
        ("manifest cut", Box::new(|| truncate("manifest.json"))),
        ("seal cut", Box::new(|| truncate("cache-seal.json"))),
        (
            "tokenizer cut",
            Box::new(|| truncate("tokenizer/tokenizer.json")),
        ),
        (
            "weights zeroed",
            Box::new(|| {
                let path = entry.join("weights.bin");
                let n = fs::metadata(&path).unwrap().len() as usize;
                fs::write(&path, vec![0; n]).unwrap();
            }),
        ),
        (
            "weights missing",
            Box::new(|| fs::remove_file(entry.join("weights.bin")).unwrap()),
        ),
        (
            "manifest of another bundle",
            Box::new(|| {
                let path = entry.join("manifest.json");
                let text = fs::read_to_string(&path).unwrap();
                fs::write(&path, text.replace("tiny.gguf", "tidy.gguf")).unwrap();
            }),
        ),
        (
            "no folder at all",
            Box::new(|| {
                fs::remove_dir_all(&entry).unwrap();
                fs::write(&entry, b"").unwrap();
            }),
        ),
    ];
    for (name, damage) in damages {
        damage();
        assert!(cache.get(&key()).is_none(), "{name}");
        if entry.is_dir() {
            assert!(cache.list().unwrap()[0].damage.is_some(), "{name}");
        }
        assert_eq!(get(&cache), CacheOutcome::Healed, "{name}");
        assert_eq!(get(&cache), CacheOutcome::Hit, "{name}");
        assert_eq!(leftovers(&cache), Vec::<String>::new(), "{name}");
    }
}

#[test]
fn a_failed_conversion_leaves_no_entry() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    let e = cache
        .get_or_convert::<BundleError>(&key(), 1, |path| {
            fs::create_dir(path).unwrap();
            fs::write(path.join("weights.bin"), b"half").unwrap();
            Err(BundleError::NotABundle {
                path: path.into(),
                problem: "on purpose".into(),
            })
        })
        .unwrap_err();
    assert!(e.to_string().contains("on purpose"));
    assert!(cache.get(&key()).is_none());
    assert_eq!(leftovers(&cache), Vec::<String>::new());
    assert!(!dir.path().join("bundles").exists());
    // Nor does a conversion that claims success and wrote something else.
    let made = cache.get_or_convert::<BundleError>(&key(), 1, |path| {
        fs::create_dir(path).unwrap();
        Ok(())
    });
    assert!(matches!(made.unwrap_err(), BundleError::NotABundle { .. }));
    assert_eq!(cache.list().unwrap(), vec![]);
}

#[test]
fn too_little_room_is_refused_before_work() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    let result = cache.get_or_convert::<BundleError>(&key(), u64::MAX, |_| {
        panic!("must not be called");
    });
    if cfg!(unix) {
        assert!(matches!(result.unwrap_err(), BundleError::NoSpace { .. }));
    }
}

#[test]
fn threads_that_make_one_entry_all_get_it() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    // Once on an empty cache, once on a damaged entry.
    for round in 0..2 {
        let made = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| match get(&cache) {
                    CacheOutcome::Hit => {}
                    _ => {
                        made.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(made.into_inner() >= 1);
        assert_eq!(leftovers(&cache), Vec::<String>::new());
        assert_eq!(cache.list().unwrap().len(), 1);
        if round == 0 {
            fs::write(cache.entry_path(&key()).join("weights.bin"), b"x").unwrap();
        }
    }
}

/// Not a test of its own: one of the processes of the next test.
#[test]
#[ignore = "run by the test that starts it"]
fn process_that_shares_a_cache() {
    let Some(dir) = std::env::var_os("CARAT_TEST_CACHE_DIR") else {
        return;
    };
    get(&Cache::at(Path::new(&dir)));
}

#[test]
fn processes_that_make_one_entry_all_succeed() {
    let dir = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..4)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "process_that_shares_a_cache", "--ignored"])
                .env("CARAT_TEST_CACHE_DIR", dir.path())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let cache = Cache::at(dir.path());
    assert_eq!(get(&cache), CacheOutcome::Hit);
    assert_eq!(leftovers(&cache), Vec::<String>::new());
}

#[test]
fn other_generations_are_collected_and_everything_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    get(&cache);
    let entry = cache.entry_path(&key());
    let old = dir.path().join("bundles/v0-0.0.1").join(key().as_str());
    fs::create_dir_all(&old).unwrap();
    fs::write(old.join("weights.bin"), [1; 1000]).unwrap();
    // A file that nobody of ours made is not ours to remove.
    let foreign = dir.path().join("bundles/notes.txt");
    fs::write(&foreign, b"x").unwrap();
    let list = cache.list().unwrap();
    assert_eq!(list.len(), 2);
    assert!(list.iter().any(|e| !e.current && e.bytes == 1000));

    assert_eq!(cache.collect().unwrap(), 1000);
    assert!(!old.exists() && !old.parent().unwrap().exists());
    assert_eq!(get(&cache), CacheOutcome::Hit);
    assert_eq!(cache.collect().unwrap(), 0);

    let bytes = cache.list().unwrap()[0].bytes;
    assert_eq!(cache.clear().unwrap(), bytes);
    assert!(!entry.exists() && foreign.exists());
    assert_eq!(get(&cache), CacheOutcome::Made);
}

#[test]
fn digests_are_remembered_until_the_file_changes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path().join("cache"));
    let file = dir.path().join("model.gguf");
    let age = |seconds: u64| {
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
        fs::File::options()
            .write(true)
            .open(&file)
            .unwrap()
            .set_modified(then)
            .unwrap();
    };
    let hashed = AtomicUsize::new(0);
    let digest = || {
        let d = cache
            .file_digest(&file, &|_| {
                hashed.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        assert_eq!(
            d,
            blake3::hash(&fs::read(&file).unwrap()).to_hex().to_string()
        );
        hashed.swap(0, Ordering::Relaxed) > 0
    };
    // Just written: not yet worth remembering.
    fs::write(&file, b"one").unwrap();
    assert!(digest() && digest());
    age(3600);
    assert!(digest() && !digest());
    // Another time, the same size.
    fs::write(&file, b"two").unwrap();
    age(1800);
    assert!(digest() && !digest());
    // A damaged memo is not believed.
    for entry in fs::read_dir(dir.path().join("cache/digests")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let other = if text.starts_with('0') { "1" } else { "0" };
        fs::write(&path, other.to_string() + &text[1..]).unwrap();
    }
    assert!(digest() && !digest());
    assert!(cache.clear().unwrap() > 0);
    assert!(digest());
}

#[test]
fn notes_are_kept_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path().join("cache"));
    let (key, other) = (key(), CacheKey::new("another source", ""));
    assert_eq!(cache.note(&key), None);
    // A note may be empty, and replaces the one before it.
    for note in [&b""[..], b"first", b"second"] {
        cache.keep_note(&key, note).unwrap();
        assert_eq!(cache.note(&key).as_deref(), Some(note));
    }
    assert_eq!(cache.note(&other), None);
    let folder = fs::read_dir(dir.path().join("cache/notes")).unwrap();
    let folder = folder.map(|e| e.unwrap().path()).next().unwrap();
    let path = folder.join(key.as_str());
    let whole = fs::read(&path).unwrap();
    // Cut anywhere, changed anywhere, or of another key, it is none.
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(cache.note(&key), None, "{length} bytes");
    }
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(&path, damaged).unwrap();
        assert_eq!(cache.note(&key), None, "byte {at}");
    }
    fs::write(folder.join(other.as_str()), &whole).unwrap();
    assert_eq!(cache.note(&other), None);
    // It heals, and nothing else lies about.
    cache.keep_note(&key, b"third").unwrap();
    assert_eq!(cache.note(&key).as_deref(), Some(&b"third"[..]));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    let error = cache.keep_note(&key, &[0; 32769]).unwrap_err().to_string();
    assert!(error.contains("32769 bytes"), "{error}");
    assert_eq!(cache.note(&key).as_deref(), Some(&b"third"[..]));
    // Other generations go with `collect`, all of them with `clear`.
    let old = dir.path().join("cache/notes/v0-0.0.1");
    fs::create_dir_all(&old).unwrap();
    fs::write(old.join(key.as_str()), [0; 100]).unwrap();
    assert_eq!(cache.collect().unwrap(), 100);
    assert!(!old.exists() && cache.note(&key).is_some());
    assert!(cache.clear().unwrap() > 0);
    assert_eq!(cache.note(&key), None);
}
