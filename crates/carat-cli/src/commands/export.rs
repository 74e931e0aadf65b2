//! `carat export`: a bundle's weights for other programs.

use std::{
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
};

use anyhow::Context as _;
use carat_bundle::{
    Bundle,
    file::StagedFile,
    manifest::is_matrix,
    source::TensorSource as _,
    spec::{MixerSpec, ModelSpec, TensorDecl},
};
use carat_import::{
    export::{describe, gguf_name, hf_name, interleaved},
    gguf::{Gguf, Value, Writer, id_of_dtype},
};
use carat_quant::{block_format, to_blocks};
use carat_tensor::{DType, Shape, formats};
use serde_json::{Map, json};

use crate::{
    args::{Container, Export},
    failure::{Failure, OrInput as _, Outcome},
    output::{self, bytes},
};

pub(crate) fn run(args: &Export) -> Outcome {
    if args.out.exists() && !args.force {
        return Err(
            Failure::input(anyhow::anyhow!("{}: exists", args.out.display()))
                .hint("choose another name; --force replaces the file"),
        );
    }
    let bundle = Bundle::open(&args.bundle)?;
    let encode = args.encode.as_deref().map(encoding).transpose()?;
    let written = match (&args.to, &args.like) {
        (Container::Safetensors, _) if encode.is_some() => {
            return Err(Failure::input(anyhow::anyhow!(
                "--encode: safetensors are written in fp32"
            )));
        }
        (Container::Safetensors, _) => safetensors(&bundle, &args.out)?,
        (Container::Gguf, like) => gguf(&bundle, like.as_deref(), encode, &args.out)?,
    };
    if args.json {
        output::json(&json!({
            "schema": "carat.export",
            "version": 1,
            "file": args.out,
            "bytes": written,
            "tensors": bundle.manifest().tensors.len(),
        }))
        .or_input()?;
    } else {
        output::line(&format!(
            "{} tensors in {} -> {}",
            bundle.manifest().tensors.len(),
            bytes(written),
            args.out.display()
        ))
        .or_input()?;
    }
    Ok(ExitCode::SUCCESS)
}

fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(error)
}

/// One file of fp32 tensors, written one at a time.
fn safetensors(bundle: &Bundle, out: &Path) -> Outcome<u64> {
    let spec = &bundle.manifest().spec;
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut end = 0;
    for decl in spec.tensors() {
        let start = end;
        end += decl.shape.bytes(DType::F32).or_input()? as u64;
        let entry = json!({ "dtype": "F32", "shape": decl.shape, "data_offsets": [start, end] });
        header.insert(hf_name(spec, &decl.name), entry);
    }
    let mut header = serde_json::to_vec(&header).or_input()?;
    // Data starts at a multiple of 8; the format lets spaces end the header.
    header.resize(header.len().next_multiple_of(8), b' ');
    let total = 8 + header.len() as u64 + end;
    let mut file = StagedFile::create(out, total)?;
    let mut write = || -> io::Result<()> {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for decl in spec.tensors() {
            let info = bundle
                .info(&decl.name)
                .ok_or_else(|| other("a tensor is gone"))?;
            let data = bundle.read(&decl.name).map_err(other)?;
            let row = info
                .dtype
                .row_bytes(decl.shape.columns())
                .filter(|b| *b > 0);
            let mut values = vec![0f32; decl.shape.columns()];
            for row in data.chunks(row.ok_or_else(|| other("a row of no bytes"))?) {
                formats::decode(info.dtype, row, &mut values).map_err(other)?;
                let row: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                file.write_all(&row)?;
            }
        }
        Ok(())
    };
    write()
        .with_context(|| format!("cannot write {}", out.display()))
        .or_input()?;
    file.publish()?;
    Ok(total)
}

/// The format that `--encode` names.
fn encoding(name: &str) -> Outcome<DType> {
    let known = || {
        let all = DType::ALL.into_iter();
        all.filter(|d| !d.is_float() && formats::can_encode(*d) && id_of_dtype(*d).is_some())
            // Ordinary weights are not ternary.
            .filter(|d| !matches!(d, DType::TQ1_0 | DType::TQ2_0))
    };
    known()
        .find(|dtype| dtype.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| {
            let known: Vec<_> = known().map(DType::name).collect();
            Failure::input(anyhow::anyhow!("--encode {name}: no such format"))
                .hint(format!("known: {}", known.join(", ")))
        })
}

/// The format in which GGUF holds a tensor of the bundle.
fn gguf_format(bundle: &Bundle, decl: &TensorDecl, encode: Option<DType>) -> Outcome<DType> {
    let entry = bundle.tensor(&decl.name)?.entry;
    if let Some(dtype) = encode
        && is_matrix(decl.role)
        && entry.grid.is_none()
        && entry.dtype.is_float()
    {
        if !decl.shape.columns().is_multiple_of(dtype.block_len()) {
            return Err(Failure::input(anyhow::anyhow!(
                "tensor {:?}: its {} columns are not whole blocks of {} ({dtype})",
                decl.name,
                decl.shape.columns(),
                dtype.block_len()
            ))
            .hint("--encode with a format of smaller blocks, such as q8_0"));
        }
        return Ok(dtype);
    }
    let dtype = match entry.grid {
        Some(grid) => block_format(grid),
        None => Some(entry.dtype),
    };
    dtype
        .filter(|dtype| id_of_dtype(*dtype).is_some())
        .ok_or_else(|| {
            Failure::input(anyhow::anyhow!(
                "tensor {:?}: GGUF has no format for {}",
                decl.name,
                entry.form()
            ))
            .hint("--to safetensors writes any bundle; Q8_0, Q4_0, TQ2_0 and MXFP4 grids fit GGUF")
        })
}

/// A tensor's bytes in that format, `offset` added to a vector's values.
fn gguf_bytes(bundle: &Bundle, name: &str, dtype: DType, offset: f32) -> io::Result<Vec<u8>> {
    let tensor = bundle.tensor(name).map_err(other)?;
    if let Some(matrix) = tensor.grid_matrix() {
        return Ok(to_blocks(&matrix.map_err(other)?, dtype));
    }
    let stored = bundle.info(name).ok_or_else(|| other("a tensor is gone"))?;
    let data = bundle.read(name).map_err(other)?;
    if stored.dtype == dtype && offset == 0.0 {
        return Ok(data.into_owned());
    }
    encoded(stored.dtype, &data, stored.shape.columns(), dtype, offset)
}

/// Floats in another format, row by row, on all cores.
fn encoded(
    from: DType,
    data: &[u8],
    columns: usize,
    to: DType,
    offset: f32,
) -> io::Result<Vec<u8>> {
    let row_bytes = |dtype: DType| dtype.row_bytes(columns).filter(|b| *b > 0);
    let (Some(row), Some(out_row)) = (row_bytes(from), row_bytes(to)) else {
        return Err(other("a row of no bytes"));
    };
    let rows = data.len() / row;
    let mut out = vec![0; rows * out_row];
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let each = rows.div_ceil(workers).max(1);
    std::thread::scope(|scope| {
        let parts = data.chunks(each * row).zip(out.chunks_mut(each * out_row));
        let started: Vec<_> = parts
            .map(|(data, out)| {
                scope.spawn(move || {
                    let mut values = vec![0f32; columns];
                    for (data, out) in data.chunks(row).zip(out.chunks_mut(out_row)) {
                        formats::decode(from, data, &mut values)?;
                        values.iter_mut().for_each(|v| *v += offset);
                        formats::encode(to, &values, out)?;
                    }
                    Ok::<(), formats::FormatError>(())
                })
            })
            .collect();
        started
            .into_iter()
            .try_for_each(|worker| match worker.join() {
                Ok(done) => done.map_err(other),
                Err(_) => Err(other("a worker stopped")),
            })
    })?;
    Ok(out)
}

/// `general.file_type` of files that are mostly in one format.
fn file_type(dtype: DType) -> Option<u32> {
    Some(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::Q5_0 => 8,
        DType::Q5_1 => 9,
        // Those of "M" and plain files.
        DType::Q4_K => 15,
        DType::Q6_K => 18,
        DType::BF16 => 32,
        DType::TQ1_0 => 36,
        DType::TQ2_0 => 37,
        DType::MXFP4 => 38,
        _ => return None,
    })
}

/// What a GGUF file of a bundle has besides the bundle's tensors.
struct Frame {
    metadata: Vec<(String, Value)>,
    /// Tensors that the metadata belong with, such as rotary factors.
    more: Vec<(String, DType, Shape, Vec<u8>)>,
    permuted_qk: bool,
    /// Gains are stored as what is multiplied with.
    plain_gains: bool,
}

/// The frame of another file of the same model.
fn frame_like(bundle: &Bundle, like: &Path, own: &[String]) -> Outcome<Frame> {
    let spec = &bundle.manifest().spec;
    let model = carat_import::open(like)?;
    let mut expected = model.spec.clone();
    // A head of its own is one more tensor.
    expected.head.tied &= spec.head.tied;
    if expected != *spec {
        return Err(Failure::input(anyhow::anyhow!(
            "{}: describes another model than {}",
            like.display(),
            bundle.path().display()
        ))
        .hint("--like names a GGUF file of the very model the bundle was made from"));
    }
    let file = Gguf::open(like)?;
    let mut more = Vec::new();
    for tensor in file.tensors() {
        if !own.contains(&tensor.name) {
            let bytes = file.tensor_bytes(&tensor.name).unwrap_or(&[]).to_vec();
            more.push((
                tensor.name.clone(),
                tensor.dtype,
                tensor.shape.clone(),
                bytes,
            ));
        }
    }
    Ok(Frame {
        metadata: file.metadata().to_vec(),
        more,
        permuted_qk: model.origin.permuted_qk,
        plain_gains: false,
    })
}

/// The frame that follows from the bundle alone.
fn frame_of(bundle: &Bundle) -> Outcome<Frame> {
    let manifest = bundle.manifest();
    let text = bundle.text()?;
    let found = describe(&manifest.spec, &text, &manifest.name).map_err(|e| {
        Failure::input(anyhow::anyhow!("{}: {e}", bundle.path().display()))
            .hint("--like FILE.gguf takes metadata from a GGUF file of the same model")
    })?;
    let more = found.settings.into_iter().map(|(name, values)| {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        (name, DType::F32, Shape::from([values.len()]), bytes)
    });
    Ok(Frame {
        metadata: found.metadata,
        more: more.collect(),
        permuted_qk: found.permuted_qk,
        plain_gains: true,
    })
}

/// What is added to a gain where files store what is multiplied with.
fn gain_offset(spec: &ModelSpec, name: &str) -> f32 {
    let layer = |rest: &str| -> Option<f32> {
        let (index, part) = rest.split_once('.')?;
        let layer = spec.layers.get(index.parse::<usize>().ok()?)?;
        let MixerSpec::Attention(attention) = &layer.mixer;
        let norm = match part {
            "mixer_norm.weight" => Some(layer.mixer_norm),
            "post_mixer_norm.weight" => layer.post_mixer_norm,
            "ffn_norm.weight" => Some(layer.ffn_norm),
            "post_ffn_norm.weight" => layer.post_ffn_norm,
            "attn.q_norm.weight" | "attn.k_norm.weight" => attention.qk_norm,
            _ => None,
        };
        norm.map(|n| n.weight_offset)
    };
    match name.strip_prefix("layers.") {
        Some(rest) => layer(rest).unwrap_or(0.0),
        None if name == "final_norm.weight" => spec.final_norm.weight_offset,
        None => 0.0,
    }
}

/// A GGUF file with the metadata of another one of the same model, or its own.
fn gguf(bundle: &Bundle, like: Option<&Path>, encode: Option<DType>, out: &Path) -> Outcome<u64> {
    let spec = &bundle.manifest().spec;
    let declared = spec.tensors();
    let mut formats = Vec::with_capacity(declared.len());
    for decl in &declared {
        let dtype = gguf_format(bundle, decl, encode)?;
        formats.push((gguf_name(&decl.name), decl, dtype));
    }
    let own: Vec<String> = formats.iter().map(|(name, ..)| name.clone()).collect();
    let frame = match like {
        Some(like) => frame_like(bundle, like, &own)?,
        None => frame_of(bundle)?,
    };
    let mut writer = Writer::new();
    for (key, value) in &frame.metadata {
        writer.set(key, value.clone());
    }
    let linear = formats
        .iter()
        .find(|(_, d, _)| d.name.ends_with("attn.q.weight"));
    if let Some(number) = linear.and_then(|(_, _, dtype)| file_type(*dtype)) {
        writer.set("general.file_type", Value::U32(number));
    }
    for (name, decl, dtype) in &formats {
        writer.tensor(name, *dtype, Shape(decl.shape.dims().to_vec()));
    }
    for (name, dtype, shape, _) in &frame.more {
        writer.tensor(name, *dtype, shape.clone());
    }
    let total = writer.file_bytes().or_input()?;
    let mut file = StagedFile::create(out, total)?;
    writer
        .write(&mut file, |name| {
            let Some((_, decl, dtype)) = formats.iter().find(|(n, _, _)| n == name) else {
                let found = frame.more.iter().find(|(n, ..)| n == name);
                let (.., bytes) = found.ok_or_else(|| other("a tensor is gone"))?;
                return Ok(bytes.as_slice().into());
            };
            let offset = match frame.plain_gains {
                true => gain_offset(spec, &decl.name),
                false => 0.0,
            };
            let bytes = gguf_bytes(bundle, &decl.name, *dtype, offset)?;
            if !frame.permuted_qk {
                return Ok(bytes.into());
            }
            let rows = match decl.shape.dims() {
                [rows, _] | [rows] => (*rows).max(1),
                _ => 1,
            };
            let row_bytes = bytes.len() / rows;
            Ok(interleaved(spec, &decl.name, bytes, row_bytes).into())
        })
        .with_context(|| format!("cannot write {}", out.display()))
        .or_input()?;
    file.publish()?;
    Ok(total)
}
