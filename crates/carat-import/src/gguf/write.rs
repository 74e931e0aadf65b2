//! Writing version 3 files.

use std::{
    borrow::Cow,
    io::{self, Write},
};

use carat_tensor::{DType, Shape, ShapeError};

use super::{Array, Value, types::*};

/// Why a file cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The output refused bytes, or the caller's reader failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The container has no number for the format.
    #[error("tensor {tensor:?}: GGUF has no type for format {dtype}")]
    Format {
        /// The tensor.
        tensor: String,
        /// Its format.
        dtype: DType,
    },
    /// The shape cannot be stored.
    #[error("tensor {tensor:?}: {source}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// What is wrong with its shape.
        source: ShapeError,
    },
    /// More dimensions than the container allows, or none.
    #[error("tensor {tensor:?}: expected 1 to 4 dimensions, found {found}")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        found: usize,
    },
    /// Two tensors or two keys share a name.
    #[error("{what} {name:?} is declared twice")]
    Duplicate {
        /// `tensor` or `metadata key`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// The bytes given for a tensor are not as long as its shape says.
    #[error("tensor {tensor:?}: expected {expected} bytes, found {found}")]
    Length {
        /// The tensor.
        tensor: String,
        /// By its shape and format.
        expected: usize,
        /// As given.
        found: usize,
    },
    /// The alignment is not a usable power of two.
    #[error("general.alignment: expected a uint32 power of two from 8 to 1048576")]
    Alignment,
}

/// Collects metadata and tensor declarations, then writes a file in one pass.
/// Order is kept as given; the same input gives the same bytes.
///
/// ```
/// use carat_import::gguf::{Gguf, Writer};
/// use carat_tensor::DType;
///
/// let mut writer = Writer::new();
/// writer.set("general.architecture", "llama");
/// writer.tensor("output_norm.weight", DType::F32, [2].into());
/// let mut file = Vec::new();
/// writer.write(&mut file, |_| Ok(vec![0u8; 8].into())).unwrap();
/// let read = Gguf::parse(std::sync::Arc::new(file)).unwrap();
/// assert_eq!(read.tensor_bytes("output_norm.weight"), Some(&[0u8; 8][..]));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Writer {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, DType, Shape)>,
}

impl Writer {
    /// An empty file.
    pub fn new() -> Writer {
        Writer::default()
    }

    /// Sets a metadata key, replacing an earlier value.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        let value = value.into();
        match self.metadata.iter_mut().find(|(k, _)| k == key) {
            Some((_, v)) => *v = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
        self
    }

    /// What was set so far, in order.
    pub fn metadata(&self) -> &[(String, Value)] {
        &self.metadata
    }

    /// Declares a tensor of row-major `shape` (slowest dimension first).
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: Shape) -> &mut Self {
        self.tensors.push((name.to_owned(), dtype, shape));
        self
    }

    /// Length of the file that these declarations make.
    pub fn file_bytes(&self) -> Result<u64, WriteError> {
        let head = self.head()?;
        Ok(head.bytes.len() as u64 + head.data_bytes)
    }

    /// Writes the file, asking `read` for the bytes of each declared tensor in turn.
    pub fn write<'a>(
        &self,
        out: &mut impl Write,
        mut read: impl FnMut(&str) -> io::Result<Cow<'a, [u8]>>,
    ) -> Result<(), WriteError> {
        self.stream(out, |name, tensor| tensor.write_all(&read(name)?))
    }

    /// Writes the file, having `fill` write each declared tensor in turn, in
    /// pieces of any size: no tensor need be in memory as a whole.
    pub fn stream(
        &self,
        out: &mut impl Write,
        mut fill: impl FnMut(&str, &mut dyn Write) -> io::Result<()>,
    ) -> Result<(), WriteError> {
        let head = self.head()?;
        out.write_all(&head.bytes)?;
        for ((name, _, _), expected) in self.tensors.iter().zip(head.lengths) {
            let mut tensor = Bounded {
                out,
                written: 0,
                expected,
            };
            let filled = fill(name, &mut tensor);
            let found = tensor.written;
            if found > expected || (found < expected && filled.is_ok()) {
                return Err(WriteError::Length {
                    tensor: name.clone(),
                    expected,
                    found,
                });
            }
            filled?;
            let padding = (expected as u64).next_multiple_of(head.alignment) - expected as u64;
            out.write_all(&vec![0; padding as usize])?;
        }
        Ok(())
    }

    fn head(&self) -> Result<Head, WriteError> {
        let alignment = match self.metadata.iter().find(|(k, _)| k == ALIGNMENT_KEY) {
            None => DEFAULT_ALIGNMENT,
            Some((_, Value::U32(a)))
                if a.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&u64::from(*a)) =>
            {
                u64::from(*a)
            }
            Some(_) => return Err(WriteError::Alignment),
        };
        let mut head = Vec::new();
        head.extend_from_slice(&MAGIC);
        head.extend_from_slice(&3u32.to_le_bytes());
        head.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        head.extend_from_slice(&(self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut head, key);
            put_value(&mut head, value);
        }
        let mut names = std::collections::HashSet::new();
        let mut lengths = Vec::new();
        let mut offset = 0u64;
        for (name, dtype, shape) in &self.tensors {
            if !names.insert(name) {
                return Err(WriteError::Duplicate {
                    what: "tensor",
                    name: name.clone(),
                });
            }
            let id = id_of_dtype(*dtype).ok_or_else(|| WriteError::Format {
                tensor: name.clone(),
                dtype: *dtype,
            })?;
            let dims = shape.dims();
            if dims.is_empty() || dims.len() > MAX_DIMS {
                return Err(WriteError::Dimensions {
                    tensor: name.clone(),
                    found: dims.len(),
                });
            }
            let bytes = shape.bytes(*dtype).map_err(|source| WriteError::Shape {
                tensor: name.clone(),
                source,
            })?;
            put_string(&mut head, name);
            head.extend_from_slice(&(dims.len() as u32).to_le_bytes());
            for &d in dims.iter().rev() {
                head.extend_from_slice(&(d as u64).to_le_bytes());
            }
            head.extend_from_slice(&id.to_le_bytes());
            head.extend_from_slice(&offset.to_le_bytes());
            lengths.push(bytes);
            offset = (offset + bytes as u64).next_multiple_of(alignment);
        }
        pad(&mut head, alignment);
        Ok(Head {
            bytes: head,
            lengths,
            data_bytes: offset,
            alignment,
        })
    }
}

/// What precedes the tensor data, and how that is laid out.
struct Head {
    bytes: Vec<u8>,
    /// Bytes of each tensor.
    lengths: Vec<usize>,
    /// Of all tensors with their padding.
    data_bytes: u64,
    alignment: u64,
}

/// Passes on the bytes of one tensor and counts them; no more than there should be.
struct Bounded<'a, W> {
    out: &'a mut W,
    written: usize,
    expected: usize,
}

impl<W: Write> Write for Bounded<'_, W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if buf.len() > self.expected.saturating_sub(self.written) {
            self.written = self.written.saturating_add(buf.len());
            return Err(io::Error::other("more bytes than the tensor has"));
        }
        let n = self.out.write(buf)?;
        self.written += n;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn pad(out: &mut Vec<u8>, alignment: u64) {
    out.resize((out.len() as u64).next_multiple_of(alignment) as usize, 0);
}

fn put_string(out: &mut Vec<u8>, s: &str) {
    out.extend_from_slice(&(s.len() as u64).to_le_bytes());
    out.extend_from_slice(s.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    let ty = match value {
        Value::U8(_) => VALUE_U8,
        Value::I8(_) => VALUE_I8,
        Value::U16(_) => VALUE_U16,
        Value::I16(_) => VALUE_I16,
        Value::U32(_) => VALUE_U32,
        Value::I32(_) => VALUE_I32,
        Value::F32(_) => VALUE_F32,
        Value::Bool(_) => VALUE_BOOL,
        Value::String(_) => VALUE_STRING,
        Value::Array(_) => VALUE_ARRAY,
        Value::U64(_) => VALUE_U64,
        Value::I64(_) => VALUE_I64,
        Value::F64(_) => VALUE_F64,
    };
    out.extend_from_slice(&ty.to_le_bytes());
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::U16(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I16(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::U32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::F32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => put_string(out, v),
        Value::Array(v) => put_array(out, v),
        Value::U64(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I64(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::F64(v) => out.extend_from_slice(&v.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    fn numbers<T: Copy, const N: usize>(
        out: &mut Vec<u8>,
        ty: u32,
        values: &[T],
        encode: fn(T) -> [u8; N],
    ) {
        out.extend_from_slice(&ty.to_le_bytes());
        out.extend_from_slice(&(values.len() as u64).to_le_bytes());
        for v in values {
            out.extend_from_slice(&encode(*v));
        }
    }
    match array {
        Array::U8(v) => numbers(out, VALUE_U8, v, u8::to_le_bytes),
        Array::I8(v) => numbers(out, VALUE_I8, v, i8::to_le_bytes),
        Array::U16(v) => numbers(out, VALUE_U16, v, u16::to_le_bytes),
        Array::I16(v) => numbers(out, VALUE_I16, v, i16::to_le_bytes),
        Array::U32(v) => numbers(out, VALUE_U32, v, u32::to_le_bytes),
        Array::I32(v) => numbers(out, VALUE_I32, v, i32::to_le_bytes),
        Array::F32(v) => numbers(out, VALUE_F32, v, f32::to_le_bytes),
        Array::Bool(v) => numbers(out, VALUE_BOOL, v, |b| [u8::from(b)]),
        Array::U64(v) => numbers(out, VALUE_U64, v, u64::to_le_bytes),
        Array::I64(v) => numbers(out, VALUE_I64, v, i64::to_le_bytes),
        Array::F64(v) => numbers(out, VALUE_F64, v, f64::to_le_bytes),
        Array::String(v) => {
            out.extend_from_slice(&VALUE_STRING.to_le_bytes());
            out.extend_from_slice(&(v.len() as u64).to_le_bytes());
            v.iter().for_each(|s| put_string(out, s));
        }
        Array::Array(v) => {
            out.extend_from_slice(&VALUE_ARRAY.to_le_bytes());
            out.extend_from_slice(&(v.len() as u64).to_le_bytes());
            v.iter().for_each(|a| put_array(out, a));
        }
    }
}
