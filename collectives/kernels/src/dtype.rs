//! Element types and reduce operations, numbered as in the C ABI, and which pairs of them mean something.

use std::fmt;

/// The type of every element of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// One byte; any value but zero is true.
    Bool = 0,
    /// Unsigned, 8 bits.
    U8 = 1,
    /// Signed, 8 bits.
    I8 = 2,
    /// Unsigned, 16 bits.
    U16 = 3,
    /// Signed, 16 bits.
    I16 = 4,
    /// Unsigned, 32 bits.
    U32 = 5,
    /// Signed, 32 bits.
    I32 = 6,
    /// Unsigned, 64 bits.
    U64 = 7,
    /// Signed, 64 bits.
    I64 = 8,
    /// IEEE half precision.
    F16 = 9,
    /// The upper half of an `f32`.
    Bf16 = 10,
    /// IEEE single precision.
    F32 = 11,
    /// IEEE double precision.
    F64 = 12,
    /// 4 exponent bits, 3 of mantissa; no infinity.
    F8E4M3Fn = 13,
    /// 5 exponent bits, 2 of mantissa; the upper half of an `f16`.
    F8E5M2 = 14,
    /// 4 exponent bits with bias 8; no infinity, no negative zero.
    F8E4M3Fnuz = 15,
    /// 5 exponent bits with bias 16; no infinity, no negative zero.
    F8E5M2Fnuz = 16,
    /// Complex of two `f32`.
    C64 = 17,
    /// Complex of two `f64`.
    C128 = 18,
    /// Signed, 128 bits: partial sums of an average of 64 bit integers. No tensor has it.
    I128 = 19,
}

/// How elements of the ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum; integers wrap, bool is "or".
    Sum = 0,
    /// Sum divided by the number of ranks, also where the sum is too large for the type; integers truncate towards
    /// zero.
    Avg = 1,
    /// Product; integers wrap, bool is "and".
    Product = 2,
    /// Least; a NaN wins.
    Min = 3,
    /// Greatest; a NaN wins.
    Max = 4,
    /// Bitwise and.
    Band = 5,
    /// Bitwise or.
    Bor = 6,
    /// Bitwise exclusive or.
    Bxor = 7,
    /// Sum of every operand times a common factor.
    PremulSum = 8,
}

/// A number that names no dtype or reduce operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a {what}", what = .1)]
pub struct UnknownCode(u32, &'static str);

/// A reduce operation that has no meaning for the elements it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} is not defined for {dtype}")]
pub struct Unsupported {
    /// The type of the elements.
    pub dtype: Dtype,
    /// The operation that was asked.
    pub op: ReduceOp,
}

/// The kind of an element, as far as reduce operations care.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Bool,
    Integer,
    Float,
    Complex,
}

impl Dtype {
    /// Every dtype of a tensor, in the order of the C ABI.
    pub const ALL: [Self; 19] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::U64,
        Self::I64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::F8E4M3Fn,
        Self::F8E5M2,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::C64,
        Self::C128,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::F8E4M3Fn | Self::F8E5M2 | Self::F8E4M3Fnuz | Self::F8E5M2Fnuz => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::C64 => 8,
            Self::C128 | Self::I128 => 16,
        }
    }

    /// The name users see, as in `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F8E4M3Fn => "f8_e4m3fn",
            Self::F8E5M2 => "f8_e5m2",
            Self::F8E4M3Fnuz => "f8_e4m3fnuz",
            Self::F8E5M2Fnuz => "f8_e5m2fnuz",
            Self::C64 => "c64",
            Self::C128 => "c128",
            Self::I128 => "i128",
        }
    }

    /// Whether it is a number without a fraction.
    pub const fn is_integer(self) -> bool {
        matches!(self.family(), Family::Integer)
    }

    const fn family(self) -> Family {
        match self {
            Self::Bool => Family::Bool,
            Self::U8 | Self::I8 | Self::U16 | Self::I16 => Family::Integer,
            Self::U32 | Self::I32 | Self::U64 | Self::I64 | Self::I128 => Family::Integer,
            Self::F16 | Self::Bf16 | Self::F32 | Self::F64 => Family::Float,
            Self::F8E4M3Fn | Self::F8E5M2 | Self::F8E4M3Fnuz | Self::F8E5M2Fnuz => Family::Float,
            Self::C64 | Self::C128 => Family::Complex,
        }
    }
}

impl ReduceOp {
    /// Every operation, in the order of the C ABI.
    pub const ALL: [Self; 9] = [
        Self::Sum,
        Self::Avg,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::Band,
        Self::Bor,
        Self::Bxor,
        Self::PremulSum,
    ];

    /// The name users see, as in `premul_sum`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::Band => "band",
            Self::Bor => "bor",
            Self::Bxor => "bxor",
            Self::PremulSum => "premul_sum",
        }
    }
}

/// Says whether `op` means something for elements of `dtype`.
///
/// # Errors
/// [`Unsupported`], whose text names both.
pub const fn supported(dtype: Dtype, op: ReduceOp) -> Result<(), Unsupported> {
    let defined = match (op, dtype.family()) {
        (ReduceOp::Sum | ReduceOp::Product, _) => true,
        (ReduceOp::Avg, family) => !matches!(family, Family::Bool),
        (ReduceOp::Min | ReduceOp::Max, family) => !matches!(family, Family::Complex),
        (ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor, family) => {
            matches!(family, Family::Bool | Family::Integer)
        }
        (ReduceOp::PremulSum, family) => matches!(family, Family::Float | Family::Complex),
    };
    if defined { Ok(()) } else { Err(Unsupported { dtype, op }) }
}

impl TryFrom<u32> for Dtype {
    type Error = UnknownCode;

    fn try_from(code: u32) -> Result<Self, UnknownCode> {
        Self::ALL.get(code as usize).copied().ok_or(UnknownCode(code, "dtype"))
    }
}

impl TryFrom<u32> for ReduceOp {
    type Error = UnknownCode;

    fn try_from(code: u32) -> Result<Self, UnknownCode> {
        Self::ALL.get(code as usize).copied().ok_or(UnknownCode(code, "reduce op"))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_positions() {
        for (code, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, code);
            assert_eq!(Dtype::try_from(code as u32), Ok(dtype));
        }
        for (code, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, code);
            assert_eq!(ReduceOp::try_from(code as u32), Ok(op));
        }
        assert_eq!(Dtype::try_from(19).unwrap_err().to_string(), "19 is not a dtype");
        assert_eq!(ReduceOp::try_from(u32::MAX).unwrap_err().to_string(), "4294967295 is not a reduce op");
    }

    #[test]
    fn undefined_pairs_are_named() {
        let table: Vec<String> = Dtype::ALL
            .into_iter()
            .map(|dtype| {
                let undefined = ReduceOp::ALL.into_iter().filter(|&op| supported(dtype, op).is_err());
                format!("{dtype}: {}", undefined.map(ReduceOp::name).collect::<Vec<_>>().join(" "))
            })
            .collect();
        let bitwise = "band bor bxor";
        let mut expected = vec!["bool: avg premul_sum".to_owned()];
        expected.extend(
            ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"].map(|d| format!("{d}: premul_sum")),
        );
        expected.extend(["f16", "bf16", "f32", "f64"].map(|d| format!("{d}: {bitwise}")));
        expected.extend(
            ["f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz"].map(|d| format!("{d}: {bitwise}")),
        );
        expected.extend(["c64", "c128"].map(|d| format!("{d}: min max {bitwise}")));
        assert_eq!(table, expected);
        let error = supported(Dtype::C64, ReduceOp::Min).unwrap_err();
        assert_eq!(error.to_string(), "min is not defined for c64");
    }
}
