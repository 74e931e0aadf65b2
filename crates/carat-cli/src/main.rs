//! The `carat` command: turns a checkpoint into an on-device bundle, proves that
//! the bundle still answers like the checkpoint, and runs it.
//!
//! `args` describes the command line; `model` opens whatever MODEL names;
//! `commands` holds one file per command. Every error ends as `error:`,
//! `caused by:` and `hint:` lines with an exit code: 0 ok, 1 a gate failed,
//! 2 usage or input, 3 internal, 4 refused.

mod args;
mod bench_args;
mod commands;
mod crossovers;
mod failure;
mod interrupt;
mod memory;
mod model;
mod output;
mod progress;
mod simulate_args;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let args = args::Args::parse();
    match failure::guard(|| commands::dispatch(args.command)) {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}
