//! The one place outside the kernels that needs `unsafe`.

use std::{fs::File, io, path::Path};

use memmap2::Mmap;

/// Maps a file for reading.
///
/// The map is only ever read as bytes and every consumer checks lengths against
/// it, so the worst that a concurrent truncation can do is end the process with
/// a bus error; it cannot make safe code misbehave. Files being written are
/// never mapped: carat's own writers stage and rename.
pub fn map_file(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    if file.metadata()?.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::IsADirectory,
            "is a folder, not a file",
        ));
    }
    // SAFETY: the map is private and read-only; nobody holds a mutable view of
    // it, and bytes that change under us (another process writing) are plain
    // `u8`s for which every value is valid.
    #[allow(unsafe_code)]
    unsafe {
        Mmap::map(&file)
    }
}
