//! Oracles that share weights with another one, begin in the middle, or round.

mod common;

use carat_oracle::{
    CachePrecision, Imitation, NoTaps, Oracle, OracleOptions, Recorder, Rounding, Rows, TapPoint,
};
use common::{Memory, Noise, everything, weights};

fn logits(oracle: &Oracle<'_>, ids: &[u32]) -> Vec<u32> {
    let out = oracle.forward(&[ids], Rows::All).unwrap();
    out[0].data.iter().map(|v| v.to_bits()).collect()
}

/// Layer 1's down projection and the head, changed.
fn changed(memory: &Memory) -> (Memory, [&'static str; 2]) {
    let names = ["layers.1.ffn.down.weight", "head.weight"];
    let mut out = memory.clone();
    for name in names {
        let (_, bytes) = out.0.get_mut(name).unwrap();
        bytes.iter_mut().skip(2).step_by(4).for_each(|b| *b ^= 0x20);
    }
    (out, names)
}

#[test]
fn sharing_and_resuming_change_no_bit() {
    let spec = everything();
    let (memory, ids) = (weights(&spec, 1), Noise::new(2).ids(9, spec.vocab_size));
    let (other, names) = changed(&memory);
    for resident_bytes in [0, 1 << 30] {
        let options = OracleOptions {
            resident_bytes,
            ..OracleOptions::new(64)
        };
        let oracle = Oracle::new(&spec, &memory, options.clone()).unwrap();
        let whole = logits(&Oracle::new(&spec, &other, options).unwrap(), &ids);
        let shared = oracle.on(&other, &|name| names.contains(&name)).unwrap();
        assert_eq!(logits(&shared, &ids), whole);
        assert_ne!(logits(&oracle, &ids), whole, "the change does nothing");

        // What is before the changed layer is that of the first oracle.
        let mut recorder = Recorder::new([TapPoint::Residual(0)]);
        oracle
            .forward_with(&[&ids], Rows::All, &mut recorder, &mut |_| Ok(()))
            .unwrap();
        let residual = recorder.get(TapPoint::Residual(0), 0).unwrap();
        let mut resumed = Vec::new();
        shared
            .resume_with((1, residual), &[&ids], Rows::All, &mut |row| {
                resumed.extend(row.logits.iter().map(|v| v.to_bits()));
                Ok(())
            })
            .unwrap();
        assert_eq!(resumed, whole);
    }
}

#[test]
fn an_imitation_rounds_the_inputs_of_the_matrices_it_names() {
    let spec = everything();
    let (memory, ids) = (weights(&spec, 3), Noise::new(4).ids(5, spec.vocab_size));
    let exact = Oracle::new(&spec, &memory, OracleOptions::new(64)).unwrap();
    let inputs = |name: &str| match name {
        "head.weight" => Rounding::Int8 { group: 8 },
        _ => Rounding::F32,
    };
    let machine = Imitation {
        cache: CachePrecision::F32,
        inputs: &inputs,
    };
    let options = OracleOptions::new(64);
    let rounding = Oracle::imitating(&spec, &memory, options, machine).unwrap();
    // Only the head's input is rounded: the same states, rounded by hand, give its logits.
    let mut recorder = Recorder::new([TapPoint::FinalHidden]);
    rounding
        .forward_with(&[&ids], Rows::All, &mut recorder, &mut |_| Ok(()))
        .unwrap();
    let mut hidden = recorder.get(TapPoint::FinalHidden, 0).unwrap().to_vec();
    let mut reference = Recorder::new([TapPoint::FinalHidden]);
    exact
        .forward_with(&[&ids], Rows::All, &mut reference, &mut |_| Ok(()))
        .unwrap();
    assert_eq!(
        reference.get(TapPoint::FinalHidden, 0).unwrap(),
        &hidden[..]
    );
    for group in hidden.chunks_mut(8) {
        let largest = group.iter().fold(0f32, |m, v| m.max(v.abs()));
        let inverse = 127.0 / largest;
        for v in group {
            *v = largest / 127.0 * (*v * inverse).round_ties_even();
        }
    }
    let by_hand: Vec<u32> = exact
        .head(&hidden)
        .unwrap()
        .iter()
        .map(|v| v.to_bits())
        .collect();
    assert_eq!(logits(&rounding, &ids), by_hand);
    assert_ne!(logits(&exact, &ids), by_hand);
    let mut none = NoTaps;
    // The roundings stay with an oracle that shares its weights.
    let shared = rounding.on(&memory, &|_| false).unwrap();
    let mut rows = 0;
    shared
        .forward_with(&[&ids], Rows::Last, &mut none, &mut |row| {
            rows += 1;
            let last = &by_hand[by_hand.len() - row.logits.len()..];
            assert!(row.logits.iter().zip(last).all(|(v, b)| v.to_bits() == *b));
            Ok(())
        })
        .unwrap();
    assert_eq!(rows, 1);
}
