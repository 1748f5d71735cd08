//! Loops in forms for several vector units, of which a processor runs that of its widest one.
#![allow(unsafe_code)]

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use super::unit::{Avx2, Avx512};
use super::unit::{Baseline, Unit};

/// A loop over `count` elements, compiled once per vector unit.
pub(super) trait Kernel: Sized {
    /// Whether vector units beyond the baseline make a difference worth their code.
    const VECTORISED: bool;

    /// # Safety
    /// The pointers are as the constructor of the implementing type demands, and the processor has `U`.
    unsafe fn run<U: Unit>(self);
}

/// The vector instructions a loop may use; the result is the same on all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VectorUnit {
    /// The instructions that every processor of the architecture has: NEON on aarch64.
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl VectorUnit {
    /// Those this processor has, the widest last.
    pub(super) fn all() -> Vec<Self> {
        let mut units = vec![Self::Baseline];
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            units.extend(has_avx2.then_some(Self::Avx2));
            units.extend((has_avx2 && has_avx512).then_some(Self::Avx512));
        }
        units
    }

    /// The widest one this processor has.
    #[inline]
    pub(super) fn widest() -> Self {
        static WIDEST: OnceLock<VectorUnit> = OnceLock::new();
        *WIDEST.get_or_init(|| *Self::all().last().expect("there is a baseline"))
    }
}

/// # Safety
/// As [`Kernel::run`], and this processor must have `unit`.
#[inline]
pub(super) unsafe fn run<K: Kernel>(kernel: K, unit: VectorUnit) {
    #[cfg(target_arch = "x86_64")]
    if K::VECTORISED {
        match unit {
            VectorUnit::Baseline => {}
            // SAFETY: the caller's promise.
            VectorUnit::Avx2 => return unsafe { run_avx2(kernel) },
            // SAFETY: the caller's promise.
            VectorUnit::Avx512 => return unsafe { run_avx512(kernel) },
        }
    }
    let _baseline = unit;
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Baseline>() }
}

/// # Safety
/// As [`Kernel::run`], on a processor with these.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Avx2>() }
}

/// # Safety
/// As [`Kernel::run`], on a processor with these.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<K: Kernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Avx512>() }
}
