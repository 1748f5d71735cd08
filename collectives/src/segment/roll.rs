//! The words of a segment in which survivors agree on who they are.

use crate::rank_set::RankSet;
use crate::sync::ballot::Roll;
use crate::sync::{AtomicU32, AtomicU64, Doorbell};

use super::Segment;

impl Roll for Segment {
    fn ranks(&self) -> u32 {
        self.size()
    }

    fn state(&self) -> &AtomicU64 {
        self.region().at(self.layout().ballot())
    }

    fn bell(&self) -> &Doorbell {
        self.region().at(self.layout().ballot() + 64)
    }

    fn wish(&self, rank: u32) -> &AtomicU32 {
        self.wished(rank)
    }

    fn list(&self, rank: u32, word: usize) -> &AtomicU64 {
        RankSet::new(self.region(), self.layout().survivors(rank), self.size()).word(word)
    }
}
