//! Recipes and quantizers: how each tensor of a model is stored.
pub mod kmeans;
pub mod linear;
pub mod matrix;
