//! Programs: see `python/csrc/abi/runtime.h`. They come and go as words (`runtime/program/src/words.rs`).

use tpurun_memory::ffi::CError;
use tpurun_memory::{Failure, FailureKind};
use tpurun_program::{Plan, Program, ProgramError};

use super::{guarded, or_default};
use crate::error::MemoryError;

/// `TpurunPlan`: the words of a plan.
pub struct PlanWords(Vec<i64>);

/// # Safety
/// `data` is valid for reads of `count` elements, or `count` is 0.
unsafe fn slice<'a, T>(data: *const T, count: u64) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, count as usize) }
}

/// Programs are made by the extension: one that is wrong is a bug of ours.
fn bug(error: &ProgramError) -> MemoryError {
    Failure::new(FailureKind::Internal, format!("a program is wrong: {error}")).into()
}

/// # Safety
/// `runtime.h`: `words` and `text` are valid for reads, `error` for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_program_read(
    words: *const i64,
    word_count: u64,
    text: *const u8,
    text_bytes: u64,
    error: *mut CError,
) -> *mut Program {
    // SAFETY: the caller's promise.
    let words = unsafe { slice(words, word_count) };
    // SAFETY: the caller's promise.
    let text = unsafe { slice(text, text_bytes) };
    let read = || Program::from_words(words, text).map(Box::new).map_err(|error| bug(&error));
    // SAFETY: the caller's promise.
    unsafe { guarded(error, read) }.map_or(std::ptr::null_mut(), Box::into_raw)
}

/// # Safety
/// `runtime.h`: `program` is one that was read and not freed, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_program_free(program: *mut Program) {
    if !program.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(program) });
    }
}

/// # Safety
/// `runtime.h`: `program` is one that was read and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_program_fingerprint(program: *const Program) -> u64 {
    // SAFETY: the caller's promise.
    let program = unsafe { &*program };
    or_default(|| program.fingerprint())
}

/// # Safety
/// `runtime.h`: `program` is one that was read and not freed, `text` valid for writes of `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_program_text(program: *const Program, text: *mut u8, capacity: u64) -> u64 {
    // SAFETY: the caller's promise.
    let program = unsafe { &*program };
    let printed = or_default(|| program.to_string());
    if !printed.is_empty() && printed.len() as u64 <= capacity {
        // SAFETY: the caller's promise; `printed` is ours, so they are disjoint.
        unsafe { std::ptr::copy_nonoverlapping(printed.as_ptr(), text, printed.len()) };
    }
    printed.len() as u64
}

/// # Safety
/// `runtime.h`: `program` is one that was read and not freed, `sizes` valid for reads, `error` for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_program_plan(
    program: *const Program,
    sizes: *const i64,
    size_count: u64,
    own_from: i64,
    error: *mut CError,
) -> *mut PlanWords {
    // SAFETY: the caller's promise.
    let program = unsafe { &*program };
    // SAFETY: the caller's promise.
    let sizes = unsafe { slice(sizes, size_count) };
    let plan = || {
        let plan = program.resolved(sizes).and_then(|program| Plan::new(&program, own_from));
        plan.map(|plan| Box::new(PlanWords(plan.to_words()))).map_err(|error| bug(&error))
    };
    // SAFETY: the caller's promise.
    unsafe { guarded(error, plan) }.map_or(std::ptr::null_mut(), Box::into_raw)
}

/// # Safety
/// `runtime.h`: `plan` is one that was made and not freed, `count` valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_plan_words(plan: *const PlanWords, count: *mut u64) -> *const i64 {
    // SAFETY: the caller's promise.
    let words = unsafe { &(*plan).0 };
    // SAFETY: the caller's promise.
    unsafe { count.write(words.len() as u64) };
    words.as_ptr()
}

/// # Safety
/// `runtime.h`: `plan` is one that was made and not freed, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_plan_free(plan: *mut PlanWords) {
    if !plan.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(plan) });
    }
}
