//! How many CPUs this process may really use.

use std::num::NonZero;
use std::thread;

/// The CPUs in this process's affinity mask, or fewer where a cgroup (v1 or v2) grants less time.
///
/// A quota of 2.5 CPUs counts as 2: a third busy thread would only be throttled. Never 0.
pub(crate) fn usable_cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_affinity_mask_is_an_upper_bound() {
        let mask = rustix::thread::sched_getaffinity(None).unwrap();
        assert!((1..=mask.count() as usize).contains(&usable_cpus()));
    }
}
