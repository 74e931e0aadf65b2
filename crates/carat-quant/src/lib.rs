//! Recipes and quantizers: how each tensor of a model is stored.
//!
//! A [`Recipe`] is a file; [`Recipe::resolve`] says what it makes of each tensor of a
//! model without looking at a weight; [`matrix::quantize`] does it to one matrix.
//! [`linear`] has the formulas of scales and codes, [`kmeans`] those of palettes.
//! The result is a [`GridMatrix`](carat_tensor::GridMatrix), the quantized matrix
//! in the recipe's own terms.
//!
//! ```
//! use carat_quant::Recipe;
//!
//! let recipe = Recipe::preset("4bit").unwrap();
//! assert!(recipe.description().unwrap().contains("Lossy"));
//! let error = Recipe::parse("mine", "quantization_config:\n  global_confg: null\n");
//! assert!(error.unwrap_err().to_string().contains("global_confg"));
//! ```

pub mod allocate;
mod apply;
pub mod calibrate;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod kept;
pub mod kmeans;
pub mod linear;
pub mod matrix;
pub mod recipe;
pub mod report;
mod simulated;
mod source;

pub use apply::{Importance, Kept, Quantizer, Target, block_format, native_form, to_blocks};
pub use calibrate::Calibrated;
pub use error::QuantError;
pub use kept::on_grid;
pub use recipe::{Plan, Recipe, Treatment};
pub use simulated::Simulated;
pub use source::{Truncated, Untied};
