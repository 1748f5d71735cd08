//! The figures of schedules that are right.

use super::error::VerifyError;
use crate::schedule::ScheduleTraffic;

/// Figures that the verifier found for schedules that are right.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proof {
    /// The bytes that the ranks moved.
    pub traffic: ScheduleTraffic,
    /// Messages and meetings on the longest path through all ranks, each waiting for the one before.
    pub rounds: u64,
    /// Messages sent by all ranks.
    pub messages: u64,
}

impl Proof {
    /// Checks the bytes moved against a formula.
    ///
    /// # Errors
    /// The first pair of ranks, or the shared memory, that moved something else.
    pub fn expect_traffic(&self, formula: &ScheduleTraffic) -> Result<(), VerifyError> {
        let (given, expected) = (self.traffic.memory(), formula.memory());
        if given != expected {
            return Err(VerifyError::MemoryTraffic { expected, given });
        }
        let pairs = self.traffic.iter().chain(formula.iter());
        let differs =
            |&(from, to, _): &(u32, u32, u64)| self.traffic.between(from, to) != formula.between(from, to);
        match pairs.into_iter().find(differs) {
            None => Ok(()),
            Some((from, to, _)) => Err(VerifyError::LinkTraffic {
                from,
                to,
                expected: formula.between(from, to),
                given: self.traffic.between(from, to),
            }),
        }
    }
}
