//! Whole jobs with real processes: the command line, how ranks end, and that nothing is left behind.

mod board;
mod endings;
mod fork_server;
mod launcher_death;
mod programs;
mod sandbox;
mod signals;
mod usage;
