//! The conditions that a program meets before it is planned. Programs are made by our own code, and a mistake there
//! is to end in an error, not in somebody's memory.

use std::collections::HashSet;

use crate::error::ProgramError;
use crate::program::{CallKind, Operation, OperationId, Program, ValueId, ValueSource};

impl Program {
    /// Checks a resolved program: every value exists before it is used and has one origin, views stay within
    /// their tensors, operations write to their own arguments.
    ///
    /// # Errors
    /// The first [`ProgramError`] found.
    pub fn verify(&self) -> Result<(), ProgramError> {
        let planned = self.planned();
        for at in 0..self.values.len() {
            self.verify_value(ValueId(at as u32), &planned)?;
        }
        self.verify_order()
    }

    fn exists(&self, value: ValueId, by: impl Fn() -> String) -> Result<(), ProgramError> {
        if (value.0 as usize) < self.values.len() {
            return Ok(());
        }
        Err(ProgramError::Unknown { by: by(), value: value.0, known: self.values.len() })
    }

    fn verify_value(&self, id: ValueId, planned: &HashSet<ValueId>) -> Result<(), ProgramError> {
        let value = self.at(id);
        let (sizes, strides) = (value.sizes.len(), value.strides.len());
        if sizes != strides {
            return Err(ProgramError::Ranks { value: id, sizes, strides });
        }
        if let Some(size) = value.sizes.iter().map(|size| size.known()).find(|size| *size < 0) {
            return Err(ProgramError::Negative { value: id, size });
        }
        let too_large = || ProgramError::TooLarge { value: id };
        let bytes = |elements: i64, each: u8| elements.checked_mul(i64::from(each)).ok_or_else(too_large);
        let extent = value.extent().ok_or_else(too_large)?;
        let end = extent.checked_add(value.offset.known()).ok_or_else(too_large)?;
        let end = bytes(end, value.dtype.bytes)?;
        let ValueSource::View(of) = value.source else {
            return Ok(());
        };
        // Views come after what they are views of, so roots are found in finite time.
        if of >= id {
            let by = format!("value {id}");
            return Err(ProgramError::Unknown { by, value: of.0, known: id.0 as usize });
        }
        let root = self.at(self.root(id));
        // The storage of an input, or of what a kernel has allocated, may be larger than the tensor, and a view
        // may reach into all of it.
        if !planned.contains(&self.root(id)) {
            return Ok(());
        }
        let has = bytes(root.extent().ok_or_else(too_large)?, root.dtype.bytes)?;
        if extent > 0 && (end > has || value.offset.known() < 0) {
            return Err(ProgramError::Beyond { value: id, end, bytes: has });
        }
        Ok(())
    }

    /// The roots whose memory is as large as their elements need.
    fn planned(&self) -> HashSet<ValueId> {
        let told = self.operations.iter().filter(|operation| operation.call_kind == CallKind::Told);
        told.flat_map(|operation| operation.results.iter().copied()).collect()
    }

    fn verify_order(&self) -> Result<(), ProgramError> {
        let mut producers = vec![0_usize; self.values.len()];
        for (at, value) in self.values.iter().enumerate() {
            producers[at] = usize::from(value.source != ValueSource::Result);
        }
        for (at, operation) in self.operations.iter().enumerate() {
            let id = OperationId(at as u32);
            let by = || format!("operation {id} ({})", operation.name);
            for value in operation.values() {
                self.exists(value, by)?;
                if producers[self.root(value).0 as usize] == 0 {
                    return Err(ProgramError::Producers { value, producers: 0 });
                }
            }
            operation.verify_arguments(id)?;
            for result in &operation.results {
                self.exists(*result, by)?;
                producers[result.0 as usize] += 1;
            }
        }
        for output in &self.outputs {
            self.exists(*output, || "the list of results".to_owned())?;
        }
        match producers.iter().position(|count| *count != 1) {
            Some(at) => Err(ProgramError::Producers { value: ValueId(at as u32), producers: producers[at] }),
            None => Ok(()),
        }
    }
}

impl Operation {
    /// Checks that the operation writes to its own arguments alone, and reads no others in tiles.
    fn verify_arguments(&self, operation: OperationId) -> Result<(), ProgramError> {
        let is_stranger = |value: &&ValueId| !self.values().any(|argument| argument == **value);
        if let Some(value) = self.writes.iter().chain(&self.may_overwrite).find(is_stranger) {
            return Err(ProgramError::Writes { operation, value: *value });
        }
        let mut operands = self.pointwise.iter().flat_map(|pointwise| &pointwise.operands).flatten();
        match operands.find(is_stranger) {
            Some(value) => Err(ProgramError::Operand { operation, value: *value }),
            None => Ok(()),
        }
    }
}
