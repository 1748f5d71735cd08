//! The op queue: asynchronous operations on their way from the callers to the threads that run them.
//!
//! Bounded: a full queue pushes back on the caller. Producers take turns under a lock, consumers under
//! another one: the progress thread, and any thread that waits for an operation and runs it instead.

use std::collections::VecDeque;
use std::time::Instant;

use super::{AtomicU32, Doorbell, Mutex, MutexGuard, Ordering};

/// A bounded queue that can be closed; what was pushed before is still popped.
#[derive(Debug)]
pub struct OpQueue<T> {
    tx: Mutex<lane::Tx<T>>,
    rx: Mutex<Rx<T>>,
    pushed: Doorbell,
    popped: Doorbell,
    closed: AtomicU32,
}

#[derive(Debug)]
struct Rx<T> {
    lane: lane::Rx<T>,
    /// Looked at, and not popped yet; older than what is in the lane.
    ahead: VecDeque<T>,
}

/// The consuming end, which one thread has at a time.
#[derive(Debug)]
pub struct Consumer<'a, T> {
    queue: &'a OpQueue<T>,
    rx: MutexGuard<'a, Rx<T>>,
}

/// The result of waiting for items.
#[derive(Debug)]
pub enum Consume<'a, T> {
    /// There are items, for this consumer alone.
    Some(Consumer<'a, T>),
    /// The queue is closed, and empty for ever.
    Closed,
    /// It was empty until the deadline.
    Late,
}

impl<T> OpQueue<T> {
    /// Makes a queue with room for `capacity` items.
    pub fn new(capacity: usize) -> Self {
        let (tx, rx) = lane::new(capacity);
        Self {
            tx: Mutex::new(tx),
            rx: Mutex::new(Rx { lane: rx, ahead: VecDeque::new() }),
            pushed: Doorbell::default(),
            popped: Doorbell::default(),
            closed: AtomicU32::new(0),
        }
    }

    /// Pushes, waiting for room until `deadline`; gives the item back when the queue is closed or stays full.
    /// A thread that waits for items learns of it when it is announced.
    pub fn push(&self, mut item: T, deadline: Option<Instant>) -> Result<(), T> {
        loop {
            let seen = self.popped.rings();
            {
                let mut tx = self.tx.lock().expect("pushing does not panic");
                // Under the lock that `close` takes: nothing is pushed behind a consumer that saw the end.
                if self.closed.load(Ordering::Relaxed) != 0 {
                    return Err(item);
                }
                match tx.try_push(item) {
                    Ok(()) => return Ok(()),
                    Err(back) => item = back,
                }
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(item);
            }
            self.popped.wait(seen, deadline);
        }
    }

    /// Wakes the threads that wait for items.
    #[inline]
    pub fn announce(&self) {
        self.pushed.ring();
    }

    /// The consuming end of a queue that is not empty, waiting for both until `deadline`.
    pub fn consume(&self, deadline: Option<Instant>) -> Consume<'_, T> {
        loop {
            let seen = self.pushed.rings();
            // Read before looking for items: what was pushed before the close is then found below.
            let closed = self.closed.load(Ordering::Acquire) != 0;
            let rx = self.rx.lock().expect("consuming does not panic");
            let mut consumer = Consumer { queue: self, rx };
            if !consumer.front(1).is_empty() {
                return Consume::Some(consumer);
            }
            drop(consumer);
            if closed {
                return Consume::Closed;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Consume::Late;
            }
            self.pushed.wait(seen, deadline);
        }
    }

    /// The consuming end, unless somebody has it.
    #[inline]
    pub fn try_consume(&self) -> Option<Consumer<'_, T>> {
        let rx = self.rx.try_lock().ok()?;
        Some(Consumer { queue: self, rx })
    }

    /// Refuses further pushes and lets the consumer run dry.
    #[inline]
    pub fn close(&self) {
        {
            let _tx = self.tx.lock().expect("pushing does not panic");
            self.closed.store(1, Ordering::Release);
        }
        self.pushed.ring();
        self.popped.ring();
    }
}

impl<T> Consumer<'_, T> {
    /// The oldest items, at most so many. They stay where they are.
    pub fn front(&mut self, most: usize) -> &[T] {
        while self.rx.ahead.len() < most
            && let Some(item) = self.rx.lane.try_pop()
        {
            self.rx.ahead.push_back(item);
            self.queue.popped.ring();
        }
        let items = self.rx.ahead.make_contiguous();
        &items[..items.len().min(most)]
    }

    /// Takes the oldest item.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        self.front(1);
        self.rx.ahead.pop_front()
    }
}

#[cfg(not(tpurun_loom))]
mod lane {
    use ringbuf::traits::{Consumer, Producer, Split};
    use ringbuf::{HeapCons, HeapProd, HeapRb};

    pub(super) struct Tx<T>(HeapProd<T>);
    pub(super) struct Rx<T>(HeapCons<T>);

    #[inline]
    pub(super) fn new<T>(capacity: usize) -> (Tx<T>, Rx<T>) {
        let (tx, rx) = HeapRb::new(capacity).split();
        (Tx(tx), Rx(rx))
    }

    impl<T> Tx<T> {
        #[inline]
        pub(super) fn try_push(&mut self, item: T) -> Result<(), T> {
            self.0.try_push(item)
        }
    }

    impl<T> Rx<T> {
        #[inline]
        pub(super) fn try_pop(&mut self) -> Option<T> {
            self.0.try_pop()
        }
    }

    impl<T> std::fmt::Debug for Tx<T> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Tx")
        }
    }

    impl<T> std::fmt::Debug for Rx<T> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Rx")
        }
    }
}

// loom cannot see inside ringbuf: the same interface over a locked deque.
#[cfg(tpurun_loom)]
mod lane {
    use std::collections::VecDeque;

    use loom::sync::{Arc, Mutex};

    #[derive(Debug)]
    pub(super) struct Tx<T>(Arc<Mutex<VecDeque<T>>>, usize);
    #[derive(Debug)]
    pub(super) struct Rx<T>(Arc<Mutex<VecDeque<T>>>);

    #[inline]
    pub(super) fn new<T>(capacity: usize) -> (Tx<T>, Rx<T>) {
        let items = Arc::new(Mutex::new(VecDeque::new()));
        (Tx(items.clone(), capacity), Rx(items))
    }

    impl<T> Tx<T> {
        #[inline]
        pub(super) fn try_push(&mut self, item: T) -> Result<(), T> {
            let mut items = self.0.lock().expect("the model never panics under this lock");
            if items.len() == self.1 {
                return Err(item);
            }
            items.push_back(item);
            Ok(())
        }
    }

    impl<T> Rx<T> {
        #[inline]
        pub(super) fn try_pop(&mut self) -> Option<T> {
            self.0.lock().expect("the model never panics under this lock").pop_front()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::model::{Arc, model, spawn};

    /// Room for one, three pushes: the producer sleeps on a full queue, nothing is lost or reordered, and
    /// the consumer sees the end exactly after the last item.
    #[test]
    fn loom_full_then_closed() {
        model(|| {
            let queue = Arc::new(OpQueue::new(1));
            let producer = {
                let queue = queue.clone();
                spawn(move || {
                    for item in 0..3 {
                        queue.push(item, None).expect("the queue is open");
                        queue.announce();
                    }
                    queue.close();
                    assert_eq!(queue.push(3, None), Err(3), "a closed queue gives the item back");
                })
            };
            for item in 0..3 {
                assert_eq!(pop(&queue), Some(item));
            }
            assert_eq!(pop(&queue), None);
            producer.join().expect("the producer does not panic");
        });
    }

    /// Closing frees a producer that sleeps on a full queue.
    #[test]
    fn loom_close_frees_a_blocked_producer() {
        model(|| {
            let queue = Arc::new(OpQueue::new(1));
            queue.push(0, None).expect("there is room for one");
            let producer = {
                let queue = queue.clone();
                spawn(move || queue.push(1, None))
            };
            queue.close();
            assert_eq!(producer.join().expect("the producer does not panic"), Err(1));
            assert_eq!(pop(&queue), Some(0));
            assert_eq!(pop(&queue), None);
        });
    }

    /// A consumer that looks further than it pops leaves the rest to the other one, also when that slept
    /// meanwhile.
    #[test]
    fn loom_what_one_leaves_the_other_finds() {
        model(|| {
            let queue = Arc::new(OpQueue::new(2));
            let thread = {
                let queue = queue.clone();
                spawn(move || {
                    let mut popped = vec![];
                    while let Some(item) = pop(&queue) {
                        popped.push(item);
                    }
                    popped
                })
            };
            for item in 0..2 {
                queue.push(item, None).expect("the queue is open");
                queue.announce();
            }
            let mut all = queue.try_consume().map_or(vec![], |mut consumer| {
                consumer.front(2);
                consumer.pop().into_iter().collect()
            });
            queue.close();
            all.extend(thread.join().expect("the consumer does not panic"));
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        });
    }

    fn pop(queue: &OpQueue<i32>) -> Option<i32> {
        match queue.consume(None) {
            Consume::Some(mut consumer) => consumer.pop(),
            Consume::Closed | Consume::Late => None,
        }
    }
}
