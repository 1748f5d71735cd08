//! A descriptor that another process handed over as the shared segment of a communicator.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::{Input, Target};
use crate::join::survivors::Survivors;
use tpurun_memory::region::Region;
use tpurun_memory::sync::ballot::{self, Tally};
use tpurun_memory::sync::{Bound, Opened, Patience};
use tpurun_protocol::layout::{LINE, Layout, MAGIC, VERSION};
use tpurun_protocol::membership::Membership;
use tpurun_protocol::segment::Segment;
use tpurun_protocol::supervise::Supervised;

pub(super) const TARGET: Target = Target { name: "segment_join", run, seeds };

const PAGE: usize = 4096;
const WRITING: u32 = 1;

fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let ranks = 1 + input.below(4) as u32;
    let world_ranks = (0..ranks).collect();
    let members = Membership {
        name: "dp0".to_owned(),
        rank: input.below(ranks as usize) as u32,
        world_ranks,
        epoch: 0,
    };
    let Some(fd) = descriptor(&mut input, ranks) else { return };
    if let Ok(segment) = Segment::join(members, &fd) {
        assert!(segment.layout().wide_bytes() >= LINE * ranks as usize, "a window has a line for each rank");
        look_around(&segment, &mut input);
    }
    if let Ok(seen) = Supervised::open(&fd, 64) {
        let _ = (seen.comm_id(), seen.name(), seen.world_ranks(), seen.failure(), seen.is_closed(ranks));
        let _ = (seen.between(0, 1), seen.between(ranks, 0), seen.is_closed(0));
    }
}

/// Opens memory of the right size with any contents, memory of any size, or something that is no memory at all.
fn descriptor(input: &mut Input<'_>, ranks: u32) -> Option<OwnedFd> {
    let pages = input.below(4);
    let layout = Layout::new(ranks, 1, pages * PAGE);
    let size = match input.below(4) {
        0 | 1 => layout.total(),
        2 => input.number(2 * PAGE as u64) as usize % (1 << 24),
        _ => return File::open("/dev/null").ok().map(OwnedFd::from),
    };
    // The host refuses memory of no bytes.
    let (region, fd) = Region::create("fuzz", size).ok()?;
    let header = [&MAGIC.to_le_bytes()[..], &VERSION.to_le_bytes(), &ranks.to_le_bytes()].concat();
    let header = [&header[..], &(layout.wide_bytes() as u64).to_le_bytes()].concat();
    if size >= header.len() {
        region.write(0, &header);
    }
    // Words of the header, the meeting, the failure and the members.
    for _ in 0..input.below(24) {
        let known = [0, PAGE, layout.failure(), layout.failure() + 64, layout.member(0)];
        let at = input.one_of(&known) + input.below(32) * 8;
        if at + 8 <= size {
            region.write(at, &input.u64().to_le_bytes());
        }
    }
    // A rank that sees a failure being written waits half a second for it.
    if size >= layout.failure() + 8 {
        let mut state = [0; 4];
        region.read(layout.failure(), &mut state);
        if u32::from_le_bytes(state) == WRITING {
            region.write(layout.failure(), &0_u32.to_le_bytes());
        }
    }
    Some(fd)
}

/// Reads what a rank reads of a segment besides slots and messages.
fn look_around(segment: &Segment, input: &mut Input<'_>) {
    let ranks: Vec<u32> = segment.ranks().collect();
    let _ = (segment.matching(), segment.planned_cpus(), segment.roster().describe(&ranks));
    let round = input.u32();
    assert!(segment.roster().missing(round).len() <= ranks.len());
    for rank in ranks {
        let _ = segment.roster().liveness(rank);
        let _ = segment.rings().ring(0, rank, segment.rank()).readable();
    }
    let opened = segment.meeting().wait(round, Patience::NONE, Bound::Awake, 0);
    if let Opened::Help { piece, of } = opened {
        assert!(piece < of && of <= u32::from(u16::MAX));
    }
    survive(segment, input);
    if let Some(failure) = segment.failure() {
        assert!(failure.ranks().len() <= segment.size() as usize);
        assert!(failure.text().len() <= 3 * PAGE * 2, "lossy text grows by at most a factor of three");
    }
}

/// Looks for survivors where every word of the ballot may be anything.
fn survive(segment: &Segment, input: &mut Input<'_>) {
    let (me, ranks) = (segment.rank(), segment.size());
    let is_sound = |count: Tally| match count {
        Tally::Decided(list) | Tally::Missing(list) => list.iter().all(|rank| *rank < ranks),
        Tally::Corrupt => true,
    };
    assert!(is_sound(ballot::last(segment.roll())));
    let round = ballot::decided(segment.roll()).saturating_add(1);
    ballot::wish(segment.roll(), me, round);
    let gone = input.byte();
    let is_present = |rank: u32| rank == me || gone & 1 << (rank % 8) == 0;
    assert!(is_sound(ballot::count(segment.roll(), me, round, is_present)));
    let _ = ballot::retract(segment.roll(), me, round);
    let lost: Vec<u32> = segment.ranks().filter(|rank| *rank != me).collect();
    if let Ok(mut survivors) = Survivors::new(segment, &lost, Duration::ZERO) {
        let _ = survivors.agree();
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let word = |area: u8, index: u8, value: u64| [&[area, index][..], &value.to_le_bytes()].concat();
    vec![
        vec![3, 1, 1, 0],
        [&[1, 0, 1, 0, 2][..], &word(1, 0, 2), &word(2, 0, 2)].concat(),
        [&[1, 1, 0, 0, 3][..], &word(2, 0, 2 << 32 | 2), &word(2, 1, u64::MAX), &word(4, 0, 1)].concat(),
        [&[1, 1, 0, 2][..], &[200]].concat(),
        vec![1, 1, 0, 3],
    ]
}
