//! A hub on this machine: a plain TCP server that ends with the test, after a
//! minute at the latest.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sha2::Digest as _;

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(crate) const COMMIT_2: &str = "89abcdef0123456789abcdef0123456789abcdef";
const MAX_LIFE: Duration = Duration::from_secs(60);

/// What a client asked.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) path: String,
    /// First byte of a `range` header.
    pub(crate) from: Option<usize>,
    pub(crate) authorization: Option<String>,
}

/// What the server says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// `content-length`, if it is not the body's; `Some(None)` sends none.
    pub(crate) length: Option<Option<u64>>,
    /// Close without any answer.
    pub(crate) hang_up: bool,
}

impl Reply {
    pub(crate) fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self {
            status: 200,
            body: body.into(),
            ..Self::default()
        }
    }

    pub(crate) fn status(status: u16) -> Self {
        Self {
            status,
            ..Self::default()
        }
    }

    pub(crate) fn redirect(to: &str) -> Self {
        Self::status(302).with("location", to)
    }

    pub(crate) fn hang_up() -> Self {
        Self {
            hang_up: true,
            ..Self::default()
        }
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sends `bytes` bytes of the body, then cuts the connection.
    pub(crate) fn cut_after(mut self, bytes: usize) -> Self {
        self.length = Some(Some(self.body.len() as u64));
        self.body.truncate(bytes);
        self
    }

    pub(crate) fn claiming(mut self, length: u64) -> Self {
        self.length = Some(Some(length));
        self
    }
}

/// A running server.
pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) log: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (thread_log, thread_stop) = (Arc::clone(&log), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let start = Instant::now();
            while !thread_stop.load(Ordering::Relaxed) && start.elapsed() < MAX_LIFE {
                match listener.accept() {
                    Ok((stream, _)) => serve(stream, &handler, &thread_log),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        Self {
            url,
            log,
            stop,
            thread: Some(thread),
        }
    }

    /// Requests so far whose path contains `part`.
    pub(crate) fn requests(&self, part: &str) -> Vec<Request> {
        let log = self.log.lock().unwrap();
        log.iter()
            .filter(|request| request.path.contains(part))
            .cloned()
            .collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic in it has been seen as a failed request already.
            let _ = thread.join();
        }
    }
}

/// One request on one connection. Clients that go away early are their own affair.
fn serve(mut stream: TcpStream, handler: &dyn Fn(&Request) -> Reply, log: &Mutex<Vec<Request>>) {
    stream.set_nonblocking(false).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    stream
        .set_write_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() > 1 << 14 || !matches!(stream.read(&mut byte), Ok(1)) {
            return;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.lines();
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
        .collect();
    let from = headers.get("range").map(|range| {
        range
            .strip_prefix("bytes=")
            .unwrap()
            .strip_suffix('-')
            .unwrap()
            .parse()
            .unwrap()
    });
    let request = Request {
        path,
        from,
        authorization: headers.get("authorization").cloned(),
    };
    log.lock().unwrap().push(request.clone());
    let reply = handler(&request);
    if reply.hang_up {
        return;
    }
    let mut answer = format!("HTTP/1.1 {} x\r\nconnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        answer.push_str(&format!("{name}: {value}\r\n"));
    }
    if let Some(length) = reply.length.unwrap_or(Some(reply.body.len() as u64)) {
        answer.push_str(&format!("content-length: {length}\r\n"));
    }
    answer.push_str("\r\n");
    let _ = stream
        .write_all(answer.as_bytes())
        .and_then(|()| stream.write_all(&reply.body));
}

/// A repository `org/name` as a hub shows it.
#[derive(Clone, Debug)]
pub(crate) struct Repo {
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// Whether the listing tells sizes and digests.
    pub(crate) describes: bool,
}

impl Repo {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Self {
        let files = files
            .iter()
            .map(|(name, body)| ((*name).into(), body.to_vec()))
            .collect();
        Self {
            commit: COMMIT.into(),
            files,
            describes: true,
        }
    }

    /// A checkpoint of two shards.
    pub(crate) fn checkpoint() -> Self {
        let map = r#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
        Self::new(&[
            ("README.md", b"# read me"),
            ("config.json", b"{}"),
            ("tokenizer.json", b"{\"model\":{}}"),
            ("model.safetensors.index.json", map.as_bytes()),
            ("model-00001-of-00002.safetensors", &noise(300_000, 1)),
            ("model-00002-of-00002.safetensors", &noise(1_000_000, 2)),
            ("pytorch_model.bin", b"pickle"),
        ])
    }

    /// The listing. Weights are in LFS, the rest in git.
    pub(crate) fn listing(&self) -> serde_json::Value {
        let siblings: Vec<serde_json::Value> = self
            .files
            .iter()
            .map(|(name, body)| {
                if !self.describes {
                    return serde_json::json!({"rfilename": name});
                }
                let mut sibling = serde_json::json!({
                    "rfilename": name, "size": body.len(), "blobId": git_blob(body)
                });
                if is_lfs(name) {
                    sibling["lfs"] = serde_json::json!({
                        "sha256": sha256(body), "size": body.len(), "pointerSize": 134
                    });
                }
                sibling
            })
            .collect();
        serde_json::json!({"id": "org/name", "sha": self.commit, "siblings": siblings})
    }

    /// What an honest hub answers.
    pub(crate) fn answer(&self, request: &Request) -> Reply {
        if request.path.starts_with("/api/models/org/name/revision/") {
            return Reply::ok(self.listing().to_string());
        }
        let prefix = format!("/org/name/resolve/{}/", self.commit);
        let file = request
            .path
            .strip_prefix(&prefix)
            .and_then(|name| Some((name, self.files.get(name)?)));
        let Some((name, body)) = file else {
            return Reply::status(404);
        };
        let etag = if is_lfs(name) {
            sha256(body)
        } else {
            git_blob(body)
        };
        let reply = match request.from {
            None => Reply::ok(body.clone()),
            Some(from) if from < body.len() => {
                let range = format!("bytes {from}-{}/{}", body.len() - 1, body.len());
                let part = Reply {
                    status: 206,
                    body: body[from..].to_vec(),
                    ..Reply::default()
                };
                part.with("content-range", &range)
            }
            Some(_) => return Reply::status(416),
        };
        reply.with("etag", &format!("\"{etag}\""))
    }
}

fn is_lfs(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}

/// Bytes without a pattern, the same for the same seed.
pub(crate) fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&sha2::Sha256::digest(bytes))
}

pub(crate) fn git_blob(bytes: &[u8]) -> String {
    let mut sha = sha1::Sha1::new();
    sha.update(format!("blob {}\0", bytes.len()));
    sha.update(bytes);
    hex(&sha.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
