//! Names of tensors.

/// How a family names its tensors: pairs of canonical and own stem (a name
/// without its final `.weight` or `.bias`).
pub(crate) struct NameTable {
    /// Tensors outside the layers.
    pub(crate) outer: &'static [(&'static str, &'static str)],
    /// What precedes the layer's number.
    pub(crate) layer_prefix: &'static str,
    /// Tensors of a layer.
    pub(crate) layer: &'static [(&'static str, &'static str)],
    /// Where the language model may sit in a larger one, likeliest first.
    pub(crate) roots: &'static [Root],
    /// Prefixes of tensors that a text model has no use for, such as a vision tower.
    pub(crate) ignored_prefixes: &'static [&'static str],
    /// Endings of tensors that are recomputed from the configuration.
    pub(crate) ignored_suffixes: &'static [&'static str],
}

/// Prefixes of a model within a checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Root {
    /// What stands for `model.` in the table's names.
    pub(crate) model: &'static str,
    /// What precedes names that do not begin with `model.`.
    pub(crate) other: &'static str,
}

impl Root {
    /// Names as the table has them.
    pub(crate) const PLAIN: Root = Root {
        model: "model.",
        other: "",
    };
}

impl NameTable {
    /// The checkpoint's name of a canonical tensor below `root`.
    pub(crate) fn name(&self, root: Root, canonical: &str) -> String {
        let (stem, kind) = canonical.rsplit_once('.').unwrap_or((canonical, ""));
        let find = |table: &[(&'static str, &'static str)], key: &str| {
            table
                .iter()
                .find(|(c, _)| *c == key)
                .map_or_else(|| key.to_owned(), |(_, own)| (*own).to_owned())
        };
        let own = match stem
            .strip_prefix("layers.")
            .and_then(|rest| rest.split_once('.'))
        {
            Some((index, rest)) => {
                format!("{}{index}.{}", self.layer_prefix, find(self.layer, rest))
            }
            None => find(self.outer, stem),
        };
        match own.strip_prefix("model.") {
            Some(rest) => format!("{}{rest}.{kind}", root.model),
            None => format!("{}{own}.{kind}", root.other),
        }
    }

    /// Why a tensor can be left out without changing the model; `None` if it
    /// cannot.
    pub(crate) fn tolerates(&self, name: &str) -> Option<&'static str> {
        if self.ignored_prefixes.iter().any(|p| name.starts_with(p)) {
            return Some("not of the language model");
        }
        let suffix = self.ignored_suffixes.iter().any(|s| name.ends_with(s));
        suffix.then_some("rotary frequencies, which are computed")
    }
}

/// Stems of a layer's projections in HF checkpoints.
macro_rules! hf_layer_names {
    ($($extra:expr),* $(,)?) => {
        &[
            ("mixer_norm", "input_layernorm"),
            ("attn.q", "self_attn.q_proj"),
            ("attn.k", "self_attn.k_proj"),
            ("attn.v", "self_attn.v_proj"),
            ("attn.o", "self_attn.o_proj"),
            ("attn.q_norm", "self_attn.q_norm"),
            ("attn.k_norm", "self_attn.k_norm"),
            ("ffn.gate", "mlp.gate_proj"),
            ("ffn.up", "mlp.up_proj"),
            ("ffn.down", "mlp.down_proj"),
            $($extra),*
        ]
    };
}

/// HF checkpoints with one norm before each branch.
pub(crate) static HF_PRE_NORM: NameTable = NameTable {
    outer: HF_OUTER,
    layer_prefix: "model.layers.",
    layer: hf_layer_names![("ffn_norm", "post_attention_layernorm")],
    roots: &[Root::PLAIN],
    ignored_prefixes: &[],
    ignored_suffixes: &[".rotary_emb.inv_freq"],
};

/// HF checkpoints with norms on both sides of each branch, alone or as the
/// language model of a multimodal checkpoint (older and newer layout).
pub(crate) static HF_SANDWICH: NameTable = NameTable {
    outer: HF_OUTER,
    layer_prefix: "model.layers.",
    layer: hf_layer_names![
        ("post_mixer_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffn_norm", "post_feedforward_layernorm"),
    ],
    roots: &[
        Root::PLAIN,
        Root {
            model: "language_model.model.",
            other: "language_model.",
        },
        Root {
            model: "model.language_model.",
            other: "",
        },
    ],
    ignored_prefixes: &[
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ],
    ignored_suffixes: &[],
};

/// Stems outside the layers in HF checkpoints.
pub(super) const HF_OUTER: &[(&str, &str)] = &[
    ("embed", "model.embed_tokens"),
    ("final_norm", "model.norm"),
    ("head", "lm_head"),
];

/// GGUF files.
pub(crate) static GGUF: NameTable = NameTable {
    outer: &[
        ("embed", "token_embd"),
        ("final_norm", "output_norm"),
        ("head", "output"),
    ],
    layer_prefix: "blk.",
    layer: &[
        ("mixer_norm", "attn_norm"),
        ("attn.q", "attn_q"),
        ("attn.k", "attn_k"),
        ("attn.v", "attn_v"),
        ("attn.o", "attn_output"),
        ("attn.q_norm", "attn_q_norm"),
        ("attn.k_norm", "attn_k_norm"),
        ("post_mixer_norm", "post_attention_norm"),
        ("ffn_norm", "ffn_norm"),
        ("ffn.gate", "ffn_gate"),
        ("ffn.up", "ffn_up"),
        ("ffn.down", "ffn_down"),
        ("post_ffn_norm", "post_ffw_norm"),
    ],
    roots: &[Root::PLAIN],
    ignored_prefixes: &[],
    ignored_suffixes: &[".attn_rot_embd"],
};
