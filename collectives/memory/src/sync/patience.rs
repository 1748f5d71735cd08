//! How long a waiter stays on its CPU before it sleeps.
//!
//! With more ranks than CPUs, a waiter that does not sleep takes time from the rank it waits for: measured
//! with 63 waiters on 2 CPUs, a computing rank slows down 4 times when they yield and 68 times when they
//! spin. So spinning is for ranks that have a CPU each, and yielding is bounded: to a few turns of the ranks
//! that share a CPU, which is about what a small operation takes them. A waiter that sleeps has to be woken,
//! and takes several times as long.

use super::yield_now;

/// With a rank that computes on the same CPU, each of these is a switch there and back again, and lasts as long as
/// the scheduler lets that one run. Measured from Python on 8 to 64 ranks and 2 CPUs, 2 to 40 of them.
const YIELDS: u32 = 20;

/// A waiting policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// Sleep at once.
    pub const NONE: Patience = Patience { spins: 0, yields: 0 };

    /// For `ranks` ranks that share `cpus` CPUs.
    pub fn new(ranks: u32, cpus: u32) -> Self {
        if cfg!(tpurun_loom) {
            Self::NONE
        } else if ranks <= cpus {
            // About 20 us of spinning: several times the latency of a small operation.
            Patience { spins: 1000, yields: 10 }
        } else {
            Patience { spins: 0, yields: YIELDS }
        }
    }

    /// Begins a wait.
    #[inline]
    pub fn begin(self) -> Waiting {
        Waiting { left: self }
    }
}

/// One wait under a policy.
#[derive(Debug)]
pub struct Waiting {
    left: Patience,
}

impl Waiting {
    /// Passes a moment; false when it is time to sleep.
    pub fn again(&mut self) -> bool {
        if self.left.spins > 0 {
            self.left.spins -= 1;
            std::hint::spin_loop();
            true
        } else if self.left.yields > 0 {
            self.left.yields -= 1;
            yield_now();
            true
        } else {
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversubscribed_ranks_never_spin() {
        let mut waiting = Patience::new(64, 2).begin();
        assert_eq!(waiting.left.spins, 0);
        let moments = (0..1000).take_while(|_| waiting.again()).count();
        assert!(moments <= YIELDS as usize, "a waiter gave up its CPU only after {moments} moments");
    }
}
