//! temporary
use crate::failure::Failure;
use crate::op::Op;
use crate::segment::Segment;
use std::sync::Arc;
use tpurun_topology::Schedule;
pub(crate) fn run(
    _s: &Segment,
    _o: &Op,
    _p: Arc<Schedule>,
    _q: u64,
    _c: &mut dyn FnMut(&[u32]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    Ok(())
}
