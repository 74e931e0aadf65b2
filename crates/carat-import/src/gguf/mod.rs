//! The GGUF container, versions 2 and 3: reader and writer.
//!
//! A file is a header, typed metadata, a table of tensors and aligned data. The
//! reader trusts nothing: each count and length is compared with what is left
//! of the file before memory is taken for it, tensors must lie inside the file
//! and apart from each other, and names are unique. Big-endian files are
//! refused. The writer produces version 3 and the same bytes for the same input.

mod parse;
mod split;
mod types;
mod value;
mod write;

use std::{path::Path, sync::Arc};

use carat_tensor::{DType, Shape};

pub use split::open_split;
pub use types::{dtype_of_id, id_of_dtype};
pub use value::{Array, Value};
pub use write::{WriteError, Writer};

use crate::{ImportError, source::Bytes};

/// Why bytes are not a GGUF file. Messages name the key or tensor at fault.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)] // the messages say what the fields are
pub enum GgufError {
    #[error("not a GGUF file: expected it to begin with \"GGUF\", found {0:?}")]
    Magic([u8; 4]),
    #[error("big-endian GGUF (version {0}) is not supported, expected a little-endian file")]
    BigEndian(u32),
    #[error("GGUF version {0} is not supported, expected 2 or 3")]
    Version(u32),
    #[error(
        "truncated: {what} at byte {at} needs {needed} bytes, found {available} to the end of the file"
    )]
    Truncated {
        what: String,
        at: u64,
        needed: u64,
        available: u64,
    },
    #[error("{count} {what} cannot fit in the {available} bytes that are left of the file")]
    Count {
        what: String,
        count: u64,
        available: u64,
    },
    #[error("{0} is not valid UTF-8")]
    NotUtf8(String),
    #[error("{what}: expected a boolean 0 or 1, found {found}")]
    Bool { what: String, found: u8 },
    #[error("metadata {key:?}: unknown value type {found}, expected 0 to 12")]
    ValueType { key: String, found: u32 },
    #[error("metadata {0:?}: arrays are nested more than 4 deep")]
    Nesting(String),
    #[error("metadata key {0:?} appears twice")]
    DuplicateKey(String),
    #[error("general.alignment: expected a uint32 power of two from 8 to 1048576, found {0}")]
    Alignment(String),
    #[error("tensor {0:?} appears twice")]
    DuplicateTensor(String),
    #[error("tensor {tensor:?}: expected 1 to 4 dimensions, found {found}")]
    Dimensions { tensor: String, found: u32 },
    #[error("tensor {tensor:?}: {problem}")]
    Shape { tensor: String, problem: String },
    #[error(
        "tensor {tensor:?}: ggml type {found} is unknown, expected one of {}",
        known_types()
    )]
    TensorType { tensor: String, found: u32 },
    #[error("tensor {tensor:?}: offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned {
        tensor: String,
        offset: u64,
        alignment: u64,
    },
    #[error(
        "tensor {tensor:?}: {bytes} bytes at offset {offset} reach past the end of the file, which has {available} bytes of tensor data"
    )]
    OutsideFile {
        tensor: String,
        offset: u64,
        bytes: u64,
        available: u64,
    },
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap { first: String, second: String },
}

fn known_types() -> String {
    let known: Vec<String> = types::TENSOR_TYPES
        .iter()
        .map(|(id, dtype)| format!("{id} ({dtype})"))
        .collect();
    known.join(", ")
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name in the file.
    pub name: String,
    /// Format.
    pub dtype: DType,
    /// Row-major shape, slowest dimension first (the file stores the reverse).
    pub shape: Shape,
    /// First byte, from the beginning of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A parsed file over its (usually mapped) bytes.
#[derive(Clone)]
pub struct Gguf {
    bytes: Bytes,
    header: Arc<parse::Header>,
}

impl Gguf {
    /// Maps and parses a file.
    pub fn open(path: &Path) -> Result<Gguf, ImportError> {
        let map = carat_bundle::mmap::map_file(path).map_err(|e| ImportError::io(path, e))?;
        Gguf::parse(Arc::new(map)).map_err(|source| ImportError::Gguf {
            path: path.to_owned(),
            source,
        })
    }

    /// Parses bytes.
    pub fn parse(bytes: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Result<Gguf, GgufError> {
        let header = Arc::new(parse::header((*bytes).as_ref())?);
        Ok(Gguf {
            bytes: Bytes(bytes),
            header,
        })
    }

    /// Version of the container, 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Alignment of tensor data, in bytes.
    pub fn alignment(&self) -> u64 {
        self.header.alignment
    }

    /// Metadata, in file order.
    pub fn metadata(&self) -> &[(String, Value)] {
        &self.header.metadata
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.header
            .metadata
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v)
    }

    /// Tensors, in file order.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.header.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.header.tensors.iter().find(|t| t.name == name)
    }

    /// Bytes of a tensor as stored; `None` if there is none of that name.
    pub fn tensor_bytes(&self, name: &str) -> Option<&[u8]> {
        let t = self.tensor(name)?;
        // Parsing checked the range against these very bytes.
        self.bytes
            .as_slice()
            .get(t.offset as usize..(t.offset + t.bytes) as usize)
    }

    pub(crate) fn shared_bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf")
            .field("version", &self.header.version)
            .field("metadata", &self.header.metadata.len())
            .field("tensors", &self.header.tensors.len())
            .finish()
    }
}
