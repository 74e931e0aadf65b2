//! carat in this process.

use std::{ops::ControlFlow, time::Instant};

use carat_engine::{Engine, Schedule};

use crate::{
    Arm, ArmInfo, BenchError, Measured, Nanos, Protocol, TrialPrompt, peak_memory_bytes,
    resident_memory_bytes,
};

/// An engine of this process.
pub struct EngineArm<'a> {
    info: ArmInfo,
    engine: &'a mut Engine,
    schedule: Option<Schedule>,
}

impl<'a> EngineArm<'a> {
    /// An arm on an engine; `info` describes both.
    pub fn new(info: ArmInfo, engine: &'a mut Engine) -> EngineArm<'a> {
        EngineArm {
            info,
            engine,
            schedule: None,
        }
    }

    /// Prefills in chunks of another size than the engine's own.
    ///
    /// # Errors
    /// When the chunk has no token.
    pub fn with_chunk(mut self, chunk: usize) -> Result<EngineArm<'a>, BenchError> {
        self.schedule = Some(Schedule::every(chunk)?);
        self.info.chunk = Some(chunk);
        Ok(self)
    }
}

impl Arm for EngineArm<'_> {
    fn info(&self) -> ArmInfo {
        ArmInfo {
            optimised: Some(!cfg!(debug_assertions)),
            vocab_size: Some(self.engine.vocab_size()),
            backend: Some(self.engine.backend().describe()),
            ..self.info.clone()
        }
    }

    fn trial(&mut self, protocol: &Protocol, prompt: &TrialPrompt) -> Result<Measured, BenchError> {
        let start = Instant::now();
        let mut sequence = self.engine.open(protocol.tokens())?;
        let reset = start.elapsed();
        let mut options = protocol.generate_options();
        options.schedule.clone_from(&self.schedule);
        let schedule = self
            .schedule
            .clone()
            .unwrap_or_else(|| self.engine.schedule());
        let mut fill = None;
        let mut generate = || {
            if !prompt.fill.is_empty() {
                let start = Instant::now();
                self.engine
                    .prefill(&mut sequence, &prompt.fill, &schedule)?;
                fill = Some(start.elapsed());
            }
            self.engine
                .generate(&mut sequence, &prompt.all(), &options, &mut |_| {
                    ControlFlow::Continue(())
                })
        };
        let result = generate();
        self.engine.close(sequence);
        let generation = result?;
        Ok(Measured {
            prompt_tokens: generation.prompt_tokens - generation.reused_tokens,
            new_tokens: generation.ids.len(),
            ttft_ns: generation.timings.first_token.into(),
            decode_ns: generation.timings.decode.into(),
            reset_ns: Some(reset.into()),
            fill_ns: fill.map(Nanos::from),
            load_ns: None,
            peak_memory_bytes: peak_memory_bytes(),
            steady_memory_bytes: resident_memory_bytes(),
        })
    }
}
