//! What a manifest must satisfy beyond its types.

use std::collections::{BTreeMap, HashSet};

use carat_tensor::{DType, Grid, packed};

use crate::{
    layout,
    manifest::{
        FormatSize, GridSize, Layout, MAX_TEXT_BYTES, Manifest, ManifestError, SEGMENT_ALIGN,
        SizeReport, TENSOR_ALIGN, TensorEntry, bounded, is_matrix, segment_of,
    },
    spec::SpecError,
};

/// Largest `weights.bin` that a manifest may claim. Offsets below it can be
/// added to each other without overflow.
const MAX_WEIGHTS_BYTES: u64 = 1 << 50;

fn err(field: impl Into<String>, problem: impl Into<String>) -> ManifestError {
    ManifestError::new(field, problem)
}

fn expect<T: PartialEq + std::fmt::Debug>(
    field: impl FnOnce() -> String,
    expected: T,
    found: T,
) -> Result<(), ManifestError> {
    if expected == found {
        Ok(())
    } else {
        Err(err(
            field(),
            bounded(&format!("expected {expected:?}, found {found:?}")),
        ))
    }
}

impl Manifest {
    /// Checks everything that can be checked without reading the weights: the
    /// spec, that the tensor list is exactly the spec's, formats, sizes,
    /// alignment, order and bounds of tensors and segments, paths, and that the
    /// reports agree with the tensor table.
    ///
    /// # Errors
    /// Names the first field at fault.
    pub fn check(&self) -> Result<(), ManifestError> {
        self.spec
            .validate()
            .map_err(|SpecError::Invalid { field, problem }| {
                err(format!("spec.{field}"), problem)
            })?;
        self.text
            .sampling
            .validate()
            .map_err(|e| err(format!("text.sampling.{}", e.field), e.problem()))?;
        self.check_head()?;
        self.check_tensor_list()?;
        self.check_placement()?;
        self.check_files()?;
        self.check_reports()
    }

    fn check_head(&self) -> Result<(), ManifestError> {
        if self.compression.trim().is_empty() {
            return Err(err("compression", "is empty"));
        }
        for (field, group) in [
            ("activation.group", self.activation.group),
            ("activation.ternary_group", self.activation.ternary_group),
        ] {
            if !(16..=256).contains(&group) || !group.is_power_of_two() {
                return Err(err(
                    field,
                    format!("expected a power of two in 16..=256, found {group}"),
                ));
            }
        }
        let name = &self.source.name;
        if name.is_empty() || name.contains(['/', '\\']) {
            return Err(err(
                "source.name",
                format!(
                    "expected the base name of a file, found {:?}",
                    bounded(name)
                ),
            ));
        }
        if let Some(digest) = &self.source.digest {
            check_hex("source.digest", digest)?;
        }
        if self.text.chat_template.is_some() {
            return Err(err(
                "text.chat_template",
                "expected null: the template is a file of its own",
            ));
        }
        check_hex("weights.blake3", &self.weights.blake3)?;
        let bytes = self.weights.bytes;
        if bytes > MAX_WEIGHTS_BYTES || !bytes.is_multiple_of(SEGMENT_ALIGN) {
            return Err(err(
                "weights.bytes",
                format!(
                    "expected a multiple of {SEGMENT_ALIGN} up to {MAX_WEIGHTS_BYTES}, found {bytes}"
                ),
            ));
        }
        Ok(())
    }

    /// The tensors are those of the spec, in its order, in formats that fit.
    fn check_tensor_list(&self) -> Result<(), ManifestError> {
        let declared = self.spec.tensors();
        let known: HashSet<&str> = declared.iter().map(|d| d.name.as_str()).collect();
        let mut seen = HashSet::with_capacity(declared.len());
        for (i, t) in self.tensors.iter().enumerate() {
            if !known.contains(t.name.as_str()) {
                return Err(err(
                    format!("tensors.{i}.name"),
                    format!("{:?} is no tensor of the spec", bounded(&t.name)),
                ));
            }
            if !seen.insert(t.name.as_str()) {
                return Err(err(
                    format!("tensors.{i}.name"),
                    format!("{:?} appears twice", t.name),
                ));
            }
        }
        for (i, d) in declared.iter().enumerate() {
            if !seen.contains(d.name.as_str()) {
                return Err(err("tensors", format!("{:?} is missing", d.name)));
            }
            // Names are unique and all known, so the lists have equal lengths.
            let t = &self.tensors[i];
            let field = |f: &str| format!("tensors.{i}.{f}");
            expect(|| field("name"), &d.name, &t.name)?;
            let of = |e: ManifestError| err(e.field, format!("{:?}: {}", t.name, e.problem));
            expect(|| field("role"), d.role, t.role).map_err(of)?;
            expect(|| field("shape"), d.shape.dims(), t.shape.dims()).map_err(of)?;
            if !is_matrix(t.role) {
                expect(|| field("dtype"), DType::F32, t.dtype).map_err(of)?;
            }
            if let Some(grid) = t.grid {
                expect(|| field("dtype"), DType::F32, t.dtype).map_err(of)?;
                let bytes = layout::grid_bytes(t.role, grid, &t.shape, t.layout)
                    .map_err(|problem| of(err(field("grid"), problem)))?;
                expect(|| field("bytes"), bytes, t.bytes).map_err(of)?;
                check_hex(&field("blake3"), &t.blake3).map_err(of)?;
                continue;
            }
            if !t.dtype.is_float() && !packed::supports(t.dtype) {
                let problem = format!("{} has no packed layout", t.dtype);
                return Err(of(err(field("dtype"), problem)));
            }
            expect(
                || field("layout"),
                layout::layout_for(t.role, t.dtype, &t.shape),
                t.layout,
            )
            .map_err(of)?;
            let bytes = layout::stored_bytes(t.layout, t.dtype, &t.shape)
                .map_err(|problem| of(err(field("shape"), problem)))?;
            expect(|| field("bytes"), bytes, t.bytes).map_err(of)?;
            check_hex(&field("blake3"), &t.blake3).map_err(of)?;
        }
        Ok(())
    }

    /// Tensors and segments are aligned, in order, apart and inside the file.
    fn check_placement(&self) -> Result<(), ManifestError> {
        let mut segments = self.weights.segments.iter().enumerate();
        let mut current: Option<(usize, &crate::manifest::Segment)> = None;
        let mut end = 0u64;
        for (i, t) in self.tensors.iter().enumerate() {
            let of = |field: &str, problem: String| {
                err(
                    format!("tensors.{i}.{field}"),
                    format!("{:?}: {problem}", t.name),
                )
            };
            let home = segment_of(&t.name);
            if t.segment != home {
                return Err(of(
                    "segment",
                    format!("expected {home:?}, found {:?}", bounded(&t.segment)),
                ));
            }
            if current.is_none_or(|(_, s)| s.name != home) {
                if let Some((s, segment)) = current {
                    check_segment_end(s, segment, end)?;
                }
                let Some((s, next)) = segments.next() else {
                    return Err(err(
                        "weights.segments",
                        format!("segment {home:?} is missing"),
                    ));
                };
                let field = |f: &str| format!("weights.segments.{s}.{f}");
                if next.name != home {
                    return Err(err(
                        field("name"),
                        format!("expected {home:?}, found {:?}", bounded(&next.name)),
                    ));
                }
                if !next.offset.is_multiple_of(SEGMENT_ALIGN) {
                    return Err(err(
                        field("offset"),
                        format!("{} is not a multiple of {SEGMENT_ALIGN}", next.offset),
                    ));
                }
                if next.offset < end {
                    return Err(err(
                        field("offset"),
                        format!(
                            "{} overlaps the segment before, which ends at {end}",
                            next.offset
                        ),
                    ));
                }
                current = Some((s, next));
                end = next.offset;
            }
            if !t.offset.is_multiple_of(TENSOR_ALIGN) {
                return Err(of(
                    "offset",
                    format!("{} is not a multiple of {TENSOR_ALIGN}", t.offset),
                ));
            }
            if t.offset < end {
                return Err(of(
                    "offset",
                    format!(
                        "{} overlaps what is before it, which ends at {end}",
                        t.offset
                    ),
                ));
            }
            end = t
                .offset
                .checked_add(t.bytes)
                .filter(|&e| e <= self.weights.bytes)
                .ok_or_else(|| {
                    of(
                        "offset",
                        format!(
                            "{} bytes at {} lie outside weights.bin of {} bytes",
                            t.bytes, t.offset, self.weights.bytes
                        ),
                    )
                })?;
        }
        if let Some((s, segment)) = current {
            check_segment_end(s, segment, end)?;
        }
        if let Some((s, extra)) = segments.next() {
            return Err(err(
                format!("weights.segments.{s}.name"),
                format!("segment {:?} holds no tensor", bounded(&extra.name)),
            ));
        }
        expect(
            || "weights.bytes".into(),
            end.next_multiple_of(SEGMENT_ALIGN),
            self.weights.bytes,
        )
    }

    fn check_files(&self) -> Result<(), ManifestError> {
        let mut seen = HashSet::new();
        for (i, f) in self.files.iter().enumerate() {
            let field = |name: &str| format!("files.{i}.{name}");
            if !is_portable_path(&f.path) {
                return Err(err(
                    field("path"),
                    format!("expected tokenizer/NAME, found {:?}", bounded(&f.path)),
                ));
            }
            if !seen.insert(f.path.as_str()) {
                return Err(err(field("path"), format!("{:?} appears twice", f.path)));
            }
            if f.bytes > MAX_TEXT_BYTES {
                return Err(err(
                    field("bytes"),
                    format!(
                        "{:?} has {} bytes, at most {MAX_TEXT_BYTES} are read",
                        f.path, f.bytes
                    ),
                ));
            }
            check_hex(&field("blake3"), &f.blake3)?;
        }
        Ok(())
    }

    fn check_reports(&self) -> Result<(), ManifestError> {
        expect(
            || "recipe.tensors".into(),
            self.tensors.len(),
            self.recipe.tensors.len(),
        )?;
        for (i, (r, t)) in self.recipe.tensors.iter().zip(&self.tensors).enumerate() {
            expect(
                || format!("recipe.tensors.{i}.name"),
                t.name.as_str(),
                r.name.as_str(),
            )?;
            expect(|| format!("recipe.tensors.{i}.stored"), t.dtype, r.stored)?;
            expect(|| format!("recipe.tensors.{i}.grid"), t.grid, r.grid)?;
        }
        let report = SizeReport::of(&self.tensors, self.weights.bytes)?;
        expect(|| "size_report".into(), &report, &self.size_report)
    }
}

impl GridSize {
    const fn empty(grid: Grid) -> GridSize {
        GridSize {
            grid,
            tensors: 0,
            weights: 0,
            codes: 0,
            scales: 0,
            zero_points: 0,
            tables: 0,
        }
    }
}

fn check_segment_end(
    index: usize,
    segment: &crate::manifest::Segment,
    end: u64,
) -> Result<(), ManifestError> {
    expect(
        || format!("weights.segments.{index}.bytes"),
        end - segment.offset,
        segment.bytes,
    )
}

impl SizeReport {
    /// Adds up a tensor table whose file has `file_bytes` bytes.
    ///
    /// # Errors
    /// When a size overflows or the tensors are larger than the file.
    pub fn of(tensors: &[TensorEntry], file_bytes: u64) -> Result<SizeReport, ManifestError> {
        let overflow = || err("size_report", "the sizes of all tensors overflow");
        let mut formats: Vec<FormatSize> = Vec::new();
        let (mut weights, mut logical_bytes, mut stored_bytes) = (0u64, 0u64, 0u64);
        for dtype in DType::ALL {
            let mut sum = FormatSize {
                dtype,
                tensors: 0,
                weights: 0,
                logical_bytes: 0,
                stored_bytes: 0,
            };
            let blocks = tensors.iter().filter(|t| t.grid.is_none());
            for t in blocks.filter(|t| t.dtype == dtype) {
                let elements = t.shape.elements().map_err(|_| overflow())? as u64;
                let logical = t.shape.bytes(dtype).map_err(|_| overflow())? as u64;
                let add = |a: u64, b: u64| a.checked_add(b).ok_or_else(overflow);
                sum.tensors += 1;
                sum.weights = add(sum.weights, elements)?;
                sum.logical_bytes = add(sum.logical_bytes, logical)?;
                sum.stored_bytes = add(sum.stored_bytes, t.bytes)?;
                weights = add(weights, elements)?;
                logical_bytes = add(logical_bytes, logical)?;
                stored_bytes = add(stored_bytes, t.bytes)?;
            }
            if sum.tensors > 0 {
                formats.push(sum);
            }
        }
        let mut grids: BTreeMap<Grid, GridSize> = BTreeMap::new();
        for (t, grid) in tensors.iter().filter_map(|t| Some((t, t.grid?))) {
            let [rows, columns] = *t.shape.dims() else {
                return Err(overflow());
            };
            let parts = grid.parts(rows, columns).map_err(|_| overflow())?;
            let sum = grids.entry(grid).or_insert_with(|| GridSize::empty(grid));
            let elements = t.shape.elements().map_err(|_| overflow())? as u64;
            for (total, part) in [
                (&mut sum.tensors, 1),
                (&mut sum.weights, elements),
                (&mut sum.codes, parts.codes as u64),
                (&mut sum.scales, parts.scales as u64),
                (&mut sum.zero_points, parts.zero_points as u64),
                (&mut sum.tables, parts.tables as u64),
                (&mut weights, elements),
                (&mut logical_bytes, parts.total() as u64),
                (&mut stored_bytes, t.bytes),
            ] {
                *total = total.checked_add(part).ok_or_else(overflow)?;
            }
        }
        let alignment_bytes = file_bytes.checked_sub(stored_bytes).ok_or_else(|| {
            err(
                "size_report",
                format!("{stored_bytes} bytes of tensors in a file of {file_bytes}"),
            )
        })?;
        Ok(SizeReport {
            formats,
            grids: grids.into_values().collect(),
            weights,
            logical_bytes,
            stored_bytes,
            alignment_bytes,
            bits_per_weight: if weights == 0 {
                0.0
            } else {
                8.0 * stored_bytes as f64 / weights as f64
            },
        })
    }
}

/// `tokenizer/NAME` with a plain ASCII name: it means the same file on every
/// system and cannot leave the bundle.
pub(crate) fn is_portable_path(path: &str) -> bool {
    let Some(name) = path.strip_prefix("tokenizer/") else {
        return false;
    };
    (1..=128).contains(&name.len())
        && !name.starts_with('.')
        && !name.ends_with('.')
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// A BLAKE3 digest as 64 lower-case hex digits.
pub(crate) fn check_hex(field: &str, hex: &str) -> Result<(), ManifestError> {
    let ok = hex.len() == 64
        && hex
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if ok {
        Ok(())
    } else {
        Err(err(
            field,
            format!("expected 64 hex digits, found {:?}", bounded(hex)),
        ))
    }
}

impl Layout {
    /// The layout's name, as in the manifest.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Packed16 => "packed16",
            Layout::RowMajor => "row_major",
            Layout::Sections => "sections",
        }
    }
}
