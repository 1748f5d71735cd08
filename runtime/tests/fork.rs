//! Forks of a process with live device memory, through the C ABI, as the extension meets them.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use tpurun_memory::ffi::CError;
use tpurun_runtime::Stats;
use tpurun_runtime::ffi::*;

const LIMIT: u64 = 64 << 20;
const BYTES: usize = 100_000;
const OUT_OF_MEMORY: i32 = 9;
const FORKED: i32 = 10;
const FORKED_TEXT: &str = "device tpu was used before this process was forked: use the start method spawn or \
                           forkserver, or fork before the first use";

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
}

/// Runs all tests of this file one after the other: the memory is the process's.
#[test]
fn a_fork_keeps_its_hands_off_its_parent() {
    assert!(run_in_fork(|| {
        open().expect("nobody has used the device before this fork");
        allocate(BYTES as u64).expect("the child has an arena of its own");
    }));
    open().expect("the parent has none yet");
    open().expect("again is nothing");
    a_child_has_its_own_copy();
    a_child_does_not_wait_for_threads_it_does_not_have();
}

fn a_child_has_its_own_copy() {
    let block = allocate(BYTES as u64).unwrap();
    fill(block, 1);
    let before = stats();
    assert!(run_in_fork(|| {
        assert_eq!(all(block), Some(1), "what the parent's tensors hold can be read");
        assert_eq!(open(), Err((FORKED, FORKED_TEXT.to_owned())));
        assert_eq!(allocate(1), Err((FORKED, FORKED_TEXT.to_owned())));
        assert_eq!((tpurun_memory_free(block), tpurun_memory_owns(block)), (1, 1));
        assert_eq!((tpurun_memory_size(block), tpurun_memory_trim(), stats()), (0, 0, Stats::default()));
        // SAFETY: no capacity, so nothing is written.
        assert_eq!(unsafe { tpurun_memory_report(std::ptr::null_mut(), 0) }, 0);
        fill(block, 2);
        assert!(run_in_fork(|| {
            assert_eq!(all(block), Some(2), "its own parent's");
            fill(block, 3);
        }));
        tpurun_memory_forked();
        assert_eq!(all(block), Some(2), "said twice it still keeps what it wrote");
    }));
    assert_eq!(all(block), Some(1));
    assert_eq!(stats(), before);
    assert_eq!((tpurun_memory_free(block), tpurun_memory_free(block)), (1, 0));
    let (status, text) = allocate(LIMIT + 1).expect_err("more than the limit");
    assert_eq!(status, OUT_OF_MEMORY);
    assert!(
        text.starts_with("expected at most 64.00 MiB on tpu:0 (--hbm), asked 64.00 MiB at a.py:7"),
        "{text}"
    );
}

fn a_child_does_not_wait_for_threads_it_does_not_have() {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let block = allocate(1000).expect("there is room");
                    assert_eq!(tpurun_memory_free(block), 1);
                }
            });
        }
        let forks = (0..200).all(|_| {
            run_in_fork(|| {
                assert_eq!(allocate(1000).unwrap_err().0, FORKED);
                assert_eq!(stats(), Stats::default());
            })
        });
        done.store(true, Ordering::Relaxed);
        assert!(forks);
    });
}

/// Whether a forked child got to the end of `body`, within a minute.
fn run_in_fork(body: impl FnOnce()) -> bool {
    // SAFETY: the child runs `body`, whose system calls and allocations glibc allows in a fork, and exits.
    let pid = unsafe { fork() };
    assert!(pid >= 0, "fork fails");
    let Some(child) = Pid::from_raw(pid) else {
        let passed = catch_unwind(AssertUnwindSafe(body)).is_ok();
        // SAFETY: any time.
        unsafe { _exit(i32::from(!passed)) }
    };
    let watched = pidfd_open(child, PidfdFlags::empty()).expect("our own child");
    let minute = Timespec::try_from(Duration::from_secs(60)).expect("fits");
    let ended = poll(&mut [PollFd::new(&watched, PollFlags::IN)], Some(&minute)).expect("poll works");
    if ended == 0 {
        kill_process(child, Signal::KILL).expect("our own child");
    }
    let status = waitpid(Some(child), WaitOptions::empty()).expect("our own child").expect("it ended").1;
    ended == 1 && status.exit_status() == Some(0)
}

fn open() -> Result<(), (i32, String)> {
    let mut error = Box::new_uninit();
    // SAFETY: valid for writes.
    match unsafe { tpurun_memory_open(0, LIMIT, error.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(said(error.as_ptr())),
    }
}

fn allocate(bytes: u64) -> Result<*mut u8, (i32, String)> {
    let mut error = Box::new_uninit();
    let site = "a.py:7";
    // SAFETY: valid for writes, and for reads of its length.
    let data = unsafe { tpurun_memory_allocate(bytes, site.as_ptr(), site.len() as u64, error.as_mut_ptr()) };
    if data.is_null() { Err(said(error.as_ptr())) } else { Ok(data) }
}

/// Status and text, as tpurun.h lays them out.
fn said(error: *const CError) -> (i32, String) {
    // SAFETY: the call failed, so it is written: an i32, a u32 and that many bytes of text.
    let status = unsafe { error.cast::<i32>().read() };
    // SAFETY: as above.
    let bytes = unsafe { error.cast::<u32>().wrapping_add(1).read() };
    // SAFETY: as above.
    let text = unsafe { std::slice::from_raw_parts(error.cast::<u8>().wrapping_add(8), bytes as usize) };
    (status, String::from_utf8(text.to_vec()).expect("it is text"))
}

fn stats() -> Stats {
    let mut stats = std::mem::MaybeUninit::uninit();
    // SAFETY: valid for writes.
    unsafe { tpurun_memory_stats(stats.as_mut_ptr()) };
    // SAFETY: always written.
    unsafe { stats.assume_init() }
}

fn fill(block: *mut u8, value: u8) {
    // SAFETY: a live block of this many bytes, which nobody else uses.
    unsafe { block.write_bytes(value, BYTES) };
}

/// The value of every byte, when it is one.
fn all(block: *const u8) -> Option<u8> {
    // SAFETY: a live block of this many bytes, which nobody writes meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(block, BYTES) };
    bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
}
