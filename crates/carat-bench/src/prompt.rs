//! Prompts that any program can reproduce.

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// `count` ids below `vocab_size`: splitmix64 outputs modulo the vocabulary. The
/// state starts at `seed + γ` and γ is added before every draw, so the first id
/// comes from `seed + 2γ`.
pub fn synthetic_prompt(seed: u64, count: usize, vocab_size: usize) -> Vec<u32> {
    let mut state = seed.wrapping_add(GAMMA);
    (0..count)
        .map(|_| {
            state = state.wrapping_add(GAMMA);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) % vocab_size.max(1) as u64) as u32
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Made with an independent implementation (Python integers, masked to 64 bits).
    #[test]
    fn equals_an_independent_implementation() {
        assert_eq!(synthetic_prompt(0, 6, 49152), GOLDEN_SEED_0);
        assert_eq!(synthetic_prompt(u64::MAX, 6, 2056), GOLDEN_SEED_MAX);
    }

    const GOLDEN_SEED_0: [u32; 6] = [26100, 17743, 16876, 29851, 41706, 13025];
    const GOLDEN_SEED_MAX: [u32; 6] = [393, 1401, 666, 1350, 875, 1949];
}
