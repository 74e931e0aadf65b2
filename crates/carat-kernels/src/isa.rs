use std::fmt;

/// Instruction sets that kernels are written for, weakest first.
///
/// Every kernel gives the same bits on every ISA: the scalar twin fixes the
/// order of additions, and the vector forms follow it lane by lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, any machine.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and VNNI.
    Avx512Vnni,
}

/// The environment variable that lowers the instruction set.
pub const ISA_VARIABLE: &str = "CARAT_ISA";

/// Why a requested instruction set cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum IsaError {
    /// No instruction set has that name.
    #[error("{ISA_VARIABLE}={0:?} is not an instruction set; known: scalar, avx2, avx512vnni")]
    Unknown(String),
    /// This machine lacks it.
    #[error("{ISA_VARIABLE}={requested}: this machine has {best} at most")]
    Unavailable {
        /// What was asked for.
        requested: Isa,
        /// The best this machine has.
        best: Isa,
    },
}

impl Isa {
    /// Every instruction set that kernels are written for, weakest first.
    pub const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512Vnni];

    /// The best instruction set of this machine.
    pub fn best() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            if avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512vnni")
            {
                return Isa::Avx512Vnni;
            }
            if avx2 {
                return Isa::Avx2;
            }
        }
        Isa::Scalar
    }

    /// The best instruction set, or the one that `CARAT_ISA` asks for.
    pub fn from_env() -> Result<Isa, IsaError> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => Isa::named(&name),
            _ => Ok(Isa::best()),
        }
    }

    /// The instruction set of that name, if this machine has it.
    pub fn named(name: &str) -> Result<Isa, IsaError> {
        let requested = Isa::ALL
            .into_iter()
            .find(|isa| isa.to_string() == name)
            .ok_or_else(|| IsaError::Unknown(name.to_owned()))?;
        if requested > Isa::best() {
            return Err(IsaError::Unavailable {
                requested,
                best: Isa::best(),
            });
        }
        Ok(requested)
    }

    /// Those that this machine can run, weakest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|&isa| isa <= Isa::best())
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512Vnni => "avx512vnni",
        })
    }
}
