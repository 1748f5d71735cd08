//! The work that a meeting does for all its ranks before it opens, in pieces that those who wait help with.

use std::ops::Range;

use crate::plan::sizes::helped_pieces;
use tpurun_memory::failure::Failure;
use tpurun_memory::traffic::Traffic;
use tpurun_protocol::layout::LINE;
use tpurun_protocol::op::Op;

use super::{Meet, Memory, Rounds};

impl Rounds {
    pub(super) fn fold_or_open(&self, meet: &Meet<'_>, round: u32, memory: Memory) -> Result<(), Failure> {
        let meeting = self.segment.meeting();
        let work = match (&meet.mapped, memory) {
            (Some(mapped), Memory::Arenas) => mapped.work_bytes(&self.segment, meet.op)?,
            (_, Memory::Mixed | Memory::Shares) => {
                meeting.open();
                return Ok(());
            }
            _ => self.fold_work(meet),
        };
        let pieces = helped_pieces(work, self.config.cpus, self.segment.size(), self.segment.tuning());
        if pieces <= 1 {
            self.fold(meet, 0, 1, round)?;
            meeting.open();
            return Ok(());
        }
        meeting.share(round, pieces, self.config.cpus.min(self.segment.size()) - 1);
        while let Some((piece, of)) = meeting.claim(round) {
            self.fold(meet, piece, of, round)?;
            meeting.piece_done(of);
        }
        Ok(())
    }

    pub(super) fn fold(&self, meet: &Meet<'_>, piece: u32, of: u32, round: u32) -> Result<(), Failure> {
        if let Some(mapped) = &meet.mapped {
            return self.in_place(|| mapped.run(&self.segment, meet.op, piece, of, &self.shared.traffic));
        }
        if meet.fold_bytes == 0 {
            return Ok(());
        }
        match self.halves(meet) {
            Some((_, second)) => self.fold_hosts(meet, second, (piece, of), round),
            None => {
                let stretch = cut(meet.fold_bytes, piece, of);
                self.fold_stretch(meet.op, meet.fold_window, stretch, round);
            }
        }
        Ok(())
    }

    /// Does something with tensors of other ranks where they are.
    pub(crate) fn in_place(&self, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        self.segment
            .loans()
            .in_place(work)
            .unwrap_or_else(|| Err(self.prospects.poisoned().expect("it stays poisoned")))
    }

    /// Folds a stretch of all ranks' windows.
    pub(super) fn fold_stretch(&self, op: &Op, window: usize, stretch: Range<usize>, round: u32) {
        let (layout, parity) = (self.segment.layout(), (round % 2) as usize);
        let windows = self.segment.ranks().map(|rank| layout.window(rank, window));
        let reduction = op.reduction(self.segment.size());
        let (region, first) = (self.segment.region(), stretch.start);
        region.read_alone(stretch.len(), windows.clone().map(|window| window + first), |start, bytes| {
            let sources = windows.clone().map(|window| window + first + start);
            let out = layout.folded(parity) + first + start;
            region.fold(reduction, sources, out, bytes / reduction.dtype().size());
        });
        let written = stretch.len() as u64;
        let read = written * u64::from(self.segment.size());
        self.shared.traffic.add(Traffic { read, written, staged: read + written });
    }
}

/// One of so many pieces of `bytes`, which begin at cache lines.
pub(super) fn cut(bytes: usize, piece: u32, of: u32) -> Range<usize> {
    let lines = bytes.div_ceil(LINE);
    let at = |n: u32| (lines * n as usize / of as usize * LINE).min(bytes);
    at(piece)..at(piece + 1)
}
