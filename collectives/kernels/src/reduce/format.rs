//! How elements lie in memory and what they are calculated in.
//!
//! A NaN is always written as the one canonical NaN of its format: which payload and sign an operation
//! leaves differs between processors and between orders of operands, and results must not.

#![allow(unsafe_code)]

use super::unit::{BLOCK, Unit};

/// One element type: what memory holds (`Raw`) and what the arithmetic is done in (`Wide`).
pub(super) trait Format {
    /// The bits in memory; every bit pattern is valid.
    type Raw: Copy;
    /// The type of accumulators.
    type Wide: Copy;
    /// Whether vector units beyond the baseline make a difference worth their code.
    const VECTORISED: bool = false;
    fn widen(raw: Self::Raw) -> Self::Wide;
    /// Rounds once, to nearest even.
    fn narrow(wide: Self::Wide) -> Self::Raw;

    /// Whether a unit has instructions for [`widen_block`](Self::widen_block) and
    /// [`narrow_block`](Self::narrow_block).
    #[inline(always)]
    fn converts_blocks<U: Unit>() -> bool {
        false
    }

    /// [`widen`](Self::widen) for a block of elements.
    ///
    /// # Safety
    /// They are readable, and the processor has `U`.
    #[inline(always)]
    unsafe fn widen_block<U: Unit>(_from: *const Self::Raw) -> [Self::Wide; BLOCK] {
        unreachable!("nobody asks a format that does not convert blocks")
    }

    /// [`narrow`](Self::narrow) for a block of elements.
    ///
    /// # Safety
    /// The processor has `U`.
    #[inline(always)]
    unsafe fn narrow_block<U: Unit>(_wide: [Self::Wide; BLOCK]) -> [Self::Raw; BLOCK] {
        unreachable!("nobody asks a format that does not convert blocks")
    }
}

/// Integers of type `T`, calculated in `T`.
pub(super) struct Integer<T>(std::marker::PhantomData<T>);

impl<T: Copy> Format for Integer<T> {
    type Raw = T;
    type Wide = T;

    #[inline(always)]
    fn widen(raw: T) -> T {
        raw
    }

    #[inline(always)]
    fn narrow(wide: T) -> T {
        wide
    }
}

/// Integers of type `T`, calculated in the wider type `W`; what becomes of them fits `T` again.
pub(super) struct Summed<T, W>(std::marker::PhantomData<(T, W)>);

macro_rules! summed {
    ($($type:ty as $wide:ty),*) => {$(
        impl Format for Summed<$type, $wide> {
            type Raw = $type;
            type Wide = $wide;

            #[inline(always)]
            fn widen(raw: $type) -> $wide {
                <$wide>::from(raw)
            }

            #[inline(always)]
            fn narrow(wide: $wide) -> $type {
                wide as $type
            }
        }
    )*};
}

summed!(u8 as i64, i8 as i64, u16 as i64, i16 as i64, u32 as i64, i32 as i64, u64 as i128, i64 as i128);

/// Truth values; calculated as 0 and 1.
pub(super) struct Bool;

impl Format for Bool {
    type Raw = u8;
    type Wide = u8;

    #[inline(always)]
    fn widen(raw: u8) -> u8 {
        u8::from(raw != 0)
    }

    #[inline(always)]
    fn narrow(wide: u8) -> u8 {
        wide
    }
}

/// IEEE single precision.
pub(super) struct F32;

impl Format for F32 {
    type Raw = f32;
    type Wide = f32;
    const VECTORISED: bool = true;

    #[inline(always)]
    fn widen(raw: f32) -> f32 {
        raw
    }

    #[inline(always)]
    fn narrow(wide: f32) -> f32 {
        if wide.is_nan() { f32::from_bits(0x7fc0_0000) } else { wide }
    }
}

/// IEEE double precision.
pub(super) struct F64;

impl Format for F64 {
    type Raw = f64;
    type Wide = f64;
    const VECTORISED: bool = true;

    #[inline(always)]
    fn widen(raw: f64) -> f64 {
        raw
    }

    #[inline(always)]
    fn narrow(wide: f64) -> f64 {
        if wide.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { wide }
    }
}

/// Pairs of a real float format; for what treats both halves together.
pub(super) struct Complex<F>(std::marker::PhantomData<F>);

impl<F: Format> Format for Complex<F> {
    type Raw = [F::Raw; 2];
    type Wide = [F::Wide; 2];
    const VECTORISED: bool = F::VECTORISED;

    #[inline(always)]
    fn widen([re, im]: [F::Raw; 2]) -> [F::Wide; 2] {
        [F::widen(re), F::widen(im)]
    }

    #[inline(always)]
    fn narrow([re, im]: [F::Wide; 2]) -> [F::Raw; 2] {
        [F::narrow(re), F::narrow(im)]
    }
}

/// Blocks of halves, by these instructions of a unit.
macro_rules! converted_by_units {
    ($widen:ident, $narrow:ident) => {
        #[inline(always)]
        fn converts_blocks<U: Unit>() -> bool {
            U::CONVERTS
        }

        #[inline(always)]
        unsafe fn widen_block<U: Unit>(from: *const u16) -> [f32; BLOCK] {
            // SAFETY: the caller's promise.
            unsafe { U::$widen(from) }
        }

        #[inline(always)]
        unsafe fn narrow_block<U: Unit>(wide: [f32; BLOCK]) -> [u16; BLOCK] {
            // SAFETY: the caller's promise.
            unsafe { U::$narrow(wide) }
        }
    };
}

/// The upper half of an `f32`, calculated in `f32`.
pub(super) struct Bf16;

impl Format for Bf16 {
    type Raw = u16;
    type Wide = f32;
    const VECTORISED: bool = true;

    #[inline(always)]
    fn widen(raw: u16) -> f32 {
        f32::from_bits(u32::from(raw) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        let bits = wide.to_bits();
        // An overflow of the mantissa carries into the exponent, up to infinity: as rounding should.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        if wide.is_nan() { 0x7fc0 } else { rounded as u16 }
    }

    converted_by_units!(bf16_widen, bf16_narrow);
}

/// IEEE half precision, calculated in `f32`.
pub(super) struct F16;

impl Format for F16 {
    type Raw = u16;
    type Wide = f32;
    const VECTORISED: bool = true;

    #[inline(always)]
    fn widen(raw: u16) -> f32 {
        Small::<5, 10, 15>::widen(u32::from(raw), NonFinite::Ieee)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        Small::<5, 10, 15>::narrow(wide, NonFinite::Ieee, 0x7e00) as u16
    }

    converted_by_units!(f16_widen, f16_narrow);
}

macro_rules! eight_bits {
    ($(#[$doc:meta])* $name:ident, $exponent:literal, $mantissa:literal, $bias:literal, $rule:ident, $nan:literal) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Format for $name {
            type Raw = u8;
            type Wide = f32;
            const VECTORISED: bool = true;

            #[inline(always)]
            fn widen(raw: u8) -> f32 {
                Small::<$exponent, $mantissa, $bias>::widen(u32::from(raw), NonFinite::$rule)
            }

            #[inline(always)]
            fn narrow(wide: f32) -> u8 {
                Small::<$exponent, $mantissa, $bias>::narrow(wide, NonFinite::$rule, $nan) as u8
            }
        }
    };
}

eight_bits!(
    /// The largest magnitude is the NaN; what overflows, infinity too, becomes the largest number, as in torch.
    F8E4M3Fn, 4, 3, 7, Finite, 0x7f
);
eight_bits!(
    /// Infinities and NaNs as in IEEE formats.
    F8E5M2, 5, 2, 15, Ieee, 0x7f
);
eight_bits!(
    /// The only NaN is where negative zero would be; what overflows becomes it.
    F8E4M3Fnuz, 4, 3, 8, Unsigned, 0x80
);
eight_bits!(
    /// The only NaN is where negative zero would be; what overflows becomes it.
    F8E5M2Fnuz, 5, 2, 16, Unsigned, 0x80
);

/// Where a small format keeps what is not a finite number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NonFinite {
    /// The largest exponent holds infinity and the NaNs.
    Ieee,
    /// Only the largest magnitude is a NaN.
    Finite,
    /// Only the bit pattern of negative zero is a NaN.
    Unsigned,
}

/// Conversions of formats with `E` exponent bits, `M` mantissa bits and exponent bias `B`, without branches
/// and without subnormal `f32` operands, which some programs have the processor flush to zero.
struct Small<const E: u32, const M: u32, const B: u32>;

impl<const E: u32, const M: u32, const B: u32> Small<E, M, B> {
    /// All bits but the sign.
    const MAGNITUDE: u32 = (1 << (E + M)) - 1;
    /// The number to add to an exponent to make it that of an `f32`.
    const REBIAS: u32 = (127 - B) << 23;
    /// Mantissa bits an `f32` has beyond ours.
    const SHIFT: u32 = 23 - M;
    /// The first magnitude that is infinite in an IEEE layout.
    const INFINITY: u32 = ((1 << E) - 1) << M;

    #[inline(always)]
    fn widen(raw: u32, rule: NonFinite) -> f32 {
        let magnitude = raw & Self::MAGNITUDE;
        let sign = (raw & (1 << (E + M))) << (31 - E - M);
        let shifted = magnitude << Self::SHIFT;
        let normal = shifted + Self::REBIAS;
        // A subnormal is a mantissa on the least exponent without the implicit one.
        let one = Self::REBIAS + (1 << 23);
        let subnormal = (f32::from_bits(shifted + one) - f32::from_bits(one)).to_bits();
        let finite = if magnitude < (1 << M) { subnormal } else { normal };
        let bits = match rule {
            NonFinite::Ieee if magnitude >= Self::INFINITY => shifted | 0x7f80_0000,
            NonFinite::Finite if magnitude == Self::MAGNITUDE => 0x7fc0_0000,
            NonFinite::Unsigned if raw == 1 << (E + M) => 0x7fc0_0000,
            _ => finite,
        };
        f32::from_bits(bits | sign)
    }

    #[inline(always)]
    fn narrow(wide: f32, rule: NonFinite, nan: u32) -> u32 {
        let bits = wide.to_bits();
        let sign = (bits >> 31) << (E + M);
        let magnitude = bits & 0x7fff_ffff;
        let odd = (magnitude >> Self::SHIFT) & 1;
        let half = (1 << (Self::SHIFT - 1)) - 1;
        let normal = magnitude.wrapping_sub(Self::REBIAS).wrapping_add(half + odd) >> Self::SHIFT;
        // Adding a number whose last mantissa bit is our least subnormal makes the adder round for us.
        let aligner = Self::REBIAS + ((Self::SHIFT + 1) << 23);
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(aligner)).to_bits().wrapping_sub(aligner);
        let rounded = if magnitude < Self::REBIAS + (1 << 23) { subnormal } else { normal };
        // From twice the largest exponent on, `normal` may have wrapped.
        let huge = magnitude >= Self::REBIAS + ((1 << E) << 23);
        let (finite, overflow) = match rule {
            NonFinite::Ieee => (rounded < Self::INFINITY, Self::INFINITY | sign),
            NonFinite::Finite => (rounded < Self::MAGNITUDE, (Self::MAGNITUDE - 1) | sign),
            NonFinite::Unsigned => (rounded <= Self::MAGNITUDE, nan),
        };
        let sign = if rule == NonFinite::Unsigned && rounded == 0 { 0 } else { sign };
        if wide.is_nan() {
            nan
        } else if huge || !finite {
            overflow
        } else {
            rounded | sign
        }
    }
}
