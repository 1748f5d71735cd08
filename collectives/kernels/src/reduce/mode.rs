//! The modes of the processor that our arithmetic needs, whatever the program has set for its own.
//!
//! A rank that flushes subnormal numbers to zero (`torch.set_flush_denormal(True)`) or rounds in another direction
//! would make other bits of the same operands than the others do, and one that traps would be killed by our sum.
#![allow(unsafe_code)]

/// MXCSR: all exceptions masked, rounding to nearest, subnormal numbers as they are. The low six bits say what has
/// happened, and set nothing.
#[cfg(target_arch = "x86_64")]
const OURS: Control = 0x1f80;
#[cfg(target_arch = "x86_64")]
const SETTINGS: Control = !0x3f;
#[cfg(target_arch = "x86_64")]
type Control = u32;

/// FPCR: rounding to nearest, no trap, nothing flushed to zero.
#[cfg(not(target_arch = "x86_64"))]
const OURS: Control = 0;
#[cfg(not(target_arch = "x86_64"))]
const SETTINGS: Control = !0;
#[cfg(not(target_arch = "x86_64"))]
type Control = u64;

/// The mode of the processor's arithmetic: ours from [`enter`](Self::enter) on, the program's again when this is dropped.
pub(super) struct ArithmeticMode {
    /// The program's, if they are others than ours.
    programs: Option<Control>,
}

impl ArithmeticMode {
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

impl Drop for ArithmeticMode {
    #[inline]
    fn drop(&mut self) {
        if let Some(programs) = self.programs {
            set_control(programs);
        }
    }
}

/// The register of the modes; ours for Miri, which knows no assembly, and on processors that we do not know.
#[inline]
#[cfg_attr(miri, allow(unused_mut))]
fn control() -> Control {
    let mut control = OURS;
    // SAFETY: it writes the four bytes that it is given.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack, preserves_flags));
    }
    // SAFETY: it reads a register.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    unsafe {
        std::arch::asm!("mrs {}, fpcr", out(reg) control, options(nomem, nostack, preserves_flags));
    }
    control
}

/// `control` is a value that the register had, or [`OURS`].
#[cold]
#[cfg_attr(miri, allow(unused_variables))]
fn set_control(control: Control) {
    // SAFETY: it reads four bytes, a valid value.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack));
    }
    // SAFETY: a valid value.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    unsafe {
        std::arch::asm!("msr fpcr, {}", in(reg) control, options(nostack));
    }
}
