//! One model in both containers, and the writer against the reader.

mod common;

use std::{fs, sync::Arc};

use carat_import::{
    Checkpoint, WeightKind, checkpoint_files, content_digest,
    gguf::{Array, Gguf, Value, Writer},
    open, permute_rows,
};
use carat_tensor::{DType, Shape, formats};
use common::{BLOCKS, SMALL, encode, fits, open_gguf};
use proptest::prelude::*;

/// A tensor's elements as fp32.
fn values(c: &Checkpoint, name: &str) -> Vec<f32> {
    let info = c.tensors.info(name).unwrap();
    let mut out = vec![0.0; info.shape.elements().unwrap()];
    formats::decode(info.dtype, &c.tensors.read(name).unwrap(), &mut out).unwrap();
    out
}

// Row A1.7: a GGUF file of this architecture stores q and k in another row order.
#[test]
fn both_containers_give_the_same_tensors() {
    for tiny in [SMALL, BLOCKS] {
        let dir = tempfile::tempdir().unwrap();
        tiny.write_hf(dir.path(), DType::F32);
        let hf = open(dir.path()).unwrap();
        let gguf = open_gguf(&tiny.gguf(DType::F32)).unwrap();
        assert_eq!(hf.spec, gguf.spec);
        assert!(gguf.origin.permuted_qk && !hf.origin.permuted_qk);
        assert_eq!(hf.tensors.names(), gguf.tensors.names());
        for t in tiny.tensors() {
            assert_eq!(values(&hf, &t.canonical), t.values, "{}", t.canonical);
            assert_eq!(
                hf.tensors.read(&t.canonical).unwrap(),
                gguf.tensors.read(&t.canonical).unwrap(),
                "{}",
                t.canonical
            );
        }
    }
}

/// The order is the converters' own: row `2i + half` of a head's file rows is row
/// `half * d / 2 + i` of the model.
#[test]
fn the_row_order_is_that_of_the_converters() {
    let rows: Vec<u8> = (0..16).collect();
    let stored = permute_rows(&rows, 1, 8);
    assert_eq!(
        stored,
        [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    );
}

#[test]
fn quantized_rows_move_whole() {
    for dtype in [
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_K,
        DType::Q6_K,
        DType::TQ2_0,
    ] {
        let c = open_gguf(&BLOCKS.gguf(dtype)).unwrap();
        for t in BLOCKS.tensors().iter().filter(|t| t.permuted) {
            assert_eq!(c.tensors.info(&t.canonical).unwrap().dtype, dtype);
            assert_eq!(
                c.tensors.read(&t.canonical).unwrap(),
                encode(dtype, &t.values),
                "{dtype} {}",
                t.canonical
            );
        }
        // Rows of 32 cannot be TQ2_0, so one kind of linear is not ternary there.
        assert_eq!(c.origin.weights, WeightKind::Quantized);
    }
}

#[test]
fn biases_are_permuted_too() {
    let t = SMALL;
    let mut w = t.metadata();
    let mut data = std::collections::BTreeMap::new();
    let mut add = |w: &mut Writer, name: &str, shape: Vec<usize>, bytes: Vec<u8>| {
        w.tensor(name, DType::F32, Shape(shape));
        data.insert(name.to_owned(), bytes);
    };
    for tensor in t.tensors() {
        add(
            &mut w,
            &tensor.gguf,
            tensor.shape,
            encode(DType::F32, &tensor.values),
        );
    }
    let bias: Vec<f32> = (0..8).map(|i| i as f32).collect();
    let stored = permute_rows(&encode(DType::F32, &bias), 4, t.head_dim);
    add(&mut w, "blk.0.attn_q.bias", vec![8], stored);
    let stored = permute_rows(&encode(DType::F32, &bias[..4]), 4, t.head_dim);
    add(&mut w, "blk.0.attn_k.bias", vec![4], stored);
    add(
        &mut w,
        "blk.0.attn_v.bias",
        vec![4],
        encode(DType::F32, &bias[..4]),
    );
    let mut file = Vec::new();
    w.write(&mut file, |n| Ok(data[n].clone().into())).unwrap();
    let c = open_gguf(&file).unwrap();
    assert_eq!(values(&c, "layers.0.attn.q.bias"), bias);
    assert_eq!(values(&c, "layers.0.attn.k.bias"), bias[..4]);
    assert_eq!(values(&c, "layers.0.attn.v.bias"), bias[..4]);
}

#[test]
fn every_format_survives_the_container() {
    let stored: Vec<DType> = DType::ALL
        .into_iter()
        .filter(|d| carat_import::gguf::id_of_dtype(*d).is_some())
        .collect();
    assert_eq!(stored.len(), 25);
    let mut w = Writer::new();
    let bytes = |d: DType| -> Vec<u8> {
        let n = Shape(vec![3, 512]).bytes(d).unwrap();
        (0..n).map(|i| (i * 7 + 3) as u8).collect()
    };
    for d in &stored {
        w.tensor(d.name(), *d, Shape(vec![3, 512]));
    }
    let mut file = Vec::new();
    w.write(
        &mut file,
        |n| Ok(bytes(DType::from_name(n).unwrap()).into()),
    )
    .unwrap();
    let gguf = Gguf::parse(Arc::new(file.clone())).unwrap();
    for d in stored {
        let t = gguf.tensor(d.name()).unwrap();
        assert_eq!((t.dtype, &t.shape), (d, &Shape(vec![3, 512])));
        assert_eq!(gguf.tensor_bytes(d.name()).unwrap(), bytes(d));
    }
    let mut again = Vec::new();
    w.write(&mut again, |n| {
        Ok(bytes(DType::from_name(n).unwrap()).into())
    })
    .unwrap();
    assert_eq!(file, again);
}

/// The BLOCKS model in `n` parts; returns the folder.
fn split(n: usize, change: impl Fn(usize, &mut Writer)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let whole = Gguf::parse(Arc::new(BLOCKS.gguf(DType::Q8_0))).unwrap();
    let tensors = whole.tensors();
    for part in 0..n {
        let mut w = if part == 0 {
            BLOCKS.metadata()
        } else {
            Writer::new()
        };
        w.set("split.no", Value::U16(part as u16))
            .set("split.count", Value::U16(n as u16))
            .set("split.tensors.count", Value::I32(tensors.len() as i32));
        change(part, &mut w);
        for t in tensors.iter().skip(part).step_by(n) {
            w.tensor(&t.name, t.dtype, t.shape.clone());
        }
        let name = format!("m-{:05}-of-{n:05}.gguf", part + 1);
        let mut file = fs::File::create(dir.path().join(name)).unwrap();
        w.write(&mut file, |name| {
            Ok(whole.tensor_bytes(name).unwrap().into())
        })
        .unwrap();
    }
    dir
}

#[test]
fn split_files() {
    let dir = split(3, |_, _| {});
    let part = |i: usize| dir.path().join(format!("m-{i:05}-of-00003.gguf"));
    let error = |i: usize| {
        open(&part(i))
            .unwrap_err()
            .to_string()
            .replace(&dir.path().display().to_string(), "DIR")
    };
    let c = open(&part(1)).unwrap();
    let whole = open_gguf(&BLOCKS.gguf(DType::Q8_0)).unwrap();
    assert_eq!(c.spec, whole.spec);
    for name in whole.tensors.names() {
        assert_eq!(
            c.tensors.read(&name).unwrap(),
            whole.tensors.read(&name).unwrap()
        );
    }
    assert_eq!(c.origin.files, [part(1), part(2), part(3)]);
    assert_eq!(
        error(2),
        "DIR/m-00002-of-00003.gguf: is one of 3 parts: expected the first, named \
         NAME-00001-of-00003.gguf"
    );
    fs::copy(part(3), part(2)).unwrap();
    assert_eq!(
        error(1),
        "DIR/m-00002-of-00003.gguf: split.no: expected 1, found 2"
    );
    fs::remove_file(part(2)).unwrap();
    assert_eq!(
        error(1),
        "DIR/m-00002-of-00003.gguf: part 2 of 3 is missing"
    );

    let dir = split(2, |part, w| {
        if part == 0 {
            w.set("split.tensors.count", Value::I32(99));
        }
    });
    let first = dir.path().join("m-00001-of-00002.gguf");
    let text = open(&first).unwrap_err().to_string();
    assert!(
        text.ends_with("split.tensors.count: expected 99 tensors in all parts together, found 21"),
        "{text}"
    );
    let dir = split(2, |_, w| {
        w.set("split.count", Value::U64(1 << 40));
    });
    let first = dir.path().join("m-00001-of-00002.gguf");
    let text = open(&first).unwrap_err().to_string();
    assert!(
        text.ends_with("split.count: expected at most 4096, found 1099511627776"),
        "{text}"
    );
}

#[test]
fn digests_follow_names_and_contents() {
    let digest = |change: &dyn Fn(&std::path::Path)| {
        let dir = tempfile::tempdir().unwrap();
        SMALL.write_hf(dir.path(), DType::F32);
        change(dir.path());
        content_digest(dir.path()).unwrap()
    };
    let base = digest(&|_| {});
    assert_eq!(base.len(), 64);
    // The place does not matter, nor do files that no import reads.
    assert_eq!(
        base,
        digest(&|d| fs::write(d.join("README.md"), "x").unwrap())
    );
    let with_template = digest(&|d| fs::write(d.join("chat_template.jinja"), "x").unwrap());
    assert_ne!(base, with_template);
    let empty = digest(&|d| fs::write(d.join("chat_template.jinja"), "").unwrap());
    assert_ne!(base, empty);
    assert_ne!(
        base,
        digest(&|d| {
            let path = d.join("model.safetensors");
            let mut bytes = fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        })
    );

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, SMALL.gguf(DType::F32)).unwrap();
    assert_eq!(
        checkpoint_files(&path).unwrap(),
        std::slice::from_ref(&path)
    );
    let first = content_digest(&path).unwrap();
    let renamed = dir.path().join("n.gguf");
    fs::rename(&path, &renamed).unwrap();
    assert_ne!(first, content_digest(&renamed).unwrap());
}

#[test]
fn revisions_come_from_the_hub_layout() {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let dir = tempfile::tempdir().unwrap();
    let snapshot = dir.path().join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    SMALL.write_hf(&snapshot, DType::F32);
    let c = open(&snapshot).unwrap();
    assert_eq!(c.origin.revision.as_deref(), Some(commit));
    let local = tempfile::tempdir().unwrap();
    SMALL.write_hf(local.path(), DType::F32);
    assert_eq!(open(local.path()).unwrap().origin.revision, None);
    let record = local.path().join(".cache/huggingface/download");
    fs::create_dir_all(&record).unwrap();
    fs::write(
        record.join("config.json.metadata"),
        format!("{commit}\netag\n1\n"),
    )
    .unwrap();
    let c = open(local.path()).unwrap();
    assert_eq!(c.origin.revision.as_deref(), Some(commit));
}

fn array() -> impl Strategy<Value = Array> {
    let leaf = prop_oneof![
        any::<Vec<u8>>().prop_map(Array::U8),
        any::<Vec<i16>>().prop_map(Array::I16),
        any::<Vec<u32>>().prop_map(Array::U32),
        any::<Vec<i64>>().prop_map(Array::I64),
        any::<Vec<bool>>().prop_map(Array::Bool),
        prop::collection::vec(-1e6f32..1e6, 0..20).prop_map(Array::F32),
        prop::collection::vec(".{0,8}", 0..8).prop_map(Array::String),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop::collection::vec(inner, 0..4).prop_map(Array::Array)
    })
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<bool>().prop_map(Value::Bool),
        (-1e9f64..1e9).prop_map(Value::F64),
        ".{0,16}".prop_map(Value::String),
        array().prop_map(Value::Array),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read(
        metadata in prop::collection::btree_map("[a-z.]{1,12}", value(), 0..8),
        shapes in prop::collection::vec((1usize..5, 1usize..4), 0..6),
        alignment in prop::sample::select(vec![8u32, 32, 256]),
    ) {
        let mut w = Writer::new();
        w.set("general.alignment", alignment);
        for (k, v) in &metadata {
            w.set(k, v.clone());
        }
        let dtypes = [DType::F32, DType::F16, DType::Q8_0, DType::Q4_K];
        let mut expected = Vec::new();
        for (i, (rows, blocks)) in shapes.iter().enumerate() {
            let dtype = dtypes[i % dtypes.len()];
            let shape = Shape(vec![*rows, blocks * dtype.block_len()]);
            prop_assert!(fits(dtype, shape.dims()));
            let bytes: Vec<u8> = (0..shape.bytes(dtype).unwrap()).map(|b| (b + i) as u8).collect();
            w.tensor(&format!("t{i}"), dtype, shape.clone());
            expected.push((format!("t{i}"), dtype, shape, bytes));
        }
        let mut file = Vec::new();
        w.write(&mut file, |n| {
            Ok(expected.iter().find(|t| t.0 == n).unwrap().3.clone().into())
        }).unwrap();
        let read = Gguf::parse(Arc::new(file)).unwrap();
        prop_assert_eq!(read.metadata(), w.metadata());
        prop_assert_eq!(read.tensors().len(), expected.len());
        for (name, dtype, shape, bytes) in &expected {
            let t = read.tensor(name).unwrap();
            prop_assert_eq!((t.dtype, &t.shape), (*dtype, shape));
            prop_assert_eq!(t.offset % u64::from(alignment), 0);
            prop_assert_eq!(read.tensor_bytes(name).unwrap(), &bytes[..]);
        }
    }
}

/// Models of both containers, described as GGUF files and read back: the same model in
/// GGUF's terms.
#[test]
fn models_are_described_as_they_are_read() {
    use carat_bundle::spec::RopeScaling;
    use carat_import::export::{describe, in_gguf_terms};
    let golden = |name: &str| common::repo("tests/golden").join(name);
    for (name, architecture, permuted) in [
        ("llama-gqa-headdim", "llama", true),
        ("llama-rope-llama3-tied", "llama", true),
        ("qwen2-bias-tied", "qwen2", false),
        ("qwen3-qknorm", "qwen3", false),
        ("minicpm4", "minicpm", true),
        ("minicpm4-long", "minicpm", true),
    ] {
        let model = open(&golden(name)).unwrap();
        let found = describe(&model.spec, &model.text, name).unwrap();
        assert_eq!(found.metadata[0].1, Value::from(architecture), "{name}");
        assert_eq!(found.permuted_qk, permuted, "{name}");
    }
    let tied = open(&golden("llama-rope-llama3-tied")).unwrap().spec;
    let RopeScaling::Factors { factors } = &in_gguf_terms(&tied).ropes[0].scaling else {
        panic!("bands are no factors");
    };
    // Short wavelengths are kept exactly, the longest are stretched by the factor.
    assert_eq!(factors[0], 1.0);
    assert!(*factors.last().unwrap() > 1.0);
    // A window on every layer of a file without words for one.
    let sliding = open(&golden("mistral-sliding")).unwrap();
    let refused = describe(&sliding.spec, &sliding.text, "m").unwrap_err();
    assert!(refused.to_string().contains("gemma3, llama"), "{refused}");
}
