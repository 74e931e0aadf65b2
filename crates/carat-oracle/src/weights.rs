//! Weights as floats: decoded from their source when they are needed.

use std::borrow::Cow;

use carat_bundle::source::{SourceError, TensorSource};
use carat_bundle::spec::{AttentionSpec, FfnSpec, LayerSpec, MixerSpec, ModelSpec, TensorDecl};
use carat_tensor::{DType, Shape, formats};

use crate::OracleError;
use crate::ffn::GatedWeights;
use crate::linear::{Linear, Matrix};
use crate::rounding::Rounding;

/// One decoder layer.
pub(crate) struct LayerWeights<'w> {
    pub(crate) mixer_norm: Vec<f32>,
    pub(crate) attention: AttentionWeights<'w>,
    pub(crate) post_mixer_norm: Option<Vec<f32>>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) ffn: GatedWeights<'w>,
    pub(crate) post_ffn_norm: Option<Vec<f32>>,
}

/// Projections and head norms of an attention mixer.
pub(crate) struct AttentionWeights<'w> {
    pub(crate) q: Linear<'w>,
    pub(crate) k: Linear<'w>,
    pub(crate) v: Linear<'w>,
    pub(crate) o: Linear<'w>,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
}

/// Reads and decodes tensors of one source.
#[derive(Clone, Copy)]
pub(crate) struct Loader<'a> {
    pub(crate) source: &'a dyn TensorSource,
    pub(crate) threads: usize,
    /// How the inputs of products are rounded, by the matrix.
    pub(crate) inputs: &'a (dyn Fn(&str) -> Rounding + Sync),
}

impl<'a> Loader<'a> {
    /// Checks that the source has every tensor of the spec, in its shape.
    pub(crate) fn check(&self, tensors: &[TensorDecl]) -> Result<(), OracleError> {
        for TensorDecl { name, shape, .. } in tensors {
            let info = self.source.info(name).ok_or_else(|| SourceError::Missing {
                origin: self.source.origin().to_owned(),
                name: name.clone(),
            })?;
            if info.shape != *shape {
                return Err(OracleError::TensorShape {
                    origin: self.source.origin().to_owned(),
                    name: name.clone(),
                    found: info.shape,
                    expected: shape.clone(),
                });
            }
        }
        Ok(())
    }

    /// A tensor's format and bytes, as many as its shape needs.
    fn bytes(&self, name: &str, shape: &Shape) -> Result<(DType, Cow<'a, [u8]>), OracleError> {
        let source = self.source;
        let dtype = source
            .info(name)
            .ok_or_else(|| SourceError::Missing {
                origin: source.origin().to_owned(),
                name: name.to_owned(),
            })?
            .dtype;
        let expected = shape.bytes(dtype).map_err(|e| self.decode_error(name, e))?;
        let bytes = source.read(name)?;
        if bytes.len() != expected {
            return Err(OracleError::TensorBytes {
                origin: source.origin().to_owned(),
                name: name.to_owned(),
                found: bytes.len(),
                expected,
                dtype,
            });
        }
        Ok((dtype, bytes))
    }

    fn decode_error(&self, name: &str, problem: impl std::fmt::Display) -> OracleError {
        OracleError::Decode {
            origin: self.source.origin().to_owned(),
            name: name.to_owned(),
            problem: problem.to_string(),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, OracleError> {
        let (dtype, bytes) = self.bytes(name, &Shape::from([len]))?;
        let mut out = vec![0.0; len];
        formats::decode(dtype, &bytes, &mut out).map_err(|e| self.decode_error(name, e))?;
        Ok(out)
    }

    /// A matrix: decoded if `resident`, else as stored.
    fn matrix(
        &self,
        name: &str,
        outputs: usize,
        inputs: usize,
        resident: bool,
    ) -> Result<Matrix<'a>, OracleError> {
        let (dtype, bytes) = self.bytes(name, &Shape::from([outputs, inputs]))?;
        let stored = Matrix::new(dtype, bytes, inputs).map_err(|e| self.decode_error(name, e))?;
        Ok(match resident {
            true => stored.decoded(self.threads),
            false => stored,
        })
    }

    fn linear(
        &self,
        name: &str,
        outputs: usize,
        inputs: usize,
        bias: bool,
        resident: bool,
    ) -> Result<Linear<'a>, OracleError> {
        let matrix = format!("{name}.weight");
        let weight = self.matrix(&matrix, outputs, inputs, resident)?;
        let bias = match bias {
            true => Some(self.vector(&format!("{name}.bias"), outputs)?),
            false => None,
        };
        Ok(Linear {
            weight,
            bias,
            input: (self.inputs)(&matrix),
        })
    }

    /// Layer `index`, its matrices decoded if `resident`, else as stored.
    pub(crate) fn layer(
        &self,
        spec: &ModelSpec,
        index: usize,
        resident: bool,
    ) -> Result<LayerWeights<'a>, OracleError> {
        let hidden = spec.hidden_size;
        let layer = &spec.layers[index];
        let a = attention(layer);
        let FfnSpec::Gated {
            intermediate_size: inner,
            bias: ffn_bias,
            ..
        } = layer.ffn;
        let name = |part: &str| format!("layers.{index}.{part}");
        let norm = |part: &str| self.vector(&name(&format!("{part}.weight")), hidden);
        let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let linear = |part: &str, outputs, inputs, bias| {
            self.linear(&name(part), outputs, inputs, bias, resident)
        };
        let head_norm = |part: &str| match a.qk_norm {
            Some(_) => self.vector(&name(part), a.head_dim).map(Some),
            None => Ok(None),
        };
        Ok(LayerWeights {
            mixer_norm: norm("mixer_norm")?,
            attention: AttentionWeights {
                q: linear("attn.q", q, hidden, a.qkv_bias)?,
                k: linear("attn.k", kv, hidden, a.qkv_bias)?,
                v: linear("attn.v", kv, hidden, a.qkv_bias)?,
                o: linear("attn.o", hidden, q, a.out_bias)?,
                q_norm: head_norm("attn.q_norm.weight")?,
                k_norm: head_norm("attn.k_norm.weight")?,
            },
            post_mixer_norm: layer
                .post_mixer_norm
                .map(|_| norm("post_mixer_norm"))
                .transpose()?,
            ffn_norm: norm("ffn_norm")?,
            ffn: GatedWeights {
                gate: linear("ffn.gate", inner, hidden, ffn_bias)?,
                up: linear("ffn.up", inner, hidden, ffn_bias)?,
                down: linear("ffn.down", hidden, inner, ffn_bias)?,
            },
            post_ffn_norm: layer
                .post_ffn_norm
                .map(|_| norm("post_ffn_norm"))
                .transpose()?,
        })
    }

    /// Gain of the final norm.
    pub(crate) fn final_norm(&self, spec: &ModelSpec) -> Result<Vec<f32>, OracleError> {
        self.vector("final_norm.weight", spec.hidden_size)
    }

    /// The head, decoded if `resident`, else as stored.
    pub(crate) fn head(&self, spec: &ModelSpec, resident: bool) -> Result<Linear<'a>, OracleError> {
        let name = head_name(spec);
        Ok(Linear {
            weight: self.matrix(name, spec.vocab_size, spec.hidden_size, resident)?,
            bias: None,
            input: (self.inputs)(name),
        })
    }

    /// Embedding rows of `ids` (all below the vocabulary size), `[ids, hidden]`.
    pub(crate) fn embed(&self, spec: &ModelSpec, ids: &[u32]) -> Result<Vec<f32>, OracleError> {
        let (name, width) = ("embed.weight", spec.hidden_size);
        let (dtype, bytes) = self.bytes(name, &Shape::from([spec.vocab_size, width]))?;
        let row_bytes = row_bytes(dtype, width);
        let mut out = vec![0.0; ids.len() * width];
        for (&id, row) in ids.iter().zip(out.chunks_exact_mut(width)) {
            let bytes = &bytes[id as usize * row_bytes..][..row_bytes];
            formats::decode(dtype, bytes, row).map_err(|e| self.decode_error(name, e))?;
        }
        Ok(out)
    }
}

/// Bytes of a row whose length [`Loader::bytes`] has checked.
fn row_bytes(dtype: DType, columns: usize) -> usize {
    dtype
        .row_bytes(columns)
        .expect("invariant: a row is whole blocks")
}

pub(crate) fn head_name(spec: &ModelSpec) -> &'static str {
    if spec.head.tied {
        "embed.weight"
    } else {
        "head.weight"
    }
}

/// The layer's attention.
pub(crate) fn attention(layer: &LayerSpec) -> &AttentionSpec {
    let MixerSpec::Attention(spec) = &layer.mixer;
    spec
}
