//! Memory of one process: an arena, and who has what of it.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use tpurun_memory::arena::Arena;

use crate::accounts::Stats;
use crate::error::MemoryError;
use crate::heap::Heap;
use crate::report::Report;

/// The memory of one device, or that of shared CPU tensors. Any thread may allocate, and any other free.
#[derive(Debug)]
pub struct ArenaMemory {
    device: u32,
    limit: u64,
    arena: Arc<Arena>,
    heap: Mutex<Heap>,
}

impl ArenaMemory {
    /// Opens an arena of `limit` bytes, none of which takes memory of the host yet; `device` is its number in
    /// messages.
    ///
    /// # Errors
    /// That the host refuses it, or no process can address so much.
    pub fn open(device: u32, limit: u64) -> Result<Self, MemoryError> {
        let arena = Arc::new(Arena::create(limit)?);
        Ok(Self { device, limit, arena, heap: Mutex::new(Heap::new(limit)) })
    }

    /// Returns the bytes that its blocks may take in all.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the arena that other ranks map.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// A block of at least `bytes` bytes, aligned to 512; what is in it is undefined. `site` is the line of the
    /// user's program that asks.
    ///
    /// # Errors
    /// `OutOfMemory`, and `Forked` in the fork of the process that opened the arena.
    pub fn allocate(&self, bytes: u64, site: Option<&str>) -> Result<NonNull<u8>, MemoryError> {
        let mut heap = self.heap().ok_or(MemoryError::Forked)?;
        let block = heap.allocate(bytes, site);
        drop(heap);
        let block = block.map_err(|shortage| MemoryError::OutOfMemory { device: self.device, shortage })?;
        let data = self.arena.pointer(block.offset, block.bytes);
        Ok(NonNull::new(data).expect("a mapping never starts at zero"))
    }

    /// Takes a block back; whether there was a live one at `data`. In a fork it does nothing, and what is in
    /// the arena counts as live.
    pub fn free(&self, data: *const u8) -> bool {
        let Some(offset) = self.arena.offset_of(data, 1) else { return false };
        let Some(mut heap) = self.heap() else { return true };
        let freed = heap.free(offset);
        drop(heap);
        if freed.is_none() {
            tracing::error!(offset, "no live block of device memory to free there");
        }
        freed.is_some()
    }

    /// Whether the byte at `data` is in the arena.
    pub fn owns(&self, data: *const u8) -> bool {
        self.arena.offset_of(data, 1).is_some()
    }

    /// Returns the bytes that the live block at `data` takes; none in a fork.
    pub fn bytes_of(&self, data: *const u8) -> Option<u64> {
        let offset = self.arena.offset_of(data, 1)?;
        self.heap()?.bytes(offset)
    }

    /// The accounts; none in a fork.
    pub fn stats(&self) -> Option<Stats> {
        self.heap().map(|heap| *heap.stats())
    }

    /// The peaks become what is now.
    pub fn reset_peak(&self) {
        if let Some(mut heap) = self.heap() {
            heap.stats_mut().reset_peak();
        }
    }

    /// Sets the figures that count from the beginning to zero.
    pub fn reset_totals(&self) {
        if let Some(mut heap) = self.heap() {
            heap.stats_mut().reset_totals();
        }
    }

    /// Gives the memory of free blocks back to the host, and says how many bytes that are.
    pub fn trim(&self) -> u64 {
        let Some(mut heap) = self.heap() else { return 0 };
        // Under the lock: nobody may be given these bytes before the host has them.
        heap.trim(|offset, bytes| {
            if let Err(error) = self.arena.discard(offset, bytes) {
                tracing::warn!(%error, offset, bytes, "the host does not take device memory back");
            }
        })
    }

    /// Returns a report of who holds what; none in a fork.
    pub fn report(&self) -> Option<Report> {
        Some(Report::new(self.device, &mut *self.heap()?))
    }

    /// The allocator. None in a fork, where a thread that no longer exists may hold its lock.
    fn heap(&self) -> Option<MutexGuard<'_, Heap>> {
        if self.arena.is_forked() {
            return None;
        }
        Some(self.heap.lock().expect("the allocator does not panic under its lock"))
    }
}
