//! What callers ask for: reuse, rollback, stops, forced tokens, scores, errors.

mod common;

use std::{collections::BTreeSet, ops::ControlFlow};

use carat_engine::{
    Engine, EngineError, EngineOptions, GenerateOptions, LogitRows, SamplingOptions, Schedule,
    StopReason,
};
use carat_kernels::Isa;
use carat_model::{
    ActPrecision, KvFormat, ModelError,
    cpu::{CpuBackend, CpuOptions},
};
use common::{engine, golden, open, weights};

fn small() -> Engine {
    let checkpoint = open(&golden("llama-gqa-headdim"));
    let packed = weights(&checkpoint);
    engine(&checkpoint, &packed, Isa::best(), 2, ActPrecision::Int8)
}

/// An engine that keeps to the declared context.
fn strict() -> Engine {
    let checkpoint = open(&golden("llama-gqa-headdim"));
    let options = CpuOptions {
        isa: Isa::best(),
        threads: 1,
        precision: ActPrecision::Int8,
        kv: KvFormat::F16,
    };
    let backend = CpuBackend::new(&checkpoint.spec, weights(&checkpoint), options).unwrap();
    Engine::new(Box::new(backend), EngineOptions::default())
}

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 29 + 3) % 384).collect()
}

fn options(n: usize) -> GenerateOptions {
    GenerateOptions {
        max_new_tokens: n,
        ..GenerateOptions::default()
    }
}

fn go_on(_: carat_engine::Emitted) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn a_reused_prefix_gives_the_same_answer() {
    let mut engine = small();
    let mut fresh = engine.open(512).unwrap();
    let long = prompt(150);
    let expected = engine
        .generate(&mut fresh, &long, &options(12), &mut go_on)
        .unwrap();
    assert_eq!(expected.reused_tokens, 0);

    let mut kept = engine.open(512).unwrap();
    engine
        .generate(&mut kept, &prompt(100), &options(5), &mut go_on)
        .unwrap();
    let again = engine
        .generate(&mut kept, &long, &options(12), &mut go_on)
        .unwrap();
    assert_eq!(again.reused_tokens, 100);
    assert_eq!(again.ids, expected.ids);
    // The same prompt again: its last token is run, nothing else.
    let third = engine
        .generate(&mut kept, &long, &options(12), &mut go_on)
        .unwrap();
    assert_eq!((third.reused_tokens, &third.ids), (149, &expected.ids));
}

#[test]
fn rollback_equals_never_having_gone_there() {
    let mut engine = small();
    let mut straight = engine.open(512).unwrap();
    engine
        .prefill(&mut straight, &prompt(70), &Schedule::every(70).unwrap())
        .unwrap();
    let expected = engine
        .step(&mut straight, &[9], LogitRows::Last)
        .unwrap()
        .to_vec();

    let mut wandering = engine.open(512).unwrap();
    engine
        .prefill(&mut wandering, &prompt(70), &Schedule::every(70).unwrap())
        .unwrap();
    engine
        .step(&mut wandering, &[1, 2, 3, 4, 5, 6, 7, 8], LogitRows::None)
        .unwrap();
    wandering.truncate(70).unwrap();
    assert_eq!(
        engine.step(&mut wandering, &[9], LogitRows::Last).unwrap(),
        expected
    );
}

#[test]
fn a_stop_id_ends_the_answer_and_is_its_last_id() {
    let mut engine = small();
    let mut sequence = engine.open(512).unwrap();
    let free = engine
        .generate(&mut sequence, &prompt(20), &options(20), &mut go_on)
        .unwrap();
    assert_eq!((free.ids.len(), free.stop_reason), (20, StopReason::Length));
    let stop = free.ids[7];
    let first = free.ids.iter().position(|id| *id == stop).unwrap();
    let with_stop = GenerateOptions {
        stop_ids: BTreeSet::from([stop]),
        ..options(20)
    };
    let mut seen = vec![];
    let stopped = engine
        .generate(&mut sequence, &prompt(20), &with_stop, &mut |e| {
            seen.push((e.id, e.is_stop));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(stopped.ids, free.ids[..=first]);
    assert_eq!(stopped.stop_reason, StopReason::Eos);
    assert_eq!(seen.last(), Some(&(stop, true)));
    let ignored = GenerateOptions {
        ignore_eos: true,
        ..with_stop
    };
    let run = engine
        .generate(&mut sequence, &prompt(20), &ignored, &mut go_on)
        .unwrap();
    assert_eq!(run.ids, free.ids);
}

#[test]
fn the_consumer_can_stop() {
    let mut engine = small();
    let mut sequence = engine.open(512).unwrap();
    let mut count = 0;
    let out = engine
        .generate(&mut sequence, &prompt(20), &options(20), &mut |_| {
            count += 1;
            if count == 3 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .unwrap();
    assert_eq!((out.ids.len(), out.stop_reason), (3, StopReason::Stop));
}

#[test]
fn a_long_prompt_can_be_broken_off_and_taken_up_again() {
    let mut engine = small();
    let mut fresh = engine.open(512).unwrap();
    let mut request = options(4);
    request.schedule = Some(Schedule::every(32).unwrap());
    let long = prompt(200);
    let mut told = vec![];
    let expected = engine
        .generate_with(
            &mut fresh,
            &long,
            &request,
            &mut |done| {
                told.push(done);
                ControlFlow::Continue(())
            },
            &mut go_on,
        )
        .unwrap();
    assert_eq!(told, [32, 64, 96, 128, 160, 192, 200]);

    let mut broken = engine.open(512).unwrap();
    for most in [4, 0] {
        let request = GenerateOptions {
            max_new_tokens: most,
            ..request.clone()
        };
        let mut stop = |_| ControlFlow::Break(());
        let out = engine
            .generate_with(&mut broken, &long, &request, &mut stop, &mut |_| {
                panic!("no token follows")
            })
            .unwrap();
        assert_eq!((out.ids.len(), out.stop_reason), (0, StopReason::Stop));
        assert_eq!(out.prompt_tps(), 0.0);
    }
    assert_eq!(broken.len(), 64);
    let resumed = engine
        .generate(&mut broken, &long, &request, &mut go_on)
        .unwrap();
    assert_eq!((resumed.reused_tokens, &resumed.ids), (64, &expected.ids));
}

#[test]
fn a_budget_beyond_all_numbers_ends_with_the_context() {
    let mut engine = small();
    let mut sequence = engine.open(40).unwrap();
    let out = engine
        .generate(&mut sequence, &prompt(20), &options(usize::MAX), &mut go_on)
        .unwrap();
    assert_eq!((out.ids.len(), out.stop_reason), (20, StopReason::Length));
    let mut endless = engine.open(usize::MAX).unwrap();
    let request = options(usize::MAX);
    let error = engine
        .generate(&mut endless, &prompt(20), &request, &mut go_on)
        .unwrap_err();
    assert!(
        matches!(error, EngineError::Model(ModelError::CacheTooLong { .. })),
        "{error}"
    );
}

#[test]
fn forced_tokens_are_fed_and_the_argmax_is_told() {
    let mut engine = small();
    let mut sequence = engine.open(512).unwrap();
    let free = engine
        .generate(&mut sequence, &prompt(20), &options(6), &mut go_on)
        .unwrap();
    let mut forced = free.ids.clone();
    forced[3] = (forced[3] + 1) % 384;
    let request = GenerateOptions {
        force: Some(forced.clone()),
        rankings: true,
        ..options(50)
    };
    let out = engine
        .generate(&mut sequence, &prompt(20), &request, &mut go_on)
        .unwrap();
    assert_eq!(out.ids, forced);
    assert_eq!(out.argmax[..4], free.ids[..4]);
    assert_eq!(out.rankings.len(), 6);
}

#[test]
fn the_context_is_filled_to_the_last_token_and_no_further() {
    let mut engine = small();
    let mut sequence = engine.open(25).unwrap();
    let out = engine
        .generate(&mut sequence, &prompt(20), &options(100), &mut go_on)
        .unwrap();
    // 20 prompt tokens and 5 more fill it; the last one chosen is not run.
    assert_eq!((out.ids.len(), sequence.len()), (5, 24));
    let checkpoint = open(&golden("llama-gqa-headdim"));
    let oracle = carat_oracle::Oracle::new(
        &checkpoint.spec,
        checkpoint.tensors.as_ref(),
        carat_oracle::OracleOptions::new(25),
    )
    .unwrap();
    let answers = oracle.greedy(&[&prompt(20)], 100, &BTreeSet::new());
    assert_eq!(answers.unwrap()[0].len(), 5, "the oracle ends there too");
    for (length, most) in [(25, 1), (25, 7), (26, 0)] {
        let full = engine.generate(&mut sequence, &prompt(length), &options(most), &mut go_on);
        assert!(
            matches!(full, Err(EngineError::PromptTooLong { context: 25, .. })),
            "{length} {most}"
        );
    }
    let nothing = engine.generate(&mut sequence, &prompt(25), &options(0), &mut go_on);
    assert_eq!((nothing.unwrap().ids.len(), sequence.len()), (0, 25));
    let error = engine
        .generate(&mut sequence, &prompt(26), &options(1), &mut go_on)
        .unwrap_err();
    assert!(
        matches!(
            error,
            EngineError::PromptTooLong {
                prompt: 26,
                context: 25
            }
        ),
        "{error}"
    );
}

#[test]
fn bad_requests_are_errors_that_name_the_culprit() {
    let mut engine = small();
    let mut sequence = engine.open(512).unwrap();
    assert!(matches!(
        engine.generate(&mut sequence, &[], &options(1), &mut go_on),
        Err(EngineError::EmptyPrompt)
    ));
    let error = engine
        .generate(&mut sequence, &[1, 384], &options(1), &mut go_on)
        .unwrap_err();
    assert!(
        matches!(
            error,
            EngineError::Model(ModelError::TokenOutOfRange {
                id: 384,
                row: 1,
                vocab: 384
            })
        ),
        "{error}"
    );
    let mut strict = strict();
    assert!(matches!(
        strict.open(1025),
        Err(EngineError::Model(ModelError::ContextTooLong {
            requested: 1025,
            max: 1024
        }))
    ));
    let hot = GenerateOptions {
        sampling: SamplingOptions {
            temperature: -1.0,
            ..Default::default()
        },
        ..options(1)
    };
    assert!(matches!(
        engine.generate(&mut sequence, &[1], &hot, &mut go_on),
        Err(EngineError::Sampling { .. })
    ));
    // The engine still works after every refusal.
    assert_eq!(
        engine
            .generate(&mut sequence, &[1], &options(2), &mut go_on)
            .unwrap()
            .ids
            .len(),
        2
    );
}

#[test]
fn a_score_is_the_sum_of_log_probabilities() {
    let mut engine = small();
    let context = prompt(30);
    let continuation: Vec<u32> = prompt(45)[30..].to_vec();
    let all: Vec<u32> = context.iter().chain(&continuation).copied().collect();
    let score = engine.score(&context, &continuation, 512).unwrap();
    let logits = engine
        .logits(&all, 512, &Schedule::every(1).unwrap())
        .unwrap();
    let mut expected = 0.0;
    for (i, id) in continuation.iter().enumerate() {
        let row = &logits[(29 + i) * 384..(30 + i) * 384];
        let norm: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
        expected += (f64::from(row[*id as usize]).exp() / norm).ln();
    }
    // Both sums are f64 over the same fp32 logits; only their order differs.
    assert!(
        (score.logprob - expected).abs() < 1e-9 * expected.abs(),
        "{score:?} {expected}"
    );
    assert_eq!(score.token_logprobs.len(), 15);
    assert!((score.perplexity - (-expected / 15.0).exp()).abs() < 1e-6);

    let mut sequence = engine.open(512).unwrap();
    let greedy = engine
        .generate(&mut sequence, &context, &options(5), &mut go_on)
        .unwrap();
    assert!(engine.score(&context, &greedy.ids, 512).unwrap().is_greedy);
    assert!(matches!(
        engine.score(&context, &[], 512),
        Err(EngineError::EmptyPrompt)
    ));
}

#[test]
fn two_sequences_do_not_disturb_each_other() {
    let mut engine = small();
    let mut alone = engine.open(512).unwrap();
    let expected = engine
        .generate(&mut alone, &prompt(80), &options(10), &mut go_on)
        .unwrap()
        .ids;
    engine.close(alone);
    let (mut a, mut b) = (engine.open(512).unwrap(), engine.open(512).unwrap());
    engine
        .prefill(&mut a, &prompt(40), &Schedule::every(13).unwrap())
        .unwrap();
    engine
        .prefill(&mut b, &[5; 200], &Schedule::every(64).unwrap())
        .unwrap();
    let ids = engine
        .generate(&mut a, &prompt(80), &options(10), &mut go_on)
        .unwrap()
        .ids;
    assert_eq!(ids, expected);
}
