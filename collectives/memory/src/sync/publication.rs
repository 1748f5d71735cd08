//! The verdict: one text that fails a communicator for all its ranks, written once.
//!
//! A rank that wants to fail it claims the word, writes the text, makes it take effect (poisons the meeting),
//! and says that it stands; the first one stands for good. One that turns out to be too late is taken back,
//! and then it is the next one's turn. A writer that dies over it has left its number in the word: any rank
//! that looks takes over and speaks for it, so that no reader ever sees half a text and nobody waits for the
//! dead.

use std::time::{Duration, Instant};

use super::{EVERYBODY, Ordering, Word, yield_now};

const NONE: u32 = 0;
const WRITING: u32 = 1;
const STANDS: u32 = 2;
const STATE: u32 = 3;
const WRITER_SHIFT: u32 = 2;

/// The word in shared memory; all zeroes is no verdict.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Publication {
    word: Word,
}

/// The state of a writer at a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writer {
    /// It may still finish.
    Alive,
    /// It never will.
    Gone,
    /// It has had more time than anybody needs.
    Silent,
}

/// The state of the word once nobody writes any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settled {
    /// No verdict.
    Nothing,
    /// The text may be read, and stays.
    Stands,
    /// A writer that is not known to be dead does not finish.
    Silent,
}

impl Publication {
    /// Lets `write` write the text, unless there is one; `take_effect` decides whether it stands. Returns what
    /// then is: `Nothing` only when this one had no effect.
    pub fn publish(
        &self,
        writer: u32,
        write: impl Fn(),
        take_effect: impl Fn() -> bool,
        look_at: impl FnMut(u32) -> Writer,
        speak_for: impl Fn(u32),
    ) -> Settled {
        let mut look_at = look_at;
        loop {
            if self.claims(writer) {
                write();
                // A rank that sees the effect before the state waits for it.
                let stands = take_effect();
                self.settle(if stands { STANDS } else { NONE });
                return if stands { Settled::Stands } else { Settled::Nothing };
            }
            match self.settled(|| writer, &mut look_at, &speak_for) {
                // The one before was taken back; ours may be the one that counts.
                Settled::Nothing => {}
                settled => return settled,
            }
        }
    }

    /// Returns the verdict, after waiting for a writer that is writing it; `speak_for` writes the text of a
    /// dead writer, in the place of what it left, and makes it take effect. `reader` is who we are, which is
    /// asked for only then.
    pub fn settled(
        &self,
        reader: impl Fn() -> u32,
        mut look_at: impl FnMut(u32) -> Writer,
        speak_for: impl Fn(u32),
    ) -> Settled {
        loop {
            // Acquire pairs with the release in `settle`: the text is whole.
            let seen = self.word.atomic().load(Ordering::Acquire);
            match seen & STATE {
                NONE => return Settled::Nothing,
                WRITING => {}
                _ => return Settled::Stands,
            }
            match look_at(seen >> WRITER_SHIFT) {
                Writer::Alive => self.pause(seen),
                Writer::Silent => return Settled::Silent,
                Writer::Gone => {
                    if self.swap(seen, WRITING | reader() << WRITER_SHIFT) {
                        speak_for(seen >> WRITER_SHIFT);
                        self.settle(STANDS);
                    }
                }
            }
        }
    }

    /// Waits for a verdict that stands, at most until then; whoever writes it wakes the caller. The caller takes over
    /// from no writer.
    pub fn await_standing(&self, deadline: Option<Instant>) -> bool {
        loop {
            // Acquire: as in `settled`.
            let seen = self.word.atomic().load(Ordering::Acquire);
            if seen & STATE == STANDS {
                return true;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
            self.word.sleep(seen, deadline);
        }
    }

    /// The first step of publishing; a writer that dies after it is spoken for.
    #[inline]
    pub fn claims(&self, writer: u32) -> bool {
        self.swap(NONE, WRITING | writer << WRITER_SHIFT)
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        self.word.atomic().compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn settle(&self, state: u32) {
        self.word.atomic().store(state, Ordering::Release);
        self.word.wake(EVERYBODY);
    }

    /// Until the writer is done, or it is time to look at it again.
    fn pause(&self, seen: u32) {
        const MOMENT: Duration = Duration::from_millis(1);
        if cfg!(tpurun_loom) {
            // The death of a writer wakes nobody, and models have no deadlines.
            yield_now();
        } else {
            self.word.sleep(seen, Some(Instant::now() + MOMENT));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::AtomicU32;
    use crate::sync::model::{Arc, model, spawn};

    /// Writers of the models, and what they say; `0` is a writer that dies.
    const DYING: u32 = 0;
    const HEIR: u32 = 9;

    #[derive(Default)]
    struct Shared {
        publication: Publication,
        // Relaxed, so that only the protocol's own orderings make them visible. Twice the same is whole.
        text: [AtomicU32; 2],
        effect: AtomicU32,
        dead: AtomicU32,
    }

    impl Shared {
        fn write(&self, text: u32) {
            self.text[0].store(text, Ordering::Relaxed);
            self.text[1].store(text, Ordering::Relaxed);
        }

        fn take_effect(&self) -> bool {
            self.effect.store(1, Ordering::Release);
            true
        }

        fn look_at(&self, writer: u32) -> Writer {
            let dead = writer == DYING && self.dead.load(Ordering::Acquire) == 1;
            if dead { Writer::Gone } else { Writer::Alive }
        }

        fn speak(&self) {
            self.write(HEIR);
            self.take_effect();
        }

        fn fail(&self, writer: u32) -> u32 {
            let settled = self.publication.publish(
                writer,
                || self.write(writer),
                || self.take_effect(),
                |writer| self.look_at(writer),
                |_| self.speak(),
            );
            assert_eq!(settled, Settled::Stands);
            self.text()
        }

        fn read(&self, reader: u32) -> Option<u32> {
            let settled =
                self.publication.settled(|| reader, |writer| self.look_at(writer), |_| self.speak());
            (settled == Settled::Stands).then(|| self.text())
        }

        fn text(&self) -> u32 {
            let text = [0, 1].map(|half| self.text[half].load(Ordering::Relaxed));
            assert_eq!(text[0], text[1], "half of a text");
            assert_eq!(self.effect.load(Ordering::Acquire), 1, "a verdict that stands has taken effect");
            text[0]
        }
    }

    /// Two ranks fail the communicator at once: both raise the same text, and it stays.
    #[test]
    fn loom_the_first_verdict_stands() {
        model(|| {
            let shared = Arc::new(Shared::default());
            let other = {
                let shared = shared.clone();
                spawn(move || shared.fail(2))
            };
            let mine = shared.fail(1);
            assert_eq!(other.join().expect("the other rank does not panic"), mine);
            assert_eq!(shared.read(1), Some(mine));
        });
    }

    /// One verdict is taken back because it came too late; the other one must not be lost over it.
    #[test]
    fn loom_a_verdict_beside_one_that_is_taken_back_stands() {
        model(|| {
            let shared = Arc::new(Shared::default());
            let late = {
                let shared = shared.clone();
                spawn(move || {
                    let write = || shared.write(2);
                    let look_at = |writer| shared.look_at(writer);
                    shared.publication.publish(2, write, || false, look_at, |_| shared.speak())
                })
            };
            assert_eq!(shared.fail(1), 1);
            late.join().expect("the late rank does not panic");
            assert_eq!(shared.read(1), Some(1));
        });
    }

    /// A writer dies after `steps` steps of publishing; two others look, all see one whole text.
    fn a_writer_dies(steps: u32) {
        model(move || {
            let shared = Arc::new(Shared::default());
            let dying = {
                let shared = shared.clone();
                spawn(move || {
                    assert!(shared.publication.claims(DYING));
                    if steps > 0 {
                        shared.text[0].store(1, Ordering::Relaxed);
                    }
                    if steps > 1 {
                        shared.text[1].store(1, Ordering::Relaxed);
                        shared.take_effect();
                    }
                    shared.dead.store(1, Ordering::Release);
                })
            };
            let other = {
                let shared = shared.clone();
                spawn(move || shared.read(2))
            };
            let seen = shared.read(1);
            dying.join().expect("a death is no panic");
            let other = other.join().expect("the other rank does not panic");
            let last = shared.read(1);
            assert_eq!(last, Some(HEIR), "somebody speaks for the dead");
            for text in [seen, other].into_iter().flatten() {
                assert_eq!(Some(text), last, "one text for all");
            }
        });
    }

    #[test]
    fn loom_a_writer_that_dies_before_its_text_is_spoken_for() {
        a_writer_dies(0);
    }

    #[test]
    fn loom_half_a_text_is_never_read() {
        a_writer_dies(1);
    }

    #[test]
    fn loom_a_writer_that_dies_after_its_effect_is_spoken_for() {
        a_writer_dies(2);
    }

    /// A writer dies over its text while one sleeps until there is one and another one has one to say, too: the sleeper
    /// wakes up, and reads the whole of a text.
    #[test]
    fn loom_who_waits_for_a_dead_writer_reads_its_heir() {
        model(|| {
            let shared = Arc::new(Shared::default());
            let dying = {
                let shared = shared.clone();
                spawn(move || {
                    if shared.publication.claims(DYING) {
                        shared.text[0].store(1, Ordering::Relaxed);
                        shared.dead.store(1, Ordering::Release);
                    }
                })
            };
            let sleeper = {
                let shared = shared.clone();
                spawn(move || {
                    assert!(shared.publication.await_standing(None));
                    shared.text()
                })
            };
            let said = shared.fail(2);
            dying.join().expect("a death is no panic");
            assert_eq!(sleeper.join().expect("the sleeper wakes up"), said);
        });
    }
}
