// The launcher is a binary: its parsers are taken in as files.
#![no_main]
#![allow(dead_code)]

#[path = "../../src/processes.rs"]
mod processes;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| processes::survives(bytes));
