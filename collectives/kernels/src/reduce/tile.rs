//! The loops: cache-sized tiles of accumulators, a few sources at a time.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::copy::{AHEAD, Beside, Copying, PAGE, PAGES};
use super::format::Format;
use super::kernel::Kernel;
use super::operator::Operator;
use super::unit::{BLOCK, Unit};
use crate::LINE;

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
/// How far ahead sources are fetched that are read line by line: all of them stay in the second-level cache.
const SOON: usize = 1 << 10;
/// How many of more sources than that are read line by line at a time, or of their results written.
const AT_A_TIME: usize = 8;
/// The accumulators of more: what is read and not written yet stays in the second-level cache.
const AT_A_TIME_BYTES: usize = 4 << 10;

/// Sources that are combined in one pass over the accumulators.
const GROUP: usize = 4;

/// `out[i] = finish(lift(s0[i]) ⊕ lift(s1[i]) ⊕ ...)`, from the layout of `F` to that of `T`.
///
/// Every source must be readable for `count` elements of `F`, and every one of `outs` writable for `count` of `T`. Each
/// of these is apart from the sources, or is one of them if the layouts are the same.
pub(super) struct Fold<'a, F, T, O> {
    sources: &'a [*const u8],
    outs: &'a [*mut u8],
    count: usize,
    /// The factor that each operand is multiplied by, see [`Operator::lift`].
    factor: f64,
    /// The number that the total is divided by, see [`Operator::finish`].
    divisor: f64,
    how: Copying,
    beside: Beside,
    kind: PhantomData<(F, T, O)>,
}

impl<'a, F, T, O> Fold<'a, F, T, O> {
    pub(super) fn new(
        sources: &'a [*const u8],
        outs: &'a [*mut u8],
        count: usize,
        (factor, divisor): (f64, f64),
        (how, beside): (Copying, Beside),
    ) -> Self {
        Self { sources, outs, count, factor, divisor, how, beside, kind: PhantomData }
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
    unsafe fn run<U: Unit>(mut self) {
        let factor = self.factor;
        let out = match *self.outs {
            [out] if self.how == Copying::Cached || self.sources.len() <= 2 => out,
            _ => {
                self.beside.take().make();
                // SAFETY: the caller's promise.
                return unsafe { self.run_to_each::<U>() };
            }
        };
        if let [left, right] = *self.sources
            && !F::converts_blocks::<U>()
            && !T::converts_blocks::<U>()
        {
            // SAFETY: the caller's promise.
            return unsafe { self.run_pair::<U>(left, right, out) };
        }
        self.beside.take().make();
        if self.sources.is_empty() {
            return;
        }
        let mut tile = Tile::new();
        let most = Tile::lanes::<F::Wide>(self.sources.len());
        let mut start = 0;
        while start < self.count {
            let lanes = (self.count - start).min(most);
            let totals = tile.accumulators::<F::Wide>(lanes);
            for (index, group) in self.sources.chunks(GROUP).enumerate() {
                // SAFETY: `start + lanes <= count`, for which the caller promised readable elements; the
                // accumulators are written by the first group.
                unsafe { combine_group::<F, O, U>(totals, index == 0, group, start, factor) };
            }
            // SAFETY: within the `count` elements of `out`.
            let out = unsafe { out.add(start * size_of::<T::Raw>()) }.cast::<T::Raw>();
            // SAFETY: the accumulators are written, and the caller promised room for the elements; no source of
            // this tile is read any more.
            unsafe { finish::<T, O, U>(totals, out, self.divisor) };
            start += lanes;
        }
    }
}

impl<F, T, O> Fold<'_, F, T, O>
where
    F: Format,
    T: Format<Wide = F::Wide>,
    O: Operator<F::Wide>,
{
    /// Folds a line of all sources, and then writes it to all results: where these are the same memory, a line is
    /// written while it is as near as can be, and memory reads and writes at once. If there are more sources than
    /// memory reads well from at once, only so many are read at a time.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    #[inline(always)]
    unsafe fn run_to_each<U: Unit>(&self) {
        macro_rules! lines {
            ($lanes:expr) => {
                // SAFETY: the caller's promise.
                unsafe {
                    self.each_line::<U, { $lanes }>(0, read::<F, { $lanes }>, |wide| wide.map(T::narrow))
                }
            };
        }
        let done = match size_of::<F::Raw>() {
            _ if F::converts_blocks::<U>() && T::converts_blocks::<U>() => {
                // SAFETY: the caller's promise, which is that of each line, too; the processor has `U`.
                let widen = |raw: *const F::Raw| unsafe { F::widen_block::<U>(raw) };
                // SAFETY: the processor has `U`.
                let narrow = |wide| unsafe { T::narrow_block::<U>(wide) };
                // SAFETY: the caller's promise.
                unsafe { self.each_line::<U, BLOCK>(0, widen, narrow) }
            }
            1 => lines!(LINE),
            2 => lines!(LINE / 2),
            4 => lines!(LINE / 4),
            8 => lines!(LINE / 8),
            _ => lines!(LINE / 16),
        };
        // SAFETY: the caller's promise.
        unsafe { self.each_line::<U, 1>(done, read::<F, 1>, |wide| wide.map(T::narrow)) };
    }

    /// As many whole lines of `LANES` elements as there are from `start` on. Returns where they end.
    ///
    /// # Safety
    /// As [`Kernel::run`]; `widen` reads `LANES` elements.
    #[inline(always)]
    unsafe fn each_line<U: Unit, const LANES: usize>(
        &self,
        mut start: usize,
        widen: impl Fn(*const F::Raw) -> [F::Wide; LANES],
        narrow: impl Fn([F::Wide; LANES]) -> [T::Raw; LANES],
    ) -> usize {
        let Some((first, rest)) = self.sources.split_first() else { return self.count };
        let size = size_of::<F::Raw>();
        let operands = |source: &*const u8, at: usize| {
            // Behind the end are others' lines.
            let ahead = if at + LANES + SOON / size <= self.count { SOON } else { 0 };
            let line = source.wrapping_add(at * size);
            U::prefetch(line.wrapping_add(ahead));
            widen(line.cast()).map(|operand| O::lift(operand, self.factor))
        };
        let add = |mut totals: [F::Wide; LANES], sources: &[*const u8], at: usize| {
            for source in sources {
                let operands = operands(source, at);
                totals = std::array::from_fn(|lane| O::combine(totals[lane], operands[lane]));
            }
            totals
        };
        let write = |totals: [F::Wide; LANES], sinks: &[*mut u8], at: usize| {
            let result = narrow(totals.map(|total| O::finish(total, self.divisor)));
            for sink in sinks {
                let place = sink.cast::<T::Raw>().wrapping_add(at).cast::<[T::Raw; LANES]>();
                // SAFETY: the caller's promise.
                unsafe { place.write_unaligned(result) };
            }
        };
        if self.sources.len() <= FEW_SOURCES {
            while start + LANES <= self.count {
                write(add(operands(first, start), rest, start), self.outs, start);
                start += LANES;
            }
            return start;
        }
        // SAFETY: there are more sources than a few.
        unsafe { self.each_tile(start, |at| operands(first, at), add, write) }
    }

    /// As [`each_line`](Self::each_line), of more sources than memory is read well from at once: a tile of lines is
    /// read from a few of them, and then from the next few. `first` begins a line with the first source, `add` adds
    /// others, and `write` writes the line to results.
    ///
    /// # Safety
    /// There is a source.
    #[inline(always)]
    unsafe fn each_tile<const LANES: usize>(
        &self,
        mut start: usize,
        first: impl Fn(usize) -> [F::Wide; LANES],
        add: impl Fn([F::Wide; LANES], &[*const u8], usize) -> [F::Wide; LANES],
        write: impl Fn([F::Wide; LANES], &[*mut u8], usize),
    ) -> usize {
        let mut tile = Tile::new();
        let (tile, _) =
            tile.accumulators::<F::Wide>(AT_A_TIME_BYTES / size_of::<F::Wide>()).as_chunks_mut::<LANES>();
        while start + LANES <= self.count {
            let lines = ((self.count - start) / LANES).min(tile.len());
            let (tile, places) = (&mut tile[..lines], (start..).step_by(LANES));
            // SAFETY: the first sources have written them; the caller promised one.
            let so_far =
                |totals: &[MaybeUninit<F::Wide>; LANES]| totals.map(|total| unsafe { total.assume_init() });
            for (index, sources) in self.sources.chunks(AT_A_TIME).enumerate() {
                for (totals, at) in tile.iter_mut().zip(places.clone()) {
                    let sum = match index {
                        0 => add(first(at), &sources[1..], at),
                        _ => add(so_far(totals), sources, at),
                    };
                    *totals = sum.map(MaybeUninit::new);
                }
            }
            for sinks in self.outs.chunks(AT_A_TIME) {
                for (totals, at) in tile.iter().zip(places.clone()) {
                    write(so_far(totals), sinks, at);
                }
            }
            start += lines * LANES;
        }
        start
    }

    /// Folds two sources, without accumulators.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    #[inline(always)]
    unsafe fn run_pair<U: Unit>(mut self, left: *const u8, right: *const u8, out: *mut u8) {
        let out = out.cast::<T::Raw>();
        let beside = self.beside.take();
        let done = match self.how {
            Copying::Cached => {
                beside.make();
                0
            }
            // SAFETY: the caller's promise.
            _ => unsafe { self.combine_pages::<U>(left.cast(), right.cast(), out, beside) },
        };
        // The loop is compiled for each: only then is it known that what is written is not read later.
        if left == out.cast_const().cast() {
            // SAFETY: the caller's promise.
            unsafe { self.combine_rest(done, out.cast_const().cast(), right.cast(), out) }
        } else if right == out.cast_const().cast() {
            // SAFETY: the caller's promise.
            unsafe { self.combine_rest(done, left.cast(), out.cast_const().cast(), out) }
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.combine_rest(done, left.cast(), right.cast(), out) }
        }
    }

    /// Folds as many whole pages as there are, four in turn, as in `copy.rs`: of memory that is not in the caches,
    /// a third more comes in the same time. Returns how many elements they are. All of `beside` is copied, however
    /// many elements there are.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    #[inline(always)]
    unsafe fn combine_pages<U: Unit>(
        &self,
        left: *const F::Raw,
        right: *const F::Raw,
        out: *mut T::Raw,
        mut beside: Beside,
    ) -> usize {
        let size = size_of::<F::Raw>();
        let page = PAGE / size;
        beside.begin();
        let mut done = 0;
        while self.count - done >= PAGES * page {
            let next = done + PAGES * page;
            // Behind the end are others' lines.
            let ahead = if next + AHEAD / size <= self.count { AHEAD } else { 0 };
            for start in (done..done + page).step_by(LINE / size) {
                for at in (0..PAGES).map(|index| start + index * page) {
                    U::prefetch(right.wrapping_add(at).cast::<u8>().wrapping_add(ahead));
                    // SAFETY: within the elements that the caller promised.
                    unsafe { self.combine_line(at, left, right, out) };
                    beside.copy_line::<U>();
                }
            }
            done = next;
        }
        beside.finish::<U>();
        done
    }

    /// # Safety
    /// As [`Kernel::run`], and there is a line of elements from `at` on.
    #[inline(always)]
    unsafe fn combine_line(&self, at: usize, left: *const F::Raw, right: *const F::Raw, out: *mut T::Raw) {
        // Read as a whole before anything is written: then nobody has to know whether they are apart.
        macro_rules! line {
            ($lanes:expr) => {{
                let operands = |source: *const F::Raw| {
                    let source = source.wrapping_add(at).cast::<[F::Raw; $lanes]>();
                    // SAFETY: the caller's promise.
                    unsafe { source.read_unaligned() }
                };
                let (left, right) = (operands(left), operands(right));
                let result: [T::Raw; $lanes] =
                    std::array::from_fn(|lane| self.combine_elements(left[lane], right[lane]));
                // SAFETY: the caller's promise.
                unsafe { out.wrapping_add(at).cast::<[T::Raw; $lanes]>().write_unaligned(result) }
            }};
        }
        match size_of::<F::Raw>() {
            1 => line!(LINE),
            2 => line!(LINE / 2),
            4 => line!(LINE / 4),
            8 => line!(LINE / 8),
            _ => line!(LINE / 16),
        }
    }

    /// Folds the elements that are left, from `done` on.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    #[inline(always)]
    unsafe fn combine_rest(&self, done: usize, left: *const F::Raw, right: *const F::Raw, out: *mut T::Raw) {
        for index in done..self.count {
            let operand = |source: *const F::Raw| {
                // SAFETY: within the elements that the caller promised.
                unsafe { source.wrapping_add(index).read_unaligned() }
            };
            let result = self.combine_elements(operand(left), operand(right));
            // SAFETY: as above.
            unsafe { out.wrapping_add(index).write_unaligned(result) };
        }
    }

    #[inline(always)]
    fn combine_elements(&self, left: F::Raw, right: F::Raw) -> T::Raw {
        let operand = |raw| O::lift(F::widen(raw), self.factor);
        T::narrow(O::finish(O::combine(operand(left), operand(right)), self.divisor))
    }
}

/// Reads `LANES` elements, which the caller knows to be readable.
#[inline(always)]
fn read<F: Format, const LANES: usize>(from: *const F::Raw) -> [F::Wide; LANES] {
    // SAFETY: as `each_line` demands.
    unsafe { from.cast::<[F::Raw; LANES]>().read_unaligned() }.map(F::widen)
}

/// [`combine`] for the elements from `start` on of up to [`GROUP`] sources.
///
/// # Safety
/// As [`combine`].
#[inline(always)]
unsafe fn combine_group<F: Format, O: Operator<F::Wide>, U: Unit>(
    totals: &mut [MaybeUninit<F::Wide>],
    is_first: bool,
    group: &[*const u8],
    start: usize,
    factor: f64,
) {
    // SAFETY: the caller's promise.
    let at = |index: usize| unsafe { Elements::<F>::at(group[index], start) };
    macro_rules! combine {
        ($sources:expr) => {
            if is_first {
                // SAFETY: the caller's promise.
                unsafe { combine::<F, O, U, true, _>(totals, $sources, factor) }
            } else {
                // SAFETY: the caller's promise.
                unsafe { combine::<F, O, U, false, _>(totals, $sources, factor) }
            }
        };
    }
    match group.len() {
        1 => combine!(&[at(0)]),
        2 => combine!(&[at(0), at(1)]),
        3 => combine!(&[at(0), at(1), at(2)]),
        _ => combine!(&[at(0), at(1), at(2), at(3)]),
    }
}

/// `totals[i] = totals[i] ⊕ lift(s0[i]) ⊕ lift(s1[i]) ⊕ ...`, in one pass; without the old total if `FIRST`.
///
/// # Safety
/// The accumulators are initialised unless `FIRST`, every source has as many readable elements, and the
/// processor has `U`.
#[inline(always)]
unsafe fn combine<F: Format, O: Operator<F::Wide>, U: Unit, const FIRST: bool, const N: usize>(
    totals: &mut [MaybeUninit<F::Wide>],
    sources: &[Elements<F>; N],
    factor: f64,
) {
    let blocks = if F::converts_blocks::<U>() { totals.len() / BLOCK } else { 0 };
    let (in_blocks, rest) = totals.split_at_mut(blocks * BLOCK);
    for (block, totals) in in_blocks.chunks_exact_mut(BLOCK).enumerate() {
        let operands = |source: &Elements<F>| {
            // SAFETY: the caller's promise.
            let operands = unsafe { F::widen_block::<U>(source.0.wrapping_add(block * BLOCK)) };
            operands.map(|operand| O::lift(operand, factor))
        };
        let (mut sums, others) = if FIRST {
            (operands(&sources[0]), &sources[1..])
        } else {
            // SAFETY: the caller's promise.
            (std::array::from_fn(|lane| unsafe { totals[lane].assume_init() }), &sources[..])
        };
        for source in others {
            for (sum, operand) in sums.iter_mut().zip(operands(source)) {
                *sum = O::combine(*sum, operand);
            }
        }
        for (total, sum) in totals.iter_mut().zip(sums) {
            total.write(sum);
        }
    }
    for (lane, total) in rest.iter_mut().enumerate() {
        let operand = |source: &Elements<F>| {
            // SAFETY: the caller's promise.
            let raw = unsafe { source.read(blocks * BLOCK + lane) };
            O::lift(F::widen(raw), factor)
        };
        let (mut sum, others) = if FIRST {
            (operand(&sources[0]), &sources[1..])
        } else {
            // SAFETY: the caller's promise.
            (unsafe { total.assume_init() }, &sources[..])
        };
        for source in others {
            sum = O::combine(sum, operand(source));
        }
        total.write(sum);
    }
}

/// `out[i] = narrow(finish(totals[i]))`.
///
/// # Safety
/// The accumulators are initialised, `out` has room for as many elements, and the processor has `U`.
#[inline(always)]
unsafe fn finish<T: Format, O: Operator<T::Wide>, U: Unit>(
    totals: &[MaybeUninit<T::Wide>],
    out: *mut T::Raw,
    divisor: f64,
) {
    // SAFETY: the caller's promise.
    let finished = |total: &MaybeUninit<T::Wide>| O::finish(unsafe { total.assume_init() }, divisor);
    let blocks = if T::converts_blocks::<U>() { totals.len() / BLOCK } else { 0 };
    let (in_blocks, rest) = totals.split_at(blocks * BLOCK);
    for (block, totals) in in_blocks.chunks_exact(BLOCK).enumerate() {
        // SAFETY: the caller's promise.
        let raw = unsafe { T::narrow_block::<U>(std::array::from_fn(|lane| finished(&totals[lane]))) };
        let place = out.wrapping_add(block * BLOCK).cast::<[T::Raw; BLOCK]>();
        // SAFETY: the caller's promise.
        unsafe { place.write_unaligned(raw) };
    }
    for (lane, total) in rest.iter().enumerate() {
        let place = out.wrapping_add(blocks * BLOCK + lane);
        // SAFETY: the caller's promise.
        unsafe { place.write_unaligned(T::narrow(finished(total))) };
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
