//! Reduction kernels: many operands of one element type become one, in a fixed order.
//!
//! The order of the sources is the order of the arithmetic, whoever executes it and on whatever vector unit,
//! so that a result has the same bits everywhere. Floats of 16 and 8 bits are calculated in `f32` and rounded
//! once. Sources are memory that other processes can write to: a torn value gives a wrong number, nothing else.
#![allow(unsafe_code)]

mod copy;
mod format;
mod operator;
#[cfg(test)]
mod tests;
mod tile;
mod unit;

use smallvec::SmallVec;

use crate::dtype::{Dtype, ReduceOp, Unsupported, supported};
pub use copy::Copying;
pub(crate) use copy::{Beside, copy, copy_beside};
use format::{Bf16, Bool, Complex, F8E4M3Fn, F8E4M3Fnuz, F8E5M2, F8E5M2Fnuz, F16, F32, F64, Integer};
use operator::{Avg, Band, Bor, Bxor, Max, Min, PremulSum, Product, Sum};
use tile::{Fold, VectorUnit};

/// Where operands are; those of a host of usual size take no memory of their own.
pub(crate) type Sources = SmallVec<[*const u8; 64]>;

/// A reduce operation on elements of one type among some number of ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    dtype: Dtype,
    /// What becomes of them.
    out: Dtype,
    op: ReduceOp,
    scale: f64,
    ranks: u32,
}

impl Reduction {
    /// `scale` is the factor of a `premul_sum`, `ranks` the divisor of an `avg`; others ignore them.
    ///
    /// # Errors
    /// [`Unsupported`] when the operation has no meaning for the elements.
    pub const fn new(dtype: Dtype, op: ReduceOp, scale: f64, ranks: u32) -> Result<Self, Unsupported> {
        match supported(dtype, op) {
            Ok(()) => Ok(Self { dtype, out: dtype, op, scale, ranks }),
            Err(error) => Err(error),
        }
    }

    /// Of collectives that move elements and calculate nothing.
    pub const fn none(dtype: Dtype) -> Self {
        Self { dtype, out: dtype, op: ReduceOp::Sum, scale: 1.0, ranks: 1 }
    }

    /// What the elements are.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// What comes of it: the same, but in the halves of an operation whose partial results are wider.
    pub(crate) const fn out(&self) -> Dtype {
        self.out
    }

    /// What is done with them.
    pub const fn op(&self) -> ReduceOp {
        self.op
    }

    /// What partial results of a step-wise fold are kept in, see [`wide`].
    pub const fn wide(&self) -> Dtype {
        wide(self.dtype, self.op)
    }

    /// The first half of it where it is done in two, over some of the ranks each. What lies between is
    /// [`wide`](Self::wide).
    pub(crate) fn first_half(&self) -> Self {
        let op = if self.op == ReduceOp::Avg { ReduceOp::Sum } else { self.op };
        Self { out: self.wide(), op, ..*self }
    }

    /// The second half, over the results of the first one.
    pub(crate) fn second_half(&self) -> Self {
        let op = if self.op == ReduceOp::PremulSum { ReduceOp::Sum } else { self.op };
        Self { dtype: self.wide(), op, ..*self }
    }

    /// Bytes of a partial result for one of an element.
    pub(crate) fn widening(&self) -> usize {
        self.wide().size() / self.dtype.size()
    }

    /// Bytes of results that come of so many bytes of elements.
    pub(crate) fn bytes_of(&self, elements: usize) -> usize {
        elements / self.dtype.size() * self.out.size()
    }

    /// Bytes of elements that so many bytes of results come of.
    pub(crate) fn bytes_for(&self, results: usize) -> usize {
        results / self.out.size() * self.dtype.size()
    }

    /// Whether a partial result of one operand is another one than the operand.
    pub(crate) fn is_lifted(&self) -> bool {
        self.wide() != self.dtype || self.op == ReduceOp::PremulSum
    }

    /// The operation between partial results: what is left of this one without its first and last step.
    pub(crate) const fn partial(&self) -> Self {
        let op = match self.op {
            ReduceOp::Avg | ReduceOp::PremulSum => ReduceOp::Sum,
            op => op,
        };
        Self { dtype: self.wide(), out: self.wide(), op, ..*self }
    }
}

/// The type that keeps partial results exact enough to round once: `f32` for arithmetic on smaller floats.
pub const fn wide(dtype: Dtype, op: ReduceOp) -> Dtype {
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
pub(crate) unsafe fn fold_beside(
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
pub(crate) unsafe fn fold_to_each(
    reduction: Reduction,
    sources: &[*const u8],
    outs: &[*mut u8],
    count: usize,
) {
    let how = (Copying::Loading, Beside::NOTHING);
    // SAFETY: the caller's promise; this processor has its own widest unit.
    unsafe { fold_on(VectorUnit::widest(), how, reduction, sources, outs, count) }
}

/// # Safety
/// As [`fold`], and this processor must have `unit`.
unsafe fn fold_on(
    unit: VectorUnit,
    how: (Copying, Beside),
    reduction: Reduction,
    sources: &[*const u8],
    outs: &[*mut u8],
    count: usize,
) {
    let Reduction { dtype, out: becomes, op, scale, ranks } = reduction;
    macro_rules! run {
        ($format:ty, $op:ty) => {
            run!($format, $op, count)
        };
        ($format:ty, $op:ty, $count:expr) => {{
            let fold = Fold::<$format, $format, $op>::new(sources, outs, $count, scale, ranks, how);
            // SAFETY: the caller's promise.
            unsafe { tile::run(fold, unit) }
        }};
    }
    macro_rules! integer {
        ($type:ty, $unsigned:ty) => {
            // Where the sign makes no difference, the unsigned type stands for both.
            match op {
                ReduceOp::Sum | ReduceOp::PremulSum => run!(Integer<$unsigned>, Sum),
                ReduceOp::Product => run!(Integer<$unsigned>, Product),
                ReduceOp::Band => run!(Integer<$unsigned>, Band),
                ReduceOp::Bor => run!(Integer<$unsigned>, Bor),
                ReduceOp::Bxor => run!(Integer<$unsigned>, Bxor),
                ReduceOp::Avg => run!(Integer<$type>, Avg),
                ReduceOp::Min => run!(Integer<$type>, Min),
                ReduceOp::Max => run!(Integer<$type>, Max),
            }
        };
    }
    macro_rules! float {
        ($format:ty) => {
            match op {
                ReduceOp::Avg => run!($format, Avg),
                ReduceOp::Product => run!($format, Product),
                ReduceOp::Min => run!($format, Min),
                ReduceOp::Max => run!($format, Max),
                ReduceOp::PremulSum => run!($format, PremulSum),
                _ => run!($format, Sum),
            }
        };
    }
    macro_rules! complex {
        ($half:ty) => {
            // Only a product mixes the halves.
            match op {
                ReduceOp::Product => run!(Complex<$half>, Product),
                ReduceOp::Avg => run!($half, Avg, 2 * count),
                ReduceOp::PremulSum => run!($half, PremulSum, 2 * count),
                _ => run!($half, Sum, 2 * count),
            }
        };
    }
    macro_rules! half {
        ($from:ty, $to:ty, $op:ty) => {{
            // A sum is one of operands that are multiplied by 1, or an average that is divided by 1.
            let factor = if op == ReduceOp::PremulSum { scale } else { 1.0 };
            let divisor = if op == ReduceOp::Avg { ranks } else { 1 };
            let fold = Fold::<$from, $to, $op>::new(sources, outs, count, factor, divisor, how);
            // SAFETY: the caller's promise.
            unsafe { tile::run(fold, unit) }
        }};
    }
    // Partial results of these are wider.
    macro_rules! small_float {
        ($format:ty) => {
            match (dtype == becomes, becomes, op) {
                (true, ..) => float!($format),
                (false, Dtype::F32, ReduceOp::Product) => half!($format, F32, Product),
                (false, Dtype::F32, _) => half!($format, F32, PremulSum),
                (false, _, ReduceOp::Product) => half!(F32, $format, Product),
                (false, ..) => half!(F32, $format, Avg),
            }
        };
    }
    match if becomes == Dtype::F32 { dtype } else { becomes } {
        Dtype::Bool => match op {
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => run!(Bool, Band),
            ReduceOp::Bxor => run!(Bool, Bxor),
            _ => run!(Bool, Bor),
        },
        Dtype::U8 => integer!(u8, u8),
        Dtype::I8 => integer!(i8, u8),
        Dtype::U16 => integer!(u16, u16),
        Dtype::I16 => integer!(i16, u16),
        Dtype::U32 => integer!(u32, u32),
        Dtype::I32 => integer!(i32, u32),
        Dtype::U64 => integer!(u64, u64),
        Dtype::I64 => integer!(i64, u64),
        Dtype::F16 => small_float!(F16),
        Dtype::Bf16 => small_float!(Bf16),
        Dtype::F32 => float!(F32),
        Dtype::F64 => float!(F64),
        Dtype::F8E4M3Fn => small_float!(F8E4M3Fn),
        Dtype::F8E5M2 => small_float!(F8E5M2),
        Dtype::F8E4M3Fnuz => small_float!(F8E4M3Fnuz),
        Dtype::F8E5M2Fnuz => small_float!(F8E5M2Fnuz),
        Dtype::C64 => complex!(F32),
        Dtype::C128 => complex!(F64),
    }
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
