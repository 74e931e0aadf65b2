//! The walk against a definition in f64, and what must never change a bit.

mod common;

use std::collections::BTreeSet;

use carat_bundle::source::SourceError;
use carat_bundle::spec::*;
use carat_oracle::{NoTaps, Oracle, OracleError, OracleOptions, Recorder, Rows, Step, TapPoint};
use carat_tensor::{DType, Shape};
use common::{Memory, Noise, everything, weights};

fn options(capacity: usize) -> OracleOptions {
    OracleOptions {
        threads: 2,
        ..OracleOptions::new(capacity)
    }
}

/// The spec's definition, token by token, in f64 and in the plainest words.
struct Definition<'a> {
    spec: &'a ModelSpec,
    weights: &'a Memory,
    capacity: usize,
}

impl Definition<'_> {
    fn vector(&self, name: &str) -> Vec<f64> {
        self.weights
            .floats(name)
            .into_iter()
            .map(f64::from)
            .collect()
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = self.vector(&format!("{name}.weight"));
        let mut y: Vec<f64> = w
            .chunks(x.len())
            .map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
            .collect();
        let bias = format!("{name}.bias");
        if self.weights.0.contains_key(&bias) {
            y.iter_mut()
                .zip(self.vector(&bias))
                .for_each(|(y, b)| *y += b);
        }
        y
    }

    fn norm(&self, spec: &NormSpec, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let gain = self
            .vector(name)
            .into_iter()
            .map(|w| w + f64::from(spec.weight_offset));
        x.iter()
            .zip(gain)
            .map(|(x, g)| x / (mean + f64::from(spec.eps)).sqrt() * g)
            .collect()
    }

    fn rotate(&self, rope: &RopeSpec, position: usize, head: &mut [f64]) {
        let half = rope.rotary_dim / 2;
        for (i, frequency) in rope.inv_freq(self.capacity).into_iter().enumerate() {
            let angle = f64::from(frequency) * position as f64;
            let factor = f64::from(rope.attention_factor());
            let (c, s) = (angle.cos() * factor, angle.sin() * factor);
            let (a, b) = (head[i], head[i + half]);
            head[i] = a * c - b * s;
            head[i + half] = b * c + a * s;
        }
    }

    fn logits(&self, ids: &[u32]) -> Vec<Vec<f64>> {
        let spec = self.spec;
        let table = self.vector("embed.weight");
        let mut x: Vec<Vec<f64>> = ids
            .iter()
            .map(|&id| {
                let row = &table[id as usize * spec.hidden_size..][..spec.hidden_size];
                row.iter()
                    .map(|v| v * f64::from(spec.embedding.scale))
                    .collect()
            })
            .collect();
        for (l, layer) in spec.layers.iter().enumerate() {
            let name = |part: &str| format!("layers.{l}.{part}");
            let MixerSpec::Attention(a) = &layer.mixer;
            let (mut queries, mut keys, mut values) = (vec![], vec![], vec![]);
            for (position, x) in x.iter().enumerate() {
                let y = self.norm(&layer.mixer_norm, &name("mixer_norm.weight"), x);
                let mut q = self.linear(&name("attn.q"), &y);
                let mut k = self.linear(&name("attn.k"), &y);
                for (part, side) in [("q", &mut q), ("k", &mut k)] {
                    for head in side.chunks_mut(a.head_dim) {
                        if let Some(norm) = &a.qk_norm {
                            let gain = name(&format!("attn.{part}_norm.weight"));
                            head.copy_from_slice(&self.norm(norm, &gain, head));
                        }
                        if let Some(rope) = a.rope {
                            self.rotate(&spec.ropes[rope], position, head);
                        }
                    }
                }
                queries.push(q);
                keys.push(k);
                values.push(self.linear(&name("attn.v"), &y));
            }
            for (position, x) in x.iter_mut().enumerate() {
                let mut mixed = vec![0.0; a.heads * a.head_dim];
                for head in 0..a.heads {
                    let at = |i: usize, d: usize| i * a.head_dim + d;
                    let kv = head / (a.heads / a.kv_heads);
                    let seen: Vec<usize> = (0..=position)
                        .filter(|&s| a.window.is_none_or(|w| s + w > position))
                        .collect();
                    let scores: Vec<f64> = seen
                        .iter()
                        .map(|&s| {
                            let dot: f64 = (0..a.head_dim)
                                .map(|d| queries[position][at(head, d)] * keys[s][at(kv, d)])
                                .sum();
                            let score = dot * f64::from(a.scale);
                            a.logit_softcap
                                .map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh())
                        })
                        .collect();
                    let total: f64 = scores.iter().map(|s| s.exp()).sum();
                    for (&s, score) in seen.iter().zip(&scores) {
                        for d in 0..a.head_dim {
                            mixed[at(head, d)] += score.exp() / total * values[s][at(kv, d)];
                        }
                    }
                }
                let mut y = self.linear(&name("attn.o"), &mixed);
                if let Some(norm) = &layer.post_mixer_norm {
                    y = self.norm(norm, &name("post_mixer_norm.weight"), &y);
                }
                let scale = f64::from(layer.residual_scale);
                x.iter_mut().zip(y).for_each(|(x, y)| *x += scale * y);

                let y = self.norm(&layer.ffn_norm, &name("ffn_norm.weight"), x);
                let FfnSpec::Gated { activation, .. } = layer.ffn;
                let gate = self.linear(&name("ffn.gate"), &y);
                let up = self.linear(&name("ffn.up"), &y);
                let inner: Vec<f64> = gate
                    .iter()
                    .zip(up)
                    .map(|(&g, u)| match activation {
                        Activation::Silu => g / (1.0 + (-g).exp()) * u,
                        Activation::GeluTanh => {
                            let t =
                                (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                            0.5 * g * (1.0 + t.tanh()) * u
                        }
                    })
                    .collect();
                let mut y = self.linear(&name("ffn.down"), &inner);
                if let Some(norm) = &layer.post_ffn_norm {
                    y = self.norm(norm, &name("post_ffn_norm.weight"), &y);
                }
                x.iter_mut().zip(y).for_each(|(x, y)| *x += scale * y);
            }
        }
        x.iter()
            .map(|x| {
                let y = self.norm(&spec.final_norm, "final_norm.weight", x);
                let head = if spec.head.tied { "embed" } else { "head" };
                let mut logits = self.linear(head, &y);
                for v in &mut logits {
                    *v *= f64::from(spec.head.scale);
                    if let Some(c) = spec.head.softcap {
                        *v = f64::from(c) * (*v / f64::from(c)).tanh();
                    }
                }
                logits
            })
            .collect()
    }
}

/// Largest difference over the standard deviation of `b`.
fn distance(a: &[f32], b: &[f64]) -> f64 {
    let mean = b.iter().sum::<f64>() / b.len() as f64;
    let std = (b.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / b.len() as f64).sqrt();
    let worst = a
        .iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, f64::max);
    worst / std
}

/// fp32 through two layers of about ten stages each (norm, projection, rotation,
/// scores, softmax, mixing, projection, norm, gate, product). A stage's result
/// carries its own relative error, at most about (56 + 8) / 2 eps = 4e-6 for the
/// longest projection and far less on average, and passes earlier error on with
/// a gain near 1: 20 stages stay below 8e-5.
const FP32_BOUND: f64 = 8e-5;

#[test]
fn every_feature_matches_the_definition() {
    let ids = Noise::new(1).ids(33, 93);
    for (tied, capacity) in [(false, 40), (true, 40), (false, 64)] {
        let mut spec = everything();
        spec.head.tied = tied;
        let weights = weights(&spec, 2);
        let oracle = Oracle::new(&spec, &weights, options(capacity)).unwrap();
        let logits = oracle.forward(&[&ids], Rows::All).unwrap().remove(0);
        let expected = Definition {
            spec: &spec,
            weights: &weights,
            capacity,
        }
        .logits(&ids)
        .concat();
        let distance = distance(&logits.data, &expected);
        assert!(
            distance < FP32_BOUND,
            "tied {tied}, capacity {capacity}: {distance:e}"
        );
        assert!(distance > 1e-9, "fp32 cannot be this good: {distance:e}");
    }
}

// The test above would not notice a feature that both sides ignore, or one too weak to show.
#[test]
fn every_feature_matters() {
    type Change = fn(&mut ModelSpec);
    fn attention(spec: &mut ModelSpec, layer: usize) -> &mut AttentionSpec {
        let MixerSpec::Attention(a) = &mut spec.layers[layer].mixer;
        a
    }
    let changes: [(&str, Change); 18] = [
        ("embedding scale", |s| s.embedding.scale = 1.0),
        ("norm offset", |s| {
            s.layers[0].mixer_norm.weight_offset = 0.0
        }),
        ("norm eps", |s| {
            s.layers[0].post_ffn_norm.as_mut().unwrap().eps = 0.1
        }),
        ("post mixer norm", |s| s.layers[0].post_mixer_norm = None),
        ("post ffn norm", |s| s.layers[0].post_ffn_norm = None),
        ("residual scale", |s| s.layers[1].residual_scale = 1.0),
        ("qkv bias", |s| attention(s, 0).qkv_bias = false),
        ("out bias", |s| attention(s, 1).out_bias = false),
        ("qk norm", |s| attention(s, 1).qk_norm = None),
        ("window", |s| attention(s, 0).window = Some(7)),
        ("score scale", |s| attention(s, 1).scale = 0.5),
        ("score softcap", |s| attention(s, 0).logit_softcap = None),
        ("no rope", |s| attention(s, 0).rope = None),
        ("rotary dim", |s| s.ropes[0].rotary_dim = 12),
        ("theta", |s| s.ropes[0].theta = 1000.0),
        ("activation", |s| {
            let FfnSpec::Gated { activation, .. } = &mut s.layers[1].ffn;
            *activation = Activation::Silu;
        }),
        ("head scale", |s| s.head.scale = 1.0),
        ("head softcap", |s| s.head.softcap = None),
    ];
    let ids = Noise::new(1).ids(33, 93);
    let spec = everything();
    let weights = weights(&spec, 2);
    let logits = |spec: &ModelSpec, capacity| {
        let oracle = Oracle::new(spec, &weights, options(capacity)).unwrap();
        oracle.forward(&[&ids], Rows::All).unwrap().remove(0).data
    };
    let base: Vec<f64> = logits(&spec, 40).into_iter().map(f64::from).collect();
    for (what, change) in changes {
        let mut changed = spec.clone();
        change(&mut changed);
        let distance = distance(&logits(&changed, 40), &base);
        assert!(distance > 100.0 * FP32_BOUND, "{what}: {distance:e}");
    }
    let distance = distance(&logits(&spec, 41), &base);
    assert!(distance > 100.0 * FP32_BOUND, "long factors: {distance:e}");
}

#[test]
fn no_bit_depends_on_company_threads_streaming_or_selection() {
    let mut noise = Noise::new(3);
    let ids: Vec<Vec<u32>> = [1, 33, 2, 17, 40].map(|n| noise.ids(n, 93)).to_vec();
    let sequences: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
    for tied in [false, true] {
        let mut spec = everything();
        spec.head.tied = tied;
        let weights = weights(&spec, 4);
        let oracle = Oracle::new(&spec, &weights, options(64)).unwrap();
        assert!(oracle.is_resident());
        let together = oracle.forward(&sequences, Rows::All).unwrap();
        for (ids, logits) in sequences.iter().zip(&together) {
            assert_eq!(
                oracle.forward(&[ids], Rows::All).unwrap().remove(0),
                *logits
            );
            let last = oracle.forward(&[ids], Rows::Last).unwrap().remove(0);
            assert_eq!(last.rows, [ids.len() - 1]);
            assert_eq!(last.row(0), logits.row(ids.len() - 1));
        }
        for (threads, resident_bytes) in [(1, usize::MAX), (5, usize::MAX), (1, 0), (3, 0)] {
            let options = OracleOptions {
                capacity: 64,
                resident_bytes,
                threads,
            };
            let other = Oracle::new(&spec, &weights, options).unwrap();
            assert_eq!(other.is_resident(), resident_bytes > 0);
            assert_eq!(other.forward(&sequences, Rows::All).unwrap(), together);
        }
        let picked = [16, 3, 3, 0];
        let some = oracle
            .forward(&sequences[3..4], Rows::Some(&picked))
            .unwrap()
            .remove(0);
        assert_eq!(some.rows, picked);
        for (i, &row) in picked.iter().enumerate() {
            assert_eq!(some.row(i), together[3].row(row));
        }
    }
}

#[test]
fn steps_of_any_size_give_the_bits_of_a_whole_pass() {
    let spec = everything();
    let weights = weights(&spec, 5);
    let oracle = Oracle::new(&spec, &weights, options(64)).unwrap();
    let mut noise = Noise::new(6);
    let (a, b) = (noise.ids(50, 93), noise.ids(41, 93));
    let whole = oracle.forward(&[&a, &b], Rows::All).unwrap();
    for step in [1, 2, 7, 30] {
        let mut session = oracle.session();
        let (sa, sb) = (session.open(), session.open());
        let (mut got_a, mut got_b) = (vec![], vec![]);
        // The second sequence starts late and goes first: company changes all the time.
        for (i, ids) in a.chunks(step).enumerate() {
            let mut steps = vec![(sa, ids)];
            if let Some(ids) = i.checked_sub(1).and_then(|i| b.chunks(step).nth(i)) {
                steps.insert(0, (sb, ids));
            }
            let mut out = session.extend(&steps, Rows::All).unwrap();
            got_a.extend(out.pop().unwrap().data);
            got_b.extend(out.pop().map_or(vec![], |l| l.data));
        }
        assert_eq!(got_a, whole[0].data, "steps of {step}");
        assert_eq!(got_b, whole[1].data[..got_b.len()], "steps of {step}");
        assert!(!got_b.is_empty() || step >= 50);

        // Rolled back and extended again: as if never drafted.
        session.truncate(sa, 20).unwrap();
        assert_eq!(session.tokens(sa), Some(20));
        let cache = session.cache(sa, 1).unwrap();
        assert_eq!((cache.tokens, cache.kv_heads, cache.head_dim), (20, 1, 16));
        assert_eq!((cache.keys.len(), cache.values.len()), (20 * 16, 20 * 16));
        let again = session
            .extend(&[(sa, &a[20..])], Rows::All)
            .unwrap()
            .remove(0);
        assert_eq!(again.data, whole[0].data[20 * 93..]);
    }
}

// Longer than a chunk of the walk, so that chunk edges fall inside sequences.
#[test]
fn long_passes_are_cut_without_a_trace() {
    let mut spec = everything();
    spec.layers.truncate(1);
    let weights = weights(&spec, 7);
    let oracle = Oracle::new(&spec, &weights, options(3000)).unwrap();
    let mut noise = Noise::new(8);
    let (a, b) = (noise.ids(1500, 93), noise.ids(1100, 93));
    let points = [
        TapPoint::Embedding,
        TapPoint::MixerInput(0),
        TapPoint::MixerInner(0),
        TapPoint::FfnInput(0),
        TapPoint::FfnInner(0),
        TapPoint::Residual(0),
        TapPoint::FinalHidden,
    ];
    let rows = [1099, 547, 548];
    let run = |sequences: &[&[u32]]| {
        let mut recorder = Recorder::new(points);
        let mut logits = vec![];
        oracle
            .forward_with(sequences, Rows::Some(&rows), &mut recorder, &mut |row| {
                logits.push((row.sequence, row.row, row.logits.to_vec()));
                Ok(())
            })
            .unwrap();
        (recorder, logits)
    };
    let (together, logits) = run(&[&a, &b]);
    let (alone, alone_logits) = run(&[&b]);
    for (point, width) in points.into_iter().zip([40, 40, 48, 40, 56, 40, 40]) {
        let rows = together.get(point, 1).unwrap();
        assert_eq!(rows.len(), 1100 * width, "{point}");
        assert_eq!(rows, alone.get(point, 0).unwrap(), "{point}");
    }
    assert_eq!(together.get(TapPoint::Residual(1), 0), None);
    for ((_, row, a), (_, alone_row, b)) in logits[3..].iter().zip(&alone_logits) {
        assert_eq!((row, a), (alone_row, b));
    }
    // The last tap is what the head sees.
    let head = weights.floats("head.weight");
    let hidden = &together.get(TapPoint::FinalHidden, 1).unwrap()[1099 * 40..];
    for (logit, w) in logits[3].2.iter().zip(head.chunks_exact(40)) {
        let dot: f64 = w
            .iter()
            .zip(hidden)
            .map(|(w, h)| f64::from(*w) * f64::from(*h))
            .sum();
        let expected = 3.0 * (dot * 0.8 / 3.0).tanh();
        // 40 products of values below 4 and 0.3 in fp32: 40 eps/2 of a sum of sizes below 16.
        assert!((f64::from(*logit) - expected).abs() < 40.0 * 16.0 * 6e-8);
    }
}

#[test]
fn greedy_follows_the_likeliest_token() {
    let spec = everything();
    let weights = weights(&spec, 9);
    let oracle = Oracle::new(&spec, &weights, options(30)).unwrap();
    let mut noise = Noise::new(10);
    let prompts: Vec<Vec<u32>> = [3, 9, 25, 1].map(|n| noise.ids(n, 93)).to_vec();
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let free = oracle.greedy(&prompts, 8, &BTreeSet::new()).unwrap();
    // 25 tokens in a capacity of 30 leave room for 5.
    assert_eq!(free.iter().map(Vec::len).collect::<Vec<_>>(), [8, 8, 5, 8]);
    let full = noise.ids(30, 93);
    let none = oracle.greedy(&[&full, prompts[0]], 8, &BTreeSet::new());
    assert_eq!(none.unwrap(), [vec![], free[0].clone()]);
    for (prompt, steps) in prompts.iter().zip(&free) {
        let mut ids = prompt.to_vec();
        for step in steps {
            let logits = oracle.forward(&[&ids], Rows::Last).unwrap().remove(0);
            assert_eq!(*step, Step::of(logits.row(0)).unwrap());
            ids.push(step.id);
        }
        assert_eq!(
            oracle.greedy(&[prompt], 8, &BTreeSet::new()).unwrap()[0],
            *steps
        );
        // The same steps in one pass.
        let forced = oracle.teacher_force(prompt, &ids[prompt.len()..]).unwrap();
        assert_eq!(forced.iter().map(|f| f.best).collect::<Vec<_>>(), *steps);
        assert!(
            forced
                .iter()
                .zip(steps)
                .all(|(f, s)| f.id == s.id && f.logprob == s.logprob)
        );
    }
    let stop = free[1][2].id;
    let first = |steps: &[Step]| steps.iter().position(|s| s.id == stop).map(|i| i + 1);
    let stopped = oracle.greedy(&prompts, 8, &BTreeSet::from([stop])).unwrap();
    for (free, stopped) in free.iter().zip(stopped) {
        assert_eq!(stopped, free[..first(free).unwrap_or(free.len())]);
    }
    assert!(
        oracle
            .greedy(&prompts, 0, &BTreeSet::new())
            .unwrap()
            .iter()
            .all(Vec::is_empty)
    );
    assert!(oracle.greedy(&[], 5, &BTreeSet::new()).unwrap().is_empty());
}

#[test]
fn forced_tokens_are_judged_where_they_stand() {
    let spec = everything();
    let weights = weights(&spec, 11);
    let oracle = Oracle::new(&spec, &weights, options(64)).unwrap();
    let ids = Noise::new(12).ids(12, 93);
    let logits = oracle.forward(&[&ids], Rows::All).unwrap().remove(0);
    let pairs = [
        (&ids[..5], &ids[5..]),
        (&ids[..12], &ids[..0]),
        (&ids[..1], &ids[1..2]),
    ];
    let all = oracle.teacher_force_all(&pairs).unwrap();
    assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [7, 0, 1]);
    for (i, forced) in all[0].iter().enumerate() {
        let row = logits.row(4 + i);
        assert_eq!(forced.id, ids[5 + i]);
        assert_eq!(forced.best, Step::of(row).unwrap());
        let sum: f64 = row.iter().map(|&v| f64::from(v).exp()).sum();
        let expected = f64::from(row[forced.id as usize]) - sum.ln();
        // Both in f64, one rounding to fp32 of a value below 16.
        assert!((f64::from(forced.logprob) - expected).abs() < 1e-6);
    }
}

#[test]
fn what_is_no_sequence_is_refused() {
    let spec = everything();
    let weights = weights(&spec, 13);
    let oracle = Oracle::new(&spec, &weights, options(4)).unwrap();
    let forward = |ids: &[u32]| oracle.forward(&[&[1], ids], Rows::All).unwrap_err();
    assert!(matches!(forward(&[]), OracleError::Empty { sequence: 1 }));
    assert!(matches!(
        forward(&[1; 5]),
        OracleError::TooLong {
            sequence: 1,
            tokens: 5,
            capacity: 4
        }
    ));
    let error = forward(&[92, 93]);
    assert!(matches!(
        error,
        OracleError::TokenRange {
            sequence: 1,
            position: 1,
            id: 93,
            ..
        }
    ));
    assert_eq!(
        error.to_string(),
        "sequence 1: token 1 has id 93, expected below 93"
    );
    assert!(matches!(
        forward(&[u32::MAX]),
        OracleError::TokenRange { .. }
    ));
    assert!(matches!(
        oracle.forward(&[&[1, 2]], Rows::Some(&[1, 2])),
        Err(OracleError::RowRange {
            sequence: 0,
            row: 2,
            rows: 2
        })
    ));
    assert!(matches!(
        oracle.greedy(&[&[]], 1, &BTreeSet::new()),
        Err(OracleError::Empty { sequence: 0 })
    ));
    assert!(matches!(
        oracle.teacher_force(&[], &[1]),
        Err(OracleError::Empty { sequence: 0 })
    ));
    assert!(matches!(
        oracle.teacher_force(&[1], &[2, 93]),
        Err(OracleError::TokenRange {
            position: 2,
            id: 93,
            ..
        })
    ));
    assert!(oracle.teacher_force(&[1, 2], &[1, 2, 3]).is_ok());
    assert!(matches!(
        oracle.teacher_force(&[1, 2], &[1, 2, 3, 4]),
        Err(OracleError::TooLong { .. })
    ));
    assert!(matches!(
        Oracle::new(&spec, &weights, options(0)),
        Err(OracleError::NoCapacity)
    ));
}

#[test]
fn a_failed_step_leaves_its_sequences_as_they_were() {
    let spec = everything();
    let weights = weights(&spec, 14);
    let oracle = Oracle::new(&spec, &weights, options(8)).unwrap();
    let mut session = oracle.session();
    let (a, b) = (session.open(), session.open());
    session
        .extend(&[(a, &[1, 2, 3]), (b, &[4])], Rows::Last)
        .unwrap();

    let error = session
        .extend(&[(b, &[5]), (a, &[1; 6])], Rows::Last)
        .unwrap_err();
    assert!(matches!(
        error,
        OracleError::TooLong {
            sequence: 1,
            tokens: 9,
            capacity: 8
        }
    ));
    let error = session
        .extend(&[(b, &[5]), (b, &[6])], Rows::Last)
        .unwrap_err();
    assert!(matches!(error, OracleError::RepeatedSequence { .. }));
    // One that fails half way, after keys and values were appended.
    let stop = session
        .extend_with(
            &[(a, &[7, 8]), (b, &[9])],
            Rows::Last,
            &mut NoTaps,
            &mut |_| Err(OracleError::NoCapacity),
        )
        .unwrap_err();
    assert!(matches!(stop, OracleError::NoCapacity));
    assert_eq!((session.tokens(a), session.tokens(b)), (Some(3), Some(1)));

    let after = session.extend(&[(a, &[6])], Rows::Last).unwrap();
    let whole = oracle.forward(&[&[1, 2, 3, 6]], Rows::Last).unwrap();
    assert_eq!(after[0].data, whole[0].data);

    assert!(session.close(b));
    assert!(!session.close(b));
    assert_eq!(session.tokens(b), None);
    assert!(session.cache(b, 0).is_none() && session.cache(a, 2).is_none());
    let error = session.extend(&[(b, &[1])], Rows::Last).unwrap_err();
    assert!(matches!(error, OracleError::UnknownSequence { .. }));
    assert!(session.truncate(b, 0).is_err());
}

#[test]
fn weights_that_do_not_fit_the_spec_are_refused() {
    let spec = everything();
    let good = weights(&spec, 15);
    let open = |weights: &Memory, resident_bytes| {
        let options = OracleOptions {
            resident_bytes,
            ..options(8)
        };
        let oracle = Oracle::new(&spec, weights, options)?;
        oracle.forward(&[&[1, 2]], Rows::Last).map(|_| ())
    };
    for resident_bytes in [0, usize::MAX] {
        assert!(open(&good, resident_bytes).is_ok());
        for decl in spec.tensors() {
            let mut bad = good.clone();
            bad.0.remove(&decl.name);
            match open(&bad, resident_bytes) {
                Err(OracleError::Source(SourceError::Missing { name, .. })) => {
                    assert_eq!(name, decl.name);
                }
                other => panic!("{}: {other:?}", decl.name),
            }

            let mut bad = good.clone();
            bad.0.get_mut(&decl.name).unwrap().0.shape.0.reverse();
            bad.0.get_mut(&decl.name).unwrap().0.shape.0.push(1);
            assert!(matches!(
                open(&bad, resident_bytes),
                Err(OracleError::TensorShape { name, .. }) if name == decl.name
            ));

            let mut bad = good.clone();
            bad.0.get_mut(&decl.name).unwrap().1.pop();
            assert!(matches!(
                open(&bad, resident_bytes),
                Err(OracleError::TensorBytes { name, .. }) if name == decl.name
            ));
        }
        // Rows of 40 are no whole blocks of 256.
        let mut bad = good.clone();
        bad.0.get_mut("layers.1.ffn.up.weight").unwrap().0.dtype = DType::TQ2_0;
        let error = open(&bad, resident_bytes).unwrap_err();
        assert!(matches!(&error, OracleError::Decode { .. }), "{error}");
    }
}

#[test]
fn bytes_that_their_format_forbids_name_their_tensor() {
    let mut spec = everything();
    spec.hidden_size = 256;
    let mut weights = weights(&spec, 16);
    // Two bits a weight, of which 3 means nothing; the last two bytes are the scale.
    let mut block = [0u8; 66];
    block[40] = 0b0000_1100;
    let name = "layers.0.attn.k.weight";
    weights.insert(name, DType::TQ2_0, Shape::from([24, 256]), block.repeat(24));
    let open = |resident_bytes| {
        let options = OracleOptions {
            resident_bytes,
            ..options(8)
        };
        Oracle::new(&spec, &weights, options)?.forward(&[&[1, 2]], Rows::Last)
    };
    for resident_bytes in [0, usize::MAX] {
        match open(resident_bytes) {
            Err(OracleError::Decode { name: culprit, .. }) => assert_eq!(culprit, name),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn logits_that_are_not_finite_have_no_likeliest_token() {
    let spec = everything();
    let mut weights = weights(&spec, 17);
    let embed = &mut weights.0.get_mut("embed.weight").unwrap().1;
    embed[7 * 160..7 * 160 + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let oracle = Oracle::new(&spec, &weights, options(8)).unwrap();
    assert!(oracle.greedy(&[&[6]], 1, &BTreeSet::new()).is_ok());
    let error = oracle.greedy(&[&[7]], 1, &BTreeSet::new()).unwrap_err();
    assert!(
        matches!(error, OracleError::NotFinite { index: 0, .. }),
        "{error}"
    );
}
