//! Prompts that any program can reproduce.

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The splitmix64 generator of Steele, Lea and Flood.
pub(crate) struct SplitMix64(u64);

impl SplitMix64 {
    /// The state before the first draw.
    pub(crate) fn new(state: u64) -> SplitMix64 {
        SplitMix64(state)
    }

    /// Adds γ to the state and mixes it.
    pub(crate) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// `count` ids below `vocab_size`: splitmix64 outputs modulo the vocabulary. The
/// state starts at `seed + γ` and γ is added before every draw, so the first id
/// comes from `seed + 2γ`.
pub fn synthetic_prompt(seed: u64, count: usize, vocab_size: usize) -> Vec<u32> {
    let mut random = SplitMix64::new(seed.wrapping_add(GAMMA));
    (0..count)
        .map(|_| (random.draw() % vocab_size.max(1) as u64) as u32)
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

    /// The generator itself, against the published reference outputs for seed
    /// 1234567 (the vector that several languages' libraries test with).
    #[test]
    fn the_generator_gives_the_published_numbers() {
        let mut random = SplitMix64::new(1234567);
        for expected in [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        ] {
            assert_eq!(random.draw(), expected);
        }
    }
}
