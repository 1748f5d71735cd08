//! How an operation is run: the algorithm, its schedule, and the choices that are measured.

pub(crate) mod planning;
pub(crate) mod trial;
