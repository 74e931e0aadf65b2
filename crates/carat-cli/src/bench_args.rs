//! The command line of `carat bench`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};

use crate::args::ModelOptions;

#[derive(Debug, ClapArgs)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub(crate) action: Option<BenchAction>,
    #[command(flatten)]
    pub(crate) single: Option<Single>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchAction {
    /// Compare arms that take turns: A, B, A, B, …
    Ab(Ab),
    /// Run each arm for minutes, on a rested machine
    Sustain(Sustain),
    /// Measure steps of several rows against steps of one
    VerifyCost(VerifyCost),
    /// Hold a new record against an old one; exit 1 for a regression
    Compare(Compare),
    /// Measure along axes; goes on where it was stopped
    Sweep(Sweep),
    /// Make an HTML page and a Markdown table of records
    Report(Report),
}

/// What a trial does.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ProtocolArgs {
    /// Prompt tokens
    #[arg(short = 'p', long = "prompt-tokens", default_value_t = 512)]
    pub(crate) prompt_tokens: usize,
    /// New tokens
    #[arg(short = 'n', long = "new-tokens", default_value_t = 128)]
    pub(crate) new_tokens: usize,
    /// Trials after the warm-ups
    #[arg(short = 'r', long = "repetitions", default_value_t = 5)]
    pub(crate) repetitions: usize,
    /// Tokens in the cache before the prompt, not timed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) depth: usize,
    /// Trials before the first that counts
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) warmups: usize,
    /// Seed of the synthetic prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Prompt with these ids (a JSON list, such as `tokenize` makes) instead
    #[arg(long, value_name = "FILE.json", conflicts_with = "seed")]
    pub(crate) ids: Option<PathBuf>,
    /// Prompt with this text, in ids of the model's (the first model's) tokenizer
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seed", "ids"])]
    pub(crate) text: Option<PathBuf>,
    /// Milliseconds before each trial
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(crate) pause_ms: u64,
}

/// What is accepted although it makes figures doubtful.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Allow {
    /// Other processes compute meanwhile
    Busy,
    /// Clocks change, or the processor is throttled
    Clock,
    /// Arms whose fidelity is unknown
    Ungated,
    /// Records of different machines
    Machine,
}

/// What becomes of a record.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct RecordArgs {
    /// Add the record to this file
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) record: Option<PathBuf>,
    /// Commit that carat was built from, for the record
    #[arg(long, value_name = "HASH")]
    pub(crate) commit: Option<String>,
}

// The model counts as one of its arguments although it stands in a group below.
#[derive(Debug, ClapArgs)]
#[group(args = ["model"])]
pub(crate) struct Single {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    pub(crate) protocol: ProtocolArgs,
    /// Tokens per prefill step: 1, 16, 32, 64 (the default), 128, 256 or 512
    #[arg(long, value_name = "C")]
    pub(crate) chunk: Option<usize>,
    /// Show which kernel on which device ran each op, with its share of time
    #[arg(long)]
    pub(crate) profile: bool,
    /// Write the ops of a trial as a Chrome trace
    #[arg(long, value_name = "FILE.json")]
    pub(crate) trace: Option<PathBuf>,
    /// Also open the model with its file out of memory, and again
    #[arg(long)]
    pub(crate) load: bool,
    /// Leave the bounds of the machine unmeasured
    #[arg(long)]
    pub(crate) no_bounds: bool,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
}

/// Arms and how they are measured.
#[derive(Debug, ClapArgs)]
pub(crate) struct Arms {
    /// MODEL, [NAME=]KIND:TARGET[,key=value…] with KIND carat, carat-process,
    /// llama-bench, llama-server or openai, or a .toml file that describes an arm
    #[arg(required = true, value_name = "ARM")]
    pub(crate) arms: Vec<String>,
    #[command(flatten)]
    pub(crate) protocol: ProtocolArgs,
    /// Accept what makes figures doubtful; the record names it
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    pub(crate) allow: Vec<Allow>,
    /// Threads of arms that name none; the number of physical cores if not given
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Ids that a prompt may have, where no arm tells
    #[arg(long, value_name = "N")]
    pub(crate) vocab: Option<usize>,
    /// Seconds that a trial of another program may take
    #[arg(long, value_name = "S", default_value_t = 600)]
    pub(crate) timeout: u64,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Ab {
    #[command(flatten)]
    pub(crate) arms: Arms,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Sustain {
    #[command(flatten)]
    pub(crate) arms: Arms,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
    /// Minutes of trials for each arm
    #[arg(long, value_name = "M", default_value_t = 10.0)]
    pub(crate) minutes: f64,
    /// Idle minutes before each arm, at least
    #[arg(long, value_name = "M", default_value_t = 3.0)]
    pub(crate) idle: f64,
    /// And at most, if the machine does not cool down
    #[arg(long, value_name = "M", default_value_t = 10.0)]
    pub(crate) cap: f64,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct VerifyCost {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// Rows of the steps
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N",
        default_value = "1,2,3,4,5,6,7,8,9,12,16"
    )]
    pub(crate) widths: Vec<usize>,
    /// Tokens in the cache
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) depth: usize,
    /// Rounds after one warm-up
    #[arg(short = 'r', long = "repetitions", default_value_t = 21)]
    pub(crate) repetitions: usize,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Compare {
    /// Old records
    #[arg(value_name = "OLD.jsonl")]
    pub(crate) old: PathBuf,
    /// New records
    #[arg(value_name = "NEW.jsonl")]
    pub(crate) new: PathBuf,
    /// Accept what makes figures doubtful
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    pub(crate) allow: Vec<Allow>,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Sweep {
    #[command(flatten)]
    pub(crate) arms: Arms,
    /// An axis with values of its own (context=0,1024) or usual ones (threads);
    /// context, prompt, chunk, threads, batch, verify-width, model; all if left out
    #[arg(long, value_name = "AXIS[=N,…]")]
    pub(crate) axis: Vec<String>,
    /// Records, one a line; a sweep goes on from those that are there
    #[arg(short = 'o', long, value_name = "FILE.jsonl")]
    pub(crate) out: PathBuf,
    /// Commit that carat was built from, for the records
    #[arg(long, value_name = "HASH")]
    pub(crate) commit: Option<String>,
    #[command(flatten)]
    pub(crate) pages: Pages,
}

/// Where reports go.
#[derive(Debug, ClapArgs)]
pub(crate) struct Pages {
    /// One HTML page with plots, whole in itself
    #[arg(long, value_name = "FILE.html")]
    pub(crate) html: Option<PathBuf>,
    /// Tables in Markdown
    #[arg(long, value_name = "FILE.md")]
    pub(crate) markdown: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Report {
    /// Records
    #[arg(required = true, value_name = "FILE.jsonl")]
    pub(crate) records: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) pages: Pages,
}
