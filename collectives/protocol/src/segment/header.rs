//! The header of a segment: written by the rank that makes it, and checked before anything else is read.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::region::{Region, is_plain_memory};
use tpurun_memory::sync::{AtomicU32, AtomicU64, Ordering};
use tpurun_memory::text::head;

use crate::config::{Matching, Results};
use crate::layout::{Layout, MAGIC, VERSION};
use crate::membership::Membership;
use crate::tuning::Tuning;

use super::base::Base;
use super::settings::Settings;
use super::words::*;

/// The header that memory of another process has, read before it is mapped.
pub(super) struct SegmentHeader {
    words: [u8; HEADER_BYTES],
    /// The bytes of all of it.
    pub(super) bytes: usize,
}

impl SegmentHeader {
    pub(super) fn read(members: &Membership, fd: &OwnedFd) -> Result<Self, Failure> {
        let inspected = || {
            // Reading a descriptor that is no memory may block.
            if !is_plain_memory(fd.as_fd()) {
                return Err(io::Error::other("it is no memory of plain pages"));
            }
            let bytes = Region::size_of(fd)?;
            let mut words = [0; HEADER_BYTES];
            // If the memory is shorter, the rest is zero.
            rustix::io::pread(fd, &mut words, 0)?;
            Ok(Self { words, bytes })
        };
        inspected().map_err(|error| refused(members, "inspect", 0, &error))
    }

    pub(super) fn word(&self, offset: usize) -> u32 {
        u32::from_ne_bytes(*self.words[offset..].first_chunk().expect("within the header"))
    }

    pub(super) fn long(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(*self.words[offset..].first_chunk().expect("within the header"))
    }
}

/// As much as is needed to know the size.
pub(super) const HEADER_BYTES: usize = 64;

/// The nonce of a segment: only those that have read the segment or been told know it.
pub type Nonce = [u8; 16];

/// Returns the nonce of the segment behind a descriptor; of other memory, whatever is there.
pub fn nonce_of(segment: BorrowedFd<'_>) -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    // If the memory is shorter, the rest is zero.
    rustix::io::pread(segment, &mut nonce, H_NONCE as u64)?;
    Ok(nonce)
}

pub(super) fn write_header(segment: &Base, settings: Settings) {
    let header = segment.layout.header();
    let word = |offset: usize| segment.region.at::<AtomicU32>(header + offset);
    segment.region.at::<AtomicU64>(header + H_MAGIC).store(MAGIC, Ordering::Relaxed);
    word(H_VERSION).store(VERSION, Ordering::Relaxed);
    word(H_RANKS).store(segment.members.size(), Ordering::Relaxed);
    word(H_CPUS).store(settings.cpus, Ordering::Relaxed);
    word(H_STRICT).store((settings.matching == Matching::Strict).into(), Ordering::Relaxed);
    word(H_VERIFY).store((settings.results == Results::Verified).into(), Ordering::Relaxed);
    word(H_EPOCH).store(segment.members.epoch, Ordering::Relaxed);
    word(H_HOSTS).store(segment.hosts.count(), Ordering::Relaxed);
    for (index, value) in settings.tuning.values().into_iter().enumerate() {
        let word = segment.region.at::<AtomicU64>(header + H_TUNING + 8 * index);
        word.store(value as u64, Ordering::Relaxed);
    }
    let window = segment.layout.wide_bytes() as u64;
    segment.region.at::<AtomicU64>(header + H_WINDOW).store(window, Ordering::Relaxed);
    let name = head(&segment.members.name, NAME_BYTES);
    segment.region.write(header + H_NAME, name.as_bytes());
    word(H_NAME_BYTES).store(name.len() as u32, Ordering::Relaxed);
    for rank in segment.ranks() {
        segment.member_word(rank, M_WORLD_RANK).store(segment.world_rank(rank), Ordering::Relaxed);
    }
}

/// Reads the numbers that [`write_header`] wrote; another process may have written others.
pub(super) fn tuning_of(region: &Region, layout: &Layout) -> Result<Tuning, String> {
    let word = |index: usize| region.at::<AtomicU64>(layout.header() + H_TUNING + 8 * index);
    Tuning::checked(std::array::from_fn(|index| word(index).load(Ordering::Relaxed) as usize))
}

pub(super) fn write_nonce(segment: &Base) -> Result<(), Failure> {
    let mut nonce = Nonce::default();
    SystemRandom::new().fill(&mut nonce).map_err(|_| {
        let text = format!("cannot create the shared segment of {}: no randomness", segment.members.title());
        Failure::new(FailureKind::Transport, text)
    })?;
    segment.region.write(segment.layout.header() + H_NONCE, &nonce);
    Ok(())
}

/// The failure of an operation on the memory of a segment.
pub(super) fn refused(members: &Membership, verb: &str, bytes: usize, error: &io::Error) -> Failure {
    let hint = match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => "; raise the limit with `ulimit -n`",
        Some(rustix::io::Errno::NOMEM) => "; lower TPURUN_STAGING_BYTES or raise the limit with `ulimit -v`",
        _ => "",
    };
    let text =
        format!("cannot {verb} the shared segment of {} ({bytes} bytes): {error}{hint}", members.title());
    Failure::new(FailureKind::Transport, text)
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::hosts::Hosts;
    use crate::segment::Segment;

    #[test]
    fn all_ranks_have_the_numbers_of_the_first_or_refuse_them() {
        let members = Membership { name: "dp0".into(), rank: 0, world_ranks: vec![0], epoch: 0 };
        let tuning = Tuning { pipeline_bytes: 77, ..Tuning::default() };
        let settings = Settings { tuning, ..Settings::default() };
        let (_segment, fd) =
            Segment::create(members.clone(), Hosts::one(1), settings, Duration::ZERO).expect("memory");
        assert_eq!(*Segment::join(members.clone(), &fd).expect("one of ours").tuning(), tuning);
        for (index, field) in Tuning::FIELDS.iter().enumerate() {
            let at = (H_TUNING + 8 * index) as u64;
            for wrong in [u64::MAX, *field.range.end() as u64 + 1] {
                rustix::io::pwrite(&fd, &wrong.to_ne_bytes(), at).expect("it is ours");
                let refused = Segment::join(members.clone(), &fd).expect_err("no such number");
                assert!(refused.to_string().contains(field.name), "{refused}");
            }
            rustix::io::pwrite(&fd, &(tuning.values()[index] as u64).to_ne_bytes(), at).expect("it is ours");
        }
        assert!(Segment::join(members, &fd).is_ok());
    }
}
