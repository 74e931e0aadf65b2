//! Sequences, sampling and the decode loop.
