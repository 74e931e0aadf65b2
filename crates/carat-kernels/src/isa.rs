use std::fmt;
use std::sync::OnceLock;

/// Instruction sets that kernels are written for, weakest first.
///
/// Every kernel gives the same bits on every ISA: the scalar twin fixes the
/// order of additions, and the vector forms follow it lane by lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, any machine.
    Scalar,
    /// AArch64 with the dot product extension.
    NeonDot,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// AVX2 and the 256-bit dot products of AVX-VNNI.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, VL and VNNI.
    Avx512Vnni,
    /// AVX-512 as above, with GFNI and the int8 tiles of AMX, which the
    /// operating system has granted.
    Amx,
}

/// The environment variable that lowers the instruction set.
pub const ISA_VARIABLE: &str = "CARAT_ISA";

/// Why a requested instruction set cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum IsaError {
    /// No instruction set has that name.
    #[error(
        "{ISA_VARIABLE}={name:?} is not an instruction set; known: {}",
        known()
    )]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// This machine lacks it.
    #[error("{ISA_VARIABLE}={requested}: this machine has no {requested}; its best is {best}")]
    Unavailable {
        /// What was asked for.
        requested: Isa,
        /// The best this machine has.
        best: Isa,
    },
}

fn known() -> String {
    Isa::ALL.map(Isa::name).join(", ")
}

impl Isa {
    /// Every instruction set that kernels are written for, weakest first.
    pub const ALL: [Isa; 6] = [
        Isa::Scalar,
        Isa::NeonDot,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512Vnni,
        Isa::Amx,
    ];

    /// The name in `CARAT_ISA` and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::NeonDot => "neondot",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512Vnni => "avx512vnni",
            Isa::Amx => "amx",
        }
    }

    /// The best instruction set of this machine.
    pub fn best() -> Isa {
        Isa::available().last().unwrap_or(Isa::Scalar)
    }

    /// The best instruction set, or the one that `CARAT_ISA` asks for.
    ///
    /// # Errors
    ///
    /// If the variable names none, or one that this machine lacks.
    pub fn from_env() -> Result<Isa, IsaError> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => Isa::named(&name),
            _ => Ok(Isa::best()),
        }
    }

    /// The instruction set of that name, if this machine has it.
    ///
    /// # Errors
    ///
    /// If there is none of that name, or this machine lacks it.
    pub fn named(name: &str) -> Result<Isa, IsaError> {
        let requested = Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| IsaError::Unknown {
                name: name.to_owned(),
            })?;
        if !requested.is_available() {
            return Err(IsaError::Unavailable {
                requested,
                best: Isa::best(),
            });
        }
        Ok(requested)
    }

    /// Those that this machine can run, weakest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Whether this machine can run it. For [`Amx`](Isa::Amx) the first call
    /// asks the operating system for the use of tiles by this process.
    pub fn is_available(self) -> bool {
        static SET: OnceLock<[bool; Isa::ALL.len()]> = OnceLock::new();
        SET.get_or_init(|| Isa::ALL.map(Isa::detect))[self as usize]
    }

    /// The instruction set whose kernels serve where this one has none of its
    /// own; every machine with this one has that one.
    pub(crate) const fn base(self) -> Isa {
        match self {
            Isa::Amx => Isa::Avx512Vnni,
            Isa::AvxVnni => Isa::Avx2,
            Isa::NeonDot => Isa::Scalar,
            other => other,
        }
    }

    /// Whether a kernel of another instruction set is less than this one is meant
    /// to run: neither its own nor a vector kernel of the set that it extends.
    pub fn falls_back_to(self, served: Isa) -> bool {
        served != self && (served != self.base() || served == Isa::Scalar)
    }

    #[cfg(target_arch = "x86_64")]
    fn detect(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        match self {
            Isa::Scalar => true,
            Isa::NeonDot => false,
            Isa::Avx2 => has!("avx2") && has!("fma") && has!("f16c"),
            Isa::AvxVnni => Isa::Avx2.detect() && has!("avxvnni"),
            Isa::Avx512Vnni => {
                Isa::Avx2.detect()
                    && has!("avx512f")
                    && has!("avx512bw")
                    && has!("avx512vl")
                    && has!("avx512vnni")
            }
            Isa::Amx => Isa::Avx512Vnni.detect() && has!("gfni") && crate::tiles::request(),
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn detect(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            _ => false,
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn detect(self) -> bool {
        self == Isa::Scalar
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_less_than_meant() {
        for (isa, served, less) in [
            (Isa::Amx, Isa::Amx, false),
            (Isa::Amx, Isa::Avx512Vnni, false),
            (Isa::Amx, Isa::Avx2, true),
            (Isa::Avx512Vnni, Isa::Avx2, true),
            (Isa::AvxVnni, Isa::Avx2, false),
            (Isa::Avx2, Isa::Scalar, true),
            (Isa::NeonDot, Isa::Scalar, true),
            (Isa::Scalar, Isa::Scalar, false),
        ] {
            assert_eq!(isa.falls_back_to(served), less, "{isa} on {served}");
        }
    }

    #[test]
    fn names_are_known_and_foreign_ones_refused() {
        for isa in Isa::available() {
            assert_eq!(Isa::named(isa.name()), Ok(isa));
            assert!(isa.base().is_available());
        }
        assert!(Isa::best().is_available());
        let foreign = if cfg!(target_arch = "x86_64") {
            Isa::NeonDot
        } else {
            Isa::Avx2
        };
        let error = Isa::named(foreign.name()).unwrap_err();
        assert!(error.to_string().contains("this machine has no"), "{error}");
        let error = Isa::named("sse9").unwrap_err();
        assert!(
            error.to_string().contains("scalar, neondot, avx2"),
            "{error}"
        );
    }
}
