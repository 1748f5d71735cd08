//! Runs of compiled programs, for the flight recorder: begun and ended by the shim, on any of its threads.

use super::{guarded_void, inherited};
use tpurun_protocol::board::{Outcome, ProgramRun};

/// A run of a compiled program begins; the answer is for [`tpurun_program_run_ended`].
///
/// # Safety
/// `tpurun.h`: `line_bytes` bytes are readable, or `line_bytes` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tpurun_program_run_begun(
    program: u64,
    operations: u64,
    line: *const u8,
    line_bytes: u64,
) -> u64 {
    let mut number = NOT_RECORDED;
    guarded_void(|| {
        let Some(rank) = &inherited().rank else { return };
        // SAFETY: the caller's promise.
        let line = unsafe { super::slice(line, line_bytes as usize) };
        // It is of our own writing down, and nothing is allocated for it.
        let line = std::str::from_utf8(line).unwrap_or_default();
        number = rank.run_begun(&ProgramRun { program, operations, line });
    });
    number
}

/// The run has ended: `tpurun.h`.
#[unsafe(no_mangle)]
pub extern "C" fn tpurun_program_run_ended(run: u64, is_done: i32) {
    if run != NOT_RECORDED {
        guarded_void(|| {
            let outcome = if is_done == 0 { Outcome::Failed } else { Outcome::Done };
            if let Some(rank) = &inherited().rank {
                rank.run_ended(run, outcome);
            }
        });
    }
}

const NOT_RECORDED: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_no_agent_started_records_nothing() {
        // SAFETY: the line is a static string.
        let run = unsafe { tpurun_program_run_begun(1, 2, b"a.py:1".as_ptr(), 6) };
        assert_eq!(run, NOT_RECORDED);
        tpurun_program_run_ended(run, 1);
    }
}
