//! The command line.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

/// Turn a checkpoint into an on-device bundle, prove that it still answers like
/// the checkpoint, and run it close to the speed of memory.
#[derive(Debug, Parser)]
#[command(name = "carat", version, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the whole way on the small ternary model that ships with carat
    Demo,
    /// Show what a model is made of, what it needs and how it would run
    Inspect(Inspect),
    /// Turn a checkpoint into a bundle
    Convert(Convert),
    /// Write a bundle's weights for other programs: safetensors or GGUF
    Export(Export),
    /// List, show and check recipes: how tensors are stored
    Recipe(Recipe),
    /// Check a bundle: checksums and declared expectations
    Verify(Verify),
    /// Turn text into token ids
    Tokenize(Tokenize),
    /// Render a conversation with the model's chat template
    Render(Render),
    /// Compute logits for given token ids
    Logits(Logits),
    /// Generate from given token ids
    Generate(Generate),
    /// Log-probability of a continuation after a context
    Score(Score),
    /// Answer one prompt (or each line piped in, with --lines)
    Run(Run),
    /// Talk to a model
    Chat(Chat),
    /// Download a model: a pinned name, org/name or org/name:file.gguf
    Pull(Pull),
    /// Measure prompt and decode speed
    Bench(Box<crate::bench_args::Bench>),
    /// Write down what the fp32 reference answers, step by step
    Fixture(Fixture),
    /// Judge whether a model still answers like its checkpoint
    Gate(Gate),
    /// Judge a recipe before it is stored, in fp32 and in a target's arithmetic
    Simulate(crate::simulate_args::Simulate),
    /// Measure which matrices, layers and modules suffer from fewer bits
    Scan(crate::simulate_args::Scan),
    /// Give each matrix its bits within a size, from a scan; writes a recipe
    Allocate(crate::simulate_args::Allocate),
    /// Ask a task's questions and count the right answers
    Eval(Eval),
    /// Write a page and a card of what a bundle's gates found
    Report(Report),
    /// Make a checkpoint of a known model's sizes with random weights, for speed work
    Synth(Synth),
    /// List or clear converted models
    Cache(Cache),
    /// Print shell completions
    Completions(Completions),
}

/// What runs the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineKind {
    /// The best engine for the model and the request
    Auto,
    /// The fp32 reference, slow and independent of every kernel
    Oracle,
    /// Logits at every step
    Sequential,
    /// Steps in flight, sampling on the device
    Pipelined,
    /// Fixed shapes per context bucket
    Static,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActKind {
    /// Signed 8-bit codes with one scale per 32
    Int8,
    /// bfloat16
    Bf16,
    /// fp32
    F32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvKind {
    /// fp16
    F16,
    /// fp32
    F32,
    /// 8-bit
    Int8,
}

/// How a checkpoint is read.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct SourceOptions {
    /// Read a checkpoint although nobody knows this configuration key: you say
    /// that it does not change the model (repeatable)
    #[arg(long = "ignore-key", value_name = "KEY")]
    pub(crate) ignore_keys: Vec<String>,
}

/// Options of every command that opens a model.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ModelOptions {
    /// Bundle folder, checkpoint folder, .gguf file or pulled name
    pub(crate) model: String,
    /// What runs the model
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) engine: EngineKind,
    /// `cpu`, `cuda[:n]` or `wgpu[:n]`
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,
    /// Precision of activations; the bundle's own if not given
    #[arg(long, value_enum)]
    pub(crate) act: Option<ActKind>,
    /// Format of the KV cache [default: f16, but f32 with `--act f32`]
    #[arg(long, value_enum)]
    pub(crate) kv: Option<KvKind>,
    /// Context in tokens; the model's own if not given
    #[arg(long, value_name = "N")]
    pub(crate) ctx: Option<usize>,
    /// Threads; the number of physical cores if not given
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Pack a checkpoint in memory instead of converting it into the cache
    #[arg(long)]
    pub(crate) no_cache: bool,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// How tokens are chosen. Unset options follow the model's generation config
/// where text is generated, and are greedy otherwise.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct SamplingArgs {
    /// Softmax temperature; 0 is greedy
    #[arg(long)]
    pub(crate) temperature: Option<f32>,
    /// Keep the k most likely
    #[arg(long)]
    pub(crate) top_k: Option<usize>,
    /// Keep the smallest set with this probability mass
    #[arg(long)]
    pub(crate) top_p: Option<f32>,
    /// Keep what is at least this fraction of the most likely
    #[arg(long)]
    pub(crate) min_p: Option<f32>,
    /// Divide the logits of seen tokens by this
    #[arg(long)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Seed of the random numbers
    #[arg(long)]
    pub(crate) seed: Option<u64>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// List every operation with its kernel and device
    #[arg(long)]
    pub(crate) plan: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Convert {
    /// Checkpoint folder, .gguf file or pulled name
    pub(crate) model: String,
    /// Bundle folder to make
    pub(crate) out: PathBuf,
    /// How weights are stored: `keep` each as it is, `dense` with five trits to a
    /// byte, a preset (`carat recipe show` lists them) or a recipe file
    #[arg(long, value_name = "NAME|FILE", default_value = "keep")]
    pub(crate) recipe: String,
    /// What the bundle is for: `native`, this engine, or `portable`, the recipe's own
    /// codes and tables, which so far only the oracle reads
    #[arg(long, default_value = "native")]
    pub(crate) target: String,
    /// Folder of a LoRA adapter (PEFT) to merge into the weights first
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,
    /// Importance matrix (a GGUF file of llama.cpp's) that weighs errors in clip
    /// searches and palettes
    #[arg(long, value_name = "FILE.gguf")]
    pub(crate) imatrix: Option<PathBuf>,
    /// Text that a recipe with a section `calibration` is calibrated on, instead of
    /// the one that it names
    #[arg(long, value_name = "FILE", conflicts_with = "imatrix")]
    pub(crate) calibration: Option<PathBuf>,
    /// Keep the first N layers only, to try something out; not to be published
    #[arg(long, value_name = "N")]
    pub(crate) num_layers: Option<usize>,
    /// Threads; the number of physical cores if not given. The bundle does not
    /// depend on it
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Replace a bundle that is already there
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// Containers of other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Container {
    /// Every tensor dequantized to fp32, under the names of HF checkpoints
    Safetensors,
    /// Every tensor as it is stored, or as --encode says
    Gguf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Export {
    /// Bundle folder
    pub(crate) bundle: PathBuf,
    /// File to write
    pub(crate) out: PathBuf,
    /// What to write
    #[arg(long, value_enum)]
    pub(crate) to: Container,
    /// GGUF file of the same model, whose metadata and tokenizer are copied; without
    /// one they are written from the bundle
    #[arg(long, value_name = "FILE.gguf")]
    pub(crate) like: Option<PathBuf>,
    /// GGUF: store matrices that the bundle has in floats in this format, such as q4_k
    #[arg(long, value_name = "FORMAT")]
    pub(crate) encode: Option<String>,
    /// Replace a file that is already there
    #[arg(long)]
    pub(crate) force: bool,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Recipe {
    #[command(subcommand)]
    pub(crate) action: RecipeAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RecipeAction {
    /// Print a recipe, or what it makes of a model's tensors; without a name, the presets
    Show(RecipeOf),
    /// Check a recipe, for a model if one is given
    Check(RecipeOf),
    /// Print the JSON schema of recipe files
    Schema,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct RecipeOf {
    /// Preset or file
    #[arg(value_name = "NAME|FILE")]
    pub(crate) recipe: Option<String>,
    /// Resolve it for this model
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Verify {
    /// Bundle folder
    pub(crate) bundle: PathBuf,
    /// Checkpoint to compare with: its digest and its declarations
    #[arg(long)]
    pub(crate) against: Option<String>,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Tokenize {
    /// Bundle folder, checkpoint folder, .gguf file or pulled name
    pub(crate) model: String,
    /// Text to encode
    #[arg(
        long,
        value_name = "S",
        conflicts_with = "file",
        required_unless_present = "file"
    )]
    pub(crate) text: Option<String>,
    /// File to encode; - is standard input
    #[arg(long, value_name = "F")]
    pub(crate) file: Option<PathBuf>,
    /// Leave out tokens that the tokenizer adds around text
    #[arg(long)]
    pub(crate) no_special: bool,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Render {
    /// Bundle folder, checkpoint folder, .gguf file or pulled name
    pub(crate) model: String,
    /// JSON list of messages
    #[arg(long, value_name = "F")]
    pub(crate) messages: PathBuf,
    /// JSON list of tools
    #[arg(long, value_name = "F")]
    pub(crate) tools: Option<PathBuf>,
    /// Ask for thinking, or for none; the template's own default if not given
    #[arg(long, value_enum)]
    pub(crate) think: Option<Switch>,
    /// Do not open the assistant's turn
    #[arg(long)]
    pub(crate) no_generation_prompt: bool,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RowsKind {
    All,
    Last,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Logits {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// JSON list of token ids
    #[arg(long, value_name = "FILE.json")]
    pub(crate) ids: PathBuf,
    /// Where the logits go: one F32 tensor "logits" [rows, vocab]
    #[arg(long, value_name = "FILE.safetensors")]
    pub(crate) out: PathBuf,
    /// Tokens per step
    #[arg(long, value_name = "C", conflicts_with = "schedule")]
    pub(crate) chunk: Option<usize>,
    /// Tokens of each step, such as 64,1,16; the last repeats
    #[arg(long)]
    pub(crate) schedule: Option<String>,
    /// Positions whose logits are written
    #[arg(long, value_enum, default_value = "all")]
    pub(crate) rows: RowsKind,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Generate {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// JSON list of prompt token ids
    #[arg(long, value_name = "FILE.json")]
    pub(crate) ids: PathBuf,
    /// New tokens at most
    #[arg(long, value_name = "N")]
    pub(crate) max_new_tokens: usize,
    /// JSON list of ids to feed instead of what is chosen
    #[arg(long, value_name = "FILE")]
    pub(crate) force: Option<PathBuf>,
    /// Go on past end-of-sequence tokens
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// End the answer at this text
    #[arg(long, value_name = "S")]
    pub(crate) stop: Vec<String>,
    /// Tokens per prefill step: 1, 16, 32, 64 (the default), 128, 256 or 512
    #[arg(long, value_name = "C")]
    pub(crate) chunk: Option<usize>,
    /// Draft tokens: off
    #[arg(long, default_value = "off")]
    pub(crate) draft: String,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Score {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// JSON list of context ids
    #[arg(long, value_name = "F")]
    pub(crate) context_ids: PathBuf,
    /// JSON list of continuation ids
    #[arg(long, value_name = "F")]
    pub(crate) continuation_ids: PathBuf,
}

/// Options of the commands that answer in text.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct AnswerOptions {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// System prompt
    #[arg(long)]
    pub(crate) system: Option<String>,
    /// Ask a thinking model to answer at once
    #[arg(long)]
    pub(crate) no_think: bool,
    /// New tokens at most per answer
    #[arg(long, value_name = "N")]
    pub(crate) max_new_tokens: Option<usize>,
    /// End the answer at this text
    #[arg(long, value_name = "S")]
    pub(crate) stop: Vec<String>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) answer: AnswerOptions,
    /// The prompt; read from standard input if not given
    pub(crate) prompt: Option<String>,
    /// Continue the text as it is, without a chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Answer each line of standard input on its own
    #[arg(long, conflicts_with = "prompt")]
    pub(crate) lines: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Chat {
    #[command(flatten)]
    pub(crate) answer: AnswerOptions,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Pull {
    /// A pinned name, org/name or org/name:file.gguf; lists the pinned names if left out
    pub(crate) name: Option<String>,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Synth {
    /// The sizes: a known shape; lists them if left out
    #[arg(requires = "out")]
    pub(crate) shape: Option<String>,
    /// The .gguf file to make
    #[arg(value_name = "FILE.gguf", group = "out")]
    pub(crate) file: Option<PathBuf>,
    /// The same as an option
    #[arg(short = 'o', long = "out", value_name = "FILE.gguf", group = "out")]
    pub(crate) out_file: Option<PathBuf>,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Fewer layers than the shape has
    #[arg(long, value_name = "N")]
    pub(crate) layers: Option<usize>,
    /// Threads; the number of physical cores if not given. The file is the same
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Replace a file that is already there
    #[arg(long)]
    pub(crate) force: bool,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Fixture {
    #[command(subcommand)]
    pub(crate) action: FixtureAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum FixtureAction {
    /// Answer the standard prompts, or those of a file
    Make(FixtureMake),
    /// Try prompts raw, with a beginning of sequence and as a chat, and keep the one
    /// with the largest smallest margin
    Sweep(FixtureMake),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct FixtureMake {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// The fixture to write
    #[arg(long, value_name = "F")]
    pub(crate) out: PathBuf,
    /// Lines of JSON with `prompt_ids`, `messages` or `prompt`; the standard prompts if
    /// not given
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) prompts: Option<PathBuf>,
    /// Name of the set, and of its transcripts
    #[arg(long, default_value = "standard")]
    pub(crate) name: String,
    /// Tokens of an answer at most, for prompts of a file
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_new_tokens: usize,
    /// Refuse prompts with a step below the floor instead of declaring it a knife-edge
    #[arg(long)]
    pub(crate) strict: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Gate {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// What a bundle has to answer like: the checkpoint it was made from
    #[arg(long = "source", value_name = "MODEL")]
    pub(crate) reference_model: Option<String>,
    /// Folder of the LoRA adapter that was merged into the bundle
    #[arg(long, value_name = "DIR", requires = "reference_model")]
    pub(crate) adapter: Option<PathBuf>,
    /// Answers made by `carat fixture`; the standard set is made if not given
    #[arg(long, value_name = "F")]
    pub(crate) fixture: Option<PathBuf>,
    /// Judge against another program's logits: `input_ids`, `rows` and `logits`
    #[arg(long, value_name = "FILE.safetensors", conflicts_with_all = ["reference_model", "fixture"])]
    pub(crate) reference: Option<PathBuf>,
    /// Run the cheap half of a transcript again, without the reference
    #[arg(long, value_name = "F", conflicts_with_all = ["reference_model", "fixture", "reference"])]
    pub(crate) transcript: Option<PathBuf>,
    /// Text for divergence and perplexity; a passage that ships with carat if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Where the transcript goes beside the bundle's gates/
    #[arg(long, value_name = "F")]
    pub(crate) out: Option<PathBuf>,
}

/// A kind of questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TaskKind {
    /// GSM8K: word problems, answered step by step
    Gsm8k,
    /// The problems that the tiny models were made for
    Arithmetic,
    /// The likeliest of given continuations
    Choice,
    /// The last word of a passage
    LastWord,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Eval {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// The kind of questions
    #[arg(long, value_enum)]
    pub(crate) task: TaskKind,
    /// The questions, one JSON object a line, packed with gzip or not, or a table in
    /// Arrow's stream format; several files are asked one after the other
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,
    /// Questions at most
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
    /// Results, one line a question; a file of the same run is gone on with
    #[arg(long, value_name = "F.jsonl")]
    pub(crate) out: PathBuf,
    /// Results of another bundle to compare with, question by question
    #[arg(long, value_name = "F.jsonl")]
    pub(crate) compare: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Report {
    /// Bundle folder
    pub(crate) bundle: PathBuf,
    /// The page; gates/report.html of the bundle if not given
    #[arg(long, value_name = "F.html")]
    pub(crate) out: Option<PathBuf>,
    /// The card; gates/card.md of the bundle if not given
    #[arg(long, value_name = "F.md")]
    pub(crate) card: Option<PathBuf>,
    /// A record of `carat bench --json` of this bundle (repeatable)
    #[arg(long, value_name = "F.json")]
    pub(crate) bench: Vec<PathBuf>,
    /// Print one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Cache {
    #[command(subcommand)]
    pub(crate) action: CacheAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CacheAction {
    /// List converted models
    List {
        /// Print one JSON object on standard output
        #[arg(long)]
        json: bool,
    },
    /// Remove all converted models
    Clear,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}
