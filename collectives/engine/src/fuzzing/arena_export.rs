//! The export of another process's arena, and the memory that is found there.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use super::{Input, Target};
use tpurun_memory::arena::{Export, PeerArena};
use tpurun_memory::region::Region;

pub(super) const TARGET: Target = Target { name: "arena_export", run, seeds };

const PAGE: u64 = 4096;

fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let data = input.number(8 * PAGE).min(1 << 24);
    let Some(fd) = descriptor(&mut input, data) else { return };
    let fd_number = if input.byte() < 250 { fd.as_raw_fd() as u32 } else { input.u32() };
    let pid = if input.byte() < 250 { std::process::id() } else { input.u32() };
    let claimed = if input.byte() < 200 { data } else { input.u64() };
    let export =
        Export { pid, fd: fd_number, bytes: claimed, id: input.take(16).try_into().unwrap_or([0; 16]) };
    assert_eq!(Export::from_bytes(&export.to_bytes()), export);
    let Ok(peer) = PeerArena::open(&export) else { return };
    assert_eq!(peer.bytes(), claimed);
    for _ in 0..4 {
        let (offset, mut read) = (input.number(9 * PAGE), vec![0; input.below(200)]);
        let inside = offset.checked_add(read.len() as u64).is_some_and(|end| end <= claimed);
        assert_eq!(peer.read(offset, &mut read).is_ok(), inside);
        assert_eq!(peer.write(offset, &read).is_ok(), inside);
        assert!(peer.pointer(offset, input.u64()).is_none_or(|data| !data.is_null()));
    }
}

/// Opens memory of an arena's size with some header, memory of any size, or something that is no memory at all.
fn descriptor(input: &mut Input<'_>, data: u64) -> Option<OwnedFd> {
    let header = data.next_multiple_of(PAGE);
    let size = match input.below(4) {
        0 | 1 => header + PAGE,
        2 => input.number(12 * PAGE) % (1 << 24),
        _ => return File::options().read(true).write(true).open("/dev/null").ok().map(OwnedFd::from),
    };
    // The host refuses memory of no bytes.
    let (region, fd) = Region::create("fuzz", size as usize).ok()?;
    let found = [b"tpurun-a", input.take(16), &data.to_le_bytes()].concat();
    let found = if input.byte() < 200 { &found[..] } else { input.take(64) };
    if header + found.len() as u64 <= size {
        region.write(header as usize, found);
    }
    Some(fd)
}

fn seeds() -> Vec<Vec<u8>> {
    let honest = [&[100, 0][..], &[7; 16], &[0], &[0, 0, 0], &[7; 16], &[9, 20, 90, 30]].concat();
    let claims_more = [&[100, 0][..], &[7; 16], &[0], &[0, 0, 200], &[255; 8], &[7; 16]].concat();
    vec![honest, claims_more, vec![100, 3], vec![100, 2, 10], [&[100, 0][..], &[7; 16], &[220]].concat()]
}
