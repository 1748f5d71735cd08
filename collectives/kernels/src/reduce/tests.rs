//! The kernels against a slow scalar oracle, and the conversions against what torch does.

mod conversions;
mod oracle;

use proptest::prelude::*;

use super::kernel::VectorUnit;
use super::*;

/// Values that break kernels, mixed with any bit pattern.
fn element(dtype: Dtype) -> impl Strategy<Value = Vec<u8>> {
    let size = dtype.size();
    let real = move |value: f64| oracle::encode(dtype, oracle::Value::Real(value, value));
    prop_oneof![
        4 => prop::collection::vec(any::<u8>(), size),
        1 => Just(vec![0; size]),
        1 => Just(vec![0xff; size]),
        1 => Just(f64::NAN).prop_map(real),
        1 => prop_oneof![Just(f64::INFINITY), Just(f64::NEG_INFINITY)].prop_map(real),
        4 => (-8.0..8.0f64).prop_map(real),
        1 => (-1e-40..1e-40f64).prop_map(real),
    ]
}

#[derive(Clone, Debug)]
struct Case {
    reduction: Reduction,
    sources: Vec<Vec<u8>>,
    count: usize,
}

fn case(dtype: Dtype, op: ReduceOp) -> impl Strategy<Value = Case> {
    let counts = if cfg!(miri) { 0..9usize } else { 0..140usize };
    (1..=9usize, counts, -4.0..4.0f64).prop_flat_map(move |(ranks, count, scale)| {
        let source = prop::collection::vec(element(dtype), count).prop_map(|elements| elements.concat());
        prop::collection::vec(source, ranks).prop_map(move |sources| {
            let reduction = Reduction::new(dtype, op, scale, ranks as u32).expect("pairs are filtered");
            Case { reduction, sources, count }
        })
    })
}

fn defined() -> impl Iterator<Item = (Dtype, ReduceOp)> {
    let pairs = Dtype::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op)));
    pairs.filter(|&(dtype, op)| supported(dtype, op).is_ok())
}

fn each_pair(cases: u32, check: impl Fn(&Case) -> Result<(), TestCaseError>) {
    for (dtype, op) in defined() {
        let cases = if cfg!(miri) { 1 } else { cases };
        let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
        let mut runner = proptest::test_runner::TestRunner::new(config);
        if let Err(error) = runner.run(&case(dtype, op), |case| check(&case)) {
            panic!("{op} of {dtype}: {error}");
        }
    }
}

fn pointers(sources: &[Vec<u8>]) -> Vec<*const u8> {
    sources.iter().map(|source| source.as_ptr()).collect()
}

fn run(unit: VectorUnit, case: &Case) -> Vec<u8> {
    let mut out = vec![0xa5; case.count * case.reduction.dtype().size()];
    // SAFETY: all buffers hold `count` elements; `widest` exists, and so does the baseline.
    unsafe {
        fold_on(
            unit,
            (Copying::Cached, Beside::NOTHING),
            case.reduction,
            &pointers(&case.sources),
            &[out.as_mut_ptr()],
            case.count,
        )
    };
    out
}

#[test]
fn folds_like_the_oracle_on_every_vector_unit() {
    each_pair(24, |case| {
        let expected = oracle::fold(&case.reduction, &case.sources, case.count);
        for unit in VectorUnit::all() {
            prop_assert_eq!(&run(unit, case), &expected, "on {:?}", unit);
        }
        Ok(())
    });
}

/// The conversions of a vector unit are instructions of their own: of each bit pattern they make what the
/// baseline does.
#[test]
#[cfg_attr(miri, ignore = "many elements")]
fn every_unit_converts_halves_alike() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for (op, scale) in [(ReduceOp::Sum, 1.0), (ReduceOp::PremulSum, 0.37), (ReduceOp::Max, 1.0)] {
            let reduction = Reduction::new(dtype, op, scale, 2).expect("defined");
            let every = |factor: u16| -> Vec<u8> {
                (0..=u16::MAX).flat_map(|bits| bits.wrapping_mul(factor).to_le_bytes()).collect()
            };
            for sources in [vec![every(1)], vec![every(1), every(7919)], vec![every(1), every(3), every(257)]]
            {
                let case = Case { reduction, sources, count: 1 << 16 };
                let expected = run(VectorUnit::Baseline, &case);
                for unit in VectorUnit::all() {
                    assert!(run(unit, &case) == expected, "{op} of {dtype} on {unit:?}");
                }
            }
        }
    }
}

#[test]
fn folds_in_place() {
    each_pair(8, |case| {
        let expected = run(VectorUnit::widest(), case);
        for place in 0..case.sources.len() {
            let mut sources = case.sources.clone();
            let out = sources[place].as_mut_ptr();
            let mut pointers = pointers(&sources);
            pointers[place] = out.cast_const();
            // SAFETY: all buffers hold `count` elements; the output is one of the sources.
            unsafe { fold(case.reduction, &pointers, out, case.count) };
            prop_assert_eq!(&sources[place], &expected);
        }
        Ok(())
    });
}

#[test]
fn folds_in_place_of_all_and_elsewhere() {
    each_pair(8, |case| {
        let expected = run(VectorUnit::widest(), case);
        for unit in VectorUnit::all() {
            let mut outs = case.sources.clone();
            let sources = pointers(&outs);
            outs.push(vec![0xa5; expected.len()]);
            let sinks: Vec<*mut u8> = outs.iter_mut().map(|out| out.as_mut_ptr()).collect();
            let how = (Copying::Cached, Beside::NOTHING);
            // SAFETY: all buffers hold `count` elements; all but the last one are the sources.
            unsafe { fold_on(unit, how, case.reduction, &sources, &sinks, case.count) };
            for out in &outs {
                prop_assert_eq!(out, &expected, "on {:?}", unit);
            }
        }
        Ok(())
    });
}

/// Larger than a tile, at odd addresses, in any pieces: always the same bits.
#[test]
#[cfg_attr(miri, ignore = "many elements")]
fn pieces_make_no_difference() {
    // Few sources and many have tiles of their own size, two have none.
    let cases = defined().flat_map(|pair| [(pair, 2, 40_000), (pair, 3, 10_000), (pair, 17, 10_000)]);
    for ((dtype, op), ranks, count) in cases {
        let size = dtype.size();
        let reduction = Reduction::new(dtype, op, 0.37, ranks).expect("pairs are filtered");
        let mut state = 1u64;
        let mut source = || {
            let mut bytes = vec![0u8; count * size + 1];
            bytes.fill_with(|| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            });
            bytes
        };
        let sources: Vec<Vec<u8>> = (0..ranks).map(|_| source()).collect();
        let odd = sources.iter().map(|source| source[1..].to_vec()).collect();
        let whole = run(VectorUnit::widest(), &Case { reduction, sources: odd, count });
        let mut pieces = vec![0; count * size + 1];
        let mut start = 0;
        for piece in [1, 7, 1024, 33, 8192, count - 9257] {
            let pointers: Vec<_> = sources.iter().map(|source| source[1 + start * size..].as_ptr()).collect();
            let out = pieces[1 + start * size..].as_mut_ptr();
            // SAFETY: `piece` elements are left in every buffer.
            unsafe { fold(reduction, &pointers, out, piece) };
            start += piece;
        }
        assert_eq!(start, count);
        assert!(pieces[1..] == whole[..], "{op} of {dtype} differs by pieces");
        // Over one of the sources; of two, the other is read several pages in turn.
        let mut place = sources[0][1..].to_vec();
        let out = place.as_mut_ptr();
        let mut pointers: Vec<_> = sources.iter().map(|source| source[1..].as_ptr()).collect();
        pointers[0] = out.cast_const();
        let mut copied = vec![0; sources[1].len()];
        // SAFETY: both have as many bytes, and nobody else uses the copy.
        let beside = unsafe { Beside::new(sources[1].as_ptr(), copied.as_mut_ptr(), copied.len()) };
        // SAFETY: all buffers hold `count` elements; the output is one of the sources.
        unsafe { fold_beside((Copying::Loading, beside), reduction, &pointers, out, count) };
        assert!(place == whole, "{op} of {dtype} differs in place");
        assert!(copied == sources[1], "{op} of {dtype}: what is copied beside it");
        // Over all of them.
        let mut places: Vec<Vec<u8>> = sources.iter().map(|source| source[1..].to_vec()).collect();
        let outs: Vec<*mut u8> = places.iter_mut().map(|place| place.as_mut_ptr()).collect();
        let pointers: Vec<_> = outs.iter().map(|out| out.cast_const()).collect();
        // SAFETY: all buffers hold `count` elements, and the outputs are the sources.
        unsafe { fold_to_each(reduction, &pointers, &outs, count) };
        assert!(places.iter().all(|place| *place == whole), "{op} of {dtype} differs in place of all");
    }
}

impl Case {
    fn widened(&self, source: &[u8]) -> Vec<u8> {
        let mut wide = vec![0u8; self.count * self.reduction.wide().size()];
        // SAFETY: `count` elements in each layout.
        unsafe { widen(self.reduction, source.as_ptr(), wide.as_mut_ptr(), self.count) };
        wide
    }

    fn accumulated(&self, before: &[u8], mut partial: Vec<u8>) -> Vec<u8> {
        // SAFETY: `count` wide elements in both.
        unsafe { accumulate(self.reduction, before.as_ptr(), partial.as_mut_ptr(), self.count) };
        partial
    }

    /// The partial result of some of the sources.
    fn in_steps(&self, sources: &[Vec<u8>]) -> Vec<u8> {
        let widened = sources.iter().map(|source| self.widened(source));
        widened.reduce(|before, own| self.accumulated(&before, own)).expect("there are some")
    }

    fn finished(&self, partial: &[u8]) -> Vec<u8> {
        let mut out = vec![0u8; self.count * self.reduction.dtype().size()];
        // SAFETY: `count` elements in each layout.
        unsafe { finish(self.reduction, partial.as_ptr(), out.as_mut_ptr(), self.count) };
        out
    }
}

/// A ring of any length: partial results travel wide, and are rounded once.
#[test]
fn steps_make_the_bits_of_a_fold() {
    each_pair(24, |case| {
        let out = case.finished(&case.in_steps(&case.sources));
        // The steps leave a lone operand as it is, where a fold may write its NaN or its truth anew.
        if case.sources.len() > 1 {
            prop_assert_eq!(&out, &run(VectorUnit::widest(), case));
        }
        Ok(())
    });
}

/// Over some of the ranks each, then over what came of it: as in steps, and on every vector unit.
#[test]
fn halves_make_the_bits_of_steps() {
    each_pair(24, |case| {
        let Case { reduction, sources, count } = case;
        // A lone operand is left as it is by steps.
        if sources.len() < 4 {
            return Ok(());
        }
        let (here, there) = sources.split_at(sources.len() / 2);
        let expected = case.finished(&case.accumulated(&case.in_steps(here), case.in_steps(there)));
        for unit in VectorUnit::all() {
            let half = |reduction: Reduction, sources: &[Vec<u8>]| {
                let mut out = vec![0u8; count * reduction.out().size()];
                // SAFETY: `count` elements in each source, and as many of what they become in the output.
                unsafe {
                    fold_on(
                        unit,
                        (Copying::Cached, Beside::NOTHING),
                        reduction,
                        &pointers(sources),
                        &[out.as_mut_ptr()],
                        *count,
                    )
                };
                out
            };
            let partials = [here, there].map(|sources| half(reduction.first_half(), sources));
            prop_assert_eq!(&half(reduction.second_half(), &partials), &expected, "on {:?}", unit);
        }
        Ok(())
    });
}

/// Shows that averages are what people expect, in figures.
#[test]
fn averages_of_what_is_too_large_as_a_sum() {
    fn average<T: Copy + PartialEq + std::fmt::Debug>(dtype: Dtype, operands: &[T], expected: T) {
        let reduction = Reduction::new(dtype, ReduceOp::Avg, 1.0, operands.len() as u32).expect("defined");
        let bytes = |value: &T| {
            // SAFETY: numbers have no bytes that are not theirs.
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }.to_vec()
        };
        let case = Case { reduction, sources: operands.iter().map(bytes).collect(), count: 1 };
        for unit in VectorUnit::all() {
            assert_eq!(run(unit, &case), bytes(&expected), "{dtype} {operands:?} on {unit:?}");
        }
        assert_eq!(
            case.finished(&case.in_steps(&case.sources)),
            bytes(&expected),
            "{dtype} {operands:?} in steps"
        );
    }
    average(Dtype::U8, &[200u8, 200], 200);
    average(Dtype::U8, &[255u8; 9], 255);
    average(Dtype::I8, &[-128i8, -128, -127], -127);
    average(Dtype::U16, &[u16::MAX; 3], u16::MAX);
    average(Dtype::I16, &[i16::MIN; 5], i16::MIN);
    average(Dtype::U32, &[u32::MAX, u32::MAX - 2], u32::MAX - 1);
    average(Dtype::I32, &[i32::MAX, i32::MAX], i32::MAX);
    average(Dtype::I64, &[i64::MAX, i64::MAX, i64::MAX], i64::MAX);
    average(Dtype::I64, &[i64::MIN, i64::MAX], 0);
    average(Dtype::U64, &[u64::MAX; 64], u64::MAX);
    average(Dtype::F32, &[3e38f32, 3e38], 3e38);
    average(Dtype::F32, &[f32::MAX; 64], f32::MAX);
    average(Dtype::F32, &[f32::MIN; 7], f32::MIN);
    average(Dtype::F32, &[f32::MAX, f32::MAX, f32::INFINITY], f32::INFINITY);
    average(Dtype::F32, &[1e-30f32, 3e-30], 2e-30);
    average(Dtype::F64, &[1.7e308f64, 1.7e308], 1.7e308);
    average(Dtype::F64, &[f64::MAX; 64], f64::MAX);
    average(Dtype::Bf16, &[half::bf16::MAX; 64], half::bf16::MAX);
    average(Dtype::F16, &[half::f16::MAX; 5], half::f16::MAX);
    average(Dtype::C64, &[[3e38f32, -3e38], [3e38, -3e38]], [3e38, -3e38]);
}

/// A mode that a program has set for its own arithmetic makes no other bits, and is as it was afterwards.
#[test]
#[cfg(target_arch = "x86_64")]
#[cfg_attr(miri, ignore = "it knows one mode")]
fn modes_of_the_program_make_no_difference() {
    use std::arch::asm;

    let control = || {
        let mut control = 0u32;
        // SAFETY: it writes the four bytes that it is given.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack)) };
        control
    };
    let set = |control: u32| {
        // SAFETY: it reads four bytes, which are a valid value.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack)) };
    };
    let sources = vec![1e-40f32.to_le_bytes().repeat(100), 1.000_000_1f32.to_le_bytes().repeat(100)];
    let tiny = vec![1e-40f32.to_le_bytes().repeat(100), 3e-40f32.to_le_bytes().repeat(100)];
    // Flushed to zero and read as zero; rounded down, up and towards zero; invalid operations and overflow trapped.
    for mode in [0x9fc0, 0x3f80, 0x5f80, 0x7f80, 0x1b00] {
        for (op, sources) in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product]
            .into_iter()
            .flat_map(|op| [(op, &sources), (op, &tiny)])
        {
            let reduction = Reduction::new(Dtype::F32, op, 1.0, 2).expect("defined");
            let case = Case { reduction, sources: sources.clone(), count: 100 };
            let expected = run(VectorUnit::widest(), &case);
            let before = control();
            set(mode);
            let got = run(VectorUnit::widest(), &case);
            let after = control();
            set(before);
            assert_eq!(after, mode);
            assert_eq!(got, expected, "{op} in mode {mode:#x}");
        }
    }
}

#[test]
fn no_sources_write_nothing() {
    let mut out = [7u8; 4];
    // SAFETY: one element of room.
    unsafe { fold(Reduction::none(Dtype::F32), &[], out.as_mut_ptr(), 1) };
    assert_eq!(out, [7; 4]);
}
