//! Fixtures: what the oracle says, whoever drafted it, as a file.

mod common;

use carat_fidelity::{FidelityError, Fixture, Question, answer, follow};
use common::*;

#[test]
fn drafted_answers_equal_step_by_step() {
    let model = Model::open("wren-dense");
    let oracle = model.oracle();
    let prompts: Vec<_> = prompts(24).into_iter().step_by(5).collect();
    let ids: Vec<&[u32]> = prompts.iter().map(|p| p.ids.as_slice()).collect();
    let single = oracle.greedy(&ids, 24, &model.stops).unwrap();
    let questions: Vec<Question> = prompts
        .iter()
        .map(|p| Question {
            ids: p.ids.clone(),
            max_new_tokens: 24,
        })
        .collect();
    let mut engine = engine(&model.spec, &model.tensors);
    let stops = &model.stops;
    let mut asked = 0;
    type Draft<'d> = Box<dyn FnMut(&[u32], usize) -> Vec<u32> + 'd>;
    let drafters: [(&str, Draft<'_>); 4] = [
        ("none", Box::new(|_: &[u32], _| vec![])),
        ("wrong", Box::new(|_: &[u32], n| vec![7; n])),
        ("too long", Box::new(|_: &[u32], n| vec![7; n + 9])),
        (
            "engine",
            Box::new(|ids: &[u32], n| {
                asked += 1;
                draft(&mut engine, stops, ids, n)
            }),
        ),
    ];
    for (name, mut drafter) in drafters {
        let drafted = answer(&oracle, &questions, stops, &mut |_, ids, n| {
            Ok(drafter(ids, n))
        })
        .unwrap();
        for ((steps, single), prompt) in drafted.iter().zip(&single).zip(&prompts) {
            let found: Vec<u32> = steps.iter().map(|s| s.id).collect();
            let expected: Vec<u32> = single.iter().map(|s| s.id).collect();
            assert_eq!(found, expected, "{name}: {}", prompt.name);
            for (a, b) in steps.iter().zip(single) {
                // Files keep six decimals; the oracle's own margin is an f32.
                assert!((a.margin - f64::from(b.softmax_margin)).abs() < 1e-6);
                assert_eq!(a.second, b.second);
            }
        }
    }
    assert!(
        asked < 3 * questions.len(),
        "{asked} drafts: the engine's guesses are hardly used"
    );
}

#[test]
fn equal_inputs_give_equal_bytes_and_files_are_checked() {
    let model = Model::open("wren-ternary-tq2_0.gguf");
    let oracle = model.oracle();
    let make = || {
        let mut engine = engine(&model.spec, &model.tensors);
        let prompts: Vec<_> = prompts(12).into_iter().take(2).collect();
        model.fixture(model.cases(&oracle, &mut engine, &prompts))
    };
    let fixture = make();
    let json = fixture.to_json();
    assert_eq!(json, make().to_json());
    let read = Fixture::parse(json.as_bytes(), "f").unwrap();
    assert_eq!((read.digest(), &read), (fixture.digest(), &fixture));

    let problem = |change: &dyn Fn(&mut Fixture)| {
        let mut wrong = fixture.clone();
        change(&mut wrong);
        match Fixture::parse(wrong.to_json().as_bytes(), "f.json") {
            Err(error @ FidelityError::Malformed { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let vocab = model.spec.vocab_size as u32;
    for (change, says) in [
        (
            &(|f: &mut Fixture| f.schema = "x".into()) as &dyn Fn(&mut Fixture),
            "f.json: schema is x",
        ),
        (&|f| f.version = 2, "version is 2, expected 1"),
        (&|f| f.name = "../up".into(), "name is \"../up\""),
        (&|f| f.floor = 0.01, "floor is 0.01, expected 0.1"),
        (&|f| f.cases.clear(), "no cases"),
        (&|f| f.cases[0].prompt_ids.clear(), "has a prompt"),
        (&|f| f.cases[0].steps[0].id = vocab, "id 2056"),
        (&|f| f.cases[0].steps[0].fed = Some(vocab), "id 2056"),
        (&|f| f.cases[0].steps[0].margin = 1.5, "margin of 1.5"),
        (&|f| f.cases[0].knife_edges = vec![99], "knife-edge 99"),
        (&|f| f.reference.capacity = 3, "capacity is 3"),
        (&|f| f.stop_ids = vec![5], "must stop"),
    ] {
        let found = problem(change);
        assert!(found.contains(says), "{found}: no {says:?}");
    }
    let surprise = json.replacen("\"version\"", "\"surprise\": 1, \"version\"", 1);
    assert!(Fixture::parse(surprise.as_bytes(), "f").is_err());
}

#[test]
fn given_tokens_have_a_step_each() {
    let model = Model::open("wren-dense");
    let oracle = model.oracle();
    let ids = &prompts(1)[0].ids;
    let short = ids[..4].to_vec();
    let both = follow(&oracle, &[ids.clone(), short]).unwrap();
    let steps = &both[0];
    assert_eq!((steps.len(), both[1].len()), (ids.len() - 1, 3));
    assert_eq!(both[1][..2], steps[..2], "company changes nothing");
    let next: Vec<u32> = steps.iter().map(|s| s.next()).collect();
    assert_eq!(next, ids[1..]);
    assert!(steps.iter().any(|s| s.fed.is_some()));
}
