//! The words of a segment in which survivors agree on who they are.

use tpurun_memory::rank_set::SharedRankSet;
use tpurun_memory::sync::ballot::Roll;
use tpurun_memory::sync::{AtomicU32, AtomicU64, Doorbell};

use super::base::Base;
use super::roster::Roster;

impl Roll for Base {
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
        Roster(self).wished(rank)
    }

    fn list(&self, rank: u32, word: usize) -> &AtomicU64 {
        SharedRankSet::new(self.region(), self.layout().survivors(rank), self.size()).word(word)
    }
}
