//! The HTTP client: bounded in time, redirects followed by hand so that the
//! token stays with the hub and the digest headers of the first answer are seen.

use std::time::Duration;

use ureq::http::{Response, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::HubError;
use crate::name::shorten;

/// Hub used when neither the options nor `HF_ENDPOINT` name one.
pub(crate) const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest silence inside a body.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time for a whole listing.
const LISTING_TIMEOUT: Duration = Duration::from_secs(120);
/// Most redirects in a row.
const MAX_REDIRECTS: usize = 8;

/// A hub.
pub(crate) struct Client {
    agent: Agent,
    /// Address without a slash at the end.
    endpoint: String,
    uri: Uri,
    token: Option<String>,
}

/// An answer of status 200, 206 or 416.
pub(crate) struct Answer {
    pub(crate) response: Response<Body>,
    /// Digest headers of the hub itself, before any redirect.
    pub(crate) linked_etag: Option<String>,
    /// Size that the hub itself announces for the redirect's target, in bytes.
    pub(crate) linked_size: Option<u64>,
    /// Who answered, for messages.
    pub(crate) host: String,
}

impl Answer {
    /// A header's value, where it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }
}

impl Client {
    /// A client for the hub at `endpoint`. The token goes to this hub only,
    /// and only over https or to this machine.
    pub(crate) fn new(endpoint: &str, token: Option<&str>) -> Result<Self, HubError> {
        let bad = |reason: &str| HubError::BadEndpoint {
            endpoint: shorten(endpoint),
            reason: reason.to_owned(),
        };
        let endpoint = endpoint.trim().trim_end_matches('/');
        let uri: Uri = endpoint.parse().map_err(|_| bad("it is not an address"))?;
        let secure = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(bad("it must begin with https:// or http://")),
        };
        let host = uri.host().unwrap_or_default();
        if host.is_empty() {
            return Err(bad("it names no host"));
        }
        if uri.authority().is_some_and(|a| a.as_str().contains('@')) || uri.query().is_some() {
            return Err(bad("it must hold neither a user nor a query"));
        }
        let local = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
        let token = token.map(str::trim).filter(|token| !token.is_empty());
        if token.is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            return Err(bad("the token has characters that no token has"));
        }
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("carat/", env!("CARGO_PKG_VERSION")))
            .tls_config(
                TlsConfig::builder()
                    .root_certs(RootCerts::PlatformVerifier)
                    .build(),
            )
            .timeout_resolve(Some(RESOLVE_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_send_request(Some(REQUEST_TIMEOUT))
            .timeout_recv_response(Some(RESPONSE_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT));
        if local {
            // A proxy could only reach another machine's loopback.
            config = config.proxy(None);
        }
        Ok(Self {
            agent: config.build().new_agent(),
            endpoint: endpoint.to_owned(),
            uri,
            token: token.filter(|_| secure || local).map(str::to_owned),
        })
    }

    /// Host and port of the hub.
    pub(crate) fn host(&self) -> &str {
        self.uri
            .authority()
            .map_or("", |authority| authority.as_str())
    }

    /// Reads a JSON document of at most `limit` bytes.
    pub(crate) fn get_json<T: serde::de::DeserializeOwned>(
        &self,
        path: &str,
        limit: u64,
        what: &str,
    ) -> Result<T, HubError> {
        let mut answer = self.get(path, 0, Some(LISTING_TIMEOUT), what)?;
        if answer.response.status().as_u16() != 200 {
            return Err(answer.bad(what, "a part of a document that was asked for whole"));
        }
        let bytes = answer
            .response
            .body_mut()
            .with_config()
            .limit(limit)
            .read_to_vec();
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(ureq::Error::BodyExceedsLimit(_)) => {
                return Err(HubError::TooLarge {
                    what: format!("the answer about {what}"),
                    found: answer
                        .response
                        .body()
                        .content_length()
                        .unwrap_or(limit.saturating_add(1)),
                    limit,
                });
            }
            Err(error) => return Err(unreachable(&answer.host, &error)),
        };
        serde_json::from_slice(&bytes)
            .map_err(|error| answer.bad(what, &format!("a document that cannot be read: {error}")))
    }

    /// Asks for `path` (percent-encoded, after the endpoint) from byte `from` on.
    pub(crate) fn get(
        &self,
        path: &str,
        from: u64,
        body_timeout: Option<Duration>,
        what: &str,
    ) -> Result<Answer, HubError> {
        let mut uri: Uri =
            format!("{}{path}", self.endpoint)
                .parse()
                .map_err(|_| HubError::BadEndpoint {
                    endpoint: self.endpoint.clone(),
                    reason: format!("no address can be made of it and `{}`", shorten(path)),
                })?;
        let mut linked_etag = None;
        let mut linked_size = None;
        for _ in 0..=MAX_REDIRECTS {
            let host = uri.authority().map_or(String::new(), ToString::to_string);
            let mut request = self.agent.get(&uri);
            if from > 0 {
                request = request.header("range", format!("bytes={from}-"));
            }
            let token = self.token.as_ref().filter(|_| same_origin(&uri, &self.uri));
            if let Some(token) = token {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let response = request
                .config()
                .timeout_recv_body(body_timeout)
                .build()
                .call()
                .map_err(|error| unreachable(&host, &error))?;
            let text = |name: &str| {
                response
                    .headers()
                    .get(name)
                    .and_then(|v| v.to_str().ok())
                    .map(str::to_owned)
            };
            // Only the hub may say what the content must be, not the store that
            // it redirects to.
            if same_origin(&uri, &self.uri) {
                linked_etag = text("x-linked-etag").or(linked_etag);
                linked_size = text("x-linked-size")
                    .and_then(|n| n.parse().ok())
                    .or(linked_size);
            }
            let status = response.status().as_u16();
            let answer = Answer {
                response,
                linked_etag,
                linked_size,
                host,
            };
            match status {
                200 | 206 | 416 => return Ok(answer),
                301 | 302 | 303 | 307 | 308 => {
                    let Some(location) = answer.header("location") else {
                        return Err(answer.bad(what, "a redirect to nowhere"));
                    };
                    uri =
                        redirected(&uri, location).map_err(|problem| answer.bad(what, problem))?;
                }
                401 | 403 => {
                    return Err(HubError::Denied {
                        host: answer.host,
                        what: what.to_owned(),
                        status,
                        with_token: token.is_some(),
                    });
                }
                404 | 410 => {
                    return Err(HubError::NotFound {
                        host: answer.host,
                        what: what.to_owned(),
                        known: Vec::new(),
                    });
                }
                429 => return Err(HubError::RateLimited { host: answer.host }),
                _ => return Err(answer.bad(what, &format!("status {status}"))),
            }
            (linked_etag, linked_size) = (answer.linked_etag, answer.linked_size);
        }
        Err(HubError::BadAnswer {
            host: self.host().to_owned(),
            what: what.to_owned(),
            problem: format!("more than {MAX_REDIRECTS} redirects"),
        })
    }
}

impl Answer {
    /// An error that blames this answer.
    pub(crate) fn bad(&self, what: &str, problem: &str) -> HubError {
        HubError::BadAnswer {
            host: self.host.clone(),
            what: what.to_owned(),
            problem: problem.to_owned(),
        }
    }
}

/// Maps an error of the transport.
pub(crate) fn unreachable(host: &str, error: &ureq::Error) -> HubError {
    let reason = match error {
        ureq::Error::Io(error) => error.to_string(),
        error => error.to_string(),
    };
    HubError::Unreachable {
        host: host.to_owned(),
        reason,
    }
}

/// Percent-encodes a `/`-separated path.
pub(crate) fn encode_path(path: &str) -> String {
    use std::fmt::Write as _;
    let mut encoded = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// Whether two addresses have the same scheme, host and port.
fn same_origin(a: &Uri, b: &Uri) -> bool {
    let port = |uri: &Uri| {
        let default = if uri.scheme_str() == Some("https") {
            443
        } else {
            80
        };
        uri.port_u16().unwrap_or(default)
    };
    let hosts_agree = match (a.host(), b.host()) {
        (Some(a), Some(b)) => a.eq_ignore_ascii_case(b),
        _ => false,
    };
    a.scheme() == b.scheme() && hosts_agree && port(a) == port(b)
}

/// The address that a `location` header means, seen from `base`.
fn redirected(base: &Uri, location: &str) -> Result<Uri, &'static str> {
    const MALFORMED: &str = "a redirect to a malformed address";
    let location = location.split('#').next().unwrap_or_default();
    let scheme = base.scheme_str().ok_or(MALFORMED)?;
    let authority = base.authority().ok_or(MALFORMED)?;
    let absolute = if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else if location
        .split(['/', '?'])
        .next()
        .is_some_and(|start| start.ends_with(':'))
    {
        location.to_owned()
    } else {
        let folder = base
            .path()
            .rsplit_once('/')
            .map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    };
    let uri: Uri = absolute.parse().map_err(|_| MALFORMED)?;
    match (scheme, uri.scheme_str()) {
        (_, Some("https")) | ("http", Some("http")) => {}
        ("https", Some("http")) => return Err("a redirect from https to http"),
        _ => return Err("a redirect to something other than http"),
    }
    match uri.host() {
        Some(host) if !host.is_empty() => Ok(uri),
        _ => Err(MALFORMED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        for endpoint in [
            "https://hub.example.org",
            "http://127.0.0.1:8080/",
            "https://h/prefix/",
        ] {
            let client = Client::new(endpoint, None).unwrap();
            assert!(!client.endpoint.ends_with('/'));
        }
        for endpoint in [
            "",
            "hub.example.org",
            "ftp://h",
            "https://",
            "https://u:p@h",
            "https://h?q",
            "a b",
        ] {
            let found = Client::new(endpoint, None);
            assert!(
                matches!(found, Err(HubError::BadEndpoint { .. })),
                "{endpoint}"
            );
        }
        let found = Client::new("https://h", Some("a\r\nhost: b"));
        assert!(matches!(found, Err(HubError::BadEndpoint { .. })));
    }

    #[test]
    fn tokens_need_https_or_this_machine() {
        let has_token = |endpoint| Client::new(endpoint, Some(" t ")).unwrap().token.is_some();
        assert!(has_token("https://h"));
        assert!(has_token("http://127.0.0.1:1"));
        assert!(has_token("http://[::1]:1"));
        assert!(!has_token("http://h"));
        assert!(!has_token("http://127.0.0.1.example.org"));
    }

    #[test]
    fn redirects() {
        let base: Uri = "https://hub:1/a/b?x=1".parse().unwrap();
        for (location, expected) in [
            ("https://cdn/x?y=z#f", "https://cdn/x?y=z"),
            ("//cdn/x", "https://cdn/x"),
            ("/x?u=http://z", "https://hub:1/x?u=http://z"),
            ("c", "https://hub:1/a/c"),
            ("c?u=http://z", "https://hub:1/a/c?u=http://z"),
        ] {
            assert_eq!(redirected(&base, location).unwrap().to_string(), expected);
        }
        for location in [
            "http://cdn/x",
            "file:///etc/passwd",
            "ftp://x/y",
            "https://",
            "//",
            "/a b",
        ] {
            assert!(redirected(&base, location).is_err(), "{location}");
        }
        let plain: Uri = "http://hub/a".parse().unwrap();
        assert!(redirected(&plain, "http://cdn/x").is_ok());
    }

    #[test]
    fn origins() {
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        assert!(same_origin(&uri("https://H/a"), &uri("https://h:443/b")));
        assert!(!same_origin(&uri("https://h/a"), &uri("http://h/a")));
        assert!(!same_origin(&uri("https://h/a"), &uri("https://h:444/a")));
        assert!(!same_origin(&uri("https://h/a"), &uri("https://h.evil/a")));
    }

    #[test]
    fn paths_are_encoded() {
        assert_eq!(encode_path("a/b c%#?é.x"), "a/b%20c%25%23%3F%C3%A9.x");
    }
}
