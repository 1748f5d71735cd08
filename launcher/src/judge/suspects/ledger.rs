//! Notes since when each rank has been missed, and how much of that time was its own: pure bookkeeping.
//!
//! Slow is not stuck. A rank is named when it has had a second of its own while others waited for it: a
//! second in which it ran or slept. Time in the queue for a CPU is not its own, so that ranks that just have
//! not had their turn are not named, however long that takes.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use super::absent::{Absence, Key};
use crate::processes::{Activity, Sample, classify};

/// The ranks that keep others waiting, with their times.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    missed: BTreeMap<u32, Missed>,
    /// How late ranks that were named have come before: they are given twice that next time.
    lateness: HashMap<u32, Duration>,
}

#[derive(Debug)]
struct Missed {
    key: Key,
    since: Instant,
    /// Time of its own since it was first seen missing.
    own: Duration,
    last: Sample,
    activity: Option<Activity>,
    /// How often it has been named.
    named: usize,
}

/// A rank that has had its time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Suspect {
    pub(crate) rank: u32,
    pub(crate) activity: Activity,
}

/// Suspects in the same operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) absence: Absence,
    pub(crate) suspects: Vec<Suspect>,
    /// For how long the others have been waiting.
    pub(crate) waited: Duration,
}

/// A rank that was named and has come since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cleared {
    pub(crate) rank: u32,
    pub(crate) after: Duration,
}

impl Ledger {
    /// Takes in what the board says; `look` looks at the process of a rank. Returns the ranks that have come.
    pub(crate) fn update(
        &mut self,
        absences: &[Absence],
        now: Instant,
        now_ns: u64,
        mut look: impl FnMut(u32) -> Option<Sample>,
        is_in_engine: impl Fn(u32) -> bool,
    ) -> Vec<Cleared> {
        let keys = absent_ranks(absences);
        let cleared = self.clear(&keys, now);
        for (rank, absence) in keys {
            let missed = self.missed.get_mut(&rank);
            if missed.as_ref().is_some_and(|missed| now < missed.last.at + LOOK_EVERY) {
                continue;
            }
            let Some(sample) = look(rank) else { continue };
            let Some(missed) = missed else {
                let since = now - Duration::from_nanos(now_ns.saturating_sub(absence.since_ns));
                self.missed.insert(rank, Missed::new(absence.key, since, sample));
                continue;
            };
            let own = sample.own_time(&missed.last);
            missed.activity = Some(classify(&missed.last, &sample, is_in_engine(rank)));
            missed.last = sample;
            // A rank that waits for others has its second later, when it could come.
            if missed.is_suspicious() {
                missed.own += own;
            }
        }
        cleared
    }

    /// The case that most ranks wait for among those with somebody to name, or to name again.
    pub(crate) fn due(&self, absences: &[Absence], now: Instant) -> Option<Case> {
        absences.iter().find_map(|absence| {
            let missed = absence.absent.iter().filter_map(|rank| Some((*rank, self.missed.get(rank)?)));
            let of_this: Vec<(u32, &Missed)> =
                missed.filter(|(_, missed)| missed.key == absence.key && missed.is_suspicious()).collect();
            of_this.iter().any(|(rank, missed)| self.is_due(*rank, missed, 1.0)).then(|| Case {
                absence: absence.clone(),
                // A rank that is nearly due is named on the same line.
                suspects: of_this
                    .iter()
                    .filter(|(rank, missed)| self.is_due(*rank, missed, NEARLY))
                    .filter_map(|(rank, missed)| {
                        Some(Suspect { rank: *rank, activity: missed.activity.clone()? })
                    })
                    .collect(),
                waited: of_this.iter().map(|(_, missed)| now - missed.since).max().unwrap_or_default(),
            })
        })
    }

    /// Notes that the suspects of a case have been named.
    pub(crate) fn name(&mut self, case: &Case) {
        for suspect in &case.suspects {
            if let Some(missed) = self.missed.get_mut(&suspect.rank) {
                let passed = NAMED_AFTER.iter().take_while(|limit| missed.own + NOTICED_AFTER >= **limit);
                missed.named = passed.count().max(missed.named + 1);
            }
        }
    }

    fn clear(&mut self, keys: &BTreeMap<u32, &Absence>, now: Instant) -> Vec<Cleared> {
        let mut cleared = Vec::new();
        self.missed.retain(|rank, missed| {
            let is_still = keys.get(rank).is_some_and(|absence| absence.key == missed.key);
            if !is_still && missed.named > 0 {
                cleared.push(Cleared { rank: *rank, after: now - missed.since });
            }
            is_still
        });
        for Cleared { rank, after } in &cleared {
            let lateness = self.lateness.entry(*rank).or_default();
            *lateness = (*lateness).max(*after);
        }
        cleared
    }

    fn is_due(&self, rank: u32, missed: &Missed, share: f64) -> bool {
        let Some(limit) = NAMED_AFTER.get(missed.named) else { return false };
        let usual = 2 * self.lateness.get(&rank).copied().unwrap_or_default();
        let limit = if missed.named == 0 { usual.max(*limit) } else { *limit };
        missed.own + NOTICED_AFTER >= limit.mul_f64(share)
    }
}

impl Missed {
    fn new(key: Key, since: Instant, sample: Sample) -> Missed {
        Missed { key, since, own: Duration::ZERO, last: sample, activity: None, named: 0 }
    }

    /// Stopped ranks are a failure of their own; those that wait are missed because of others.
    fn is_suspicious(&self) -> bool {
        use Activity::{Computing, Sleeping, Traced, Uninterruptible};
        matches!(self.activity, Some(Computing { .. } | Sleeping | Traced | Uninterruptible { .. }))
    }
}

/// Each absent rank with the operation that most others wait in for it.
fn absent_ranks(absences: &[Absence]) -> BTreeMap<u32, &Absence> {
    let mut keys = BTreeMap::new();
    for absence in absences {
        for rank in &absence.absent {
            keys.entry(*rank).or_insert(absence);
        }
    }
    keys
}

/// Shorter waits are not looked at.
pub(crate) const NOTICED_AFTER: Duration = Duration::from_millis(100);
/// The own time after which a rank is named, while others wait for it.
const NAMED_AFTER: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(600)];
const NEARLY: f64 = 0.8;
const LOOK_EVERY: Duration = Duration::from_millis(400);

#[cfg(test)]
mod tests {
    use super::super::absent::absences;
    use super::super::absent::tests::{SECOND, world};
    use super::*;

    /// The way in which a rank spends its time.
    #[derive(Clone, Copy)]
    enum Does {
        Compute,
        Sleep,
        /// It gets this share of a CPU and stands in the queue the rest of the time.
        Queue(f64),
        Stop,
    }

    /// A job whose clock the test moves.
    struct World {
        ledger: Ledger,
        begin: Instant,
        ms: u64,
        posted: Vec<u64>,
        does: Vec<Does>,
        in_engine: bool,
        /// By rank: milliseconds on a CPU and in the queue for one.
        had: Vec<(f64, f64)>,
    }

    impl World {
        fn new(posted: &[u64], does: &[Does]) -> World {
            let ledger = Ledger::default();
            let had = vec![(0.0, 0.0); does.len()];
            World {
                ledger,
                begin: Instant::now(),
                ms: 0,
                posted: posted.to_vec(),
                does: does.to_vec(),
                in_engine: false,
                had,
            }
        }

        /// Goes on to this time; returns the ranks that were named, with the times, and those that came.
        fn run_to(&mut self, end_ms: u64) -> (Vec<(u64, Vec<u32>)>, Vec<Cleared>) {
            let (mut named, mut cleared) = (Vec::new(), Vec::new());
            while self.ms < end_ms {
                self.pass_100_ms();
                let (now, now_ns) =
                    (self.begin + Duration::from_millis(self.ms), SECOND + self.ms * 1_000_000);
                let found = absences(&world(&self.posted), now_ns, NOTICED_AFTER.as_nanos() as u64);
                let samples: Vec<Sample> = (0..self.does.len()).map(|rank| self.sample(rank)).collect();
                let in_engine = self.in_engine;
                let look = |rank: u32| Some(samples[rank as usize].clone());
                cleared.extend(self.ledger.update(&found, now, now_ns, look, |_| in_engine));
                if let Some(case) = self.ledger.due(&found, now) {
                    self.ledger.name(&case);
                    named.push((self.ms, case.suspects.iter().map(|suspect| suspect.rank).collect()));
                }
            }
            (named, cleared)
        }

        fn pass_100_ms(&mut self) {
            self.ms += 100;
            for ((cpu, queued), does) in self.had.iter_mut().zip(&self.does) {
                let (share, wanted) = match does {
                    Does::Compute => (1.0, 1.0),
                    Does::Queue(share) => (*share, 1.0),
                    Does::Sleep | Does::Stop => (0.0, 0.0),
                };
                *cpu += 100.0 * share;
                *queued += 100.0 * (wanted - share);
            }
        }

        fn sample(&self, rank: usize) -> Sample {
            let state = match self.does[rank] {
                Does::Compute | Does::Queue(_) => 'R',
                Does::Sleep => 'S',
                Does::Stop => 'T',
            };
            let (cpu, queued) = self.had[rank];
            let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
            Sample {
                at: self.begin + Duration::from_millis(self.ms),
                state,
                cpu: ms(cpu),
                queued: HashMap::from([(1, ms(queued))]),
                is_runnable: state == 'R',
                wait_channel: None,
            }
        }
    }

    #[test]
    fn who_computes_or_sleeps_is_named_four_times_at_most() {
        for does in [Does::Compute, Does::Sleep] {
            let mut world = World::new(&[12, 12, 11], &[Does::Sleep, Does::Sleep, does]);
            let (named, cleared) = world.run_to(900_000);
            let times: Vec<u64> = named.iter().map(|(ms, _)| ms / 1000).collect();
            assert_eq!((times, named[0].1.clone(), cleared), (vec![1, 10, 60, 600], vec![2], vec![]));
            assert!(named[0].0 <= 1300, "{named:?}");
            world.posted[2] = 12;
            let (named, cleared) = world.run_to(901_000);
            assert!(named.is_empty());
            assert_eq!(cleared, [Cleared { rank: 2, after: Duration::from_millis(900_100) }]);
        }
    }

    #[test]
    fn who_has_not_had_a_turn_is_not_named() {
        // 62 ranks compute on two CPUs.
        let posted: Vec<u64> = (0..64).map(|rank| if rank < 2 { 12 } else { 11 }).collect();
        let mut world = World::new(&posted, &[Does::Queue(0.032); 64]);
        assert_eq!(world.run_to(20_000), (vec![], vec![]));
        // The last two have a CPU each, and a second of their own from now on.
        world.posted = (0..64).map(|rank| if rank < 62 { 12 } else { 11 }).collect();
        (62..64).for_each(|rank| world.does[rank] = Does::Compute);
        assert_eq!(world.run_to(20_300), (vec![], vec![]));
        let (named, _) = world.run_to(21_400);
        assert_eq!(named.iter().map(|(_, ranks)| ranks.clone()).collect::<Vec<_>>(), [vec![62, 63]]);
        let mut world = World::new(&posted, &[Does::Compute; 64]);
        let (named, _) = world.run_to(1400);
        assert_eq!((named.len(), named[0].1.len()), (1, 62));
    }

    #[test]
    fn who_waits_itself_has_its_time_later() {
        let mut world = World::new(&[12, 11], &[Does::Sleep, Does::Sleep]);
        world.in_engine = true;
        assert_eq!(world.run_to(30_000), (vec![], vec![]));
        world.in_engine = false;
        assert_eq!(world.run_to(30_800), (vec![], vec![]));
        let (named, _) = world.run_to(35_000);
        assert_eq!(named.len(), 1, "{named:?}");
    }

    #[test]
    fn stopped_ranks_are_left_to_the_verdict() {
        let mut world = World::new(&[12, 11], &[Does::Sleep, Does::Stop]);
        assert_eq!(world.run_to(100_000), (vec![], vec![]));
    }

    #[test]
    fn a_rank_that_is_late_each_time_is_named_less_and_less() {
        let mut world = World::new(&[12, 11], &[Does::Sleep, Does::Compute]);
        let mut lines = 0;
        // Three seconds late, then it comes and is late again for the next operation.
        for step in 0..20 {
            let (named, _) = world.run_to((step + 1) * 3000);
            lines += named.len();
            world.posted.iter_mut().for_each(|posted| *posted += 1);
        }
        assert_eq!(lines, 1);
        let (named, _) = world.run_to(90_000);
        assert!(!named.is_empty());
    }

    #[test]
    fn a_process_that_is_gone_is_nobodys_suspect() {
        let mut ledger = Ledger::default();
        let found = absences(&world(&[12, 11]), 9 * SECOND, 0);
        for ms in [0, 5000, 20_000] {
            let now = Instant::now() + Duration::from_millis(ms);
            assert!(ledger.update(&found, now, 9 * SECOND, |_| None, |_| false).is_empty());
            assert_eq!(ledger.due(&found, now), None);
        }
    }
}
