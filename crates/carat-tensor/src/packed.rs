//! The row-interleaved layout of matrices in a bundle.
