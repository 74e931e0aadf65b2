//! Transcripts and fixtures as files: schemas, storage, and the second look without an
//! oracle.

mod common;

use carat_fidelity::{Fixture, Gate, Status, Transcript, Verdict};
use carat_model::ActPrecision;
use common::*;
use serde_json::Value;

#[test]
fn a_transcript_is_stored_and_checked_again_without_an_oracle() {
    let model = Model::open("wren-ternary-tq2_0.gguf");
    let oracle = model.oracle();
    let mut drafter = engine(&model.spec, &model.tensors);
    let prompts: Vec<_> = prompts(12).into_iter().take(3).collect();
    let fixture = model.fixture(model.cases(&oracle, &mut drafter, &prompts));
    let candidate = Candidate {
        engine: engine(&model.spec, &model.tensors),
        spec: &model.spec,
        tensors: &model.tensors,
        stops: &model.stops,
    };
    let transcript = gate(&model, &oracle, &fixture, candidate, &prompts[2].ids);
    assert!(transcript.verdict.passed(), "{:?}", transcript.reasons);

    let schema = committed("gate-transcript.schema.json", &Transcript::json_schema());
    let mut value: Value = serde_json::from_str(&transcript.to_json()).unwrap();
    assert_eq!(errors(&schema, &value), Vec::<String>::new());
    value["verdict"] = "FINE".into();
    assert!(!errors(&schema, &value).is_empty());
    let schema = committed("fixture.schema.json", &Fixture::json_schema());
    let value: Value = serde_json::from_str(&fixture.to_json()).unwrap();
    assert_eq!(errors(&schema, &value), Vec::<String>::new());

    let bundle = tempfile::tempdir().unwrap();
    let path = transcript.store(bundle.path()).unwrap();
    assert_eq!(path, bundle.path().join("gates/test.json"));
    let read = Transcript::read(&path).unwrap();
    assert_eq!(read, transcript);
    assert_eq!(transcript.store(bundle.path()).unwrap(), path, "replaced");

    let recheck = |tensors: &Tensors, recorded: &Transcript| {
        let gate = Gate {
            engine: &mut engine(&model.spec, tensors),
            spec: &model.spec,
            tensors,
            stops: &model.stops,
            precision: ActPrecision::Int8,
            record: record(),
            reference: None,
            text: &[],
            foreign: None,
            progress: &mut |_| {},
        };
        gate.recheck(recorded).unwrap()
    };
    let again = recheck(&model.tensors, &read);
    assert_eq!(again.verdict, transcript.verdict, "{:?}", again.reasons);
    assert_eq!(again.text, transcript.text);
    let seeded = again
        .checks
        .iter()
        .find(|c| c.name == "seeded_step")
        .unwrap();
    assert!(seeded.status == Status::Ok && seeded.detail.ends_with("(as recorded)"));
    // A second look at the second look is the same look.
    assert_eq!(recheck(&model.tensors, &again).verdict, again.verdict);

    // A record of other ids than the bundle gives is found out, and so is a bundle
    // that changed.
    let mut false_record = read.clone();
    false_record.cases[0].found[0] = Some(7);
    assert_eq!(
        recheck(&model.tensors, &false_record).verdict,
        Verdict::Fail
    );
    let mut damaged = model.tensors.clone();
    damaged.edit("layers.0.mixer_norm.weight", |w| w.fill(0.0));
    assert_eq!(recheck(&damaged, &read).verdict, Verdict::Fail);

    // Files whose parts do not belong together.
    let mut wrong = read.clone();
    wrong.fixture.cases[0].steps[0].margin = 0.5;
    let error = Transcript::parse(wrong.to_json().as_bytes(), "t.json").unwrap_err();
    assert!(
        error.to_string().contains("t.json: fixture_digest"),
        "{error}"
    );
    let mut wrong = read.clone();
    wrong.version = 2;
    assert!(Transcript::parse(wrong.to_json().as_bytes(), "t").is_err());
    assert!(Transcript::parse(b"{}", "t").is_err());
    assert!(Transcript::read(bundle.path()).is_err());
}
