//! The ways to run a collective. The engine's `plan/strategy.rs` chooses one; ranks compare it with their match keys,
//! and the board shows which one ran.

use std::fmt;

/// How a collective is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Strategy {
    /// Through the windows of all ranks of a host, round after round.
    Windows = 0,
    /// Small ones that were queued behind each other, in one meeting, through windows.
    Burst = 1,
    /// From rank to rank of a host, piece after piece.
    Pipeline = 2,
    /// Over the ranks of each host first, then over hosts, of which each does all.
    Hierarchical = 3,
    /// The same, and each host does a part.
    Scattered = 4,
    /// Where tensors are: the last to arrive and its helpers do all.
    InPlace = 5,
    /// Where tensors are: every rank does its share.
    InPlaceShares = 6,
    /// Messages around a ring.
    Ring = 7,
    /// Messages along the dimensions of a torus.
    Bucket = 8,
}

impl Strategy {
    /// All of them, by their codes.
    pub const ALL: [Self; 9] = [
        Self::Windows,
        Self::Burst,
        Self::Pipeline,
        Self::Hierarchical,
        Self::Scattered,
        Self::InPlace,
        Self::InPlaceShares,
        Self::Ring,
        Self::Bucket,
    ];

    /// The one with this code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Whether hosts fold what their ranks have before anything goes from one to another.
    pub fn is_hierarchical(self) -> bool {
        matches!(self, Self::Hierarchical | Self::Scattered)
    }

    /// The word for it, in reports and on the board.
    pub fn name(self) -> &'static str {
        match self {
            Self::Windows => "windows",
            Self::Burst => "burst",
            Self::Pipeline => "pipeline",
            Self::Hierarchical => "hierarchical",
            Self::Scattered => "scattered",
            Self::InPlace => "in_place",
            Self::InPlaceShares => "in_place_shares",
            Self::Ring => "ring",
            Self::Bucket => "bucket",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::*;

    #[test]
    fn codes_are_places_in_the_list() {
        for (code, strategy) in (0u8..).zip(Strategy::ALL) {
            assert_eq!((strategy as u8, Strategy::from_code(code)), (code, Some(strategy)));
        }
        assert_eq!(Strategy::from_code(9), None);
        assert_eq!(Strategy::from_code(u8::MAX), None);
    }
}
