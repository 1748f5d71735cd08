//! The handle of a thread that its owner waits for.

use std::thread::{self, JoinHandle};

use crate::process::Owner;

/// A thread that has ended once this is dropped. Its owner must have told it to end before.
///
/// Two drops do not wait. A process that was forked has a copy of the handle, but not the thread. A thread that drops
/// its own handle, as a callback may, cannot wait for itself: it goes on to its end alone.
#[derive(Debug)]
pub struct Joined {
    /// Until the drop.
    thread: Option<JoinHandle<()>>,
    owner: Owner,
}

impl Joined {
    /// Waits for this thread at its drop.
    pub fn new(thread: JoinHandle<()>) -> Self {
        Self { thread: Some(thread), owner: Owner::here() }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let Some(handle) = self.thread.take() else { return };
        if !self.owner.is_here() {
            // To let go of the handle would detach a thread that this process does not have.
            std::mem::forget(handle);
        } else if handle.thread().id() != thread::current().id() {
            let name = handle.thread().name().unwrap_or_default().to_owned();
            if handle.join().is_err() {
                tracing::error!(thread = name, "a thread has panicked: this is a bug in tpurun");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::sync_channel;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_drop_waits_for_the_end() {
        let has_ended = Arc::new(AtomicBool::new(false));
        let ends = has_ended.clone();
        let joined = Joined::new(thread::spawn(move || {
            thread::yield_now();
            ends.store(true, Ordering::Relaxed);
        }));
        drop(joined);
        assert!(has_ended.load(Ordering::Relaxed));
    }

    #[test]
    fn a_thread_does_not_wait_for_itself() {
        let own = Arc::new(Mutex::new(None::<Joined>));
        let (told, hears) = sync_channel(1);
        let mut place = own.lock().unwrap();
        let taken = own.clone();
        *place = Some(Joined::new(thread::spawn(move || {
            drop(taken.lock().unwrap().take());
            told.send(()).unwrap();
        })));
        drop(place);
        hears.recv_timeout(Duration::from_secs(60)).expect("the thread goes on");
    }

    #[test]
    fn a_panic_is_no_panic_of_the_owner() {
        drop(Joined::new(thread::spawn(|| panic!("as a thread does that has a bug"))));
    }
}
