//! A plan is lowered for rows, not for one sequence: a batch of several
//! sequences gives each the bits it would have alone, and a batch whose arrays
//! contradict each other is an error, never a wrong result.

use std::{path::Path, sync::Arc};

use carat_kernels::Isa;
use carat_model::{
    ActPrecision, BLOCK_TOKENS, Backend, Batch, BatchSequence, KvFormat, MemoryWeights, ModelError,
    Output, StepOutput,
    cpu::{CpuBackend, CpuOptions},
};

fn backend(case: &str) -> CpuBackend {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden")
        .join(case);
    let checkpoint = carat_import::open(&path).unwrap();
    let weights =
        MemoryWeights::from_source(&checkpoint.spec, checkpoint.tensors.as_ref()).unwrap();
    let options = CpuOptions {
        isa: Isa::best(),
        threads: 2,
        precision: ActPrecision::Int8,
        kv: KvFormat::F16,
    };
    let mut backend = CpuBackend::new(&checkpoint.spec, Arc::new(weights), options).unwrap();
    backend.grow_kv(16).unwrap();
    backend
}

/// Rows of one sequence: ids from `first` on, in the given blocks.
struct Part<'a> {
    ids: &'a [u32],
    first: u32,
    blocks: &'a [u32],
}

fn slot(blocks: &[u32], position: u32) -> u32 {
    let tile = BLOCK_TOKENS as u32;
    blocks[(position / tile) as usize] * tile + position % tile
}

/// Runs the parts in one step; logits of every row.
fn step(backend: &mut CpuBackend, parts: &[Part<'_>]) -> StepOutput {
    let (mut ids, mut positions, mut slots, mut sequences) = (vec![], vec![], vec![], vec![]);
    for (n, part) in parts.iter().enumerate() {
        sequences.push(BatchSequence {
            start: ids.len(),
            blocks: part.blocks,
            capacity: 512,
            state_slot: n as u32,
        });
        for (i, id) in part.ids.iter().enumerate() {
            let position = part.first + i as u32;
            ids.push(*id);
            positions.push(position);
            slots.push(slot(part.blocks, position));
        }
    }
    let logit_rows: Vec<u32> = (0..ids.len() as u32).collect();
    let batch = Batch {
        token_ids: &ids,
        positions: &positions,
        slot_mapping: &slots,
        sequences: &sequences,
        logit_rows: &logit_rows,
    };
    let mut out = StepOutput::default();
    let wanted = [Output::Logits, Output::FinalHidden, Output::Residual(1)];
    backend.step(&batch, &wanted, &mut out).unwrap();
    out
}

#[test]
fn sequences_of_a_batch_have_the_bits_they_have_alone() {
    for case in [
        "qwen3-qknorm",
        "mistral-sliding",
        "minicpm4/minicpm4-tq2_0.gguf",
    ] {
        let long: Vec<u32> = (0..150u32).map(|i| (i * 31 + 2) % 384).collect();
        let short: Vec<u32> = (0..9u32).map(|i| (i * 17 + 5) % 384).collect();
        // Blocks out of order and interleaved between the two.
        let (a, b): (&[u32], &[u32]) = (&[7, 2, 9], &[3, 8]);

        let mut alone = backend(case);
        let parts = |ids, blocks| Part {
            ids,
            first: 0,
            blocks,
        };
        let first = step(&mut alone, &[parts(&long[..100], a)]);
        let rest = step(
            &mut alone,
            &[Part {
                ids: &long[100..],
                first: 100,
                blocks: a,
            }],
        );
        let other = step(&mut alone, &[parts(&short, b)]);

        let mut together = backend(case);
        let both = step(
            &mut together,
            &[parts(&long[..100], a), parts(&short[..4], b)],
        );
        let tails = step(
            &mut together,
            &[
                Part {
                    ids: &short[4..],
                    first: 4,
                    blocks: b,
                },
                Part {
                    ids: &long[100..],
                    first: 100,
                    blocks: a,
                },
            ],
        );
        for output in [Output::Logits, Output::FinalHidden, Output::Residual(1)] {
            let bits = |o: &StepOutput| -> Vec<u32> {
                o.values[&output].iter().map(|x| x.to_bits()).collect()
            };
            let joined = |a: &StepOutput, b: &StepOutput| [bits(a), bits(b)].concat();
            let width = bits(&other).len() / short.len();
            let (head, tail) = (4 * width, (short.len() - 4) * width);
            let expected = joined(&first, &other);
            assert_eq!(
                bits(&both),
                expected[..bits(&both).len()],
                "{case} {output:?}"
            );
            let mut expected = bits(&other)[head..].to_vec();
            assert_eq!(expected.len(), tail);
            expected.extend(bits(&rest));
            assert_eq!(bits(&tails), expected, "{case} {output:?}");
        }
    }
}

#[test]
fn contradictory_batches_are_errors() {
    let mut backend = backend("llama-gqa-headdim");
    let blocks = [0u32, 1];
    let sequence = BatchSequence {
        start: 0,
        blocks: &blocks,
        capacity: 100,
        state_slot: 0,
    };
    let good = Batch {
        token_ids: &[1, 2],
        positions: &[0, 1],
        slot_mapping: &[0, 1],
        sequences: &[sequence],
        logit_rows: &[1],
    };
    let mut out = StepOutput::default();
    backend.step(&good, &[Output::Logits], &mut out).unwrap();
    let beyond = [BatchSequence {
        capacity: 1,
        ..sequence
    }];
    let unknown = [BatchSequence {
        blocks: &[99, 1],
        ..sequence
    }];
    let late = [BatchSequence {
        start: 1,
        ..sequence
    }];
    let empty = [
        sequence,
        BatchSequence {
            start: 2,
            ..sequence
        },
    ];
    let twice = [BatchSequence {
        blocks: &[0, 0],
        ..sequence
    }];
    let shared = [
        sequence,
        BatchSequence {
            start: 1,
            blocks: &[3, 0],
            ..sequence
        },
    ];
    let same = [
        sequence,
        BatchSequence {
            start: 1,
            ..sequence
        },
    ];
    for (bad, says) in [
        (
            Batch {
                positions: &[0, 7],
                slot_mapping: &[0, 7],
                ..good
            },
            "row 1 at position 7 follows position 0",
        ),
        (
            Batch {
                positions: &[1, 1],
                slot_mapping: &[1, 1],
                ..good
            },
            "row 1 at position 1 follows position 1",
        ),
        (
            Batch {
                sequences: &twice,
                ..good
            },
            "sequence 0 names block 0, which is written at another place",
        ),
        (
            Batch {
                positions: &[0, 0],
                slot_mapping: &[0, 192],
                sequences: &shared,
                ..good
            },
            "sequence 1 names block 0",
        ),
        (
            Batch {
                positions: &[0, 0],
                slot_mapping: &[0, 0],
                sequences: &same,
                ..good
            },
            "sequence 1 names block 0",
        ),
        (
            Batch {
                token_ids: &[1, 384],
                ..good
            },
            "token id 384 at row 1",
        ),
        (
            Batch {
                token_ids: &[],
                positions: &[],
                slot_mapping: &[],
                ..good
            },
            "no rows",
        ),
        (
            Batch {
                positions: &[0],
                ..good
            },
            "2 ids, 1 positions",
        ),
        (
            Batch {
                positions: &[0, 2],
                ..good
            },
            "row 1 at position 2 has slot 1",
        ),
        (
            Batch {
                slot_mapping: &[0, 5],
                ..good
            },
            "has slot 5",
        ),
        (
            Batch {
                sequences: &beyond,
                ..good
            },
            "opened for 1 tokens cannot hold 2",
        ),
        (
            Batch {
                sequences: &unknown,
                ..good
            },
            "block 99 of 16",
        ),
        (
            Batch {
                sequences: &late,
                ..good
            },
            "does not start at row 0",
        ),
        (
            Batch {
                sequences: &empty,
                ..good
            },
            "sequence 1 has rows 2..2",
        ),
        (
            Batch {
                sequences: &[],
                ..good
            },
            "does not start at row 0",
        ),
        (
            Batch {
                logit_rows: &[2],
                ..good
            },
            "logit row 2 of 2 rows",
        ),
    ] {
        let error: ModelError = backend.step(&bad, &[Output::Logits], &mut out).unwrap_err();
        assert!(
            error.to_string().contains(says),
            "{error} does not say {says:?}"
        );
    }
    backend.step(&good, &[Output::Logits], &mut out).unwrap();
    // A block that both only read may be shared.
    let prefix = [
        BatchSequence {
            blocks: &[5, 0],
            ..sequence
        },
        BatchSequence {
            start: 1,
            blocks: &[5, 1],
            ..sequence
        },
    ];
    let sharing = Batch {
        positions: &[64, 64],
        slot_mapping: &[0, 64],
        sequences: &prefix,
        ..good
    };
    backend.step(&sharing, &[Output::Logits], &mut out).unwrap();
}
