//! The committed JSON schemas are those of the code, and real files satisfy
//! them. Run with `CARAT_UPDATE=1` to write them anew.

mod common;

use std::path::Path;

use carat_bundle::{
    Manifest,
    declare::{Deviation, Expectations, RecipeRecord},
};
use common::*;
use serde_json::Value;

fn committed(name: &str, current: &Value) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../schemas")
        .join(name);
    let text = serde_json::to_string_pretty(current).unwrap() + "\n";
    if std::env::var_os("CARAT_UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let stored = std::fs::read_to_string(&path).expect(name);
    assert!(stored == text, "{name} is stale: run with CARAT_UPDATE=1");
    serde_json::from_str(&stored).unwrap()
}

fn errors(schema: &Value, instance: &Value) -> Vec<String> {
    let validator = jsonschema::validator_for(schema).unwrap();
    validator
        .iter_errors(instance)
        .map(|e| e.to_string())
        .collect()
}

#[test]
fn a_manifest_satisfies_its_schema() {
    let schema = committed("bundle-manifest.schema.json", &Manifest::json_schema());
    let dir = tempfile::tempdir().unwrap();
    convert_tiny(&dir.path().join("b"));
    let json = std::fs::read(dir.path().join("b/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(errors(&schema, &manifest), Vec::<String>::new());
    // The schema is no rubber stamp.
    for (at, v) in [
        ("/schema", serde_json::json!("x")),
        ("/version", serde_json::json!(2)),
        ("/tensors/0/dtype", serde_json::json!("Q9_9")),
        ("/spec/layers/0/mixer/kind", serde_json::json!("x")),
        ("/compression", Value::Null),
    ] {
        let mut wrong = manifest.clone();
        *wrong.pointer_mut(at).unwrap() = v;
        assert!(!errors(&schema, &wrong).is_empty(), "{at}");
    }
    for at in ["", "/tensors/0", "/source", "/text"] {
        let mut wrong = manifest.clone();
        let object = wrong.pointer_mut(at).unwrap().as_object_mut().unwrap();
        object.insert("surprise".into(), Value::Null);
        assert!(!errors(&schema, &wrong).is_empty(), "{at}");
    }
}

#[test]
fn the_records_satisfy_their_schemas() {
    let recipe_schema = committed("bundle-recipe.schema.json", &RecipeRecord::json_schema());
    let verify_schema = committed("bundle-verify.schema.json", &Expectations::json_schema());
    let dir = tempfile::tempdir().unwrap();
    let b = dir.path().join("b");
    let mut options = carat_bundle::ConvertOptions::default();
    options.deviations.context = Some(Deviation {
        source: 4096,
        bundle: 2048,
        reason: "memory".into(),
    });
    convert_with(&b, &options);
    let read = |name: &str| -> Value {
        toml::from_str(&std::fs::read_to_string(b.join(name)).unwrap()).unwrap()
    };
    let (recipe, verify) = (read("recipe.toml"), read("verify.toml"));
    assert_eq!(errors(&recipe_schema, &recipe), Vec::<String>::new());
    assert_eq!(errors(&verify_schema, &verify), Vec::<String>::new());
    assert!(!errors(&recipe_schema, &verify).is_empty());
    assert_eq!(verify["deviations"]["context"]["bundle"], 2048);
}
