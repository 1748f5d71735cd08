//! The results as they must be: one element at a time, in `f64` and `i128`, with no code shared with the kernels.

use crate::dtype::{Dtype, ReduceOp};
use crate::reduce::Reduction;

/// One element, exactly.
#[derive(Clone, Copy)]
pub(super) enum Value {
    Integer(i128),
    /// Real and imaginary part.
    Real(f64, f64),
}

pub(super) fn fold(reduction: &Reduction, sources: &[Vec<u8>], count: usize) -> Vec<u8> {
    let size = reduction.dtype().size();
    let element = |index: usize| {
        let operands =
            sources.iter().map(|source| decode(reduction.dtype(), &source[index * size..][..size]));
        encode(reduction.dtype(), reduce(reduction, operands))
    };
    (0..count).flat_map(element).collect()
}

fn reduce(reduction: &Reduction, operands: impl Iterator<Item = Value>) -> Value {
    let dtype = reduction.dtype();
    let lifted = operands.map(|operand| match (reduction.op(), operand) {
        // That of an average is 1 or less, so that no sum of so many is too large.
        (ReduceOp::PremulSum | ReduceOp::Avg, Value::Real(re, im)) => {
            let scale = round(dtype, reduction.scale);
            Value::Real(round(dtype, re * scale), round(dtype, im * scale))
        }
        _ => operand,
    });
    let total = lifted.reduce(|left, right| combine(dtype, reduction.op(), left, right));
    match (reduction.op(), total.expect("at least one source")) {
        (ReduceOp::Avg, Value::Integer(sum)) => Value::Integer(sum / reduction.divisor as i128),
        (ReduceOp::Avg, Value::Real(re, im)) => {
            Value::Real(mean(dtype, re, reduction.divisor), mean(dtype, im, reduction.divisor))
        }
        (_, total) => total,
    }
}

/// Returns the mean of operands: it is finite if they are.
fn mean(dtype: Dtype, total: f64, divisor: f64) -> f64 {
    let most = match dtype {
        Dtype::F64 | Dtype::C128 => f64::MAX,
        _ => f64::from(f32::MAX),
    };
    let mean = round(dtype, total / divisor);
    if total.is_finite() && mean.is_infinite() { most.copysign(mean) } else { mean }
}

fn combine(dtype: Dtype, op: ReduceOp, left: Value, right: Value) -> Value {
    match (left, right) {
        (Value::Integer(a), Value::Integer(b)) => {
            let result = match op {
                ReduceOp::Sum | ReduceOp::Avg if dtype == Dtype::Bool => a | b,
                ReduceOp::Avg => return Value::Integer(a + b),
                ReduceOp::Sum => a + b,
                ReduceOp::Product => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::Band => a & b,
                ReduceOp::Bor => a | b,
                ReduceOp::Bxor => a ^ b,
                ReduceOp::PremulSum => unreachable!("not defined for integers"),
            };
            Value::Integer(wrap(dtype, result))
        }
        (Value::Real(a, ai), Value::Real(b, bi)) => {
            let (re, im) = match op {
                ReduceOp::Min if a.is_nan() || b.is_nan() => (f64::NAN, 0.0),
                ReduceOp::Max if a.is_nan() || b.is_nan() => (f64::NAN, 0.0),
                ReduceOp::Min => (if b < a { b } else { a }, 0.0),
                ReduceOp::Max => (if b > a { b } else { a }, 0.0),
                ReduceOp::Product if matches!(dtype, Dtype::C64 | Dtype::C128) => {
                    let times = |x, y| round(dtype, x * y);
                    (times(a, b) - times(ai, bi), times(a, bi) + times(ai, b))
                }
                ReduceOp::Product => (a * b, 0.0),
                _ => (a + b, ai + bi),
            };
            Value::Real(round(dtype, re), round(dtype, im))
        }
        _ => unreachable!("operands have one dtype"),
    }
}

/// To the precision of the accumulator. Through `f64` no sum, product or quotient of two `f32` is rounded
/// differently than directly.
fn round(dtype: Dtype, value: f64) -> f64 {
    match dtype {
        Dtype::F64 | Dtype::C128 => value,
        _ => f64::from(value as f32),
    }
}

fn wrap(dtype: Dtype, value: i128) -> i128 {
    let bits = dtype.size() * 8;
    let unsigned = value & ((1 << bits) - 1);
    let signed = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
    if signed && unsigned >> (bits - 1) == 1 { unsigned - (1 << bits) } else { unsigned }
}

pub(super) fn decode(dtype: Dtype, bytes: &[u8]) -> Value {
    let mut padded = [0u8; 16];
    padded[..bytes.len()].copy_from_slice(bytes);
    let bits = u128::from_le_bytes(padded);
    let real = |value: f64| Value::Real(value, 0.0);
    let single = |bits: u128| f64::from(f32::from_bits(bits as u32));
    let double = |bits: u128| f64::from_bits(bits as u64);
    match dtype {
        Dtype::Bool => Value::Integer(i128::from(bits != 0)),
        Dtype::F16 => real(f64::from(half::f16::from_bits(bits as u16))),
        Dtype::Bf16 => real(f64::from(half::bf16::from_bits(bits as u16))),
        Dtype::F32 => real(single(bits)),
        Dtype::F64 => real(double(bits)),
        Dtype::C64 => Value::Real(single(bits & 0xffff_ffff), single(bits >> 32)),
        Dtype::C128 => Value::Real(double(bits & u128::from(u64::MAX)), double(bits >> 64)),
        Dtype::F8E4M3Fn | Dtype::F8E5M2 | Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => {
            real(decode_8(dtype, bits as u8))
        }
        _ => Value::Integer(wrap(dtype, bits as i128)),
    }
}

pub(super) fn encode(dtype: Dtype, value: Value) -> Vec<u8> {
    let single = |value: f64| if value.is_nan() { 0x7fc0_0000 } else { (value as f32).to_bits() };
    let double = |value: f64| if value.is_nan() { 0x7ff8 << 48 } else { value.to_bits() };
    match (dtype, value) {
        (_, Value::Integer(integer)) => integer.to_le_bytes()[..dtype.size()].to_vec(),
        (Dtype::F16, Value::Real(x, _)) if x.is_nan() => vec![0x00, 0x7e],
        (Dtype::Bf16, Value::Real(x, _)) if x.is_nan() => vec![0xc0, 0x7f],
        // From `f64` the crate would round twice where we first round to `f32`: so do it explicitly.
        (Dtype::F16, Value::Real(x, _)) => half::f16::from_f32_const(x as f32).to_le_bytes().to_vec(),
        (Dtype::Bf16, Value::Real(x, _)) => half::bf16::from_f32_const(x as f32).to_le_bytes().to_vec(),
        (Dtype::F32, Value::Real(x, _)) => single(x).to_le_bytes().to_vec(),
        (Dtype::F64, Value::Real(x, _)) => double(x).to_le_bytes().to_vec(),
        (Dtype::C64, Value::Real(x, y)) => [single(x).to_le_bytes(), single(y).to_le_bytes()].concat(),
        (Dtype::C128, Value::Real(x, y)) => [double(x).to_le_bytes(), double(y).to_le_bytes()].concat(),
        (Dtype::F8E4M3Fn | Dtype::F8E5M2 | Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz, Value::Real(x, _)) => {
            vec![encode_8(dtype, f64::from(x as f32))]
        }
        // Test values for integers: anything that depends on the value.
        (_, Value::Real(x, _)) => (x as i128).to_le_bytes()[..dtype.size()].to_vec(),
    }
}

/// Exponent bits, mantissa bits, bias.
fn layout(dtype: Dtype) -> (u32, u32, i32) {
    match dtype {
        Dtype::F8E4M3Fn => (4, 3, 7),
        Dtype::F8E5M2 => (5, 2, 15),
        Dtype::F8E4M3Fnuz => (4, 3, 8),
        _ => (5, 2, 16),
    }
}

fn decode_8(dtype: Dtype, code: u8) -> f64 {
    let (exponent_bits, mantissa_bits, _) = layout(dtype);
    let special = match dtype {
        Dtype::F8E4M3Fn if code & 0x7f == 0x7f => Some(f64::NAN),
        Dtype::F8E5M2 if code & 0x7f == 0x7c => {
            Some(f64::INFINITY.copysign(if code > 127 { -1.0 } else { 1.0 }))
        }
        Dtype::F8E5M2 if code & 0x7c == 0x7c => Some(f64::NAN),
        Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz if code == 0x80 => Some(f64::NAN),
        _ => None,
    };
    debug_assert_eq!(exponent_bits + mantissa_bits, 7);
    special.unwrap_or_else(|| magnitude(dtype, u32::from(code & 0x7f)) * if code > 127 { -1.0 } else { 1.0 })
}

/// The value a code has if nothing is special about it; for codes from 0x80 on, where the numbers would go
/// on.
fn magnitude(dtype: Dtype, code: u32) -> f64 {
    let (_, mantissa_bits, bias) = layout(dtype);
    let exponent = (code >> mantissa_bits) as i32;
    let fraction = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    if exponent == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(exponent - bias) }
}

/// Looks for the nearest of all numbers, the even one of two that are as near.
fn encode_8(dtype: Dtype, value: f64) -> u8 {
    let (largest, overflow, nan, signless) = match dtype {
        Dtype::F8E4M3Fn => (0x7e, 0x7e, 0x7f, false),
        Dtype::F8E5M2 => (0x7b, 0x7c, 0x7f, false),
        _ => (0x7f, 0x80, 0x80, true),
    };
    if value.is_nan() {
        return nan;
    }
    let distance = |code: u32| (magnitude(dtype, code) - value.abs()).abs();
    let by_distance = |a: &u32, b: &u32| distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2)));
    // For a value far beyond all numbers, the distances to them are the same after rounding.
    let beyond = value.abs() >= magnitude(dtype, largest + 1);
    let nearest = (0..=largest + 1).min_by(by_distance).expect("not empty");
    let code = if nearest > largest || beyond { overflow } else { nearest as u8 };
    let negative = value.is_sign_negative() && !(signless && (code == 0 || code == 0x80));
    code | if negative { 0x80 } else { 0 }
}
