use crate::program::{OperationId, ValueId};

/// A fault of a program, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// An operation, a view or a result names a value that is not there yet.
    #[error("{by} uses value {value}, and only {known} values are known there")]
    Unknown {
        /// The one that uses it.
        by: String,
        /// The number of the value.
        value: u32,
        /// How many there are.
        known: usize,
    },
    /// A value has more sizes than strides, or the other way round.
    #[error("value {value} has {sizes} sizes and {strides} strides")]
    Ranks {
        /// The value.
        value: ValueId,
        /// Its sizes.
        sizes: usize,
        /// Its strides.
        strides: usize,
    },
    /// A size is negative.
    #[error("value {value} has a size of {size}")]
    Negative {
        /// The value.
        value: ValueId,
        /// The size.
        size: i64,
    },
    /// A view reaches beyond the tensor that it is a view of.
    #[error("value {value} is a view of {end} bytes of a tensor that has {bytes}")]
    Beyond {
        /// The view.
        value: ValueId,
        /// Where its last element ends.
        end: i64,
        /// The bytes of the tensor.
        bytes: i64,
    },
    /// A value has two producers, or none.
    #[error("value {value} has {producers} operations that make it, expected one")]
    Producers {
        /// The value.
        value: ValueId,
        /// How many there are.
        producers: usize,
    },
    /// An operation writes to what is no argument of its own.
    #[error("operation {operation} writes to value {value}, which is not among its arguments")]
    Writes {
        /// The operation.
        operation: OperationId,
        /// The value.
        value: ValueId,
    },
    /// The kernel of an operation reads what is no argument of it.
    #[error("operation {operation} reads value {value} in tiles, which is not among its arguments")]
    Operand {
        /// The operation.
        operation: OperationId,
        /// The value.
        value: ValueId,
    },
    /// A size is to be given when the program runs, and was not.
    #[error("size ?{unknown} is not given, only {given} are")]
    NotGiven {
        /// Which one.
        unknown: u32,
        /// How many were given.
        given: usize,
    },
    /// A number is too large for memory.
    #[error("value {value} has more bytes than memory can have")]
    TooLarge {
        /// The value.
        value: ValueId,
    },
    /// Words that are no program.
    #[error("expected {what} as word {at} of a program")]
    Words {
        /// The word that should be there.
        what: &'static str,
        /// Which one.
        at: usize,
    },
}
