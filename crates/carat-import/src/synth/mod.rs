//! Synthetic checkpoints: files of a real model's sizes with random weights.
//!
//! Speed depends on shapes and formats, not on what the weights say. A file made
//! here has the tensors, formats and metadata of the model whose sizes it takes,
//! a vocabulary that encodes any text, and weights under which activations keep
//! the magnitude they have in a trained model: logits are finite and differ. It
//! knows nothing, and has no chat template.
//!
//! The bytes follow from shape, layers and seed alone. Every block of weights has
//! random numbers of its own, so the file does not depend on the number of
//! threads, and only a few megabytes for each of them are in memory at a time.
//!
//! ```
//! use carat_import::synth::{ModelShape, Synthesis};
//!
//! let folder = tempfile::tempdir()?;
//! let file = folder.path().join("tiny.gguf");
//! let shape = ModelShape::named("tiny").expect("a known shape");
//! let synthesis = Synthesis::new(shape, shape.layers, 7)?;
//! synthesis.write(&file, 2, |_| true)?;
//! assert_eq!(std::fs::metadata(&file)?.len(), synthesis.file_bytes()?);
//! let checkpoint = carat_import::open(&file)?;
//! assert_eq!(checkpoint.spec.layers.len(), shape.layers);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocks;
mod pieces;
mod shapes;

use std::{
    io,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, sync_channel},
    thread,
};

use carat_bundle::{BundleError, file::StagedFile};
use carat_tensor::{DType, Shape};

use crate::gguf::{WriteError, Writer};
pub use shapes::{ModelShape, SHAPES};

/// Bytes that are made and written at once, about.
const CHUNK_BYTES: usize = 1 << 20;

/// Why no file was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// The shape has fewer layers, or none was asked for.
    #[error("{layers} layers: expected 1 to the {most} of {shape}")]
    Layers {
        /// As asked.
        layers: usize,
        /// Of the shape.
        most: usize,
        /// Its name.
        shape: &'static str,
    },
    /// The declarations make no file.
    #[error(transparent)]
    Declaration(WriteError),
    /// The target could not be written.
    #[error("{}: {source}", path.display())]
    Write {
        /// The target.
        path: PathBuf,
        /// The reason.
        source: WriteError,
    },
    /// The target could not be staged.
    #[error(transparent)]
    Stage(#[from] BundleError),
    /// The caller asked to stop.
    #[error("{}: stopped before it was whole", path.display())]
    Stopped {
        /// The target.
        path: PathBuf,
    },
}

/// How the values of a tensor come about.
#[derive(Clone, Debug, PartialEq)]
enum Fill {
    /// Random, mean 0, with this root mean square.
    Random(f32),
    /// Gains of a norm: random, about 1.
    Gain,
    /// These very values.
    Given(Vec<f32>),
}

/// A tensor of the file.
#[derive(Clone, Debug, PartialEq)]
struct Declared {
    name: String,
    dtype: DType,
    shape: Shape,
    fill: Fill,
}

/// A file that can be made: metadata and tensors, without their bytes.
#[derive(Clone, Debug)]
pub struct Synthesis {
    writer: Writer,
    tensors: Vec<Declared>,
    seed: u64,
}

impl Synthesis {
    /// A model of `layers` layers of this shape.
    pub fn new(
        shape: &'static ModelShape,
        layers: usize,
        seed: u64,
    ) -> Result<Synthesis, SynthError> {
        if !(1..=shape.layers).contains(&layers) {
            return Err(SynthError::Layers {
                layers,
                most: shape.layers,
                shape: shape.name,
            });
        }
        let mut writer = Writer::new();
        shape.declare_metadata(&mut writer, layers, seed);
        let tensors = shape.tensors(layers);
        for t in &tensors {
            writer.tensor(&t.name, t.dtype, t.shape.clone());
        }
        Ok(Synthesis {
            writer,
            tensors,
            seed,
        })
    }

    /// Names, formats and bytes of the tensors, in file order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, DType, u64)> {
        self.tensors
            .iter()
            .map(|t| (t.name.as_str(), t.dtype, t.bytes()))
    }

    /// Number of values in all tensors.
    pub fn parameters(&self) -> u64 {
        self.tensors
            .iter()
            .map(|t| t.shape.dims().iter().product::<usize>() as u64)
            .sum()
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(Declared::bytes).sum()
    }

    /// Bytes of the file: tensors, metadata and padding.
    pub fn file_bytes(&self) -> Result<u64, SynthError> {
        self.writer.file_bytes().map_err(SynthError::Declaration)
    }

    /// Makes the file at `target`, replacing one that is there: whole or not at
    /// all. `go_on` hears of every piece that was written, in bytes of tensors,
    /// and says whether to go on.
    pub fn write(
        &self,
        target: &Path,
        threads: usize,
        mut go_on: impl FnMut(u64) -> bool,
    ) -> Result<(), SynthError> {
        let mut file = StagedFile::create(target, self.file_bytes()?)?;
        let chunks = self.chunks();
        let threads = threads.clamp(1, chunks.len().max(1));
        let mut stopped = false;
        let written = thread::scope(|scope| -> Result<(), WriteError> {
            let makers = (0..threads)
                .map(|nth| self.spawn_maker(scope, chunks.iter().skip(nth).step_by(threads)))
                .collect::<io::Result<Vec<_>>>()?;
            // Chunk `i` comes from maker `i % threads`, and each makes its own in order.
            let mut in_order = makers.iter().cycle();
            let mut of_tensor = chunks.chunk_by(|a, b| a.tensor == b.tensor);
            self.writer.stream(&mut file, |_, out| {
                for _ in of_tensor.next().unwrap_or_default() {
                    let made = in_order.next().and_then(|maker| maker.recv().ok());
                    let made = made.ok_or_else(|| io::Error::other("a thread ended early"))?;
                    out.write_all(&made)?;
                    if !go_on(made.len() as u64) {
                        stopped = true;
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                }
                Ok(())
            })
        });
        if stopped {
            return Err(SynthError::Stopped {
                path: target.to_owned(),
            });
        }
        written.map_err(|source| SynthError::Write {
            path: target.to_owned(),
            source,
        })?;
        Ok(file.publish()?)
    }

    /// Starts a thread that makes these chunks, two ahead of whoever takes them.
    /// It ends when the receiver is dropped.
    fn spawn_maker<'scope, 'a: 'scope>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, '_>,
        chunks: impl Iterator<Item = &'a Chunk> + Send + 'scope,
    ) -> io::Result<Receiver<Vec<u8>>> {
        let (sender, receiver) = sync_channel(1);
        let make = move || {
            for chunk in chunks {
                if sender.send(self.make(chunk)).is_err() {
                    return;
                }
            }
        };
        let builder = thread::Builder::new().name("synth".into());
        builder.spawn_scoped(scope, make)?;
        Ok(receiver)
    }

    /// The tensors in pieces of whole blocks.
    fn chunks(&self) -> Vec<Chunk> {
        let mut out = Vec::new();
        for (tensor, declared) in self.tensors.iter().enumerate() {
            let block_bytes = declared.dtype.block_bytes();
            let blocks = declared.bytes() / block_bytes as u64;
            let at_once = (CHUNK_BYTES / block_bytes).max(1);
            for first in (0..blocks).step_by(at_once) {
                let count = at_once.min((blocks - first) as usize);
                out.push(Chunk {
                    tensor,
                    first,
                    bytes: count * block_bytes,
                });
            }
        }
        out
    }

    fn make(&self, chunk: &Chunk) -> Vec<u8> {
        let declared = &self.tensors[chunk.tensor];
        let mut out = vec![0; chunk.bytes];
        let key = blocks::key(self.seed, &declared.name);
        let rest = out.chunks_exact_mut(declared.dtype.block_bytes());
        match &declared.fill {
            Fill::Random(rms) => {
                blocks::random(declared.dtype, *rms, key, chunk.first, &mut out);
            }
            Fill::Gain => {
                for (block, at) in rest.zip(chunk.first..) {
                    block.copy_from_slice(&blocks::gain(key, at).to_le_bytes());
                }
            }
            Fill::Given(values) => {
                for (block, value) in rest.zip(values.iter().skip(chunk.first as usize)) {
                    block.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        out
    }
}

impl Declared {
    fn bytes(&self) -> u64 {
        // The table's shapes are whole blocks; a test looks at each.
        self.shape.bytes(self.dtype).unwrap_or(0) as u64
    }
}

/// A piece of a tensor.
struct Chunk {
    tensor: usize,
    /// Its first block.
    first: u64,
    bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write as _};

    /// The file with zeros for weights: it takes no room where the system keeps
    /// holes, and has everything that an import looks at.
    fn hollow(synthesis: &Synthesis, path: &Path) {
        let mut file = std::fs::File::create(path).unwrap();
        let only_head = |_: &str, _: &mut dyn io::Write| Err(io::Error::other("enough"));
        synthesis.writer.stream(&mut file, only_head).unwrap_err();
        file.set_len(synthesis.file_bytes().unwrap()).unwrap();
        let gguf = crate::gguf::Gguf::open(path).unwrap();
        for declared in &synthesis.tensors {
            if let Fill::Given(values) = &declared.fill {
                let at = gguf.tensor(&declared.name).unwrap().offset;
                file.seek(SeekFrom::Start(at)).unwrap();
                for value in values {
                    file.write_all(&value.to_le_bytes()).unwrap();
                }
            }
        }
    }

    #[test]
    fn every_shape_is_a_model_that_can_be_opened() {
        let dir = tempfile::tempdir().unwrap();
        for shape in SHAPES {
            let synthesis = Synthesis::new(shape, shape.layers, 0).unwrap();
            let path = dir.path().join("hollow.gguf");
            hollow(&synthesis, &path);
            let checkpoint = crate::open(&path).unwrap();
            assert_eq!(checkpoint.spec.layers.len(), shape.layers);
            assert_eq!(checkpoint.spec.vocab_size, shape.vocab_size);
            assert_eq!(checkpoint.text.config.tokenizer_problem, None);
            assert!(checkpoint.text.tokenizer_json.is_some(), "{}", shape.name);
            let name = format!("{}-synthetic", shape.name);
            assert_eq!(checkpoint.origin.name, Some(name));
            let mut skipped = checkpoint.origin.skipped.iter();
            assert!(skipped.all(|s| s.name.starts_with("rope_factors")));
        }
    }
}
