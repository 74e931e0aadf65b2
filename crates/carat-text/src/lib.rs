//! Text in, ids through, text out.
//!
//! A checkpoint's text side is data from outside: a `tokenizer.json` with
//! regular expressions of its own, a Jinja program that lays out chats, and up
//! to four places that say where an answer ends. This crate turns them into
//!
//! * a [`Tokenizer`], which encodes and decodes exactly as the published one;
//! * a [`ChatTemplate`], which renders as the Hugging Face renderer does;
//! * a [`StopSet`], the union of everything that may end an answer, each with
//!   its reason, and [`check_stops`], which says when a declared end cannot occur;
//! * a [`StreamDecoder`], which never splits a character and whose chunks always
//!   add up to the full decode;
//! * [`parse_reply`], which takes thinking and tool calls out of an answer.
//!
//! It knows no model, no backend and no network, and no family by name.
//! Everything it is given is treated as hostile: sizes are capped, templates run
//! on fuel, and a malformed input is an error that names the culprit.
//!
//! ```
//! use carat_text::parse_reply;
//!
//! let reply = parse_reply("<think>\nEasy.\n</think>\n\nParis.");
//! assert_eq!(reply.thinking.as_deref(), Some("Easy."));
//! assert_eq!(reply.content, "Paris.");
//! ```

mod declared;
mod error;
mod guard;
mod outline;
mod reply;
mod stops;
mod stream;
mod template;
mod tokenizer;

#[doc(hidden)]
pub mod fuzzing;

pub use declared::{THINKING_MIN_CAP, generation_cap, is_instruct, is_thinking_model};
pub use error::TextError;
pub use reply::{Reply, ReplyOptions, ToolCall, is_reply_mark, parse_reply, parse_reply_with};
pub use stops::{StopFinding, StopReason, StopSet, check_stops};
pub use stream::StreamDecoder;
pub use template::{ChatTemplate, Message, RenderInput};
pub use tokenizer::{AddSpecial, Tokenizer};
