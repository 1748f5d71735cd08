//! The agent's knowledge about the ranks that are waited for, for the text of a timeout: the engine itself
//! knows only who is missing, not what they do instead.
//!
//! The agent is the only writer. A generation says whether the words are whole: odd while they change.

use super::Segment;
use tpurun_memory::sync::{AtomicU32, Ordering};
use tpurun_memory::text::head;

impl Segment {
    /// Replaces the note; an empty one takes it away.
    pub fn set_note(&self, text: &str) {
        let generation = self.note_word(GENERATION);
        let before = generation.load(Ordering::Relaxed) & !1;
        generation.store(before.wrapping_add(1), Ordering::Relaxed);
        // No word of the note may be seen before the odd generation is.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        let bytes = head(text, NOTE_BYTES).as_bytes();
        self.note_word(BYTES).store(bytes.len() as u32, Ordering::Relaxed);
        for (index, chunk) in bytes.chunks(4).enumerate() {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            self.note_word(TEXT + index * 4).store(u32::from_le_bytes(word), Ordering::Relaxed);
        }
        generation.store(before.wrapping_add(2), Ordering::Release);
    }

    /// The note with a line break before each of its lines; empty when there is none, or it changes now.
    pub fn note(&self) -> String {
        let generation = self.note_word(GENERATION).load(Ordering::Acquire);
        let bytes = (self.note_word(BYTES).load(Ordering::Relaxed) as usize).min(NOTE_BYTES);
        let word = |index: usize| self.note_word(TEXT + index * 4).load(Ordering::Relaxed).to_le_bytes();
        let text: Vec<u8> = (0..bytes.div_ceil(4)).flat_map(word).take(bytes).collect();
        // Pairs with the release fence: a reader that has read a later word sees a later generation.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        if generation % 2 == 1 || self.note_word(GENERATION).load(Ordering::Relaxed) != generation {
            return String::new();
        }
        String::from_utf8_lossy(&text).lines().map(|line| format!("\n  {line}")).collect()
    }

    fn note_word(&self, word: usize) -> &AtomicU32 {
        self.region.at(self.layout.header() + NOTE + word)
    }
}

/// In the header's page, behind everything else.
const NOTE: usize = 2048;
const GENERATION: usize = 0;
const BYTES: usize = 4;
const TEXT: usize = 8;
pub(super) const NOTE_BYTES: usize = 1536;
const _: () = assert!(NOTE + TEXT + NOTE_BYTES <= 4096 && super::words::TUNING_END <= NOTE);

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::super::Settings;
    use super::*;
    use crate::hosts::Hosts;
    use crate::membership::Membership;
    use crate::supervise::Supervised;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    fn segment() -> (Segment, Supervised) {
        let members = Membership { name: "dp0".into(), rank: 0, world_ranks: vec![0], epoch: 0 };
        let settings = Settings::default();
        let (segment, fd) =
            Segment::create(members, Hosts::one(1), settings, Duration::ZERO).expect("the host has memory");
        (segment, Supervised::open(&fd, 1).expect("a segment"))
    }

    #[test]
    fn ranks_read_what_the_agent_wrote_last() {
        let (segment, agent) = segment();
        assert_eq!(segment.note(), "");
        agent.note("rank 3 is sleeping\nrank 4 is computing");
        assert_eq!(segment.note(), "\n  rank 3 is sleeping\n  rank 4 is computing");
        agent.note("");
        assert_eq!(segment.note(), "");
        agent.note(&"ü".repeat(5000));
        assert_eq!(segment.note().len(), "\n  ".len() + NOTE_BYTES);
        assert_eq!(agent.name(), "dp0");
    }

    #[test]
    fn a_note_that_changes_is_whole_or_absent() {
        let (segment, agent) = segment();
        let texts = ["a".repeat(1000), "b".repeat(1500)];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20_000 {
                    agent.note(&texts[round % 2]);
                }
                is_over.store(true, std::sync::atomic::Ordering::Release);
            });
            while !is_over.load(std::sync::atomic::Ordering::Acquire) {
                let note = segment.note();
                let note = note.trim_start();
                assert!(note.is_empty() || texts.iter().any(|text| text == note), "{note}");
            }
        });
        assert_eq!(segment.note().trim_start(), texts[1]);
    }

    #[test]
    fn a_length_that_can_not_be_is_cut() {
        let (segment, agent) = segment();
        agent.note("x");
        segment.note_word(BYTES).store(u32::MAX, Ordering::Relaxed);
        assert!(segment.note().len() <= NOTE_BYTES + "\n  ".len());
    }
}
