//! Synthetic checkpoints: the same bytes from the same request, and files that load.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use carat_bundle::spec::RopeScaling;
use carat_import::{
    WeightKind,
    gguf::{Gguf, WriteError, Writer},
    synth::{ModelShape, SynthError, Synthesis},
};
use carat_tensor::{DType, formats};

fn tiny() -> &'static ModelShape {
    ModelShape::named("tiny").unwrap()
}

fn made(dir: &Path, layers: usize, seed: u64, threads: usize) -> Vec<u8> {
    let target = dir.join(format!("{layers}-{seed}-{threads}.gguf"));
    let synthesis = Synthesis::new(tiny(), layers, seed).unwrap();
    synthesis.write(&target, threads, |_| true).unwrap();
    let bytes = fs::read(&target).unwrap();
    assert_eq!(bytes.len() as u64, synthesis.file_bytes().unwrap());
    bytes
}

fn names(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect()
}

#[test]
fn the_file_follows_from_shape_layers_and_seed_alone() {
    let dir = tempfile::tempdir().unwrap();
    let one = made(dir.path(), 3, 0, 1);
    for threads in [2, 3, 16, 500] {
        assert!(one == made(dir.path(), 3, 0, threads), "{threads} threads");
    }
    assert!(one != made(dir.path(), 3, 1, 1));

    // A tensor is the same however many layers there are.
    let parse = |bytes| Gguf::parse(Arc::new(bytes)).unwrap();
    let (whole, cut) = (parse(one), parse(made(dir.path(), 1, 0, 2)));
    assert_eq!(cut.tensors().len(), 14);
    for t in cut.tensors() {
        assert_eq!(whole.tensor_bytes(&t.name), cut.tensor_bytes(&t.name));
    }
    // And no tensor is like another.
    let of = |name: &str| whole.tensor_bytes(name).unwrap();
    assert_ne!(of("blk.0.ffn_gate.weight"), of("blk.0.ffn_up.weight"));
    assert_ne!(of("blk.0.ffn_gate.weight"), of("blk.1.ffn_gate.weight"));
    let codes = of("blk.0.ffn_gate.weight");
    formats::check(DType::TQ2_0, codes).unwrap();
}

#[test]
fn a_large_tensor_is_made_in_pieces_that_do_not_show() {
    // The embedding is of several chunks here.
    let dir = tempfile::tempdir().unwrap();
    let shape = ModelShape::named("smollm2-135m").unwrap();
    let synthesis = Synthesis::new(shape, 1, 5).unwrap();
    let file = |threads| {
        let target = dir.path().join("file.gguf");
        let (mut pieces, mut told) = (0, 0);
        let count = |bytes| {
            (pieces, told) = (pieces + 1, told + bytes);
            true
        };
        synthesis.write(&target, threads, count).unwrap();
        assert!(pieces > 20, "{pieces}");
        assert_eq!(told, synthesis.tensor_bytes());
        fs::read(target).unwrap()
    };
    assert!(file(1) == file(3));
}

#[test]
fn it_is_a_ternary_checkpoint_with_a_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("tiny.gguf");
    let synthesis = Synthesis::new(tiny(), 2, 0).unwrap();
    synthesis.write(&target, 2, |_| true).unwrap();
    let checkpoint = carat_import::open(&target).unwrap();
    assert_eq!(checkpoint.origin.weights, WeightKind::Ternary);
    assert!(checkpoint.origin.permuted_qk);
    let spec = &checkpoint.spec;
    assert_eq!(spec.layers.len(), 2);
    assert_eq!(spec.embedding.scale, 12.0);
    assert_eq!(spec.head.scale, 0.25);
    assert_eq!(spec.layers[0].residual_scale, (1.4 / 2f64.sqrt()) as f32);
    let RopeScaling::LongRope {
        short_factors,
        long_factors,
        original_max_context,
        ..
    } = &spec.ropes[0].scaling
    else {
        panic!("{:?}", spec.ropes[0]);
    };
    assert_eq!(*original_max_context, 512);
    assert_eq!(short_factors[..], [1.0; 32]);
    assert_eq!((long_factors[0], long_factors[31]), (1.0, 32.0));
    let text = &checkpoint.text;
    assert!(text.config.chat_template.is_none());
    assert_eq!(text.config.eos.as_ref().unwrap().content, "</s>");
    assert_eq!(text.config.tokenizer_problem, None);
    assert!(text.tokenizer_json.is_some());
}

#[test]
fn layers_that_the_shape_does_not_have() {
    for layers in [0, 4, usize::MAX] {
        let e = Synthesis::new(tiny(), layers, 0).unwrap_err();
        assert!(matches!(e, SynthError::Layers { .. }));
        let said = e.to_string();
        assert!(said.contains(&format!("{layers} layers")) && said.contains("1 to the 3 of tiny"));
    }
}

#[test]
fn nothing_is_left_of_a_file_that_was_not_finished() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("new/tiny.gguf");
    let synthesis = Synthesis::new(tiny(), 3, 0).unwrap();
    for threads in [1, 8] {
        let mut pieces = 0;
        let stopped = synthesis.write(&target, threads, |_| {
            pieces += 1;
            pieces < 4
        });
        assert!(matches!(stopped, Err(SynthError::Stopped { .. })));
        assert_eq!(pieces, 4);
        assert_eq!(names(dir.path()), [""; 0].map(PathBuf::from));
    }
    // A file that was there stays as it was.
    fs::create_dir(target.parent().unwrap()).unwrap();
    fs::write(&target, "before").unwrap();
    synthesis.write(&target, 2, |_| false).unwrap_err();
    assert_eq!(fs::read(&target).unwrap(), b"before");
    assert_eq!(
        names(target.parent().unwrap()),
        std::slice::from_ref(&target)
    );
    // A folder in the way.
    let e = synthesis.write(dir.path(), 2, |_| true).unwrap_err();
    assert!(
        e.to_string().contains(&dir.path().display().to_string()),
        "{e}"
    );
    assert_eq!(names(dir.path()).len(), 1);
}

#[test]
fn the_writer_streams_exactly_what_was_declared() {
    let mut writer = Writer::new();
    writer.set("general.architecture", "x");
    writer.tensor("a", DType::F32, [3].into());
    writer.tensor("b", DType::F32, [1].into());
    let mut pieces = Vec::new();
    let in_pieces = |name: &str, out: &mut dyn io::Write| {
        let n = if name == "a" { 12 } else { 4 };
        (0..n).try_for_each(|i| out.write_all(&[i]))
    };
    writer.stream(&mut pieces, in_pieces).unwrap();
    let mut whole = Vec::new();
    let at_once = |name: &str| Ok((0..if name == "a" { 12 } else { 4 }).collect());
    writer.write(&mut whole, at_once).unwrap();
    assert_eq!(pieces, whole);
    assert_eq!(pieces.len() as u64, writer.file_bytes().unwrap());

    for bytes in [0, 11, 13, 40] {
        let fill = |_: &str, out: &mut dyn io::Write| out.write_all(&vec![7; bytes]);
        match writer.stream(&mut Vec::new(), fill) {
            Err(WriteError::Length {
                tensor,
                expected: 12,
                found,
            }) => assert_eq!((tensor.as_str(), found), ("a", bytes)),
            other => panic!("{bytes}: {other:?}"),
        }
    }
    let refuse = |_: &str, _: &mut dyn io::Write| Err(io::Error::other("no more"));
    let e = writer.stream(&mut Vec::new(), refuse).unwrap_err();
    assert_eq!(e.to_string(), "no more");
}
