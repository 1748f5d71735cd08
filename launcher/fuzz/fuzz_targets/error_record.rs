// The launcher is a binary: its parsers are taken in as files.
#![no_main]
#![allow(dead_code)]

#[path = "../../src/observe/error_record.rs"]
mod error_record;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| error_record::survives(bytes));
