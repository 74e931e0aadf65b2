//! Writing a bundle: staged, checked, and visible only when complete.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    thread,
};

use carat_tensor::{
    DType, Grid, Shape,
    packed::{self, PANEL_ROWS},
};
use serde::Deserialize;

use crate::{
    BundleError,
    bundle::read_capped,
    declare::{
        DECLARE_VERSION, Expectations, RECIPE_SCHEMA, RecipeRecord, RecipeSource, RecipeStatus,
        portable_argument, to_toml,
    },
    layout::{check_rows, grid_bytes, layout_for, packed_layout, stored_bytes},
    manifest::{
        ActivationContract, FileEntry, GATES_DIR, Layout, MANIFEST_FILE, MAX_MANIFEST_BYTES,
        Manifest, Producer, RECIPE_FILE, RECIPE_TEXT_FILE, ResolvedRecipe, ResolvedTensor, SCHEMA,
        SEGMENT_ALIGN, Segment, SizeReport, SkippedTensor, SourceRecord, TEMPLATE_FILE,
        TENSOR_ALIGN, TOKENIZER_FILE, TensorEntry, VERIFY_FILE, VERSION, WEIGHTS_FILE, WeightsFile,
        is_matrix, segment_of,
    },
    restate::convert_rows,
    spec::{ModelSpec, TensorRole},
    stage::{self, Staging},
    text::TextAssets,
};

/// Source bytes that one thread converts and packs at a time.
const CHUNK_BYTES: usize = 4 << 20;
/// Room asked for besides the weights: manifest, tokenizer and the file
/// system's own tables.
const SPARE_BYTES: u64 = 1 << 20;

/// How a writer treats its target.
#[derive(Clone, Copy, Debug)]
pub struct WriterOptions {
    /// Replace a bundle that is already there. Folders that are no bundle are
    /// never replaced.
    pub overwrite: bool,
    /// Bytes that will be written, if known: refused at once when they do not
    /// fit.
    pub expected_bytes: u64,
    /// Threads that convert and pack (at least 1). The bytes written do not
    /// depend on it.
    pub threads: usize,
}

impl Default for WriterOptions {
    fn default() -> Self {
        WriterOptions {
            overwrite: false,
            expected_bytes: 0,
            threads: thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// A tensor in logical form.
#[derive(Clone, Copy, Debug)]
pub struct TensorToStore<'a> {
    /// Canonical name.
    pub name: &'a str,
    /// What it is for.
    pub role: TensorRole,
    /// Format of `data`.
    pub dtype: DType,
    /// Logical shape.
    pub shape: &'a Shape,
    /// Row-major whole blocks.
    pub data: &'a [u8],
}

/// What a manifest says beyond the tensor table, which the writer keeps itself.
#[derive(Clone, Debug)]
pub struct ManifestParts {
    /// Name of the model.
    pub name: String,
    /// Whether this is a whole model.
    pub shippable: bool,
    /// The model.
    pub spec: ModelSpec,
    /// Tokenizer, template, special tokens.
    pub text: TextAssets,
    /// Where the weights came from.
    pub source: SourceRecord,
    /// Name of the recipe, such as `keep`.
    pub recipe: String,
    /// What the recipe did to each tensor, in the order they were added.
    pub resolved: Vec<ResolvedTensor>,
    /// Arithmetic on activations.
    pub activation: ActivationContract,
    /// Tensors of the source that were left out.
    pub skipped: Vec<SkippedTensor>,
    /// Text of the recipe, for `recipe.yaml`; none if it has no text.
    pub recipe_text: Option<String>,
    /// Deliberate deviations.
    pub expectations: Expectations,
    /// The command that runs.
    pub command: CommandRecord,
}

/// The command that makes a bundle, for `recipe.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandRecord {
    /// Program and subcommand, such as `carat convert`.
    pub command: String,
    /// Its arguments; absolute paths are cut to their last part.
    pub args: Vec<String>,
    /// Remarks.
    pub notes: Vec<String>,
}

/// A bundle that was written.
#[derive(Clone, Debug)]
pub struct FinishedBundle {
    /// Its folder.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// BLAKE3 of its manifest, see [`Bundle::digest`](crate::Bundle::digest).
    pub digest: String,
}

/// Where weights go. A trait so that tests can make the disk fail.
pub(crate) trait Sink: Write {
    /// Waits until everything written is on disk.
    fn sync(&mut self) -> io::Result<()>;
}

impl Sink for BufWriter<File> {
    fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.get_ref().sync_all()
    }
}

/// Writes a bundle tensor by tensor, in the order of the spec.
///
/// Everything goes to a staging folder beside the target. Only
/// [`finish`](BundleWriter::finish) makes it appear, whole, under the target's
/// name. A writer that is dropped, killed or stopped by a full disk leaves
/// nothing that opens; what a kill leaves is removed by the next writer there.
pub struct BundleWriter {
    target: PathBuf,
    /// Before `staging`, so that the file is closed when its folder is removed.
    sink: Box<dyn Sink>,
    staging: Staging,
    overwrite: bool,
    threads: usize,
    weights_path: PathBuf,
    offset: u64,
    hasher: blake3::Hasher,
    segments: Vec<Segment>,
    tensors: Vec<TensorEntry>,
    failed: bool,
}

impl BundleWriter {
    /// Starts a bundle at `target`.
    ///
    /// # Errors
    /// When the target exists and may not be replaced, when the file system is
    /// too small or read-only.
    pub fn create(target: &Path, options: WriterOptions) -> Result<BundleWriter, BundleError> {
        BundleWriter::with_sink(target, options, |file| {
            Box::new(BufWriter::with_capacity(1 << 20, file))
        })
    }

    pub(crate) fn with_sink(
        target: &Path,
        options: WriterOptions,
        sink: impl FnOnce(File) -> Box<dyn Sink>,
    ) -> Result<BundleWriter, BundleError> {
        if target.file_name().is_none() {
            return Err(BundleError::Exists {
                path: target.to_path_buf(),
                problem: "is not the name of a folder that can be made".into(),
            });
        }
        require_replaceable(target, options.overwrite)?;
        let parent = stage::parent_of(target);
        let staging = Staging::reserve(parent)?;
        if options.expected_bytes > 0 {
            let needed = options.expected_bytes.saturating_add(SPARE_BYTES);
            stage::require_space(parent, target, needed)?;
        }
        fs::create_dir(staging.path()).map_err(BundleError::io(target))?;
        let weights_path = staging.path().join(WEIGHTS_FILE);
        let file = File::create_new(&weights_path).map_err(BundleError::io(target))?;
        Ok(BundleWriter {
            target: target.to_path_buf(),
            sink: sink(file),
            staging,
            overwrite: options.overwrite,
            threads: options.threads.max(1),
            weights_path: target.join(WEIGHTS_FILE),
            offset: 0,
            hasher: blake3::Hasher::new(),
            segments: Vec::new(),
            tensors: Vec::new(),
            failed: false,
        })
    }

    /// Adds a tensor in its own format: matrices packed where the format has a
    /// packed layout, vectors as row-major fp32.
    ///
    /// # Errors
    /// When the data is not what its format and shape say, when a weight is not a
    /// finite number, when a quantized
    /// matrix has no packed layout, or when writing fails.
    pub fn add_tensor(&mut self, tensor: TensorToStore<'_>) -> Result<&TensorEntry, BundleError> {
        let stored = if is_matrix(tensor.role) {
            tensor.dtype
        } else {
            DType::F32
        };
        self.add_converted(tensor, stored)
    }

    /// Adds a tensor restated exactly in another format: TQ1_0 as TQ2_0 and back, any
    /// quantized format as its I8G16 or I8G32, anything as F32.
    ///
    /// # Errors
    /// As [`add_tensor`](BundleWriter::add_tensor), and when the two formats
    /// have no exact restatement.
    pub fn add_converted(
        &mut self,
        tensor: TensorToStore<'_>,
        stored: DType,
    ) -> Result<&TensorEntry, BundleError> {
        let result = self.try_add(tensor, stored);
        self.failed |= result.is_err();
        result?;
        Ok(&self.tensors[self.tensors.len() - 1])
    }

    fn try_add(&mut self, t: TensorToStore<'_>, stored: DType) -> Result<(), BundleError> {
        let fault = |problem: String| {
            BundleError::tensor(self.target.display().to_string(), t.name, problem)
        };
        let expected = t.shape.bytes(t.dtype).map_err(|e| fault(e.to_string()))?;
        if t.data.len() != expected {
            return Err(fault(format!(
                "{} of shape {} takes {expected} bytes, found {}",
                t.dtype,
                t.shape,
                t.data.len()
            )));
        }
        if !is_matrix(t.role) && stored != DType::F32 {
            return Err(fault(format!("a vector is stored as F32, not as {stored}")));
        }
        let layout = layout_for(t.role, stored, t.shape);
        if layout == Layout::RowMajor && !stored.is_float() {
            return Err(fault(format!("{stored} has no packed layout")));
        }
        let bytes = stored_bytes(layout, stored, t.shape).map_err(fault)?;
        let (segment, offset) = self.place(t.name)?;
        let mut hasher = blake3::Hasher::new();
        self.write_rows(&t, stored, layout, &mut hasher)?;
        debug_assert_eq!(self.offset - offset, bytes);
        self.record(TensorEntry {
            name: t.name.to_string(),
            role: t.role,
            dtype: stored,
            grid: None,
            shape: t.shape.clone(),
            layout,
            segment,
            offset,
            bytes,
            blake3: hasher.finalize().to_hex().to_string(),
        });
        Ok(())
    }

    /// Adds a matrix that is stored as a grid, from its sections: as they are, or
    /// packed for kernels.
    ///
    /// # Errors
    /// When the grid does not fit the shape or the bytes, when it has no such layout,
    /// or when writing fails.
    pub fn add_grid(
        &mut self,
        name: &str,
        role: TensorRole,
        shape: &Shape,
        grid: Grid,
        layout: Layout,
        data: &[u8],
    ) -> Result<&TensorEntry, BundleError> {
        let result = self.try_add_grid(name, role, shape, grid, layout, data);
        self.failed |= result.is_err();
        result?;
        Ok(&self.tensors[self.tensors.len() - 1])
    }

    fn try_add_grid(
        &mut self,
        name: &str,
        role: TensorRole,
        shape: &Shape,
        grid: Grid,
        layout: Layout,
        data: &[u8],
    ) -> Result<(), BundleError> {
        let fault =
            |problem: String| BundleError::tensor(self.target.display().to_string(), name, problem);
        let sections = grid_bytes(role, grid, shape, Layout::Sections).map_err(fault)?;
        if data.len() as u64 != sections {
            return Err(fault(format!(
                "{grid} of shape {shape} takes {sections} bytes, found {}",
                data.len()
            )));
        }
        let packed;
        let data = if layout == Layout::Packed16 {
            let layout = packed_layout(grid, shape).map_err(fault)?;
            let mut out = vec![0; layout.bytes()];
            packed::pack(&layout, data, &mut out).map_err(|e| fault(e.to_string()))?;
            packed = out;
            &packed[..]
        } else {
            data
        };
        let bytes = grid_bytes(role, grid, shape, layout).map_err(fault)?;
        let (segment, offset) = self.place(name)?;
        self.write(data)?;
        self.record(TensorEntry {
            name: name.to_string(),
            role,
            dtype: DType::F32,
            grid: Some(grid),
            shape: shape.clone(),
            layout,
            segment,
            offset,
            bytes,
            blake3: blake3::hash(data).to_hex().to_string(),
        });
        Ok(())
    }

    /// Opens the tensor's segment if need be and pads to where the tensor starts.
    fn place(&mut self, name: &str) -> Result<(String, u64), BundleError> {
        let segment = segment_of(name);
        if self.segments.last().is_none_or(|s| s.name != segment) {
            if self.segments.iter().any(|s| s.name == segment) {
                return Err(BundleError::tensor(
                    self.target.display().to_string(),
                    name,
                    format!("segment {segment:?} has been closed"),
                ));
            }
            self.pad_to(SEGMENT_ALIGN)?;
            self.segments.push(Segment {
                name: segment.to_string(),
                offset: self.offset,
                bytes: 0,
            });
        }
        self.pad_to(TENSOR_ALIGN)?;
        Ok((segment.to_string(), self.offset))
    }

    /// Notes a tensor that has been written.
    fn record(&mut self, entry: TensorEntry) {
        if let Some(segment) = self.segments.last_mut() {
            segment.bytes = self.offset - segment.offset;
        }
        self.tensors.push(entry);
    }

    /// Converts, packs and writes a tensor in chunks of whole panels, so that
    /// no second copy of it exists. Chunks are written in order, whoever packs
    /// them.
    fn write_rows(
        &mut self,
        t: &TensorToStore<'_>,
        stored: DType,
        layout: Layout,
        hasher: &mut blake3::Hasher,
    ) -> Result<(), BundleError> {
        let rows = t.shape.rows().unwrap_or(0);
        let row_bytes = t.data.len().checked_div(rows).unwrap_or(0);
        if row_bytes == 0 {
            return Ok(());
        }
        let chunk_rows = (CHUNK_BYTES / row_bytes)
            .next_multiple_of(PANEL_ROWS)
            .max(PANEL_ROWS);
        let chunks: Vec<(usize, &[u8])> = t
            .data
            .chunks(chunk_rows * row_bytes)
            .enumerate()
            .map(|(i, data)| (i * chunk_rows, data))
            .collect();
        let convert = |&(first, data): &(usize, &[u8])| {
            check_rows(t.dtype, data, first, t.shape.columns())?;
            convert_rows(t, stored, layout, data, data.len() / row_bytes)
        };
        for wave in chunks.chunks(self.threads) {
            let results: Vec<_> = if let [single] = wave {
                vec![convert(single)]
            } else {
                thread::scope(|scope| {
                    let workers: Vec<_> = wave
                        .iter()
                        .map(|chunk| scope.spawn(|| convert(chunk)))
                        .collect();
                    workers
                        .into_iter()
                        .map(|w| w.join().expect("invariant: packing does not panic"))
                        .collect()
                })
            };
            for result in results {
                let bytes = result.map_err(|problem| {
                    BundleError::tensor(self.target.display().to_string(), t.name, problem)
                })?;
                hasher.update(&bytes);
                self.write(&bytes)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), BundleError> {
        self.sink
            .write_all(bytes)
            .map_err(BundleError::io(&self.weights_path))?;
        self.hasher.update(bytes);
        self.offset += bytes.len() as u64;
        Ok(())
    }

    fn pad_to(&mut self, align: u64) -> Result<(), BundleError> {
        let zeros = [0u8; SEGMENT_ALIGN as usize];
        let gap = (self.offset.next_multiple_of(align) - self.offset) as usize;
        self.write(&zeros[..gap])
    }

    /// Completes the bundle: pads the weights, writes tokenizer, template,
    /// records and, last of all, the manifest; waits for the disk; renames.
    ///
    /// # Errors
    /// When the tensors are not exactly those of the spec, when a value cannot
    /// be written, or when the disk or the rename fails. Nothing is left then.
    pub fn finish(mut self, parts: ManifestParts) -> Result<FinishedBundle, BundleError> {
        if self.failed {
            return Err(BundleError::malformed(
                &self.target,
                "weights.bin",
                "an earlier tensor could not be written",
            ));
        }
        self.pad_to(SEGMENT_ALIGN)?;
        self.sink
            .sync()
            .map_err(BundleError::io(&self.weights_path))?;

        let folder = self.staging.path().to_path_buf();
        let files = write_text(&folder, &parts.text)?;
        fs::create_dir(folder.join(GATES_DIR)).map_err(BundleError::io(&self.target))?;

        let mut text = parts.text.config;
        text.chat_template = None;
        let report = SizeReport::of(&self.tensors, self.offset)
            .map_err(|e| e.at(&self.target.join(MANIFEST_FILE)))?;
        let mut manifest = Manifest {
            schema: SCHEMA.into(),
            version: VERSION,
            producer: Producer::current(),
            name: parts.name,
            shippable: parts.shippable,
            spec: parts.spec,
            text,
            source: parts.source,
            compression: String::new(),
            activation: parts.activation,
            weights: WeightsFile {
                bytes: self.offset,
                blake3: self.hasher.finalize().to_hex().to_string(),
                segments: std::mem::take(&mut self.segments),
            },
            tensors: std::mem::take(&mut self.tensors),
            files,
            recipe: ResolvedRecipe {
                name: parts.recipe,
                tensors: parts.resolved,
            },
            size_report: report,
            skipped: parts.skipped,
        };
        manifest.compression = compression(&manifest);
        let json = manifest
            .to_json()
            .map_err(|e| e.at(&self.target.join(MANIFEST_FILE)))?;
        let digest = blake3::hash(&json).to_hex().to_string();
        let recipe = recipe_record(&manifest, &digest, parts.command);
        stage::write_file(&folder.join(RECIPE_FILE), &to_toml(&recipe)?)?;
        if let Some(text) = &parts.recipe_text {
            stage::write_file(&folder.join(RECIPE_TEXT_FILE), text.as_bytes())?;
        }
        stage::write_file(&folder.join(VERIFY_FILE), &to_toml(&parts.expectations)?)?;
        // The manifest makes a folder a bundle, so it comes last.
        stage::write_file(&folder.join(MANIFEST_FILE), &json)?;
        stage::sync_dir(&folder).map_err(BundleError::io(&self.target))?;

        // Windows moves no folder with an open file in it.
        drop(self.sink);
        require_replaceable(&self.target, self.overwrite)?;
        if self.overwrite {
            self.staging.replace(&self.target)?;
        } else if !self.staging.publish(&self.target)? {
            return Err(BundleError::Exists {
                path: self.target,
                problem: "appeared while the bundle was written".into(),
            });
        }
        Ok(FinishedBundle {
            path: self.target,
            manifest,
            digest,
        })
    }
}

/// `keep: Q4_1 210, Q8_0 1`: the recipe and what it made of the matrices.
pub(crate) fn compression(manifest: &Manifest) -> String {
    format!("{}: {}", manifest.recipe.name, manifest.matrix_formats())
}

fn recipe_record(manifest: &Manifest, digest: &str, command: CommandRecord) -> RecipeRecord {
    RecipeRecord {
        schema: RECIPE_SCHEMA.into(),
        version: DECLARE_VERSION,
        bundle: manifest.name.clone(),
        manifest: digest.into(),
        command: command.command,
        args: command.args.iter().map(|a| portable_argument(a)).collect(),
        tool: manifest.producer.tool.clone(),
        tool_version: manifest.producer.version.clone(),
        recipe: manifest.recipe.name.clone(),
        status: RecipeStatus::Unverified,
        verified_by: None,
        needs: Vec::new(),
        notes: command.notes,
        open_questions: Vec::new(),
        steps: Vec::new(),
        source: RecipeSource {
            kind: manifest.source.kind,
            name: manifest.source.name.clone(),
            digest: manifest.source.digest.clone(),
            revision: manifest.source.revision.clone(),
        },
        runtime_env: std::collections::BTreeMap::new(),
    }
}

fn write_text(folder: &Path, text: &TextAssets) -> Result<Vec<FileEntry>, BundleError> {
    let template = text.config.chat_template.as_deref().map(str::as_bytes);
    let mut files = Vec::new();
    for (path, bytes) in [
        (TOKENIZER_FILE, text.tokenizer_json.as_deref()),
        (TEMPLATE_FILE, template),
    ] {
        let Some(bytes) = bytes else { continue };
        let full = folder.join(path);
        let parent = stage::parent_of(&full);
        fs::create_dir_all(parent).map_err(BundleError::io(parent))?;
        stage::write_file(&full, bytes)?;
        stage::sync_dir(parent).map_err(BundleError::io(parent))?;
        files.push(FileEntry {
            path: path.into(),
            bytes: bytes.len() as u64,
            blake3: blake3::hash(bytes).to_hex().to_string(),
        });
    }
    Ok(files)
}

/// Whether a writer may put a bundle at `target`.
fn require_replaceable(target: &Path, overwrite: bool) -> Result<(), BundleError> {
    let exists = |problem: &str| {
        Err(BundleError::Exists {
            path: target.to_path_buf(),
            problem: problem.into(),
        })
    };
    let metadata = match fs::symlink_metadata(target) {
        Ok(m) => m,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(BundleError::io(target)(e)),
    };
    if !metadata.is_dir() {
        return exists("exists and is not a folder");
    }
    let mut entries = fs::read_dir(target).map_err(BundleError::io(target))?;
    if entries.next().is_none() {
        return Ok(());
    }
    match (looks_like_bundle(target), overwrite) {
        (true, true) => Ok(()),
        (true, false) => exists("is a bundle already and is not overwritten unless asked"),
        (false, _) => exists("holds other files and is never overwritten"),
    }
}

/// Whether a folder's manifest names our schema, in whatever version and state.
pub(crate) fn looks_like_bundle(dir: &Path) -> bool {
    #[derive(Deserialize)]
    struct Head {
        schema: String,
    }
    read_capped(&dir.join(MANIFEST_FILE), MAX_MANIFEST_BYTES)
        .ok()
        .and_then(|json| serde_json::from_slice::<Head>(&json).ok())
        .is_some_and(|head| head.schema == SCHEMA)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that has room for so many bytes, or fails when it is to sync.
    struct Failing {
        room: usize,
        sync: bool,
    }

    impl Write for Failing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.room == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let n = bytes.len().min(self.room);
            self.room -= n;
            Ok(n)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sink for Failing {
        fn sync(&mut self) -> io::Result<()> {
            match self.sync {
                true => Ok(()),
                false => Err(io::Error::other("sync failed")),
            }
        }
    }

    fn parts(spec: ModelSpec) -> ManifestParts {
        ManifestParts {
            name: "x".into(),
            shippable: true,
            spec,
            text: TextAssets::default(),
            source: SourceRecord {
                kind: crate::manifest::SourceKind::Synthetic,
                name: "x".into(),
                architecture: "x".into(),
                digest: None,
                revision: None,
                weights: crate::manifest::WeightsKind::Dense,
                permuted_qk: false,
                notes: vec![],
                declared: None,
            },
            recipe: "keep".into(),
            resolved: vec![],
            activation: ActivationContract::default(),
            skipped: vec![],
            recipe_text: None,
            expectations: Expectations::default(),
            command: CommandRecord::default(),
        }
    }

    fn empty_spec() -> ModelSpec {
        serde_json::from_str(
            r#"{"hidden_size":8,"vocab_size":8,"max_context":8,"embedding":{"scale":1.0},
            "layers":[],"final_norm":{"eps":0.1,"weight_offset":0.0},
            "head":{"tied":true,"scale":1.0,"softcap":null},"ropes":[]}"#,
        )
        .unwrap()
    }

    fn add(writer: &mut BundleWriter) -> Result<(), BundleError> {
        let shape = Shape::from([64, 64]);
        let tensor = TensorToStore {
            name: "embed.weight",
            role: TensorRole::Embedding,
            dtype: DType::F32,
            shape: &shape,
            data: &[0; 64 * 64 * 4],
        };
        writer.add_tensor(tensor).map(|_| ())
    }

    #[test]
    fn a_failing_disk_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("b");
        for room in [0, 1, 4096, 64 * 64 * 4 - 1] {
            let options = WriterOptions::default();
            let sink = |_| Box::new(Failing { room, sync: true }) as Box<dyn Sink>;
            let mut writer = BundleWriter::with_sink(&target, options, sink).unwrap();
            let e = add(&mut writer).unwrap_err().to_string();
            assert!(e.contains("b/weights.bin"), "{e}");
            // A caller that goes on all the same gets no bundle.
            let e = writer.finish(parts(empty_spec())).unwrap_err().to_string();
            assert!(e.contains("an earlier tensor"), "{e}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
        let options = WriterOptions::default();
        let sink = |_| {
            Box::new(Failing {
                room: usize::MAX,
                sync: false,
            }) as Box<dyn Sink>
        };
        let mut writer = BundleWriter::with_sink(&target, options, sink).unwrap();
        add(&mut writer).unwrap();
        let e = writer.finish(parts(empty_spec())).unwrap_err().to_string();
        assert!(e.contains("sync failed"), "{e}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_bundle_that_would_not_open_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("b");
        // No layers: not a model.
        let mut writer = BundleWriter::create(&target, WriterOptions::default()).unwrap();
        add(&mut writer).unwrap();
        let e = writer.finish(parts(empty_spec())).unwrap_err().to_string();
        assert!(e.contains("spec.layers"), "{e}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_stored_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut w = BundleWriter::create(&dir.path().join("b"), WriterOptions::default()).unwrap();
        let shape = Shape::from([4, 256]);
        let tensor = |dtype: DType, role, data| TensorToStore {
            name: "layers.0.attn.q.weight",
            role,
            dtype,
            shape: &shape,
            data,
        };
        let linear = TensorRole::Linear;
        let data = vec![0; 4 * 1024];
        let size = |d: DType| &data[..shape.bytes(d).unwrap()];
        let q2 = tensor(DType::Q2_K, linear, size(DType::Q2_K));
        let e = w.add_tensor(q2).unwrap_err().to_string();
        assert!(e.contains("Q2_K has no packed layout"), "{e}");
        let f32 = tensor(DType::F32, linear, size(DType::F32));
        let e = w.add_converted(f32, DType::Q8_0).unwrap_err().to_string();
        assert!(e.contains("without rounding"), "{e}");
        let norm = tensor(DType::F32, TensorRole::Norm, size(DType::F32));
        let e = w.add_converted(norm, DType::F16).unwrap_err().to_string();
        assert!(e.contains("stored as F32"), "{e}");
    }
}
