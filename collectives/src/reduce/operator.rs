//! What is calculated: reduce operations on accumulators, as types, so that each loop is compiled for one.

/// A reduce operation on accumulators of type `W`.
pub(super) trait Operator<W> {
    /// What an operand becomes before it is combined.
    #[inline(always)]
    fn lift(operand: W, _factor: f64) -> W {
        operand
    }

    fn combine(left: W, right: W) -> W;

    /// What the combination of all operands becomes.
    #[inline(always)]
    fn finish(total: W, _ranks: u32) -> W {
        total
    }
}

pub(super) struct Sum;
pub(super) struct Avg;
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
    fn over(self, ranks: u32) -> Self;
}

/// Accumulators with a fraction.
pub(super) trait Real: Number {
    fn scaled(self, factor: f64) -> Self;
}

/// Accumulators that compare.
pub(super) trait Ordered: Copy {
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($type:ty => $divided_in:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            // In a type that holds any number of ranks.
            #[inline(always)]
            fn over(self, ranks: u32) -> Self {
                (<$divided_in>::from(self) / <$divided_in>::from(ranks.max(1))) as Self
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

integers!(u8 => u32, i8 => i64, u16 => u32, i16 => i64, u32 => u32, i32 => i64, u64 => u64, i64 => i64);

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

            #[inline(always)]
            fn over(self, ranks: u32) -> Self {
                self / ranks as Self
            }
        }

        impl Real for $type {
            #[inline(always)]
            fn scaled(self, factor: f64) -> Self {
                self * factor as Self
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

impl<W: Number> Operator<W> for Avg {
    #[inline(always)]
    fn combine(left: W, right: W) -> W {
        left.plus(right)
    }

    #[inline(always)]
    fn finish(total: W, ranks: u32) -> W {
        total.over(ranks)
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
