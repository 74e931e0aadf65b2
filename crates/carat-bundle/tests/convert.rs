//! Conversion keeps every weight, byte for byte or value for value.

mod common;

use carat_bundle::{
    Bundle, BundleError, ConvertOptions, convert,
    convert::Recipe,
    manifest::{Layout, Manifest, SEGMENT_ALIGN, SkippedTensor, TENSOR_ALIGN, WeightsKind},
    source::TensorSource,
    spec::TensorRole,
};
use carat_tensor::{DType, formats, packed};
use common::*;

fn decoded(source: &dyn TensorSource, name: &str) -> Vec<u32> {
    let info = source.info(name).unwrap();
    let mut out = vec![0f32; info.shape.elements().unwrap()];
    formats::decode(info.dtype, &source.read(name).unwrap(), &mut out).unwrap();
    // One pattern for all NaNs: their payload is not a value.
    out.iter()
        .map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() })
        .collect()
}

#[test]
fn every_format_comes_back_from_a_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(1);
    for dtype in DType::ALL {
        let source = MemorySource::random(&spec, dtype, DType::BF16);
        let kind = match dtype {
            DType::TQ1_0 | DType::TQ2_0 => WeightsKind::Ternary,
            d if d.is_float() => WeightsKind::Dense,
            _ => WeightsKind::Quantized,
        };
        let target = dir.path().join(dtype.name());
        let options = ConvertOptions::default();
        convert(&source, &spec, &text(), origin(kind), &options, &target)
            .unwrap_or_else(|e| panic!("{dtype}: {e}"));
        let bundle = Bundle::open(&target).unwrap();
        assert_eq!(bundle.names(), source.names());
        assert_eq!(bundle.manifest().spec, spec);
        for d in spec.tensors() {
            let info = bundle.info(&d.name).unwrap();
            assert_eq!(info.shape, d.shape);
            let stored = bundle.tensor(&d.name).unwrap();
            assert!(stored.entry.offset.is_multiple_of(TENSOR_ALIGN));
            match d.role {
                TensorRole::Norm | TensorRole::Bias => {
                    assert_eq!(info.dtype, DType::F32);
                    assert_eq!(stored.entry.layout, Layout::RowMajor);
                }
                _ => {
                    assert!(packed::supports(info.dtype), "{}", info.dtype);
                    assert_eq!(stored.entry.layout, Layout::Packed16);
                    assert!(stored.packed().is_some());
                }
            }
            if info.dtype == source.info(&d.name).unwrap().dtype {
                assert_eq!(bundle.read(&d.name).unwrap(), source.read(&d.name).unwrap());
            }
            assert!(
                decoded(&bundle, &d.name) == decoded(&source, &d.name),
                "{dtype} as {}: {}",
                info.dtype,
                d.name
            );
        }
    }
}

#[test]
fn the_default_recipe_is_resolved_in_the_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(1);
    for (dtype, stored) in [
        (DType::Q4_1, "Q4_1"),
        (DType::TQ1_0, "TQ2_0"),
        (DType::IQ4_NL, "I8G32"),
        (DType::Q2_K, "I8G16"),
    ] {
        let source = MemorySource::random(&spec, dtype, DType::F32);
        let kind = if dtype == DType::TQ1_0 {
            WeightsKind::Ternary
        } else {
            WeightsKind::Quantized
        };
        let target = dir.path().join(dtype.name());
        let options = ConvertOptions::default();
        let report = convert(&source, &spec, &text(), origin(kind), &options, &target).unwrap();
        let m = &report.manifest;
        assert_eq!(m.compression, format!("keep: {stored} 9"));
        for (r, t) in m.recipe.tensors.iter().zip(&m.tensors) {
            assert_eq!((&r.name, r.stored), (&t.name, t.dtype));
            assert_eq!(r.source, source.info(&r.name).unwrap().dtype);
        }
        let declared = m.source.declared.as_ref().unwrap();
        assert_eq!(declared.formats, format!("{dtype} 9"));
        assert_eq!(declared.eos, [2, 39], "the tokenizer knows the id of <end>");
        let bundle = Bundle::open(&target).unwrap();
        let deviation = bundle.expectations().unwrap().deviations.formats;
        assert_eq!(deviation.is_some(), dtype.name() != stored);
    }
}

#[test]
fn bytes_depend_on_neither_run_nor_threads() {
    let dir = tempfile::tempdir().unwrap();
    let make = |name: &str, threads| {
        let options = ConvertOptions {
            threads,
            ..ConvertOptions::default()
        };
        convert_with(&dir.path().join(name), &options);
        contents(&dir.path().join(name))
    };
    let one = make("one", 1);
    assert_eq!(
        one.keys().collect::<Vec<_>>(),
        [
            "manifest.json",
            "recipe.toml",
            "tokenizer/chat_template.jinja",
            "tokenizer/tokenizer.json",
            "verify.toml",
            "weights.bin"
        ]
    );
    for (name, threads) in [("again", 1), ("three", 3), ("eight", 8)] {
        assert!(make(name, threads) == one, "{threads} threads");
    }
}

// Chunks are 4 MiB of source: this matrix takes three, the last one partial.
#[test]
fn a_matrix_of_several_chunks_is_packed_as_a_whole() {
    use carat_bundle::writer::{TensorToStore, WriterOptions};
    let dir = tempfile::tempdir().unwrap();
    let shape = carat_tensor::Shape::from([2603, 4096]);
    let mut bytes = Bytes::new(5);
    let mut data: Vec<u8> = (0..shape.bytes(DType::Q8_0).unwrap())
        .map(|_| bytes.next())
        .collect();
    make_finite(DType::Q8_0, &mut data);
    let layout = packed::PackedLayout::new(DType::Q8_0, 2603, 4096).unwrap();
    let mut expected = vec![0; layout.bytes()];
    packed::pack(&layout, &data, &mut expected).unwrap();
    for threads in [1, 2, 5] {
        let options = WriterOptions {
            threads,
            ..WriterOptions::default()
        };
        let mut writer =
            carat_bundle::BundleWriter::create(&dir.path().join("x"), options).unwrap();
        let entry = writer
            .add_tensor(TensorToStore {
                name: "embed.weight",
                role: TensorRole::Embedding,
                dtype: DType::Q8_0,
                shape: &shape,
                data: &data,
            })
            .unwrap();
        assert_eq!(entry.bytes, expected.len() as u64);
        assert_eq!(entry.blake3, blake3::hash(&expected).to_hex().to_string());
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn sizes_add_up_to_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let report = convert_tiny(&dir.path().join("b"));
    let m = &report.manifest;
    let file = std::fs::metadata(dir.path().join("b/weights.bin"))
        .unwrap()
        .len();
    let s = &m.size_report;
    assert_eq!(s.stored_bytes + s.alignment_bytes, file);
    assert_eq!(m.weights.bytes, file);
    assert_eq!(
        s.formats.iter().map(|f| f.stored_bytes).sum::<u64>(),
        s.stored_bytes
    );
    // 9 Q4_0 matrices; embedding and head have 40 rows, stored as 48.
    let q = s.formats.iter().find(|f| f.dtype == DType::Q4_0).unwrap();
    let linear = 256 * 256 * 2 + 2 * 128 * 256 + 3 * 512 * 256;
    assert_eq!(q.weights, linear + 2 * 40 * 256);
    assert_eq!(q.logical_bytes, q.weights / 32 * 18);
    assert_eq!(q.stored_bytes, (linear + 2 * 48 * 256) / 32 * 18);
    let names: Vec<&str> = m.weights.segments.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["embed", "layers.0", "output"]);
    assert!(
        m.weights
            .segments
            .iter()
            .all(|s| s.offset.is_multiple_of(SEGMENT_ALIGN))
    );
}

#[test]
fn text_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("b");
    convert_tiny(&target);
    let bundle = Bundle::open(&target).unwrap();
    assert_eq!(bundle.text().unwrap(), text());
    assert_eq!(bundle.manifest().text.chat_template, None);
    assert_eq!(
        bundle.digest(),
        blake3::hash(&std::fs::read(target.join("manifest.json")).unwrap())
            .to_hex()
            .as_str()
    );
    std::fs::write(target.join("tokenizer/tokenizer.json"), b"{}").unwrap();
    let e = Bundle::open(&target)
        .unwrap()
        .text()
        .unwrap_err()
        .to_string();
    assert!(e.contains("tokenizer.json") && e.contains("found 2"), "{e}");
}

#[test]
fn a_source_must_have_exactly_the_tensors_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("b");
    let spec = spec(1);
    let good = || MemorySource::random(&spec, DType::F16, DType::F32);
    let run = |source: &MemorySource, kind, options: &ConvertOptions<'_>| {
        convert(source, &spec, &text(), origin(kind), options, &target)
    };
    let fails = |source: &MemorySource, kind, parts: &[&str]| {
        let e = run(source, kind, &ConvertOptions::default())
            .unwrap_err()
            .to_string();
        assert!(parts.iter().all(|p| e.contains(p)), "{e}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{e}");
    };

    let mut missing = good();
    missing.tensors.remove("layers.0.attn.k.bias");
    fails(
        &missing,
        WeightsKind::Dense,
        &["layers.0.attn.k.bias", "missing"],
    );

    let mut extra = good();
    let copy = extra.tensors["final_norm.weight"].clone();
    extra
        .tensors
        .insert("rotary.inv_freq".into(), (copy.0, copy.1));
    fails(&extra, WeightsKind::Dense, &["rotary.inv_freq", "not one"]);
    let declared = ConvertOptions {
        skipped: vec![SkippedTensor {
            name: "rotary.inv_freq".into(),
            reason: "computed".into(),
        }],
        ..ConvertOptions::default()
    };
    run(&extra, WeightsKind::Dense, &declared).unwrap();
    std::fs::remove_dir_all(&target).unwrap();

    let mut shape = good();
    shape.tensors.get_mut("head.weight").unwrap().0.shape.0 = vec![256, 40];
    fails(
        &shape,
        WeightsKind::Dense,
        &["head.weight", "expected shape [40, 256], found [256, 40]"],
    );

    let mut short = good();
    short.tensors.get_mut("head.weight").unwrap().1.pop();
    fails(
        &short,
        WeightsKind::Dense,
        &["head.weight", "20480", "20479"],
    );

    // Code 3 in row 17 of a ternary matrix.
    let mut ternary = MemorySource::random(&spec, DType::TQ2_0, DType::F32);
    ternary.tensors.get_mut("layers.0.ffn.up.weight").unwrap().1[17 * 66] = 0xff;
    fails(
        &ternary,
        WeightsKind::Ternary,
        &["layers.0.ffn.up.weight", "code 3"],
    );

    // A latent master must not be called ternary, nor ternary weights dense.
    fails(&good(), WeightsKind::Ternary, &["Ternary", "0 of 7"]);
    let ternary = MemorySource::random(&spec, DType::TQ2_0, DType::F32);
    fails(&ternary, WeightsKind::Dense, &["Dense", "7 of 7"]);
    fails(&ternary, WeightsKind::TernaryLatent, &["TernaryLatent"]);
}

#[test]
fn a_bundle_is_a_source() {
    let dir = tempfile::tempdir().unwrap();
    let first = dir.path().join("first");
    let report = convert_tiny(&first);
    let bundle = Bundle::open(&first).unwrap();
    let second = dir.path().join("second");
    convert(
        &bundle,
        &bundle.manifest().spec,
        &bundle.text().unwrap(),
        origin(WeightsKind::Quantized),
        &ConvertOptions::default(),
        &second,
    )
    .unwrap();
    let again = Bundle::open(&second).unwrap();
    assert_eq!(again.manifest().weights, report.manifest.weights);
    assert_eq!(again.weights(), bundle.weights());
}

#[test]
fn progress_ends_at_the_total() {
    let dir = tempfile::tempdir().unwrap();
    let seen = std::cell::RefCell::new(Vec::new());
    let note = |p: carat_bundle::convert::ConvertProgress<'_>| {
        seen.borrow_mut().push((p.done_bytes, p.total_bytes));
    };
    let options = ConvertOptions {
        progress: Some(&note),
        ..ConvertOptions::default()
    };
    let report = convert_with(&dir.path().join("b"), &options);
    let seen = seen.into_inner();
    let total = report.manifest.weights.bytes;
    assert!(seen.is_sorted() && seen.iter().all(|s| s.1 == total));
    assert_eq!(seen[0].0, 0);
    assert_eq!(seen[seen.len() - 1].0, total);
}

#[test]
fn the_recipe_record_holds_no_place_of_this_machine() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("b");
    let mut options = ConvertOptions::default();
    options.command.args = [
        "/home/someone/model.gguf",
        "--out=/tmp/x/b",
        "C:\\models\\m.gguf",
        "~/m/",
        "relative/path",
        "--recipe",
        "int8lin",
    ]
    .map(String::from)
    .to_vec();
    convert_with(&target, &options);
    let recipe = Bundle::open(&target).unwrap().recipe().unwrap();
    assert_eq!(
        recipe.args,
        [
            "model.gguf",
            "--out=b",
            "m.gguf",
            "m",
            "relative/path",
            "--recipe",
            "int8lin"
        ]
    );
    assert!(matches!(
        recipe.require_verified(&target, false),
        Err(BundleError::Unverified { .. })
    ));
    recipe.require_verified(&target, true).unwrap();
}

// Opening maps and parses; it reads no weight. 50 ms is the limit for a model of
// some 270 tensors, here met by an unoptimised build too.
#[test]
fn opening_a_model_of_283_tensors_takes_less_than_50_ms() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("b");
    let spec = spec(20);
    let source = MemorySource::random(&spec, DType::TQ2_0, DType::F32);
    convert(
        &source,
        &spec,
        &text(),
        origin(WeightsKind::Ternary),
        &ConvertOptions::default(),
        &target,
    )
    .unwrap();
    assert_eq!(spec.tensors().len(), 283);
    // The best of several: other processes share this machine.
    let best = (0..10)
        .map(|_| {
            let start = std::time::Instant::now();
            Bundle::open(&target).unwrap();
            start.elapsed()
        })
        .min()
        .unwrap();
    assert!(best.as_millis() < 50, "{best:?}");
}

#[test]
fn a_manifest_survives_json() {
    let dir = tempfile::tempdir().unwrap();
    let m = convert_tiny(&dir.path().join("b")).manifest;
    assert_eq!(Manifest::parse(&m.to_json().unwrap()).unwrap(), m);
    let mut nan = m.clone();
    nan.spec.embedding.scale = f32::NAN;
    assert!(nan.to_json().is_err());
}

#[test]
fn floats_that_are_ternary_by_value_may_be_called_so() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(1);
    let mut source = MemorySource::random(&spec, DType::BF16, DType::F32);
    let mut bytes = Bytes::new(7);
    for (name, (_, data)) in &mut source.tensors {
        if name.contains(".attn.") || name.contains(".ffn.") {
            // One magnitude, 0.75, beside zero.
            for element in data.as_chunks_mut::<2>().0 {
                let value = [0.0f32, 0.75, -0.75][usize::from(bytes.next()) % 3];
                // bf16 is the upper half of fp32.
                *element = ((value.to_bits() >> 16) as u16).to_le_bytes();
            }
        }
    }
    let b = dir.path().join("b");
    let options = ConvertOptions::default();
    let kind = WeightsKind::Ternary;
    convert(&source, &spec, &text(), origin(kind), &options, &b).unwrap();
    let report = carat_bundle::verify(&b, &carat_bundle::VerifyOptions::default());
    assert!(report.passed(), "{report}");
    let found = &report.check("weights kind").unwrap().detail;
    assert!(found.contains("7 of 7"), "{found}");

    // Four dense tensors of seven are too many.
    for name in ["attn.q", "attn.k", "ffn.up", "ffn.down"] {
        let name = format!("layers.0.{name}.weight");
        source.tensors.get_mut(&name).unwrap().1[..2].copy_from_slice(&[1, 1]);
    }
    let target = dir.path().join("c");
    let refused = convert(&source, &spec, &text(), origin(kind), &options, &target).unwrap_err();
    assert!(refused.to_string().contains("3 of 7"), "{refused}");
}

/// Bytes that make the first block of a format no number, by each field that can:
/// where they stand and what they are.
fn no_numbers(dtype: DType) -> Vec<(usize, Vec<u8>)> {
    let (infinity, nan) = (0x7c00u16.to_le_bytes(), 0xfe01u16.to_le_bytes());
    let at = |places: &[usize]| {
        let both = |&at: &usize| [(at, infinity.to_vec()), (at, nan.to_vec())];
        places.iter().flat_map(both).collect()
    };
    match dtype {
        DType::F32 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
            .map(|v| (0, v.to_le_bytes().to_vec()))
            .into(),
        DType::BF16 => vec![(0, vec![0x80, 0x7f]), (0, vec![0xc0, 0xff])],
        DType::I8G16 | DType::I8G32 => [0, 4]
            .map(|at| (at, f32::NAN.to_le_bytes().to_vec()))
            .into(),
        // 255 is NaN in the standard; below it the largest level leaves fp32.
        DType::MXFP4 => vec![(0, vec![255]), (0, vec![254, 0x77])],
        // The scale's nibbles are the highest of four words.
        DType::IQ1_M => vec![(52, vec![0, 0xc0, 0, 0x70])],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => at(&[0, 2]),
        DType::Q2_K => at(&[80, 82]),
        DType::Q3_K => at(&[108]),
        DType::Q6_K => at(&[208]),
        DType::TQ1_0 => at(&[52]),
        DType::TQ2_0 => at(&[64]),
        _ => at(&[0]),
    }
}

#[test]
fn weights_that_are_no_numbers_are_refused_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("b");
    let spec = spec(1);
    for dtype in DType::ALL {
        for recipe in Recipe::ALL {
            for (at, value) in no_numbers(dtype) {
                let mut source = MemorySource::random(&spec, dtype, DType::F16);
                let (info, data) = source.tensors.get_mut("head.weight").unwrap();
                // Row 33 is in the last panel, which rows of padding fill up.
                let row = 33 * info.shape.bytes(dtype).unwrap() / VOCAB;
                data[row + at..][..value.len()].copy_from_slice(&value);
                let options = ConvertOptions {
                    recipe,
                    ..ConvertOptions::default()
                };
                let kind = WeightsKind::Quantized;
                let made = convert(&source, &spec, &text(), origin(kind), &options, &target);
                let e = made.unwrap_err().to_string();
                for part in ["\"head.weight\"", "row 33", dtype.name(), "finite"] {
                    assert!(e.contains(part), "{dtype} at {at}: {e}");
                }
                assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{dtype}");
            }
        }
    }
    // Vectors too, in the formats they come in.
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (_, value) = no_numbers(dtype).remove(0);
        let mut source = MemorySource::random(&spec, DType::Q4_0, dtype);
        let (_, data) = source.tensors.get_mut("final_norm.weight").unwrap();
        let at = 7 * dtype.block_bytes();
        data[at..][..value.len()].copy_from_slice(&value);
        let options = ConvertOptions::default();
        let kind = WeightsKind::Quantized;
        let made = convert(&source, &spec, &text(), origin(kind), &options, &target);
        let e = made.unwrap_err().to_string();
        assert!(e.contains("\"final_norm.weight\": row 0, column 7"), "{e}");
    }
}
