//! Naive fp32 reference forward over a ModelSpec.
