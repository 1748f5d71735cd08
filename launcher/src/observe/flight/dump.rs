//! The dump in the run directory: the document, and the same as a trace for Perfetto.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use super::perfetto;
use crate::base::private;
use crate::observe::flight::Flight;
use crate::observe::flight::notice::FLIGHT;

/// Name of the document.
pub(crate) const DOCUMENT: &str = "flight.json";
/// Name of the trace.
pub(crate) const TRACE: &str = "trace.perfetto-trace";

/// A dump on its way to the disk, on a thread of its own: a slow disk must not hold up a verdict.
#[derive(Debug)]
pub(crate) struct DumpWriting {
    thread: JoinHandle<io::Result<()>>,
}

impl DumpWriting {
    /// Starts to write into the run directory.
    ///
    /// # Errors
    /// When there can be no thread.
    pub(crate) fn start(run_dir: &Path, flight: Flight) -> io::Result<DumpWriting> {
        let dir = run_dir.join(FLIGHT);
        let write = move || write(&dir, &flight);
        Ok(DumpWriting { thread: std::thread::Builder::new().name("flight".into()).spawn(write)? })
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// Why the dump is not there, or not whole.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the writer panicked")))
    }
}

/// Writes both files, each whole or not at all.
pub(crate) fn write(dir: &Path, flight: &Flight) -> io::Result<()> {
    private::folder(dir)?;
    replace(&dir.join(DOCUMENT), &serde_json::to_vec(flight)?)?;
    replace(&dir.join(TRACE), &perfetto::encode(flight))
}

/// Writes a file that is never seen half-written.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".part");
    let unfinished = PathBuf::from(unfinished);
    private::file(&unfinished)?.write_all(bytes).and_then(|()| fs::rename(&unfinished, path)).inspect_err(
        |_| {
            let _ = fs::remove_file(&unfinished);
        },
    )
}

/// Reads the last dump of a run; None when it has none.
///
/// # Errors
/// One line that says what is wrong with it.
pub(crate) fn read(dir: &Path) -> Result<Option<Flight>, String> {
    let path = dir.join(DOCUMENT);
    let said = |error: String| format!("{}: {error}", path.display());
    match fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(said(error.to_string())),
        Ok(metadata) if metadata.len() > MAX_BYTES => {
            return Err(said(format!("expected at most {MAX_BYTES} bytes, given {}", metadata.len())));
        }
        Ok(_) => {}
    }
    let text = fs::read(&path).map_err(|error| said(error.to_string()))?;
    Flight::parse(&text).map(Some).map_err(said)
}

const MAX_BYTES: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::flight::samples::flight;

    #[test]
    fn a_dump_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let flight_dir = dir.path().join(FLIGHT);
        assert_eq!(read(&flight_dir).unwrap(), None);
        DumpWriting::start(dir.path(), flight()).unwrap().finish().unwrap();
        assert_eq!(read(&flight_dir).unwrap(), Some(flight()));
        let mut files: Vec<_> =
            fs::read_dir(&flight_dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, [DOCUMENT, TRACE]);
        fs::write(flight_dir.join(DOCUMENT), "[").unwrap();
        assert!(read(&flight_dir).unwrap_err().contains("flight.json: not a flight recorder dump"));
    }

    #[test]
    fn what_can_not_be_written_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FLIGHT), "in the way").unwrap();
        assert!(DumpWriting::start(dir.path(), flight()).unwrap().finish().is_err());
        fs::create_dir(dir.path().join("target")).unwrap();
        assert!(replace(&dir.path().join("target"), b"x").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
