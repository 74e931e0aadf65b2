//! Recipes: files that say how each tensor of a model is stored.
//!
//! A recipe is YAML with the keys of `coreai-opt`'s configurations, so that the
//! recipe files of others load unchanged, and a section `carat` for what those do
//! not have ([`schema`]). [`Recipe::resolve`] turns it into a [`Plan`] for a
//! model without looking at a weight.
//!
//! For each module, a configuration by its name goes before one by its class, and
//! that before the global one; of several that match on a level the last one
//! written wins. What a configuration says of a module holds for its children.
//! `null` leaves weights alone. Names are regular expressions for the whole name,
//! and each module has the names of [`alias`] besides ours.

pub mod alias;
mod resolve;
pub mod schema;

pub use resolve::{Plan, Planned, Treatment};
use schema::{Field, Op, Ordered, QuantizationSpec, RecipeFile};

use crate::QuantError;

/// Longest recipe that is read, in bytes.
pub const MAX_RECIPE_BYTES: usize = 1 << 20;

/// Most tokens that a recipe is calibrated on.
pub const MAX_CALIBRATION_TOKENS: usize = 1 << 20;

/// The presets, by name.
pub const PRESETS: [(&str, &str); 15] = [
    ("none", include_str!("../../presets/none.yaml")),
    ("int8lin", include_str!("../../presets/int8lin.yaml")),
    ("int8hu", include_str!("../../presets/int8hu.yaml")),
    (
        "int8_channel",
        include_str!("../../presets/int8_channel.yaml"),
    ),
    ("4bit", include_str!("../../presets/4bit.yaml")),
    (
        "int4lin_sym",
        include_str!("../../presets/int4lin_sym.yaml"),
    ),
    ("mxfp4", include_str!("../../presets/mxfp4.yaml")),
    ("nvfp4", include_str!("../../presets/nvfp4.yaml")),
    ("ternary", include_str!("../../presets/ternary.yaml")),
    (
        "4bit_weight_palettized_group8",
        include_str!("../../presets/4bit_weight_palettized_group8.yaml"),
    ),
    (
        "4bit_weight_palettized_group32",
        include_str!("../../presets/4bit_weight_palettized_group32.yaml"),
    ),
    ("pal6_g8", include_str!("../../presets/pal6_g8.yaml")),
    ("pal8_g32", include_str!("../../presets/pal8_g32.yaml")),
    ("mixed48_g8", include_str!("../../presets/mixed48_g8.yaml")),
    (
        "mixed48_g32",
        include_str!("../../presets/mixed48_g32.yaml"),
    ),
];

/// A recipe that has been read and checked.
#[derive(Clone, Debug)]
pub struct Recipe {
    name: String,
    text: String,
    file: RecipeFile,
}

impl Recipe {
    /// The preset of that name.
    pub fn preset(name: &str) -> Option<Recipe> {
        let (name, text) = PRESETS.iter().find(|(n, _)| *n == name)?;
        Recipe::parse(name, text).ok()
    }

    /// Reads a recipe. `name` is what to call it: a file's base name.
    ///
    /// # Errors
    ///
    /// [`QuantError::Yaml`] with line and column for what is no recipe, such as an
    /// unknown key; [`QuantError::Recipe`] with the key for what contradicts itself
    /// or asks for what carat cannot do.
    pub fn parse(name: &str, text: &str) -> Result<Recipe, QuantError> {
        if text.len() > MAX_RECIPE_BYTES {
            return Err(QuantError::recipe(
                name,
                "file",
                format!("{} bytes, expected at most {MAX_RECIPE_BYTES}", text.len()),
            ));
        }
        let file = parse_yaml(text).map_err(|message| QuantError::Yaml {
            name: name.to_owned(),
            message,
        })?;
        let recipe = Recipe {
            name: name.to_owned(),
            text: text.to_owned(),
            file,
        };
        recipe.check()?;
        Ok(recipe)
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is for, in words.
    pub fn description(&self) -> Option<&str> {
        self.file.carat.description.as_deref()
    }

    /// How it is calibrated, if it is.
    pub fn calibration(&self) -> Option<&schema::Calibration> {
        self.file.carat.calibration.as_ref()
    }

    /// Whether matrices that are on their grid already stay on it.
    pub fn keeps_grids(&self) -> bool {
        self.file.carat.keep_grids
    }

    /// Its text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The JSON schema of recipe files.
    pub fn json_schema() -> serde_json::Value {
        let mut schema = schemars::schema_for!(RecipeFile).to_value();
        schema["oneOf"] = serde_json::json!([
            { "required": ["quantization_config"] },
            { "required": ["kmeans_palettization_config"] }
        ]);
        schema
    }

    fn fault(&self, key: impl Into<String>, problem: impl Into<String>) -> QuantError {
        QuantError::recipe(&self.name, key, problem)
    }

    /// What the types do not say.
    fn check(&self) -> Result<(), QuantError> {
        match (
            &self.file.quantization_config,
            &self.file.kmeans_palettization_config,
        ) {
            (Some(config), None) => {
                if config.calibrate_activations {
                    return Err(self.fault(
                        "quantization_config.calibrate_activations",
                        "activations are not calibrated: they get their scales as they come",
                    ));
                }
            }
            (None, Some(_)) => {}
            (found, _) => {
                let found = if found.is_some() { "both" } else { "neither" };
                return Err(self.fault(
                    "file",
                    format!(
                        "expected quantization_config or kmeans_palettization_config, found {found}"
                    ),
                ));
            }
        }
        if let Some(calibration) = &self.file.carat.calibration {
            self.check_calibration(calibration)?;
        }
        // Every rule is compiled, so that a bad one is found without a model.
        self.rules().map(drop)
    }

    fn check_calibration(&self, calibration: &schema::Calibration) -> Result<(), QuantError> {
        let within =
            |key: &str, found: f64, low: f64, high: f64| match (low..=high).contains(&found) {
                true => Ok(()),
                false => Err(self.fault(
                    format!("carat.calibration.{key}"),
                    format!("expected {low} to {high}, found {found}"),
                )),
            };
        let most = MAX_CALIBRATION_TOKENS as f64;
        within("tokens", calibration.tokens as f64, 2.0, most)?;
        within("sequence", calibration.sequence as f64, 2.0, most)?;
        // Without damping, inputs of less than full rank have no factor.
        within("damping", calibration.damping.into(), 1e-6, 1.0)?;
        within("sweeps", calibration.sweeps.into(), 0.0, 32.0)?;
        within("strength", calibration.strength.into(), 0.0, 1.0)
    }
}

/// The one place where YAML is read.
fn parse_yaml(text: &str) -> Result<RecipeFile, String> {
    serde_saphyr::from_str(text).map_err(|e| e.to_string())
}

/// What is wrong with the activations of a quantization, if they are not off.
pub(crate) fn activations_off(
    key: &str,
    spec: &Field<Ordered<Option<QuantizationSpec>>>,
    omitted_is_on: bool,
) -> Result<(), (String, String)> {
    match spec {
        Field::Omitted if omitted_is_on => Err((
            key.into(),
            "is left out, which would turn activations to int8 with scales fixed at conversion; \
             write null to quantize weights only"
                .into(),
        )),
        Field::Given(map) if map.0.iter().any(|(_, spec)| spec.is_some()) => Err((
            key.into(),
            "activations cannot be quantized by a recipe, only weights: expected null".into(),
        )),
        _ => Ok(()),
    }
}

impl<W> Op<W> {
    fn inputs_and_outputs(&self) -> [(&'static str, &Field<Ordered<Option<W>>>); 2] {
        [
            ("op_input_spec", &self.op_input_spec),
            ("op_output_spec", &self.op_output_spec),
        ]
    }
}
