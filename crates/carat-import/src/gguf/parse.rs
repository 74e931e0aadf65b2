//! Header, metadata and tensor table of one file, every length checked against
//! what the file can hold before anything is allocated.

use std::collections::HashSet;

use carat_tensor::Shape;

use super::{Array, GgufError, TensorEntry, Value, types::*};

/// What precedes the tensor data.
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) alignment: u64,
    pub(super) metadata: Vec<(String, Value)>,
    pub(super) tensors: Vec<TensorEntry>,
}

// The fewest bytes that an entry takes: key length, type, one byte of value.
const MIN_METADATA_BYTES: u64 = 8 + 4 + 1;
// Name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

pub(super) fn header(bytes: &[u8]) -> Result<Header, GgufError> {
    let mut cursor = Cursor { bytes, at: 0 };
    let magic: [u8; 4] = cursor.array("the magic")?;
    if magic != MAGIC {
        return Err(GgufError::Magic(magic));
    }
    let version = u32::from_le_bytes(cursor.array("the version")?);
    if version != 0 && version & 0xffff == 0 {
        return Err(GgufError::BigEndian(version.swap_bytes()));
    }
    if !(2..=3).contains(&version) {
        return Err(GgufError::Version(version));
    }
    let tensor_count = cursor.u64("the tensor count")?;
    let metadata_count = cursor.u64("the metadata count")?;
    cursor.room("tensors", tensor_count, MIN_TENSOR_BYTES)?;
    cursor.room("metadata entries", metadata_count, MIN_METADATA_BYTES)?;

    let mut metadata = Vec::new();
    let mut keys = HashSet::new();
    for i in 0..metadata_count {
        let key = cursor.string(&format!("key of metadata entry {i}"))?;
        if !keys.insert(key.clone()) {
            return Err(GgufError::DuplicateKey(key));
        }
        let ty = cursor.u32(&format!("type of {key:?}"))?;
        let value = cursor.value(&key, ty)?;
        metadata.push((key, value));
    }
    let alignment = match metadata.iter().find(|(k, _)| k == ALIGNMENT_KEY) {
        None => DEFAULT_ALIGNMENT,
        Some((_, Value::U32(a)))
            if a.is_power_of_two() && u64::from(*a) <= MAX_ALIGNMENT && *a >= 8 =>
        {
            u64::from(*a)
        }
        Some((_, other)) => return Err(GgufError::Alignment(display_value(other))),
    };

    // The tensor table may only use what the metadata has left.
    cursor.room("tensors", tensor_count, MIN_TENSOR_BYTES)?;
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for i in 0..tensor_count {
        let tensor = cursor.tensor(i)?;
        if !names.insert(tensor.name.clone()) {
            return Err(GgufError::DuplicateTensor(tensor.name));
        }
        tensors.push(tensor);
    }
    let end = cursor.at as u64;
    let data_start = end
        .checked_next_multiple_of(alignment)
        .ok_or_else(|| cursor.truncated("the padding before the tensor data", alignment))?;
    place(&mut tensors, data_start, bytes.len() as u64, alignment)?;
    Ok(Header {
        version,
        alignment,
        metadata,
        tensors,
    })
}

/// Turns relative offsets into absolute ones and checks that each tensor lies
/// within the file and apart from the others.
fn place(
    tensors: &mut [TensorEntry],
    data_start: u64,
    file_bytes: u64,
    alignment: u64,
) -> Result<(), GgufError> {
    for t in tensors.iter_mut() {
        if !t.offset.is_multiple_of(alignment) {
            return Err(GgufError::Misaligned {
                tensor: t.name.clone(),
                offset: t.offset,
                alignment,
            });
        }
        let outside = GgufError::OutsideFile {
            tensor: t.name.clone(),
            offset: t.offset,
            bytes: t.bytes,
            available: file_bytes.saturating_sub(data_start),
        };
        let Some(start) = data_start.checked_add(t.offset) else {
            return Err(outside);
        };
        match start.checked_add(t.bytes) {
            Some(end) if end <= file_bytes => t.offset = start,
            _ => return Err(outside),
        }
    }
    let mut order: Vec<&TensorEntry> = tensors.iter().collect();
    order.sort_by_key(|t| (t.offset, t.bytes));
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            return Err(GgufError::Overlap {
                first: pair[0].name.clone(),
                second: pair[1].name.clone(),
            });
        }
    }
    Ok(())
}

fn display_value(value: &Value) -> String {
    match value {
        Value::String(_) | Value::Array(_) => value.type_name().to_owned(),
        other => format!("{other:?}"),
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn remaining(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn truncated(&self, what: &str, needed: u64) -> GgufError {
        GgufError::Truncated {
            what: what.to_owned(),
            at: self.at as u64,
            needed,
            available: self.remaining(),
        }
    }

    /// Refuses a declared count that could not fit even with the smallest entries.
    fn room(&self, what: &str, count: u64, min_bytes: u64) -> Result<(), GgufError> {
        match count.checked_mul(min_bytes) {
            Some(needed) if needed <= self.remaining() => Ok(()),
            _ => Err(GgufError::Count {
                what: what.to_owned(),
                count,
                available: self.remaining(),
            }),
        }
    }

    fn take(&mut self, what: &str, n: u64) -> Result<&'a [u8], GgufError> {
        if n > self.remaining() {
            return Err(self.truncated(what, n));
        }
        let start = self.at;
        self.at += n as usize; // n is at most the slice's length
        Ok(&self.bytes[start..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(what, N as u64)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn string(&mut self, what: &str) -> Result<String, GgufError> {
        let n = self.u64(what)?;
        let bytes = self.take(what, n)?;
        match std::str::from_utf8(bytes) {
            Ok(s) => Ok(s.to_owned()),
            Err(_) => Err(GgufError::NotUtf8(what.to_owned())),
        }
    }

    fn bool(&mut self, what: &str) -> Result<bool, GgufError> {
        match self.array::<1>(what)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(GgufError::Bool {
                what: what.to_owned(),
                found,
            }),
        }
    }

    fn value(&mut self, key: &str, ty: u32) -> Result<Value, GgufError> {
        let what = &format!("value of {key:?}");
        Ok(match ty {
            VALUE_U8 => Value::U8(u8::from_le_bytes(self.array(what)?)),
            VALUE_I8 => Value::I8(i8::from_le_bytes(self.array(what)?)),
            VALUE_U16 => Value::U16(u16::from_le_bytes(self.array(what)?)),
            VALUE_I16 => Value::I16(i16::from_le_bytes(self.array(what)?)),
            VALUE_U32 => Value::U32(u32::from_le_bytes(self.array(what)?)),
            VALUE_I32 => Value::I32(i32::from_le_bytes(self.array(what)?)),
            VALUE_F32 => Value::F32(f32::from_le_bytes(self.array(what)?)),
            VALUE_BOOL => Value::Bool(self.bool(what)?),
            VALUE_STRING => Value::String(self.string(what)?),
            VALUE_ARRAY => Value::Array(self.elements(key, 1)?),
            VALUE_U64 => Value::U64(u64::from_le_bytes(self.array(what)?)),
            VALUE_I64 => Value::I64(i64::from_le_bytes(self.array(what)?)),
            VALUE_F64 => Value::F64(f64::from_le_bytes(self.array(what)?)),
            found => {
                return Err(GgufError::ValueType {
                    key: key.to_owned(),
                    found,
                });
            }
        })
    }

    fn elements(&mut self, key: &str, depth: usize) -> Result<Array, GgufError> {
        if depth > MAX_NESTING {
            return Err(GgufError::Nesting(key.to_owned()));
        }
        let what = &format!("array {key:?}");
        let ty = self.u32(what)?;
        let count = self.u64(what)?;
        Ok(match ty {
            VALUE_U8 => Array::U8(self.numbers(what, count, u8::from_le_bytes)?),
            VALUE_I8 => Array::I8(self.numbers(what, count, i8::from_le_bytes)?),
            VALUE_U16 => Array::U16(self.numbers(what, count, u16::from_le_bytes)?),
            VALUE_I16 => Array::I16(self.numbers(what, count, i16::from_le_bytes)?),
            VALUE_U32 => Array::U32(self.numbers(what, count, u32::from_le_bytes)?),
            VALUE_I32 => Array::I32(self.numbers(what, count, i32::from_le_bytes)?),
            VALUE_F32 => Array::F32(self.numbers(what, count, f32::from_le_bytes)?),
            VALUE_U64 => Array::U64(self.numbers(what, count, u64::from_le_bytes)?),
            VALUE_I64 => Array::I64(self.numbers(what, count, i64::from_le_bytes)?),
            VALUE_F64 => Array::F64(self.numbers(what, count, f64::from_le_bytes)?),
            VALUE_BOOL => {
                self.room(&format!("elements of {key:?}"), count, 1)?;
                Array::Bool(
                    (0..count)
                        .map(|_| self.bool(what))
                        .collect::<Result<_, _>>()?,
                )
            }
            VALUE_STRING => {
                self.room(&format!("elements of {key:?}"), count, 8)?;
                Array::String(
                    (0..count)
                        .map(|i| self.string(&format!("element {i} of {key:?}")))
                        .collect::<Result<_, _>>()?,
                )
            }
            VALUE_ARRAY => {
                self.room(&format!("elements of {key:?}"), count, 12)?;
                Array::Array(
                    (0..count)
                        .map(|_| self.elements(key, depth + 1))
                        .collect::<Result<_, _>>()?,
                )
            }
            found => {
                return Err(GgufError::ValueType {
                    key: key.to_owned(),
                    found,
                });
            }
        })
    }

    fn numbers<T, const N: usize>(
        &mut self,
        what: &str,
        count: u64,
        decode: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        let bytes = match count.checked_mul(N as u64) {
            Some(n) => self.take(what, n)?,
            None => return Err(self.truncated(what, u64::MAX)),
        };
        Ok(bytes
            .as_chunks::<N>()
            .0
            .iter()
            .map(|chunk| decode(*chunk))
            .collect())
    }

    fn tensor(&mut self, index: u64) -> Result<TensorEntry, GgufError> {
        let name = self.string(&format!("name of tensor {index}"))?;
        let what = &format!("entry of tensor {name:?}");
        let n = self.u32(what)?;
        if n == 0 || n as usize > MAX_DIMS {
            return Err(GgufError::Dimensions {
                tensor: name,
                found: n,
            });
        }
        let mut dims = Vec::with_capacity(MAX_DIMS);
        for _ in 0..n {
            let d = self.u64(what)?;
            match usize::try_from(d) {
                Ok(d) if d > 0 => dims.push(d),
                _ => {
                    return Err(GgufError::Shape {
                        tensor: name,
                        problem: format!("dimension {d} is out of range"),
                    });
                }
            }
        }
        // On disk the fastest dimension comes first.
        dims.reverse();
        let id = self.u32(what)?;
        let offset = self.u64(what)?;
        let Some(dtype) = dtype_of_id(id) else {
            return Err(GgufError::TensorType {
                tensor: name,
                found: id,
            });
        };
        let shape = Shape(dims);
        match shape.bytes(dtype) {
            Ok(bytes) => Ok(TensorEntry {
                name,
                dtype,
                shape,
                offset,
                bytes: bytes as u64,
            }),
            Err(problem) => Err(GgufError::Shape {
                tensor: name,
                problem: problem.to_string(),
            }),
        }
    }
}
