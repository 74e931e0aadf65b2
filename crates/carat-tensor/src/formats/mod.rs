//! Scalar decoders and encoders: the definition of every format.
