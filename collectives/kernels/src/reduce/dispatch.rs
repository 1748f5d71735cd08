//! The choice of a fold's types: there is one loop for each element type, each operation and each half of a reduction.
#![allow(unsafe_code)]

use super::format::{
    Bf16, Bool, Complex, F8E4M3Fn, F8E4M3Fnuz, F8E5M2, F8E5M2Fnuz, F16, F32, F64, Format, Integer, Summed,
};
use super::kernel::{self, VectorUnit};
use super::mode::ArithmeticMode;
use super::operator::{Band, Bor, Bxor, Max, Mean, Min, Operator, PremulSum, Product, Quotient, Sum};
use super::tile::Fold;
use super::{Beside, Copying, Reduction};
use crate::dtype::{Dtype, ReduceOp};

/// Runs an untyped fold with the types of its elements, of its results if these are others, and of its operation.
macro_rules! run {
    ($fold:expr, $format:ty, $op:ty) => {
        run!($fold, $format, $format, $op)
    };
    ($fold:expr, $from:ty, $to:ty, $op:ty) => {
        // SAFETY: the caller's promise.
        unsafe { $fold.run::<$from, $to, $op>() }
    };
}

/// A fold of integers. Where the sign makes no difference, the unsigned type stands for both.
macro_rules! integer {
    ($fold:expr, $type:ty, $unsigned:ty, $sum:ty) => {
        match $fold.reduction.op {
            ReduceOp::Sum if $fold.is_first_half() => run!($fold, Summed<$type, $sum>, Integer<$sum>, Sum),
            ReduceOp::Sum | ReduceOp::PremulSum => run!($fold, Integer<$unsigned>, Sum),
            ReduceOp::Product => run!($fold, Integer<$unsigned>, Product),
            ReduceOp::Band => run!($fold, Integer<$unsigned>, Band),
            ReduceOp::Bor => run!($fold, Integer<$unsigned>, Bor),
            ReduceOp::Bxor => run!($fold, Integer<$unsigned>, Bxor),
            ReduceOp::Avg if $fold.is_second_half() => {
                run!($fold, Integer<$sum>, Summed<$type, $sum>, Quotient)
            }
            ReduceOp::Avg => run!($fold, Summed<$type, $sum>, Quotient),
            ReduceOp::Min => run!($fold, Integer<$type>, Min),
            ReduceOp::Max => run!($fold, Integer<$type>, Max),
        }
    };
}

macro_rules! float {
    ($fold:expr, $format:ty) => {
        match $fold.reduction.op {
            ReduceOp::Avg => run!($fold, $format, Mean),
            ReduceOp::Product => run!($fold, $format, Product),
            ReduceOp::Min => run!($fold, $format, Min),
            ReduceOp::Max => run!($fold, $format, Max),
            ReduceOp::PremulSum => run!($fold, $format, PremulSum),
            _ => run!($fold, $format, Sum),
        }
    };
}

/// A fold of floats whose partial results are wider. A sum is one of operands that are multiplied by 1, or an average
/// that is divided by 1.
macro_rules! small_float {
    ($fold:expr, $format:ty) => {
        match $fold.reduction.op {
            ReduceOp::Product if $fold.is_first_half() => run!($fold, $format, F32, Product),
            _ if $fold.is_first_half() => run!($fold, $format, F32, PremulSum),
            ReduceOp::Product if $fold.is_second_half() => run!($fold, F32, $format, Product),
            _ if $fold.is_second_half() => run!($fold, F32, $format, Mean),
            _ => float!($fold, $format),
        }
    };
}

/// A fold of complex numbers, of which only a product mixes the halves.
macro_rules! complex {
    ($fold:expr, $half:ty) => {
        match $fold.reduction.op {
            ReduceOp::Product => run!($fold, Complex<$half>, Product),
            ReduceOp::Avg => run!($fold.of_halves(), $half, Mean),
            ReduceOp::PremulSum => run!($fold.of_halves(), $half, PremulSum),
            _ => run!($fold.of_halves(), $half, Sum),
        }
    };
}

/// # Safety
/// As [`fold`](super::fold), of each of `outs`, and this processor must have `unit`.
pub(super) unsafe fn fold_on(
    unit: VectorUnit,
    how: (Copying, Beside),
    reduction: Reduction,
    sources: &[*const u8],
    outs: &[*mut u8],
    count: usize,
) {
    let _mode = ArithmeticMode::enter();
    let fold = Untyped { unit, how, reduction, sources, outs, count };
    match if fold.is_first_half() { reduction.dtype } else { reduction.out } {
        Dtype::Bool => match reduction.op {
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => run!(fold, Bool, Band),
            ReduceOp::Bxor => run!(fold, Bool, Bxor),
            _ => run!(fold, Bool, Bor),
        },
        Dtype::U8 => integer!(fold, u8, u8, i64),
        Dtype::I8 => integer!(fold, i8, u8, i64),
        Dtype::U16 => integer!(fold, u16, u16, i64),
        Dtype::I16 => integer!(fold, i16, u16, i64),
        Dtype::U32 => integer!(fold, u32, u32, i64),
        Dtype::I32 => integer!(fold, i32, u32, i64),
        Dtype::U64 => integer!(fold, u64, u64, i128),
        Dtype::I64 => integer!(fold, i64, u64, i128),
        Dtype::I128 => run!(fold, Integer<i128>, Sum),
        Dtype::F16 => small_float!(fold, F16),
        Dtype::Bf16 => small_float!(fold, Bf16),
        Dtype::F32 => float!(fold, F32),
        Dtype::F64 => float!(fold, F64),
        Dtype::F8E4M3Fn => small_float!(fold, F8E4M3Fn),
        Dtype::F8E5M2 => small_float!(fold, F8E5M2),
        Dtype::F8E4M3Fnuz => small_float!(fold, F8E4M3Fnuz),
        Dtype::F8E5M2Fnuz => small_float!(fold, F8E5M2Fnuz),
        Dtype::C64 => complex!(fold, F32),
        Dtype::C128 => complex!(fold, F64),
    }
}

/// A fold whose types are chosen when it is run.
struct Untyped<'a> {
    unit: VectorUnit,
    how: (Copying, Beside),
    reduction: Reduction,
    sources: &'a [*const u8],
    outs: &'a [*mut u8],
    count: usize,
}

impl Untyped<'_> {
    #[inline(always)]
    fn is_first_half(&self) -> bool {
        self.reduction.dtype.size() < self.reduction.out.size()
    }

    #[inline(always)]
    fn is_second_half(&self) -> bool {
        self.reduction.dtype.size() > self.reduction.out.size()
    }

    /// The same, of numbers that each are one half of an element.
    #[inline(always)]
    fn of_halves(self) -> Self {
        Self { count: 2 * self.count, ..self }
    }

    /// # Safety
    /// As [`fold_on`], of elements of the layout of `F` and results of that of `T`.
    #[inline(always)]
    unsafe fn run<F, T, O>(self)
    where
        F: Format,
        T: Format<Wide = F::Wide>,
        O: Operator<F::Wide>,
    {
        let factors = (self.reduction.scale, self.reduction.divisor);
        let fold = Fold::<F, T, O>::new(self.sources, self.outs, self.count, factors, self.how);
        // SAFETY: the caller's promise.
        unsafe { kernel::run(fold, self.unit) }
    }
}
