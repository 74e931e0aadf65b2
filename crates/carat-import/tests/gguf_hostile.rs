//! GGUF files that lie. Each one must be refused with a message that names what
//! is wrong; none may panic or take memory for what it only claims to hold.

mod common;

use std::sync::Arc;

use carat_import::gguf::{Array, Gguf, Value, Writer};
use carat_tensor::{DType, Shape};
use common::{SMALL, message, open_gguf, strings};

/// Bytes of a file, written field by field.
#[derive(Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(version: u32, tensors: u64, entries: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(version).u64(tensors).u64(entries)
    }
    fn u8(mut self, v: u8) -> Raw {
        self.0.push(v);
        self
    }
    fn u32(mut self, v: u32) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn u64(mut self, v: u64) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn bytes(mut self, v: &[u8]) -> Raw {
        self.0.extend(v);
        self
    }
    fn string(self, v: &[u8]) -> Raw {
        self.u64(v.len() as u64).bytes(v)
    }
    /// An F32 tensor of one dimension.
    fn tensor(self, name: &str, n: u64, offset: u64) -> Raw {
        self.string(name.as_bytes())
            .u32(1)
            .u64(n)
            .u32(0)
            .u64(offset)
    }
    fn pad(mut self, alignment: usize) -> Raw {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
        self
    }
    fn error(self) -> String {
        parse_error(self.0)
    }
}

fn parse_error(bytes: Vec<u8>) -> String {
    Gguf::parse(Arc::new(bytes)).unwrap_err().to_string()
}

const TWO_TO_63: u64 = 1 << 63;

#[test]
fn truncated_at_every_length() {
    let whole = SMALL.gguf(DType::F32);
    assert!(Gguf::parse(Arc::new(whole.clone())).is_ok());
    for n in 0..whole.len() {
        let text = parse_error(whole[..n].to_vec());
        assert!(
            text.starts_with("truncated: ")
                || text.contains(" cannot fit in the ")
                || text.contains("reach past the end of the file"),
            "{n} of {} bytes: {text}",
            whole.len()
        );
    }
    let text = message(open_gguf(&whole[..whole.len() - 1]));
    assert_eq!(
        text,
        "tensor \"output.weight\": 160 bytes at offset 1792 reach past the end of the file, which \
         has 1951 bytes of tensor data"
    );
    assert_eq!(message(open_gguf(&[])), parse_error(vec![]));
}

#[test]
fn other_files() {
    assert_eq!(
        parse_error(b"PK\x03\x04....".to_vec()),
        "not a GGUF file: expected it to begin with \"GGUF\", found [80, 75, 3, 4]"
    );
    assert_eq!(
        Raw::new(1, 0, 0).error(),
        "GGUF version 1 is not supported, expected 2 or 3"
    );
    assert_eq!(
        Raw::new(4, 0, 0).error(),
        "GGUF version 4 is not supported, expected 2 or 3"
    );
    assert_eq!(
        Raw::new(3u32.swap_bytes(), 0, 0).error(),
        "big-endian GGUF (version 3) is not supported, expected a little-endian file"
    );
}

#[test]
fn version_2_is_read() {
    let mut bytes = SMALL.gguf(DType::F32);
    bytes[4] = 2;
    assert_eq!(Gguf::parse(Arc::new(bytes.clone())).unwrap().version(), 2);
    assert!(open_gguf(&bytes).is_ok());
}

#[test]
fn oversized_counts() {
    assert_eq!(
        Raw::new(3, u64::MAX, 0).error(),
        "18446744073709551615 tensors cannot fit in the 0 bytes that are left of the file"
    );
    assert_eq!(
        Raw::new(3, 0, 1 << 40).bytes(&[0; 64]).error(),
        "1099511627776 metadata entries cannot fit in the 64 bytes that are left of the file"
    );
    let key = |ty: u32| Raw::new(3, 0, 1).string(b"k").u32(9).u32(ty);
    // Elements of one byte, of fixed width, of at least eight, of at least twelve.
    assert_eq!(
        key(7).u64(TWO_TO_63).error(),
        "9223372036854775808 elements of \"k\" cannot fit in the 0 bytes that are left of the file"
    );
    assert_eq!(
        key(10).u64(TWO_TO_63).error(),
        "truncated: array \"k\" at byte 49 needs 18446744073709551615 bytes, found 0 to the end of \
         the file"
    );
    assert_eq!(
        key(8).u64(3).u64(0).u64(0).error(),
        "3 elements of \"k\" cannot fit in the 16 bytes that are left of the file"
    );
    assert_eq!(
        key(9).u64(3).bytes(&[0; 35]).error(),
        "3 elements of \"k\" cannot fit in the 35 bytes that are left of the file"
    );
}

#[test]
fn oversized_strings() {
    assert_eq!(
        Raw::new(3, 0, 1).u64(TWO_TO_63).u64(0).error(),
        "truncated: key of metadata entry 0 at byte 32 needs 9223372036854775808 bytes, found 8 to \
         the end of the file"
    );
    assert_eq!(
        Raw::new(3, 0, 1).string(b"k").u32(8).u64(TWO_TO_63).error(),
        "truncated: value of \"k\" at byte 45 needs 9223372036854775808 bytes, found 0 to the end \
         of the file"
    );
}

#[test]
fn nested_arrays() {
    let nested = |depth: usize| {
        let mut raw = Raw::new(3, 0, 1).string(b"k").u32(9);
        for _ in 1..depth {
            raw = raw.u32(9).u64(1);
        }
        raw.u32(0).u64(1).u8(7).0
    };
    assert!(Gguf::parse(Arc::new(nested(4))).is_ok());
    assert_eq!(
        parse_error(nested(5)),
        "metadata \"k\": arrays are nested more than 4 deep"
    );
}

#[test]
fn bad_values() {
    let key = || Raw::new(3, 0, 1).string(b"k");
    assert_eq!(
        key().u32(13).u64(0).error(),
        "metadata \"k\": unknown value type 13, expected 0 to 12"
    );
    assert_eq!(
        key().u32(9).u32(77).u64(1).u8(0).error(),
        "metadata \"k\": unknown value type 77, expected 0 to 12"
    );
    assert_eq!(
        key().u32(7).u8(2).error(),
        "value of \"k\": expected a boolean 0 or 1, found 2"
    );
    let twice = || Raw(Vec::new()).string(b"k").u32(0).u8(1).0;
    assert_eq!(
        Raw::new(3, 0, 2).bytes(&twice()).bytes(&twice()).error(),
        "metadata key \"k\" appears twice"
    );
}

#[test]
fn text_that_is_not_utf8() {
    assert_eq!(
        Raw::new(3, 0, 1).string(b"\xff").u32(0).u8(0).error(),
        "key of metadata entry 0 is not valid UTF-8"
    );
    assert_eq!(
        Raw::new(3, 0, 1)
            .string(b"k")
            .u32(8)
            .string(b"\xc3")
            .error(),
        "value of \"k\" is not valid UTF-8"
    );
    assert_eq!(
        Raw::new(3, 0, 1)
            .string(b"k")
            .u32(9)
            .u32(8)
            .u64(2)
            .string(b"ok")
            .string(b"\xed\xa0\x80")
            .error(),
        "element 1 of \"k\" is not valid UTF-8"
    );
    assert_eq!(
        Raw::new(3, 1, 0).tensor("x", 1, 0).0.len(),
        24 + 33,
        "the position of the name below"
    );
    let mut bytes = Raw::new(3, 1, 0).tensor("x", 1, 0).0;
    bytes[32] = 0xff;
    assert_eq!(parse_error(bytes), "name of tensor 0 is not valid UTF-8");
}

#[test]
fn alignments() {
    let with = |value: Value| {
        let mut w = Writer::new();
        w.set("general.alignment", value);
        // The writer refuses the same values, so write them as another key.
        let mut file = Vec::new();
        let good = w.write(&mut file, |_| unreachable!("no tensors"));
        let mut raw = Raw::new(3, 0, 1).string(b"general.alignment");
        raw = match w_value(&w) {
            Value::U32(v) => raw.u32(4).u32(v),
            Value::U64(v) => raw.u32(10).u64(v),
            other => unreachable!("{other:?}"),
        };
        (good.is_ok(), Gguf::parse(Arc::new(raw.pad(4096).0)))
    };
    for (value, found) in [
        (Value::U32(0), "U32(0)"),
        (Value::U32(3), "U32(3)"),
        (Value::U32(4), "U32(4)"),
        (Value::U32(1 << 21), "U32(2097152)"),
        (Value::U64(1 << 40), "U64(1099511627776)"),
    ] {
        let (written, read) = with(value);
        assert!(!written);
        assert_eq!(
            read.unwrap_err().to_string(),
            format!(
                "general.alignment: expected a uint32 power of two from 8 to 1048576, found {found}"
            )
        );
    }
    let (written, read) = with(Value::U32(64));
    assert!(written);
    assert_eq!(read.unwrap().alignment(), 64);
}

/// The alignment that a writer was given.
fn w_value(w: &Writer) -> Value {
    w.metadata()[0].1.clone()
}

#[test]
fn alignment_moves_the_data() {
    let mut w = SMALL.metadata();
    w.set("general.alignment", 256u32);
    let bytes = SMALL.gguf_with(w, DType::F32);
    let gguf = Gguf::parse(Arc::new(bytes.clone())).unwrap();
    assert!(gguf.tensors().iter().all(|t| t.offset % 256 == 0));
    assert!(open_gguf(&bytes).is_ok());
}

#[test]
fn bad_tensor_tables() {
    let one = |n_dims: u32, dims: &[u64], ty: u32| {
        let mut raw = Raw::new(3, 1, 0).string(b"x").u32(n_dims);
        for d in dims {
            raw = raw.u64(*d);
        }
        raw.u32(ty).u64(0).pad(32).bytes(&[0; 4096]).error()
    };
    assert_eq!(
        one(0, &[], 0),
        "tensor \"x\": expected 1 to 4 dimensions, found 0"
    );
    assert_eq!(
        one(5, &[1; 5], 0),
        "tensor \"x\": expected 1 to 4 dimensions, found 5"
    );
    assert_eq!(one(1, &[0], 0), "tensor \"x\": dimension 0 is out of range");
    assert_eq!(
        one(2, &[1 << 32, 1 << 32], 0),
        "tensor \"x\": shape [4294967296, 4294967296] has too many elements"
    );
    assert_eq!(
        one(2, &[33, 2], 8),
        "tensor \"x\": a row of 33 elements is not a whole number of Q8_0 blocks of 32"
    );
    for ty in [4, 9, 15, 24, 31, 36, 40, u32::MAX] {
        let text = one(1, &[256], ty);
        assert!(
            text.starts_with(&format!(
                "tensor \"x\": ggml type {ty} is unknown, expected one of 0 (F32), 1 (F16), "
            )),
            "{text}"
        );
    }
}

#[test]
fn tensors_outside_the_file_or_on_top_of_each_other() {
    let two = |first: u64, second: u64| {
        Raw::new(3, 2, 0)
            .tensor("a", 16, first)
            .tensor("b", 8, second)
            .pad(32)
            .bytes(&[0; 128])
    };
    assert!(Gguf::parse(Arc::new(two(0, 64).0)).is_ok());
    // In any order in the file.
    assert!(Gguf::parse(Arc::new(two(32, 0).0)).is_ok());
    assert_eq!(two(0, 32).error(), "tensors \"a\" and \"b\" overlap");
    assert_eq!(two(0, 0).error(), "tensors \"b\" and \"a\" overlap");
    assert_eq!(
        two(0, 65).error(),
        "tensor \"b\": offset 65 is not a multiple of the alignment 32"
    );
    assert_eq!(
        two(96, 0).error(),
        "tensor \"a\": 64 bytes at offset 96 reach past the end of the file, which has 128 bytes of \
         tensor data"
    );
    let far = u64::MAX - 31;
    assert_eq!(
        two(0, far).error(),
        format!(
            "tensor \"b\": 32 bytes at offset {far} reach past the end of the file, which has 128 \
             bytes of tensor data"
        )
    );
    assert_eq!(
        Raw::new(3, 2, 0)
            .tensor("a", 8, 0)
            .tensor("a", 8, 32)
            .pad(32)
            .bytes(&[0; 64])
            .error(),
        "tensor \"a\" appears twice"
    );
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let write = |w: &Writer, bytes: usize| {
        w.write(&mut Vec::new(), |_| Ok(vec![0; bytes].into()))
            .unwrap_err()
            .to_string()
    };
    let mut w = Writer::new();
    w.tensor("a", DType::F32, Shape(vec![2]));
    assert_eq!(write(&w, 4), "tensor \"a\": expected 8 bytes, found 4");
    w.tensor("a", DType::F32, Shape(vec![2]));
    assert_eq!(write(&w, 8), "tensor \"a\" is declared twice");
    let mut w = Writer::new();
    w.tensor("a", DType::I8G32, Shape(vec![32]));
    assert_eq!(
        write(&w, 40),
        "tensor \"a\": GGUF has no type for format I8G32"
    );
    let mut w = Writer::new();
    w.tensor("a", DType::F32, Shape(vec![1; 5]));
    assert_eq!(
        write(&w, 4),
        "tensor \"a\": expected 1 to 4 dimensions, found 5"
    );
}

// The model inside the container.

fn with_key(key: &str, value: impl Into<Value>) -> String {
    let mut w = SMALL.metadata();
    w.set(key, value);
    message(open_gguf(&SMALL.gguf_with(w, DType::F32)))
}

#[test]
fn unknown_architectures_and_keys() {
    assert_eq!(
        with_key("general.architecture", "mamba"),
        "unknown architecture \"mamba\", expected one of gemma3, llama, minicpm, qwen2, qwen3"
    );
    assert_eq!(
        with_key("general.architecture", 7u32),
        "general.architecture: expected a string"
    );
    let empty = Raw::new(3, 0, 0).pad(32).0;
    assert_eq!(
        message(open_gguf(&empty)),
        "general.architecture: expected a string, found nothing"
    );
    assert_eq!(
        with_key("llama.attention.temperature", 2.0f32),
        "unknown key \"llama.attention.temperature\""
    );
    let mut w = SMALL.metadata();
    w.set("llama.attention.temperature", 2.0f32)
        // Not below the architecture's prefix: says nothing about the model.
        .set("quantize.imatrix.file", "x");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, SMALL.gguf_with(w, DType::F32)).unwrap();
    let options = carat_import::OpenOptions {
        ignore_keys: vec!["llama.attention.temperature".into()],
    };
    let c = carat_import::open_with(&path, &options).unwrap();
    assert_eq!(
        c.origin.notes[0],
        "key llama.attention.temperature was ignored on request"
    );
}

#[test]
fn metadata_of_the_wrong_type_or_value() {
    for (key, value, expected) in [
        (
            "llama.block_count",
            Value::F32(1.0),
            "expected a whole number, found F32(1.0)",
        ),
        (
            "llama.block_count",
            Value::I32(-1),
            "expected a whole number, found I32(-1)",
        ),
        (
            "llama.block_count",
            Value::U64(1 << 40),
            "expected at most 4096, found 1099511627776",
        ),
        (
            "llama.rope.freq_base",
            Value::from("x"),
            "expected a floating-point number, found \"x\"",
        ),
        (
            "llama.expert_count",
            Value::U32(8),
            "only 0 is supported, found 8",
        ),
        (
            "llama.attention.value_length",
            Value::U32(8),
            "expected the head width 4, found 8",
        ),
        (
            "llama.rope.dimension_count",
            Value::U32(2),
            "expected the head width 4, found 2",
        ),
        (
            "llama.rope.scaling.type",
            Value::from("yarn"),
            "expected one of none, linear, longrope, found \"yarn\"",
        ),
        (
            "llama.vocab_size",
            Value::U32(6),
            "expected the 5 rows of tensor \"token_embd.weight\", found 6",
        ),
        (
            "llama.feed_forward_length",
            Value::Array(Array::U32(vec![8, 8])),
            "expected one value or 1, found 2",
        ),
        (
            "llama.feed_forward_length",
            Value::Array(Array::F32(vec![8.0])),
            "expected whole numbers in the array",
        ),
        (
            "tokenizer.ggml.tokens",
            strings(&["a", "b", "c", "d", "e", "f"]),
            "expected at most the 5 rows of tensor \"token_embd.weight\", found 6",
        ),
    ] {
        assert_eq!(with_key(key, value), format!("{key}: {expected}"));
    }
    assert_eq!(
        with_key("llama.attention.head_count", 0u32),
        "model spec: layers.0.mixer.heads: 0 is outside 1..=4096"
    );
    assert_eq!(
        with_key("llama.embedding_length", u32::MAX),
        "model spec: hidden_size: 4294967295 is outside 1..=1048576"
    );
    // Layers may differ where the file says so.
    let mut w = SMALL.metadata();
    w.set(
        "llama.feed_forward_length",
        Value::Array(Array::I32(vec![8])),
    );
    assert!(open_gguf(&SMALL.gguf_with(w, DType::F32)).is_ok());
}

#[test]
fn vocabularies_that_do_not_fit() {
    let base = || {
        let mut w = SMALL.metadata();
        w.set("tokenizer.ggml.model", "gpt2")
            .set("tokenizer.ggml.pre", "gpt-2")
            .set(
                "tokenizer.ggml.tokens",
                strings(&["a", "b", "c", "d", "ab"]),
            )
            .set("tokenizer.ggml.merges", strings(&["a b"]));
        w
    };
    assert!(open_gguf(&SMALL.gguf_with(base(), DType::F32)).is_ok());
    for (key, value, expected) in [
        (
            "eos_token_id",
            Value::U32(5),
            "expected an id below the 5 tokens, found 5",
        ),
        (
            "eos_token_id",
            Value::from("x"),
            "expected a token id, found string",
        ),
        (
            "scores",
            Value::Array(Array::F32(vec![0.0])),
            "expected one entry for each of 5 tokens, found 1",
        ),
        (
            "scores",
            Value::F32(0.0),
            "expected an array of float32s, found float32",
        ),
        (
            "token_type",
            Value::Array(Array::I32(vec![1; 6])),
            "expected one entry for each of 5 tokens, found 6",
        ),
        (
            "add_bos_token",
            Value::U32(1),
            "expected a boolean, found uint32",
        ),
        (
            "tokens",
            Value::Array(Array::U8(vec![1])),
            "expected an array of strings, found array",
        ),
    ] {
        let mut w = base();
        w.set(&format!("tokenizer.ggml.{key}"), value);
        assert_eq!(
            message(open_gguf(&SMALL.gguf_with(w, DType::F32))),
            format!("tokenizer.ggml.{key}: {expected}")
        );
    }
    // No token of that kind, in both spellings.
    for none in [Value::I32(-1), Value::U32(u32::MAX)] {
        let mut w = base();
        w.set("tokenizer.ggml.padding_token_id", none);
        let c = open_gguf(&SMALL.gguf_with(w, DType::F32)).unwrap();
        assert_eq!(c.text.config.pad, None);
    }
    let mut w = base();
    w.set("tokenizer.chat_template", 1u32);
    assert_eq!(
        message(open_gguf(&SMALL.gguf_with(w, DType::F32))),
        "tokenizer.chat_template: expected a string, found uint32"
    );
}

/// The small model with its tensor table changed.
fn with_tensors(change: impl Fn(&mut Vec<(String, DType, Vec<usize>)>)) -> String {
    let mut table: Vec<(String, DType, Vec<usize>)> = SMALL
        .tensors()
        .into_iter()
        .map(|t| (t.gguf, DType::F32, t.shape))
        .collect();
    change(&mut table);
    let mut w = SMALL.metadata();
    for (name, dtype, shape) in &table {
        w.tensor(name, *dtype, Shape(shape.clone()));
    }
    let size = |name: &str| {
        let (_, dtype, shape) = table.iter().find(|t| t.0 == name).unwrap();
        Shape(shape.clone()).bytes(*dtype).unwrap()
    };
    let mut file = Vec::new();
    w.write(&mut file, |name| Ok(vec![0; size(name)].into()))
        .unwrap();
    message(open_gguf(&file))
}

#[test]
fn tensors_that_contradict_the_metadata() {
    assert_eq!(
        with_tensors(|t| t.retain(|t| t.0 != "blk.0.attn_k.weight")),
        "tensor \"blk.0.attn_k.weight\" is missing (expected shape [4, 8])"
    );
    assert_eq!(
        with_tensors(|t| t.retain(|t| t.0 != "token_embd.weight")),
        "tensor \"token_embd.weight\": is missing"
    );
    assert_eq!(
        with_tensors(|t| t.push(("blk.1.attn_k.weight".into(), DType::F32, vec![4, 8]))),
        "unexpected tensor \"blk.1.attn_k.weight\""
    );
    assert_eq!(
        with_tensors(|t| t[2].2 = vec![8, 9]),
        "tensor \"blk.0.attn_q.weight\": expected shape [8, 8], found [8, 9]"
    );
    assert_eq!(
        with_tensors(|t| t[0].2 = vec![5, 8, 1]),
        "tensor \"token_embd.weight\": expected a matrix, found shape [5, 8, 1]"
    );
    assert_eq!(
        with_tensors(|t| t.push(("rope_freqs.weight".into(), DType::F32, vec![3]))),
        "model spec: ropes.0.scaling.factors: has 3 values, expected 2"
    );
    assert_eq!(
        with_tensors(|t| t.push(("rope_freqs.weight".into(), DType::Q8_0, vec![32]))),
        "tensor \"rope_freqs.weight\": expected a list of floating-point factors, found Q8_0 of \
         shape [32]"
    );
    // Without `output.weight` the head is the embedding.
    let tied = SMALL.gguf(DType::F32);
    assert!(!open_gguf(&tied).unwrap().spec.head.tied);
}

#[test]
fn norms_must_be_floats() {
    let tiny = common::BLOCKS;
    let mut w = tiny.metadata();
    let tensors = tiny.tensors();
    let dtype = |name: &str| {
        if name == "blk.0.ffn_norm.weight" {
            DType::Q8_0
        } else {
            DType::F32
        }
    };
    for t in &tensors {
        w.tensor(&t.gguf, dtype(&t.gguf), Shape(t.shape.clone()));
    }
    let mut file = Vec::new();
    w.write(&mut file, |name| {
        let t = tensors.iter().find(|t| t.gguf == name).unwrap();
        Ok(common::encode(dtype(name), &t.values).into())
    })
    .unwrap();
    assert_eq!(
        message(open_gguf(&file)),
        "tensor \"blk.0.ffn_norm.weight\": expected F32, F16 or BF16 elements, found Q8_0"
    );
}

#[test]
fn a_vocabulary_of_an_unknown_kind_leaves_its_reason() {
    let mut w = SMALL.metadata();
    w.set("tokenizer.ggml.model", "gpt2")
        .set("tokenizer.ggml.pre", "mystery")
        .set("tokenizer.ggml.tokens", strings(&["a", "b"]));
    let c = open_gguf(&SMALL.gguf_with(w, DType::F32)).unwrap();
    assert!(c.text.tokenizer_json.is_none());
    let problem = c.text.config.tokenizer_problem.unwrap();
    assert!(
        problem.starts_with("m.gguf: tokenizer.ggml.pre: unknown pre-tokenizer \"mystery\""),
        "{problem}"
    );
}
