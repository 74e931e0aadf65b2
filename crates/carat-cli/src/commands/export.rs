//! `carat export`: a bundle's weights for other programs.

use std::{
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
};

use anyhow::Context as _;
use carat_bundle::{Bundle, file::StagedFile, source::TensorSource as _, spec::TensorDecl};
use carat_import::{
    export::{gguf_name, hf_name, interleaved},
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
    let written = match (&args.to, &args.like) {
        (Container::Safetensors, _) => safetensors(&bundle, &args.out)?,
        (Container::Gguf, Some(like)) => gguf(&bundle, like, &args.out)?,
        (Container::Gguf, None) => {
            return Err(Failure::input(anyhow::anyhow!(
                "--to gguf needs --like FILE.gguf"
            )));
        }
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

/// The format in which GGUF holds a tensor of the bundle.
fn gguf_format(bundle: &Bundle, decl: &TensorDecl) -> Outcome<DType> {
    let entry = bundle.tensor(&decl.name)?.entry;
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

/// A tensor's bytes in that format.
fn gguf_bytes(bundle: &Bundle, name: &str, dtype: DType) -> io::Result<Vec<u8>> {
    let tensor = bundle.tensor(name).map_err(other)?;
    match tensor.grid_matrix() {
        Some(matrix) => Ok(to_blocks(&matrix.map_err(other)?, dtype)),
        None => Ok(bundle.read(name).map_err(other)?.into_owned()),
    }
}

/// `general.file_type` of files that are mostly in one format.
fn file_type(dtype: DType) -> Option<u32> {
    Some(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::TQ1_0 => 36,
        DType::TQ2_0 => 37,
        DType::MXFP4 => 38,
        _ => return None,
    })
}

/// A GGUF file with the metadata of another one of the same model.
fn gguf(bundle: &Bundle, like: &Path, out: &Path) -> Outcome<u64> {
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
    let like_file = Gguf::open(like)?;
    let declared = spec.tensors();
    let mut formats = Vec::with_capacity(declared.len());
    for decl in &declared {
        formats.push((gguf_name(&decl.name), decl, gguf_format(bundle, decl)?));
    }
    let mut writer = Writer::new();
    for (key, value) in like_file.metadata() {
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
    // What the metadata belongs with, such as rotary factors.
    for tensor in like_file.tensors() {
        if formats.iter().all(|(name, _, _)| *name != tensor.name) {
            writer.tensor(&tensor.name, tensor.dtype, tensor.shape.clone());
        }
    }
    let total = writer.file_bytes().or_input()?;
    let mut file = StagedFile::create(out, total)?;
    writer
        .write(&mut file, |name| {
            let Some((_, decl, dtype)) = formats.iter().find(|(n, _, _)| n == name) else {
                let bytes = like_file.tensor_bytes(name);
                return Ok(bytes.ok_or_else(|| other("a tensor is gone"))?.into());
            };
            let bytes = gguf_bytes(bundle, &decl.name, *dtype)?;
            if !model.origin.permuted_qk {
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
