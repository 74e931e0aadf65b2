//! Speed of matrix products on this machine.
//!
//! For each format: one token against weights far larger than any cache (bytes
//! of weights per second, to be set against the read bandwidth printed first),
//! one token against weights in the L2 cache, a few tokens (time over that of
//! one), and many (operations per second). Each measurement is a few milliseconds and the best of many is
//! printed, so that figures for one thread mean something on a busy machine.
//!
//! ```text
//! cargo run --release -p carat-kernels --example matmul_speed [-- FORMAT…]
//! ```
#![allow(clippy::print_stdout)] // it prints a table

use std::time::{Duration, Instant};

use carat_kernels::{ActPrecision, Isa, Pool, Prepared, ProbeBuffer, Product, matmul};
use carat_tensor::DType;
use carat_tensor::packed::{PackedLayout, PackedRef, supports};

const COLUMNS: usize = 4096;
/// Weights of the memory rows, far above cache sizes.
const MEMORY_BYTES: usize = 1536 << 20;
/// Weights of one measurement.
const PIECE_BYTES: usize = 24 << 20;
/// Weights of the cache row.
const CACHE_BYTES: usize = 768 << 10;
/// Rows of the weights for many tokens.
const ROWS: usize = 4096;
const FEW: [usize; 9] = [2, 3, 4, 5, 6, 8, 10, 12, 16];
const MANY: [usize; 5] = [16, 32, 64, 128, 512];

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
    let memory = noise(MEMORY_BYTES + 4096);
    let memory = &memory[memory.as_ptr().align_offset(4096)..][..MEMORY_BYTES];
    let x: Vec<f32> = (0..512 * COLUMNS)
        .map(|i| (i % 251) as f32 / 125.0 - 1.0)
        .collect();
    let pools = [Pool::new(1), Pool::new(2)];
    println!("instruction set {isa}; 1 / 2 threads");
    let read: Vec<String> = pools
        .iter()
        .map(|pool| format!("{:.1}", read_bandwidth(pool)))
        .collect();
    println!("read bandwidth {} GB/s", read.join(" / "));
    println!("format  memory GB/s    cache   time over m = 1 of m = {FEW:?}; TOPS at m = {MANY:?}");
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
        let few: Vec<String> = FEW
            .iter()
            .map(|&m| format!("{:.2}", from_memory[0] / gbps(&pools[0], large, m)))
            .collect();
        print!(
            "{:6} {:6.1} / {:5.1}  {from_cache:6.1}   {}  ",
            dtype.name(),
            from_memory[0],
            from_memory[1],
            few.join(" "),
        );
        for m in MANY {
            let tops = pools.each_ref().map(|pool| {
                let time = time(isa, pool, wide, memory, &x[..m * COLUMNS], m);
                2.0 * (m * COLUMNS * ROWS) as f64 / time.as_secs_f64() / 1e12
            });
            print!(" {:.2}/{:.2}", tops[0], tops[1]);
        }
        println!();
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

/// Bytes that are codes of any format (no pair of bits is 3), with random bits
/// elsewhere: products of zeros run faster than real ones.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = vec![0; len];
    for word in bytes.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = (state & !(state >> 1 & state & 0x5555_5555_5555_5555)).to_le_bytes();
    }
    bytes
}

/// GB/s of reading memory, the best of many passes.
fn read_bandwidth(pool: &Pool) -> f64 {
    const PARTS: usize = 16;
    let words = PIECE_BYTES / size_of::<u64>();
    let parts: Vec<ProbeBuffer> = (0..PARTS).map(|_| ProbeBuffer::new(words)).collect();
    let mut best = 0f64;
    for _ in 0..8 {
        let start = Instant::now();
        pool.run(PARTS, &|part| {
            std::hint::black_box(parts[part].read());
        });
        best = best.max((PARTS * PIECE_BYTES) as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}
