//! The kinds of arms.

mod command;
mod engine;
mod ggml;
mod http;
mod process;

pub use command::{CommandArm, Field, Parser, Unit};
pub use engine::EngineArm;
pub use ggml::{LlamaBenchArm, LlamaServerArm};
pub use http::{OpenaiArm, Server, ServerProcess};
pub use process::CaratProcessArm;
