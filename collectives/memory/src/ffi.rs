#![allow(unsafe_code)]
//! The error of the C ABI, see `python/csrc/abi/tpurun.h`: both libraries that have one write it.

use crate::failure::Failure;
use crate::text::head;

const ERROR_TEXT_BYTES: usize = 8184;
const ERROR_RANKS: usize = 1023;
const OK: i32 = 0;

/// `TpurunError`.
#[repr(C)]
#[derive(Debug)]
pub struct CError {
    status: i32,
    bytes: u32,
    text: [u8; ERROR_TEXT_BYTES],
    rank_count: u32,
    ranks: [u32; ERROR_RANKS],
}

impl CError {
    /// Makes the error that a failed operation returns.
    pub fn of(failure: &Failure) -> Self {
        Self::new(failure.kind() as i32, failure.text(), failure.ranks())
    }

    /// A status other than success, a text and the guilty ranks, cut to what there is room for.
    pub fn new(status: i32, text: &str, ranks: &[u32]) -> Self {
        let text = head(text, ERROR_TEXT_BYTES);
        let ranks = &ranks[..ranks.len().min(ERROR_RANKS)];
        let mut error = Self {
            status,
            bytes: text.len() as u32,
            text: [0; ERROR_TEXT_BYTES],
            rank_count: ranks.len() as u32,
            ranks: [0; ERROR_RANKS],
        };
        error.text[..text.len()].copy_from_slice(text.as_bytes());
        error.ranks[..ranks.len()].copy_from_slice(ranks);
        error
    }

    /// Makes `error` say so. Apart, for its frame: a `CError` is three pages, which a call that succeeds need not probe.
    ///
    /// # Safety
    /// It is valid for writes; it may be uninitialised.
    #[cold]
    #[inline(never)]
    pub unsafe fn write(error: *mut Self, status: i32, text: &str, ranks: &[u32]) {
        // SAFETY: the caller's promise.
        unsafe { error.write(Self::new(status, text, ranks)) };
    }

    /// Makes `error` say that nothing failed.
    ///
    /// # Safety
    /// It is valid for writes; it may be uninitialised.
    pub unsafe fn write_ok(error: *mut Self) {
        // SAFETY: the caller's promise.
        let status = unsafe { &raw mut (*error).status };
        // SAFETY: the caller's promise.
        unsafe { status.write(OK) };
        // SAFETY: the caller's promise.
        let bytes = unsafe { &raw mut (*error).bytes };
        // SAFETY: the caller's promise.
        unsafe { bytes.write(0) };
    }
}
