//! Speed of matrix products on this machine.
//!
//! For each format: one token against weights far larger than any cache (bytes
//! of weights per second, to be set against the read bandwidth printed first),
//! one token against weights in the L2 cache, and 512 tokens (operations per
//! second). Each measurement is a few milliseconds and the best of many is
//! printed, so that figures for one thread mean something on a busy machine.
//!
//! ```text
//! cargo run --release -p carat-kernels --example matmul_speed [-- FORMAT…]
//! ```
#![allow(clippy::print_stdout)] // it prints a table

use std::time::{Duration, Instant};

use carat_kernels::{ActPrecision, Isa, Pool, Prepared, Product, matmul};
use carat_tensor::DType;
use carat_tensor::packed::{PackedLayout, PackedRef, supports};

const COLUMNS: usize = 2048;
/// Weights of the memory rows, far above cache sizes.
const MEMORY_BYTES: usize = 768 << 20;
/// Weights of one measurement.
const PIECE_BYTES: usize = 24 << 20;
/// Weights of the cache row.
const CACHE_BYTES: usize = 768 << 10;
const TOKENS: usize = 512;
const ROWS: usize = 128;

fn main() {
    let isa = match Isa::from_env() {
        Ok(isa) => isa,
        Err(error) => {
            println!("error: {error}");
            return;
        }
    };
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    // Aligned as weights are in a file mapping.
    let memory = vec![0x11u8; MEMORY_BYTES + 4096];
    let memory = &memory[memory.as_ptr().align_offset(4096)..][..MEMORY_BYTES];
    let x: Vec<f32> = (0..TOKENS * COLUMNS)
        .map(|i| (i % 251) as f32 / 125.0 - 1.0)
        .collect();
    let pools = [Pool::new(1), Pool::new(2)];
    println!("instruction set {isa}; 1 / 2 threads");
    let read: Vec<String> = pools
        .iter()
        .map(|pool| format!("{:.1}", read_bandwidth(pool, memory)))
        .collect();
    println!("read bandwidth {} GB/s", read.join(" / "));
    println!("format  memory GB/s    cache GB/s   m=2 m=4 m=8 over m=1   m=512 TOPS");
    for dtype in DType::ALL {
        let chosen = wanted.is_empty() || wanted.iter().any(|w| w == dtype.name());
        if !supports(dtype) || !chosen {
            continue;
        }
        let layout = |bytes: usize| {
            let panel = PackedLayout::new(dtype, 16, COLUMNS).expect("a valid shape");
            let rows = bytes / panel.bytes() * 16;
            PackedLayout::new(dtype, rows, COLUMNS).expect("a valid shape")
        };
        let large = layout(PIECE_BYTES);
        let small = layout(CACHE_BYTES);
        let wide = PackedLayout::new(dtype, ROWS, COLUMNS).expect("a valid shape");
        let gbps = |pool: &Pool, layout, m| {
            let time = time(isa, pool, layout, memory, &x[..m * COLUMNS], m);
            layout.bytes() as f64 / time.as_secs_f64() / 1e9
        };
        let from_memory = pools.each_ref().map(|pool| gbps(pool, large, 1));
        let from_cache = gbps(&pools[0], small, 1);
        let small_m = [2, 4, 8].map(|m| from_memory[0] / gbps(&pools[0], large, m));
        let tops = pools.each_ref().map(|pool| {
            let time = time(isa, pool, wide, memory, &x, TOKENS);
            2.0 * (TOKENS * COLUMNS * ROWS) as f64 / time.as_secs_f64() / 1e12
        });
        println!(
            "{:6} {:6.1} / {:5.1}  {from_cache:8.1}     {:5.2} {:5.2} {:5.2}          {:.3} / {:.3}",
            dtype.name(),
            from_memory[0],
            from_memory[1],
            small_m[0],
            small_m[1],
            small_m[2],
            tops[0],
            tops[1],
        );
    }
}

/// Best time of a product; large weights rotate through memory.
fn time(
    isa: Isa,
    pool: &Pool,
    layout: PackedLayout,
    memory: &[u8],
    x: &[f32],
    m: usize,
) -> Duration {
    let mut prepared = Prepared::default();
    prepared.prepare_for(
        isa,
        pool,
        ActPrecision::Int8,
        [layout.dtype()],
        x,
        m,
        COLUMNS,
    );
    let mut out = vec![0.0; m * layout.rows()];
    let bytes = layout.bytes();
    // Small weights stay where they are, hot.
    let places = if bytes < PIECE_BYTES / 2 {
        1
    } else {
        memory.len() / bytes
    };
    let budget = Duration::from_millis(250);
    let begin = Instant::now();
    let mut best = Duration::MAX;
    for i in 0.. {
        let weight = &memory[i % places * bytes..][..bytes];
        let weight = PackedRef::new(layout, weight).expect("a weight of that size");
        let start = Instant::now();
        matmul(
            isa,
            pool,
            &prepared,
            &mut [Product {
                weight,
                bias: None,
                out: &mut out,
            }],
        );
        best = best.min(start.elapsed());
        if i >= places && begin.elapsed() > budget {
            break;
        }
    }
    best
}

/// GB/s of summing memory.
fn read_bandwidth(pool: &Pool, memory: &[u8]) -> f64 {
    let mut best = 0f64;
    for piece in memory.chunks_exact(PIECE_BYTES).cycle().take(96) {
        let start = Instant::now();
        pool.run(16, &|task| {
            let part = &piece[piece.len() / 16 * task..][..piece.len() / 16];
            let mut sums = [0u64; 32];
            for chunk in part.as_chunks::<256>().0 {
                for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                    *sum = sum.wrapping_add(u64::from_le_bytes(*word));
                }
            }
            std::hint::black_box(sums);
        });
        best = best.max(piece.len() as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}
