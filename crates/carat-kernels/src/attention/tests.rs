use half::f16;

use super::*;
use crate::{Isa, Pool};

/// What is written around an output must stay.
const CANARY: f32 = 1234.5;

fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            ((x >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 2.0
        })
        .collect()
}

/// Keys and values of one format.
enum Store {
    F16([Vec<u16>; 2]),
    F32([Vec<f32>; 2]),
}

const FORMATS: [KvFormat; 2] = [KvFormat::F16, KvFormat::F32];

impl Store {
    /// As many elements of each as asked for, all NaN.
    fn new(format: KvFormat, elements: usize) -> Store {
        match format {
            KvFormat::F16 => Store::F16([(); 2].map(|()| vec![f16::NAN.to_bits(); elements])),
            KvFormat::F32 => Store::F32([(); 2].map(|()| vec![f32::NAN; elements])),
        }
    }

    fn view(&self) -> KvView<'_> {
        match self {
            Store::F16([keys, values]) => KvView::F16 { keys, values },
            Store::F32([keys, values]) => KvView::F32 { keys, values },
        }
    }

    fn view_mut(&mut self) -> KvViewMut<'_> {
        match self {
            Store::F16([keys, values]) => KvViewMut::F16 { keys, values },
            Store::F32([keys, values]) => KvViewMut::F32 { keys, values },
        }
    }

    fn format(&self) -> KvFormat {
        match self {
            Store::F16(_) => KvFormat::F16,
            Store::F32(_) => KvFormat::F32,
        }
    }
}

/// A cache with sequences in scattered blocks. What was never written is NaN.
struct Cache {
    layout: KvLayout,
    store: Store,
    /// Block tables, one per sequence.
    blocks: Vec<Vec<u32>>,
    /// What was written, `[position, kv_heads, head_dim]` per sequence.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Cache {
    /// Sequences of the given lengths.
    fn new(format: KvFormat, layout: KvLayout, lengths: &[usize]) -> Cache {
        let row = layout.row_elements();
        let tiles: Vec<usize> = lengths.iter().map(|n| n.div_ceil(KV_TILE)).collect();
        let total: usize = tiles.iter().sum::<usize>() + 1;
        let mut cache = Cache {
            layout,
            store: Store::new(format, total * layout.block_elements()),
            blocks: Vec::new(),
            keys: Vec::new(),
            values: Vec::new(),
        };
        // Blocks are given out from the end and in turns, so that neither order
        // nor adjacency holds.
        let mut free: Vec<u32> = (0..total as u32).collect();
        for (sequence, (&n, &tiles)) in lengths.iter().zip(&tiles).enumerate() {
            let blocks: Vec<u32> = (0..tiles)
                .map(|i| free.remove(if i % 2 == 0 { free.len() - 1 } else { 0 }))
                .collect();
            let keys = random(n * row, 10 + sequence as u64);
            let values = random(n * row, 20 + sequence as u64);
            for p in 0..n {
                kv_write(
                    Isa::best(),
                    layout,
                    cache.store.view_mut(),
                    (blocks[p / KV_TILE] as usize, p % KV_TILE),
                    &keys[p * row..][..row],
                    &values[p * row..][..row],
                );
            }
            cache.blocks.push(blocks);
            cache.keys.push(keys);
            cache.values.push(values);
        }
        cache
    }

    fn row(&self, sequence: usize, position: usize) -> AttentionRow<'_> {
        AttentionRow {
            position: position as u32,
            blocks: &self.blocks[sequence],
        }
    }
}

/// What stays the same over the calls of a test.
#[derive(Clone, Copy)]
struct Case<'a> {
    cache: &'a Cache,
    heads: usize,
    scale: f32,
    window: Option<usize>,
    softcap: Option<f32>,
}

impl Case<'_> {
    fn run(&self, isa: Isa, threads: usize, rows: &[AttentionRow<'_>], q: &[f32]) -> Vec<f32> {
        let args = AttentionArgs {
            q,
            kv: self.cache.store.view(),
            layout: self.cache.layout,
            heads: self.heads,
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
            rows,
        };
        let mut out = vec![CANARY; q.len() + 2];
        let pool = Pool::new(threads);
        attention(isa, &pool, &args, &mut out[1..=q.len()]);
        assert_eq!((out[0], out[q.len() + 1]), (CANARY, CANARY));
        out[1..=q.len()].to_vec()
    }
}

#[track_caller]
fn assert_same(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let same = g.to_bits() == e.to_bits() || (g.is_nan() && e.is_nan());
        assert!(same, "{what}: element {i}: {g:e}, not {e:e}");
    }
}

/// Shapes: odd head dimensions, one and several queries per key head, more
/// queries than a pass takes.
const SHAPES: [(usize, usize, usize); 10] = [
    (1, 1, 16),
    (4, 2, 20),
    (3, 3, 32),
    (9, 3, 64),
    (7, 1, 80),
    (16, 1, 128),
    (2, 1, 256),
    (20, 2, 2),
    (3, 1, 6),
    (2, 2, 512),
];

/// Positions at the edges of tiles and segments.
const POSITIONS: [usize; 12] = [0, 1, 62, 63, 64, 65, 130, 1022, 1023, 1024, 1025, 2500];

fn layout(kv_heads: usize, head_dim: usize) -> KvLayout {
    KvLayout { kv_heads, head_dim }
}

/// The scalar form is slow; long contexts are for small heads.
fn longest(head_dim: usize) -> usize {
    if head_dim <= 64 { 2501 } else { 1100 }
}

/// Bits of the scalar twin for each shape and edge, alone and together, with
/// windows and caps.
fn check_against_scalar(isa: Isa) {
    for (format, (heads, kv_heads, hd)) in FORMATS
        .into_iter()
        .flat_map(|format| SHAPES.map(|shape| (format, shape)))
    {
        let cache = Cache::new(format, layout(kv_heads, hd), &[longest(hd), 40]);
        for (window, softcap) in [
            (None, None),
            (Some(1), None),
            (Some(64), Some(5.0)),
            (Some(100), None),
            (Some(1024), None),
            (None, Some(3.0)),
        ] {
            let case = Case {
                cache: &cache,
                heads,
                scale: 1.0 / (hd as f32).sqrt(),
                window,
                softcap,
            };
            let mut rows: Vec<AttentionRow<'_>> = POSITIONS
                .iter()
                .filter(|p| **p < longest(hd))
                .map(|p| cache.row(0, *p))
                .collect();
            rows.extend([cache.row(1, 5), cache.row(1, 39), cache.row(0, 77)]);
            let q = random(rows.len() * heads * hd, 30);
            let expected = case.run(Isa::Scalar, 1, &rows, &q);
            assert!(expected.iter().all(|x| x.is_finite()));
            let what = format!("{isa} {format:?} {heads}/{kv_heads}x{hd} {window:?} {softcap:?}");
            for threads in [1, 2, 7] {
                let got = case.run(isa, threads, &rows, &q);
                assert_same(&got, &expected, &format!("{what}, {threads} threads"));
            }
            let width = heads * hd;
            for (r, row) in rows.iter().enumerate() {
                for threads in [1, 3] {
                    let own = r * width..(r + 1) * width;
                    let got = case.run(isa, threads, &[*row], &q[own.clone()]);
                    assert_same(&got, &expected[own], &format!("{what}, row {r} alone"));
                }
            }
        }
    }
}

/// A prompt in one call, in chunks and token by token, on several numbers of
/// threads.
fn check_chunks(isa: Isa) {
    use KvFormat::{F16, F32};
    for (format, heads, kv_heads, hd, n) in [
        (F16, 9, 3, 64, 200),
        (F32, 9, 3, 64, 200),
        (F16, 4, 4, 20, 150),
        (F32, 4, 4, 20, 150),
        (F16, 16, 1, 16, 1300),
    ] {
        let cache = Cache::new(format, layout(kv_heads, hd), &[n]);
        for window in [None, Some(70)] {
            let case = Case {
                cache: &cache,
                heads,
                scale: 0.2,
                window,
                softcap: None,
            };
            let rows: Vec<AttentionRow<'_>> = (0..n).map(|p| cache.row(0, p)).collect();
            let width = heads * hd;
            let q = random(n * width, 31);
            let whole = case.run(isa, 2, &rows, &q);
            for (chunk, threads) in [(1, 2), (7, 1), (64, 3), (100, 2), (n, 1)] {
                let mut got = Vec::new();
                for (rows, q) in rows.chunks(chunk).zip(q.chunks(chunk * width)) {
                    // One pool thread more or less must not show either.
                    got.extend(case.run(isa, threads, rows, q));
                }
                assert_same(&got, &whole, &format!("{isa} chunks of {chunk}"));
            }
        }
    }
}

macro_rules! suite {
    ($name:ident, $isa:expr) => {
        mod $name {
            use super::*;

            const ISA: Isa = $isa;

            /// Says that nothing was tested on a machine that lacks the set.
            fn skip() -> bool {
                let lacks = ISA > Isa::best();
                if lacks {
                    // Past the capture of passing tests.
                    use std::io::Write as _;
                    let _ = writeln!(std::io::stderr(), "SKIPPED: this machine lacks {ISA}");
                }
                lacks
            }

            #[test]
            fn scalar_twin() {
                if !skip() {
                    check_against_scalar(ISA);
                }
            }

            #[test]
            fn chunks_and_threads() {
                if !skip() && ISA != Isa::Scalar {
                    check_chunks(ISA);
                }
            }

            #[test]
            fn a_nan_stays_with_the_rows_that_see_it() {
                if !skip() {
                    check_nan(ISA);
                }
            }

            #[test]
            fn stored_rows_read_back() {
                if !skip() {
                    check_store(ISA);
                }
            }
        }
    };
}

suite!(scalar, Isa::Scalar);
suite!(avx2, Isa::Avx2);
suite!(avx512, Isa::Avx512Vnni);

/// A NaN key at one position, or a NaN value, reaches later rows in the window
/// and no others, though they share its tile and its pass.
fn check_nan(isa: Isa) {
    for (format, poison_keys) in FORMATS.into_iter().flat_map(|f| [(f, true), (f, false)]) {
        let (heads, hd, n, poisoned) = (2, 20, 150, 70);
        let mut cache = Cache::new(format, layout(1, hd), &[n]);
        let (mut k, mut v) = (vec![0.5; hd], vec![0.5; hd]);
        (if poison_keys { &mut k } else { &mut v })[3] = f32::NAN;
        kv_write(
            isa,
            cache.layout,
            cache.store.view_mut(),
            (
                cache.blocks[0][poisoned / KV_TILE] as usize,
                poisoned % KV_TILE,
            ),
            &k,
            &v,
        );
        let case = Case {
            cache: &cache,
            heads,
            scale: 1.0,
            window: Some(30),
            softcap: None,
        };
        let rows: Vec<AttentionRow<'_>> = (0..n).map(|p| cache.row(0, p)).collect();
        let q = random(n * heads * hd, 32);
        for (p, out) in case.run(isa, 2, &rows, &q).chunks(heads * hd).enumerate() {
            let sees = (poisoned..poisoned + 30).contains(&p);
            for (d, x) in out.iter().enumerate() {
                let nan = sees && (poison_keys || d % hd == 3);
                assert_eq!(x.is_nan(), nan, "{isa}: row {p}, element {d}");
            }
        }
    }
}

fn check_store(isa: Isa) {
    for (kv_heads, hd) in [(1, 16), (3, 20), (2, 80)] {
        let layout = layout(kv_heads, hd);
        let row = layout.row_elements();
        let mut k = random(row, 1);
        let mut v = random(row, 2);
        k[..5].copy_from_slice(&[65519.0, 65520.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        v[..5].copy_from_slice(&[-1e30, 1e-8, -0.0, f32::NAN, 2049.0]);
        let mut k_store = vec![7; 2 * layout.block_elements()];
        let mut v_store = k_store.clone();
        let (mut k_read, mut v_read) = (vec![0.0; row], vec![0.0; row]);
        let (keys, values) = (&mut k_store, &mut v_store);
        kv_write(isa, layout, KvViewMut::F16 { keys, values }, (1, 5), &k, &v);
        let (keys, values) = (&k_store, &v_store);
        let view = KvView::F16 { keys, values };
        kv_read(layout, view, (1, 5), &mut k_read, &mut v_read);
        let rounded = |x: &[f32]| -> Vec<f32> {
            x.iter()
                .map(|x| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32())
                .collect()
        };
        assert_same(&k_read, &rounded(&k), "keys");
        assert_same(&v_read, &rounded(&v), "values");
        assert_eq!(&k_read[..4], &[65504.0, 65504.0, 65504.0, -65504.0]);
        assert_eq!(&v_read[..3], &[-65504.0, 0.0, 0.0]);
        assert_eq!(v_read[4], 2048.0, "ties go to even");
        // Nothing else was touched.
        let written = |store: &[u16]| store.iter().filter(|x| **x != 7).count();
        assert_eq!((written(&k_store), written(&v_store)), (row, row));

        // Floats are kept as they are.
        let mut exact = Store::new(KvFormat::F32, 2 * layout.block_elements());
        kv_write(isa, layout, exact.view_mut(), (1, 5), &k, &v);
        kv_read(layout, exact.view(), (1, 5), &mut k_read, &mut v_read);
        assert_same(&k_read, &k, "keys");
        assert_same(&v_read, &v, "values");
        kv_read(layout, exact.view(), (1, 6), &mut k_read, &mut v_read);
        assert!(k_read.iter().chain(&v_read).all(|x| x.is_nan()));
    }
}

/// Full softmax in f64 on the keys and values as given, and how far the result
/// may be from it.
///
/// `u` is the rounding of the cache (`2^-11` in halves, none in floats),
/// `e = 2^-24` fp32's. A score moves
/// by `ds = scale (u |q|.|k| + hd e |q|.|k|)` (keys rounded; a chain of `hd`
/// fmas), capped scores by less. A shift `ds` of scores changes each weight by
/// a factor within `e^(2 ds)`; then each value is rounded (`u`), the weights
/// carry a few `e` (exponential, base, rescales: 8), and the sums run over up
/// to 64 fmas a tile and one rescale per tile and segment.
fn exact(case: &Case<'_>, sequence: usize, p: usize, q: &[f32], head: usize) -> Vec<(f64, f64)> {
    let e = 2f64.powi(-24);
    let u = match case.cache.store.format() {
        KvFormat::F16 => 2f64.powi(-11),
        KvFormat::F32 => 0.0,
    };
    let KvLayout { kv_heads, head_dim } = case.cache.layout;
    let kv_head = head / (case.heads / kv_heads);
    let first = case.window.map_or(0, |w| (p + 1).saturating_sub(w));
    let at = |x: &[f32], p: usize, d: usize| f64::from(x[(p * kv_heads + kv_head) * head_dim + d]);
    let (keys, values) = (&case.cache.keys[sequence], &case.cache.values[sequence]);
    let scale = f64::from(case.scale);
    let mut shift = 0.0f64;
    let scores: Vec<f64> = (first..=p)
        .map(|p| {
            let products = |f: fn(f64) -> f64| -> f64 {
                (0..head_dim)
                    .map(|d| f(f64::from(q[d]) * at(keys, p, d)))
                    .sum()
            };
            shift = shift.max(scale * (u + head_dim as f64 * e) * products(f64::abs));
            let score = scale * products(|x| x);
            match case.softcap {
                None => score,
                Some(cap) => f64::from(cap) * (score / f64::from(cap)).tanh(),
            }
        })
        .collect();
    // Scores themselves are rounded: e of the greatest, three times (scale and
    // the two operations of a cap's tanh, at 2 e each).
    let greatest = scores.iter().fold(0.0f64, |m, s| m.max(s.abs()));
    shift += 6.0 * e * greatest.max(f64::from(case.softcap.unwrap_or(0.0)));
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let steps = 2.0 * (64.0 + 8.0 + (p - first) as f64 / 64.0 + 2.0);
    let relative = (2.0 * shift).exp() - 1.0 + u + steps * e;
    (0..head_dim)
        .map(|d| {
            let weighted = |f: fn(f64) -> f64| -> f64 {
                (first..=p)
                    .zip(&weights)
                    .map(|(p, w)| w / sum * f(at(values, p, d)))
                    .sum()
            };
            (weighted(|x| x), relative * weighted(f64::abs))
        })
        .collect()
}

#[test]
fn attention_is_close_to_f64() {
    let (halves, closest) = errors_against_f64(KvFormat::F16);
    // The bound is for rounding errors that all pull one way; were it never
    // reached to a fiftieth, it would not bind.
    assert!(closest > 0.02, "{closest}");
    // Floats round 2^13 times finer; chains of some 300 additions lose √300 of it
    // again, so there is room to a 64th.
    let (floats, _) = errors_against_f64(KvFormat::F32);
    assert!(floats < halves / 64.0, "{floats:e}, {halves:e}");
}

/// The largest error, and the largest as a part of its bound.
fn errors_against_f64(format: KvFormat) -> (f64, f64) {
    let (mut largest, mut closest) = (0.0f64, 0.0f64);
    for (heads, kv_heads, hd) in [(2, 1, 16), (3, 3, 20), (4, 2, 64), (2, 1, 128)] {
        let cache = Cache::new(format, layout(kv_heads, hd), &[1500]);
        for (window, softcap) in [(None, None), (Some(300), None), (None, Some(2.0))] {
            let case = Case {
                cache: &cache,
                heads,
                scale: 1.0 / (hd as f32).sqrt(),
                window,
                softcap,
            };
            let positions = [0, 3, 64, 500, 1023, 1024, 1400];
            let rows: Vec<AttentionRow<'_>> = positions.map(|p| cache.row(0, p)).to_vec();
            let q = random(rows.len() * heads * hd, 33);
            let out = case.run(Isa::best(), 2, &rows, &q);
            let queries = out.chunks(hd).zip(q.chunks(hd)).enumerate();
            for (i, (out, q)) in queries {
                let (row, head) = (i / heads, i % heads);
                let exact = exact(&case, 0, positions[row], q, head);
                for (got, (exact, bound)) in out.iter().zip(exact) {
                    let error = (f64::from(*got) - exact).abs();
                    assert!(error <= bound, "{error:e} > {bound:e}");
                    largest = largest.max(error);
                    closest = closest.max(error / bound);
                }
            }
        }
    }
    (largest, closest)
}

/// Large scores must not overflow: the exponentials are relative to the
/// maximum, which moves from tile to tile.
#[test]
fn growing_scores_across_tiles() {
    let hd = 16;
    let mut cache = Cache::new(KvFormat::F16, layout(1, hd), &[1200]);
    let ones = vec![1.0; hd];
    for p in 0..1200 {
        let k = vec![p as f32 * 0.25; hd];
        kv_write(
            Isa::best(),
            cache.layout,
            cache.store.view_mut(),
            (cache.blocks[0][p / KV_TILE] as usize, p % KV_TILE),
            &k,
            if p == 1199 { &k } else { &ones },
        );
    }
    let case = Case {
        cache: &cache,
        heads: 1,
        scale: 1.0,
        window: None,
        softcap: None,
    };
    for isa in Isa::available() {
        // Scores fall: position 0 wins. Scores rise by 256 a position: the last
        // takes all.
        let rows = [cache.row(0, 1199)];
        let falling = case.run(isa, 2, &rows, &vec![-64.0; hd]);
        assert_eq!(falling, vec![1.0; hd]);
        let rising = case.run(isa, 2, &rows, &vec![64.0; hd]);
        assert_eq!(rising, vec![f16::from_f32(1199.0 * 0.25).to_f32(); hd]);
    }
}

#[test]
fn an_empty_window_gives_zeros() {
    let cache = Cache::new(KvFormat::F16, layout(1, 20), &[1100]);
    for isa in Isa::available() {
        let case = Case {
            cache: &cache,
            heads: 2,
            scale: 1.0,
            window: Some(0),
            softcap: None,
        };
        let rows = [cache.row(0, 10), cache.row(0, 1050)];
        for threads in [1, 2] {
            assert_eq!(case.run(isa, threads, &rows, &random(80, 1)), vec![0.0; 80]);
            assert_eq!(case.run(isa, threads, &[], &[]), Vec::<f32>::new());
        }
    }
}

/// Blocks before the window may be gone: their numbers are not looked at.
#[test]
fn blocks_outside_the_window_are_not_read() {
    let mut cache = Cache::new(KvFormat::F16, layout(1, 16), &[300]);
    let q = random(16, 1);
    for isa in Isa::available() {
        let run = |cache: &Cache| {
            let case = Case {
                cache,
                heads: 1,
                scale: 1.0,
                window: Some(50),
                softcap: None,
            };
            case.run(isa, 2, &[cache.row(0, 290)], &q)
        };
        let before = run(&cache);
        let gone = std::mem::replace(&mut cache.blocks[0][0], u32::MAX);
        assert_same(&run(&cache), &before, "block 0 is gone");
        cache.blocks[0][0] = gone;
    }
}

#[test]
#[should_panic(expected = "block 9 of 3")]
fn a_block_beyond_the_store_is_refused() {
    let mut cache = Cache::new(KvFormat::F16, layout(1, 16), &[100]);
    cache.blocks[0][1] = 9;
    let case = Case {
        cache: &cache,
        heads: 1,
        scale: 1.0,
        window: None,
        softcap: None,
    };
    case.run(Isa::best(), 1, &[cache.row(0, 90)], &random(16, 1));
}
