//! Scales of the inputs of matrices, folded into what makes those inputs.
//!
//! `W x = (W diag(s)) (x / s)`, and `x / s` costs nothing where what comes before can
//! make it: the stored model needs no new operation, and is the same function but for
//! rounding. The pairs:
//!
//! | inputs of | divided in |
//! |---|---|
//! | `attn.q`, `attn.k`, `attn.v` | the gain of `mixer_norm` |
//! | `ffn.gate`, `ffn.up` | the gain of `ffn_norm` |
//! | `attn.o` | rows and bias of `attn.v`: attention averages values; query heads that share a value head share scales |
//! | `ffn.down` | rows and bias of `ffn.up`: the gate multiplies them |
//! | `head`, unless it is the embedding table | the gain of `final_norm` |
//!
//! A pair is used only where every matrix of it is quantized.

use std::collections::HashMap;

use carat_bundle::spec::{MixerSpec, ModelSpec};
use carat_oracle::TapPoint;

/// What divides inputs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Producer {
    /// The gain of this norm, to which `offset` is added when it is used.
    Norm { name: String, offset: f32 },
    /// The rows of this projection; `group` query heads of `head_dim` columns share a
    /// value head (1 and all columns where there are no heads).
    Rows {
        name: String,
        group: usize,
        head_dim: usize,
    },
}

impl Producer {
    /// The tensors that change.
    pub(crate) fn names(&self) -> Vec<String> {
        match self {
            Producer::Norm { name, .. } => vec![name.clone()],
            Producer::Rows { name, .. } => vec![name.clone(), bias_of(name)],
        }
    }
}

fn bias_of(name: &str) -> String {
    name.replace(".weight", ".bias")
}

/// Matrices with the same inputs, and what makes those.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pair {
    pub(crate) point: TapPoint,
    pub(crate) producer: Producer,
    /// Names of matrices.
    pub(crate) consumers: Vec<String>,
}

/// Where a matrix's inputs are to be had.
pub(crate) fn point_of(name: &str) -> Option<TapPoint> {
    if name == "head.weight" {
        return Some(TapPoint::FinalHidden);
    }
    let (layer, part) = name.strip_prefix("layers.")?.split_once('.')?;
    let layer = layer.parse().ok()?;
    Some(match part {
        "attn.q.weight" | "attn.k.weight" | "attn.v.weight" => TapPoint::MixerInput(layer),
        "attn.o.weight" => TapPoint::MixerInner(layer),
        "ffn.gate.weight" | "ffn.up.weight" => TapPoint::FfnInput(layer),
        "ffn.down.weight" => TapPoint::FfnInner(layer),
        _ => return None,
    })
}

/// The pairs of a layer, or behind the last one, whose matrices `quantized` has.
pub(crate) fn pairs(spec: &ModelSpec, index: usize, quantized: impl Fn(&str) -> bool) -> Vec<Pair> {
    let mut out = Vec::new();
    match spec.layers.get(index) {
        None if spec.head.tied => {}
        None => out.push(Pair {
            point: TapPoint::FinalHidden,
            producer: Producer::Norm {
                name: "final_norm.weight".into(),
                offset: spec.final_norm.weight_offset,
            },
            consumers: vec!["head.weight".into()],
        }),
        Some(layer) => {
            let name = |part: &str| format!("layers.{index}.{part}.weight");
            let norm = |part: &str, offset| Producer::Norm {
                name: name(part),
                offset,
            };
            let rows = |part: &str, group, head_dim| Producer::Rows {
                name: name(part),
                group,
                head_dim,
            };
            let MixerSpec::Attention(attention) = &layer.mixer;
            let mut push = |point, producer, parts: &[&str]| {
                out.push(Pair {
                    point,
                    producer,
                    consumers: parts.iter().map(|part| name(part)).collect(),
                });
            };
            push(
                TapPoint::MixerInput(index),
                norm("mixer_norm", layer.mixer_norm.weight_offset),
                &["attn.q", "attn.k", "attn.v"],
            );
            push(
                TapPoint::MixerInner(index),
                rows("attn.v", attention.group(), attention.head_dim),
                &["attn.o"],
            );
            push(
                TapPoint::FfnInput(index),
                norm("ffn_norm", layer.ffn_norm.weight_offset),
                &["ffn.gate", "ffn.up"],
            );
            push(
                TapPoint::FfnInner(index),
                rows("ffn.up", 1, 0),
                &["ffn.down"],
            );
        }
    }
    out.retain(|pair| {
        let producer = match &pair.producer {
            Producer::Norm { .. } => true,
            Producer::Rows { name, .. } => quantized(name),
        };
        producer && pair.consumers.iter().all(|name| quantized(name))
    });
    out
}

/// What becomes of one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Scales {
    /// Multiply the columns of a matrix.
    pub(crate) columns: Option<Vec<f32>>,
    /// Divide the rows of a matrix, or the values of a vector.
    pub(crate) rows: Option<Vec<f32>>,
    /// Added to a vector before it is divided and taken away again.
    pub(crate) offset: f32,
}

impl Scales {
    /// Applies them to `[rows, columns]`, or to a vector with `columns` 1.
    pub(crate) fn apply(&self, values: &mut [f32], columns: usize) {
        for (row, values) in values.chunks_mut(columns.max(1)).enumerate() {
            if let Some(scales) = &self.columns {
                values.iter_mut().zip(scales).for_each(|(v, s)| *v *= s);
            }
            if let Some(scales) = &self.rows {
                let s = scales[row];
                for v in values {
                    *v = (*v + self.offset) / s - self.offset;
                }
            }
        }
    }
}

/// Puts a pair's scales (one for each input of the consumers) where they belong.
pub(crate) fn place(pair: &Pair, scales: &[f32], out: &mut HashMap<String, Scales>) {
    for name in &pair.consumers {
        out.entry(name.clone()).or_default().columns = Some(scales.to_vec());
    }
    match &pair.producer {
        Producer::Norm { name, offset } => {
            let entry = out.entry(name.clone()).or_default();
            entry.rows = Some(scales.to_vec());
            entry.offset = *offset;
        }
        Producer::Rows {
            name,
            group,
            head_dim,
        } => {
            let rows = match *group {
                0 | 1 => scales.to_vec(),
                group => scales
                    .chunks(group * head_dim)
                    .flat_map(|heads| heads[..*head_dim].iter().copied())
                    .collect(),
            };
            out.entry(bias_of(name)).or_default().rows = Some(rows.clone());
            out.entry(name.clone()).or_default().rows = Some(rows);
        }
    }
}

/// Makes what belongs to the same value head equal: the mean over its query heads.
pub(crate) fn share(pair: &Pair, per_column: &mut [f32]) {
    let Producer::Rows {
        group, head_dim, ..
    } = pair.producer
    else {
        return;
    };
    if group <= 1 {
        return;
    }
    for heads in per_column.chunks_mut(group * head_dim) {
        for d in 0..head_dim {
            let sum: f32 = (0..group).map(|h| heads[h * head_dim + d]).sum();
            (0..group).for_each(|h| heads[h * head_dim + d] = sum / group as f32);
        }
    }
}
