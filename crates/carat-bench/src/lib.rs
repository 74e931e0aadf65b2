//! Benchmark protocol and records.
