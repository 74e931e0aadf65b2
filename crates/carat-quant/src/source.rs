//! Sources that are another source, changed.

use std::borrow::Cow;

use carat_bundle::{
    manifest::SkippedTensor,
    source::{SourceError, TensorInfo, TensorSource},
    spec::ModelSpec,
};

const TABLE: &str = "embed.weight";
const HEAD: &str = "head.weight";

/// A source whose head is a copy of its embedding table.
pub struct Untied<'a>(pub &'a dyn TensorSource);

impl TensorSource for Untied<'_> {
    fn origin(&self) -> &str {
        self.0.origin()
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.0.names();
        if let Err(at) = names.binary_search_by(|n| n.as_str().cmp(HEAD)) {
            names.insert(at, HEAD.to_owned());
        }
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.0.info(if name == HEAD { TABLE } else { name })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        self.0.read(if name == HEAD { TABLE } else { name })
    }
}

/// The first layers of a model, for trying something out: the spec, and the
/// tensors of the source that it leaves out. Not a model to publish.
pub struct Truncated {
    /// The first layers, with embedding, final norm and head.
    pub spec: ModelSpec,
    /// The tensors of the others.
    pub skipped: Vec<SkippedTensor>,
}

impl Truncated {
    /// Keeps `layers` layers, all if there are fewer.
    pub fn new(spec: &ModelSpec, layers: usize) -> Truncated {
        let mut cut = spec.clone();
        cut.layers.truncate(layers);
        let kept: std::collections::HashSet<String> =
            cut.tensors().into_iter().map(|t| t.name).collect();
        let skipped = spec
            .tensors()
            .into_iter()
            .filter(|t| !kept.contains(&t.name))
            .map(|t| SkippedTensor {
                name: t.name,
                reason: format!("truncated to {layers} layers"),
            })
            .collect();
        Truncated { spec: cut, skipped }
    }
}
