//! The output of the ranks and the lines of the agent, on their way to the terminal and the logs.

use std::cell::RefCell;
use std::io;
use std::time::{Duration, Instant};

use crate::output::writer::StandardStreams;
use crate::output::{Output, Stream};
use crate::ranks::Chunk;

/// Exit code of a job that has ended well, but whose output or logs could not be written.
pub(super) const LOST_OUTPUT: i32 = 1;

/// Everything that is shown, in one order.
pub(super) struct Console {
    pub(super) output: Output,
    pub(super) screen: StandardStreams,
    /// By rank: standard streams that have not ended.
    open_streams: Vec<u8>,
}

impl Console {
    pub(super) fn new(output: Output, screen: StandardStreams, ranks: u32) -> Console {
        Console { output, screen, open_streams: vec![0; ranks as usize] }
    }

    /// The ranks of another world are shown from now on.
    pub(super) fn renew(&mut self, output: Output, ranks: u32) {
        self.output = output;
        self.open_streams = vec![0; ranks as usize];
    }

    /// The standard streams of a rank have been opened.
    pub(super) fn opened(&mut self, rank: u32) {
        self.open_streams[rank as usize] = 2;
    }

    /// Whether all that a rank has written is read.
    pub(super) fn has_read_all_of(&self, rank: u32) -> bool {
        self.open_streams[rank as usize] == 0
    }

    /// Whether some rank may still write something that somebody will see.
    pub(super) fn is_read(&self) -> bool {
        self.open_streams.iter().any(|open| *open > 0) && !self.screen.is_broken()
    }

    pub(super) fn on_chunk(&mut self, chunk: Chunk) {
        if !chunk.bytes.is_empty() {
            return self.output.feed(chunk.rank, chunk.stream, &chunk.bytes, Instant::now());
        }
        let open = &mut self.open_streams[chunk.rank as usize];
        *open -= 1;
        if *open == 0 {
            self.output.finish(chunk.rank, Instant::now());
        }
    }

    /// Passes on what is ready to be seen.
    pub(super) fn show(&mut self) {
        let pieces = RefCell::new(Vec::new());
        let to = |stream| Pieces { stream, pieces: &pieces };
        self.output.drain(&mut to(Stream::Out), &mut to(Stream::Err)).expect("memory takes everything");
        for (stream, bytes) in pieces.into_inner() {
            self.screen.write(stream, bytes);
        }
    }

    /// A line of our own, in its place among those of the ranks.
    pub(super) fn say(&mut self, line: &str) {
        self.note(&format!("tpurun: {line}"));
    }

    /// A text of several lines.
    pub(super) fn note(&mut self, text: &str) {
        self.output.note(text);
        self.show();
    }

    /// A full disk is no reader that has left: the output of the ranks is wanted, and not there. Returns the exit code
    /// of a job that ends with `code`; `logs` is where the output is, too.
    pub(super) async fn say_what_is_lost(&mut self, code: i32, logs: &str) -> i32 {
        let Some((stream, error)) = self.screen.error() else { return code };
        let (lost, other) = match stream {
            Stream::Out => ("standard output", Stream::Err),
            Stream::Err => ("standard error", Stream::Out),
        };
        let text =
            format!("tpurun: error: cannot write to {lost}: {error} (the logs of the ranks are in {logs})\n");
        self.screen.write(other, text.into_bytes());
        // The wait has a bound, as perhaps nobody reads that stream either.
        let _ = tokio::time::timeout(DRAIN, self.screen.flushed()).await;
        if code == 0 || code == 128 + rustix::process::Signal::PIPE.as_raw() { LOST_OUTPUT } else { code }
    }
}

/// Takes what is written to one of the two streams, in order with what is written to the other.
struct Pieces<'a> {
    stream: Stream,
    pieces: &'a RefCell<Vec<(Stream, Vec<u8>)>>,
}

impl io::Write for Pieces<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pieces.borrow_mut().push((self.stream, bytes.to_vec()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Time for readers of the output after the last rank has ended.
pub(super) const DRAIN: Duration = Duration::from_millis(500);
