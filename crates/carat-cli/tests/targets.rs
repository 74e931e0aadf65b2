//! Targets that take nothing: full and read-only file systems.
#![cfg(target_os = "linux")]

mod common;

use std::{
    io::Write as _,
    process::{Command, Output},
};

use common::{Place, text, wren};
use serde_json::json;

/// Says that something is skipped, past the capture of passing tests.
fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Runs a script with carat as `$CARAT`, in the place.
fn script(place: &Place, program: &[&str], script: &str) -> Output {
    Command::new(program[0])
        .args(&program[1..])
        .args(["sh", "-c", script])
        .env("CARAT", env!("CARGO_BIN_EXE_carat"))
        .env("MODEL", wren())
        .env("CARAT_CACHE", place.path("cache"))
        .env("HOME", place.path(""))
        .env("RUST_BACKTRACE", "0")
        .current_dir(place.path(""))
        .output()
        .unwrap()
}

/// The command failed on its input and said so of `culprit`.
fn fails(output: &Output, culprit: &str) {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("error: ") && err.contains(culprit), "{err}");
    assert!(output.stdout.is_empty(), "{output:?}");
}

/// Whether tests may mount a file system of their own.
fn can_mount(place: &Place) -> bool {
    std::fs::create_dir_all(place.path("mnt")).unwrap();
    let probe = "mount -t tmpfs -o size=64k none mnt";
    let can = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", probe])
        .current_dir(place.path(""))
        .output()
        .is_ok_and(|o| o.status.success());
    if !can {
        skipped("no file system of its own can be mounted here");
    }
    can
}

const NAMESPACE: [&str; 4] = ["unshare", "--user", "--map-root-user", "--mount"];

#[test]
fn a_full_file_system_gets_no_half_result() {
    let place = Place::new();
    place.json("ids.json", &json!([1, 2, 3, 4, 5, 6, 7, 8]));
    if !can_mount(&place) {
        return;
    }
    let mount = "mount -t tmpfs -o size=64k none mnt && ";
    let left = "; code=$?; find mnt -mindepth 1 >left; exit $code";
    for (command, culprit) in [
        ("\"$CARAT\" convert \"$MODEL\" mnt/out", "mnt"),
        (
            "CARAT_CACHE=mnt/cache \"$CARAT\" run \"$MODEL\" Hi",
            "mnt/cache",
        ),
        // Eight rows of 2,056 logits: 65,792 bytes and a header.
        (
            "\"$CARAT\" logits \"$MODEL\" --no-cache --ids ids.json --out mnt/out",
            "mnt/out",
        ),
    ] {
        let output = script(&place, &NAMESPACE, &format!("{mount}{command}{left}"));
        fails(&output, culprit);
        let left = std::fs::read_to_string(place.path("left")).unwrap();
        // A cache keeps its folders, never an entry.
        assert!(!left.contains("weights.bin"), "{command}: {left}");
        assert!(!left.contains("mnt/out"), "{command}: {left}");
    }
}

#[test]
fn a_limit_on_the_size_of_files_gets_no_half_result() {
    let place = Place::new();
    place.json("ids.json", &json!([1, 2, 3, 4, 5, 6, 7, 8]));
    // Blocks of 512 bytes; without the trap the signal would end the process.
    let limit = "trap '' XFSZ; ulimit -f 100; ";
    for command in [
        "exec \"$CARAT\" convert \"$MODEL\" out",
        "exec \"$CARAT\" logits \"$MODEL\" --no-cache --ids ids.json --out out",
    ] {
        let output = script(&place, &["env"], &format!("{limit}{command}"));
        fails(&output, "out");
        assert_eq!(place.names(), ["ids.json"], "{command}");
    }
}

#[test]
fn a_read_only_file_system_is_named() {
    let place = Place::new();
    place.json("ids.json", &json!([1, 2, 3]));
    if !can_mount(&place) {
        return;
    }
    let mount = "mount -t tmpfs -o ro none mnt && ";
    for (command, culprit) in [
        ("\"$CARAT\" convert \"$MODEL\" mnt/out", "mnt"),
        (
            "\"$CARAT\" logits \"$MODEL\" --no-cache --ids ids.json --out mnt/out",
            "mnt/out",
        ),
        (
            "CARAT_CACHE=mnt/cache \"$CARAT\" run \"$MODEL\" Hi",
            "mnt/cache",
        ),
    ] {
        let output = script(&place, &NAMESPACE, &format!("{mount}{command}"));
        fails(&output, culprit);
    }
}

#[test]
fn a_read_only_folder_is_named() {
    use std::os::unix::fs::PermissionsExt as _;
    let place = Place::new();
    let ids = place.json("ids.json", &json!([1, 2, 3]));
    let folder = place.path("locked");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o555)).unwrap();
    if std::fs::write(folder.join("probe"), "").is_ok() {
        skipped("this user may write into any folder");
        return;
    }
    let out = text(folder.join("out"));
    let model = wren();
    place
        .run(&["convert", &model, &out])
        .fails(2)
        .says("locked");
    let logits = ["logits", &model, "--ids", &ids, "--out", &out];
    place.run(&logits).fails(2).says("locked");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

/// A pipe gets the bytes and a link's target is written: neither is replaced.
#[test]
fn pipes_and_links_are_written_to_not_replaced() {
    let place = Place::new();
    place.json("ids.json", &json!([86, 389, 78]));
    let output = script(
        &place,
        &["env"],
        "mkfifo pipe && : > file && ln -s file link \
         && { cat pipe > piped & } \
         && \"$CARAT\" logits \"$MODEL\" --ids ids.json --out pipe \
         && wait && \"$CARAT\" logits \"$MODEL\" --ids ids.json --out link \
         && test -p pipe && test -L link && test -s file && cmp piped file",
    );
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
}
