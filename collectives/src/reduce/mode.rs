//! The modes of the processor that our arithmetic needs, whatever the program has set for its own.
//!
//! A rank that flushes subnormal numbers to zero (`torch.set_flush_denormal(True)`) or rounds in another direction
//! would make other bits of the same operands than the others do, and one that traps would be killed by our sum.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::asm;

/// Ours from [`enter`](Self::enter) on, the program's again when it is dropped.
pub(super) struct Mode {
    /// The program's, if they are others than ours.
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    programs: Option<Control>,
}

/// MXCSR: all exceptions masked, rounding to nearest, subnormal numbers as they are. The low six bits say what has
/// happened, and set nothing.
#[cfg(target_arch = "x86_64")]
const OURS: Control = 0x1f80;
#[cfg(target_arch = "x86_64")]
const SETTINGS: Control = !0x3f;
#[cfg(target_arch = "x86_64")]
type Control = u32;

/// FPCR: rounding to nearest, no trap, nothing flushed to zero.
#[cfg(target_arch = "aarch64")]
const OURS: Control = 0;
#[cfg(target_arch = "aarch64")]
const SETTINGS: Control = !0;
#[cfg(target_arch = "aarch64")]
type Control = u64;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
type Control = ();

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl Mode {
    #[inline]
    pub(super) fn enter() -> Self {
        let now = control();
        // To read it is cheap, to write it is not.
        let programs = (now & SETTINGS != OURS).then_some(now);
        if programs.is_some() {
            set_control(OURS);
        }
        Self { programs }
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl Drop for Mode {
    #[inline]
    fn drop(&mut self) {
        if let Some(programs) = self.programs {
            set_control(programs);
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
impl Mode {
    pub(super) fn enter() -> Self {
        Self { programs: None }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn control() -> Control {
    let mut control: Control = 0;
    // SAFETY: it writes the four bytes that it is given. Miri knows no assembly, and has one mode.
    #[cfg(not(miri))]
    unsafe {
        asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack, preserves_flags));
    }
    if cfg!(miri) {
        control = OURS;
    }
    control
}

#[cfg(target_arch = "x86_64")]
#[cold]
fn set_control(control: Control) {
    // SAFETY: it reads four bytes, which are a value that the register had or [`OURS`].
    #[cfg(not(miri))]
    unsafe {
        asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack));
    }
    let _unused_by_miri = control;
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn control() -> Control {
    let mut control: Control = OURS;
    // SAFETY: it reads a register.
    #[cfg(not(miri))]
    unsafe {
        std::arch::asm!("mrs {}, fpcr", out(reg) control, options(nomem, nostack, preserves_flags));
    }
    control
}

#[cfg(target_arch = "aarch64")]
#[cold]
fn set_control(control: Control) {
    // SAFETY: the value is one that the register had or [`OURS`].
    #[cfg(not(miri))]
    unsafe {
        std::arch::asm!("msr fpcr, {}", in(reg) control, options(nostack));
    }
    let _unused_by_miri = control;
}
