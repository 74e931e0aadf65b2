//! A bundle is there whole or not at all.

mod common;

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use carat_bundle::{
    Bundle, BundleError, BundleWriter, ConvertOptions, TensorToStore, convert,
    manifest::WeightsKind, spec::TensorRole, writer::WriterOptions,
};
use carat_tensor::{DType, Shape};
use common::*;

/// Says that a test is skipped. Written past the capture of passing tests.
fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

fn names(dir: &Path) -> Vec<String> {
    let mut out: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    out.sort();
    out
}

fn try_convert(target: &Path, options: &ConvertOptions<'_>) -> Result<(), BundleError> {
    let spec = spec(1);
    let source = MemorySource::random(&spec, DType::Q4_0, DType::F16);
    let kind = WeightsKind::Quantized;
    convert(&source, &spec, &text(), origin(kind), options, target).map(|_| ())
}

fn add_a_tensor(writer: &mut BundleWriter) {
    let shape = Shape::from([40, 256]);
    writer
        .add_tensor(TensorToStore {
            name: "embed.weight",
            role: TensorRole::Embedding,
            dtype: DType::F16,
            shape: &shape,
            data: &vec![1; 40 * 512],
        })
        .unwrap();
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("new/parents/b");
    let mut writer = BundleWriter::create(&target, WriterOptions::default()).unwrap();
    add_a_tensor(&mut writer);
    assert!(!target.exists());
    drop(writer);
    assert_eq!(names(dir.path()), Vec::<String>::new());
}

#[test]
fn only_bundles_are_replaced_and_only_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("b");
    let plain = ConvertOptions::default();
    let overwrite = ConvertOptions {
        overwrite: true,
        ..ConvertOptions::default()
    };

    fs::write(&target, b"a file").unwrap();
    for options in [&plain, &overwrite] {
        let e = try_convert(&target, options).unwrap_err();
        assert!(matches!(e, BundleError::Exists { .. }), "{e}");
    }
    assert_eq!(fs::read(&target).unwrap(), b"a file");
    fs::remove_file(&target).unwrap();

    fs::create_dir(&target).unwrap();
    fs::write(target.join("thesis.txt"), b"years").unwrap();
    fs::write(target.join("manifest.json"), b"{\"schema\":\"web\"}").unwrap();
    for options in [&plain, &overwrite] {
        let e = try_convert(&target, options).unwrap_err().to_string();
        assert!(e.contains("never overwritten"), "{e}");
    }
    assert_eq!(names(&target), ["manifest.json", "thesis.txt"]);
    fs::remove_dir_all(&target).unwrap();

    // An empty folder may be filled.
    fs::create_dir(&target).unwrap();
    try_convert(&target, &plain).unwrap();
    let e = try_convert(&target, &plain).unwrap_err().to_string();
    assert!(e.contains("is a bundle already"), "{e}");

    // A bundle that is damaged or of another version may be replaced too.
    fs::write(
        target.join("manifest.json"),
        b"{\"schema\":\"carat.bundle\",\"version\":9}",
    )
    .unwrap();
    fs::write(target.join("old"), b"x").unwrap();
    let before = Bundle::open(&target);
    assert!(before.is_err());
    try_convert(&target, &overwrite).unwrap();
    Bundle::open(&target).unwrap();
    assert!(!target.join("old").exists());
    assert_eq!(names(dir.path()), ["b"]);
}

#[test]
fn a_failed_overwrite_keeps_the_old_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("b");
    convert_tiny(&target);
    let before = contents(&target);
    let spec = spec(1);
    let mut source = MemorySource::random(&spec, DType::Q8_0, DType::F16);
    source.tensors.get_mut("head.weight").unwrap().1.pop();
    let options = ConvertOptions {
        overwrite: true,
        ..ConvertOptions::default()
    };
    let kind = WeightsKind::Quantized;
    convert(&source, &spec, &text(), origin(kind), &options, &target).unwrap_err();
    assert!(contents(&target) == before);
    assert_eq!(names(dir.path()), ["b"]);
}

#[test]
fn two_writers_of_one_target_cannot_mix() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("b");
    let results: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| try_convert(&target, &ConvertOptions::default())))
            .collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1);
    for e in results.into_iter().filter_map(Result::err) {
        assert!(matches!(e, BundleError::Exists { .. }), "{e}");
    }
    let report = carat_bundle::verify(&target, &Default::default());
    assert!(report.passed(), "{report}");
    assert_eq!(names(dir.path()), ["b"]);
}

#[test]
fn a_target_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let e = try_convert(&file.join("b"), &ConvertOptions::default()).unwrap_err();
    assert!(e.to_string().contains("file"), "{e}");
    assert_eq!(names(dir.path()), ["file"]);
    for nameless in ["", "/", ".."] {
        let e = try_convert(Path::new(nameless), &ConvertOptions::default()).unwrap_err();
        assert!(
            matches!(e, BundleError::Exists { .. } | BundleError::Io { .. }),
            "{e}"
        );
    }
}

#[cfg(unix)]
#[test]
fn a_read_only_folder_stays_empty() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("ro");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(folder.join("probe"), b"").is_ok() {
        // The superuser may write anywhere; the tmpfs test covers that case.
        skipped("this user may write to read-only folders");
        return;
    }
    let e = try_convert(&folder.join("b"), &ConvertOptions::default()).unwrap_err();
    assert!(e.to_string().contains("ro"), "{e}");
    assert_eq!(names(&folder), Vec::<String>::new());
}

/// A tiny file system of our own, where the system lets us have one.
#[cfg(target_os = "linux")]
struct Tmpfs<'a>(&'a Path);

#[cfg(target_os = "linux")]
impl Tmpfs<'_> {
    fn mount<'a>(path: &'a Path, options: &str) -> Option<Tmpfs<'a>> {
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "carat-test"])
            .arg(path)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success());
        if !done {
            skipped("no tmpfs can be mounted here");
        }
        done.then_some(Tmpfs(path))
    }
}

#[cfg(target_os = "linux")]
impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = Tmpfs::mount(dir.path(), "size=256k") else {
        return;
    };
    let target = disk.0.join("b");
    // Found out before anything is written.
    let e = try_convert(&target, &ConvertOptions::default()).unwrap_err();
    assert!(matches!(e, BundleError::NoSpace { .. }), "{e}");
    assert_eq!(names(disk.0), Vec::<String>::new());
    // Found out by writing, as when somebody else fills the disk meanwhile.
    let mut writer = BundleWriter::create(&target, WriterOptions::default()).unwrap();
    let shape = Shape::from([2048, 256]);
    let result = writer.add_tensor(TensorToStore {
        name: "embed.weight",
        role: TensorRole::Embedding,
        dtype: DType::F32,
        shape: &shape,
        data: &vec![1; 2 << 20],
    });
    let e = result.unwrap_err();
    assert!(
        matches!(&e, BundleError::Io { source, .. }
            if source.kind() == std::io::ErrorKind::StorageFull),
        "{e}"
    );
    assert!(e.to_string().contains("b/weights.bin"), "{e}");
    drop(writer);
    assert_eq!(names(disk.0), Vec::<String>::new());
}

#[cfg(target_os = "linux")]
#[test]
fn a_read_only_disk_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = Tmpfs::mount(dir.path(), "size=64k,ro") else {
        return;
    };
    let e = try_convert(&disk.0.join("b"), &ConvertOptions::default()).unwrap_err();
    assert!(
        matches!(&e, BundleError::Io { source, .. }
            if source.kind() == std::io::ErrorKind::ReadOnlyFilesystem),
        "{e}"
    );
}

/// Not a test of its own: the process that `a_killed_writer…` kills.
#[test]
#[ignore = "run by the test that kills it"]
fn writer_to_be_killed() {
    let Some(dir) = std::env::var_os("CARAT_TEST_KILL_DIR") else {
        return;
    };
    let dir = Path::new(&dir);
    let mut writer = BundleWriter::create(&dir.join("b"), WriterOptions::default()).unwrap();
    add_a_tensor(&mut writer);
    fs::write(dir.join("ready"), b"").unwrap();
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_killed_writer_leaves_nothing_that_opens_and_is_cleaned_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "writer_to_be_killed", "--ignored"])
        .env("CARAT_TEST_KILL_DIR", dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !dir.path().join("ready").exists() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "the child is stuck"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    // While it lives, nobody takes its folder away.
    let other = dir.path().join("other");
    convert_tiny(&other);
    let staged = || -> Vec<String> {
        let all = names(dir.path());
        all.into_iter()
            .filter(|n| n.starts_with(".carat-staging-"))
            .collect()
    };
    assert_eq!(staged().len(), 2, "a folder and its lock: {:?}", staged());

    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!dir.path().join("b").exists());
    let left = staged();
    assert_eq!(left.len(), 2);
    let e = Bundle::open(&dir.path().join(&left[0])).unwrap_err();
    assert!(matches!(e, BundleError::NotABundle { .. }), "{e}");

    convert_tiny(&dir.path().join("b"));
    assert_eq!(names(dir.path()), ["b", "other", "ready"]);
}
