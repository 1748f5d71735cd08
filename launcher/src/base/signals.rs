//! Signals as one stream of what they ask for.

use std::io;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// From the moment it exists, these signals do nothing but show up here.
#[derive(Debug)]
pub(crate) struct Signals<T> {
    streams: Vec<(Stream, T)>,
}

impl<T: Copy> Signals<T> {
    /// Handles each signal and gives it a meaning.
    pub(crate) fn new(meanings: impl IntoIterator<Item = (Signal, T)>) -> io::Result<Signals<T>> {
        let open =
            |(number, meaning): (Signal, T)| Ok((signal(SignalKind::from_raw(number.as_raw()))?, meaning));
        Ok(Signals { streams: meanings.into_iter().map(open).collect::<io::Result<_>>()? })
    }

    /// The next one. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> T {
        std::future::poll_fn(|context| {
            for (stream, meaning) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*meaning);
                }
            }
            Poll::Pending
        })
        .await
    }
}
