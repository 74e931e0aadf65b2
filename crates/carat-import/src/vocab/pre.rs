//! Pre-tokenizers of byte-level vocabularies by the name that GGUF files give.
//!
//! A file carries only the name; what it stands for is a convention shared by the
//! converters. Where the published `tokenizer.json` of the models behind a name is
//! known, its parts are used (so that ids agree with it); otherwise the regular
//! expressions that the GGUF ecosystem uses.

use serde_json::{Value, json};

/// How text is split before merging.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Every match of the pattern is a piece, and so is what lies between.
    Split(&'static str),
    /// Numeric characters apart from others; each alone if true.
    Digits(bool),
    /// Runs of punctuation apart from others.
    Punctuation,
    /// To the byte-level alphabet, splitting by the classic pattern if true.
    Bytes(bool),
}

/// What a name stands for.
#[derive(Debug)]
pub(super) struct Pre {
    names: &'static [&'static str],
    steps: &'static [Step],
    /// A piece that is a token is taken whole.
    pub(super) ignore_merges: bool,
    /// Text is brought to NFC first.
    nfc: bool,
    /// Whether text begins with a beginning-of-sequence token where the file does
    /// not say.
    pub(super) add_bos: bool,
}

const fn pre(names: &'static [&'static str], steps: &'static [Step]) -> Pre {
    Pre {
        names,
        steps,
        ignore_merges: false,
        nfc: false,
        add_bos: false,
    }
}

const fn nfc(mut p: Pre) -> Pre {
    p.nfc = true;
    p
}

const fn whole(mut p: Pre) -> Pre {
    p.ignore_merges = true;
    p
}

const fn with_bos(mut p: Pre) -> Pre {
    p.add_bos = true;
    p
}

const CLASSIC: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const UP_TO_THREE_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const ONE_DIGIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const ONE_DIGIT_WITH_MARKS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const CASED_ONE_DIGIT: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const CASED_THREE_DIGITS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const NOT_PUNCTUATION: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// Letters of bicameral scripts.
const CASED_LETTERS: &str = r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+";
const CJK_PUNCTUATION: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const KANJI_KANA: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const PUNCTUATED_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

use Step::{Bytes, Digits, Punctuation, Split};

static TABLE: &[Pre] = &[
    // What files without a name (or converted before there were names) mean.
    pre(
        &["default"],
        &[
            Split(r"[\p{P}\$\+<=>\^~\|]+"),
            Split(CLASSIC),
            Split(r"\p{N}+"),
            Split("[0-9][0-9][0-9]"),
            Bytes(false),
        ],
    ),
    pre(
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "jais",
            "roberta-bpe",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        &[Bytes(true)],
    ),
    nfc(pre(&["olmo"], &[Bytes(true)])),
    with_bos(whole(pre(
        &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        &[Split(UP_TO_THREE_DIGITS), Bytes(false)],
    ))),
    pre(
        &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        &[Split(UP_TO_THREE_DIGITS), Bytes(false)],
    ),
    nfc(pre(
        &["qwen2", "deepseek-r1-qwen", "kormo", "megrez"],
        &[Split(ONE_DIGIT), Bytes(false)],
    )),
    nfc(pre(
        &["qwen35"],
        &[Split(ONE_DIGIT_WITH_MARKS), Bytes(false)],
    )),
    pre(
        &["stablelm2", "hunyuan", "solar-open", "grok-2"],
        &[Split(ONE_DIGIT), Bytes(false)],
    ),
    pre(
        &[
            "starcoder",
            "refact",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
        ],
        &[Digits(true), Bytes(true)],
    ),
    nfc(pre(&["command-r"], &[Digits(true), Bytes(true)])),
    pre(
        &["falcon"],
        &[
            Punctuation,
            Bytes(true),
            Digits(false),
            Split("[0-9][0-9][0-9]"),
        ],
    ),
    pre(
        &["deepseek-llm"],
        &[
            Split(r"[\r\n]"),
            Split(CASED_LETTERS),
            Split(CJK_PUNCTUATION),
            Split(r"\s+$"),
            Split(CJK),
            Split(r"\p{N}+"),
            Bytes(false),
        ],
    ),
    pre(
        &["deepseek-coder"],
        &[
            Split(r"[\r\n]"),
            Split(r"\s?\p{L}+"),
            Split(r"\s?\p{P}+"),
            Split(CJK),
            Split(r"\p{N}"),
            Bytes(false),
        ],
    ),
    pre(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        &[
            Split(r"\p{N}{1,3}"),
            Split(KANJI_KANA),
            Split(PUNCTUATED_WORDS),
            Bytes(false),
        ],
    ),
    with_bos(whole(pre(
        &["tekken"],
        &[Split(CASED_ONE_DIGIT), Bytes(false)],
    ))),
    pre(
        &["gpt-4o", "llama4", "kanana2"],
        &[Split(CASED_THREE_DIGITS), Bytes(false)],
    ),
    whole(pre(&["minicpm5"], &[Split(r"\p{N}{1,3}"), Bytes(true)])),
    pre(
        &["poro-chat", "bloom", "gpt3-finnish"],
        &[Split(NOT_PUNCTUATION), Bytes(false)],
    ),
    pre(
        &["viking"],
        &[Split(NOT_PUNCTUATION), Split(r"\p{N}"), Bytes(false)],
    ),
];

impl Pre {
    /// The pre-tokenizer of a name; a file without one means `default`.
    pub(super) fn named(name: Option<&str>) -> Option<&'static Pre> {
        let name = name.filter(|n| !n.is_empty()).unwrap_or("default");
        TABLE.iter().find(|p| p.names.contains(&name))
    }

    /// All of them.
    pub(super) fn all() -> impl Iterator<Item = &'static Pre> {
        TABLE.iter()
    }

    /// The name that files of this pre-tokenizer commonly have.
    pub(super) fn name(&self) -> &'static str {
        self.names[0]
    }

    /// All names, in alphabetical order.
    pub(super) fn names() -> Vec<&'static str> {
        let mut names: Vec<_> = TABLE.iter().flat_map(|p| p.names).copied().collect();
        names.sort_unstable();
        names
    }

    /// The `normalizer` field.
    pub(super) fn normalizer(&self) -> Value {
        if self.nfc {
            json!({"type": "NFC"})
        } else {
            Value::Null
        }
    }

    /// The `pre_tokenizer` field.
    pub(super) fn pre_tokenizer(&self, add_prefix_space: bool) -> Value {
        let steps: Vec<Value> = self
            .steps
            .iter()
            .map(|step| match step {
                Split(pattern) => json!({
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": false,
                }),
                Digits(individual) => json!({"type": "Digits", "individual_digits": individual}),
                Punctuation => json!({"type": "Punctuation", "behavior": "Contiguous"}),
                Bytes(split) => json!({
                    "type": "ByteLevel",
                    "add_prefix_space": add_prefix_space,
                    "trim_offsets": true,
                    "use_regex": split,
                }),
            })
            .collect();
        match <[Value; 1]>::try_from(steps) {
            Ok([only]) => only,
            Err(steps) => json!({"type": "Sequence", "pretokenizers": steps}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_end_in_bytes() {
        let names = Pre::names();
        assert!(names.windows(2).all(|w| w[0] != w[1]), "{names:?}");
        for p in TABLE {
            let bytes = p.steps.iter().filter(|s| matches!(s, Bytes(_))).count();
            assert_eq!(bytes, 1, "{:?}", p.names);
        }
    }

    #[test]
    fn a_missing_name_is_the_default() {
        let default = Pre::named(Some("default")).unwrap();
        assert_eq!(Pre::named(None).unwrap().names, default.names);
        assert_eq!(Pre::named(Some("")).unwrap().names, default.names);
        assert!(Pre::named(Some("no-such-name")).is_none());
    }
}
