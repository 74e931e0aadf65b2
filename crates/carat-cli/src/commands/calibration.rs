//! The text on which a recipe is calibrated.

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use carat_bundle::text::TextAssets;
use carat_quant::{Recipe, recipe::schema::Calibration};
use carat_text::{AddSpecial, Tokenizer};

use crate::{
    failure::{Failure, OrInput as _, Outcome},
    model::{CALIBRATION_NOTE, base_name},
};

/// Bytes that are read for each token that is wanted: more than any tokenizer packs
/// into a token of running text.
const BYTES_PER_TOKEN: u64 = 32;

/// Ids that the model reads together, and a line for the bundle's notes.
pub(crate) struct Text {
    pub(crate) sequences: Vec<Vec<u32>>,
    pub(crate) note: String,
}

/// Reads the text of a recipe in the file `recipe_path`, or the one that the command
/// names.
pub(crate) fn read(
    recipe: &Recipe,
    settings: &Calibration,
    recipe_path: &str,
    given: Option<&Path>,
    assets: &TextAssets,
) -> Outcome<Text> {
    let beside = |name: &String| {
        let folder = Path::new(recipe_path).parent().unwrap_or(Path::new(""));
        folder.join(name)
    };
    let path: PathBuf = given
        .map(Path::to_owned)
        .or_else(|| settings.text.as_ref().map(beside))
        .ok_or_else(|| {
            Failure::input(anyhow::anyhow!(
                "recipe {} is calibrated on a text, and none is given",
                recipe.name()
            ))
            .hint("--calibration FILE, or carat.calibration.text in the recipe")
        })?;
    let limit = (settings.tokens as u64).saturating_mul(BYTES_PER_TOKEN);
    let mut bytes = Vec::new();
    File::open(&path)
        .and_then(|file| file.take(limit).read_to_end(&mut bytes))
        .with_context(|| format!("cannot read {}", path.display()))
        .or_input()?;
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text,
        // The limit may have cut a character.
        Err(e) if e.error_len().is_none() && bytes.len() as u64 == limit => {
            std::str::from_utf8(&bytes[..e.valid_up_to()]).or_input()?
        }
        Err(e) => {
            return Err(Failure::input(anyhow::anyhow!(
                "{}: is no UTF-8 text: {e}",
                path.display()
            )));
        }
    };
    let tokenizer = Tokenizer::from_assets(assets)?;
    let mut ids = tokenizer.encode(text, AddSpecial::No)?;
    // What the model expects before any text, such as a beginning-of-sequence token.
    let alone = tokenizer.encode("a", AddSpecial::No)?;
    let with = tokenizer.encode("a", AddSpecial::Yes)?;
    let before = with
        .windows(alone.len().max(1))
        .position(|w| w == alone)
        .unwrap_or(0);
    if ids.len() < settings.tokens {
        return Err(Failure::input(anyhow::anyhow!(
            "{}: expected at least {} tokens (carat.calibration.tokens), found {}",
            path.display(),
            settings.tokens,
            ids.len()
        )));
    }
    ids.truncate(settings.tokens);
    let sequences = ids
        .chunks(settings.sequence)
        .map(|chunk| [&with[..before], chunk].concat())
        .collect();
    Ok(Text {
        sequences,
        note: format!(
            "{CALIBRATION_NOTE}{} tokens of {} (text digest {})",
            ids.len(),
            base_name(&path),
            carat_fidelity::eval::text_digest(text),
        ),
    })
}
