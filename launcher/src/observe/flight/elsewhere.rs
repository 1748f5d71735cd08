//! The ranks of other nodes as their agents describe them: a document for each node, which the agent here keeps in
//! the run directory while somebody looks. Nothing in a document is believed before it is checked.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use serde_json::Value;
use tpurun_protocol::board;

use super::{Communicator, Flight, RankFlight, dump};
use crate::base::private;

/// A document that is checked and written, on a thread of its own: neither it nor a slow disk may hold up the agent.
#[derive(Debug)]
pub(crate) struct DocumentWriting(Option<JoinHandle<()>>);

impl DocumentWriting {
    /// Starts to write the document of the node that has these ranks. Anything that is no document of them is not
    /// written.
    ///
    /// # Errors
    /// When there can be no thread.
    pub(crate) fn start(
        run_dir: &Path,
        node: u32,
        ranks: Range<u32>,
        document: Vec<u8>,
    ) -> io::Result<DocumentWriting> {
        let (path, now_ns) = (path(run_dir, node), board::now_ns());
        let write = move || {
            let Some(flight) = parse(&document, ranks, now_ns) else { return };
            let Ok(()) = private::folder(path.parent().expect("it is in a folder")) else { return };
            // A person who looks sees that nothing has come.
            let _ = serde_json::to_vec(&flight).map(|text| dump::replace(&path, &text));
        };
        Ok(DocumentWriting(Some(std::thread::Builder::new().name("elsewhere".into()).spawn(write)?)))
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.0.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// Half a file is not left behind.
impl Drop for DocumentWriting {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // One that panicked has written nothing.
            let _ = thread.join();
        }
    }
}

/// Makes the document that is sent: for each rank the operations that it waits for and the last ones, fewer of these
/// where there are many. None where even that is too much.
pub(crate) fn document(mut flight: Flight) -> Option<Vec<u8>> {
    RECORDS.into_iter().find_map(|kept| {
        for rank in &mut flight.ranks {
            let waits: Vec<u64> = rank.waits.iter().filter_map(|wait| wait.seq).collect();
            for lane in &mut rank.lanes {
                let first = lane.records.len().saturating_sub(kept);
                let oldest = lane.oldest_pending().map(|record| record.number);
                let mut index = 0;
                lane.records.retain(|record| {
                    index += 1;
                    let is_awaited = !record.is_message && waits.contains(&record.seq);
                    index > first || is_awaited || Some(record.number) == oldest
                });
            }
            let first = rank.runs.len().saturating_sub(kept);
            rank.runs.drain(..first);
        }
        serde_json::to_vec(&flight).ok().filter(|text| text.len() <= MOST_BYTES)
    })
}

/// Reads the document that another node has sent about its ranks, with times by the clock of this node. None when it
/// is something else.
fn parse(document: &[u8], ranks: Range<u32>, now_ns: u64) -> Option<Flight> {
    (document.len() <= MOST_BYTES).then_some(())?;
    let mut value: Value = serde_json::from_slice(document).ok()?;
    clean(&mut value);
    let mut flight = Flight::parse(&serde_json::to_vec(&value).ok()?).ok()?;
    let are_its = flight.ranks.iter().map(|rank| rank.rank).eq(ranks.clone());
    let have_places = |group: &Communicator| group.members.len() == group.size as usize;
    let members = flight.communicators.iter_mut().flat_map(|group| &mut group.members);
    members.for_each(|member| *member = member.filter(|rank| ranks.contains(rank)));
    flight.shift(now_ns);
    (are_its && flight.communicators.iter().all(have_places)).then_some(flight)
}

/// Reads the last document of a node.
pub(crate) fn read(run_dir: &Path, node: u32) -> Option<Flight> {
    let path = path(run_dir, node);
    let size = fs::metadata(&path).ok()?.len();
    (size <= 2 * MOST_BYTES as u64).then_some(())?;
    Flight::parse(&fs::read(&path).ok()?).ok()
}

/// Texts are shown on terminals.
fn clean(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => {
            *text = text.replace(char::is_control, "\u{fffd}");
        }
        Value::Array(values) => values.iter_mut().for_each(clean),
        Value::Object(values) => values.values_mut().for_each(clean),
        _ => {}
    }
}

impl Flight {
    /// Tells the same by a clock that shows `now_ns` when this was taken.
    fn shift(&mut self, now_ns: u64) {
        let ago = self.taken_ns;
        // 0 is never.
        let shift = |ns: &mut u64| {
            if *ns > 0 {
                *ns = now_ns.saturating_sub(ago.saturating_sub(*ns));
            }
        };
        for rank in &mut self.ranks {
            rank.waits.iter_mut().for_each(|wait| shift(&mut wait.since_ns));
            for run in &mut rank.runs {
                run.done_ns.iter_mut().for_each(shift);
                shift(&mut run.begun_ns);
            }
            for lane in &mut rank.lanes {
                lane.blocked_since_ns.iter_mut().for_each(shift);
                for record in &mut lane.records {
                    let later = [&mut record.matched_ns, &mut record.first_byte_ns, &mut record.done_ns];
                    later.into_iter().flatten().for_each(shift);
                    shift(&mut record.posted_ns);
                }
            }
        }
        self.taken_ns = now_ns;
    }

    /// Copies the part that [`measure_since`](Self::measure_since) needs.
    pub(crate) fn used(&self) -> Self {
        let ranks = self.ranks.iter().map(|rank| {
            let RankFlight { rank, pid, cpu_ms, .. } = *rank;
            RankFlight { rank, pid, cpu_ms, ..RankFlight::default() }
        });
        let (job, reason) = (self.job.clone(), self.reason.clone());
        Self { job, reason, communicators: vec![], ranks: ranks.collect(), ..*self }
    }

    /// Takes over what another document of the job says of the ranks in it.
    pub(crate) fn add(&mut self, other: Flight) {
        let index: Vec<usize> = other
            .communicators
            .into_iter()
            .map(|group| {
                let known =
                    self.communicators.iter().position(|own| (&own.id, own.size) == (&group.id, group.size));
                let Some(known) = known else {
                    self.communicators.push(group);
                    return self.communicators.len() - 1;
                };
                let members = self.communicators[known].members.iter_mut().zip(group.members);
                members.for_each(|(own, other)| *own = own.or(other));
                known
            })
            .collect();
        for mut rank in other.ranks {
            rank.lanes.iter_mut().for_each(|lane| lane.communicator = index[lane.communicator]);
            let named = rank.waits.iter_mut().filter_map(|wait| wait.communicator.as_mut());
            named.for_each(|communicator| *communicator = index[*communicator]);
            let is_it = |own: &&mut RankFlight| own.rank == rank.rank;
            if let Some(own) = self.ranks.iter_mut().find(is_it) {
                *own = rank;
            }
        }
    }
}

fn path(run_dir: &Path, node: u32) -> PathBuf {
    run_dir.join(ELSEWHERE).join(format!("{node}.json"))
}

/// The folder of the documents, in the run directory.
pub(crate) const ELSEWHERE: &str = "elsewhere";
/// Operations kept of each communicator of each rank, and runs of its programs: as many of these as fit.
const RECORDS: [usize; 2] = [8, 1];
const MOST_BYTES: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observe::flight::samples::flight;
    use crate::observe::flight::{Record, RunFlight};

    #[test]
    fn two_nodes_become_one_document() {
        let whole = flight();
        let split = whole.ranks.len() as u32 / 2;
        let mut here = whole.clone();
        here.ranks.iter_mut().skip(split as usize).for_each(|rank| {
            *rank = RankFlight { rank: rank.rank, ..RankFlight::default() };
        });
        let mut there = whole.clone();
        there.ranks.retain(|rank| rank.rank >= split);
        // Numbered otherwise there, and by another clock.
        there
            .communicators
            .insert(0, Communicator { id: "0".into(), name: "other".into(), size: 1, members: vec![None] });
        for rank in &mut there.ranks {
            rank.lanes.iter_mut().for_each(|lane| lane.communicator += 1);
            rank.waits
                .iter_mut()
                .for_each(|wait| wait.communicator = wait.communicator.map(|index| index + 1));
        }
        let later = whole.taken_ns + 5_000_000_000;
        there.shift(later);
        let ranks = split..whole.ranks.len() as u32;
        let parsed = parse(&document(there).unwrap(), ranks, whole.taken_ns).unwrap();
        here.add(parsed);
        assert_eq!(here.ranks, whole.ranks);
        assert_eq!(here.communicators.len(), whole.communicators.len() + 1);
    }

    #[test]
    fn what_is_not_its_to_say_is_refused() {
        let whole = flight();
        let text = serde_json::to_vec(&whole).unwrap();
        let ranks = whole.ranks.len() as u32;
        assert!(parse(&text, 0..ranks, 1).is_some());
        assert!(parse(&text, 0..ranks - 1, 1).is_none(), "ranks of others");
        assert!(parse(&text, 1..ranks + 1, 1).is_none(), "other ranks");
        assert!(parse(b"[", 0..ranks, 1).is_none());
        let mut small = whole.clone();
        small.communicators[0].members.clear();
        assert!(parse(&serde_json::to_vec(&small).unwrap(), 0..ranks, 1).is_none(), "a group without places");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_are_read_or_refused(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        ) {
            let whole = flight();
            let mut text = document(whole.clone()).unwrap();
            for (at, byte) in changes {
                let at = at.index(text.len());
                text[at] = byte;
            }
            let ranks = whole.ranks.len() as u32;
            if let Some(other) = parse(&text, 0..ranks, 1) {
                let mut here = whole;
                here.add(other);
                let again = Flight::parse(&serde_json::to_vec(&here).unwrap());
                prop_assert!(again.is_ok_and(|again| again.ranks.len() == ranks as usize));
            }
        }
    }

    #[test]
    fn texts_are_cleaned() {
        let mut flight = flight();
        flight.communicators[0].name = "dp\u{1b}[2J".into();
        let ranks = flight.ranks.len() as u32;
        let parsed = parse(&serde_json::to_vec(&flight).unwrap(), 0..ranks, 1).unwrap();
        assert_eq!(parsed.communicators[0].name, "dp\u{fffd}[2J");
    }

    #[test]
    fn much_is_cut_down() {
        let mut flight = flight();
        let mut lane = flight.ranks.iter().find_map(|rank| rank.lanes.first()).unwrap().clone();
        lane.records = vec![lane.records[0].clone(); 64];
        let runs = vec![RunFlight::default(); 64];
        flight
            .ranks
            .iter_mut()
            .for_each(|rank| (rank.lanes, rank.runs) = (vec![lane.clone(); 24], runs.clone()));
        flight.ranks = (0..20).flat_map(|_| flight.ranks.clone()).collect();
        let text = document(flight).unwrap();
        assert!(text.len() <= MOST_BYTES);
        let cut = Flight::parse(&text).unwrap();
        assert!(cut.ranks.iter().all(|rank| rank.lanes[0].records.len() < 64 && rank.runs.len() < 64));
    }

    #[test]
    fn what_is_waited_for_is_kept() {
        let mut flight = flight();
        let rank = &mut flight.ranks[0];
        let waited = rank.lanes[0].records.last().unwrap().clone();
        assert_eq!(Some(waited.seq), rank.waits[0].seq);
        rank.lanes[0].records.extend((10..50).map(|number| Record { number, seq: number, ..waited.clone() }));
        let text = document(flight.clone()).unwrap();
        let cut = Flight::parse(&text).unwrap();
        assert_eq!(cut.ranks[0].lanes[0].records.len(), 9);
        assert_eq!(cut.ranks[0].doing().unwrap().record, Some(&waited));
    }

    #[test]
    fn what_is_kept_is_read() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path(), 1), None);
        let (ranks, document) = (0..flight().ranks.len() as u32, serde_json::to_vec(&flight()).unwrap());
        drop(DocumentWriting::start(dir.path(), 1, ranks.clone(), document).unwrap());
        let mut kept = read(dir.path(), 1).unwrap();
        kept.shift(flight().taken_ns);
        assert_eq!(kept, flight());
        drop(DocumentWriting::start(dir.path(), 2, ranks, b"[".to_vec()).unwrap());
        assert_eq!(read(dir.path(), 2), None);
    }
}
