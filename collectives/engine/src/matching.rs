//! Whether the ranks' operations fit together, and what each rank is told where they do not.

pub(crate) mod splits;
pub(crate) mod validate;
pub(crate) mod verdict;
pub(crate) mod verify;
