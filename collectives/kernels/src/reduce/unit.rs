//! Vector units as types, the conversions that have instructions of their own, and how they copy.
#![allow(unsafe_code)]

use crate::LINE;

/// Elements that are converted at once.
pub(super) const BLOCK: usize = 16;

/// The vector instructions that a loop was compiled for.
pub(super) trait Unit {
    /// Whether it has the conversions below.
    const CONVERTS: bool = false;

    /// # Safety
    /// A block is readable, and the processor has this unit.
    unsafe fn f16_widen(_from: *const u16) -> [f32; BLOCK] {
        unreachable!("nobody asks a unit without conversions")
    }

    /// # Safety
    /// The processor has this unit.
    unsafe fn f16_narrow(_wide: [f32; BLOCK]) -> [u16; BLOCK] {
        unreachable!("nobody asks a unit without conversions")
    }

    /// # Safety
    /// As [`f16_widen`](Self::f16_widen).
    unsafe fn bf16_widen(_from: *const u16) -> [f32; BLOCK] {
        unreachable!("nobody asks a unit without conversions")
    }

    /// # Safety
    /// As [`f16_narrow`](Self::f16_narrow).
    unsafe fn bf16_narrow(_wide: [f32; BLOCK]) -> [u16; BLOCK] {
        unreachable!("nobody asks a unit without conversions")
    }

    /// Copies a cache line.
    ///
    /// # Safety
    /// A line is readable at `from` and writable at `to`, and the processor has this unit.
    #[inline(always)]
    unsafe fn copy_line(from: *const u8, to: *mut u8) {
        let (from, to) = (from.cast::<[u64; LINE / 8]>(), to.cast::<[u64; LINE / 8]>());
        // SAFETY: the caller's promise.
        let line = unsafe { from.read_unaligned() };
        // SAFETY: the caller's promise.
        unsafe { to.write_unaligned(line) };
    }

    /// Copies a cache line past the caches, where the processor can, to where it is after [`fence`](Self::fence).
    ///
    /// # Safety
    /// As [`copy_line`](Self::copy_line), and `to` is where a line begins.
    #[inline(always)]
    unsafe fn stream_line(from: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { Self::copy_line(from, to) };
    }

    /// Has the processor fetch a line into its second-level cache, where it can be told to; it may be of no memory.
    #[inline(always)]
    fn prefetch(_from: *const u8) {}

    /// After it, what was streamed is there for whoever sees what this thread writes next.
    #[inline(always)]
    fn fence() {}
}

pub(super) struct Baseline;

#[cfg(not(target_arch = "x86_64"))]
impl Unit for Baseline {}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, Baseline, LINE, Unit};

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
    // The canonical NaNs, as `F16::narrow` and `Bf16::narrow` write them.
    const F16_NAN: i16 = 0x7e00;
    const BF16_NAN: i32 = 0x7fc0;
    /// Elements in a register of AVX2.
    const HALF: usize = BLOCK / 2;

    macro_rules! conversions {
        ($($method:ident($from:ident: $type:ty) -> $result:ty = $function:ident;)*) => {$(
            #[inline(always)]
            unsafe fn $method($from: $type) -> $result {
                // SAFETY: the caller's promise.
                unsafe { $function($from) }
            }
        )*};
    }

    /// How a unit streams; Miri has no caches, nor the instructions.
    macro_rules! streams {
        ($function:ident) => {
            #[cfg(not(miri))]
            #[inline(always)]
            unsafe fn stream_line(from: *const u8, to: *mut u8) {
                // SAFETY: the caller's promise.
                unsafe { $function(from, to) }
            }

            #[cfg(not(miri))]
            #[inline(always)]
            fn prefetch(from: *const u8) {
                // SAFETY: every processor of the architecture has it, and it touches nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) };
            }

            #[cfg(not(miri))]
            #[inline(always)]
            fn fence() {
                // SAFETY: every processor of the architecture has it.
                unsafe { _mm_sfence() };
            }
        };
    }

    impl Unit for Baseline {
        streams!(stream_line_sse2);
    }

    /// # Safety
    /// A line is readable at `from` and writable at `to`, where a line begins.
    #[cfg(not(miri))]
    #[inline(always)]
    unsafe fn stream_line_sse2(from: *const u8, to: *mut u8) {
        const WIDTH: usize = size_of::<__m128i>();
        let part = |at: usize| from.wrapping_add(at).cast();
        // SAFETY: the caller's promise.
        let line: [__m128i; LINE / WIDTH] =
            std::array::from_fn(|index| unsafe { _mm_loadu_si128(part(index * WIDTH)) });
        for (index, vector) in line.into_iter().enumerate() {
            // SAFETY: the caller's promise; aligned, as the line is.
            unsafe { _mm_stream_si128(to.wrapping_add(index * WIDTH).cast(), vector) };
        }
    }

    /// # Safety
    /// A line is readable at `from` and writable at `to`, where a line begins.
    #[cfg(not(miri))]
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn stream_line_avx2(from: *const u8, to: *mut u8) {
        const WIDTH: usize = size_of::<__m256i>();
        // SAFETY: the caller's promise.
        let low = unsafe { _mm256_loadu_si256(from.cast()) };
        // SAFETY: the caller's promise.
        let high = unsafe { _mm256_loadu_si256(from.wrapping_add(WIDTH).cast()) };
        // SAFETY: the caller's promise; aligned, as the line is.
        unsafe { _mm256_stream_si256(to.cast(), low) };
        // SAFETY: as above.
        unsafe { _mm256_stream_si256(to.wrapping_add(WIDTH).cast(), high) };
    }

    /// AVX2 and F16C.
    pub(in crate::reduce) struct Avx2;

    impl Unit for Avx2 {
        const CONVERTS: bool = true;

        conversions! {
            f16_widen(from: *const u16) -> [f32; BLOCK] = widen_f16_avx2;
            f16_narrow(wide: [f32; BLOCK]) -> [u16; BLOCK] = narrow_f16_avx2;
            bf16_widen(from: *const u16) -> [f32; BLOCK] = widen_bf16_avx2;
            bf16_narrow(wide: [f32; BLOCK]) -> [u16; BLOCK] = narrow_bf16_avx2;
        }
        streams!(stream_line_avx2);
    }

    /// # Safety
    /// A block is readable.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn widen_f16_avx2(from: *const u16) -> [f32; BLOCK] {
        let convert = |raw| _mm256_cvtph_ps(raw);
        // SAFETY: the caller's promise.
        unsafe { widen_avx2(from, convert) }
    }

    /// # Safety
    /// A block is readable.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn widen_bf16_avx2(from: *const u16) -> [f32; BLOCK] {
        let convert = |raw| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(raw)));
        // SAFETY: the caller's promise.
        unsafe { widen_avx2(from, convert) }
    }

    /// # Safety
    /// A block is readable.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn widen_avx2(from: *const u16, convert: impl Fn(__m128i) -> __m256) -> [f32; BLOCK] {
        let mut wide = [0.0; BLOCK];
        for (half, to) in wide.chunks_exact_mut(HALF).enumerate() {
            // SAFETY: the caller's promise.
            let raw = unsafe { _mm_loadu_si128(from.wrapping_add(half * HALF).cast()) };
            let converted = convert(raw);
            // SAFETY: half a block is there.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), converted) };
        }
        wide
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn narrow_f16_avx2(wide: [f32; BLOCK]) -> [u16; BLOCK] {
        narrow_avx2(&wide, |wide| {
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(wide, wide));
            let is_nan =
                _mm_packs_epi32(_mm256_castsi256_si128(is_nan), _mm256_extracti128_si256::<1>(is_nan));
            _mm_blendv_epi8(_mm256_cvtps_ph::<NEAREST>(wide), _mm_set1_epi16(F16_NAN), is_nan)
        })
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn narrow_bf16_avx2(wide: [f32; BLOCK]) -> [u16; BLOCK] {
        narrow_avx2(&wide, |wide| {
            let bits = _mm256_castps_si256(wide);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(wide, wide));
            let rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(BF16_NAN), is_nan);
            _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256::<1>(rounded))
        })
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn narrow_avx2(wide: &[f32; BLOCK], convert: impl Fn(__m256) -> __m128i) -> [u16; BLOCK] {
        let mut raw = [0; BLOCK];
        for (wide, to) in wide.chunks_exact(HALF).zip(raw.chunks_exact_mut(HALF)) {
            // SAFETY: half a block is there.
            let converted = convert(unsafe { _mm256_loadu_ps(wide.as_ptr()) });
            // SAFETY: half a block is there.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), converted) };
        }
        raw
    }

    /// AVX-512 F, BW, DQ and VL.
    pub(in crate::reduce) struct Avx512;

    impl Unit for Avx512 {
        const CONVERTS: bool = true;

        conversions! {
            f16_widen(from: *const u16) -> [f32; BLOCK] = widen_f16_avx512;
            f16_narrow(wide: [f32; BLOCK]) -> [u16; BLOCK] = narrow_f16_avx512;
            bf16_widen(from: *const u16) -> [f32; BLOCK] = widen_bf16_avx512;
            bf16_narrow(wide: [f32; BLOCK]) -> [u16; BLOCK] = narrow_bf16_avx512;
        }
        // Stores of whole lines are no faster.
        streams!(stream_line_avx2);
    }

    /// # Safety
    /// A block is readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen_f16_avx512(from: *const u16) -> [f32; BLOCK] {
        // SAFETY: the caller's promise.
        let raw = unsafe { _mm256_loadu_si256(from.cast()) };
        floats(_mm512_cvtph_ps(raw))
    }

    /// # Safety
    /// A block is readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen_bf16_avx512(from: *const u16) -> [f32; BLOCK] {
        // SAFETY: the caller's promise.
        let raw = unsafe { _mm256_loadu_si256(from.cast()) };
        floats(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(raw))))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn narrow_f16_avx512(wide: [f32; BLOCK]) -> [u16; BLOCK] {
        // SAFETY: a block is there.
        let wide = unsafe { _mm512_loadu_ps(wide.as_ptr()) };
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(wide, wide);
        let nan = _mm256_set1_epi16(F16_NAN);
        halves(_mm256_mask_mov_epi16(_mm512_cvtps_ph::<NEAREST>(wide), is_nan, nan))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn narrow_bf16_avx512(wide: [f32; BLOCK]) -> [u16; BLOCK] {
        // SAFETY: a block is there.
        let wide = unsafe { _mm512_loadu_ps(wide.as_ptr()) };
        let bits = _mm512_castps_si512(wide);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(wide, wide);
        let rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(BF16_NAN));
        halves(_mm512_cvtepi32_epi16(rounded))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn floats(vector: __m512) -> [f32; BLOCK] {
        let mut floats = [0.0; BLOCK];
        // SAFETY: a block is there.
        unsafe { _mm512_storeu_ps(floats.as_mut_ptr(), vector) };
        floats
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn halves(vector: __m256i) -> [u16; BLOCK] {
        let mut halves = [0; BLOCK];
        // SAFETY: a block is there.
        unsafe { _mm256_storeu_si256(halves.as_mut_ptr().cast(), vector) };
        halves
    }
}
