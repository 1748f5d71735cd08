// The launcher is a binary: its parsers are taken in as files.
#![no_main]
#![allow(dead_code)]

#[path = "../../src/ranks/server_events.rs"]
mod server_events;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| server_events::survives(bytes));
