//! Reduce operations on accumulators, as types, so that each loop is compiled for one.

/// A reduce operation on accumulators of type `W`.
pub(super) trait Operator<W> {
    /// Returns what an operand becomes before it is combined.
    #[inline(always)]
    fn lift(operand: W, _factor: f64) -> W {
        operand
    }

    fn combine(left: W, right: W) -> W;

    /// Returns what the combination of all operands becomes.
    #[inline(always)]
    fn finish(total: W, _divisor: f64) -> W {
        total
    }
}

pub(super) struct Sum;
/// The average of floats; see [`share`](super::share) for what operands are multiplied by.
pub(super) struct Mean;
/// The average of integers, rounded towards zero.
pub(super) struct Quotient;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct Band;
pub(super) struct Bor;
pub(super) struct Bxor;
pub(super) struct PremulSum;

/// Accumulators that add and multiply.
pub(super) trait Number: Copy {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
}

/// Accumulators that hold the sum of any number of ranks' integers.
pub(super) trait Whole: Number {
    fn over(self, divisor: f64) -> Self;
}

/// Accumulators with a fraction.
pub(super) trait Real: Number {
    fn scaled(self, factor: f64) -> Self;
    /// The average whose total this is. It is no larger than the largest operand, whatever rounding has added.
    fn mean(self, divisor: f64) -> Self;
}

/// Accumulators that compare.
pub(super) trait Ordered: Copy {
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }

        impl Ordered for $type {
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }
        }
    )*};
}

integers!(u8, i8, u16, i16, u32, i32, u64, i64, i128);

impl Whole for i64 {
    #[inline(always)]
    fn over(self, divisor: f64) -> Self {
        self / divisor as Self
    }
}

impl Whole for i128 {
    #[inline(always)]
    fn over(self, divisor: f64) -> Self {
        // Most sums fit half of it, whose division is one instruction.
        match i64::try_from(self) {
            Ok(total) => Self::from(total / divisor as i64),
            Err(_) => self / divisor as Self,
        }
    }
}

macro_rules! floats {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self * other
            }
        }

        impl Real for $type {
            #[inline(always)]
            fn scaled(self, factor: f64) -> Self {
                self * factor as Self
            }

            #[inline(always)]
            fn mean(self, divisor: f64) -> Self {
                let mean = self / divisor as Self;
                let held = if mean > Self::MAX { Self::MAX } else { mean };
                let held = if held < Self::MIN { Self::MIN } else { held };
                if self.abs() <= Self::MAX { held } else { mean }
            }
        }

        // Written so that something else than `self` is chosen too: a choice between storing and leaving
        // alone is compiled to masked stores, which are an order of magnitude slower.
        impl Ordered for $type {
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                let least = if other < self { other } else { self };
                if self.is_nan() | other.is_nan() { Self::NAN } else { least }
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                let greatest = if other > self { other } else { self };
                if self.is_nan() | other.is_nan() { Self::NAN } else { greatest }
            }
        }

        // Only the product looks at both halves: sums of complex numbers run as sums of twice as many reals.
        impl Operator<[$type; 2]> for Product {
            #[inline(always)]
            fn combine([a, b]: [$type; 2], [c, d]: [$type; 2]) -> [$type; 2] {
                [a * c - b * d, a * d + b * c]
            }
        }
    )*};
}

floats!(f32, f64);

impl<W: Number> Operator<W> for Sum {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left.plus(right)
    }
}

impl<W: Whole> Operator<W> for Quotient {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left.plus(right)
    }

    #[inline(always)]
    fn finish(total: W, divisor: f64) -> W {
        total.over(divisor)
    }
}

impl<W: Real> Operator<W> for Mean {
    #[inline(always)]
    fn lift(operand: W, factor: f64) -> W {
        operand.scaled(factor)
    }

    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left.plus(right)
    }

    #[inline(always)]
    fn finish(total: W, divisor: f64) -> W {
        total.mean(divisor)
    }
}

impl<W: Real> Operator<W> for PremulSum {
    #[inline(always)]
    fn lift(operand: W, factor: f64) -> W {
        operand.scaled(factor)
    }

    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left.plus(right)
    }
}

impl<W: Number> Operator<W> for Product {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left.times(right)
    }
}

impl<W: Ordered> Operator<W> for Min {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left.least(right)
    }
}

impl<W: Ordered> Operator<W> for Max {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left.greatest(right)
    }
}

impl<W: std::ops::BitAnd<Output = W>> Operator<W> for Band {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left & right
    }
}

impl<W: std::ops::BitOr<Output = W>> Operator<W> for Bor {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left | right
    }
}

impl<W: std::ops::BitXor<Output = W>> Operator<W> for Bxor {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left ^ right
    }
}
