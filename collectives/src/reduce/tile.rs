//! The loops: cache-sized tiles of accumulators, one source after the other, in forms for several vector units.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::format::Format;
use super::operator::Operator;

/// Accumulators on the stack, in the first-level cache beside what is read.
#[repr(align(64))]
struct Tile([MaybeUninit<u8>; MANY_SOURCES_BYTES]);

impl Tile {
    /// Uninitialised, so that an operation of one element does not pay for a tile.
    #[inline(always)]
    fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; MANY_SOURCES_BYTES])
    }

    /// How many accumulators to use at a time.
    const fn lanes<W>(sources: usize) -> usize {
        let bytes = if sources <= FEW_SOURCES { FEW_SOURCES_BYTES } else { MANY_SOURCES_BYTES };
        bytes / size_of::<W>()
    }

    #[inline(always)]
    fn accumulators<W>(&mut self, lanes: usize) -> &mut [MaybeUninit<W>] {
        assert!(lanes <= MANY_SOURCES_BYTES / size_of::<W>() && align_of::<W>() <= align_of::<Self>());
        let start = self.0.as_mut_ptr().cast();
        // SAFETY: aligned and long enough, both just asserted; anything is a valid `MaybeUninit`.
        unsafe { std::slice::from_raw_parts_mut(start, lanes) }
    }
}

/// The processor follows this many streams of reads at once. It is fed best by going around them in small
/// steps; beyond, by reading each source a few pages at a time.
const FEW_SOURCES: usize = 16;
const FEW_SOURCES_BYTES: usize = 1 << 10;
const MANY_SOURCES_BYTES: usize = 16 << 10;

/// A loop over `count` elements, compiled once per vector unit.
pub(super) trait Kernel: Sized {
    /// Whether vector units beyond the baseline make a difference worth their code.
    const VECTORISED: bool;

    /// # Safety
    /// What the constructor of the implementing type demands of its pointers.
    unsafe fn run(self);
}

/// The vector instructions a loop may use; the result is the same on all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VectorUnit {
    /// What every processor of the architecture has.
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl VectorUnit {
    /// The widest one this processor has.
    #[inline]
    pub(super) fn widest() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            return Self::Avx2;
        }
        Self::Baseline
    }
}

/// # Safety
/// As [`Kernel::run`], and this processor must have `unit`.
#[inline]
pub(super) unsafe fn run<K: Kernel>(kernel: K, unit: VectorUnit) {
    #[cfg(target_arch = "x86_64")]
    if K::VECTORISED && unit == VectorUnit::Avx2 {
        // SAFETY: the caller's promise.
        return unsafe { run_avx2(kernel) };
    }
    let _baseline = unit;
    // SAFETY: the caller's promise.
    unsafe { kernel.run() }
}

/// # Safety
/// As [`Kernel::run`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn run_avx2<K: Kernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.run() }
}

/// `out[i] = finish(lift(s0[i]) ⊕ lift(s1[i]) ⊕ ...)`, from the layout of `F` to that of `T`.
///
/// Every source must be readable for `count` elements of `F`, and `out` writable for `count` of `T`. `out` is
/// apart from the sources, or is one of them if the layouts are the same.
pub(super) struct Fold<'a, F, T, O> {
    sources: &'a [*const u8],
    out: *mut u8,
    count: usize,
    factor: f64,
    ranks: u32,
    kind: PhantomData<(F, T, O)>,
}

impl<'a, F, T, O> Fold<'a, F, T, O> {
    pub(super) fn new(sources: &'a [*const u8], out: *mut u8, count: usize, factor: f64, ranks: u32) -> Self {
        Self { sources, out, count, factor, ranks, kind: PhantomData }
    }
}

impl<F, T, O> Kernel for Fold<'_, F, T, O>
where
    F: Format,
    T: Format<Wide = F::Wide>,
    O: Operator<F::Wide>,
{
    const VECTORISED: bool = F::VECTORISED && T::VECTORISED;

    #[inline(always)]
    unsafe fn run(self) {
        let Some((&first, others)) = self.sources.split_first() else { return };
        let Self { factor, ranks, .. } = self;
        let mut tile = Tile::new();
        let most = Tile::lanes::<F::Wide>(self.sources.len());
        let mut start = 0;
        while start < self.count {
            let lanes = (self.count - start).min(most);
            let accumulators = tile.accumulators::<F::Wide>(lanes);
            // SAFETY: `start + lanes <= count`, for which the caller promised readable elements.
            let elements = unsafe { Elements::<F>::at(first, start) };
            for (lane, accumulator) in accumulators.iter_mut().enumerate() {
                // SAFETY: `lane < lanes`.
                let raw = unsafe { elements.read(lane) };
                accumulator.write(O::lift(F::widen(raw), factor));
            }
            for &source in others {
                // SAFETY: as for the first source.
                let elements = unsafe { Elements::<F>::at(source, start) };
                for (lane, accumulator) in accumulators.iter_mut().enumerate() {
                    // SAFETY: `lane < lanes`.
                    let raw = unsafe { elements.read(lane) };
                    // SAFETY: written by the loop over the first source.
                    let total = unsafe { accumulator.assume_init() };
                    accumulator.write(O::combine(total, O::lift(F::widen(raw), factor)));
                }
            }
            let start_bytes = start * size_of::<T::Raw>();
            // SAFETY: within the `count` elements of `out`.
            let out = unsafe { self.out.add(start_bytes) }.cast::<T::Raw>();
            for (lane, accumulator) in accumulators.iter().enumerate() {
                // SAFETY: written by the loop over the first source.
                let total = unsafe { accumulator.assume_init() };
                // SAFETY: `lane < lanes`.
                let place = unsafe { out.add(lane) };
                // SAFETY: writable by the caller's promise; no source of this tile is read any more.
                unsafe { place.write_unaligned(T::narrow(O::finish(total, ranks))) };
            }
            start += lanes;
        }
    }
}

/// Elements that another process may be writing to: read one by one, never lent out as a slice.
struct Elements<F: Format>(*const F::Raw);

impl<F: Format> Elements<F> {
    /// # Safety
    /// The first `start` elements from `bytes` on lie in one allocation.
    #[inline(always)]
    unsafe fn at(bytes: *const u8, start: usize) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { bytes.add(start * size_of::<F::Raw>()) }.cast())
    }

    /// # Safety
    /// Element `index` is readable.
    #[inline(always)]
    unsafe fn read(&self, index: usize) -> F::Raw {
        // SAFETY: the caller's promise.
        let place = unsafe { self.0.add(index) };
        // SAFETY: the caller's promise.
        unsafe { place.read_unaligned() }
    }
}
