//! Reduction kernels: many operands of one element type become one, in a fixed order.
//!
//! The order of the sources is the order of the arithmetic, whoever executes it and on whatever vector unit,
//! so that a result has the same bits everywhere. Floats of 16 and 8 bits are calculated in `f32` and rounded
//! once. An average is right also where the sum of its operands is too large for their type: integers are added in a
//! wider type, floats are made smaller first, by a power of two. Sources are memory that other processes can write
//! to: a torn value gives a wrong number, nothing else.
#![allow(unsafe_code)]

mod copy;
mod dispatch;
mod format;
mod kernel;
mod mode;
mod operator;
#[cfg(test)]
mod tests;
mod tile;
mod unit;

use smallvec::SmallVec;

use crate::dtype::{Dtype, ReduceOp, Unsupported, supported};
pub use copy::Copying;
pub use copy::{Beside, copy, copy_beside};
use dispatch::fold_on;
use kernel::VectorUnit;

/// Where operands are; those of a host of usual size take no memory of their own.
pub type Sources = SmallVec<[*const u8; 64]>;

/// A reduce operation on elements of one type among some number of ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    dtype: Dtype,
    /// The type of the results.
    out: Dtype,
    op: ReduceOp,
    /// The factor that operands are multiplied by: that of a `premul_sum`, a power of two in an average of floats.
    scale: f64,
    /// The number that the total of an average is divided by.
    divisor: f64,
}

impl Reduction {
    /// `scale` is the factor of a `premul_sum`, `ranks` the divisor of an `avg`; others ignore them.
    ///
    /// # Errors
    /// [`Unsupported`] when the operation has no meaning for the elements.
    pub const fn new(dtype: Dtype, op: ReduceOp, scale: f64, ranks: u32) -> Result<Self, Unsupported> {
        let (scale, divisor) = match op {
            ReduceOp::PremulSum => (scale, 1.0),
            ReduceOp::Avg if dtype.is_integer() => (1.0, at_least_one(ranks)),
            ReduceOp::Avg => (share(ranks), at_least_one(ranks) * share(ranks)),
            _ => (1.0, 1.0),
        };
        match supported(dtype, op) {
            Ok(()) => Ok(Self { dtype, out: dtype, op, scale, divisor }),
            Err(error) => Err(error),
        }
    }

    /// The reduction of collectives that move elements and calculate nothing.
    pub const fn none(dtype: Dtype) -> Self {
        Self { dtype, out: dtype, op: ReduceOp::Sum, scale: 1.0, divisor: 1.0 }
    }

    /// Returns the type of the elements.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the type of the results: the same, but in the halves of an operation whose partial results are
    /// wider.
    pub const fn out(&self) -> Dtype {
        self.out
    }

    /// Returns the operation that combines them.
    pub const fn op(&self) -> ReduceOp {
        self.op
    }

    /// Returns the type that partial results of a step-wise fold are kept in, see [`wide`].
    pub const fn wide(&self) -> Dtype {
        // In a half of it, the wider one of what comes in and what goes out.
        if self.dtype.size() == self.out.size() {
            wide(self.dtype, self.op)
        } else if self.dtype.size() < self.out.size() {
            self.out
        } else {
            self.dtype
        }
    }

    /// The first half of it where it is done in two, over some of the ranks each. The partial results between the
    /// halves are [`wide`](Self::wide).
    pub fn first_half(&self) -> Self {
        let op = match self.op {
            ReduceOp::Avg if self.dtype.is_integer() => ReduceOp::Sum,
            ReduceOp::Avg => ReduceOp::PremulSum,
            op => op,
        };
        Self { out: self.wide(), op, ..*self }
    }

    /// The second half, over the results of the first one.
    pub fn second_half(&self) -> Self {
        let op = if self.op == ReduceOp::PremulSum { ReduceOp::Sum } else { self.op };
        Self { dtype: self.wide(), op, scale: 1.0, ..*self }
    }

    /// Bytes of a partial result for one of an element.
    pub fn widening(&self) -> usize {
        self.wide().size() / self.dtype.size()
    }

    /// Bytes of results that come of so many bytes of elements.
    pub fn bytes_of(&self, elements: usize) -> usize {
        elements / self.dtype.size() * self.out.size()
    }

    /// Bytes of elements that so many bytes of results come of.
    pub fn bytes_for(&self, results: usize) -> usize {
        results / self.out.size() * self.dtype.size()
    }

    /// Whether a partial result of one operand is another one than the operand.
    pub fn is_lifted(&self) -> bool {
        self.wide() != self.dtype || matches!(self.op, ReduceOp::PremulSum | ReduceOp::Avg)
    }

    /// The operation between partial results: what is left of this one without its first and last step.
    pub const fn partial(&self) -> Self {
        let op = match self.op {
            ReduceOp::Avg | ReduceOp::PremulSum => ReduceOp::Sum,
            op => op,
        };
        Self { dtype: self.wide(), out: self.wide(), op, ..*self }
    }
}

/// Returns the factor that floats are multiplied by before those of `ranks` ranks are added for an average: their
/// sum is at most half of the largest number then, which leaves room for what rounding adds. A power of two leaves
/// all bits of a number as they are, but for those nearly too small for the type: these lose their last ones.
const fn share(ranks: u32) -> f64 {
    match ranks {
        0 | 1 => 1.0,
        _ => 0.5 / (ranks as u64).next_power_of_two() as f64,
    }
}

const fn at_least_one(ranks: u32) -> f64 {
    if ranks == 0 { 1.0 } else { ranks as f64 }
}

/// The type that keeps partial results exact enough to round once: `f32` for arithmetic on smaller floats. For an
/// average of integers, one that holds any sum of them.
pub const fn wide(dtype: Dtype, op: ReduceOp) -> Dtype {
    if matches!(op, ReduceOp::Avg) && dtype.is_integer() {
        return if dtype.size() < Dtype::I64.size() { Dtype::I64 } else { Dtype::I128 };
    }
    let rounds = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product | ReduceOp::PremulSum);
    match dtype {
        Dtype::F16 | Dtype::Bf16 if rounds => Dtype::F32,
        Dtype::F8E4M3Fn | Dtype::F8E5M2 | Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz if rounds => Dtype::F32,
        _ => dtype,
    }
}

/// `out[i] = finish(s0[i] ⊕ s1[i] ⊕ ...)`, in the order of `sources`; nothing when there are none.
///
/// # Safety
/// Every source must be readable for `count` elements, and `out` writable for as many of what they become. `out` may
/// be one of the sources where it has elements like theirs, and must otherwise not overlap them. Pointers need not be
/// aligned.
pub unsafe fn fold(reduction: Reduction, sources: &[*const u8], out: *mut u8, count: usize) {
    // SAFETY: the caller's promise.
    unsafe { fold_from(Copying::Cached, reduction, sources, out, count) }
}

/// As [`fold`], where sources may lie in memory; of two, the second.
///
/// # Safety
/// As [`fold`].
pub unsafe fn fold_from(
    how: Copying,
    reduction: Reduction,
    sources: &[*const u8],
    out: *mut u8,
    count: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { fold_beside((how, Beside::NOTHING), reduction, sources, out, count) }
}

/// As [`fold_from`], and makes a copy meanwhile.
///
/// # Safety
/// As [`fold`].
pub unsafe fn fold_beside(
    how: (Copying, Beside),
    reduction: Reduction,
    sources: &[*const u8],
    out: *mut u8,
    count: usize,
) {
    // SAFETY: the caller's promise; this processor has its own widest unit.
    unsafe { fold_on(VectorUnit::widest(), how, reduction, sources, &[out], count) }
}

/// As [`fold`] of what lies in memory, with the result in each of `outs`.
///
/// # Safety
/// As [`fold`], of each of them.
pub unsafe fn fold_to_each(reduction: Reduction, sources: &[*const u8], outs: &[*mut u8], count: usize) {
    let how = (Copying::Loading, Beside::NOTHING);
    // SAFETY: the caller's promise; this processor has its own widest unit.
    unsafe { fold_on(VectorUnit::widest(), how, reduction, sources, outs, count) }
}

/// `to[i] = lift(from[i])`: an operand becomes a partial result, in the layout of [`Reduction::wide`].
///
/// # Safety
/// `from` must be readable for `count` elements, `to` writable for `count` wide ones. They may be the same
/// memory where the layouts are, and must otherwise not overlap. Pointers need not be aligned.
pub unsafe fn widen(reduction: Reduction, from: *const u8, to: *mut u8, count: usize) {
    if !reduction.is_lifted() {
        // SAFETY: the caller's promise.
        return unsafe { to.copy_from(from, count * reduction.dtype.size()) };
    }
    // SAFETY: the caller's promise.
    unsafe { fold(reduction.first_half(), &[from], to, count) }
}

/// `partial[i] = received[i] ⊕ partial[i]`, both partial results.
///
/// # Safety
/// `received` must be readable and `partial` writable for `count` elements of [`Reduction::wide`], and they
/// must not overlap. Pointers need not be aligned.
pub unsafe fn accumulate(reduction: Reduction, received: *const u8, partial: *mut u8, count: usize) {
    // SAFETY: the caller's promise; the output is the second source.
    unsafe { fold(reduction.partial(), &[received, partial.cast_const()], partial, count) }
}

/// `to[i] = finish(from[i])`: a partial result becomes the result; rounds once and divides for an average.
///
/// # Safety
/// `from` must be readable for `count` wide elements, `to` writable for `count` elements. They may be the
/// same memory where the layouts are, and must otherwise not overlap. Pointers need not be aligned.
pub unsafe fn finish(reduction: Reduction, from: *const u8, to: *mut u8, count: usize) {
    if reduction.wide() == reduction.dtype && reduction.op != ReduceOp::Avg {
        // SAFETY: the caller's promise.
        return unsafe { to.copy_from(from, count * reduction.dtype.size()) };
    }
    // SAFETY: the caller's promise.
    unsafe { fold(reduction.second_half(), &[from], to, count) }
}
