//! Pulls from a hub on this machine: what works, what resumes, what is refused.

mod support;

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use carat_hub::{HubError, NoProgress, Progress, PullOptions, Pulled, find, pull};
use support::{COMMIT, COMMIT_2, Reply, Repo, Request, Server, noise};
use tempfile::TempDir;

const SHARD_1: &str = "model-00001-of-00002.safetensors";
const SHARD_2: &str = "model-00002-of-00002.safetensors";

/// A server and an empty folder of models.
struct Bench {
    server: Server,
    dir: TempDir,
}

impl Bench {
    fn new(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self {
            server: Server::start(handler),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn honest(repo: Repo) -> Self {
        Self::new(move |request| repo.answer(request))
    }

    fn pull(&self, name: &str) -> Result<Pulled, HubError> {
        self.pull_as(name, None, &NoProgress)
    }

    fn pull_as(
        &self,
        name: &str,
        token: Option<&str>,
        progress: &dyn Progress,
    ) -> Result<Pulled, HubError> {
        pull(
            name,
            &PullOptions {
                models_dir: self.dir.path().to_path_buf(),
                hub_endpoint: Some(self.server.url.clone()),
                token: token.map(str::to_owned),
                progress,
            },
        )
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        find(name, self.dir.path())
    }

    /// All files under the folder `hub`, where only whole models may be.
    fn published(&self) -> Vec<PathBuf> {
        files_under(&self.dir.path().join("hub"))
    }

    /// All files in the staging folder.
    fn staged(&self) -> Vec<PathBuf> {
        files_under(&self.dir.path().join(".staging"))
    }
}

fn files_under(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_under(&path))
        } else {
            files.push(path)
        }
    }
    files
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A handler that answers the first requests for `part` with `faults`, and all
/// others honestly.
fn faulty(
    repo: Repo,
    part: &'static str,
    faults: Vec<Box<dyn Fn(Reply) -> Reply + Send + Sync>>,
) -> impl Fn(&Request) -> Reply + Send + Sync {
    let next = AtomicUsize::new(0);
    move |request| {
        let reply = repo.answer(request);
        if request.path.contains(part)
            && let Some(fault) = faults.get(next.fetch_add(1, Ordering::Relaxed))
        {
            return fault(reply);
        }
        reply
    }
}

#[test]
fn a_checkpoint_comes_whole_and_once() {
    let repo = Repo::checkpoint();
    let bench = Bench::honest(repo.clone());
    assert_eq!(bench.find("org/name"), None);
    let pulled = bench.pull("org/name").unwrap();
    assert_eq!(pulled.name, "org/name");
    assert_eq!(pulled.revision.as_deref(), Some(COMMIT));
    assert!(!pulled.already_there);
    assert_eq!(
        names_in(&pulled.path),
        [
            "config.json",
            SHARD_1,
            SHARD_2,
            "model.safetensors.index.json",
            "tokenizer.json"
        ]
    );
    for name in names_in(&pulled.path) {
        assert_eq!(
            fs::read(pulled.path.join(&name)).unwrap(),
            repo.files[&name],
            "{name}"
        );
    }
    assert_eq!(bench.find("org/name"), Some(pulled.path.clone()));
    assert_eq!(
        bench.find(&format!("org/name@{COMMIT}")),
        Some(pulled.path.clone())
    );
    assert_eq!(bench.find("org/name@other"), None);
    assert!(bench.staged().is_empty());

    let fetched = bench.server.requests("/resolve/").len();
    let again = bench.pull("org/name").unwrap();
    assert!(again.already_there);
    assert_eq!(
        (again.name, again.path, again.revision),
        (pulled.name, pulled.path.clone(), pulled.revision)
    );
    assert_eq!(bench.server.requests("/resolve/").len(), fetched);

    // A full commit id needs no hub.
    let asked = bench.server.requests("").len();
    assert!(
        bench
            .pull(&format!("org/name@{COMMIT}"))
            .unwrap()
            .already_there
    );
    assert_eq!(bench.server.requests("").len(), asked);

    // A damaged copy is noticed by its size and fetched again.
    fs::write(pulled.path.join("config.json"), "").unwrap();
    let healed = bench.pull("org/name").unwrap();
    assert!(!healed.already_there);
    assert_eq!(fs::read(healed.path.join("config.json")).unwrap(), b"{}");
}

#[test]
fn a_moved_branch_is_followed() {
    let commit = std::sync::Arc::new(Mutex::new(COMMIT));
    let (for_hub, body) = (commit.clone(), noise(1000, 3));
    let bench = Bench::new(move |request| {
        let mut repo = Repo::new(&[("config.json", b"{}"), ("model.safetensors", &body)]);
        repo.commit = (*for_hub.lock().unwrap()).into();
        repo.answer(request)
    });
    let first = bench.pull("org/name@refs/pr/1").unwrap();
    assert_eq!(first.name, "org/name@refs/pr/1");
    assert_eq!(bench.server.requests("/revision/refs%2Fpr%2F1?").len(), 1);
    *commit.lock().unwrap() = COMMIT_2;
    assert_eq!(bench.find("org/name@refs/pr/1"), Some(first.path.clone()));
    let second = bench.pull("org/name@refs/pr/1").unwrap();
    assert!(!second.already_there);
    assert_ne!(second.path, first.path);
    assert_eq!(bench.find("org/name@refs/pr/1"), Some(second.path));
    assert_eq!(bench.find(&format!("org/name@{COMMIT}")), Some(first.path));
    // The hub must not answer for another commit than the one asked for.
    let other = bench.pull("org/name@ffffffffffffffffffffffffffffffffffffffff");
    assert!(matches!(other, Err(HubError::BadAnswer { .. })));
}

#[test]
fn gguf_files_come_with_their_shards() {
    let one = noise(5000, 4);
    let bench = Bench::honest(Repo::new(&[
        ("q4.gguf", &one),
        ("big/q8-00001-of-00002.gguf", b"first"),
        ("big/q8-00002-of-00002.gguf", b"second"),
        ("cut-00001-of-00002.gguf", b"alone"),
    ]));
    let pulled = bench.pull("org/name:q4.gguf").unwrap();
    assert_eq!(fs::read(&pulled.path).unwrap(), one);
    assert_eq!(bench.find("org/name:q4.gguf"), Some(pulled.path));
    assert!(bench.pull("org/name:q4.gguf").unwrap().already_there);

    let split = bench.pull("org/name:big/q8-00002-of-00002.gguf").unwrap();
    assert!(split.path.ends_with("big/q8-00001-of-00002.gguf"));
    assert_eq!(fs::read(&split.path).unwrap(), b"first");
    let second = split.path.with_file_name("q8-00002-of-00002.gguf");
    assert_eq!(fs::read(&second).unwrap(), b"second");
    assert_eq!(
        bench.find("org/name:big/q8-00001-of-00002.gguf"),
        Some(split.path)
    );
    fs::remove_file(second).unwrap();
    assert_eq!(bench.find("org/name:big/q8-00001-of-00002.gguf"), None);

    let cut = bench.pull("org/name:cut-00001-of-00002.gguf").unwrap_err();
    assert!(
        matches!(&cut, HubError::MissingFile { file, .. } if file == "cut-00002-of-00002.gguf")
    );
    let absent = bench.pull("org/name:q5.gguf").unwrap_err();
    assert!(
        absent.hint().unwrap().contains("q4.gguf"),
        "{:?}",
        absent.hint()
    );
    let whole = bench.pull("org/name").unwrap_err();
    assert!(matches!(whole, HubError::NoWeights { .. }));
    assert!(whole.hint().unwrap().contains("q4.gguf"));
    assert!(bench.staged().is_empty());
}

#[test]
fn a_cut_pull_is_continued_by_the_next() {
    let repo = Repo::checkpoint();
    let bench = Bench::new(faulty(
        repo.clone(),
        SHARD_2,
        vec![
            Box::new(|reply| reply.cut_after(400_000)),
            Box::new(|_| Reply::hang_up()),
        ],
    ));
    let error = bench.pull("org/name").unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert!(bench.published().is_empty());
    assert_eq!(bench.find("org/name"), None);
    let kept = bench.staged();
    let partial = kept
        .iter()
        .find(|path| path.to_string_lossy().ends_with(".part"))
        .unwrap();
    // The cut may lose what had not reached the client yet, never more than was sent.
    let kept_bytes = fs::metadata(partial).unwrap().len() as usize;
    assert!(kept_bytes > 0 && kept_bytes <= 400_000, "{kept_bytes}");

    // What does not belong to the checkpoint does not come along.
    fs::write(partial.with_file_name("stranger.safetensors"), b"x").unwrap();
    let pulled = bench.pull("org/name").unwrap();
    assert_eq!(
        bench.server.requests(SHARD_2).last().unwrap().from,
        Some(kept_bytes)
    );
    assert_eq!(bench.server.requests(SHARD_1).len(), 1);
    assert_eq!(names_in(&pulled.path).len(), 5);
    assert_eq!(
        fs::read(pulled.path.join(SHARD_2)).unwrap(),
        repo.files[SHARD_2]
    );
    assert!(bench.staged().is_empty());
}

#[test]
fn a_cut_connection_is_taken_up_within_one_pull() {
    let repo = Repo::checkpoint();
    let bench = Bench::new(faulty(
        repo.clone(),
        SHARD_2,
        vec![
            Box::new(|reply| reply.cut_after(400_000)),
            Box::new(|reply| reply.cut_after(200_000)),
        ],
    ));
    let progress = Recorder::default();
    let pulled = bench.pull_as("org/name", None, &progress).unwrap();
    assert_eq!(
        fs::read(pulled.path.join(SHARD_2)).unwrap(),
        repo.files[SHARD_2]
    );
    let requests = bench.server.requests(SHARD_2);
    assert_eq!(requests.len(), 3);
    assert!(requests[1].from < requests[2].from);
    // What is told adds up to the sizes, interruptions or not.
    let told = progress.0.take();
    assert_eq!(told.len(), 5);
    for Told {
        what,
        total,
        advanced,
        ended,
    } in told
    {
        assert_eq!(total, Some(repo.files[&what].len() as u64), "{what}");
        assert_eq!(Some(advanced), total, "{what}");
        assert!(ended, "{what}");
    }
}

/// Everything begun, with what was told of it.
#[derive(Default)]
struct Recorder(RefCell<Vec<Told>>);

struct Told {
    what: String,
    total: Option<u64>,
    advanced: u64,
    ended: bool,
}

impl Progress for Recorder {
    fn begin(&self, what: &str, total: Option<u64>) {
        let what = what.to_owned();
        self.0.borrow_mut().push(Told {
            what,
            total,
            advanced: 0,
            ended: false,
        });
    }
    fn advance(&self, bytes: u64) {
        self.0.borrow_mut().last_mut().unwrap().advanced += bytes;
    }
    fn end(&self) {
        self.0.borrow_mut().last_mut().unwrap().ended = true;
    }
}

#[test]
fn a_server_without_ranges_is_asked_from_the_start() {
    let repo = Repo::checkpoint();
    let whole = repo.files[SHARD_2].clone();
    for refusal in [Reply::ok(whole), Reply::status(416)] {
        let bench = Bench::new(faulty(
            repo.clone(),
            SHARD_2,
            vec![
                Box::new(|reply| reply.cut_after(400_000)),
                Box::new(move |_| refusal.clone()),
            ],
        ));
        let pulled = bench.pull("org/name").unwrap();
        assert_eq!(
            fs::read(pulled.path.join(SHARD_2)).unwrap(),
            repo.files[SHARD_2]
        );
        assert!(bench.server.requests(SHARD_2)[1].from.is_some());
    }
}

#[test]
fn parts_that_were_not_asked_for_are_refused() {
    let repo = Repo::checkpoint();
    for range in [
        "bytes 7-999999/1000000",
        "nonsense",
        "bytes 0-999999/1000000",
    ] {
        let bench = Bench::new(faulty(
            repo.clone(),
            SHARD_2,
            vec![
                Box::new(|reply| reply.cut_after(400_000)),
                Box::new(move |reply| {
                    Reply {
                        headers: Vec::new(),
                        ..reply
                    }
                    .with("content-range", range)
                }),
            ],
        ));
        let error = bench.pull("org/name").unwrap_err();
        assert!(
            matches!(error, HubError::BadAnswer { .. }),
            "{range}: {error}"
        );
        assert!(bench.published().is_empty());
    }
}

#[test]
fn wrong_content_is_refused_and_not_kept() {
    // One file of each kind of digest: SHA-256 and git blob id.
    for file in [SHARD_2, "config.json"] {
        let bench = Bench::new(faulty(
            Repo::checkpoint(),
            file,
            vec![Box::new(|mut reply| {
                reply.body[0] ^= 1;
                reply
            })],
        ));
        let error = bench.pull("org/name").unwrap_err();
        let HubError::Digest {
            file: named,
            expected,
            found,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert!(named.contains(file));
        assert_ne!(expected, found);
        assert!(error.hint().is_some());
        assert!(bench.published().is_empty());
        assert!(
            !bench
                .staged()
                .iter()
                .any(|path| path.to_string_lossy().contains(file))
        );
        bench.pull("org/name").unwrap();
    }
}

#[test]
fn a_spoilt_remainder_is_found_out_and_dropped() {
    let repo = Repo::checkpoint();
    let cut: Vec<Box<dyn Fn(Reply) -> Reply + Send + Sync>> = vec![
        Box::new(|reply| reply.cut_after(400_000)),
        Box::new(|_| Reply::hang_up()),
    ];
    let bench = Bench::new(faulty(repo.clone(), SHARD_2, cut));
    bench.pull("org/name").unwrap_err();
    let staged = bench.staged();
    let partial = staged
        .iter()
        .find(|path| path.to_string_lossy().ends_with(".part"))
        .unwrap();
    let mut bytes = fs::read(partial).unwrap();
    bytes[17] ^= 1;
    fs::write(partial, bytes).unwrap();
    assert!(matches!(
        bench.pull("org/name"),
        Err(HubError::Digest { .. })
    ));
    let pulled = bench.pull("org/name").unwrap();
    assert_eq!(bench.server.requests(SHARD_2).last().unwrap().from, None);
    assert_eq!(
        fs::read(pulled.path.join(SHARD_2)).unwrap(),
        repo.files[SHARD_2]
    );
}

#[test]
fn a_remainder_longer_than_the_file_is_dropped() {
    let repo = Repo::checkpoint();
    let cut: Vec<Box<dyn Fn(Reply) -> Reply + Send + Sync>> = vec![
        Box::new(|reply| reply.cut_after(400_000)),
        Box::new(|_| Reply::hang_up()),
    ];
    let bench = Bench::new(faulty(repo.clone(), SHARD_2, cut));
    bench.pull("org/name").unwrap_err();
    let staged = bench.staged();
    let partial = staged
        .iter()
        .find(|path| path.to_string_lossy().ends_with(".part"))
        .unwrap();
    fs::write(partial, noise(2_000_000, 9)).unwrap();
    let pulled = bench.pull("org/name").unwrap();
    assert_eq!(
        fs::read(pulled.path.join(SHARD_2)).unwrap(),
        repo.files[SHARD_2]
    );
}

#[test]
fn refusals_are_told_apart_and_hinted() {
    for (status, token, hint) in [
        (401, None, "HF_TOKEN"),
        (403, None, "HF_TOKEN"),
        (403, Some("secret"), "licence"),
        (404, None, "spelling"),
        (429, None, "wait"),
    ] {
        let bench = Bench::new(move |_| Reply::status(status));
        let error = bench.pull_as("org/name", token, &NoProgress).unwrap_err();
        let hint_found = error.hint().unwrap();
        assert!(hint_found.contains(hint), "{status}: {hint_found}");
        assert!(!format!("{error} {error:?}").contains("secret"));
        let expected = match status {
            401 | 403 => matches!(error, HubError::Denied { .. }),
            404 => matches!(error, HubError::NotFound { .. }),
            _ => matches!(error, HubError::RateLimited { .. }),
        };
        assert!(expected, "{error}");
        let sent = bench.server.requests("")[0].authorization.clone();
        assert_eq!(sent, token.map(|token| format!("Bearer {token}")));
        assert!(bench.published().is_empty());
    }
    let bench = Bench::new(|_| Reply::status(503));
    assert!(matches!(
        bench.pull("org/name"),
        Err(HubError::BadAnswer { .. })
    ));
}

#[test]
fn a_listed_file_may_be_absent_or_gated() {
    for status in [404, 403] {
        let bench = Bench::new(faulty(
            Repo::checkpoint(),
            SHARD_1,
            vec![Box::new(move |_| Reply::status(status))],
        ));
        let error = bench.pull("org/name").unwrap_err();
        assert!(error.to_string().contains(SHARD_1), "{error}");
        assert!(bench.published().is_empty());
    }
}

#[test]
fn hostile_names_write_nothing() {
    for name in [
        "../evil.safetensors",
        "/evil.safetensors",
        "..\\evil.safetensors",
        "x/../../e",
    ] {
        let mut repo = Repo::checkpoint();
        repo.files.insert(name.into(), b"evil".to_vec());
        let bench = Bench::honest(repo);
        let error = bench.pull("org/name").unwrap_err();
        assert!(matches!(error, HubError::HostileName { .. }), "{error}");
        assert!(bench.server.requests("/resolve/").is_empty());
        assert!(bench.published().is_empty() && bench.staged().is_empty());
    }
    let mut repo = Repo::checkpoint();
    let map = r#"{"weight_map":{"a":"../../../evil.safetensors"}}"#;
    repo.files.insert(
        "model.safetensors.index.json".into(),
        map.as_bytes().to_vec(),
    );
    let bench = Bench::honest(repo);
    assert!(matches!(
        bench.pull("org/name"),
        Err(HubError::HostileName { .. })
    ));
    assert!(bench.published().is_empty());
}

#[test]
fn a_missing_shard_is_noticed_before_any_weights() {
    let mut repo = Repo::checkpoint();
    repo.files.remove(SHARD_2);
    let bench = Bench::honest(repo);
    let error = bench.pull("org/name").unwrap_err();
    assert!(
        matches!(&error, HubError::MissingFile { file, .. } if file == SHARD_2),
        "{error}"
    );
    assert!(bench.server.requests(SHARD_1).is_empty());
}

#[test]
fn pickled_weights_are_not_fetched() {
    let bench = Bench::honest(Repo::new(&[
        ("config.json", b"{}"),
        ("pytorch_model.bin", b"x"),
    ]));
    let error = bench.pull("org/name").unwrap_err();
    assert!(matches!(error, HubError::NoWeights { .. }));
    assert!(error.hint().unwrap().contains("safetensors"));
    assert!(bench.server.requests("/resolve/").is_empty());
}

#[test]
fn lies_about_lengths_cost_little() {
    let start = Instant::now();
    // A file that claims to be huge, against its listing.
    let bench = Bench::new(faulty(
        Repo::checkpoint(),
        SHARD_2,
        vec![Box::new(|reply| reply.claiming(1 << 60))],
    ));
    assert!(matches!(bench.pull("org/name"), Err(HubError::Size { .. })));
    // One that claims so where the listing is silent.
    let mut silent = Repo::checkpoint();
    silent.describes = false;
    let bench = Bench::new(faulty(
        silent,
        SHARD_2,
        vec![Box::new(|reply| reply.claiming(1 << 60))],
    ));
    assert!(matches!(
        bench.pull("org/name"),
        Err(HubError::TooLarge { .. })
    ));
    // A listing that does.
    let bench = Bench::new(|_| Reply::ok("{}").claiming(1 << 60));
    bench.pull("org/name").unwrap_err();
    // A listing that is.
    let bench = Bench::new(|_| Reply::ok(vec![b' '; 40 << 20]));
    assert!(matches!(
        bench.pull("org/name"),
        Err(HubError::TooLarge { .. })
    ));
    // A listed size beyond reason.
    let bench = Bench::new(|_| {
        let mut listing =
            Repo::new(&[("config.json", b"{}"), ("model.safetensors", b"x")]).listing();
        listing["siblings"][1]["lfs"]["size"] = serde_json::json!(u64::MAX);
        Reply::ok(listing.to_string())
    });
    assert!(matches!(
        bench.pull("org/name"),
        Err(HubError::TooLarge { .. })
    ));
    // More content than announced, without a length.
    let bench = Bench::new(faulty(
        Repo::checkpoint(),
        SHARD_1,
        vec![Box::new(|reply| Reply {
            body: vec![0; 2_000_000],
            length: Some(None),
            ..reply
        })],
    ));
    assert!(matches!(bench.pull("org/name"), Err(HubError::Size { .. })));
    assert!(bench.published().is_empty());
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn broken_listings_are_refused() {
    for body in [
        "",
        "null",
        "[]",
        "{\"sha\": 5}",
        "{\"siblings\": []}",
        "<html>",
        "{\"sha\":\"../x\",\"siblings\":[]}",
    ] {
        let bench = Bench::new(move |_| Reply::ok(body));
        assert!(
            matches!(bench.pull("org/name"), Err(HubError::BadAnswer { .. })),
            "{body}"
        );
    }
}

#[test]
fn redirects_are_followed_without_the_token() {
    let repo = Repo::checkpoint();
    let store_repo = repo.clone();
    // The store knows files by another path, and its ETag means nothing.
    let store = Server::start(move |request| {
        let path = request
            .path
            .replace("/blobs/", &format!("/org/name/resolve/{COMMIT}/"));
        let mut reply = store_repo.answer(&Request {
            path,
            ..request.clone()
        });
        reply.headers.retain(|(name, _)| name != "etag");
        reply.with("etag", "\"0000000000000000000000000000000000000000\"")
    });
    let store_url = store.url.clone();
    let mut hub_repo = repo.clone();
    // Digest and size come with the redirect only.
    hub_repo.describes = false;
    let bench = Bench::new(move |request| {
        let Some((_, file)) = request.path.split_once(&format!("/resolve/{COMMIT}/")) else {
            return hub_repo.answer(request);
        };
        let body = &hub_repo.files[file];
        let (to, etag) = if file.ends_with(".safetensors") {
            (format!("{store_url}/blobs/{file}"), support::sha256(body))
        } else if request.path.starts_with("/moved") {
            return Reply::ok(body.clone())
                .with("etag", &format!("\"{}\"", support::git_blob(body)));
        } else {
            (format!("/moved{}", request.path), support::git_blob(body))
        };
        Reply::redirect(&to)
            .with("x-linked-etag", &format!("\"{etag}\""))
            .with("x-linked-size", &body.len().to_string())
    });
    let pulled = bench
        .pull_as("org/name", Some("secret"), &NoProgress)
        .unwrap();
    for name in names_in(&pulled.path) {
        assert_eq!(
            fs::read(pulled.path.join(&name)).unwrap(),
            repo.files[&name],
            "{name}"
        );
    }
    let at_hub = bench.server.requests("");
    assert!(
        at_hub
            .iter()
            .all(|r| r.authorization.as_deref() == Some("Bearer secret"))
    );
    assert!(at_hub.iter().any(|r| r.path.starts_with("/moved")));
    let at_store = store.requests("");
    assert_eq!(at_store.len(), 2);
    assert!(
        at_store
            .iter()
            .all(|request| request.authorization.is_none())
    );
}

#[test]
fn redirects_end() {
    let bench = Bench::new(|_| Reply::redirect("/round"));
    let error = bench.pull("org/name").unwrap_err();
    assert!(matches!(error, HubError::BadAnswer { .. }), "{error}");
    assert!(bench.server.requests("").len() < 12);
    for location in ["file:///etc/passwd", "", "https://"] {
        let bench = Bench::new(move |_| Reply::redirect(location));
        let error = bench.pull("org/name").unwrap_err();
        assert!(
            !matches!(error, HubError::NotFound { .. }),
            "{location}: {error}"
        );
    }
}

#[test]
fn a_hub_without_digests_is_not_trusted() {
    let mut repo = Repo::checkpoint();
    repo.describes = false;
    let without = repo.clone();
    let bench = Bench::new(move |request| {
        let mut reply = without.answer(request);
        reply.headers.retain(|(name, _)| name != "etag");
        reply
    });
    let error = bench.pull("org/name").unwrap_err();
    assert!(matches!(error, HubError::NoDigest { .. }), "{error}");
    assert!(bench.published().is_empty());
    // ETags of the hub itself are digests, and are enough.
    let bench = Bench::honest(repo);
    bench.pull("org/name").unwrap();
}

#[test]
fn no_hub_is_a_quick_error() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let dir = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let options = PullOptions {
        models_dir: dir.path().to_path_buf(),
        hub_endpoint: Some(format!("http://127.0.0.1:{port}")),
        token: None,
        progress: &NoProgress,
    };
    let error = pull("org/name", &options).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert!(error.hint().unwrap().contains("network"));
    assert!(start.elapsed() < Duration::from_secs(15));
}

#[test]
fn a_server_without_tls_is_no_https_hub() {
    let bench = Bench::honest(Repo::checkpoint());
    let options = PullOptions {
        models_dir: bench.dir.path().to_path_buf(),
        hub_endpoint: Some(bench.server.url.replace("http:", "https:")),
        token: Some("secret".into()),
        progress: &NoProgress,
    };
    let error = pull("org/name", &options).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert!(bench.server.requests("").is_empty());
}
