//! Speed of the thread pool, of attention and of the elementwise kernels.
//!
//! `cargo run --release -p carat-kernels --example ops_speed [threads]`

#![allow(clippy::print_stdout)]

use std::time::Instant;

use carat_kernels::attention::{
    AttentionArgs, AttentionRow, KV_TILE, KvLayout, KvView, KvViewMut, attention, kv_write,
};
use carat_kernels::{Isa, Pool, ops};

/// Numbers in (-1, 1).
fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// Seconds of the fastest call: other processes only ever slow one down.
fn fastest(mut call: impl FnMut()) -> f64 {
    call();
    let start = Instant::now();
    let mut seconds = Vec::new();
    while seconds.len() < 7 || (start.elapsed().as_secs_f64() < 0.5 && seconds.len() < 2000) {
        let call_start = Instant::now();
        call();
        seconds.push(call_start.elapsed().as_secs_f64());
    }
    seconds.into_iter().fold(f64::INFINITY, f64::min)
}

/// One layer of attention of `m` rows ending at `context` positions.
fn attention_speed(
    isa: Isa,
    pool: &Pool,
    heads: usize,
    layout: KvLayout,
    m: usize,
    context: usize,
) {
    let row = layout.row_elements();
    let blocks: Vec<u32> = (0..context.div_ceil(KV_TILE) as u32).collect();
    let mut k_store = vec![0; blocks.len() * layout.block_elements()];
    let mut v_store = k_store.clone();
    let (keys, values) = (random(context * row, 1), random(context * row, 2));
    for p in 0..context {
        let (k, v) = (&keys[p * row..][..row], &values[p * row..][..row]);
        let (block, offset) = (p / KV_TILE, p % KV_TILE);
        let (keys, values) = (&mut k_store, &mut v_store);
        let to = KvViewMut::F16 { keys, values };
        kv_write(isa, layout, to, (block, offset), k, v);
    }
    let rows: Vec<AttentionRow<'_>> = (context - m..context)
        .map(|position| AttentionRow {
            position: position as u32,
            blocks: &blocks,
        })
        .collect();
    let hd = layout.head_dim;
    let q = random(m * heads * hd, 3);
    let mut out = vec![0.0; q.len()];
    let args = AttentionArgs {
        q: &q,
        kv: KvView::F16 {
            keys: &k_store,
            values: &v_store,
        },
        layout,
        heads,
        scale: 1.0 / (hd as f32).sqrt(),
        window: None,
        softcap: None,
        rows: &rows,
    };
    let seconds = fastest(|| attention(isa, pool, &args, &mut out));
    // Two multiply-adds per visible position, head element and query head.
    let seen: usize = (context - m..context).map(|p| p + 1).sum();
    let flop = 4.0 * (seen * heads * hd) as f64;
    let kv_bytes = (2 * 2 * context * row) as f64;
    println!(
        "  {isa:<11} {} thread(s)  heads {heads:2}/{:<2} dim {hd:3}  m {m:3}  context {context:5}: \
         {:8.1} us  {:6.1} GFLOP/s  {:5.1} GB/s of KV",
        pool.threads(),
        layout.kv_heads,
        seconds * 1e6,
        flop / seconds * 1e-9,
        kv_bytes / seconds * 1e-9,
    );
}

fn main() {
    let threads = std::env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
    let pools: Vec<Pool> = [1, threads].map(Pool::new).into_iter().collect();
    let pools = if threads > 1 { &pools[..] } else { &pools[..1] };

    println!("empty region");
    for tasks in [2, 16, 64] {
        let pool = &pools[pools.len() - 1];
        let seconds = fastest(|| {
            for _ in 0..1000 {
                pool.run(tasks, &|_| {});
            }
        });
        println!(
            "  {} thread(s), {tasks:2} tasks: {:.2} us",
            pool.threads(),
            seconds * 1e3
        );
    }

    println!("attention, one layer");
    let shapes = [(9, 3, 64), (16, 8, 128), (32, 2, 128), (8, 8, 64)];
    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
        for pool in pools {
            for (heads, kv_heads, head_dim) in shapes {
                let layout = KvLayout { kv_heads, head_dim };
                attention_speed(isa, pool, heads, layout, 512, 512);
                attention_speed(isa, pool, heads, layout, 1, 4096);
            }
        }
    }

    println!("elementwise and rows, 1 thread, in cache");
    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
        let n = 16384;
        let (gate, up) = (random(n, 4), random(n, 5));
        let mut out = vec![0.0; n];
        let pool = &pools[0];
        let report = |name: &str, seconds: f64| {
            println!(
                "  {isa:<11} {name:<10} {:6.2} elements/ns",
                n as f64 / seconds * 1e-9
            );
        };
        for activation in [ops::Activation::Silu, ops::Activation::GeluTanh] {
            let seconds = fastest(|| ops::gated(isa, pool, activation, &gate, &up, &mut out));
            report(&format!("{activation:?}"), seconds);
        }
        let seconds = fastest(|| {
            ops::rms_norm(isa, pool, &gate, &up[..4096], 0.0, 1e-6, &mut out);
        });
        report("rms_norm", seconds);
        let seconds = fastest(|| ops::add_scaled(isa, pool, &mut out, &up, 0.5));
        report("add_scaled", seconds);
        let mut best = None;
        let seconds = fastest(|| best = ops::argmax(isa, &gate));
        report("argmax", seconds);
        assert!(best.is_some());
    }
}
