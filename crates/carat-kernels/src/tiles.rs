//! AMX tiles: permission, configuration and the instructions in use.
//!
//! Intrinsics for AMX are not stable, so these are single instructions in
//! `asm!`. Every block counts as reading and writing memory, hence keeps its
//! place among the others and among loads and stores around it; tile registers
//! are used by nothing that the compiler makes.

use std::arch::asm;

/// Bytes from one row of a tile to the next, in all our buffers.
pub(crate) const STRIDE: usize = 64;

/// Asks the system for the use of tiles; whether this machine has int8 tiles
/// and the system granted them.
pub(crate) fn request() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Leaf 7: EDX bit 24 AMX-TILE, bit 25 AMX-INT8.
    const TILE_INT8: u32 = 1 << 24 | 1 << 25;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_INT8 == TILE_INT8 && permitted()
}

/// Linux grants the 8 KiB of tile state per process, on request, before any
/// thread touches it (`Documentation/arch/x86/xstate.rst`).
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: a system call that takes two numbers and writes no memory; it
    // fails where the kernel does not know it.
    unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        ) == 0
    }
}

/// Elsewhere nobody has tried.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The 64 bytes of `ldtilecfg`.
#[repr(C, align(64))]
struct Config([u8; 64]);

/// Sizes of tile products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Rows of the input: 1 to 16.
    pub(crate) tokens: usize,
    /// Columns of a product: up to 64, a multiple of 4.
    pub(crate) columns: usize,
}

/// Tiles of this thread, configured: 0 to 3 are sums, 4 and 5 inputs (a row per
/// token), 6 and 7 weights (a row per four columns). Released on drop.
pub(crate) struct Tiles(());

impl Tiles {
    /// # Safety
    ///
    /// The system must have granted tiles ([`request`]).
    pub(crate) unsafe fn configure(shape: Shape) -> Tiles {
        assert!((1..=16).contains(&shape.tokens));
        assert!((4..=64).contains(&shape.columns) && shape.columns.is_multiple_of(4));
        let (tokens, columns) = (shape.tokens as u8, shape.columns as u8);
        let mut config = Config([0; 64]);
        config.0[0] = 1; // palette
        for tile in 0..8 {
            let (rows, bytes) = match tile {
                0..4 => (tokens, 64),
                4..6 => (tokens, columns),
                _ => (columns / 4, 64),
            };
            config.0[16 + 2 * tile] = bytes;
            config.0[48 + tile] = rows;
        }
        // SAFETY: AMX is there and granted; 64 bytes of a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack)) };
        Tiles(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: AMX is there, or this value would not exist.
        unsafe { asm!("tilerelease", options(nostack)) };
    }
}

/// `zero!(N)`: clears tile N.
macro_rules! zero {
    ($tile:literal) => {
        std::arch::asm!(concat!("tilezero tmm", $tile), options(nostack))
    };
}
pub(crate) use zero;

/// `load!(N, at)`: loads tile N, rows [`STRIDE`] bytes apart.
macro_rules! load {
    ($tile:literal, $at:expr) => {
        std::arch::asm!(
            concat!("tileloadd tmm", $tile, ", [{} + {}]"),
            in(reg) $at,
            in(reg) $crate::tiles::STRIDE,
            options(nostack)
        )
    };
}
pub(crate) use load;

/// As [`load!`], with the hint that the rows will not be used again soon: they
/// leave the L1 cache to the weights.
macro_rules! load_once {
    ($tile:literal, $at:expr) => {
        std::arch::asm!(
            concat!("tileloaddt1 tmm", $tile, ", [{} + {}]"),
            in(reg) $at,
            in(reg) $crate::tiles::STRIDE,
            options(nostack)
        )
    };
}
pub(crate) use load_once;

/// `store!(at, N)`: stores tile N, rows [`STRIDE`] bytes apart.
macro_rules! store {
    ($at:expr, $tile:literal) => {
        std::arch::asm!(
            concat!("tilestored [{} + {}], tmm", $tile),
            in(reg) $at,
            in(reg) $crate::tiles::STRIDE,
            options(nostack)
        )
    };
}
pub(crate) use store;

/// `dot!(C, A, B)`: adds the products of signed bytes, `C[m][n] += Σ A[m][k] · B[k][n]`,
/// with four columns of A against the four bytes of a dword of B.
macro_rules! dot {
    ($c:literal, $a:literal, $b:literal) => {
        std::arch::asm!(
            concat!("tdpbssd tmm", $c, ", tmm", $a, ", tmm", $b),
            options(nostack)
        )
    };
}
pub(crate) use dot;
