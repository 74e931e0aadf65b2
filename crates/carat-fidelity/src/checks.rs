//! What must hold beside the answers.

use carat_engine::{Engine, LogitRows, Schedule};
use carat_oracle::{NoTaps, Oracle, Rows};

use crate::draft::no_best;
use crate::fixture::{Case, CaseKind, Fixture};
use crate::transcript::{Check, Status};
use crate::{FidelityError, row};

/// Tokens of the chunk check: past a context bucket of 256, four prefill chunks and
/// four tiles of attention.
const CHUNK_TOKENS: usize = 290;

/// A prompt in chunks gives the bits that it gives token by token.
pub(crate) fn chunks(
    engine: &mut Engine,
    ids: &[u32],
    capacity: usize,
) -> Result<Check, FidelityError> {
    const NAME: &str = "chunked_equals_single";
    let ids = &ids[..ids.len().min(CHUNK_TOKENS)];
    let singles = row_digests(engine, ids, capacity, &Schedule::every(1)?)?;
    for schedule in [engine.schedule(), Schedule::new(vec![64, 1, 16])?] {
        let found = row_digests(engine, ids, capacity, &schedule)?;
        if let Some(at) = singles.iter().zip(&found).position(|(a, b)| a != b) {
            let detail = format!("row {at} of {} differs under {schedule:?}", ids.len());
            return Ok(Check::holds(NAME, false, detail));
        }
    }
    let detail = format!("{} rows, bit by bit, two schedules", ids.len());
    Ok(Check::holds(NAME, true, detail))
}

/// Digest of the bits of each row's logits.
fn row_digests(
    engine: &mut Engine,
    ids: &[u32],
    capacity: usize,
    schedule: &Schedule,
) -> Result<Vec<blake3::Hash>, FidelityError> {
    let vocab = engine.vocab_size();
    let mut sequence = engine.open(capacity)?;
    let mut digests = Vec::with_capacity(ids.len());
    for chunk in schedule.chunks(ids.len()) {
        let logits = engine.step(&mut sequence, &ids[chunk], LogitRows::All)?;
        for row in logits.chunks_exact(vocab) {
            let mut hasher = blake3::Hasher::new();
            for v in row {
                hasher.update(&v.to_le_bytes());
            }
            digests.push(hasher.finalize());
        }
    }
    engine.close(sequence);
    Ok(digests)
}

/// One step of the engine on the oracle's keys and values, at a clear step of
/// every answer: what disagrees here is weights or arithmetic, not the states.
pub(crate) fn seeded(
    oracle: &Oracle<'_>,
    engine: &mut Engine,
    fixture: &Fixture,
) -> Result<Check, FidelityError> {
    const NAME: &str = "seeded_step";
    let (mut judged, mut worst) = (0, 0f64);
    let mut wrong = Vec::new();
    for case in fixture.cases.iter().filter(|c| c.kind != CaseKind::Probe) {
        let Some(step) = middle_clear_step(case, fixture.floor) else {
            continue;
        };
        let ids = [&case.prompt_ids[..], &case.fed()[..step]].concat();
        let seeded = seeded_logits(oracle, engine, &ids)?;
        judged += 1;
        let found = row::argmax(&seeded.engine);
        if found != Some(case.steps[step].id) {
            wrong.push(format!("{} step {step}", case.name));
        }
        if let (Some(p), Some(q)) = (
            row::log_softmax(&seeded.oracle),
            row::log_softmax(&seeded.engine),
        ) {
            worst = worst.max(row::kl(&p, &q));
        }
    }
    if judged == 0 {
        let why = "no case has a clear step after a token";
        return Ok(Check::new(NAME, Status::Skipped, why));
    }
    let detail = match wrong.is_empty() {
        true => format!("{judged} steps agree, largest KL {worst:.2e}"),
        false => format!("differs at {}", wrong.join(", ")),
    };
    Ok(Check::holds(NAME, wrong.is_empty(), detail).value("kl_max", worst))
}

/// The clear step nearest to the middle of a case that has at least one token
/// before it to seed.
fn middle_clear_step(case: &Case, floor: f64) -> Option<usize> {
    let middle = case.steps.len() / 2;
    let steps = case.steps.iter().enumerate();
    steps
        .filter(|(i, s)| s.is_clear(floor) && case.prompt_ids.len() + i > 1)
        .min_by_key(|(i, _)| i.abs_diff(middle))
        .map(|(i, _)| i)
}

/// Logits after the same tokens.
pub(crate) struct Seeded {
    /// The oracle's.
    pub(crate) oracle: Vec<f32>,
    /// The engine's, whose states before the last token are the oracle's.
    pub(crate) engine: Vec<f32>,
}

fn seeded_logits(
    oracle: &Oracle<'_>,
    engine: &mut Engine,
    ids: &[u32],
) -> Result<Seeded, FidelityError> {
    let (last, before) = ids.split_last().expect("invariant: a prompt has tokens");
    let mut session = oracle.session();
    let id = session.open();
    session.extend(&[(id, before)], Rows::Some(&[]))?;
    let mut sequence = engine.open(oracle.capacity())?;
    let states: Vec<_> = (0..oracle.spec().layers.len())
        .filter_map(|layer| session.cache(id, layer))
        .map(|view| (view.keys, view.values))
        .collect();
    engine.seed(&mut sequence, before, &states)?;
    let engine_logits = engine
        .step(&mut sequence, &[*last], LogitRows::Last)?
        .to_vec();
    engine.close(sequence);
    let mut logits = Vec::new();
    session.extend_with(&[(id, &[*last])], Rows::Last, &mut NoTaps, &mut |row| {
        logits = row.logits.to_vec();
        row::argmax(row.logits)
            .map(drop)
            .ok_or_else(|| no_best(row.logits))
    })?;
    Ok(Seeded {
        oracle: logits,
        engine: engine_logits,
    })
}
