//! The command line, with the job file and the variables that it takes in, and the job that is decided from it.
//!
//! This room starts nothing: it is done before anything runs.

pub(crate) mod decide;
pub(crate) mod definition;
pub(crate) mod job_file;
pub(crate) mod variables;
pub(crate) mod words;

pub(crate) use words::CommandLine;
