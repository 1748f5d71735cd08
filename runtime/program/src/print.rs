//! A program as text: for people, and, without the lines, what is fingerprinted.
//!
//! ```text
//! %0: f32[16, 64] = input 0
//! %2: f32[16, 64] = aten::gelu(%0, "none")  # train.py:12
//! %3: f32[64, 16](1, 64) = view of %2
//! return %3
//! ```

use std::fmt;

use crate::program::{
    Argument, ElementType, Operation, Program, SymbolicSize, TensorValue, ValueId, ValueSource,
};

/// torch's names, by its numbers.
const NAMES: [&str; 16] = [
    "u8", "i8", "i16", "i32", "i64", "f16", "f32", "f64", "c32", "c64", "c128", "bool", "qi8", "qu8", "qi32",
    "bf16",
];

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.get(usize::from(self.code)) {
            Some(name) => f.write_str(name),
            None => write!(f, "dtype{}", self.code),
        }
    }
}

impl fmt::Display for SymbolicSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(size) => write!(f, "{size}"),
            Self::Unknown(at) => write!(f, "?{at}"),
        }
    }
}

/// Things with commas between them.
struct List<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, one) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{one}")?;
        }
        Ok(())
    }
}

impl TensorValue {
    /// Whether its elements lie one after the other from the start of its root on, as far as that is known.
    fn is_plain(&self) -> bool {
        let mut expected = Some(1_i64);
        let in_order = self.sizes.iter().zip(&self.strides).rev().all(|(size, stride)| {
            let fits = *size == SymbolicSize::Known(1) || expected.map(SymbolicSize::Known) == Some(*stride);
            expected = match (expected, size) {
                (Some(product), SymbolicSize::Known(size)) => product.checked_mul(*size),
                _ => None,
            };
            fits
        });
        in_order && self.offset == SymbolicSize::Known(0)
    }
}

impl fmt::Display for TensorValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.dtype, List(&self.sizes))?;
        if !self.is_plain() {
            write!(f, "({})", List(&self.strides))?;
        }
        if self.offset != SymbolicSize::Known(0) {
            write!(f, "+{}", self.offset)?;
        }
        Ok(())
    }
}

fn optional(values: &[Option<ValueId>]) -> Vec<String> {
    values.iter().map(|value| value.map_or("none".to_owned(), |value| value.to_string())).collect()
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Value(value) => write!(f, "{value}"),
            Self::Values(values) => write!(f, "[{}]", List(&optional(values))),
            Self::Int(size) => write!(f, "{size}"),
            Self::Ints(sizes) => write!(f, "[{}]", List(sizes)),
            // Debug's digits tell any two numbers apart, and an integer from a float.
            Self::Float(number) => write!(f, "{number:?}"),
            Self::Floats(numbers) => write!(f, "{numbers:?}"),
            Self::Text(text) => write!(f, "{text:?}"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name, List(&self.arguments))?;
        if !self.writes.is_empty() {
            write!(f, " writes {}", List(&self.writes))?;
        }
        Ok(())
    }
}

impl Program {
    /// Its text without the lines of the user's program.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut text, |_, _| Ok(()));
        text
    }

    fn write<W: fmt::Write>(
        &self,
        to: &mut W,
        line: impl Fn(&mut W, &Operation) -> fmt::Result,
    ) -> fmt::Result {
        for (at, value) in self.values.iter().enumerate() {
            match value.source {
                ValueSource::Input(number) => writeln!(to, "%{at}: {value} = input {number}")?,
                ValueSource::View(of) => writeln!(to, "%{at}: {value} = view of {of}")?,
                ValueSource::Result => {}
            }
        }
        for operation in &self.operations {
            let results: Vec<_> =
                operation.results.iter().map(|result| format!("{result}: {}", self.at(*result))).collect();
            let is = if results.is_empty() { "" } else { " = " };
            write!(to, "{}{is}{operation}", List(&results))?;
            line(to, operation)?;
            to.write_char('\n')?;
        }
        writeln!(to, "return {}", List(&self.outputs))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, |f, operation| match self.lines.get(operation.line.0 as usize) {
            Some(line) if !line.is_empty() => write!(f, "  # {line}"),
            _ => Ok(()),
        })
    }
}
