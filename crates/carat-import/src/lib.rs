//! Checkpoints (GGUF, safetensors, HF configs) to ModelSpec and tensor source.
