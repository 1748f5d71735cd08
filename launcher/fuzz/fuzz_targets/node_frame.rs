// The launcher is a binary: its parsers are taken in as files.
#![no_main]
#![allow(dead_code)]

#[path = "../../src/nodes/frame.rs"]
mod frame;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| frame::survives(bytes));
