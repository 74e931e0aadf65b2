use proptest::prelude::*;

use super::*;
use crate::formats;

const PACKED: [DType; 14] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::I8G16,
];

fn all() -> impl Iterator<Item = DType> {
    PACKED.into_iter().chain([DType::I8G32])
}

/// Deterministic bytes without structure.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15);
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Row-major bytes: noise, but only what an encoder could have written.
fn source(layout: &PackedLayout, seed: u64) -> Vec<u8> {
    let mut bytes = noise(layout.row_major_bytes(), seed);
    match layout.dtype() {
        // Code 3 does not exist: clear the low bit where both are set.
        DType::TQ2_0 => {
            for block in bytes.chunks_exact_mut(66) {
                let codes = block[..64].iter_mut();
                codes.for_each(|b| *b &= !(*b >> 1 & *b & 0x55));
            }
        }
        // A byte can state trits in more than one way: take the usual one.
        DType::TQ1_0 => {
            let plain = formats::tq1_0_to_tq2_0(&bytes).unwrap();
            bytes = formats::tq2_0_to_tq1_0(&plain).unwrap();
        }
        _ => {}
    }
    bytes
}

#[test]
fn support_is_what_the_list_says() {
    for dtype in DType::ALL {
        assert_eq!(supports(dtype), all().any(|d| d == dtype), "{dtype}");
    }
}

#[test]
fn a_block_of_a_panel_has_the_bits_of_16_row_major_blocks() {
    for dtype in all() {
        let g = geometry(dtype).unwrap();
        assert_eq!(g.block_columns, dtype.block_len(), "{dtype}");
        assert_eq!(g.block_bytes(), PANEL_ROWS * dtype.block_bytes(), "{dtype}");
        if !dtype.is_float() {
            // Codes of every block stay aligned to vectors.
            assert_eq!(g.blocks_per_chunk * g.block_bytes() % 64, 0, "{dtype}");
            assert_eq!(g.codes_bytes() % 64, 0, "{dtype}");
        }
    }
}

#[test]
fn panels_are_padded_and_blocks_tile_them() {
    for dtype in all() {
        for blocks in 1..6 {
            let layout = PackedLayout::new(dtype, 17, blocks * dtype.block_len()).unwrap();
            assert_eq!(layout.panels(), 2);
            assert_eq!(layout.panel_bytes() % PANEL_ALIGN, 0);
            let g = layout.geometry();
            let mut used = vec![0u8; layout.panel_bytes()];
            for b in 0..blocks {
                let (codes, fields) = g.block_at(b, blocks);
                used[codes..][..g.codes_bytes()]
                    .iter_mut()
                    .for_each(|u| *u += 1);
                used[fields..][..g.fields_bytes()]
                    .iter_mut()
                    .for_each(|u| *u += 1);
            }
            let size = blocks * g.block_bytes();
            assert!(used[..size].iter().all(|&u| u == 1), "{dtype}");
            assert!(used[size..].iter().all(|&u| u == 0), "{dtype}");
            assert!(layout.panel_bytes() - size < PANEL_ALIGN);
        }
    }
}

#[test]
fn wrong_input_is_named() {
    assert_eq!(
        PackedLayout::new(DType::Q2_K, 1, 256),
        Err(PackedError::Unsupported(DType::Q2_K))
    );
    assert!(matches!(
        PackedLayout::new(DType::Q8_0, 1, 33),
        Err(PackedError::PartialBlock {
            columns: 33,
            block: 32,
            ..
        })
    ));
    assert!(matches!(
        PackedLayout::new(DType::F32, usize::MAX, usize::MAX),
        Err(PackedError::Overflow { .. })
    ));
    assert!(matches!(
        PackedLayout::new(DType::F32, 0, 4),
        Err(PackedError::Empty { .. })
    ));
    let layout = PackedLayout::new(DType::Q8_0, 3, 64).unwrap();
    let error = PackedRef::new(layout, &[0; 7]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "packed matrix of Q8_0 [3, 64] has 7 bytes, expected 1088"
    );
    let mut out = vec![0; layout.bytes()];
    assert!(pack(&layout, &[0; 3 * 68 - 1], &mut out).is_err());
    assert!(pack(&layout, &[0; 3 * 68], &mut out[1..]).is_err());
    assert!(unpack(&layout, &out, &mut [0; 3]).is_err());
    assert!(unpack(&layout, &out[1..], &mut [0; 3 * 68]).is_err());
    assert!(matches!(
        pack_panels(&layout, &[0; 3 * 68], 1..2, &mut out),
        Err(PackedError::Panels { panels: 1, .. })
    ));
}

#[test]
fn ranges_of_panels_make_the_whole() {
    for dtype in all() {
        let layout = PackedLayout::new(dtype, 50, 3 * dtype.block_len()).unwrap();
        let source = noise(layout.row_major_bytes(), 3);
        let mut whole = vec![0xa5; layout.bytes()];
        pack(&layout, &source, &mut whole).unwrap();
        let mut parts = vec![0x5a; layout.bytes()];
        let (a, b) = parts.split_at_mut(layout.panel_bytes());
        pack_panels(&layout, &source, 1..4, b).unwrap();
        pack_panels(&layout, &source, 0..1, a).unwrap();
        assert!(whole == parts, "{dtype}");
    }
}

/// The documented place of single codes, computed independently of the words.
#[test]
fn codes_are_where_the_layout_says() {
    // Q8_0: column 5 of row 3 is byte 3 * 4 + 1 of vector 1, plus 128.
    let layout = PackedLayout::new(DType::Q8_0, 16, 64).unwrap();
    let mut source = vec![0; layout.row_major_bytes()];
    source[3 * 68 + 2 + 5] = (-7i8) as u8;
    source[3 * 68 + 34] = 0x11; // scale of block 1
    source[3 * 68 + 35] = 0x22;
    let mut out = vec![0; layout.bytes()];
    pack(&layout, &source, &mut out).unwrap();
    assert_eq!(out[64 + 3 * 4 + 1], 121);
    assert_eq!(out[1024 + 32 + 3 * 2..][..2], [0x11, 0x22]);

    // Q6_K: column 100 of row 2 is step 1 of unit 3: low nibbles of vector
    // 4 * 3 + 1, and bits 2..4 of top-bit vector 2 * 3.
    let layout = PackedLayout::new(DType::Q6_K, 16, 256).unwrap();
    let mut source = vec![0; layout.row_major_bytes()];
    let row = &mut source[2 * 210..][..210];
    row[32 + 4] = 0xb0; // third quarter of the half: the high nibble of ql[36]
    row[128 + 4] = 0x80; // top bits 2
    row[192 + 6] = 0x99; // sub-scale of columns 96..112
    let mut out = vec![0; layout.bytes()];
    pack(&layout, &source, &mut out).unwrap();
    assert_eq!(out[13 * 64 + 2 * 4], 0x0b);
    assert_eq!(out[2048 + 6 * 64 + 2 * 4], 0x08);
    assert_eq!(out[3072 + 6 * 16 + 2], 0x99);
    assert_eq!(out.iter().filter(|&&b| b != 0).count(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn unpack_inverts_pack(
        dtype in prop::sample::select(all().collect::<Vec<_>>()),
        rows in 1usize..40,
        blocks in 1usize..6,
        seed: u64,
    ) {
        let layout = PackedLayout::new(dtype, rows, blocks * dtype.block_len()).unwrap();
        let source = source(&layout, seed);
        let mut packed = vec![0xff; layout.bytes()];
        pack(&layout, &source, &mut packed).unwrap();
        let mut back = vec![0xff; source.len()];
        unpack(&layout, &packed, &mut back).unwrap();
        prop_assert_eq!(source, back);
    }

    #[test]
    fn a_row_read_equals_the_decoded_row(
        dtype in prop::sample::select(all().collect::<Vec<_>>()),
        rows in 1usize..20,
        blocks in 1usize..4,
        seed: u64,
    ) {
        let layout = PackedLayout::new(dtype, rows, blocks * dtype.block_len()).unwrap();
        let source = source(&layout, seed);
        let mut packed = vec![0; layout.bytes()];
        pack(&layout, &source, &mut packed).unwrap();
        let weight = PackedRef::new(layout, &packed).unwrap();
        let mut decoded = vec![0.0; rows * layout.columns()];
        formats::decode(dtype, &source, &mut decoded).unwrap();
        let mut values = vec![0.0; layout.columns()];
        for (row, decoded) in decoded.chunks_exact(layout.columns()).enumerate() {
            read_row(weight, row, &mut values);
            for (&a, &b) in values.iter().zip(decoded) {
                prop_assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{a} {b}");
            }
        }
    }

    /// Whatever bytes state them, the trits and scales are the same.
    #[test]
    fn trits_and_scales_survive_any_bytes(blocks in 1usize..4, seed: u64) {
        let layout = PackedLayout::new(DType::TQ1_0, 3, blocks * 256).unwrap();
        let bytes = noise(layout.row_major_bytes(), seed);
        let mut packed = vec![0; layout.bytes()];
        pack(&layout, &bytes, &mut packed).unwrap();
        let mut back = vec![0; bytes.len()];
        unpack(&layout, &packed, &mut back).unwrap();
        prop_assert_eq!(
            formats::tq1_0_to_tq2_0(&bytes).unwrap(),
            formats::tq1_0_to_tq2_0(&back).unwrap()
        );
    }

    #[test]
    fn a_row_read_equals_its_groups(
        dtype in prop::sample::select(all().filter(|d| !d.is_float()).collect::<Vec<_>>()),
        blocks in 1usize..4,
        row in 0usize..20,
        seed: u64,
    ) {
        let layout = PackedLayout::new(dtype, 20, blocks * dtype.block_len()).unwrap();
        let source = source(&layout, seed);
        let mut packed = vec![0; layout.bytes()];
        pack(&layout, &source, &mut packed).unwrap();
        let weight = PackedRef::new(layout, &packed).unwrap();
        let mut values = vec![0.0; layout.columns()];
        read_row(weight, row, &mut values);
        let g = layout.geometry();
        let mut group = Group::default();
        for (i, values) in values.chunks(g.group_columns).enumerate() {
            expand_group(weight, row / 16, i, &mut group);
            let (scale, min) = (group.scales[row % 16], group.mins[row % 16]);
            for (c, &value) in values.iter().enumerate() {
                let code = group.codes[c / 4][4 * (row % 16) + c % 4];
                let mut expected = scale * (i32::from(code) - g.code_offset) as f32;
                if g.has_min {
                    expected += min;
                }
                prop_assert!(expected.to_bits() == value.to_bits() || expected.is_nan() && value.is_nan());
            }
        }
    }
}

/// What the fields of a panel say is what its rows say, for each place of a fault.
#[test]
fn weights_that_are_no_numbers_show_in_the_panel() {
    for dtype in all() {
        let mut found = [0usize; 2];
        for seed in 0..200 {
            let g = geometry(dtype).unwrap();
            let columns = g.block_columns * (1 + seed as usize % 3);
            let layout = PackedLayout::new(dtype, 1 + seed as usize % PANEL_ROWS, columns).unwrap();
            let mut bytes = source(&layout, seed);
            // Random fp16 are seldom all finite: zeros but for some blocks.
            let mut blocks = bytes.chunks_exact_mut(dtype.block_bytes());
            blocks
                .by_ref()
                .skip(usize::from(seed % 2 == 0))
                .for_each(|b| {
                    if dtype != DType::TQ1_0 {
                        b.fill(0);
                    } else {
                        b[52..].fill(0);
                    }
                });
            let mut packed = vec![0; layout.bytes()];
            pack(&layout, &bytes, &mut packed).unwrap();
            let finite = formats::check_finite(dtype, &bytes).is_ok();
            let plain = panel_is_plainly_finite(&layout, &packed);
            assert!(finite || !plain, "{dtype} seed {seed}");
            // Only fp32 scales are judged with more caution than needed.
            assert!(
                plain || !finite || g.fields == SINGLES,
                "{dtype} seed {seed}"
            );
            found[usize::from(plain)] += 1;
        }
        assert!(found[1] > 0, "{dtype}: {found:?}");
        // In each field of each row of the last block.
        let layout = PackedLayout::new(dtype, 3, 2 * dtype.block_len()).unwrap();
        let (len, rows) = (dtype.block_bytes(), 3);
        let bad: &[(usize, &[u8])] = match dtype {
            DType::F32 => &[(0, &[0, 0, 0x80, 0x7f])],
            DType::F16 => &[(0, &[0, 0x7c])],
            DType::BF16 => &[(0, &[0x80, 0x7f])],
            DType::I8G16 | DType::I8G32 => &[(0, &[0, 0, 0x80, 0x7f]), (4, &[0, 0, 0xc0, 0x7f])],
            DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => {
                &[(0, &[0, 0x7c]), (2, &[1, 0xfc])]
            }
            DType::Q6_K => &[(208, &[0, 0x7e])],
            DType::TQ1_0 => &[(52, &[0, 0x7e])],
            DType::TQ2_0 => &[(64, &[0, 0x7e])],
            _ => &[(0, &[0, 0x7e])],
        };
        for (row, (at, value)) in (0..rows).flat_map(|r| bad.iter().map(move |b| (r, b))) {
            let mut bytes = vec![0; layout.row_major_bytes()];
            bytes[(2 * row + 1) * len + at..][..value.len()].copy_from_slice(value);
            let mut packed = vec![0; layout.bytes()];
            pack(&layout, &bytes, &mut packed).unwrap();
            assert!(
                !panel_is_plainly_finite(&layout, &packed),
                "{dtype} row {row} at {at}"
            );
        }
    }
}
