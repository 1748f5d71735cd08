//! The parts of a program.

use std::fmt;

use crate::error::ProgramError;

/// The number of a value, in the order in which values were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// The number of an operation, in the order in which operations were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId(pub u32);

/// The number of a line of the user's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceLine(pub u32);

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A size, a stride, an offset or an integer argument: known, or given whenever the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SymbolicSize {
    /// The same in every run.
    Known(i64),
    /// Entry of a table that each run is given.
    Unknown(u32),
}

impl SymbolicSize {
    /// The number, where the table of unknown ones is `given`.
    pub(crate) fn resolved(self, given: &[i64]) -> Result<i64, ProgramError> {
        match self {
            Self::Known(size) => Ok(size),
            Self::Unknown(unknown) => given
                .get(unknown as usize)
                .copied()
                .ok_or(ProgramError::NotGiven { unknown, given: given.len() }),
        }
    }

    /// The number of a resolved program, in which no size is unknown any more.
    pub(crate) fn known(self) -> i64 {
        match self {
            Self::Known(size) => size,
            Self::Unknown(_) => 0,
        }
    }
}

/// The type of elements, by torch's number (`c10::ScalarType`), and how many bytes one has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ElementType {
    /// torch's number.
    pub code: u8,
    /// Bytes of one element.
    pub bytes: u8,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueSource {
    /// The caller gives it, as the argument of this number.
    Input(u32),
    /// An operation makes it.
    Result,
    /// It is some elements of another value, in the same memory.
    View(ValueId),
}

/// A tensor: strided elements in the memory of its root.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorValue {
    /// The type of its elements.
    pub dtype: ElementType,
    /// In elements, as torch counts.
    pub sizes: Vec<SymbolicSize>,
    /// In elements.
    pub strides: Vec<SymbolicSize>,
    /// The place of its first element, in elements from the first one of its root.
    pub offset: SymbolicSize,
    /// Where it comes from.
    pub source: ValueSource,
}

/// An argument of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// Left out.
    None,
    /// A tensor.
    Value(ValueId),
    /// Tensors, some of them perhaps left out.
    Values(Vec<Option<ValueId>>),
    /// An integer, a truth or an enumeration.
    Int(SymbolicSize),
    /// Integers.
    Ints(Vec<SymbolicSize>),
    /// A number.
    Float(f64),
    /// Numbers.
    Floats(Vec<f64>),
    /// Everything else, as text.
    Text(String),
}

impl Argument {
    /// The tensors in it.
    pub fn values(&self) -> impl Iterator<Item = ValueId> + '_ {
        let one = match self {
            Self::Value(value) => Some(*value),
            _ => None,
        };
        let several: &[Option<ValueId>] = match self {
            Self::Values(values) => values,
            _ => &[],
        };
        one.into_iter().chain(several.iter().flatten().copied())
    }
}

/// Whether ATen's vector loop and its scalar loop, which does the last elements, have the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loops {
    /// They have: an operation may run in tiles of any shape.
    Alike,
    /// They have not: tiles have to end where ATen's loops do.
    Different,
}

/// How an operation is computed in tiles.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pointwise {
    /// Operands of its kernel, at most three; none stands for a number.
    pub operands: Vec<Option<ValueId>>,
    /// See [`Loops`].
    pub loops: Loops,
}

/// How an operation is called that does not run in tiles, and so whose the memory of its results is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallKind {
    /// ATen's kernel is told where to put its results.
    Told,
    /// ATen's kernel allocates its results.
    Allocating,
    /// Tensors of the device are handed over, not of the CPU: collectives, random draws, operations of others.
    /// They have effects that nobody sees in their arguments, and stay in the order of the program.
    Outside,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// torch's name and overload: `aten::add.Tensor`.
    pub name: String,
    /// In the order of its schema.
    pub arguments: Vec<Argument>,
    /// The values that it makes, none of which shares memory with another.
    pub results: Vec<ValueId>,
    /// Arguments that it writes to.
    pub writes: Vec<ValueId>,
    /// Arguments in whose memory its kernel may put the result: it has read an element, and those that are
    /// computed from it, before it writes there.
    pub may_overwrite: Vec<ValueId>,
    /// Where the user's program asks for it.
    pub line: SourceLine,
    /// How it runs in tiles, if it can.
    pub pointwise: Option<Pointwise>,
    /// How it runs otherwise.
    pub call_kind: CallKind,
}

impl Operation {
    /// The values that it reads, or writes to.
    pub fn values(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.arguments.iter().flat_map(Argument::values)
    }
}

/// A stream of operations: what a compiled or fused stretch of a user's program does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    pub(crate) values: Vec<TensorValue>,
    pub(crate) operations: Vec<Operation>,
    pub(crate) outputs: Vec<ValueId>,
    pub(crate) lines: Vec<String>,
}

impl Program {
    /// An empty program.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value; returns its number.
    pub fn value(&mut self, value: TensorValue) -> ValueId {
        self.values.push(value);
        ValueId(self.values.len() as u32 - 1)
    }

    /// Adds a line of the user's program, or finds it; returns its number.
    pub fn line(&mut self, text: &str) -> SourceLine {
        let last = self.lines.len();
        let at = self.lines.iter().rposition(|known| known == text).unwrap_or(last);
        if at == last {
            self.lines.push(text.to_owned());
        }
        SourceLine(at as u32)
    }

    /// Adds an operation; returns its number.
    pub fn operation(&mut self, operation: Operation) -> OperationId {
        self.operations.push(operation);
        OperationId(self.operations.len() as u32 - 1)
    }

    /// Says that a value is a result.
    pub fn output(&mut self, value: ValueId) {
        self.outputs.push(value);
    }

    /// The value of a number that is in the program.
    pub(crate) fn at(&self, value: ValueId) -> &TensorValue {
        &self.values[value.0 as usize]
    }

    /// The value whose memory `value` is in: itself, unless it is a view.
    pub(crate) fn root(&self, value: ValueId) -> ValueId {
        let mut root = value;
        while let ValueSource::View(of) = self.at(root).source {
            root = of;
        }
        root
    }

    /// The same program with the sizes of one run.
    ///
    /// # Errors
    /// [`ProgramError::NotGiven`] when the table is too short.
    pub fn resolved(&self, given: &[i64]) -> Result<Self, ProgramError> {
        let one = |size: &SymbolicSize| size.resolved(given).map(SymbolicSize::Known);
        let all = |sizes: &[SymbolicSize]| sizes.iter().map(one).collect::<Result<Vec<_>, _>>();
        let mut resolved = self.clone();
        for value in &mut resolved.values {
            value.sizes = all(&value.sizes)?;
            value.strides = all(&value.strides)?;
            value.offset = one(&value.offset)?;
        }
        for argument in resolved.operations.iter_mut().flat_map(|operation| &mut operation.arguments) {
            match argument {
                Argument::Int(size) => *size = one(size)?,
                Argument::Ints(sizes) => *sizes = all(sizes)?,
                _ => {}
            }
        }
        Ok(resolved)
    }
}

impl TensorValue {
    /// Its sizes; of a resolved program.
    pub(crate) fn shape(&self) -> Vec<i64> {
        self.sizes.iter().map(|size| size.known()).collect()
    }

    /// Its strides; of a resolved program.
    pub(crate) fn steps(&self) -> Vec<i64> {
        self.strides.iter().map(|stride| stride.known()).collect()
    }

    /// How many elements it has; nothing when that is no number.
    pub(crate) fn elements(&self) -> Option<i64> {
        self.sizes.iter().try_fold(1_i64, |product, size| product.checked_mul(size.known()))
    }

    /// The elements from its first one to the end of its last one; nothing when that is no number.
    pub(crate) fn extent(&self) -> Option<i64> {
        if self.elements()? == 0 {
            return Some(0);
        }
        let sizes = self.sizes.iter().zip(&self.strides);
        sizes.into_iter().try_fold(1_i64, |extent, (size, stride)| {
            extent.checked_add((size.known() - 1).checked_mul(stride.known())?)
        })
    }

    /// Bytes from the first to the last element; 0 where they are too many to count, which `verify` refuses.
    pub(crate) fn bytes(&self) -> i64 {
        self.extent().unwrap_or_default() * i64::from(self.dtype.bytes)
    }
}
