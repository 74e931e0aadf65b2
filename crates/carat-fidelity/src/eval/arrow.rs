//! Tables of text in Arrow's stream format, as data sets are kept in: integers, text
//! and lists of text, without dictionaries and compression. Written from the format's
//! specification (Arrow columnar format 1.x, IPC streaming; FlatBuffers' encoding).
//!
//! Every length and offset of a file is checked against the bytes that are there; a row
//! takes no more memory than a small multiple of its bytes.

use serde_json::{Map, Value};

/// Columns of a table at most, those within lists among them.
const MAX_COLUMNS: usize = 256;
/// Rows of a file at most: more than any set of questions has.
const MAX_ROWS: usize = 1 << 20;
/// Lists in lists at most.
const MAX_DEPTH: usize = 8;

/// A FlatBuffer: little-endian numbers, tables found by offsets.
#[derive(Clone, Copy)]
struct Flat<'b>(&'b [u8]);

/// A table of a FlatBuffer: where it begins, and where its directory does.
#[derive(Clone, Copy)]
struct Table<'b> {
    flat: Flat<'b>,
    at: usize,
    directory: usize,
}

impl<'b> Flat<'b> {
    fn bytes<const N: usize>(self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn length(self, at: usize) -> Option<usize> {
        usize::try_from(u32::from_le_bytes(self.bytes(at)?)).ok()
    }

    /// Where an offset at `at` leads: always forward.
    fn follow(self, at: usize) -> Option<usize> {
        at.checked_add(self.length(at)?)
    }

    fn table(self, at: usize) -> Option<Table<'b>> {
        let back = i64::from(i32::from_le_bytes(self.bytes(at)?));
        let directory = usize::try_from(i64::try_from(at).ok()?.checked_sub(back)?).ok()?;
        Some(Table {
            flat: self,
            at,
            directory,
        })
    }
}

impl<'b> Table<'b> {
    /// Where a field is; `None` if it has its default.
    fn field(self, index: usize) -> Option<usize> {
        let size = usize::from(u16::from_le_bytes(self.flat.bytes(self.directory)?));
        let entry = 4 + 2 * index;
        if entry + 2 > size {
            return None;
        }
        let offset = u16::from_le_bytes(self.flat.bytes(self.directory.checked_add(entry)?)?);
        match offset {
            0 => None,
            offset => self.at.checked_add(usize::from(offset)),
        }
    }

    fn byte(self, index: usize) -> Option<u8> {
        self.flat.bytes::<1>(self.field(index)?).map(|[b]| b)
    }

    fn i32(self, index: usize) -> Option<i32> {
        self.flat.bytes(self.field(index)?).map(i32::from_le_bytes)
    }

    /// An `i64` that counts something; 0 if left out.
    fn count(self, index: usize) -> Option<usize> {
        match self.field(index) {
            None => Some(0),
            Some(at) => usize::try_from(i64::from_le_bytes(self.flat.bytes(at)?)).ok(),
        }
    }

    fn table(self, index: usize) -> Option<Table<'b>> {
        self.flat.table(self.flat.follow(self.field(index)?)?)
    }

    /// Where the items of a list begin, and how many there are; none if left out.
    fn list(self, index: usize, size: usize) -> Option<(usize, usize)> {
        let Some(field) = self.field(index) else {
            return Some((0, 0));
        };
        let at = self.flat.follow(field)?;
        let (count, first) = (self.flat.length(at)?, at.checked_add(4)?);
        let end = first.checked_add(count.checked_mul(size)?)?;
        (end <= self.flat.0.len()).then_some((first, count))
    }

    fn text(self, index: usize) -> Option<&'b str> {
        let (first, count) = self.list(index, 1)?;
        std::str::from_utf8(self.flat.0.get(first..first + count)?).ok()
    }
}

/// What a column holds.
#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// Signed integers of so many bytes.
    Int(usize),
    Text,
    List(Box<Column>),
    /// Something else, with so many buffers of its own, and what is below it.
    Other {
        buffers: usize,
        below: Vec<Column>,
    },
}

#[derive(Clone, Debug, PartialEq)]
struct Column {
    name: String,
    kind: Kind,
}

/// The column of a `Field`, those below it counted by `left`.
fn column(field: Table<'_>, depth: usize, left: &mut usize) -> Result<Column, String> {
    *left = left.checked_sub(1).ok_or("has too many columns")?;
    let name = field.text(0).unwrap_or_default().to_owned();
    if depth == 0 {
        return Err(format!("column {name:?} has lists in lists in lists"));
    }
    if field.field(4).is_some() {
        return Err(format!("column {name:?} has a dictionary"));
    }
    let (first, count) = field.list(5, 4).ok_or("its columns are cut")?;
    let mut below = Vec::new();
    for i in 0..count {
        let at = field.flat.follow(first + 4 * i);
        let child = at.and_then(|at| field.flat.table(at));
        let child = child.ok_or("its columns are cut")?;
        below.push(column(child, depth - 1, left)?);
    }
    // The numbers are those of the union `Type` of Schema.fbs.
    let kind = match field.byte(2) {
        Some(2) => {
            let kind = field.table(3).ok_or("an integer has no width")?;
            match (kind.i32(0), kind.byte(1)) {
                (Some(bits @ (8 | 16 | 32 | 64)), Some(1)) => Kind::Int(bits as usize / 8),
                _ => Kind::Other { buffers: 2, below },
            }
        }
        Some(5) => Kind::Text,
        Some(12) => match <[Column; 1]>::try_from(below) {
            Ok([item]) => Kind::List(Box::new(item)),
            Err(_) => return Err(format!("column {name:?} is a list of not one thing")),
        },
        // Floats, truths, decimals, dates, times.
        Some(3 | 6..=11 | 15 | 18) => Kind::Other { buffers: 2, below },
        Some(4 | 19 | 20) => Kind::Other { buffers: 3, below },
        Some(13 | 16) => Kind::Other { buffers: 1, below },
        Some(1) => Kind::Other { buffers: 0, below },
        kind => return Err(format!("column {name:?} is of an unknown kind ({kind:?})")),
    };
    Ok(Column { name, kind })
}

/// The columns of a `Schema`.
fn columns(schema: Table<'_>) -> Result<Vec<Column>, String> {
    if schema.flat.0.is_empty() || schema.byte(0).unwrap_or(0) != 0 {
        return Err("is not little-endian".into());
    }
    let (first, count) = schema.list(1, 4).ok_or("its columns are cut")?;
    let mut left = MAX_COLUMNS;
    (0..count)
        .map(|i| {
            let at = schema.flat.follow(first + 4 * i);
            let field = at.and_then(|at| schema.flat.table(at));
            column(field.ok_or("its columns are cut")?, MAX_DEPTH, &mut left)
        })
        .collect()
}

/// A `RecordBatch`: counts and buffers of its columns, in the order of a walk.
struct Batch<'b> {
    flat: Flat<'b>,
    /// Counts of values and of missing ones, `(i64, i64)` each.
    nodes: (usize, usize),
    /// Offset and length of each buffer, `(i64, i64)` each.
    buffers: (usize, usize),
    body: &'b [u8],
}

impl<'b> Batch<'b> {
    fn pair(&mut self, nodes: bool) -> Option<(usize, usize)> {
        let (at, left) = match nodes {
            true => &mut self.nodes,
            false => &mut self.buffers,
        };
        *left = left.checked_sub(1)?;
        let number = |at| usize::try_from(i64::from_le_bytes(self.flat.bytes(at)?)).ok();
        let pair = (number(*at)?, number(*at + 8)?);
        *at += 16;
        Some(pair)
    }

    fn buffer(&mut self) -> Option<&'b [u8]> {
        let (offset, length) = self.pair(false)?;
        self.body.get(offset..offset.checked_add(length)?)
    }

    /// Passes a column over.
    fn skip(&mut self, column: &Column) -> Option<()> {
        self.pair(true)?;
        let (buffers, below) = match &column.kind {
            Kind::Int(_) => (2, &[][..]),
            Kind::Text => (3, &[][..]),
            Kind::List(item) => (2, std::slice::from_ref(&**item)),
            Kind::Other { buffers, below } => (*buffers, &below[..]),
        };
        (0..buffers).try_for_each(|_| self.pair(false).map(drop))?;
        below.iter().try_for_each(|below| self.skip(below))
    }

    /// The values of a column; `None` where the file contradicts itself.
    fn values(&mut self, column: &Column) -> Option<Vec<Value>> {
        let (count, missing) = self.pair(true)?;
        let present = self.buffer()?;
        if missing > 0 && present.len() < count.div_ceil(8) {
            return None;
        }
        let is_present = |i: usize| missing == 0 || present[i / 8] >> (i % 8) & 1 == 1;
        let keep = |i: usize, value: Value| match is_present(i) {
            true => value,
            false => Value::Null,
        };
        match &column.kind {
            Kind::Int(size) => {
                let data = self.buffer()?;
                let data = data.get(..count.checked_mul(*size)?)?;
                let number = |bytes: &[u8]| {
                    // Little-endian, the sign in the last byte.
                    let sign = if bytes[size - 1] & 0x80 == 0 { 0 } else { 0xff };
                    let mut wide = [sign; 8];
                    wide[..*size].copy_from_slice(bytes);
                    Value::from(i64::from_le_bytes(wide))
                };
                let values = data.chunks_exact(*size).enumerate();
                Some(values.map(|(i, bytes)| keep(i, number(bytes))).collect())
            }
            Kind::Text => {
                let spans = spans(self.buffer()?, count)?;
                let data = self.buffer()?;
                let text = |(i, (from, to)): (usize, (usize, usize))| {
                    let text = std::str::from_utf8(data.get(from..to)?).ok()?;
                    Some(keep(i, Value::from(text)))
                };
                spans.into_iter().enumerate().map(text).collect()
            }
            Kind::List(item) => {
                let spans = spans(self.buffer()?, count)?;
                let mut items = self.values(item)?;
                // From the back, so that each item moves once.
                let mut lists = Vec::with_capacity(count);
                for (i, (from, to)) in spans.into_iter().enumerate().rev() {
                    if to > items.len() {
                        return None;
                    }
                    items.truncate(to);
                    lists.push(keep(i, Value::from(items.split_off(from))));
                }
                lists.reverse();
                Some(lists)
            }
            Kind::Other { .. } => None,
        }
    }
}

/// Where each of `count` texts or lists begins and ends, none before the one in front.
fn spans(offsets: &[u8], count: usize) -> Option<Vec<(usize, usize)>> {
    if count == 0 {
        return Some(vec![]);
    }
    let bytes = offsets.get(..count.checked_add(1)?.checked_mul(4)?)?;
    let mut out = Vec::with_capacity(count);
    let mut numbers = bytes.chunks_exact(4).map(|b| {
        let number = i32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        usize::try_from(number).ok()
    });
    let mut from = numbers.next()??;
    for to in numbers {
        let to = to.filter(|to| *to >= from)?;
        out.push((from, to));
        from = to;
    }
    Some(out)
}

/// The rows of a stream as objects of the columns that `wanted` names; at most `limit`.
///
/// # Errors
/// What is wrong, in words.
pub(super) fn rows(
    file: &[u8],
    wanted: &[&str],
    limit: usize,
) -> Result<Vec<Map<String, Value>>, String> {
    let mut schema: Option<Vec<Column>> = None;
    let mut out: Vec<Map<String, Value>> = Vec::new();
    let mut at = 0;
    while at < file.len() && out.len() < limit {
        let cut = || format!("is cut in the message at byte {at}");
        let file = Flat(file);
        // Files of before 2020 have no marker in front of the length.
        let marked = file.bytes(at) == Some([0xff; 4]);
        let start = if marked { at + 4 } else { at };
        let length = file.length(start).ok_or_else(cut)?;
        if length == 0 {
            break;
        }
        let head = (start + 4).checked_add(length).ok_or_else(cut)?;
        let metadata = Flat(file.0.get(start + 4..head).ok_or_else(cut)?);
        let message = metadata.follow(0).and_then(|at| metadata.table(at));
        let message = message.ok_or_else(cut)?;
        let body = message.count(3).ok_or_else(cut)?;
        let end = head.checked_add(body).ok_or_else(cut)?;
        let body = file.0.get(head..end).ok_or_else(cut)?;
        let header = message.table(2).ok_or_else(cut)?;
        match (message.byte(1), &schema) {
            (Some(1), None) => schema = Some(columns(header)?),
            (Some(3), Some(columns)) => {
                if header.field(3).is_some() {
                    return Err("is compressed".into());
                }
                let count = header.count(0).ok_or_else(cut)?;
                if count > MAX_ROWS - out.len() {
                    return Err(format!("has more than {MAX_ROWS} rows"));
                }
                let mut batch = Batch {
                    flat: metadata,
                    nodes: header.list(1, 16).ok_or_else(cut)?,
                    buffers: header.list(2, 16).ok_or_else(cut)?,
                    body,
                };
                batch_rows(&mut batch, columns, (wanted, count), &mut out)?;
            }
            (Some(kind), _) => return Err(format!("has a message of kind {kind} at byte {at}")),
            (None, _) => return Err(cut()),
        }
        at = end;
    }
    out.truncate(limit);
    match schema {
        Some(_) => Ok(out),
        None => Err("has no columns".into()),
    }
}

fn batch_rows(
    batch: &mut Batch<'_>,
    columns: &[Column],
    (wanted, count): (&[&str], usize),
    out: &mut Vec<Map<String, Value>>,
) -> Result<(), String> {
    let first = out.len();
    let mut found = false;
    for column in columns {
        let name = &column.name;
        if !wanted.contains(&name.as_str()) {
            batch
                .skip(column)
                .ok_or_else(|| format!("column {name:?} is cut"))?;
            continue;
        }
        let values = batch
            .values(column)
            .filter(|values| values.len() == count)
            .ok_or_else(|| format!("column {name:?} is cut, or of a kind that is not read"))?;
        if !found {
            // As many as there are values of a column, not as the file says.
            out.resize_with(first + count, Map::new);
            found = true;
        }
        for (row, value) in out[first..].iter_mut().zip(values) {
            row.insert(name.clone(), value);
        }
    }
    match found {
        true => Ok(()),
        false => Err(format!("has none of the columns {}", wanted.join(", "))),
    }
}
