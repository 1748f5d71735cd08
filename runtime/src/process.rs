#![allow(unsafe_code)]
//! The device memory of this process, its shared host memory, and what becomes of them in a fork.
//!
//! A fork of a process with live device memory must not write into its parent's tensors: in the child, the
//! mapping becomes private (the C library calls us there), and nothing can be allocated any more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use tpurun_memory::arena::{self, ArenaKind};
use tpurun_memory::{Failure, FailureKind};

use crate::error::MemoryError;
use crate::memory::ArenaMemory;

/// Device `tpu`.
static DEVICE: Slot = Slot::new();
/// CPU tensors that the other ranks of the host can use where they are.
static SHARED: Slot = Slot::new();
/// Held while one of them is opened.
static OPENING: Mutex<()> = Mutex::new(());
/// Whether the handler of forks is in place.
static WATCHES: AtomicBool = AtomicBool::new(false);

/// One memory of this process.
struct Slot {
    memory: OnceLock<ArenaMemory>,
    /// Whether anybody has tried to open it.
    used: AtomicBool,
    /// Whether this process is a fork of one that had.
    forked: AtomicBool,
}

impl Slot {
    const fn new() -> Self {
        Self { memory: OnceLock::new(), used: AtomicBool::new(false), forked: AtomicBool::new(false) }
    }

    /// The memory; the first time made by `make`, and published.
    fn open(
        &self,
        kind: ArenaKind,
        make: impl FnOnce() -> Result<ArenaMemory, MemoryError>,
    ) -> Result<&ArenaMemory, MemoryError> {
        // Before the lock: in a fork, it may be held by a thread that does not exist there.
        if self.forked.load(Ordering::Relaxed) {
            return Err(MemoryError::Forked);
        }
        // Before the lock, too: from here on the handler tells forks what is going on.
        self.used.store(true, Ordering::Relaxed);
        if !WATCHES.swap(true, Ordering::Relaxed) {
            watch_forks().inspect_err(|_| WATCHES.store(false, Ordering::Relaxed))?;
        }
        let _opening = OPENING.lock().expect("opening does not panic");
        if let Some(memory) = self.memory.get() {
            return Ok(memory);
        }
        let memory = make()?;
        arena::publish(kind, memory.arena().clone());
        Ok(self.memory.get_or_init(|| memory))
    }
}

/// Opens the memory of device `tpu`; again with the same limit it is what it was.
pub(crate) fn open(device: u32, limit: u64) -> Result<&'static ArenaMemory, MemoryError> {
    let memory = DEVICE.open(ArenaKind::Device, || ArenaMemory::open(device, limit))?;
    let opened = memory.limit();
    if opened == limit { Ok(memory) } else { Err(MemoryError::OtherLimit { opened, given: limit }) }
}

/// The memory of device `tpu`, once it is open.
pub(crate) fn memory() -> Option<&'static ArenaMemory> {
    DEVICE.memory.get()
}

/// Why there is none.
pub(crate) fn why_closed() -> MemoryError {
    if DEVICE.forked.load(Ordering::Relaxed) { MemoryError::Forked } else { MemoryError::NotOpen }
}

/// Opens the shared host memory of this process, as much as the host has; again it is what it was.
pub(crate) fn open_shared() -> Result<&'static ArenaMemory, MemoryError> {
    SHARED.open(ArenaKind::Host, || ArenaMemory::open(0, host_bytes()))
}

/// The shared host memory of this process, once it is open.
pub(crate) fn shared() -> Option<&'static ArenaMemory> {
    SHARED.memory.get()
}

fn host_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit.max(1)))
}

/// In the child of a fork. Safe in a handler of `pthread_atfork`: no lock, no allocation.
pub(crate) extern "C" fn after_fork_in_child() {
    for slot in [&DEVICE, &SHARED] {
        if slot.used.load(Ordering::Relaxed) {
            slot.forked.store(true, Ordering::Relaxed);
        }
        if let Some(memory) = slot.memory.get() {
            memory.arena().after_fork_in_child();
        }
    }
}

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> i32;
}

fn watch_forks() -> Result<(), MemoryError> {
    // SAFETY: POSIX; the handler is a plain function and stays.
    let status = unsafe { pthread_atfork(None, None, Some(after_fork_in_child)) };
    if status == 0 {
        return Ok(());
    }
    let error = std::io::Error::from_raw_os_error(status);
    let text = format!("the C library refuses a handler of forks: {error}");
    Err(Failure::new(FailureKind::Transport, text).into())
}
