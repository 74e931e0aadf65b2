//! Names of modules: ours, and those that recipe files of others use.
//!
//! Recipes address modules as `transformers` names them, below whatever wrapper
//! an exporter puts around the model: `model.layers.3.self_attn.q_proj`, Apple's
//! `extend.model.layers.3.self_attn.q_proj`, a multimodal checkpoint's
//! `model.language_model.layers.3.…`. A pattern that matches any of a module's
//! names, or of a module's parents, matches the module.

/// What may stand before a module's own name.
const WRAPPERS: [&str; 8] = [
    "",
    "model.",
    "extend.",
    "extend.model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "load_embeddings.",
];

/// Our parts of a layer and theirs.
const PARTS: [(&str, &str); 7] = [
    ("attn.q", "self_attn.q_proj"),
    ("attn.k", "self_attn.k_proj"),
    ("attn.v", "self_attn.v_proj"),
    ("attn.o", "self_attn.o_proj"),
    ("ffn.gate", "mlp.gate_proj"),
    ("ffn.up", "mlp.up_proj"),
    ("ffn.down", "mlp.down_proj"),
];

/// All names of the module that holds a tensor such as `layers.0.attn.q.weight`.
pub fn names(tensor: &str) -> Vec<String> {
    let own = tensor.strip_suffix(".weight").unwrap_or(tensor);
    let theirs = match own {
        "embed" => "embed_tokens".to_owned(),
        "head" => "lm_head".to_owned(),
        _ => PARTS
            .iter()
            .find_map(|(ours, theirs)| Some(format!("{}{theirs}", own.strip_suffix(ours)?)))
            .unwrap_or_else(|| own.to_owned()),
    };
    let mut names = vec![own.to_owned()];
    let inside = own != "head";
    for wrapper in WRAPPERS {
        // The head stands beside the model that holds the layers, not in it.
        if inside || !wrapper.ends_with("model.") || wrapper == "language_model." {
            names.push(format!("{wrapper}{theirs}"));
        }
    }
    names.dedup();
    names
}

/// A name and those of its parents, the longest first: `a.b.c`, `a.b`, `a`, and
/// the whole model, whose name is empty.
pub fn with_parents(name: &str) -> impl Iterator<Item = &str> {
    let dots = name.rmatch_indices('.').map(|(at, _)| &name[..at]);
    std::iter::once(name).chain(dots).chain([""])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_have_their_names_everywhere() {
        let names = names("layers.3.ffn.down.weight");
        for name in [
            "layers.3.ffn.down",
            "model.layers.3.mlp.down_proj",
            "extend.model.layers.3.mlp.down_proj",
            "model.language_model.layers.3.mlp.down_proj",
        ] {
            assert!(names.iter().any(|n| n == name), "{name}");
        }
        let head = super::names("head.weight");
        assert!(head.contains(&"lm_head".to_owned()));
        assert!(!head.contains(&"model.lm_head".to_owned()));
        assert!(super::names("embed.weight").contains(&"extend.model.embed_tokens".to_owned()));
    }

    #[test]
    fn parents_end_with_the_model() {
        let all: Vec<&str> = with_parents("a.b.c").collect();
        assert_eq!(all, ["a.b.c", "a.b", "a", ""]);
    }
}
