//! Arithmetic as fast as it goes: the bound that many tokens are held against.
//!
//! Loops of one instruction on registers, with enough independent sums to hide
//! its latency. They multiply zeros, which is what units are fastest with (data
//! costs power, and power clock); multiplying ones instead they count themselves,
//! which is how the tests know that their numbers of operations are exact.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::Isa;

/// Kind of arithmetic that a peak is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arithmetic {
    /// Fused multiply-adds of fp32.
    F32,
    /// Products of 8-bit integers, added up in 32 bits.
    Int8,
}

/// A loop that does nothing but one kind of arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct PeakLoop {
    /// The instruction set that it needs.
    pub isa: Isa,
    /// What it computes.
    pub arithmetic: Arithmetic,
    /// Its instruction.
    pub instruction: &'static str,
    /// Additions and multiplications of one turn.
    operations: u64,
    /// # Safety
    ///
    /// The machine must have `isa`.
    run: unsafe fn(turns: u64, registers: &mut Registers),
}

/// What a loop's registers begin with and end with.
#[repr(C, align(64))]
struct Registers {
    /// Both factors, and 16-bit ones for pairs of sums.
    inputs: [[u8; 64]; 3],
    /// Sums, lane by lane and register by register: sixteen rows of each tile are
    /// the most.
    sums: [[u8; 64]; 64],
}

impl Registers {
    fn zero() -> Registers {
        Registers {
            inputs: [[0; 64]; 3],
            sums: [[0; 64]; 64],
        }
    }
}

impl PeakLoop {
    /// Those that this machine can run.
    pub fn available() -> Vec<PeakLoop> {
        let mut loops = platform::loops();
        loops.retain(|l| l.isa.is_available());
        loops
    }

    /// Operations (additions and multiplications) of `turns` turns.
    pub fn operations(&self, turns: u64) -> u64 {
        self.operations.saturating_mul(turns)
    }

    /// Runs `turns` turns, at least one.
    pub fn run(&self, turns: u64) {
        self.run_on(turns, &mut Registers::zero());
    }

    fn run_on(&self, turns: u64, registers: &mut Registers) {
        assert!(self.isa.is_available());
        // SAFETY: the machine has the instruction set, as asserted.
        unsafe { (self.run)(turns.max(1), registers) }
    }

    /// Operations per second of `threads` threads at once: the best of some
    /// samples of some milliseconds.
    pub fn rate(&self, threads: usize) -> f64 {
        const SAMPLE: Duration = Duration::from_millis(4);
        const SAMPLES: usize = 12;
        // As many turns as take the time that a sample should last.
        let mut turns = 1000;
        loop {
            let start = Instant::now();
            self.run(turns);
            if start.elapsed() >= SAMPLE {
                break;
            }
            turns *= 2;
        }
        let sample = |barrier: &Barrier| {
            barrier.wait();
            // Each thread by its own clock: whoever starts late is not slower.
            let start = Instant::now();
            self.run(turns);
            self.operations(turns) as f64 / start.elapsed().as_secs_f64()
        };
        let mut best = 0f64;
        for _ in 0..SAMPLES {
            let barrier = Barrier::new(threads.max(1));
            let rates: Vec<f64> = thread::scope(|scope| {
                let runners: Vec<_> = (0..threads.max(1))
                    .map(|_| scope.spawn(|| sample(&barrier)))
                    .collect();
                // A loop on registers cannot panic.
                runners.into_iter().filter_map(|r| r.join().ok()).collect()
            });
            best = best.max(rates.iter().sum());
        }
        best
    }
}

/// Clock of the processor that this thread is on, Hz: the best of many short
/// chains of additions, of which every processor known does one a cycle. `None`
/// on architectures nobody wrote the chain for.
pub fn clock_hz() -> Option<f64> {
    /// About 60 us at 3 GHz: far above the resolution of the clock, and short
    /// enough that most samples see no interrupt.
    const TURNS: u64 = 3000;
    const SAMPLES: usize = 60;
    let sample = || {
        let start = Instant::now();
        platform::chain(TURNS).then(|| start.elapsed())
    };
    let mut best = sample()?;
    for _ in 0..SAMPLES {
        best = best.min(sample()?);
    }
    let seconds = best.max(Duration::from_nanos(1)).as_secs_f64();
    Some((TURNS * CHAIN) as f64 / seconds)
}

/// Additions of one turn of the chain.
const CHAIN: u64 = 64;

#[cfg(target_arch = "x86_64")]
mod platform {
    use std::arch::asm;

    use super::{Arithmetic, PeakLoop, Registers};
    use crate::Isa;

    pub(super) fn loops() -> Vec<PeakLoop> {
        vec![
            PeakLoop {
                isa: Isa::Avx2,
                arithmetic: Arithmetic::F32,
                instruction: "vfmadd231ps ymm",
                operations: SUMS * 8 * 2,
                run: fma_256,
            },
            PeakLoop {
                isa: Isa::Avx2,
                arithmetic: Arithmetic::Int8,
                instruction: "vpmaddubsw, vpmaddwd, vpaddd ymm",
                operations: SUMS * 32 * 2,
                run: madd_256,
            },
            PeakLoop {
                isa: Isa::AvxVnni,
                arithmetic: Arithmetic::Int8,
                instruction: "vpdpbusd ymm (VEX)",
                operations: SUMS * 32 * 2,
                run: dot_256,
            },
            PeakLoop {
                isa: Isa::Avx512Vnni,
                arithmetic: Arithmetic::F32,
                instruction: "vfmadd231ps zmm",
                operations: SUMS * 16 * 2,
                run: fma_512,
            },
            PeakLoop {
                isa: Isa::Avx512Vnni,
                arithmetic: Arithmetic::Int8,
                instruction: "vpdpbusd zmm",
                operations: SUMS * 64 * 2,
                run: dot_512,
            },
            PeakLoop {
                isa: Isa::Amx,
                arithmetic: Arithmetic::Int8,
                instruction: "tdpbssd",
                operations: TILE_SUMS * 16 * 16 * 64 * 2,
                run: dot_tiles,
            },
        ]
    }

    /// Independent sums: latency 4 or 5 times two instructions a cycle.
    const SUMS: u64 = 12;

    /// Repeats an instruction on registers 0 to 11, with 12 and 13 as inputs and
    /// 14 as a third. `$reg` is the registers' name but for the number, `$move`
    /// loads and stores one.
    macro_rules! vector_loop {
        ($name:ident, $feature:literal, $reg:literal, $move:literal, $zero:literal, $($part:literal),+) => {
            #[target_feature(enable = $feature)]
            fn $name(turns: u64, registers: &mut Registers) {
                // SAFETY: instructions of the feature on registers that are
                // declared as overwritten. Read are three rows of 64 bytes, written
                // twelve at most as long: the parts of `registers` have more.
                unsafe {
                    asm!(
                        concat!($move, " ", $reg, "12, [{inputs}]"),
                        concat!($move, " ", $reg, "13, [{inputs} + 64]"),
                        concat!($move, " ", $reg, "14, [{inputs} + 128]"),
                        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11",
                        concat!($zero, " ", $reg, "\\n, ", $reg, "\\n, ", $reg, "\\n"),
                        ".endr",
                        "2:",
                        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11",
                        $($part,)+
                        ".endr",
                        "dec {turns}",
                        "jnz 2b",
                        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11",
                        concat!($move, " [{sums}], ", $reg, "\\n"),
                        "add {sums}, 64",
                        ".endr",
                        turns = inout(reg) turns => _,
                        inputs = in(reg) registers.inputs.as_ptr(),
                        sums = inout(reg) registers.sums.as_mut_ptr() => _,
                        out("xmm0") _,
                        out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _,
                        out("xmm5") _, out("xmm6") _, out("xmm7") _, out("xmm8") _,
                        out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _,
                        out("xmm13") _, out("xmm14") _, out("xmm15") _,
                        options(nostack)
                    );
                }
            }
        };
    }

    vector_loop!(
        fma_256,
        "avx2,fma",
        "ymm",
        "vmovdqu",
        "vpxor",
        "vfmadd231ps ymm\\n, ymm12, ymm13"
    );
    vector_loop!(
        madd_256,
        "avx2",
        "ymm",
        "vmovdqu",
        "vpxor",
        "vpmaddubsw ymm15, ymm12, ymm13",
        "vpmaddwd ymm15, ymm15, ymm14",
        "vpaddd ymm\\n, ymm\\n, ymm15"
    );
    vector_loop!(
        dot_256,
        "avx2,avxvnni",
        "ymm",
        "vmovdqu",
        "vpxor",
        "{{vex}} vpdpbusd ymm\\n, ymm12, ymm13"
    );
    vector_loop!(
        fma_512,
        "avx512f",
        "zmm",
        "vmovdqu64",
        "vpxord",
        "vfmadd231ps zmm\\n, zmm12, zmm13"
    );
    vector_loop!(
        dot_512,
        "avx512f,avx512vnni",
        "zmm",
        "vmovdqu64",
        "vpxord",
        "vpdpbusd zmm\\n, zmm12, zmm13"
    );

    /// Sums in tiles: 0 to 3, as [`Tiles`](crate::tiles::Tiles) lays them out.
    const TILE_SUMS: u64 = 4;

    fn dot_tiles(turns: u64, registers: &mut Registers) {
        use crate::tiles::{STRIDE, Shape, Tiles, dot, load, store, zero};
        const { assert!(STRIDE == 64) };
        let shape = Shape {
            tokens: 16,
            columns: 64,
        };
        // Sixteen rows of a factor, all alike.
        let factors = [0, 1].map(|i| [registers.inputs[i]; 16]);
        let [a, b] = factors.each_ref().map(|rows| rows.as_ptr());
        let sums = registers.sums.as_mut_ptr();
        // SAFETY: whoever calls a loop knows that the machine has its instruction
        // set; the tiles in use are those that are configured here, all of 16
        // rows of 64 bytes, as are the factors; there are 64 rows of sums.
        unsafe {
            let tiles = Tiles::configure(shape);
            zero!(0);
            zero!(1);
            zero!(2);
            zero!(3);
            load!(4, a);
            load!(5, a);
            load!(6, b);
            load!(7, b);
            for _ in 0..turns {
                dot!(0, 4, 6);
                dot!(1, 4, 7);
                dot!(2, 5, 6);
                dot!(3, 5, 7);
            }
            store!(sums, 0);
            store!(sums.add(16), 1);
            store!(sums.add(32), 2);
            store!(sums.add(48), 3);
            drop(tiles);
        }
    }

    /// Runs a chain of dependent additions.
    pub(super) fn chain(turns: u64) -> bool {
        // SAFETY: additions on one register.
        unsafe {
            asm!(
                "2:",
                ".rept 64",
                "add {sum}, {one}",
                ".endr",
                "dec {turns}",
                "jnz 2b",
                sum = inout(reg) 0u64 => _,
                one = in(reg) 1u64,
                turns = inout(reg) turns.max(1) => _,
                options(nomem, nostack)
            );
        }
        true
    }
}

#[cfg(target_arch = "aarch64")]
mod platform {
    use std::arch::asm;

    use super::{Arithmetic, PeakLoop, Registers};
    use crate::Isa;

    pub(super) fn loops() -> Vec<PeakLoop> {
        vec![
            PeakLoop {
                isa: Isa::Scalar, // every AArch64 has it
                arithmetic: Arithmetic::F32,
                instruction: "fmla .4s",
                operations: SUMS * 4 * 2,
                run: fma,
            },
            PeakLoop {
                isa: Isa::NeonDot,
                arithmetic: Arithmetic::Int8,
                instruction: "sdot .4s",
                operations: SUMS * 16 * 2,
                run: dot,
            },
        ]
    }

    /// Independent sums: latency 4 times four instructions a cycle.
    const SUMS: u64 = 16;

    macro_rules! vector_loop {
        ($name:ident, $feature:literal, $part:literal) => {
            #[target_feature(enable = $feature)]
            fn $name(turns: u64, registers: &mut Registers) {
                // SAFETY: instructions of the feature on registers that are
                // declared as overwritten. Read are 16 bytes of two inputs, written
                // are 16 rows of sums: the parts of `registers` have more.
                unsafe {
                    asm!(
                        "ldr q24, [{inputs}]",
                        "ldr q25, [{inputs}, #64]",
                        ".irp n, 0,1,2,3,4,5,6,7,16,17,18,19,20,21,22,23",
                        "movi v\\n\\().4s, #0",
                        ".endr",
                        "2:",
                        ".irp n, 0,1,2,3,4,5,6,7,16,17,18,19,20,21,22,23",
                        $part,
                        ".endr",
                        "subs {turns}, {turns}, #1",
                        "b.ne 2b",
                        ".irp n, 0,1,2,3,4,5,6,7,16,17,18,19,20,21,22,23",
                        "str q\\n, [{sums}], #64",
                        ".endr",
                        turns = inout(reg) turns => _,
                        inputs = in(reg) registers.inputs.as_ptr(),
                        sums = inout(reg) registers.sums.as_mut_ptr() => _,
                        out("v0") _, out("v1") _, out("v2") _, out("v3") _,
                        out("v4") _, out("v5") _, out("v6") _, out("v7") _,
                        out("v16") _, out("v17") _, out("v18") _, out("v19") _,
                        out("v20") _, out("v21") _, out("v22") _, out("v23") _,
                        out("v24") _, out("v25") _,
                        options(nostack)
                    );
                }
            }
        };
    }

    vector_loop!(fma, "neon", "fmla v\\n\\().4s, v24.4s, v25.4s");
    vector_loop!(dot, "neon,dotprod", "sdot v\\n\\().4s, v24.16b, v25.16b");

    /// Runs a chain of dependent additions.
    pub(super) fn chain(turns: u64) -> bool {
        // SAFETY: additions on one register.
        unsafe {
            asm!(
                "2:",
                ".rept 64",
                "add {sum}, {sum}, {one}",
                ".endr",
                "subs {turns}, {turns}, #1",
                "b.ne 2b",
                sum = inout(reg) 0u64 => _,
                one = in(reg) 1u64,
                turns = inout(reg) turns.max(1) => _,
                options(nomem, nostack)
            );
        }
        true
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod platform {
    pub(super) fn loops() -> Vec<super::PeakLoop> {
        Vec::new()
    }

    pub(super) fn chain(_turns: u64) -> bool {
        false
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Between what a machine of the nineties and one of the next decade has;
    /// emulators and busy machines are below the former.
    #[test]
    fn the_clock_is_that_of_some_processor() {
        if let Some(hz) = clock_hz() {
            assert!(hz > 1e6 && hz < 2e10, "{hz}");
        }
    }

    /// Products of ones add up to the number of multiplications, which is half
    /// of the operations: the loops did what they claim, in every lane and turn.
    /// 1000 turns are below 2^24, so sums of floats are exact too.
    #[test]
    fn every_loop_does_the_operations_it_claims() {
        let loops = PeakLoop::available();
        let known = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
        assert_eq!(loops.is_empty(), !known);
        for peak in &loops {
            for turns in [0, 1, 3, 1000] {
                let mut registers = Registers::zero();
                let one = match peak.arithmetic {
                    Arithmetic::F32 => 1f32.to_le_bytes(),
                    Arithmetic::Int8 => [1; 4],
                };
                let rows = [one, one, [1, 0, 1, 0]];
                for (input, word) in registers.inputs.iter_mut().zip(rows) {
                    input.as_chunks_mut().0.fill(word);
                }
                peak.run_on(turns, &mut registers);
                let lanes = registers.sums.as_flattened().as_chunks().0;
                let products: f64 = lanes
                    .iter()
                    .map(|&lane| match peak.arithmetic {
                        Arithmetic::F32 => f64::from(f32::from_le_bytes(lane)),
                        Arithmetic::Int8 => f64::from(i32::from_le_bytes(lane)),
                    })
                    .sum();
                let claimed = peak.operations(turns.max(1)) as f64;
                assert_eq!(2.0 * products, claimed, "{peak:?}, {turns} turns");
            }
        }
        skipped(&loops);
    }

    /// Says which loops no test ran for want of a machine.
    fn skipped(ran: &[PeakLoop]) {
        use std::io::Write as _;
        for peak in platform::loops() {
            let same = |p: &PeakLoop| p.instruction == peak.instruction;
            if !ran.iter().any(same) {
                let _ = writeln!(
                    std::io::stderr(),
                    "SKIPPED: {}: this machine has no {}",
                    peak.instruction,
                    peak.isa
                );
            }
        }
    }

    /// No instruction set has more than two units of its widest vectors, so
    /// fewer operations than these in a cycle: a count that is wrong by a factor
    /// would show.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn no_loop_claims_more_than_the_units_there_are() {
        for peak in PeakLoop::available() {
            let turns = 20_000;
            let clock = clock_hz().unwrap();
            let best = (0..20)
                .map(|_| {
                    let start = Instant::now();
                    peak.run(turns);
                    start.elapsed().as_secs_f64()
                })
                .fold(f64::INFINITY, f64::min);
            let per_cycle = peak.operations(turns) as f64 / best / clock;
            let most = match (peak.isa, peak.arithmetic) {
                (Isa::Amx, _) => 2048.0,
                (_, Arithmetic::F32) => 2.0 * 16.0 * 2.0,
                (_, Arithmetic::Int8) => 2.0 * 64.0 * 2.0,
            };
            // Clocks move between the two measurements, by turbo steps.
            assert!(per_cycle < 1.5 * most, "{peak:?}: {per_cycle} a cycle");
        }
    }
}
