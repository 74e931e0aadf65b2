//! What a hub lists for a repository, and which of it a model needs.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::HubError;
use crate::digest::Digest;
use crate::http::{Client, encode_path};
use crate::name::{HubName, Shard, escapes, has_suffix, is_commit, is_gguf, safe_path, shorten};

/// Largest listing, in bytes.
const MAX_LISTING_BYTES: u64 = 32 << 20;
/// Most files listed.
const MAX_LISTED: usize = 100_000;
/// Most files fetched for one model.
const MAX_SELECTED: usize = 4096;
/// Largest file that is not weights, in bytes.
const MAX_SMALL_BYTES: u64 = 256 << 20;
/// Largest model, in bytes.
const MAX_TOTAL_BYTES: u64 = 16 << 40;
/// Most names in a hint.
const MAX_NAMES: usize = 12;

/// Index of a checkpoint in several safetensors files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const CONFIG: &str = "config.json";

/// Files of a repository at one commit.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) repo: String,
    /// Full commit id.
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Listed>,
}

/// What is published about one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    /// Size in bytes.
    pub(crate) bytes: Option<u64>,
    pub(crate) digest: Option<Digest>,
}

/// Files of a whole checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    /// Config, tokenizer, templates, licence, index.
    pub(crate) small: Vec<String>,
    /// Weights; with an index they are known once that is read.
    pub(crate) weights: Vec<String>,
    pub(crate) indexed: bool,
}

#[derive(Deserialize)]
struct Info {
    sha: Option<String>,
    siblings: Option<Vec<Sibling>>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Asks the hub what `name`'s revision holds.
    pub(crate) fn fetch(client: &Client, name: &HubName) -> Result<Self, HubError> {
        let repo = name.repo();
        let what = match &name.revision {
            Some(revision) => format!("repository {repo} at revision {revision}"),
            None => format!("repository {repo}"),
        };
        // A slash in a revision is data here, not a separator.
        let revision = encode_path(name.revision()).replace('/', "%2F");
        let path = format!(
            "/api/models/{}/revision/{revision}?blobs=true",
            encode_path(&repo)
        );
        let info: Info = client.get_json(&path, MAX_LISTING_BYTES, &what)?;
        let listing = Self::from_info(repo, info, |problem| HubError::BadAnswer {
            host: client.host().to_owned(),
            what: what.clone(),
            problem: problem.to_owned(),
        })?;
        if is_commit(name.revision()) && listing.commit != name.revision() {
            return Err(HubError::BadAnswer {
                host: client.host().to_owned(),
                what,
                problem: format!("another commit, {}", listing.commit),
            });
        }
        Ok(listing)
    }

    fn from_info(
        repo: String,
        info: Info,
        bad: impl Fn(&str) -> HubError,
    ) -> Result<Self, HubError> {
        let commit = info.sha.filter(|sha| is_commit(sha));
        let commit = commit.ok_or_else(|| bad("no commit id"))?;
        let siblings = info.siblings.ok_or_else(|| bad("no list of files"))?;
        if siblings.len() > MAX_LISTED {
            return Err(HubError::TooLarge {
                what: format!("number of files of repository {repo}"),
                found: siblings.len() as u64,
                limit: MAX_LISTED as u64,
            });
        }
        let mut files = BTreeMap::new();
        for sibling in siblings {
            let file = sibling.rfilename;
            let hostile = |reason| HubError::HostileName {
                repo: repo.clone(),
                file: shorten(&file),
                reason,
            };
            if escapes(&file) {
                return Err(hostile("it points out of the repository"));
            }
            let listed = match sibling.lfs {
                Some(lfs) => Listed {
                    bytes: lfs.size.or(sibling.size),
                    digest: lfs.sha256.as_deref().and_then(Digest::from_hex),
                },
                None => Listed {
                    bytes: sibling.size,
                    digest: sibling.blob_id.as_deref().and_then(Digest::from_hex),
                },
            };
            if files.contains_key(&file) {
                return Err(hostile("it is listed twice"));
            }
            files.insert(file, listed);
        }
        Ok(Self {
            repo,
            commit,
            files,
        })
    }

    /// The files of the checkpoint at the repository's root.
    pub(crate) fn checkpoint(&self) -> Result<Checkpoint, HubError> {
        let root = || self.files.keys().filter(|file| !file.contains('/'));
        let safetensors: Vec<&String> = root().filter(|f| has_suffix(f, ".safetensors")).collect();
        let indexed = self.files.contains_key(INDEX);
        if safetensors.is_empty() && !indexed {
            return Err(self.no_weights());
        }
        if !self.files.contains_key(CONFIG) {
            return Err(self.missing(CONFIG, "every checkpoint"));
        }
        let small: Vec<String> = root().filter(|file| is_small(file)).cloned().collect();
        let weights: Vec<String> = if indexed {
            Vec::new()
        } else if self.files.contains_key(SINGLE) {
            vec![SINGLE.to_owned()]
        } else {
            safetensors.into_iter().cloned().collect()
        };
        self.complete_sets(&weights)?;
        self.check(&small, MAX_SMALL_BYTES)?;
        self.check(&weights, u64::MAX)?;
        Ok(Checkpoint {
            small,
            weights,
            indexed,
        })
    }

    /// The weight files that an index names.
    pub(crate) fn indexed_weights(&self, index: &[u8]) -> Result<Vec<String>, HubError> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let index: Index = serde_json::from_slice(index).map_err(|error| HubError::BadAnswer {
            host: format!("repository {}", self.repo),
            what: INDEX.to_owned(),
            problem: format!("a document that cannot be read: {error}"),
        })?;
        let shards: BTreeSet<String> = index.weight_map.into_values().collect();
        for shard in &shards {
            if shard.contains('/') || !has_suffix(shard, ".safetensors") {
                return Err(HubError::HostileName {
                    repo: self.repo.clone(),
                    file: shorten(shard),
                    reason: "the index names something other than a safetensors file beside it",
                });
            }
            if !self.files.contains_key(shard) {
                return Err(self.missing(shard, INDEX));
            }
        }
        if shards.is_empty() {
            return Err(self.missing("weights", INDEX));
        }
        let weights: Vec<String> = shards.into_iter().collect();
        self.check(&weights, u64::MAX)?;
        Ok(weights)
    }

    /// The GGUF file `file` and, if it is one of a set, all of the set, in order.
    pub(crate) fn gguf(&self, file: &str) -> Result<Vec<String>, HubError> {
        if !self.files.contains_key(file) {
            return Err(HubError::NotFound {
                host: format!("repository {}", self.repo),
                what: format!("file {file}"),
                known: self.gguf_names(),
            });
        }
        let files = match Shard::parse(file) {
            Some(shard) => self.whole_set(&shard, file)?,
            None => vec![file.to_owned()],
        };
        self.check(&files, u64::MAX)?;
        Ok(files)
    }

    /// All shards of `shard`'s set, each of which must be listed.
    fn whole_set(&self, shard: &Shard, named_by: &str) -> Result<Vec<String>, HubError> {
        let mut files = Vec::new();
        // The first absent file ends this, so that a huge count costs nothing.
        for file in shard.all() {
            if !self.files.contains_key(&file) {
                return Err(self.missing(&file, named_by));
            }
            files.push(file);
        }
        Ok(files)
    }

    /// Checks that no set of shards among `files` has a gap.
    fn complete_sets(&self, files: &[String]) -> Result<(), HubError> {
        // One file per set is enough to check the set; a complete set has its first.
        for file in files {
            if let Some(shard) = Shard::parse(file) {
                let first = shard.all().next();
                if shard.index == 1 || first.is_some_and(|f| !self.files.contains_key(&f)) {
                    self.whole_set(&shard, file)?;
                }
            }
        }
        Ok(())
    }

    /// Checks names, number and sizes of files that are to be fetched.
    fn check(&self, files: &[String], limit: u64) -> Result<(), HubError> {
        if files.len() > MAX_SELECTED {
            return Err(HubError::TooLarge {
                what: format!("number of model files of repository {}", self.repo),
                found: files.len() as u64,
                limit: MAX_SELECTED as u64,
            });
        }
        let mut folded = BTreeSet::new();
        let mut total = 0_u64;
        for file in files {
            let hostile = |reason| HubError::HostileName {
                repo: self.repo.clone(),
                file: shorten(file),
                reason,
            };
            safe_path(file).map_err(hostile)?;
            if !folded.insert(file.to_lowercase()) {
                return Err(hostile("another name differs in capitals only"));
            }
            let bytes = self
                .files
                .get(file)
                .and_then(|listed| listed.bytes)
                .unwrap_or(0);
            if bytes > limit {
                return Err(HubError::TooLarge {
                    what: format!("{file} of {}", self.repo),
                    found: bytes,
                    limit,
                });
            }
            total = total.saturating_add(bytes);
        }
        if total > MAX_TOTAL_BYTES {
            return Err(HubError::TooLarge {
                what: format!("the model files of {}", self.repo),
                found: total,
                limit: MAX_TOTAL_BYTES,
            });
        }
        Ok(())
    }

    fn missing(&self, file: &str, named_by: &str) -> HubError {
        HubError::MissingFile {
            repo: self.repo.clone(),
            file: shorten(file),
            named_by: named_by.to_owned(),
        }
    }

    /// GGUF files for a hint: of each set of shards the first only.
    fn gguf_names(&self) -> Vec<String> {
        self.files
            .keys()
            .filter(|file| is_gguf(file) && Shard::parse(file).is_none_or(|s| s.index == 1))
            .take(MAX_NAMES)
            .map(|file| shorten(file))
            .collect()
    }

    fn no_weights(&self) -> HubError {
        let gguf = self.gguf_names();
        let pickled = [".bin", ".pt", ".pth", ".ckpt"];
        let has_pickled = self
            .files
            .keys()
            .any(|f| pickled.iter().any(|s| has_suffix(f, s)));
        let found = match (gguf.is_empty(), has_pickled) {
            (false, _) => "GGUF files",
            (true, true) => "pickled weights (.bin, .pt, .pth or .ckpt)",
            (true, false) => "other files",
        };
        HubError::NoWeights {
            repo: self.repo.clone(),
            found: found.to_owned(),
            gguf,
        }
    }
}

/// Whether a file at the root belongs to a checkpoint and is no weights.
fn is_small(file: &str) -> bool {
    const NAMES: [&str; 7] = [
        CONFIG,
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        INDEX,
    ];
    const TOKENIZER: [&str; 3] = [".json", ".model", ".txt"];
    NAMES.contains(&file)
        || file.starts_with("tokenizer") && TOKENIZER.iter().any(|suffix| file.ends_with(suffix))
        || file.starts_with("chat_template.")
        || file.starts_with("LICENSE")
        || file.starts_with("NOTICE")
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn listing(files: &[&str]) -> Result<Listing, HubError> {
        let siblings: Vec<_> = files
            .iter()
            .map(|f| serde_json::json!({"rfilename": f, "size": 1}))
            .collect();
        from_json(&serde_json::json!({"sha": COMMIT, "siblings": siblings}))
    }

    fn from_json(json: &serde_json::Value) -> Result<Listing, HubError> {
        let info = serde_json::from_value(json.clone()).unwrap();
        Listing::from_info("a/b".into(), info, |problem| HubError::BadAnswer {
            host: "h".into(),
            what: "w".into(),
            problem: problem.into(),
        })
    }

    #[test]
    fn digests_and_sizes() {
        let sha = "ab".repeat(32);
        let listing = from_json(&serde_json::json!({"sha": COMMIT, "private": false, "siblings": [
            {"rfilename": "a", "size": 130, "blobId": "0".repeat(40), "lfs": {"sha256": sha, "size": 7, "pointerSize": 130}},
            {"rfilename": "b", "size": 3, "blobId": "0".repeat(40)},
            {"rfilename": "c"},
        ]}))
        .unwrap();
        let digest = Digest::from_hex(&sha);
        assert_eq!(
            listing.files["a"],
            Listed {
                bytes: Some(7),
                digest
            }
        );
        let digest = Digest::from_hex(&"0".repeat(40));
        assert_eq!(
            listing.files["b"],
            Listed {
                bytes: Some(3),
                digest
            }
        );
        assert_eq!(listing.files["c"], Listed::default());
    }

    #[test]
    fn answers_without_commit_or_files_are_refused() {
        for json in [
            serde_json::json!({"siblings": []}),
            serde_json::json!({"sha": "../../x", "siblings": []}),
            serde_json::json!({"sha": COMMIT}),
        ] {
            assert!(matches!(from_json(&json), Err(HubError::BadAnswer { .. })));
        }
    }

    #[test]
    fn names_that_escape_condemn_the_listing() {
        for file in [
            "../x",
            "a/../../x.safetensors",
            "/etc/x",
            "..\\x.safetensors",
            "c:\\x",
        ] {
            let found = listing(&["config.json", "model.safetensors", file]);
            assert!(matches!(found, Err(HubError::HostileName { .. })), "{file}");
        }
        assert!(matches!(
            listing(&["a", "a"]),
            Err(HubError::HostileName { .. })
        ));
    }

    #[test]
    fn a_checkpoint_is_selected() {
        let listing = listing(&[
            ".gitattributes",
            "README.md",
            "LICENSE",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "tokenizer.py",
            "special_tokens_map.json",
            "chat_template.jinja",
            "model.safetensors",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "onnx/model.safetensors",
            "odd:name.png",
        ])
        .unwrap();
        let checkpoint = listing.checkpoint().unwrap();
        assert_eq!(checkpoint.weights, ["model.safetensors"]);
        assert!(!checkpoint.indexed);
        assert_eq!(
            checkpoint.small,
            [
                "LICENSE",
                "chat_template.jinja",
                "config.json",
                "generation_config.json",
                "special_tokens_map.json",
                "tokenizer.json",
                "tokenizer.model",
                "tokenizer_config.json",
            ]
        );
    }

    #[test]
    fn shards_come_from_the_index() {
        let listing = listing(&[
            "config.json",
            INDEX,
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "consolidated.safetensors",
        ])
        .unwrap();
        let checkpoint = listing.checkpoint().unwrap();
        assert!(checkpoint.indexed && checkpoint.weights.is_empty());
        let index = |second: &str| {
            let map = serde_json::json!({"x": "model-00001-of-00002.safetensors", "y": second});
            serde_json::to_vec(&serde_json::json!({"metadata": {}, "weight_map": map})).unwrap()
        };
        let weights = listing
            .indexed_weights(&index("model-00002-of-00002.safetensors"))
            .unwrap();
        assert_eq!(weights.len(), 2);
        let found = listing.indexed_weights(&index("model-00003-of-00003.safetensors"));
        assert!(matches!(found, Err(HubError::MissingFile { .. })));
        for hostile in ["../x.safetensors", "config.json", "a/b.safetensors", ""] {
            let found = listing.indexed_weights(&index(hostile));
            assert!(
                matches!(found, Err(HubError::HostileName { .. })),
                "{hostile}"
            );
        }
        for broken in [
            "",
            "{}",
            "[]",
            r#"{"weight_map": []}"#,
            r#"{"weight_map": {"x": 1}}"#,
        ] {
            let found = listing.indexed_weights(broken.as_bytes());
            assert!(matches!(found, Err(HubError::BadAnswer { .. })), "{broken}");
        }
        let found = listing.indexed_weights(br#"{"weight_map": {}}"#);
        assert!(matches!(found, Err(HubError::MissingFile { .. })));
    }

    #[test]
    fn sets_with_gaps_are_refused() {
        let found = listing(&["config.json", "w-00002-of-00002.safetensors"])
            .unwrap()
            .checkpoint();
        assert!(matches!(found, Err(HubError::MissingFile { .. })));
        let found = listing(&[
            "config.json",
            "w-1-of-3.safetensors",
            "w-2-of-3.safetensors",
        ]);
        assert!(matches!(
            found.unwrap().checkpoint(),
            Err(HubError::MissingFile { .. })
        ));
        let parts = listing(&["q-00001-of-00003.gguf", "q-00002-of-00003.gguf"]).unwrap();
        let found = parts.gguf("q-00002-of-00003.gguf");
        assert!(
            matches!(&found, Err(HubError::MissingFile { file, .. }) if file == "q-00003-of-00003.gguf")
        );
    }

    #[test]
    fn one_gguf_shard_brings_all() {
        let parts = listing(&[
            "x/q-00001-of-00002.gguf",
            "x/q-00002-of-00002.gguf",
            "r.gguf",
        ])
        .unwrap();
        assert_eq!(
            parts.gguf("x/q-00002-of-00002.gguf").unwrap(),
            ["x/q-00001-of-00002.gguf", "x/q-00002-of-00002.gguf"]
        );
        assert_eq!(parts.gguf("r.gguf").unwrap(), ["r.gguf"]);
        let Err(HubError::NotFound { known, .. }) = parts.gguf("s.gguf") else {
            panic!()
        };
        assert_eq!(known, ["r.gguf", "x/q-00001-of-00002.gguf"]);
    }

    #[test]
    fn repositories_without_safetensors() {
        let found = listing(&["config.json", "pytorch_model.bin"])
            .unwrap()
            .checkpoint()
            .unwrap_err();
        assert!(found.to_string().contains("pickled"));
        assert!(found.hint().unwrap().contains("convert"));
        let found = listing(&["q.gguf"]).unwrap().checkpoint().unwrap_err();
        assert!(found.hint().unwrap().contains("q.gguf"));
        let found = listing(&["model.safetensors"]).unwrap().checkpoint();
        assert!(matches!(found, Err(HubError::MissingFile { .. })));
    }

    #[test]
    fn absurd_sizes_and_names_are_refused() {
        let with_size = |file: &str, size: u64| {
            from_json(&serde_json::json!({"sha": COMMIT, "siblings": [
                {"rfilename": "config.json", "size": 2}, {"rfilename": "model.safetensors", "size": 2},
                {"rfilename": file, "size": size}]}))
            .unwrap()
            .checkpoint()
        };
        assert!(with_size("tokenizer.json", 1 << 20).is_ok());
        let found = with_size("tokenizer.json", 1 << 30);
        assert!(matches!(found, Err(HubError::TooLarge { .. })));
        let found = with_size("tokenizer:x.json", 1);
        assert!(matches!(found, Err(HubError::HostileName { .. })));
        let found = with_size("LICENSE", 1).and(with_size("LICENSE.", 1));
        assert!(matches!(found, Err(HubError::HostileName { .. })));
    }
}
