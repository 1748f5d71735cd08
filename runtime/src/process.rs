#![allow(unsafe_code)]
//! The device memory of this process, and what becomes of it in a fork.
//!
//! A fork of a process with live device memory must not write into its parent's tensors: in the child, the
//! mapping becomes private (the C library calls us there), and nothing can be allocated any more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use tpurun_collectives::{Failure, FailureKind, arena};

use crate::error::MemoryError;
use crate::memory::DeviceMemory;

static MEMORY: OnceLock<DeviceMemory> = OnceLock::new();
/// Held while it is opened.
static OPENING: Mutex<()> = Mutex::new(());
/// Whether anybody has tried to open it.
static USED: AtomicBool = AtomicBool::new(false);
/// Whether this process is a fork of one that had.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Opens the memory of this process; again with the same limit it is what it was.
pub(crate) fn open(device: u32, limit: u64) -> Result<&'static DeviceMemory, MemoryError> {
    // Before the lock: in a fork, it may be held by a thread that does not exist there.
    if FORKED.load(Ordering::Relaxed) {
        return Err(MemoryError::Forked);
    }
    if !USED.swap(true, Ordering::Relaxed) {
        // Before the lock, too: from here on the handler tells forks what is going on.
        watch_forks().inspect_err(|_| USED.store(false, Ordering::Relaxed))?;
    }
    let _opening = OPENING.lock().expect("opening does not panic");
    if let Some(memory) = MEMORY.get() {
        let opened = memory.limit();
        return if opened == limit {
            Ok(memory)
        } else {
            Err(MemoryError::OtherLimit { opened, given: limit })
        };
    }
    let memory = DeviceMemory::open(device, limit)?;
    arena::publish(memory.arena().clone());
    Ok(MEMORY.get_or_init(|| memory))
}

/// The memory of this process, once it is open.
pub(crate) fn memory() -> Option<&'static DeviceMemory> {
    MEMORY.get()
}

/// Why there is none.
pub(crate) fn why_closed() -> MemoryError {
    if FORKED.load(Ordering::Relaxed) { MemoryError::Forked } else { MemoryError::NotOpen }
}

/// In the child of a fork. Safe in a handler of `pthread_atfork`: no lock, no allocation.
pub(crate) extern "C" fn after_fork_in_child() {
    if USED.load(Ordering::Relaxed) {
        FORKED.store(true, Ordering::Relaxed);
    }
    if let Some(memory) = MEMORY.get() {
        memory.arena().after_fork_in_child();
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
