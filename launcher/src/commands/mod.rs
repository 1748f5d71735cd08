//! The commands of a person: run a job here, by ssh or as a task of a scheduler, look at one, examine the machine.
//!
//! The rooms below know none of them.

pub(crate) mod doctor;
pub(crate) mod dry_run;
pub(crate) mod front;
pub(crate) mod ssh;
pub(crate) mod status;
pub(crate) mod tasks_on_node;
pub(crate) mod trace;
