//! Speed of every kernel against what this machine can do, measured in the same
//! run.
//!
//! Products of each format for 1 to 128 tokens, with weights that come from memory;
//! attention over short and long caches; rows and elements. Beside what criterion
//! prints stands a line with the bytes and operations per second of the fastest
//! sample, as shares of reading as many bytes and of the kernel's own instructions.
//!
//! ```text
//! cargo bench -p carat-kernels [-- FILTER]          CARAT_ISA, CARAT_BENCH_THREADS
//! ```
#![allow(clippy::print_stdout)] // it prints figures
#![allow(missing_docs)] // made by criterion's macros

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use carat_kernels::attention::{
    AttentionArgs, AttentionRow, KV_TILE, KvLayout, KvView, KvViewMut, attention, kv_write,
};
use carat_kernels::{
    ActPrecision, Arithmetic, Crossovers, Isa, PeakLoop, Pool, Prepared, Product, kernel_name,
    matmul, ops, read_bandwidth,
};
use carat_tensor::DType;
use carat_tensor::packed::{PackedLayout, PackedRef, supports};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput};

const TOKENS: [usize; 5] = [1, 4, 16, 64, 128];
/// Shape of the weights.
const ROWS: usize = 2048;
const COLUMNS: usize = 4096;
/// Weights lie one after the other in this much memory, beyond most caches.
const MEMORY_BYTES: usize = 512 << 20;

/// A machine and what it can do.
struct Machine {
    isa: Isa,
    pool: Pool,
    /// Bytes per second by the bytes that are read again and again.
    read: RefCell<BTreeMap<usize, f64>>,
    peaks: Vec<(PeakLoop, f64)>,
}

/// Work of one call.
struct Work {
    /// Bytes read.
    bytes: usize,
    /// Bytes of what calls read in turn, which may be more than one reads.
    span: usize,
    /// Additions and multiplications.
    operations: f64,
    /// The instruction set that serves and what it computes with.
    kernel: (Isa, Arithmetic),
}

impl Machine {
    fn new() -> Machine {
        let isa = Isa::from_env().expect("an instruction set of this machine");
        let threads = std::env::var("CARAT_BENCH_THREADS");
        let threads = threads.map_or(1, |n| n.parse().expect("a number of threads"));
        let peaks = PeakLoop::available().into_iter();
        let peaks = peaks.map(|l| (l, l.rate(threads))).collect();
        let machine = Machine {
            isa,
            pool: Pool::new(threads),
            read: RefCell::default(),
            peaks,
        };
        println!("instruction set {isa}, {threads} threads");
        let bandwidth = machine.read(MEMORY_BYTES);
        println!("read bandwidth {:.1} GB/s", bandwidth / 1e9);
        for (peak, rate) in &machine.peaks {
            println!("{}: {:.0} GOP/s", peak.instruction, rate / 1e9);
        }
        machine
    }

    fn read(&self, span: usize) -> f64 {
        let threads = self.pool.threads();
        let mut read = self.read.borrow_mut();
        *read
            .entry(span)
            .or_insert_with(|| read_bandwidth(span, threads))
    }

    /// Measures a call and says how close it comes.
    fn measure(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        name: &str,
        work: &Work,
        mut call: impl FnMut(usize),
    ) {
        let best = Cell::new(f64::INFINITY);
        let mut turn = 0;
        group.throughput(Throughput::Bytes(work.bytes as u64));
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|calls| {
                let mut all = Duration::ZERO;
                for _ in 0..calls {
                    let start = Instant::now();
                    call(turn);
                    let time = start.elapsed();
                    best.set(best.get().min(time.as_secs_f64()));
                    turn += 1;
                    all += time;
                }
                all
            });
        });
        // A filter may have left it out.
        if best.get().is_infinite() {
            return;
        }
        let (isa, arithmetic) = work.kernel;
        let bytes = work.bytes as f64 / best.get();
        let operations = work.operations / best.get();
        let own = self.peaks.iter().filter(|(peak, _)| {
            // Instruction sets without a loop of their own use the one they extend.
            peak.arithmetic == arithmetic && (peak.isa == isa || !peak.isa.falls_back_to(isa))
        });
        let peak = own.map(|(_, rate)| *rate).reduce(f64::max);
        let peak = peak.map_or("no peak is known".into(), |peak| {
            format!("{:.0} % of its peak", 100.0 * operations / peak)
        });
        println!(
            "  {isa}: {:.1} GB/s ({:.0} % of reading), {:.1} GOP/s ({peak})",
            bytes / 1e9,
            100.0 * bytes / self.read(work.span),
            operations / 1e9,
        );
    }

    /// Of kernels that work on floats.
    fn floats(&self) -> (Isa, Arithmetic) {
        (ops::kernel_isa(self.isa), Arithmetic::F32)
    }
}

/// Random bytes that are codes of any format: no pair of bits is 3.
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

/// Numbers from -1 to 1.
fn floats(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect()
}

fn products(machine: &Machine, criterion: &mut Criterion) {
    let memory = noise(MEMORY_BYTES + 4096);
    // Aligned as weights are in a file mapping.
    let memory = &memory[memory.as_ptr().align_offset(4096)..][..MEMORY_BYTES];
    let x = floats(128 * COLUMNS);
    for dtype in DType::ALL.into_iter().filter(|dtype| supports(*dtype)) {
        let layout = PackedLayout::new(dtype, ROWS, COLUMNS).expect("a valid shape");
        let (bytes, places) = (layout.bytes(), MEMORY_BYTES / layout.bytes());
        let mut group = group(criterion, &format!("matmul {}", dtype.name()));
        for m in TOKENS {
            let (isa, pool) = (machine.isa, &machine.pool);
            let precision = ActPrecision::Int8;
            let mut prepared = Prepared::default();
            let x = &x[..m * COLUMNS];
            prepared
                .prepare_for(isa, pool, precision, [dtype], x, m, COLUMNS)
                .expect("an input that fits");
            let mut out = vec![0.0; m * ROWS];
            let crossovers = Crossovers::default();
            let kernel = kernel_name(isa, (&layout).into(), precision, m, &crossovers);
            let set = kernel.split(' ').next().unwrap_or_default();
            let arithmetic = match kernel.contains("int8") {
                true => Arithmetic::Int8,
                false => Arithmetic::F32,
            };
            let work = Work {
                bytes,
                span: MEMORY_BYTES,
                operations: 2.0 * (m * ROWS * COLUMNS) as f64,
                kernel: (Isa::named(set).expect("a kernel's set"), arithmetic),
            };
            machine.measure(&mut group, &format!("m {m}"), &work, |turn| {
                let weight = &memory[turn % places * bytes..][..bytes];
                let weight = PackedRef::new(layout, weight).expect("a weight of that size");
                let product = Product {
                    weight,
                    bias: None,
                    out: &mut out,
                };
                matmul(isa, pool, &prepared, &mut [product]).expect("shapes that fit");
            });
        }
    }
}

/// One layer of attention of `m` rows that end at `context` positions.
fn attend(
    machine: &Machine,
    group: &mut BenchmarkGroup<'_, WallTime>,
    (heads, layout): (usize, KvLayout),
    m: usize,
    context: usize,
) {
    let (isa, pool) = (machine.isa, &machine.pool);
    let (row, head_dim) = (layout.row_elements(), layout.head_dim);
    let blocks: Vec<u32> = (0..context.div_ceil(KV_TILE) as u32).collect();
    let mut k_store = vec![0; blocks.len() * layout.block_elements()];
    let mut v_store = k_store.clone();
    let values = floats(row);
    for p in 0..context {
        let (keys, values_of) = (&mut k_store[..], &mut v_store[..]);
        let to = KvViewMut::F16 {
            keys,
            values: values_of,
        };
        kv_write(
            isa,
            layout,
            to,
            (p / KV_TILE, p % KV_TILE),
            &values,
            &values,
        );
    }
    let rows: Vec<AttentionRow<'_>> = (context - m..context)
        .map(|position| AttentionRow {
            position: position as u32,
            blocks: &blocks,
        })
        .collect();
    let q = floats(m * heads * head_dim);
    let mut out = vec![0.0; q.len()];
    let args = AttentionArgs {
        q: &q,
        kv: KvView::F16 {
            keys: &k_store,
            values: &v_store,
        },
        layout,
        heads,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: None,
        softcap: None,
        rows: &rows,
    };
    // Keys and values of two bytes; two multiply-adds for each visible position,
    // element and query head.
    let seen: usize = (context - m..context).map(|p| p + 1).sum();
    let bytes = 2 * 2 * context * row;
    let work = Work {
        bytes,
        span: bytes,
        operations: 4.0 * (seen * heads * head_dim) as f64,
        kernel: machine.floats(),
    };
    let name = format!(
        "{heads} over {} heads of {head_dim}, {m} rows, {context} positions",
        layout.kv_heads
    );
    machine.measure(group, &name, &work, |_| {
        attention(isa, pool, &args, &mut out);
    });
}

fn rows(machine: &Machine, criterion: &mut Criterion) {
    let (isa, pool) = (machine.isa, &machine.pool);
    let mut group = group(criterion, "rows");
    for m in [1, 64] {
        let n = m * COLUMNS;
        let (x, y) = (floats(n), floats(n));
        let mut out = vec![0.0; n];
        // Reads of `read` vectors and `operations` an element.
        let work = |read: usize, operations: f64| Work {
            bytes: read * n * size_of::<f32>(),
            span: read * n * size_of::<f32>(),
            operations: operations * n as f64,
            kernel: machine.floats(),
        };
        // A square and a sum, then a product with the inverse root and the weight.
        machine.measure(
            &mut group,
            &format!("rms_norm, {m} rows"),
            &work(1, 4.0),
            |_| {
                ops::rms_norm(isa, pool, &x, &y[..COLUMNS], 0.0, 1e-6, &mut out);
            },
        );
        machine.measure(
            &mut group,
            &format!("add_scaled, {m} rows"),
            &work(2, 2.0),
            |_| {
                ops::add_scaled(isa, pool, &mut out, &y, 0.5);
            },
        );
        // An exponential is a polynomial of some length: operations are not counted
        // but for the product at the end.
        for activation in [ops::Activation::Silu, ops::Activation::GeluTanh] {
            let name = format!("{activation:?}, {m} rows");
            machine.measure(&mut group, &name, &work(2, 1.0), |_| {
                ops::gated(isa, pool, activation, &x, &y, &mut out);
            });
        }
    }
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group
        .sample_size(10)
        .sampling_mode(SamplingMode::Flat)
        .warm_up_time(Duration::from_millis(40))
        .measurement_time(Duration::from_millis(200));
    group
}

fn main() {
    let mut criterion = Criterion::default().without_plots().configure_from_args();
    let machine = Machine::new();
    products(&machine, &mut criterion);
    let mut group = group(&mut criterion, "attention");
    for (heads, kv_heads, head_dim) in [(16, 8, 128), (9, 3, 64)] {
        let shape = (heads, KvLayout { kv_heads, head_dim });
        attend(&machine, &mut group, shape, 1, 4096);
        attend(&machine, &mut group, shape, 64, 512);
    }
    group.finish();
    rows(&machine, &mut criterion);
    criterion.final_summary();
}
