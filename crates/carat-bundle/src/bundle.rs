//! An opened bundle.

use std::{
    borrow::Cow,
    collections::HashMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use carat_tensor::{GridMatrix, packed};
use memmap2::Mmap;

use crate::{
    BundleError,
    declare::{Expectations, RecipeRecord, read_toml},
    layout::packed_layout,
    manifest::{
        Layout, MANIFEST_FILE, MAX_MANIFEST_BYTES, MAX_TEXT_BYTES, Manifest, RECIPE_FILE,
        TEMPLATE_FILE, TOKENIZER_FILE, TensorEntry, VERIFY_FILE, WEIGHTS_FILE,
    },
    mmap::map_file,
    source::{SourceError, TensorInfo, TensorSource},
    text::TextAssets,
};

/// A bundle whose weights are mapped into memory.
///
/// Opening reads and checks the manifest and maps `weights.bin`; it hashes
/// nothing and touches no weight, so it takes milliseconds whatever the size.
/// [`verify`](crate::verify()) reads everything.
pub struct Bundle {
    path: PathBuf,
    origin: String,
    manifest: Manifest,
    digest: String,
    /// `None` for a file of no bytes, which cannot be mapped everywhere.
    weights: Option<Mmap>,
    index: HashMap<String, usize>,
    sorted: OnceLock<Vec<String>>,
}

/// A tensor as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct BundleTensor<'a> {
    /// Its row of the manifest.
    pub entry: &'a TensorEntry,
    /// Its bytes in the layout that the entry names, aligned to 256 in memory.
    pub bytes: &'a [u8],
}

impl<'a> BundleTensor<'a> {
    /// The packed view of a matrix that is stored so.
    pub fn packed(&self) -> Option<packed::PackedRef<'a>> {
        match self.entry.layout {
            Layout::Packed16 => {
                // Checked at open: the layout exists and the sizes agree.
                let layout = packed_layout(self.entry.form(), &self.entry.shape).ok()?;
                packed::PackedRef::new(layout, self.bytes).ok()
            }
            Layout::RowMajor | Layout::Sections => None,
        }
    }

    /// The sections of a grid, whatever its layout; `None` if the tensor is no grid.
    ///
    /// # Errors
    /// Says what is wrong with its bytes.
    pub fn grid_sections(&self) -> Option<Result<Cow<'a, [u8]>, String>> {
        self.entry.grid?;
        if self.entry.layout != Layout::Packed16 {
            return Some(Ok(Cow::Borrowed(self.bytes)));
        }
        let unpack = || {
            let layout = packed_layout(self.entry.form(), &self.entry.shape)?;
            let mut out = vec![0; layout.row_major_bytes()];
            packed::unpack(&layout, self.bytes, &mut out).map_err(|e| e.to_string())?;
            Ok(Cow::Owned(out))
        };
        Some(unpack())
    }

    /// The quantized matrix of a grid; `None` if the tensor is no grid.
    ///
    /// # Errors
    /// Says what is wrong with its bytes.
    pub fn grid_matrix(&self) -> Option<Result<GridMatrix, String>> {
        let (grid, [rows, columns]) = (self.entry.grid?, self.entry.shape.dims()) else {
            return None;
        };
        Some(self.grid_sections()?.and_then(|sections| {
            GridMatrix::from_bytes(grid, *rows, *columns, &sections).map_err(|e| e.to_string())
        }))
    }
}

impl Bundle {
    /// Opens a bundle folder.
    ///
    /// # Errors
    /// When a file is missing or unreadable, or when the manifest contradicts
    /// itself or the size of `weights.bin`.
    pub fn open(dir: &Path) -> Result<Bundle, BundleError> {
        let manifest_path = dir.join(MANIFEST_FILE);
        if dir.is_dir() && !manifest_path.exists() {
            return Err(BundleError::NotABundle {
                path: dir.to_path_buf(),
                problem: format!("there is no {MANIFEST_FILE}"),
            });
        }
        let json = read_capped(&manifest_path, MAX_MANIFEST_BYTES)?;
        let manifest = Manifest::parse(&json).map_err(|e| e.at(&manifest_path))?;
        let weights_path = dir.join(WEIGHTS_FILE);
        let metadata = std::fs::metadata(&weights_path).map_err(BundleError::io(&weights_path))?;
        let expected = manifest.weights.bytes;
        let weights = if metadata.len() == 0 {
            None
        } else {
            Some(map_file(&weights_path).map_err(BundleError::io(&weights_path))?)
        };
        let found = weights.as_ref().map_or(0, |w| w.len() as u64);
        if found != expected {
            return Err(BundleError::malformed(
                &weights_path,
                "size",
                format!("the manifest says {expected} bytes, found {found}"),
            ));
        }
        let index = manifest
            .tensors
            .iter()
            .enumerate()
            .map(|(i, t)| (t.name.clone(), i))
            .collect();
        Ok(Bundle {
            path: dir.to_path_buf(),
            origin: dir.display().to_string(),
            digest: blake3::hash(&json).to_hex().to_string(),
            manifest,
            weights,
            index,
            sorted: OnceLock::new(),
        })
    }

    /// What the bundle says about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The bundle's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// BLAKE3 of `manifest.json` (64 hex digits). The manifest holds the digest
    /// of everything else that the model's answers depend on, so this names the
    /// bundle's content.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// A tensor as stored, without copying.
    ///
    /// # Errors
    /// When there is no tensor of that name.
    pub fn tensor(&self, name: &str) -> Result<BundleTensor<'_>, BundleError> {
        let entry = self
            .index
            .get(name)
            .map(|&i| &self.manifest.tensors[i])
            .ok_or_else(|| BundleError::tensor(&self.origin, name, "is not in the bundle"))?;
        Ok(BundleTensor {
            entry,
            bytes: self.stored(entry),
        })
    }

    /// All tensors as stored, in file order.
    pub fn tensors(&self) -> impl Iterator<Item = BundleTensor<'_>> {
        self.manifest.tensors.iter().map(|entry| BundleTensor {
            entry,
            bytes: self.stored(entry),
        })
    }

    /// The whole of `weights.bin`.
    pub fn weights(&self) -> &[u8] {
        self.weights.as_deref().unwrap_or_default()
    }

    fn stored(&self, entry: &TensorEntry) -> &[u8] {
        // Checked at open: every tensor lies inside a file of exactly this size.
        let start = entry.offset as usize;
        &self.weights()[start..start + entry.bytes as usize]
    }

    /// Tokenizer, template, special tokens and sampling defaults.
    ///
    /// # Errors
    /// When a file that the manifest lists is missing, has another size or
    /// content, or is not UTF-8.
    pub fn text(&self) -> Result<TextAssets, BundleError> {
        let mut text = TextAssets {
            tokenizer_json: self.file(TOKENIZER_FILE)?,
            config: self.manifest.text.clone(),
        };
        if let Some(template) = self.file(TEMPLATE_FILE)? {
            let template = String::from_utf8(template).map_err(|e| {
                BundleError::malformed(
                    self.path.join(TEMPLATE_FILE),
                    "content",
                    format!("is not UTF-8 at byte {}", e.utf8_error().valid_up_to()),
                )
            })?;
            text.config.chat_template = Some(template);
        }
        Ok(text)
    }

    /// Content of a file that the manifest lists, `None` if it lists none of
    /// that path. Size and digest are checked.
    pub(crate) fn file(&self, path: &str) -> Result<Option<Vec<u8>>, BundleError> {
        let Some(entry) = self.manifest.files.iter().find(|f| f.path == path) else {
            return Ok(None);
        };
        let full = self.path.join(path);
        let bytes = read_capped(&full, MAX_TEXT_BYTES)?;
        if bytes.len() as u64 != entry.bytes {
            return Err(BundleError::malformed(
                full,
                "size",
                format!(
                    "the manifest says {} bytes, found {}",
                    entry.bytes,
                    bytes.len()
                ),
            ));
        }
        let found = blake3::hash(&bytes).to_hex().to_string();
        if found != entry.blake3 {
            return Err(BundleError::malformed(
                full,
                "digest",
                format!("the manifest says {}, found {found}", entry.blake3),
            ));
        }
        Ok(Some(bytes))
    }

    /// How the bundle was made (`recipe.toml`).
    ///
    /// # Errors
    /// When the file is missing or not a recipe record.
    pub fn recipe(&self) -> Result<RecipeRecord, BundleError> {
        read_toml(&self.path.join(RECIPE_FILE))
    }

    /// Declared deviations from the source (`verify.toml`).
    ///
    /// # Errors
    /// When the file is missing or malformed.
    pub fn expectations(&self) -> Result<Expectations, BundleError> {
        read_toml(&self.path.join(VERIFY_FILE))
    }
}

impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bundle")
            .field("path", &self.path)
            .field("name", &self.manifest.name)
            .field("digest", &self.digest)
            .finish_non_exhaustive()
    }
}

/// A bundle's tensors in logical form: packed matrices are unpacked on reading,
/// grids are decoded to F32.
impl TensorSource for Bundle {
    fn origin(&self) -> &str {
        &self.origin
    }

    fn names(&self) -> Vec<String> {
        let sorted = self.sorted.get_or_init(|| {
            let mut names: Vec<String> = self.index.keys().cloned().collect();
            names.sort();
            names
        });
        sorted.clone()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let entry = &self.manifest.tensors[*self.index.get(name)?];
        Some(TensorInfo {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
        })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        let Ok(tensor) = self.tensor(name) else {
            return Err(SourceError::Missing {
                origin: self.origin.clone(),
                name: name.to_string(),
            });
        };
        let malformed = |problem: String| SourceError::Malformed {
            origin: self.origin.clone(),
            name: name.to_string(),
            problem,
        };
        if let Some(matrix) = tensor.grid_matrix() {
            let matrix = matrix.map_err(malformed)?;
            let mut out = Vec::with_capacity(matrix.codes.len() * 4);
            let mut values = vec![0f32; matrix.columns];
            for row in 0..matrix.rows {
                matrix.decode_row(row, &mut values);
                out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            }
            return Ok(Cow::Owned(out));
        }
        match tensor.entry.layout {
            Layout::RowMajor => Ok(Cow::Borrowed(tensor.bytes)),
            Layout::Sections => Err(malformed("is no grid".into())),
            Layout::Packed16 => {
                let layout =
                    packed_layout(tensor.entry.dtype, &tensor.entry.shape).map_err(malformed)?;
                let bytes = tensor
                    .entry
                    .shape
                    .bytes(tensor.entry.dtype)
                    .map_err(|e| malformed(e.to_string()))?;
                let mut out = vec![0; bytes];
                packed::unpack(&layout, tensor.bytes, &mut out)
                    .map_err(|e| malformed(e.to_string()))?;
                Ok(Cow::Owned(out))
            }
        }
    }
}

/// Reads a whole file of at most `max` bytes.
pub(crate) fn read_capped(path: &Path, max: u64) -> Result<Vec<u8>, BundleError> {
    let file = File::open(path).map_err(BundleError::io(path))?;
    let metadata = file.metadata().map_err(BundleError::io(path))?;
    if metadata.is_dir() {
        return Err(BundleError::io(path)(io::Error::new(
            io::ErrorKind::IsADirectory,
            "is a folder, not a file",
        )));
    }
    let too_long = || BundleError::malformed(path, "size", format!("is longer than {max} bytes"));
    if metadata.len() > max {
        return Err(too_long());
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    // The file may grow while it is read, or be a pipe that tells no length.
    file.take(max + 1)
        .read_to_end(&mut bytes)
        .map_err(BundleError::io(path))?;
    if bytes.len() as u64 > max {
        return Err(too_long());
    }
    Ok(bytes)
}
