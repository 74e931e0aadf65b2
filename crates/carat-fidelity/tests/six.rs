//! The standing cases: what a gate has to say to six candidates.

mod common;

use carat_fidelity::{CaseKind, Fixture, Status, Verdict};
use common::*;

const WREN: &str = "wren-ternary-tq2_0.gguf";

fn status(transcript: &carat_fidelity::Transcript, name: &str) -> Status {
    let check = transcript.checks.iter().find(|c| c.name == name);
    check.unwrap_or_else(|| panic!("no check {name}")).status
}

#[test]
fn six_standing_cases() {
    let model = Model::open(WREN);
    let oracle = model.oracle();
    let mut drafter = engine(&model.spec, &model.tensors);
    let cases = model.cases(&oracle, &mut drafter, &prompts(40));
    let stopping: Vec<_> = cases
        .iter()
        .filter(|c| c.must_stop && c.knife_edges.is_empty())
        .take(2)
        .cloned()
        .collect();
    assert_eq!(stopping.len(), 2, "the set shrank");
    let fixture = model.fixture(stopping);
    let text = &prompts(1)[11].ids;
    let judge = |fixture: &Fixture, tensors: &Tensors, text: &[u32]| {
        let candidate = Candidate {
            engine: engine(&model.spec, tensors),
            spec: &model.spec,
            tensors,
            stops: &model.stops,
        };
        gate(&model, &oracle, fixture, candidate, text)
    };

    // 1. Clean.
    let clean = judge(&fixture, &model.tensors, text);
    assert_eq!(clean.verdict, Verdict::Pass, "{:?}", clean.reasons);
    assert_eq!(clean.red_first.len(), 3);
    assert!(clean.red_first.iter().all(|r| r.verdict == Verdict::Fail));
    for name in [
        "seeded_step",
        "vocabulary_rows",
        "head_logits",
        "chunked_equals_single",
    ] {
        assert_eq!(status(&clean, name), Status::Ok, "{name}");
    }
    assert_eq!(status(&clean, "cpu_equals_gpu"), Status::Skipped);
    let metrics = clean.text.as_ref().unwrap();
    assert!(
        metrics.kl.value < 0.01 && metrics.kl.value > 0.0,
        "{metrics:?}"
    );
    assert!(metrics.perplexity_candidate.value > 1.0);
    assert!(clean.ladder.is_none());

    // 2. One poisoned step.
    let mut poisoned = fixture.clone();
    poisoned.cases[0].steps[3].id = poisoned.cases[0].steps[3].second;
    poisoned.cases[0].steps[3].fed = Some(fixture.cases[0].steps[3].id);
    let red = judge(&poisoned, &model.tensors, &[]);
    assert_eq!(red.verdict, Verdict::Fail);
    assert_eq!(red.cases[0].teacher_forced.flips.len(), 1);
    assert_eq!(red.cases[1].verdict, Verdict::Pass);

    // 3. The upper half of the head is zero, and no answer needs it: ids of a case
    // that never leaves the lower half.
    let half = model.spec.vocab_size / 2;
    let low = |c: &&carat_fidelity::Case| {
        let mut steps = c.steps.iter();
        c.knife_edges.is_empty() && !c.must_stop && steps.all(|s| (s.id as usize) < half)
    };
    let short = model.cases(&oracle, &mut drafter, &prompts(6));
    let lower: Vec<_> = short.iter().filter(low).take(2).cloned().collect();
    assert!(!lower.is_empty(), "no answer stays in the lower half");
    let lower = model.fixture(lower);
    let mut deaf = model.tensors.clone();
    let width = model.spec.hidden_size;
    deaf.edit("head.weight", |w| w[half * width..].fill(0.0));
    let red = judge(&lower, &deaf, &[]);
    assert_eq!(red.verdict, Verdict::Fail);
    assert!(red.cases.iter().all(|c| c.verdict == Verdict::Pass));
    assert_eq!(status(&red, "vocabulary_rows"), Status::Fail);
    assert_eq!(status(&red, "seeded_step"), Status::Ok);
    let rows = red.checks.iter().find(|c| c.name == "vocabulary_rows");
    assert_eq!(rows.unwrap().values["rows_lost"], half as f64);

    // 4. The end of turn is damaged, so that a chat never stops.
    let mut endless = model.tensors.clone();
    let end = fixture.cases[0].steps.last().unwrap().id as usize;
    endless.edit("head.weight", |w| {
        w[end * width..(end + 1) * width]
            .iter_mut()
            .for_each(|v| *v *= -1.0);
    });
    let red = judge(&fixture, &endless, &[]);
    assert_eq!(red.verdict, Verdict::Fail);
    let run = red.cases[0].free_run.as_ref().unwrap();
    let last = fixture.cases[0].steps.len() - 1;
    assert_eq!((run.verdict, run.agreed), (Verdict::Fail, last));

    // A candidate that says the stop and does not know it runs past it as well.
    let ignorant = Candidate {
        engine: engine(&model.spec, &model.tensors),
        spec: &model.spec,
        tensors: &model.tensors,
        stops: &Default::default(),
    };
    let red = gate(&model, &oracle, &fixture, ignorant, &[]);
    assert_eq!(red.verdict, Verdict::Fail);
    assert!(
        red.reasons[0].contains("runs past its stop"),
        "{:?}",
        red.reasons
    );
    assert_eq!(red.cases[0].teacher_forced.verdict, Verdict::Pass);

    // 5. A flip on a knife-edge.
    let edged = cases
        .iter()
        .filter(|c| c.kind == CaseKind::List)
        .find(|c| !c.knife_edges.is_empty());
    let mut edged = edged.expect("no case has a knife-edge").clone();
    let edge = edged.knife_edges[0];
    edged.steps.truncate(edge + 1);
    edged.must_stop = false;
    let step = &mut edged.steps[edge];
    std::mem::swap(&mut step.id, &mut step.second);
    let mut knife = fixture.clone();
    edged.declare_knife_edges(knife.floor);
    knife.cases.push(edged.clone());
    let tie = judge(&knife, &model.tensors, &[]);
    assert_eq!(tie.verdict, Verdict::PassTie, "{:?}", tie.reasons);

    // 6. A weak prompt: the same knife-edge, which nobody declares.
    edged.knife_edges.clear();
    let weak = model.fixture(vec![edged]);
    let refused = judge(&weak, &model.tensors, &[]);
    assert_eq!(refused.verdict, Verdict::Refused);
    assert!(
        refused.reasons[0].contains("not declared"),
        "{:?}",
        refused.reasons
    );
    assert!(refused.cases.is_empty());
}
