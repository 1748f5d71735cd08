#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tpurun_engine::fuzzing::run("board_image", bytes));
