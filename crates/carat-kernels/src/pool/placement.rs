//! On which processors a worker may run.

#[cfg(target_os = "linux")]
pub(super) use linux::Placement;

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::Placement;

#[cfg(target_os = "linux")]
mod linux {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

    /// The processors of the calling thread. Errors are ignored: where a
    /// thread runs is a matter of speed only.
    pub(crate) struct Placement {
        allowed: Option<CpuSet>,
        avoided: Option<u32>,
    }

    impl Placement {
        pub(crate) fn new() -> Placement {
            Placement {
                allowed: sched_getaffinity(None).ok(),
                avoided: None,
            }
        }

        /// The calling thread's processor.
        pub(crate) fn current_cpu() -> Option<u32> {
            u32::try_from(sched_getcpu()).ok()
        }

        /// Moves the calling thread off processor `cpu`, if it has another.
        pub(crate) fn keep_off(&mut self, cpu: u32) {
            let (Some(mut set), false) = (self.allowed, self.avoided == Some(cpu)) else {
                return;
            };
            let index = cpu as usize;
            if index >= CpuSet::MAX_CPU || !set.is_set(index) || set.count() < 2 {
                return;
            }
            set.unset(index);
            if sched_setaffinity(None, &set).is_ok() {
                self.avoided = Some(cpu);
            }
        }

        /// Undoes [`keep_off`](Placement::keep_off).
        pub(crate) fn allow_all(&mut self) {
            if let (Some(set), Some(_)) = (&self.allowed, self.avoided.take()) {
                let _ = sched_setaffinity(None, set);
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn keeps_off_one_processor_and_comes_back() {
            let before = sched_getaffinity(None).unwrap();
            let mut placement = Placement::new();
            let cpu = Placement::current_cpu().unwrap();
            placement.keep_off(u32::MAX);
            assert_eq!(sched_getaffinity(None).unwrap(), before);
            placement.keep_off(cpu);
            let mut expected = before;
            if before.count() > 1 {
                expected.unset(cpu as usize);
            }
            assert_eq!(sched_getaffinity(None).unwrap(), expected);
            placement.allow_all();
            assert_eq!(sched_getaffinity(None).unwrap(), before);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    /// Where the system offers no such choice, or we do not make it.
    pub(crate) struct Placement;

    impl Placement {
        pub(crate) fn new() -> Placement {
            Placement
        }

        pub(crate) fn current_cpu() -> Option<u32> {
            None
        }

        pub(crate) fn keep_off(&mut self, _cpu: u32) {}

        pub(crate) fn allow_all(&mut self) {}
    }
}
