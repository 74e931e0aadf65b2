//! `carat verify`: whether a bundle is intact, and whether it differs from its
//! source only where it says so.
//!
//! Every check ends in one of five states. *ok* was checked and holds. *DIFF* is
//! a difference from the source that nobody declared. *FAIL* is damage, a
//! declaration that is wrong, or a change that breaks the model. *info* is worth
//! knowing. *skipped* could not be checked, which is not *ok*.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use serde::{Deserialize, Serialize};

use crate::{
    Bundle, BundleError, BundleTensor,
    convert::{is_ternary, kind_is_honest},
    declare::{Deviation, Deviations, Expectations, RecipeStatus, SourceDeclarations},
    facts::check_facts,
    manifest::{
        ActivationContract, GATES_DIR, MANIFEST_FILE, RECIPE_FILE, RECIPE_TEXT_FILE, SkippedTensor,
        SourceRecord, TEMPLATE_FILE, TOKENIZER_FILE, VERIFY_FILE, WEIGHTS_FILE, WeightsKind,
        bounded,
    },
    spec::{ModelSpec, TensorRole},
    stored::check_tensor,
    text::TextAssets,
    writer,
};

/// State of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Status {
    /// Checked, and it holds.
    #[serde(rename = "ok")]
    Ok,
    /// Differs from the source without being declared.
    #[serde(rename = "DIFF")]
    Diff,
    /// Damaged, wrongly declared or broken.
    #[serde(rename = "FAIL")]
    Fail,
    /// Worth knowing.
    #[serde(rename = "info")]
    Info,
    /// Not checked.
    #[serde(rename = "skipped")]
    Skipped,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Status::Ok => "ok",
            Status::Diff => "DIFF",
            Status::Fail => "FAIL",
            Status::Info => "info",
            Status::Skipped => "skipped",
        })
    }
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What was checked, such as `weights`.
    pub name: String,
    /// How it ended.
    pub status: Status,
    /// What was found.
    pub detail: String,
}

/// What verifying a bundle found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyReport {
    /// The bundle's folder.
    pub bundle: PathBuf,
    /// Its digest, if its manifest could be read.
    pub digest: Option<String>,
    /// All checks, in a fixed order.
    pub checks: Vec<Check>,
}

impl VerifyReport {
    /// Checks in a state.
    pub fn count(&self, status: Status) -> usize {
        self.checks.iter().filter(|c| c.status == status).count()
    }

    /// Nothing failed and nothing differs. Skipped checks do not show here: see
    /// [`count`](VerifyReport::count).
    pub fn passed(&self) -> bool {
        self.count(Status::Fail) == 0 && self.count(Status::Diff) == 0
    }

    /// The check of that name.
    pub fn check(&self, name: &str) -> Option<&Check> {
        self.checks.iter().find(|c| c.name == name)
    }

    pub(crate) fn add(&mut self, name: &str, status: Status, detail: impl Into<String>) {
        self.checks.push(Check {
            name: name.into(),
            status,
            detail: detail.into(),
        });
    }
}

/// One line per check, then the counts.
impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in &self.checks {
            writeln!(f, "{:<8}{:<16}{}", c.status, c.name, c.detail)?;
        }
        write!(
            f,
            "{} ok, {} DIFF, {} FAIL, {} info, {} skipped",
            self.count(Status::Ok),
            self.count(Status::Diff),
            self.count(Status::Fail),
            self.count(Status::Info),
            self.count(Status::Skipped)
        )
    }
}

/// A source that was imported afresh, to compare a bundle with.
#[derive(Clone, Copy, Debug)]
pub struct Against<'a> {
    /// What it declares.
    pub declared: &'a SourceDeclarations,
    /// BLAKE3 of its files, to compare with the recorded one: equal declarations do
    /// not make equal weights.
    pub digest: Option<&'a str>,
    /// The model in it.
    pub spec: &'a ModelSpec,
    /// Its tokenizer, special tokens and sampling defaults.
    pub text: &'a TextAssets,
    /// What a bundle records of it; name, digest and declarations are not looked at.
    pub record: &'a SourceRecord,
    /// Its tensors that a bundle leaves out.
    pub skipped: &'a [SkippedTensor],
    /// Arithmetic on activations that a bundle of it declares.
    pub activation: ActivationContract,
}

/// Settings of [`verify()`].
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyOptions<'a> {
    /// The source, imported afresh. Without it the bundle is compared with what it
    /// recorded when it was made.
    pub against: Option<Against<'a>>,
    /// Threads that hash; 0 takes one per core.
    pub threads: usize,
}

/// Reads all of a bundle and checks it. Never fails: what cannot be read is a
/// FAIL in the report.
pub fn verify(dir: &Path, options: &VerifyOptions<'_>) -> VerifyReport {
    let mut report = VerifyReport {
        bundle: dir.to_path_buf(),
        digest: None,
        checks: Vec::new(),
    };
    let bundle = match Bundle::open(dir) {
        Ok(bundle) => bundle,
        Err(e) => {
            report.add("manifest", Status::Fail, e.to_string());
            return report;
        }
    };
    report.digest = Some(bundle.digest().to_string());
    let m = bundle.manifest();
    report.add(
        "manifest",
        Status::Ok,
        format!(
            "version {}, {} tensors are exactly those of the spec, aligned and apart",
            m.version,
            m.tensors.len()
        ),
    );
    check_weights(&bundle, options.threads, &mut report);
    check_contents(&bundle, &mut report);
    let text = check_text(&bundle, &mut report);
    check_claims(&bundle, &mut report);
    check_recipe(&bundle, &mut report);
    check_record(&bundle, &mut report);
    check_folder(&bundle, &mut report);

    let expectations = match bundle.expectations() {
        Ok(e) => e,
        Err(e) => {
            report.add("verify.toml", Status::Fail, e.to_string());
            Expectations::default()
        }
    };
    let Some(text) = text else {
        report.add(
            "source",
            Status::Skipped,
            "the bundle's text cannot be read",
        );
        return report;
    };
    if let Some(against) = &options.against {
        check_facts(
            &bundle,
            &text,
            against,
            &expectations.deviations,
            &mut report,
        );
    }
    let found = SourceDeclarations::of(&m.spec, &text, m.matrix_formats());
    check_source(
        &bundle,
        options,
        &found,
        &expectations.deviations,
        &mut report,
    );
    report
}

/// Digests and padding of the weights.
fn check_weights(bundle: &Bundle, threads: usize, report: &mut VerifyReport) {
    let m = bundle.manifest();
    let threads = match threads {
        0 => thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let tensors: Vec<BundleTensor<'_>> = bundle.tensors().collect();
    let next = AtomicUsize::new(0);
    // Tensors are handed out one by one; each finds its own faults.
    let worker = || {
        let mut faults = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(t) = tensors.get(i) else {
                return faults;
            };
            if let Err(problem) = check_tensor(t) {
                faults.push((i, problem));
            }
        }
    };
    let (file, mut faults) = thread::scope(|scope| {
        let file = scope.spawn(|| blake3::hash(bundle.weights()).to_hex().to_string());
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let faults: Vec<(usize, String)> = workers
            .into_iter()
            .flat_map(|w| w.join().expect("invariant: checking does not panic"))
            .collect();
        (
            file.join().expect("invariant: hashing does not panic"),
            faults,
        )
    });
    faults.sort();
    if faults.is_empty() {
        report.add(
            "tensors",
            Status::Ok,
            format!(
                "{} digests and padding rows are right, every weight is a finite number",
                tensors.len()
            ),
        );
    }
    for (i, problem) in faults {
        report.add(
            "tensors",
            Status::Fail,
            format!("{:?}: {problem}", tensors[i].entry.name),
        );
    }
    if file == m.weights.blake3 {
        report.add("weights", Status::Ok, format!("{} bytes", m.weights.bytes));
    } else {
        report.add(
            "weights",
            Status::Fail,
            format!(
                "{WEIGHTS_FILE}: expected digest {}, found {file}",
                m.weights.blake3
            ),
        );
    }
}

/// What lies between tensors.
fn check_contents(bundle: &Bundle, report: &mut VerifyReport) {
    let weights = bundle.weights();
    let mut end = 0usize;
    let ends = bundle
        .manifest()
        .tensors
        .iter()
        .map(|t| (t.offset as usize, (t.offset + t.bytes) as usize))
        .chain([(weights.len(), weights.len())]);
    for (start, next_end) in ends {
        if let Some(at) = weights[end..start].iter().position(|&b| b != 0) {
            report.add(
                "alignment",
                Status::Fail,
                format!(
                    "{WEIGHTS_FILE}: byte {} between tensors is not zero",
                    end + at
                ),
            );
            return;
        }
        end = next_end;
    }
    let gaps = bundle.manifest().size_report.alignment_bytes;
    report.add(
        "alignment",
        Status::Ok,
        format!("{gaps} bytes between tensors, all zero"),
    );
}

/// Tokenizer and template; `None` when they cannot be read.
fn check_text(bundle: &Bundle, report: &mut VerifyReport) -> Option<crate::text::TextAssets> {
    let m = bundle.manifest();
    let text = match bundle.text() {
        Ok(text) => text,
        Err(e) => {
            report.add("tokenizer", Status::Fail, e.to_string());
            return None;
        }
    };
    match &text.tokenizer_json {
        None => report.add("tokenizer", Status::Skipped, "the bundle has none"),
        Some(json) => match serde_json::from_slice::<serde_json::Value>(json) {
            Ok(v) if v.is_object() => report.add(
                "tokenizer",
                Status::Ok,
                format!("{TOKENIZER_FILE}: {} bytes", json.len()),
            ),
            Ok(_) => report.add(
                "tokenizer",
                Status::Fail,
                format!("{TOKENIZER_FILE}: is not a JSON object"),
            ),
            Err(e) => report.add("tokenizer", Status::Fail, format!("{TOKENIZER_FILE}: {e}")),
        },
    }
    for f in &m.files {
        if f.path == TOKENIZER_FILE || f.path == TEMPLATE_FILE {
            continue;
        }
        match bundle.file(&f.path) {
            Ok(_) => report.add("files", Status::Ok, f.path.clone()),
            Err(e) => report.add("files", Status::Fail, e.to_string()),
        }
    }
    Some(text)
}

/// What the manifest says about its own content in words.
fn check_claims(bundle: &Bundle, report: &mut VerifyReport) {
    let m = bundle.manifest();
    let expected = writer::compression(m);
    if m.compression == expected {
        report.add("compression", Status::Ok, m.compression.clone());
    } else {
        report.add(
            "compression",
            Status::Fail,
            format!("expected {expected:?}, found {:?}", m.compression),
        );
    }
    check_kind(bundle, report);
    if !m.shippable {
        report.add(
            "shippable",
            Status::Info,
            "not a whole model: do not publish",
        );
    }
    // A vision tower has hundreds of tensors and one reason.
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for s in &m.skipped {
        reasons.entry(&s.reason).or_default().push(&s.name);
    }
    for (reason, names) in reasons {
        let which = match names[..] {
            [name] => format!("{name:?}"),
            _ => format!("{} tensors, the first {:?}", names.len(), names[0]),
        };
        report.add("left out", Status::Info, format!("{which}: {reason}"));
    }
}

/// What is said of the weights as a whole.
fn check_kind(bundle: &Bundle, report: &mut VerifyReport) {
    let m = bundle.manifest();
    let kind = m.source.weights;
    let (mut ternary, mut all) = (0, 0);
    for (t, r) in m.tensors.iter().zip(&m.recipe.tensors) {
        if t.role != TensorRole::Linear {
            continue;
        }
        all += 1;
        // Floats that are stored as they came have the source's values; others are
        // known by what they became, which says nothing against a source that claims
        // not to be ternary: a recipe made them so.
        let changed = r.source.is_float() && t.dtype != r.source;
        let seen = match changed && kind == WeightsKind::Ternary {
            true => t.dtype,
            false => r.source,
        };
        match is_ternary(bundle, &t.name, seen, kind) {
            Ok(yes) => ternary += usize::from(yes),
            Err(e) => return report.add("weights kind", Status::Fail, e.to_string()),
        }
    }
    let status = match kind_is_honest(kind, ternary, all) {
        true => Status::Ok,
        false => Status::Fail,
    };
    let detail = format!("{kind:?}, {ternary} of {all} linear tensors ternary in the source");
    report.add("weights kind", status, detail);
}

/// `recipe.toml` agrees with the manifest.
fn check_recipe(bundle: &Bundle, report: &mut VerifyReport) {
    let m = bundle.manifest();
    let recipe = match bundle.recipe() {
        Ok(r) => r,
        Err(e) => return report.add("recipe", Status::Fail, e.to_string()),
    };
    let pairs = [
        ("bundle", Some(&m.name), Some(&recipe.bundle)),
        ("tool", Some(&m.producer.tool), Some(&recipe.tool)),
        (
            "tool_version",
            Some(&m.producer.version),
            Some(&recipe.tool_version),
        ),
        ("recipe", Some(&m.recipe.name), Some(&recipe.recipe)),
        (
            "source.name",
            Some(&m.source.name),
            Some(&recipe.source.name),
        ),
        (
            "source.digest",
            m.source.digest.as_ref(),
            recipe.source.digest.as_ref(),
        ),
        (
            "source.revision",
            m.source.revision.as_ref(),
            recipe.source.revision.as_ref(),
        ),
    ];
    for (field, expected, found) in pairs {
        if expected != found {
            let show = |v: Option<&String>| v.map_or("none".into(), |v| format!("{v:?}"));
            return report.add(
                "recipe",
                Status::Fail,
                format!(
                    "{RECIPE_FILE}: {field}: expected {}, found {}",
                    show(expected),
                    show(found)
                ),
            );
        }
    }
    match (recipe.status, recipe.verified_by) {
        (RecipeStatus::Unverified, _) => {
            report.add("recipe", Status::Info, "unverified: no gate has passed yet");
        }
        (RecipeStatus::Verified, Some(name))
            if is_plain_name(&name) && bundle.path().join(GATES_DIR).join(&name).is_file() =>
        {
            report.add(
                "recipe",
                Status::Ok,
                format!("verified by {GATES_DIR}/{name}"),
            );
        }
        (RecipeStatus::Verified, by) => report.add(
            "recipe",
            Status::Fail,
            format!(
                "{RECIPE_FILE}: verified_by: expected a transcript in {GATES_DIR}/, found {}",
                by.map_or("none".into(), |n| format!("{n:?}"))
            ),
        ),
    }
}

/// The manifest is the one that was written.
fn check_record(bundle: &Bundle, report: &mut VerifyReport) {
    // A record that cannot be read has its FAIL.
    let Ok(recipe) = bundle.recipe() else { return };
    let found = bundle.digest();
    if recipe.manifest == found {
        return report.add(
            "record",
            Status::Ok,
            format!("{MANIFEST_FILE} is as written"),
        );
    }
    report.add(
        "record",
        Status::Fail,
        format!(
            "{MANIFEST_FILE} was changed since it was written: {RECIPE_FILE} records digest {}, found {found}",
            bounded(&recipe.manifest)
        ),
    );
}

fn is_plain_name(name: &str) -> bool {
    crate::check::is_portable_path(&format!("tokenizer/{name}"))
}

/// Files that the bundle does not know of.
fn check_folder(bundle: &Bundle, report: &mut VerifyReport) {
    let known: BTreeSet<&str> = bundle
        .manifest()
        .files
        .iter()
        .map(|f| f.path.as_str())
        .chain([
            MANIFEST_FILE,
            WEIGHTS_FILE,
            RECIPE_FILE,
            RECIPE_TEXT_FILE,
            VERIFY_FILE,
        ])
        .chain([crate::cache::SEAL_FILE])
        .collect();
    for (folder, prefix) in [("", ""), ("tokenizer", "tokenizer/")] {
        let Ok(entries) = std::fs::read_dir(bundle.path().join(folder)) else {
            continue;
        };
        let mut names: Vec<String> = entries
            .flatten()
            .filter(|e| !e.path().is_dir())
            .map(|e| format!("{prefix}{}", e.file_name().to_string_lossy()))
            .collect();
        names.sort();
        for name in names {
            if !known.contains(name.as_str()) {
                report.add(
                    "files",
                    Status::Info,
                    format!("{name} is not part of the bundle"),
                );
            }
        }
    }
}

/// Bundle and source, field by field, with the declared deviations.
fn check_source(
    bundle: &Bundle,
    options: &VerifyOptions<'_>,
    found: &SourceDeclarations,
    declared: &Deviations,
    report: &mut VerifyReport,
) {
    let m = bundle.manifest();
    let recorded = m.source.declared.as_ref();
    let against = options.against.map(|a| a.declared);
    let digest = options.against.and_then(|a| a.digest);
    let digests = (digest, m.source.digest.as_deref());
    let (status, detail) = match (against, recorded) {
        (Some(a), Some(r)) if a != r => (
            Status::Fail,
            format!("is not what the bundle was made from: expected {r:?}, found {a:?}"),
        ),
        (Some(_), _) if matches!(digests, (Some(a), Some(r)) if a != r) => (
            Status::Fail,
            format!(
                "is not what the bundle was made from: expected digest {}, found {}",
                digests.1.unwrap_or_default(),
                digests.0.unwrap_or_default()
            ),
        ),
        (Some(_), Some(_)) => match digests {
            (Some(d), Some(_)) => (
                Status::Ok,
                format!("is what the bundle recorded, digest {d}"),
            ),
            (Some(_), None) => (
                Status::Info,
                "declares what the bundle recorded; its digest was not recorded".into(),
            ),
            (None, _) => (
                Status::Info,
                "declares what the bundle recorded; its content was not compared".into(),
            ),
        },
        (_, None) => (
            Status::Fail,
            format!("{MANIFEST_FILE}: source.declared is missing, which every conversion records"),
        ),
        (None, _) => (
            Status::Skipped,
            "was not given; compared with what the bundle recorded".into(),
        ),
    };
    report.add("source", status, detail);
    let Some(source) = against.or(recorded) else {
        report.add(
            "deviations",
            Status::Skipped,
            "nothing is known of the source",
        );
        return;
    };

    let outside: Vec<u32> = found
        .eos
        .iter()
        .copied()
        .filter(|&id| id as usize >= m.spec.vocab_size)
        .collect();
    let eos_breaks = if !outside.is_empty() {
        Some(format!(
            "{outside:?} are outside the vocabulary of {}",
            m.spec.vocab_size
        ))
    } else if found.eos.is_empty() && !source.eos.is_empty() {
        Some("no id ends generation any more".into())
    } else {
        None
    };
    let context_breaks = (found.context > source.context).then(|| {
        format!(
            "{} tokens exceed the source's {}",
            found.context, source.context
        )
    });
    let none = String::new;
    report.checks.push(judge(
        "eos",
        &source.eos,
        &found.eos,
        declared.eos.as_ref(),
        eos_breaks,
    ));
    report.checks.push(judge(
        "bos",
        &source.bos.clone().unwrap_or_else(none),
        &found.bos.clone().unwrap_or_else(none),
        declared.bos.as_ref(),
        None,
    ));
    let template = |d: &SourceDeclarations| d.chat_template.clone().unwrap_or_else(none);
    let template_breaks = (source.chat_template.is_some() && found.chat_template.is_none())
        .then(|| "the chat template is gone".to_string());
    report.checks.push(judge(
        "chat_template",
        &template(source),
        &template(found),
        declared.chat_template.as_ref(),
        template_breaks,
    ));
    report.checks.push(judge(
        "context",
        &source.context,
        &found.context,
        declared.context.as_ref(),
        context_breaks,
    ));
    report.checks.push(judge(
        "formats",
        &source.formats,
        &found.formats,
        declared.formats.as_ref(),
        None,
    ));
}

/// Compares one field: equal or declared is ok, undeclared is DIFF, breaking or
/// wrongly declared is FAIL.
fn judge<T: PartialEq + fmt::Debug>(
    name: &str,
    source: &T,
    bundle: &T,
    declared: Option<&Deviation<T>>,
    breaks: Option<String>,
) -> Check {
    let (status, detail) = match (breaks, declared) {
        (Some(problem), _) => (Status::Fail, problem),
        (None, Some(d)) if d.source != *source || d.bundle != *bundle => (
            Status::Fail,
            format!(
                "declared {:?} -> {:?}, found {source:?} -> {bundle:?}",
                d.source, d.bundle
            ),
        ),
        (None, Some(_)) if source == bundle => (
            Status::Fail,
            format!("declared as changed, but is {bundle:?} in both"),
        ),
        (None, Some(d)) => (
            Status::Ok,
            format!("{source:?} -> {bundle:?}, declared: {}", d.reason),
        ),
        (None, None) if source == bundle => (Status::Ok, format!("{bundle:?}")),
        (None, None) => (
            Status::Diff,
            format!("{source:?} -> {bundle:?} is not declared in {VERIFY_FILE}"),
        ),
    };
    Check {
        name: name.into(),
        status,
        detail,
    }
}

/// Marks a bundle's recipe as verified by a transcript in its `gates/` folder,
/// or as unverified again.
///
/// # Errors
/// When `recipe.toml` cannot be read or written, or the transcript is not there.
pub fn set_recipe_status(bundle: &Bundle, transcript: Option<&str>) -> Result<(), BundleError> {
    let mut recipe = bundle.recipe()?;
    if let Some(name) = transcript {
        let path = bundle.path().join(GATES_DIR).join(name);
        if !is_plain_name(name) || !path.is_file() {
            return Err(BundleError::malformed(
                path,
                "transcript",
                "expected the plain name of a file in gates/",
            ));
        }
    }
    recipe.status = match transcript {
        Some(_) => RecipeStatus::Verified,
        None => RecipeStatus::Unverified,
    };
    recipe.verified_by = transcript.map(String::from);
    crate::stage::replace_file(
        &bundle.path().join(RECIPE_FILE),
        &crate::declare::to_toml(&recipe)?,
    )
}
