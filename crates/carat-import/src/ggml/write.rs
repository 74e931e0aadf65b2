//! Metadata of a model that did not come from a GGUF file.
//!
//! What a family's files say is known by how they are read, so nothing is believed
//! here: metadata are written for one architecture after the other, read back, and
//! those are right that give the same model.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use carat_bundle::{
    spec::{FfnSpec, MixerSpec, ModelSpec, NormSpec, RopeScaling},
    text::TextAssets,
};
use carat_tensor::{DType, Shape};

use super::{Meta, text};
use crate::{
    families::{self, GgufFamily, Root},
    gguf::{Array, Gguf, Value, Writer},
    source::{Bytes, RawTensors, Stored},
    vocab::VocabError,
};

/// What a GGUF file of a model says besides its weights.
#[derive(Clone, Debug)]
pub struct Description {
    /// Keys and values, in order.
    pub metadata: Vec<(String, Value)>,
    /// Tensors that carry settings, such as rotary factors: fp32 lists by name.
    pub settings: Vec<(String, Vec<f32>)>,
    /// Rows of q and k are interleaved within heads.
    pub permuted_qk: bool,
}

/// Why a model cannot be described.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DescribeError {
    /// No architecture's metadata mean this model.
    #[error("no GGUF architecture of {} has such a model", known.join(", "))]
    Model {
        /// Architectures that were tried.
        known: Vec<&'static str>,
    },
    /// The tokenizer has no counterpart.
    #[error(transparent)]
    Vocab(#[from] VocabError),
}

/// The model in the terms of GGUF files: gains are what a norm multiplies with, and
/// rotary bands are a divisor for each frequency (rounded to fp32 once more).
#[must_use]
pub fn in_gguf_terms(spec: &ModelSpec) -> ModelSpec {
    let plain = |norm: &mut NormSpec| norm.weight_offset = 0.0;
    let mut spec = spec.clone();
    plain(&mut spec.final_norm);
    for layer in &mut spec.layers {
        plain(&mut layer.mixer_norm);
        plain(&mut layer.ffn_norm);
        layer.post_mixer_norm.iter_mut().for_each(plain);
        layer.post_ffn_norm.iter_mut().for_each(plain);
        let MixerSpec::Attention(attention) = &mut layer.mixer;
        attention.qk_norm.iter_mut().for_each(plain);
    }
    for rope in &mut spec.ropes {
        if matches!(rope.scaling, RopeScaling::FrequencyBands { .. }) {
            let banded = rope.inv_freq(1);
            rope.scaling = RopeScaling::None;
            let whole = rope.inv_freq(1);
            let factors = whole.iter().zip(&banded).map(|(w, b)| w / b).collect();
            rope.scaling = RopeScaling::Factors { factors };
        }
    }
    spec
}

/// Describes a model as a GGUF file would, with its tokenizer and templates.
///
/// # Errors
///
/// [`DescribeError`] if no file would be read as the same model, or as the same
/// tokenizer.
pub fn describe(
    spec: &ModelSpec,
    assets: &TextAssets,
    name: &str,
) -> Result<Description, DescribeError> {
    let plain = in_gguf_terms(spec);
    // Several may have words for it: the fewest, and rows in their own order.
    let mut found = families::GGUF
        .iter()
        .filter_map(|family| of_family(family, &plain))
        .min_by_key(|found| (found.metadata.len(), found.permuted_qk))
        .ok_or_else(|| DescribeError::Model {
            known: families::gguf_architectures(),
        })?;
    found
        .metadata
        .insert(1, ("general.name".into(), name.into()));
    found.metadata.extend(text::metadata(assets, spec)?);
    Ok(found)
}

fn number(value: usize) -> Option<Value> {
    u32::try_from(value).ok().map(Value::U32)
}

/// One number if all layers have the same, else a list.
fn per_layer(values: Vec<usize>) -> Option<Value> {
    let first = *values.first()?;
    if values.iter().all(|v| *v == first) {
        return number(first);
    }
    let values: Result<Vec<u32>, _> = values.into_iter().map(u32::try_from).collect();
    Some(Value::Array(Array::U32(values.ok()?)))
}

/// The description by one family's keys, if it is read back as the same model.
fn of_family(family: &GgufFamily, spec: &ModelSpec) -> Option<Description> {
    let attention = |layer: &carat_bundle::spec::LayerSpec| {
        let MixerSpec::Attention(a) = &layer.mixer;
        a.clone()
    };
    let first = attention(spec.layers.first()?);
    let heads = spec.layers.iter().map(|l| attention(l).heads).collect();
    let kv_heads = spec.layers.iter().map(|l| attention(l).kv_heads).collect();
    let inner = spec.layers.iter().map(|l| {
        let FfnSpec::Gated {
            intermediate_size, ..
        } = l.ffn;
        intermediate_size
    });
    let mut own = vec![
        ("block_count", number(spec.layers.len())?),
        ("context_length", number(spec.max_context)?),
        ("embedding_length", number(spec.hidden_size)?),
        ("feed_forward_length", per_layer(inner.collect())?),
        ("attention.head_count", per_layer(heads)?),
        ("attention.head_count_kv", per_layer(kv_heads)?),
        ("attention.key_length", number(first.head_dim)?),
        ("attention.value_length", number(first.head_dim)?),
        (
            "attention.layer_norm_rms_epsilon",
            Value::F32(spec.final_norm.eps),
        ),
    ];
    let mut settings = Vec::new();
    // Of several ropes the first is that of layers that see everything.
    if let Some(rope) = spec.ropes.first() {
        own.push(("rope.dimension_count", number(rope.rotary_dim)?));
        own.push(("rope.freq_base", Value::F32(rope.theta as f32)));
        match &rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                own.push(("rope.scaling.type", "linear".into()));
                own.push(("rope.scaling.factor", Value::F32(*factor as f32)));
            }
            RopeScaling::Factors { factors } => {
                settings.push(("rope_freqs.weight".to_owned(), factors.clone()));
            }
            RopeScaling::LongRope {
                short_factors,
                long_factors,
                original_max_context,
                attention_factor,
            } => {
                own.push(("rope.scaling.type", "longrope".into()));
                let original = number(*original_max_context)?;
                own.push(("rope.scaling.original_context_length", original));
                own.push(("rope.scaling.attn_factor", Value::F32(*attention_factor)));
                settings.push(("rope_factors_short.weight".into(), short_factors.clone()));
                settings.push(("rope_factors_long.weight".into(), long_factors.clone()));
            }
            // Not in these terms.
            RopeScaling::FrequencyBands { .. } => return None,
        }
    }
    own.extend((family.extras)(spec));
    let mut metadata = vec![(
        "general.architecture".to_owned(),
        Value::from(family.architecture),
    )];
    let prefixed = own
        .into_iter()
        .map(|(key, value)| (format!("{}.{key}", family.architecture), value));
    metadata.extend(prefixed);
    let permuted_qk = read_back(family, spec, &metadata, &settings)?;
    Some(Description {
        metadata,
        settings,
        permuted_qk,
    })
}

/// Whether a file with this metadata is `spec`; answers with its order of rows.
fn read_back(
    family: &GgufFamily,
    spec: &ModelSpec,
    metadata: &[(String, Value)],
    settings: &[(String, Vec<f32>)],
) -> Option<bool> {
    let mut writer = Writer::new();
    for (key, value) in metadata {
        writer.set(key, value.clone());
    }
    let mut bytes = Vec::new();
    writer
        .write(&mut bytes, |_| Err(std::io::Error::other("no tensors")))
        .ok()?;
    let gguf = Gguf::parse(Arc::new(bytes)).ok()?;
    // Shapes of weights are all that is looked at; settings are read.
    let stored = |shape: Shape, data: Vec<u8>| Stored {
        start: 0,
        len: data.len(),
        bytes: Bytes(Arc::new(data)),
        dtype: Ok(DType::F32),
        shape,
    };
    let mut raw = BTreeMap::new();
    for decl in spec.tensors() {
        let name = family.names.name(Root::PLAIN, &decl.name);
        raw.insert(name, stored(decl.shape, Vec::new()));
    }
    for (name, values) in settings {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        raw.insert(name.clone(), stored(Shape::from([values.len()]), data));
    }
    let raw = RawTensors(raw);
    let path = Path::new("description");
    let meta = Meta::new(path, &gguf, family.architecture, &raw);
    let described = (family.describe)(&meta).ok()?;
    meta.finish(&[]).ok()?;
    (described.spec == *spec).then_some(described.permuted_qk)
}
