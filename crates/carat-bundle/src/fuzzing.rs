//! Entry points for fuzz targets. Ordinary tests replay the seed corpus through
//! them; none may panic, whatever the bytes.

use std::path::Path;

use crate::{
    Manifest,
    declare::{Expectations, RecipeRecord, parse_toml},
};

/// Reads the bytes as a manifest; one that is accepted must survive writing.
pub fn manifest(data: &[u8]) {
    if let Ok(manifest) = Manifest::parse(data) {
        let written = manifest
            .to_json()
            .expect("invariant: an accepted manifest can be written");
        let back = Manifest::parse(&written).expect("invariant: and read again");
        assert_eq!(back, manifest);
    }
}

/// Reads the bytes as `recipe.toml` and as `verify.toml`.
pub fn records(data: &[u8]) {
    let path = Path::new("record.toml");
    let _ = parse_toml::<RecipeRecord>(path, data);
    let _ = parse_toml::<Expectations>(path, data);
}
