//! Hostile bytes for everything that reads what another process wrote (law I4 of `docs/invariants.md`).
//!
//! Each target is a function of bytes that must return, whatever they are: no panic, no access outside of
//! what is mapped, no wait. `collectives/engine/fuzz` runs them under libFuzzer with AddressSanitizer; the tests
//! here run the same functions over the seeds in `collectives/engine/fuzz/seeds` and thousands of variations.

mod arena_export;
mod board_image;
mod bridge_frames;
mod control_frames;
mod input;
mod mapped_tensors;
mod match_keys;
mod meeting;
mod message_lane;
mod proc_text;
mod segment_join;
#[cfg(test)]
mod tests;
mod wire_segments;

use input::Input;

/// One entry of hostile bytes into the engine.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// As in `cargo fuzz run NAME`.
    pub name: &'static str,
    /// Takes any bytes; what it must not do is panic or hang.
    pub run: fn(&[u8]),
    /// Inputs that get far, made by the encoders of this build.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    arena_export::TARGET,
    board_image::TARGET,
    bridge_frames::TARGET,
    control_frames::TARGET,
    mapped_tensors::TARGET,
    match_keys::TARGET,
    meeting::TARGET,
    message_lane::TARGET,
    proc_text::TARGET,
    segment_join::TARGET,
    wire_segments::TARGET,
];

/// Runs one target.
///
/// # Panics
/// When there is none of this name, and when it found something.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    (target.unwrap_or_else(|| panic!("no fuzz target {name}")).run)(bytes);
}
