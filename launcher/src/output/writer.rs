//! Writes to the terminal on threads of their own: a pager or a slow pipe must not keep the agent from
//! noticing a signal, a dead rank or its own end.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};

use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::Notify;

use crate::output::Stream;

/// The two standard streams of the launcher.
#[derive(Debug)]
pub(crate) struct StandardStreams {
    out: mpsc::Sender<Piece>,
    /// The same queue as `out` when both go to the same place, where order can be seen.
    err: mpsc::Sender<Piece>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    queued_bytes: AtomicUsize,
    /// By stream: nothing more can be written.
    is_broken: [AtomicBool; 2],
    /// The first reason that is not that a reader has left.
    error: OnceLock<(Stream, io::Error)>,
    /// Something was written, or never will be.
    progress: Notify,
}

#[derive(Debug)]
struct Piece {
    stream: Stream,
    bytes: Vec<u8>,
}

impl StandardStreams {
    pub(crate) fn new() -> io::Result<StandardStreams> {
        StandardStreams::over(
            io::stdout().as_fd().try_clone_to_owned()?,
            io::stderr().as_fd().try_clone_to_owned()?,
        )
    }

    fn over(out: OwnedFd, err: OwnedFd) -> io::Result<StandardStreams> {
        let state = Arc::new(State::default());
        let is_shared = is_same_file(&out, &err)?;
        let out_tx = start_writer([out.try_clone()?, err.try_clone()?], state.clone())?;
        let err_tx = if is_shared { out_tx.clone() } else { start_writer([out, err], state.clone())? };
        Ok(StandardStreams { out: out_tx, err: err_tx, state })
    }

    /// Queues bytes; on one terminal, what was queued before for either stream is written before.
    pub(crate) fn write(&self, stream: Stream, bytes: Vec<u8>) {
        if !bytes.is_empty() && !self.state.is_broken[stream as usize].load(Ordering::Acquire) {
            self.state.queued_bytes.fetch_add(bytes.len(), Ordering::AcqRel);
            let queue = if stream == Stream::Out { &self.out } else { &self.err };
            let _ = queue.send(Piece { stream, bytes });
        }
    }

    /// Whether more should be queued; when not, the ranks that write wait, as they would without us.
    pub(crate) fn has_room(&self) -> bool {
        self.state.queued_bytes.load(Ordering::Acquire) < QUEUE_BYTES
    }

    /// Whoever read our output has left, or there is no room for it.
    pub(crate) fn is_broken(&self) -> bool {
        self.state.is_broken.iter().any(|is_broken| is_broken.load(Ordering::Acquire))
    }

    /// The stream that could not be written, and why, unless its reader has left.
    pub(crate) fn error(&self) -> Option<(Stream, &io::Error)> {
        self.state.error.get().map(|(stream, error)| (*stream, error))
    }

    /// Waits until there is room.
    pub(crate) async fn room(&self) {
        self.wait(|| self.has_room() || self.is_broken()).await;
    }

    /// Waits until everything is written that can be.
    pub(crate) async fn flushed(&self) {
        self.wait(|| self.state.queued_bytes.load(Ordering::Acquire) == 0).await;
    }

    async fn wait(&self, is_done: impl Fn() -> bool) {
        loop {
            let progress = self.state.progress.notified();
            if is_done() {
                return;
            }
            progress.await;
        }
    }
}

fn is_same_file(a: &OwnedFd, b: &OwnedFd) -> io::Result<bool> {
    let (a, b) = (rustix::fs::fstat(a)?, rustix::fs::fstat(b)?);
    Ok((a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

/// Its thread is never joined: it may be in the middle of a write that nobody will ever read.
fn start_writer(streams: [OwnedFd; 2], state: Arc<State>) -> io::Result<mpsc::Sender<Piece>> {
    let (tx, rx) = mpsc::channel();
    std::thread::Builder::new().name("screen".into()).spawn(move || write_all(rx, streams, &state))?;
    Ok(tx)
}

fn write_all(rx: mpsc::Receiver<Piece>, streams: [OwnedFd; 2], state: &State) {
    let [mut out, mut err] = streams.map(File::from);
    for Piece { stream, bytes } in rx {
        let file = if stream == Stream::Out { &mut out } else { &mut err };
        let is_broken = &state.is_broken[stream as usize];
        if !is_broken.load(Ordering::Acquire)
            && let Err(error) = write_patiently(file, &bytes)
        {
            if error.kind() != io::ErrorKind::BrokenPipe {
                // The first one stands.
                let _ = state.error.set((stream, error));
            }
            is_broken.store(true, Ordering::Release);
        }
        state.queued_bytes.fetch_sub(bytes.len(), Ordering::AcqRel);
        state.progress.notify_one();
    }
}

/// Another process may have made the stream non-blocking.
fn write_patiently(stream: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(&stream, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

const QUEUE_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::io::Read;

    fn run(future: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future);
    }

    #[test]
    fn a_reader_that_waits_holds_up_nobody_and_loses_nothing() {
        let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let screen = StandardStreams::over(write_end.try_clone().unwrap(), write_end).unwrap();
        while screen.has_room() {
            screen.write(Stream::Out, vec![b'o'; 10_000]);
            screen.write(Stream::Err, vec![b'e'; 10_000]);
        }
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            File::from(read_end).read_to_end(&mut bytes).unwrap();
            bytes.len()
        });
        run(screen.flushed());
        assert!(screen.has_room());
        drop(screen);
        assert!(reader.join().unwrap() >= QUEUE_BYTES);
    }

    #[test]
    fn one_stream_goes_on_while_the_other_waits() {
        let (_kept, full) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (read_end, free) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let screen = StandardStreams::over(full, free).unwrap();
        screen.write(Stream::Out, vec![b'o'; QUEUE_BYTES / 2]);
        screen.write(Stream::Err, b"note".to_vec());
        let mut bytes = [0; 4];
        File::from(read_end).read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"note");
    }

    #[test]
    fn a_reader_that_left_is_noticed() {
        let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        drop(read_end);
        let screen = StandardStreams::over(write_end.try_clone().unwrap(), write_end).unwrap();
        screen.write(Stream::Out, vec![b'x'; 10]);
        run(screen.flushed());
        assert!(screen.is_broken() && screen.error().is_none());
    }

    #[test]
    fn a_full_disk_is_told_and_the_other_stream_goes_on() {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let (read_end, free) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let screen = StandardStreams::over(full.into(), free).unwrap();
        screen.write(Stream::Out, vec![b'x'; 10]);
        run(screen.flushed());
        let (stream, error) = screen.error().unwrap();
        assert_eq!((stream, error.kind()), (Stream::Out, io::ErrorKind::StorageFull));
        assert!(screen.is_broken());
        screen.write(Stream::Err, b"why".to_vec());
        run(screen.flushed());
        let mut bytes = [0; 3];
        File::from(read_end).read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"why");
    }
}
