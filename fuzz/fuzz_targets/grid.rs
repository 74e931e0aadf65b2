#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| carat_quant::fuzzing::grid(data));
