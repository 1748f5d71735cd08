//! The agent's handle on a communicator of its ranks: it sees who waits for whom, and fails the communicator
//! for all its ranks at once when it knows that an operation can not complete.
//!
//! The agent never attaches: it is no member, and nothing waits for it.

use std::os::fd::OwnedFd;

use crate::layout::P2P_CHANNEL;
use crate::segment::Segment;
use tpurun_memory::failure::{Failure, FailureKind};

/// A communicator seen from outside.
#[derive(Debug)]
pub struct Supervised {
    segment: Segment,
    comm_id: u64,
}

/// The messages on their way between two ranks of a communicator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MessagesBetween {
    /// Sends that the source has posted and that have not ended.
    pub sends: u32,
    /// Receives from this source that the destination has posted and that have not ended.
    pub receives: u32,
    /// Receives from any source that the destination has posted and that have not ended.
    pub any_receives: u32,
    /// Whether bytes lie between the two that the destination has not taken.
    pub in_flight: bool,
}

impl Supervised {
    /// Maps the segment behind a descriptor that a rank of a job of `most_ranks` has offered.
    ///
    /// # Errors
    /// When it is no segment of this version and of ranks of such a job; nothing of its size was made then.
    pub fn open(fd: &OwnedFd, most_ranks: u32) -> Result<Self, Failure> {
        let segment = Segment::inspect(fd, most_ranks)?;
        let comm_id = segment.members().id();
        Ok(Self { segment, comm_id })
    }

    /// Bytes of address space that it takes.
    pub fn bytes(&self) -> usize {
        self.segment.layout().total()
    }

    /// The number that the board shows for it.
    pub fn comm_id(&self) -> u64 {
        self.comm_id
    }

    /// The process group's name.
    pub fn name(&self) -> &str {
        &self.segment.members().name
    }

    /// Its ranks by their rank in the world, unchecked.
    pub fn world_ranks(&self) -> &[u32] {
        &self.segment.members().world_ranks
    }

    /// Its failure, if it has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.segment.failure()
    }

    /// Fails every pending and future operation on all its ranks; the first failure stands, and is returned.
    /// `world_ranks` are to blame.
    pub fn fail_blaming(&self, kind: FailureKind, text: &str, world_ranks: &[u32]) -> Failure {
        let failure = self.segment.failure_word().fail_by(&self.segment.failure_word().verdict(
            kind,
            text,
            world_ranks,
        ));
        self.segment.failure_word().decide_alone();
        failure
    }

    /// As [`fail_blaming`](Self::fail_blaming), where not all of its ranks have come; else nothing happens.
    pub fn fail_creation(&self, kind: FailureKind, text: &str, world_ranks: &[u32]) {
        self.segment.failure_word().fail_creation(&self.segment.failure_word().verdict(
            kind,
            text,
            world_ranks,
        ));
        self.segment.failure_word().decide_alone();
    }

    /// As [`fail_blaming`](Self::fail_blaming), but its sleeping ranks wake only on [`announce`](Self::announce):
    /// a verdict on several communicators stands in all of them before anybody acts on it in one.
    pub fn fail_quietly(&self, kind: FailureKind, text: &str, world_ranks: &[u32]) {
        self.segment.failure_word().fail_quietly(&self.segment.failure_word().verdict(
            kind,
            text,
            world_ranks,
        ));
    }

    /// Wakes the ranks of a communicator that has failed.
    pub fn announce(&self) {
        self.segment.failure_word().decide_alone();
        self.segment.failure_word().announce();
    }

    /// Sets the text that every timeout of this communicator says from now on about the ranks it waits for:
    /// lines that the agent has written, cut to 1536 bytes; none when `text` is empty.
    pub fn note(&self, text: &str) {
        self.segment.set_note(text);
    }

    /// Whether this rank of the communicator has destroyed its end.
    pub fn is_closed(&self, rank: u32) -> bool {
        rank < self.segment.size() && self.segment.roster().is_closed(rank)
    }

    /// Whether some of its ranks are on other hosts, with segments of their own.
    pub fn is_bridged(&self) -> bool {
        self.segment.remote().says_it_is_bridged()
    }

    /// Returns what this segment knows of the messages between two ranks of the communicator; nothing for
    /// ranks that it does not have. With ranks of several hosts, the segment of each host knows a part: the
    /// messages that its own ranks have posted, and those they have not been known to take.
    pub fn between(&self, from: u32, to: u32) -> MessagesBetween {
        let segment = &self.segment;
        if from >= segment.size() || to >= segment.size() || from == to {
            return MessagesBetween::default();
        }
        let load = |word: &tpurun_memory::sync::AtomicU32| word.load(tpurun_memory::sync::Ordering::Acquire);
        let readable = segment.rings().ring(P2P_CHANNEL, from, to).readable();
        MessagesBetween {
            sends: load(segment.rings().pending_sends(from, to)),
            receives: load(segment.rings().pending_receives(from, to)),
            any_receives: load(segment.rings().pending_receives(to, to)),
            // A ring in an impossible state is no proof of anything.
            in_flight: readable.map_or(true, |run| run.bytes > 0),
        }
    }
}

impl MessagesBetween {
    /// Combines what two hosts know of the same ranks.
    #[must_use]
    pub fn and(self, other: MessagesBetween) -> MessagesBetween {
        MessagesBetween {
            sends: self.sends.max(other.sends),
            receives: self.receives.max(other.receives),
            any_receives: self.any_receives.max(other.any_receives),
            in_flight: self.in_flight || other.in_flight,
        }
    }
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use crate::layout::{Layout, MAGIC, VERSION};
    use crate::segment::H_TUNING;
    use crate::tuning::Tuning;

    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

    /// Memory of so many bytes that says this of itself; none of it is there but the header.
    fn memory(bytes: u64, ranks: u32, window: u64, seals: SealFlags) -> OwnedFd {
        let fd = memfd_create("tpurun-communicator", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .expect("memfds work here");
        ftruncate(&fd, bytes).expect("pages that nobody touches cost nothing");
        let header =
            [&MAGIC.to_ne_bytes()[..], &VERSION.to_ne_bytes(), &ranks.to_ne_bytes(), &window.to_ne_bytes()];
        if bytes >= 64 {
            rustix::io::pwrite(&fd, &header.concat(), 0).expect("there is room");
        }
        if bytes >= 4096 {
            let tuning = Tuning::default().values().map(|value| (value as u64).to_ne_bytes());
            rustix::io::pwrite(&fd, &tuning.concat(), H_TUNING as u64).expect("there is room");
        }
        fcntl_add_seals(&fd, seals).expect("it can be sealed");
        fd
    }

    fn total(ranks: u32, window: u64) -> u64 {
        Layout::new(ranks, 0, window as usize).total() as u64
    }

    #[test]
    fn what_is_offered_is_bounded_before_anything_is_made() {
        let good = memory(total(2, 4096), 2, 4096, SEALS);
        assert_eq!(Supervised::open(&good, 2).expect("a segment of two ranks").world_ranks().len(), 2);
        for (bytes, ranks, window) in [
            (total(2, 4096), 2, 8192),
            (total(3, 4096), 3, 4096),
            (1 << 40, u32::MAX, 0),
            (1 << 40, 1, 1 << 39),
            (1 << 40, 1 << 31, 4096),
            (500_000_000 * 256, 500_000_000, 0),
            (1 << 62, 2, 1 << 61),
            (total(2, 4096), 2, u64::MAX),
            (total(2, 4096), 0, 4096),
            (0, 0, 0),
            (63, 2, 4096),
        ] {
            let refused = Supervised::open(&memory(bytes, ranks, window, SEALS), 2);
            assert_eq!(
                refused.expect_err("none of ours").kind(),
                FailureKind::Transport,
                "{bytes} {ranks} {window}"
            );
        }
        assert!(peak_bytes() < 1 << 30, "nothing of that size was made");
    }

    #[test]
    fn what_may_change_under_its_readers_is_refused() {
        for seals in [SealFlags::empty(), SealFlags::SHRINK, SEALS.difference(SealFlags::SEAL)] {
            assert!(Supervised::open(&memory(total(2, 4096), 2, 4096, seals), 2).is_err(), "{seals:?}");
        }
        for path in ["/dev/null", "/dev/zero", "/proc/self/maps", "Cargo.toml"] {
            let file = OwnedFd::from(std::fs::File::open(path).expect("it is there"));
            assert!(Supervised::open(&file, 2).is_err(), "{path}");
        }
        let (out, _in) = rustix::pipe::pipe().expect("pipes work here");
        assert!(!tpurun_memory::region::is_plain_memory(out.as_fd()) && Supervised::open(&out, 2).is_err());
    }

    /// Returns the most bytes that this process has used.
    fn peak_bytes() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("it is there");
        let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it is told");
        kib.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
    }
}
