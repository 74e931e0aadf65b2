//! Plan, states and the CPU backend.
