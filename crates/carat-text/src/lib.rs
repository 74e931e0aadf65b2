//! Tokenizer, chat template, stop set and stream decoder.
