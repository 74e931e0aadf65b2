#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    carat_bundle::fuzzing::manifest(data);
    carat_bundle::fuzzing::records(data);
});
