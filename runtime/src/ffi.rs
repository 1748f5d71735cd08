#![allow(unsafe_code)]
//! The C ABI, see `python/csrc/abi/runtime.h`: the only `extern "C"` of the runtime.
//!
//! Validates, converts, forwards. A panic is a bug and becomes `TPURUN_INTERNAL`, never an unwind into C++.

pub mod program;

use std::panic::{AssertUnwindSafe, catch_unwind};

use tpurun_memory::Failure;
use tpurun_memory::ffi::CError;

use crate::accounts::Stats;
use crate::error::MemoryError;
use crate::process::{self, memory};
use crate::sites::SITE_BYTES;

/// # Safety
/// `runtime.h`: `error` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_memory_open(device: u32, limit_bytes: u64, error: *mut CError) -> i32 {
    let opened = || process::open(device, limit_bytes).map(drop);
    // SAFETY: the caller's promise.
    unsafe { guarded(error, opened) }.err().unwrap_or_default()
}

/// # Safety
/// `runtime.h`: `error` is valid for writes, `site` for `site_bytes` or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_memory_allocate(
    bytes: u64,
    site: *const u8,
    site_bytes: u64,
    error: *mut CError,
) -> *mut u8 {
    if bytes == 0 {
        // SAFETY: the caller's promise.
        unsafe { CError::write_ok(error) };
        return std::ptr::null_mut();
    }
    let allocate = || {
        let site = (bytes >= SITE_BYTES && !site.is_null())
            // SAFETY: the caller's promise.
            .then(|| unsafe { std::slice::from_raw_parts(site, site_bytes as usize) })
            .map(String::from_utf8_lossy);
        let memory = memory().ok_or_else(process::why_closed)?;
        memory.allocate(bytes, site.as_deref())
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, allocate) }.map_or(std::ptr::null_mut(), |data| data.as_ptr())
}

/// `runtime.h`; any address.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_memory_free(data: *const u8) -> i32 {
    or_default(|| memory().is_some_and(|memory| memory.free(data)).into())
}

/// `runtime.h`; any address.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_memory_owns(data: *const u8) -> i32 {
    or_default(|| memory().is_some_and(|memory| memory.owns(data)).into())
}

/// `runtime.h`; any address.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_memory_size(data: *const u8) -> u64 {
    or_default(|| memory().and_then(|memory| memory.bytes_of(data)).unwrap_or_default())
}

/// # Safety
/// `runtime.h`: `error` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_shared_open(error: *mut CError) -> i32 {
    let opened = || process::open_shared().map(drop);
    // SAFETY: the caller's promise.
    unsafe { guarded(error, opened) }.err().unwrap_or_default()
}

/// `runtime.h`.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_shared_allocate(bytes: u64) -> *mut u8 {
    let allocate = || process::shared().and_then(|memory| memory.allocate(bytes, None).ok());
    or_default(allocate).map_or(std::ptr::null_mut(), |data| data.as_ptr())
}

/// `runtime.h`; any address.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_shared_free(data: *const u8) {
    or_default(|| process::shared().is_some_and(|memory| memory.free(data)));
}

/// `runtime.h`; any address.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_shared_owns(data: *const u8) -> i32 {
    or_default(|| process::shared().is_some_and(|memory| memory.owns(data)).into())
}

/// # Safety
/// `runtime.h`: `stats` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_memory_stats(stats: *mut Stats) {
    let now = or_default(|| memory().and_then(|memory| memory.stats()).unwrap_or_default());
    // SAFETY: the caller's promise; it may be uninitialised, so it is only written.
    unsafe { stats.write(now) };
}

/// `runtime.h`.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_memory_reset_peak() {
    or_default(|| memory().map_or((), |memory| memory.reset_peak()));
}

/// `runtime.h`.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_memory_reset_totals() {
    or_default(|| memory().map_or((), |memory| memory.reset_totals()));
}

/// `runtime.h`.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_memory_trim() -> u64 {
    or_default(|| memory().map_or(0, |memory| memory.trim()))
}

/// # Safety
/// `runtime.h`: `text` is valid for writes of `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_memory_report(text: *mut u8, capacity: u64) -> u64 {
    let report = || {
        let report = memory().and_then(|memory| memory.report());
        report.map(|report| serde_json::to_string(&report).expect("a report has no maps"))
    };
    let report = or_default(report).unwrap_or_default();
    if !report.is_empty() && report.len() as u64 <= capacity {
        // SAFETY: the caller's promise; `report` is ours, so they are disjoint.
        unsafe { std::ptr::copy_nonoverlapping(report.as_ptr(), text, report.len()) };
    }
    report.len() as u64
}

/// `runtime.h`.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_memory_forked() {
    process::after_fork_in_child();
}

/// Runs `body`; its failure goes to `error`, and its status is returned.
///
/// # Safety
/// `error` is valid for writes; it may be uninitialised.
unsafe fn guarded<T>(error: *mut CError, body: impl FnOnce() -> Result<T, MemoryError>) -> Result<T, i32> {
    let outcome =
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Failure::of_panic(&*panic).into()));
    // SAFETY: the caller's promise.
    outcome.map_err(|failure| unsafe { fail(error, &failure) })
}

/// # Safety
/// As above.
unsafe fn fail(error: *mut CError, failure: &MemoryError) -> i32 {
    let status = failure.status();
    // SAFETY: the caller's promise.
    unsafe { CError::write(error, status, &failure.to_string(), &[]) };
    status
}

/// Runs `body`, whose failure nobody is told but the log.
fn or_default<T: Default>(body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        tracing::error!(failure = %Failure::of_panic(&*panic), "a function without a status failed");
        T::default()
    })
}
