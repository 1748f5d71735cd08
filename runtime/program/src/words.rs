//! Programs and plans as words of 64 bits, for code that is not written in Rust. The other side is in
//! `python/csrc/program`: `recording.cpp` writes programs, and `plan.cpp` reads plans.
//!
//! ```text
//! program   = list(value) list(operation) list(output: value) list(line: text)
//! value     = code bytes (0: input number | 1: result 0 | 2: view of) list(size) list(stride: size) offset: size
//! size      = (0: known number | 1: unknown number)
//! operation = name: text, list(argument) list(result) list(written) line call pointwise
//! argument  = 0 | 1 value | 2 list(value or -1) | 3 size | 4 list(size) | 5 bits | 6 list(bits) | 7 text
//! call      = 0: told | 1: allocating | 2: outside
//! pointwise = 0 | (1: alike | 2: different) list(operand: value or -1)
//! text      = bytes, which come next in the text beside the words
//! list(x)   = count x*
//!
//! plan        = workspace list(step: kind of) list(place: kind at) list(group)
//! step        = 0: make | 1: run | 2: tiles | 3: free
//! place       = 0: input | 1: workspace | 2: own | 3: kernel | 4: nowhere
//! group       = list(size) list(access) list(instruction) tiles
//! access      = value (0: load | 1: store) list(stride) is_linear
//! instruction = operation out list(operand or -1)
//! ```

use crate::error::ProgramError;
use crate::plan::{Plan, Step, TileGroup, Transfer, ValueMemory};
use crate::program::{
    Argument, CallKind, ElementType, Loops, Operation, OperationId, Pointwise, Program, SourceLine,
    SymbolicSize, TensorValue, ValueId, ValueSource,
};

struct Reader<'a> {
    words: &'a [i64],
    text: &'a [u8],
    at: usize,
}

type Read<T> = Result<T, ProgramError>;

impl Reader<'_> {
    fn wrong(&self, what: &'static str) -> ProgramError {
        ProgramError::Words { what, at: self.at }
    }

    fn word(&mut self) -> Read<i64> {
        let word = self.words.get(self.at).copied().ok_or_else(|| self.wrong("a word"))?;
        self.at += 1;
        Ok(word)
    }

    fn number(&mut self, what: &'static str) -> Read<u32> {
        let word = self.word()?;
        word.try_into().map_err(|_| self.wrong(what))
    }

    fn byte(&mut self, what: &'static str) -> Read<u8> {
        let word = self.word()?;
        word.try_into().map_err(|_| self.wrong(what))
    }

    fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> Read<T>) -> Read<Vec<T>> {
        let count = self.number("a count")? as usize;
        // Nothing takes less than a word, so no list is longer than what is left.
        if count > self.words.len() - self.at {
            return Err(self.wrong("a count of what is there"));
        }
        (0..count).map(|_| one(self)).collect()
    }

    fn text(&mut self) -> Read<String> {
        let bytes = self.number("the length of a text")? as usize;
        let (text, rest) = self.text.split_at_checked(bytes).ok_or_else(|| self.wrong("a text"))?;
        self.text = rest;
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    fn size(&mut self) -> Read<SymbolicSize> {
        match self.word()? {
            0 => Ok(SymbolicSize::Known(self.word()?)),
            1 => Ok(SymbolicSize::Unknown(self.number("the number of a size")?)),
            _ => Err(self.wrong("a size")),
        }
    }

    fn id(&mut self) -> Read<ValueId> {
        Ok(ValueId(self.number("a value")?))
    }

    fn optional(&mut self) -> Read<Option<ValueId>> {
        match self.word()? {
            -1 => Ok(None),
            word => word.try_into().map(|id| Some(ValueId(id))).map_err(|_| self.wrong("a value")),
        }
    }

    fn float(&mut self) -> Read<f64> {
        Ok(f64::from_bits(self.word()? as u64))
    }

    fn value(&mut self) -> Read<TensorValue> {
        let dtype = ElementType { code: self.byte("a type")?, bytes: self.byte("the bytes of a type")? };
        let source = match (self.word()?, self.number("an input or a value")?) {
            (0, number) => ValueSource::Input(number),
            (1, _) => ValueSource::Result,
            (2, of) => ValueSource::View(ValueId(of)),
            _ => return Err(self.wrong("where a value comes from")),
        };
        let (sizes, strides) = (self.list(Self::size)?, self.list(Self::size)?);
        Ok(TensorValue { dtype, sizes, strides, offset: self.size()?, source })
    }

    fn argument(&mut self) -> Read<Argument> {
        Ok(match self.word()? {
            0 => Argument::None,
            1 => Argument::Value(self.id()?),
            2 => Argument::Values(self.list(Self::optional)?),
            3 => Argument::Int(self.size()?),
            4 => Argument::Ints(self.list(Self::size)?),
            5 => Argument::Float(self.float()?),
            6 => Argument::Floats(self.list(Self::float)?),
            7 => Argument::Text(self.text()?),
            _ => return Err(self.wrong("an argument")),
        })
    }

    fn operation(&mut self) -> Read<Operation> {
        let name = self.text()?;
        let arguments = self.list(Self::argument)?;
        let (results, writes) = (self.list(Self::id)?, self.list(Self::id)?);
        let may_overwrite = self.list(Self::id)?;
        let line = SourceLine(self.number("a line")?);
        let call_kind = match self.word()? {
            0 => CallKind::Told,
            1 => CallKind::Allocating,
            2 => CallKind::Outside,
            _ => return Err(self.wrong("how an operation is called")),
        };
        let loops = match self.word()? {
            0 => None,
            1 => Some(Loops::Alike),
            2 => Some(Loops::Different),
            _ => return Err(self.wrong("loops")),
        };
        let pointwise = match loops {
            Some(loops) => Some(Pointwise { operands: self.list(Self::optional)?, loops }),
            None => None,
        };
        Ok(Operation { name, arguments, results, writes, may_overwrite, line, pointwise, call_kind })
    }
}

impl Program {
    /// Reads a program.
    ///
    /// # Errors
    /// [`ProgramError::Words`] when they are none. Whether the program makes sense, [`Program::verify`] says.
    pub fn from_words(words: &[i64], text: &[u8]) -> Result<Self, ProgramError> {
        let mut reader = Reader { words, text, at: 0 };
        let values = reader.list(Reader::value)?;
        let operations = reader.list(Reader::operation)?;
        let outputs = reader.list(Reader::id)?;
        let lines = reader.list(Reader::text)?;
        match reader.at == words.len() {
            true => Ok(Self { values, operations, outputs, lines }),
            false => Err(reader.wrong("nothing more")),
        }
    }
}

#[derive(Default)]
struct Writer {
    words: Vec<i64>,
}

impl Writer {
    fn list<T>(&mut self, all: &[T], mut one: impl FnMut(&mut Self, &T)) {
        self.words.push(all.len() as i64);
        all.iter().for_each(|item| one(self, item));
    }

    fn step(&mut self, step: &Step) {
        let (kind, of) = match step {
            Step::Make(value) => (0, value.0),
            Step::Run(OperationId(operation)) => (1, *operation),
            Step::Tiles(group) => (2, *group),
            Step::Free(value) => (3, value.0),
        };
        self.words.extend([kind, i64::from(of)]);
    }

    fn place(&mut self, place: &ValueMemory) {
        self.words.extend(match place {
            ValueMemory::Input(number) => [0, i64::from(*number)],
            ValueMemory::Workspace(offset) => [1, *offset],
            ValueMemory::Own(owner) => [2, i64::from(owner.0)],
            ValueMemory::Kernel => [3, 0],
            ValueMemory::Nowhere => [4, 0],
        });
    }

    fn group(&mut self, group: &TileGroup) {
        self.list(&group.walk.sizes, |writer, size| writer.words.push(*size));
        self.list(&group.accesses, |writer, access| {
            let is_store = access.direction == Transfer::Store;
            writer.words.extend([i64::from(access.value.0), i64::from(is_store)]);
            writer.list(&access.strides, |writer, stride| writer.words.push(*stride));
            writer.words.push(i64::from(access.is_linear));
        });
        self.list(&group.instructions, |writer, instruction| {
            writer.words.extend([i64::from(instruction.operation.0), i64::from(instruction.out)]);
            writer.list(&instruction.operands, |writer, operand| {
                writer.words.push(operand.map_or(-1, i64::from));
            });
        });
        self.words.push(i64::from(group.tiles));
    }
}

impl Plan {
    /// The plan, as words.
    pub fn to_words(&self) -> Vec<i64> {
        let mut writer = Writer::default();
        writer.words.push(self.workspace);
        writer.list(&self.steps, Writer::step);
        writer.list(&self.places, Writer::place);
        writer.list(&self.groups, Writer::group);
        writer.words
    }
}
