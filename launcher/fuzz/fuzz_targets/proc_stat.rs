// The launcher is a binary: its parsers are taken in as files.
#![no_main]
#![allow(dead_code)]

#[path = "../../src/processes/proc_stat.rs"]
mod proc_stat;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| proc_stat::survives(bytes));
