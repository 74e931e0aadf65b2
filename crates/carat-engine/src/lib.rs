//! Sequences, sampling and the decode loop.
//!
//! An [`Engine`] drives a [`Backend`](carat_model::Backend) step by step: it
//! opens [`Sequence`]s, prefills prompts in chunks, decodes, scores given
//! continuations and hands out logits. It works on token ids only; text is the
//! business of `carat-text`.
//!
//! The chunk size changes speed, never results: on the CPU backend a row's
//! logits are the same bits however the prompt was cut.

mod engine;
mod error;
mod generate;
mod margin;
mod sampler;
mod score;

pub use engine::{Engine, EngineOptions, LogitRows, Schedule, Sequence};
pub use error::EngineError;
pub use generate::{Emitted, GenerateOptions, Generation, StopReason, Timings};
pub use margin::Ranking;
pub use sampler::{Sampler, SamplingOptions};
pub use score::Score;
