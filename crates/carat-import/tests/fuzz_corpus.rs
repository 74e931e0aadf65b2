//! Replays the fuzz corpus, and mutations of it, through the fuzz targets: any
//! answer is fine but a panic.

mod common;

use std::fs;

use carat_import::fuzzing;
use carat_tensor::DType;
use common::{SMALL, repo, strings};

/// Every file of a corpus folder, in order of name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = repo("fuzz/corpus").join(target);
    let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .map(|p| (p.display().to_string(), fs::read(&p).unwrap()))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files
}

/// The files themselves, cut short at some lengths, and with bytes changed.
fn replay(target: &str, run: fn(&[u8])) {
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % below.max(1) as u64) as usize
    };
    // What parsers stumble over: extremes of every width, and single bits.
    let interesting = [
        0u64,
        1,
        0x7f,
        0xff,
        0x7fff_ffff,
        0xffff_ffff,
        1 << 63,
        u64::MAX,
    ];
    for (name, bytes) in corpus(target) {
        run(&bytes);
        for _ in 0..200 {
            let mut changed = bytes.clone();
            for _ in 0..=random(3) {
                if changed.is_empty() {
                    break;
                }
                // Headers are where the lengths are.
                let reach = if random(2) == 0 { 256 } else { changed.len() };
                let at = random(changed.len().min(reach));
                match random(4) {
                    0 => changed[at] ^= 1 << random(8),
                    1 => changed[at] = random(256) as u8,
                    2 => {
                        let value = interesting[random(interesting.len())].to_le_bytes();
                        let width = [1, 2, 4, 8][random(4)].min(changed.len() - at);
                        changed[at..at + width].copy_from_slice(&value[..width]);
                    }
                    _ => changed.truncate(at),
                }
            }
            let outcome = std::panic::catch_unwind(|| run(&changed));
            assert!(outcome.is_ok(), "a mutation of {name} panics: {changed:?}");
        }
    }
}

#[test]
fn gguf_corpus() {
    replay("gguf", fuzzing::gguf);
}

#[test]
fn safetensors_corpus() {
    replay("safetensors", fuzzing::safetensors);
}

/// Writes the seeds: `cargo test -p carat-import --test fuzz_corpus -- --ignored`.
#[test]
#[ignore = "writes into the repository"]
fn write_seeds() {
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let folder = repo("fuzz/corpus").join(target);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), bytes).unwrap();
    };
    write("gguf", "model", &SMALL.gguf(DType::F32));
    write("gguf", "half", &SMALL.gguf(DType::F16));
    for (name, model) in [("vocab-bpe", "gpt2"), ("vocab-spm", "llama")] {
        let mut w = SMALL.metadata();
        w.set("tokenizer.ggml.model", model)
            .set("tokenizer.ggml.pre", "gpt-2")
            .set(
                "tokenizer.ggml.tokens",
                strings(&["a", "b", "c", "ab", "</s>"]),
            )
            .set(
                "tokenizer.ggml.scores",
                carat_import::gguf::Value::Array(carat_import::gguf::Array::F32(vec![
                    -1.0, -2.0, -3.0, -4.0, 0.0,
                ])),
            )
            .set(
                "tokenizer.ggml.token_type",
                carat_import::gguf::Value::Array(carat_import::gguf::Array::I32(vec![
                    1, 1, 1, 1, 3,
                ])),
            )
            .set("tokenizer.ggml.merges", strings(&["a b"]))
            .set("tokenizer.ggml.eos_token_id", 4u32)
            .set("tokenizer.chat_template", "{{ messages }}");
        write("gguf", name, &SMALL.gguf_with(w, DType::F32));
    }
    let mut w = SMALL.metadata();
    w.set("general.alignment", 64u32)
        .set("llama.rope.scaling.type", "linear")
        .set("llama.rope.scaling.factor", 2.0f32);
    write("gguf", "aligned-scaled", &SMALL.gguf_with(w, DType::F32));
    let nested = [
        &b"GGUF\x03\0\0\0"[..],
        &[0; 8],
        &[1, 0, 0, 0, 0, 0, 0, 0],
        &[1, 0, 0, 0, 0, 0, 0, 0],
        b"k\x09\0\0\0\x09\0\0\0\x01\0\0\0\0\0\0\0\x05\0\0\0\x01\0\0\0\0\0\0\0\xff\xff\xff\xff",
    ]
    .concat();
    write("gguf", "nested-array", &nested);

    let data: Vec<_> = SMALL
        .tensors()
        .into_iter()
        .map(|t| (t.hf, t.shape, common::encode(DType::BF16, &t.values)))
        .collect();
    write(
        "safetensors",
        "model",
        &common::safetensors_bytes(&data, DType::BF16),
    );
    write("safetensors", "empty", b"\x02\0\0\0\0\0\0\0{}");
    let header =
        br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}"#;
    let mut scalar = (header.len() as u64).to_le_bytes().to_vec();
    scalar.extend(header);
    scalar.extend([0; 8]);
    write("safetensors", "scalar", &scalar);
}
