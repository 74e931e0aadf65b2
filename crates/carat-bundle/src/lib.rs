//! The description of a model and its form on disk.
//!
//! [`spec`] describes a model as data; [`source`] is how anything that needs
//! weights (oracle, converter, engine) asks for them; [`text`] carries what a
//! tokenizer and a chat template need.
//!
//! A *bundle* is a folder that an engine can run without looking at anything
//! else. [`convert()`] makes one from a source, [`Bundle::open`] maps one into
//! memory, [`verify()`] proves that it is intact and that it differs from its
//! source only where it says so, and [`Cache`] keeps the ones that were made on
//! the way. `docs/bundle.md` specifies the files.
//!
//! ```
//! use carat_bundle::{VerifyOptions, verify};
//!
//! let report = verify("no/such/bundle".as_ref(), &VerifyOptions::default());
//! assert!(!report.passed());
//! assert!(report.to_string().starts_with("FAIL    manifest"));
//! ```

pub mod cache;
mod check;
pub mod convert;
pub mod declare;
pub mod digest;
pub mod file;
#[doc(hidden)]
pub mod fuzzing;
pub mod layout;
pub mod manifest;
pub mod mmap;
pub mod source;
pub mod spec;
pub mod ternary;
pub mod text;
pub mod verify;
pub mod writer;

mod bundle;
mod error;
mod facts;
mod restate;
mod stage;
mod stored;

pub use bundle::{Bundle, BundleTensor};
pub use cache::Cache;
pub use convert::{ConvertOptions, ConvertReport, convert};
pub use error::BundleError;
pub use manifest::Manifest;
pub use verify::{VerifyOptions, VerifyReport, verify};
pub use writer::{BundleWriter, TensorToStore};
