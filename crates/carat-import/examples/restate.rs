//! Writes a GGUF file with its quantized matrices restated in another format:
//! the same model for two engines in a format of choice.
//!
//! ```sh
//! cargo run --release -p carat-import --example restate -- IN.gguf OUT.gguf Q8_0
//! ```

use std::{borrow::Cow, error::Error, fs::File, io::BufWriter, path::Path};

use carat_import::gguf::{Gguf, Writer};
use carat_tensor::{DType, formats};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [input, output, format] = &args[..] else {
        return Err("usage: restate IN.gguf OUT.gguf FORMAT".into());
    };
    let to = DType::from_name(format).ok_or_else(|| format!("no format {format:?}"))?;
    let gguf = Gguf::open(Path::new(input))?;
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata() {
        writer.set(key, value.clone());
    }
    let stored = |from: DType, columns: usize| {
        let restated = !from.is_float() && to.row_bytes(columns).is_some();
        if restated { to } else { from }
    };
    for tensor in gguf.tensors() {
        let dtype = stored(tensor.dtype, tensor.shape.columns());
        writer.tensor(&tensor.name, dtype, tensor.shape.clone());
    }
    let mut out = BufWriter::new(File::create(output)?);
    writer.write(&mut out, |name| {
        let (Some(tensor), Some(bytes)) = (gguf.tensor(name), gguf.tensor_bytes(name)) else {
            return Err(std::io::Error::other(format!("no tensor {name:?}")));
        };
        let dtype = stored(tensor.dtype, tensor.shape.columns());
        if dtype == tensor.dtype {
            return Ok(Cow::Borrowed(bytes));
        }
        let elements = tensor.shape.elements().map_err(std::io::Error::other)?;
        let mut values = vec![0.0; elements];
        formats::decode(tensor.dtype, bytes, &mut values).map_err(std::io::Error::other)?;
        let mut codes = vec![0; tensor.shape.bytes(dtype).map_err(std::io::Error::other)?];
        formats::encode(dtype, &values, &mut codes).map_err(std::io::Error::other)?;
        Ok(Cow::Owned(codes))
    })?;
    Ok(())
}
