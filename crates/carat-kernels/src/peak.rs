//! Arithmetic as fast as it goes: the bound that many tokens are held against.
//!
//! Loops of one instruction on registers, with enough independent sums to hide
//! its latency. They compute nothing of use; their numbers of operations are
//! exact.

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
    run: unsafe fn(turns: u64),
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

    /// Runs `turns` turns.
    pub fn run(&self, turns: u64) {
        assert!(self.isa.is_available());
        // SAFETY: the machine has the instruction set, as asserted.
        unsafe { (self.run)(turns) }
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

    use super::{Arithmetic, PeakLoop};
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

    /// Repeats an instruction on registers 0 to 11, with 12 and 13 as inputs.
    macro_rules! vector_loop {
        ($name:ident, $feature:literal, $zero:literal, $($part:literal),+) => {
            #[target_feature(enable = $feature)]
            fn $name(turns: u64) {
                // SAFETY: instructions of the feature on registers that are
                // declared as overwritten; no memory is touched.
                unsafe {
                    asm!(
                        // Zeros: sums that overflow to infinity would trap nowhere,
                        // but subnormal ones might be slow.
                        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14",
                        $zero,
                        ".endr",
                        "2:",
                        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11",
                        $($part,)+
                        ".endr",
                        "dec {turns}",
                        "jnz 2b",
                        turns = inout(reg) turns.max(1) => _,
                        out("xmm0") _,
                        out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _,
                        out("xmm5") _, out("xmm6") _, out("xmm7") _, out("xmm8") _,
                        out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _,
                        out("xmm13") _, out("xmm14") _, out("xmm15") _,
                        options(nomem, nostack)
                    );
                }
            }
        };
    }

    vector_loop!(
        fma_256,
        "avx2,fma",
        "vpxor ymm\\n, ymm\\n, ymm\\n",
        "vfmadd231ps ymm\\n, ymm12, ymm13"
    );
    vector_loop!(
        madd_256,
        "avx2",
        "vpxor ymm\\n, ymm\\n, ymm\\n",
        "vpmaddubsw ymm15, ymm12, ymm13",
        "vpmaddwd ymm15, ymm15, ymm14",
        "vpaddd ymm\\n, ymm\\n, ymm15"
    );
    vector_loop!(
        dot_256,
        "avx2,avxvnni",
        "vpxor ymm\\n, ymm\\n, ymm\\n",
        "{{vex}} vpdpbusd ymm\\n, ymm12, ymm13"
    );
    vector_loop!(
        fma_512,
        "avx512f",
        "vpxord zmm\\n, zmm\\n, zmm\\n",
        "vfmadd231ps zmm\\n, zmm12, zmm13"
    );
    vector_loop!(
        dot_512,
        "avx512f,avx512vnni",
        "vpxord zmm\\n, zmm\\n, zmm\\n",
        "vpdpbusd zmm\\n, zmm12, zmm13"
    );

    /// Sums in tiles: 0 to 3, as [`Tiles`](crate::tiles::Tiles) lays them out.
    const TILE_SUMS: u64 = 4;

    fn dot_tiles(turns: u64) {
        use crate::tiles::{Shape, Tiles, dot, zero};
        let shape = Shape {
            tokens: 16,
            columns: 64,
        };
        // SAFETY: whoever calls a loop knows that the machine has its instruction
        // set; the tiles in use are those that are configured here.
        unsafe {
            let tiles = Tiles::configure(shape);
            zero!(0);
            zero!(1);
            zero!(2);
            zero!(3);
            zero!(4);
            zero!(5);
            zero!(6);
            zero!(7);
            for _ in 0..turns {
                dot!(0, 4, 6);
                dot!(1, 4, 7);
                dot!(2, 5, 6);
                dot!(3, 5, 7);
            }
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

    use super::{Arithmetic, PeakLoop};
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
            fn $name(turns: u64) {
                // SAFETY: instructions of the feature on registers that are
                // declared as overwritten; no memory is touched.
                unsafe {
                    asm!(
                        ".irp n, 0,1,2,3,4,5,6,7,16,17,18,19,20,21,22,23,24,25",
                        "movi v\\n\\().4s, #0",
                        ".endr",
                        "2:",
                        ".irp n, 0,1,2,3,4,5,6,7,16,17,18,19,20,21,22,23",
                        $part,
                        ".endr",
                        "subs {turns}, {turns}, #1",
                        "b.ne 2b",
                        turns = inout(reg) turns.max(1) => _,
                        out("v0") _, out("v1") _, out("v2") _, out("v3") _,
                        out("v4") _, out("v5") _, out("v6") _, out("v7") _,
                        out("v16") _, out("v17") _, out("v18") _, out("v19") _,
                        out("v20") _, out("v21") _, out("v22") _, out("v23") _,
                        out("v24") _, out("v25") _,
                        options(nomem, nostack)
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

    #[test]
    fn every_loop_runs_and_counts_its_turns() {
        let loops = PeakLoop::available();
        assert_eq!(
            loops.is_empty(),
            !cfg!(any(target_arch = "x86_64", target_arch = "aarch64"))
        );
        for peak in loops {
            peak.run(0);
            peak.run(1000);
            assert_eq!(peak.operations(1000), 1000 * peak.operations(1));
            assert!(peak.operations(1) > 0, "{peak:?}");
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
