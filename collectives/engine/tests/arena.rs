//! Arenas of others: what is not what an export says is refused, with the reason, and never mapped.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};
use tpurun_engine::FailureKind;
use tpurun_engine::arena::{Arena, Export, PeerArena};

const BYTES: u64 = 1 << 20;

fn refusal(export: &Export) -> String {
    let failure = PeerArena::open(export).expect_err("it is not the arena");
    assert_eq!(failure.kind(), FailureKind::Transport, "{failure}");
    assert!(!failure.text().contains('\n'));
    failure.text().to_owned()
}

/// Another descriptor of this process, exported as an arena of this size.
fn posing(fd: &OwnedFd, bytes: u64) -> Export {
    Export { pid: std::process::id(), fd: fd.as_raw_fd() as u32, bytes, id: [0; 16] }
}

fn memfd(bytes: u64, seals: SealFlags, flags: MemfdFlags) -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags;
    let fd = rustix::fs::memfd_create("tpurun-arena", flags)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}

#[test]
fn an_arena_is_one_memory_on_both_sides() {
    let arena = Arena::create(BYTES).unwrap();
    let peer = PeerArena::open(&Export::from_bytes(&arena.export().to_bytes())).unwrap();
    assert_eq!(peer.bytes(), BYTES);
    peer.write(BYTES - 3, b"abc").unwrap();
    // SAFETY: three bytes of the arena, as `pointer` checks.
    let found = unsafe { std::slice::from_raw_parts(arena.pointer(BYTES - 3, 3), 3) };
    assert_eq!(found, b"abc");
    let mut found = [0; 4];
    assert_eq!(
        peer.read(BYTES - 3, &mut found).unwrap_err().text(),
        format!(
            "expected a range of the 1048576 bytes that the arena of process {} has, given 4 bytes at offset \
             1048573",
            std::process::id()
        )
    );
    assert!(peer.pointer(u64::MAX, 2).is_none() && peer.pointer(BYTES, 0).is_some());
}

#[test]
fn an_arena_of_another_size_or_id_is_refused() {
    let arena = Arena::create(BYTES).unwrap();
    let export = arena.export();
    let other = refusal(&Export { id: [7; 16], ..export });
    assert!(other.ends_with(": memory of something else is there"), "{other}");
    assert!(other.starts_with(&format!("expected the arena of process {} at its descriptor ", export.pid)));
    let larger = refusal(&Export { bytes: BYTES * 2, ..export });
    assert!(larger.ends_with(": the shared memory has 1052672 bytes, expected 2101248"), "{larger}");
    // The same number of pages, but not the same data.
    let shorter = refusal(&Export { bytes: BYTES - 1, ..export });
    assert!(shorter.ends_with(": memory of something else is there"), "{shorter}");
    for bytes in [0, u64::MAX, u64::MAX - 4096] {
        let absurd = refusal(&Export { bytes, ..export });
        assert!(
            absurd.ends_with(&format!("its size of {bytes} bytes is not 1 to 17592186044416")),
            "{absurd}"
        );
    }
}

#[test]
fn who_is_gone_is_lost() {
    let arena = Arena::create(BYTES).unwrap();
    for export in [Export { fd: 1_000_000, ..arena.export() }, Export { pid: u32::MAX, ..arena.export() }] {
        let failure = PeerArena::open(&export).expect_err("there is nothing");
        assert_eq!(failure.kind(), FailureKind::RankLost, "{failure}");
    }
}

/// Its owner could cut it under us: reading then is a SIGBUS.
#[test]
fn memory_that_can_shrink_is_refused() {
    let cut = memfd(BYTES + 4096, SealFlags::GROW, MemfdFlags::empty()).unwrap();
    // Without the seal on seals, somebody could still forbid to write it.
    let open = memfd(BYTES + 4096, SealFlags::GROW | SealFlags::SHRINK, MemfdFlags::empty()).unwrap();
    for fd in [cut, open] {
        let text = refusal(&posing(&fd, BYTES));
        assert!(text.ends_with(": the shared memory's size is not sealed"), "{text}");
    }
}

#[test]
fn memory_that_can_not_be_written_is_refused() {
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | SealFlags::WRITE;
    let fixed = memfd(BYTES + 4096, sealed, MemfdFlags::empty()).unwrap();
    let text = refusal(&posing(&fixed, BYTES));
    assert!(text.contains("ermission") || text.contains("not permitted"), "{text}");
}

/// Huge pages may run out, and touching them then is a SIGBUS.
#[test]
fn huge_pages_are_refused() {
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    match memfd(4 << 20, seals, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB) {
        Ok(huge) => {
            let text = refusal(&posing(&huge, (4 << 20) - 4096));
            assert!(text.ends_with(": another kind of file is there"), "{text}");
        }
        Err(error) => eprintln!("this host has no huge pages: {error}"),
    }
}

#[test]
fn what_is_no_memory_is_refused_without_waiting() {
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap().into();
    for fd in [pipe, null] {
        let text = refusal(&posing(&fd, BYTES));
        assert!(text.ends_with(": another kind of file is there"), "{text}");
    }
}

proptest! {
    #[test]
    fn no_export_breaks_who_opens_it(bytes in any::<[u8; 32]>(), small in 0..40_u32) {
        let mut export = Export::from_bytes(&bytes);
        prop_assert_eq!(export.to_bytes(), bytes);
        prop_assert!(PeerArena::open(&export).is_err());
        (export.pid, export.fd) = (std::process::id(), small);
        prop_assert!(PeerArena::open(&export).is_err());
    }
}
