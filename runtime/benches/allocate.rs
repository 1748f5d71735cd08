//! Time of allocating and freeing device memory, beside malloc: `cargo bench -p tpurun-runtime [-- PAIRS]`.
//!
//! A pair is one allocation and one free, through the C ABI; medians of blocks measured in turn, in ns. `one`
//! frees each block at once, `window` the one before the last 64, `threads` is `one` on two threads.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::Instant;

use tpurun_memory::ffi::CError;
use tpurun_runtime::ffi::{tpurun_memory_allocate, tpurun_memory_free, tpurun_memory_open};

const BLOCKS: usize = 21;
const WINDOW: usize = 64;

/// One allocator.
trait Memory: Sync {
    fn take(&self, bytes: usize) -> *mut u8;
    fn give(&self, data: *mut u8, bytes: usize);
}

/// With room for an error, as the extension has it.
struct Device;

thread_local! {
    static ERROR: Box<UnsafeCell<MaybeUninit<CError>>> = Box::new(UnsafeCell::new(MaybeUninit::uninit()));
}

impl Memory for Device {
    fn take(&self, bytes: usize) -> *mut u8 {
        let site = "train.py:28";
        let error = ERROR.with(|error| error.get().cast());
        // SAFETY: valid for writes, and for reads of its length.
        unsafe { tpurun_memory_allocate(bytes as u64, site.as_ptr(), site.len() as u64, error) }
    }

    fn give(&self, data: *mut u8, _bytes: usize) {
        assert_eq!(tpurun_memory_free(data), 1);
    }
}

struct Malloc;

impl Memory for Malloc {
    fn take(&self, bytes: usize) -> *mut u8 {
        // SAFETY: not of no bytes.
        unsafe { System.alloc(layout(bytes)) }
    }

    fn give(&self, data: *mut u8, bytes: usize) {
        // SAFETY: from `take`, with the same layout.
        unsafe { System.dealloc(data, layout(bytes)) };
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 16).expect("small")
}

fn main() {
    let given = std::env::args().skip(1).find_map(|arg| arg.parse().ok());
    let pairs: usize = given.unwrap_or(100_000);
    let mut error = Box::new_uninit();
    // SAFETY: valid for writes.
    assert_eq!(unsafe { tpurun_memory_open(0, 4 << 30, error.as_mut_ptr()) }, 0);
    println!("{:>10} {:>8} {:>12} {:>12} {:>8}", "bytes", "pattern", "device ns", "malloc ns", "ratio");
    for bytes in [64, 1000, 16 << 10, 60_000, 256 << 10, 4 << 20] {
        row(bytes, "one", |memory| one(memory, bytes, pairs));
        row(bytes, "window", |memory| window(memory, bytes, pairs));
        row(bytes, "threads", |memory| {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| one(memory, bytes, pairs));
                one(memory, bytes, pairs).max(other.join().expect("it does not panic"))
            })
        });
    }
}

/// Device and malloc in turn.
fn row(bytes: usize, pattern: &str, time: impl Fn(&dyn Memory) -> f64) {
    let mut times: Vec<[f64; 2]> = (0..BLOCKS).map(|_| [time(&Device), time(&Malloc)]).collect();
    let mut median = |which: usize| {
        times.sort_by(|a, b| a[which].total_cmp(&b[which]));
        times[BLOCKS / 2][which]
    };
    let (device, malloc) = (median(0), median(1));
    println!("{bytes:>10} {pattern:>8} {device:>12.1} {malloc:>12.1} {:>8.2}", device / malloc);
}

fn one(memory: &dyn Memory, bytes: usize, pairs: usize) -> f64 {
    let began = Instant::now();
    for _ in 0..pairs {
        memory.give(black_box(memory.take(bytes)), bytes);
    }
    began.elapsed().as_secs_f64() * 1e9 / pairs as f64
}

fn window(memory: &dyn Memory, bytes: usize, pairs: usize) -> f64 {
    let mut live = [std::ptr::null_mut::<u8>(); WINDOW];
    let began = Instant::now();
    for pair in 0..pairs + WINDOW {
        let slot = &mut live[pair % WINDOW];
        if !slot.is_null() {
            memory.give(*slot, bytes);
        }
        *slot = if pair < pairs { memory.take(bytes) } else { std::ptr::null_mut() };
    }
    began.elapsed().as_secs_f64() * 1e9 / pairs as f64
}
