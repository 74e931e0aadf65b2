//! One file from a hub: resumed, counted, hashed.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::digest::{CHUNK_BYTES, Digest, Hasher, hash_file};
use crate::http::{Answer, Client, encode_path};
use crate::name::shorten;
use crate::store::{create_parent, publish_file, remove_file};
use crate::{HubError, Progress};

/// Largest single file, in bytes: beyond any that hubs accept.
pub(crate) const MAX_FILE_BYTES: u64 = 1 << 40;
/// How often one pull takes up a broken transfer again, given that each try
/// brought some bytes.
const MAX_TRIES: u32 = 6;
const PAUSE: Duration = Duration::from_millis(500);

/// A file to fetch.
#[derive(Clone, Debug)]
pub(crate) struct Remote<'a> {
    /// `org/name`.
    pub(crate) repo: &'a str,
    /// Full commit id.
    pub(crate) commit: &'a str,
    /// Path in the repository.
    pub(crate) path: &'a str,
    /// Size by the listing, in bytes.
    pub(crate) bytes: Option<u64>,
    /// Digest by the listing.
    pub(crate) digest: Option<&'a Digest>,
}

/// Fetches `remote` to `target`, which lies in a staging folder. A former
/// partial transfer (`target` with `.part`) is continued. On success `target`
/// has the published size and digest and is synced; otherwise it's absent.
pub(crate) fn fetch(
    client: &Client,
    remote: &Remote,
    target: &Path,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    if let (Ok(metadata), Some(bytes)) = (fs::metadata(target), remote.bytes) {
        // Verified when it got this name.
        if metadata.len() == bytes {
            progress.begin(remote.path, Some(bytes));
            progress.advance(bytes);
            progress.end();
            return Ok(());
        }
        remove_file(target)?;
    }
    let mut transfer = Transfer::open(remote, target, progress)?;
    for tries_left in (0..MAX_TRIES).rev() {
        let before = transfer.received;
        match transfer.advance(client) {
            Ok(()) => return transfer.finish(target),
            Err(HubError::BrokenOff { .. }) if tries_left > 0 && transfer.received > before => {
                std::thread::sleep(PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
    Err(transfer.broken_off("too many interruptions"))
}

struct Transfer<'a> {
    remote: &'a Remote<'a>,
    progress: &'a dyn Progress,
    partial: PathBuf,
    file: File,
    /// Bytes in `file`.
    received: u64,
    /// Expected size, once known.
    bytes: Option<u64>,
    /// Expected digest, once known.
    digest: Option<Digest>,
    /// Digest of the bytes in `file`, once its kind and the size are known.
    hasher: Option<Hasher>,
    begun: bool,
}

impl<'a> Transfer<'a> {
    fn open(
        remote: &'a Remote<'a>,
        target: &Path,
        progress: &'a dyn Progress,
    ) -> Result<Self, HubError> {
        let mut partial = target.as_os_str().to_owned();
        partial.push(".part");
        let partial = PathBuf::from(partial);
        create_parent(&partial)?;
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&partial)
            .map_err(HubError::io("open", &partial))?;
        let received = file
            .metadata()
            .map_err(HubError::io("examine", &partial))?
            .len();
        let mut transfer = Self {
            remote,
            progress,
            partial,
            file,
            received,
            bytes: remote.bytes,
            digest: remote.digest.cloned(),
            hasher: None,
            begun: false,
        };
        transfer.check_limit()?;
        // A full-sized remainder of unknown digest is of no use either: the
        // digest comes with an answer, and there would be nothing to ask for.
        let usable = match (transfer.bytes, &transfer.digest) {
            (Some(bytes), Some(_)) => received <= bytes,
            (Some(bytes), None) => received < bytes,
            (None, _) => true,
        };
        if !usable {
            transfer.restart()?;
        }
        Ok(transfer)
    }

    /// Name for messages.
    fn what(&self) -> String {
        format!("{} of {}", shorten(self.remote.path), self.remote.repo)
    }

    fn broken_off(&self, reason: &str) -> HubError {
        HubError::BrokenOff {
            file: self.what(),
            received: self.received,
            reason: reason.to_owned(),
        }
    }

    fn check_limit(&self) -> Result<(), HubError> {
        match self.bytes {
            Some(found) if found > MAX_FILE_BYTES => Err(HubError::TooLarge {
                what: self.what(),
                found,
                limit: MAX_FILE_BYTES,
            }),
            _ => Ok(()),
        }
    }

    /// Forgets what was received.
    fn restart(&mut self) -> Result<(), HubError> {
        self.file
            .set_len(0)
            .map_err(HubError::io("truncate", &self.partial))?;
        self.received = 0;
        self.hasher = None;
        self.begun = false;
        Ok(())
    }

    /// Removes the partial file: its content is wrong and must not be continued.
    fn discard(&self, error: HubError) -> HubError {
        match remove_file(&self.partial) {
            Ok(()) => error,
            Err(removal) => removal,
        }
    }

    /// One request, and its body to the end.
    fn advance(&mut self, client: &Client) -> Result<(), HubError> {
        if self.bytes == Some(self.received) && self.digest.is_some() {
            return self.prepare();
        }
        let path = format!(
            "/{}/resolve/{}/{}",
            encode_path(self.remote.repo),
            self.remote.commit,
            encode_path(self.remote.path)
        );
        let mut answer = client.get(&path, self.received, None, &self.what())?;
        if answer.response.status().as_u16() == 416 && self.received > 0 {
            // The remainder is not a start of this file, or the server dislikes ranges.
            self.restart()?;
            answer = client.get(&path, 0, None, &self.what())?;
        }
        self.accept(client, &answer)?;
        self.prepare()?;
        let mut body = answer.response.into_body().into_reader();
        let limit = self.bytes.unwrap_or(MAX_FILE_BYTES);
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let n = match body.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.broken_off(&error.to_string())),
            };
            let total = self.received + n as u64;
            if total > limit {
                let error = HubError::Size {
                    file: self.what(),
                    expected: limit,
                    found: total,
                };
                return Err(self.discard(error));
            }
            self.file
                .write_all(&chunk[..n])
                .map_err(HubError::io("write", &self.partial))?;
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&chunk[..n]);
            }
            self.received = total;
            self.progress.advance(n as u64);
        }
        match self.bytes {
            Some(bytes) if self.received < bytes => {
                Err(self.broken_off("the connection ended early"))
            }
            _ => Ok(()),
        }
    }

    /// Judges the head of an answer: range, size and digest, before any byte is kept.
    fn accept(&mut self, client: &Client, answer: &Answer) -> Result<(), HubError> {
        let what = self.what();
        let length = answer.response.body().content_length();
        let announced = match answer.response.status().as_u16() {
            206 => {
                let range = answer.header("content-range").and_then(parse_content_range);
                let Some((from, total)) = range else {
                    return Err(answer.bad(&what, "a part without a readable range"));
                };
                if self.received == 0 || from != self.received {
                    return Err(answer.bad(
                        &what,
                        &format!("a part from byte {from}, expected {}", self.received),
                    ));
                }
                total.or_else(|| length?.checked_add(from))
            }
            200 => {
                if self.received > 0 {
                    self.restart()?;
                }
                length
            }
            status => return Err(answer.bad(&what, &format!("status {status}"))),
        };
        let announced = announced.or(answer.linked_size);
        match (self.bytes, announced) {
            (Some(expected), Some(found)) if expected != found => {
                return Err(self.discard(HubError::Size {
                    file: what,
                    expected,
                    found,
                }));
            }
            (None, found) => self.bytes = found,
            _ => {}
        }
        self.check_limit()?;
        if self.digest.is_none() {
            // A redirect's target may carry any ETag; then only the hub's own
            // header counts.
            let own = answer.host == client.host();
            let etag = answer
                .linked_etag
                .as_deref()
                .or_else(|| answer.header("etag").filter(|_| own))
                .and_then(digest_of_etag);
            let Some(digest) = etag else {
                return Err(self.discard(HubError::NoDigest {
                    host: client.host().to_owned(),
                    file: what,
                }));
            };
            self.digest = Some(digest);
        }
        Ok(())
    }

    /// Brings hasher, file position and progress to the end of what was received.
    fn prepare(&mut self) -> Result<(), HubError> {
        if !self.begun {
            self.progress.begin(self.remote.path, self.bytes);
            self.progress.advance(self.received);
            self.begun = true;
        }
        if self.hasher.is_none()
            && let (Some(digest), Some(bytes)) = (&self.digest, self.bytes)
        {
            let mut hasher = Hasher::like(digest, bytes);
            self.file
                .seek(SeekFrom::Start(0))
                .map_err(HubError::io("read", &self.partial))?;
            let mut left = self.received;
            let mut chunk = vec![0; CHUNK_BYTES];
            while left > 0 {
                let most = left.min(CHUNK_BYTES as u64) as usize;
                self.file
                    .read_exact(&mut chunk[..most])
                    .map_err(HubError::io("read", &self.partial))?;
                hasher.update(&chunk[..most]);
                left -= most as u64;
            }
            self.hasher = Some(hasher);
        }
        self.file
            .seek(SeekFrom::Start(self.received))
            .map(|_| ())
            .map_err(HubError::io("write", &self.partial))
    }

    /// Checks the whole content and gives it its name.
    fn finish(mut self, target: &Path) -> Result<(), HubError> {
        let Some(expected) = self.digest.take() else {
            // `accept` refuses answers without one.
            return Err(self.discard(HubError::NoDigest {
                host: String::new(),
                file: self.what(),
            }));
        };
        let found = match self.hasher.take() {
            Some(hasher) => hasher.finish(),
            // The size was not known in advance.
            None => hash_file(&self.partial, &expected, &crate::NoProgress)?,
        };
        if let Err(error) = expected.check(&found, &self.what()) {
            return Err(self.discard(error));
        }
        publish_file(self.file, &self.partial, target)?;
        self.progress.end();
        Ok(())
    }
}

/// Start and total of `bytes A-B/TOTAL`, the total being `*` if unknown.
fn parse_content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text
        .trim()
        .strip_prefix("bytes")?
        .trim_start()
        .split_once('/')?;
    let (from, to) = range.split_once('-')?;
    let (from, to): (u64, u64) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
    let total = match total.trim() {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    let inside = from <= to && total.is_none_or(|total| to < total);
    inside.then_some((from, total))
}

/// The digest that an ETag holds, weak or not, quoted or not.
fn digest_of_etag(etag: &str) -> Option<Digest> {
    let etag = etag.trim();
    Digest::from_hex(etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges() {
        assert_eq!(parse_content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(parse_content_range(" bytes 0-0/* "), Some((0, None)));
        for text in [
            "",
            "bytes",
            "bytes */10",
            "bytes 9-5/10",
            "bytes 5-10/10",
            "bytes -1-2/3",
            "items 0-1/2",
            "bytes 0-99999999999999999999/*",
        ] {
            assert_eq!(parse_content_range(text), None, "{text}");
        }
    }

    #[test]
    fn etags() {
        let sha = "a".repeat(64);
        let expected = Digest::from_hex(&sha);
        assert!(expected.is_some());
        assert_eq!(digest_of_etag(&format!("\"{sha}\"")), expected);
        assert_eq!(digest_of_etag(&format!("W/\"{sha}\"")), expected);
        assert_eq!(digest_of_etag("\"5f2b-1\""), None);
    }
}
