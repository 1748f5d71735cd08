//! Makes the document from the board and the process table. Every byte of the board may be nonsense.

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use tpurun_protocol::board::{self, Board, LaneView, OpView, RECORDS, RunView, WaitKind, WaitView};
use tpurun_protocol::strategy::Strategy;

use crate::observe::flight::notice::JobNotice;
use crate::observe::flight::processes::{self, RankStory};
use crate::observe::flight::{
    Communicator, FORMAT, Flight, JobFacts, LaneFlight, Outcome, RankFlight, RankState, Record, RunFlight,
    WaitFlight,
};
use crate::observe::op_text;

/// Facts about a job besides its board.
#[derive(Debug)]
pub(crate) struct JobContext<'a> {
    pub(crate) notice: &'a JobNotice,
    /// By rank.
    pub(crate) stories: &'a [RankStory],
    /// Processes that a rank can be a child of.
    pub(crate) parents: &'a [i32],
}

/// Reads everything once. No rank is asked, held up or waited for.
pub(crate) fn take(board: &Board, known: &JobContext<'_>, reason: &'static str) -> Flight {
    let world = board.world();
    let mut communicators = Communicators::default();
    let mut ranks: Vec<RankFlight> = (0..world).map(|rank| rank_of(board, known, rank)).collect();
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let taken_ns = board::now_ns();
    for rank in &mut ranks {
        let views = board.records(rank.rank).into_iter().filter(|(lane, _)| lane.size <= world);
        rank.lanes = views.map(|(lane, records)| communicators.lane(rank.rank, lane, records)).collect();
        rank.runs = board.runs(rank.rank).iter().map(run).collect();
        let waits = board.read(rank.rank).waits;
        rank.waits = waits.iter().map(|wait| communicators.wait(wait)).collect();
        rank.state = state(rank);
    }
    bound(&mut ranks);
    Flight {
        format: FORMAT,
        job: known.notice.job.clone(),
        reason: reason.into(),
        taken_ns,
        taken_unix_ns: since_1970.as_nanos() as u64,
        communicators: communicators.found,
        ranks,
    }
}

/// Makes the document of a job that left no dump: it says how the ranks ended.
pub(crate) fn of_stories(job: &JobFacts, stories: Vec<RankStory>) -> Flight {
    let rank = |(rank, story): (u32, RankStory)| RankFlight {
        rank,
        pid: story.pid,
        state: if story.pid.is_some() { RankState::Ended } else { RankState::Starting },
        ending: story.ending,
        ..RankFlight::default()
    };
    Flight {
        format: FORMAT,
        job: job.clone(),
        reason: NO_DUMP.into(),
        taken_ns: 0,
        taken_unix_ns: 0,
        communicators: Vec::new(),
        ranks: (0..).zip(stories).map(rank).collect(),
    }
}

fn rank_of(board: &Board, known: &JobContext<'_>, rank: u32) -> RankFlight {
    let story = known.stories.get(rank as usize).cloned().unwrap_or_default();
    // The pid on the board is the rank's own word, and nothing is done with it.
    let usage = story.pid.filter(|_| story.ending.is_none()).and_then(processes::usage);
    let usage = usage.filter(|usage| known.parents.contains(&usage.parent));
    RankFlight {
        rank,
        pid: story.pid,
        program: known.notice.program_of(rank).map(str::to_owned),
        process: usage.map(|usage| usage.state),
        ending: story.ending,
        cpu_ms: usage.map(|usage| usage.cpu_ms),
        rss_bytes: usage.map(|usage| usage.rss_bytes),
        has_joined: board.read(rank).pid != 0,
        ..RankFlight::default()
    }
}

fn state(rank: &RankFlight) -> RankState {
    match (rank.pid, rank.process) {
        _ if rank.ending.is_some() => RankState::Ended,
        (None, _) => RankState::Starting,
        (Some(_), None | Some('Z' | 'X')) => RankState::Ended,
        (Some(_), Some('T')) => RankState::Stopped,
        _ if !rank.waits.is_empty() => RankState::Waiting,
        _ => RankState::Running,
    }
}

/// Numbers the communicators as they are met.
#[derive(Default)]
struct Communicators {
    found: Vec<Communicator>,
    by_id: HashMap<u64, usize>,
}

impl Communicators {
    fn lane(&mut self, rank: u32, view: LaneView, records: Vec<OpView>) -> LaneFlight {
        let communicator = *self.by_id.entry(view.comm_id).or_insert_with(|| {
            let members = vec![None; view.size as usize];
            let id = format!("{:016x}", view.comm_id);
            self.found.push(Communicator { id, name: view.name.clone(), size: view.size, members });
            self.found.len() - 1
        });
        // Two ranks that disagree about the size, or both claim one place: one of them writes nonsense.
        if let Some(member @ None) = self.found[communicator].members.get_mut(view.comm_rank as usize) {
            *member = Some(rank);
        }
        LaneFlight {
            communicator,
            comm_rank: view.comm_rank,
            closed: view.closed,
            posted: view.posted,
            completed: view.completed,
            blocked_since_ns: view.blocked_since_ns,
            records: records.iter().map(record).collect(),
        }
    }

    fn wait(&self, view: &WaitView) -> WaitFlight {
        let peer = |peer: u32| format!("rank {peer}");
        let (text, seq) = match view.wait.kind {
            WaitKind::Collective { seq } => (format!("collective #{seq}"), Some(seq)),
            WaitKind::Send { to } => (format!("send to {}", peer(to)), None),
            WaitKind::Recv { from } => (format!("recv from {}", from.map_or("any rank".into(), peer)), None),
            WaitKind::Creation => ("creation of the group".into(), None),
        };
        WaitFlight {
            communicator: self.by_id.get(&view.wait.comm_id).copied(),
            text,
            seq,
            since_ns: view.since_ns,
        }
    }
}

fn record(view: &OpView) -> Record {
    let moment = |ns: u64| Some(ns).filter(|ns| *ns != 0);
    Record {
        number: view.number,
        seq: view.seq,
        operation: op_text::collective(view.collective).into(),
        text: op_text::describe(view),
        is_message: view.is_message(),
        dtype: op_text::dtype(view.dtype).into(),
        reduce_op: op_text::reduce_op(view).map(Into::into),
        root: u32::try_from(view.root).ok(),
        tag: view.tag,
        count: view.count,
        shape: view.shape.clone(),
        input_bytes: view.input_bytes,
        strategy: Strategy::from_code(view.strategy).map(|strategy| strategy.name().into()),
        site: view.site.clone(),
        posted_ns: view.posted_ns,
        matched_ns: moment(view.matched_ns),
        first_byte_ns: moment(view.first_byte_ns),
        done_ns: moment(view.done_ns),
        outcome: outcome(view.outcome),
    }
}

fn run(view: &RunView) -> RunFlight {
    RunFlight {
        number: view.number,
        program: format!("{:016x}", view.program),
        line: view.line.clone(),
        operations: view.operations,
        begun_ns: view.begun_ns,
        done_ns: Some(view.done_ns).filter(|ns| *ns != 0),
        outcome: outcome(view.outcome),
    }
}

fn outcome(read: board::Outcome) -> Outcome {
    match read {
        board::Outcome::Pending => Outcome::Pending,
        board::Outcome::Done => Outcome::Done,
        board::Outcome::Failed => Outcome::Failed,
    }
}

/// Keeps the newest records of each lane, and the newest runs of each rank, as many as there is room for with this
/// many of both.
fn bound(ranks: &mut [RankFlight]) {
    let rings = |rank: &RankFlight| rank.lanes.len() + usize::from(!rank.runs.is_empty());
    let kept = (MAX_RECORDS / ranks.iter().map(rings).sum::<usize>().max(1)).clamp(1, RECORDS);
    for rank in ranks {
        rank.lanes.iter_mut().for_each(|lane| keep_last(&mut lane.records, kept));
        keep_last(&mut rank.runs, kept);
    }
}

fn keep_last<T>(list: &mut Vec<T>, kept: usize) {
    list.drain(..list.len().saturating_sub(kept));
}

/// The reason in a document that is no dump.
pub(crate) const NO_DUMP: &str = "no dump";
/// All lanes of 64 ranks; about 50 MB of JSON.
const MAX_RECORDS: usize = 64 * board::LANES * RECORDS;

#[cfg(test)]
mod tests {
    use super::*;
    use tpurun_protocol::board::{OpRecord, ProgramRun, Wait};

    fn notice(ranks: u32) -> JobNotice {
        let job = JobFacts { ranks, ..JobFacts::default() };
        let boot_id = String::new();
        JobNotice {
            format: FORMAT,
            job,
            agent_start_ticks: 0,
            boot_id,
            board_fd: 0,
            programs: Vec::new(),
            others: vec![],
        }
    }

    fn taken(board: &Board, stories: &[RankStory], parents: &[i32]) -> Flight {
        take(board, &JobContext { notice: &notice(board.world()), stories, parents }, "asked")
    }

    fn op(seq: u64) -> OpRecord<'static> {
        OpRecord {
            seq,
            collective: 0,
            dtype: 11,
            reduce_op: 4,
            root: -1,
            tag: 0,
            count: 8,
            input_bytes: 32,
            shape: &[2, 4],
            site: "train.py:5",
        }
    }

    #[test]
    fn the_board_becomes_a_document() {
        let (board, _fd) = Board::create(3).unwrap();
        let lane = board.rank(1).claim_lane(9, "dp0", 2, 1).unwrap();
        let first = lane.posted(&op(0));
        lane.agreed(first, Some(Strategy::Windows));
        lane.ended(first, board::Outcome::Done);
        lane.completed(0);
        lane.posted(&op(1));
        let writer = board.rank(1);
        let begin = |program| writer.run_begun(&ProgramRun { program, operations: 6, line: "train.py:9" });
        writer.run_ended(begin(0xab), board::Outcome::Done);
        begin(0xcd);
        let kind = WaitKind::Collective { seq: 1 };
        let _wait = board.rank(1).waiting(Wait { comm_id: 9, kind, python_threads: 1 });
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let parent = processes::usage(own).unwrap().parent;
        let story = |pid| RankStory { pid, ending: None };
        let ended = RankStory { pid: Some(5), ending: Some("exit 3".into()) };
        let stories = [story(None), story(Some(own)), ended];
        let flight = taken(&board, &stories, &[parent]);
        assert_eq!(flight.communicators[0].members, [None, Some(1)]);
        let states: Vec<RankState> = flight.ranks.iter().map(|rank| rank.state).collect();
        assert_eq!(states, [RankState::Starting, RankState::Waiting, RankState::Ended]);
        let lane = &flight.ranks[1].lanes[0];
        assert_eq!((lane.posted, lane.completed, lane.records.len()), (2, 1, 2));
        let [done, pending] = &lane.records[..] else { panic!("{lane:?}") };
        assert_eq!(done.text, "all_reduce#0 (f32[2x4], MAX)");
        assert_eq!((done.outcome, done.strategy.as_deref()), (Outcome::Done, Some("windows")));
        assert!(Some(done.posted_ns) <= done.matched_ns && done.matched_ns <= done.done_ns);
        assert_eq!((pending.outcome, pending.done_ns), (Outcome::Pending, None));
        assert_eq!(flight.ranks[1].doing().unwrap().record, Some(pending));
        let [run, running] = &flight.ranks[1].runs[..] else { panic!("{:?}", flight.ranks[1].runs) };
        assert_eq!((run.program.as_str(), run.operations), ("00000000000000ab", 6));
        assert_eq!((run.line.as_str(), run.outcome, run.number), ("train.py:9", Outcome::Done, 0));
        assert!(Some(run.begun_ns) <= run.done_ns && run.done_ns <= Some(running.begun_ns));
        assert_eq!((running.outcome, running.done_ns), (Outcome::Pending, None));
        // A process that is nobody's child here is not the rank.
        let flight = taken(&board, &stories, &[]);
        assert_eq!((flight.ranks[1].rss_bytes, flight.ranks[1].state), (None, RankState::Ended));
    }

    #[test]
    fn sizes_that_can_not_be_are_passed_over() {
        let (board, _fd) = Board::create(2).unwrap();
        let _huge = board.rank(0).claim_lane(1, "huge", u32::MAX, 0).unwrap();
        let _one = board.rank(0).claim_lane(2, "dp0", 1, 0).unwrap();
        // Another rank disagrees about the size, and takes a place that is taken.
        let _two = board.rank(1).claim_lane(2, "dp0", 2, 1).unwrap();
        let _same = board.rank(1).claim_lane(2, "dp0", 1, 0).unwrap();
        let flight = taken(&board, &[], &[]);
        let members: Vec<_> = flight.communicators.iter().map(|group| group.members.clone()).collect();
        assert_eq!(members, [vec![Some(0)]]);
        assert!(Flight::parse(&serde_json::to_vec(&flight).unwrap()).is_ok());
    }

    #[test]
    fn many_ranks_keep_their_last_operations() {
        let template = crate::observe::flight::samples::flight().ranks.remove(0);
        let lane = LaneFlight { records: vec![Record::default(); RECORDS], ..template.lanes[0].clone() };
        let rank = RankFlight { lanes: vec![lane; 24], ..template };
        let mut ranks = vec![rank; 256];
        bound(&mut ranks);
        let kept: usize = ranks.iter().flat_map(|rank| &rank.lanes).map(|lane| lane.records.len()).sum();
        assert_eq!(kept, MAX_RECORDS);
        let runs = RankFlight { runs: vec![RunFlight::default(); board::RUNS], ..RankFlight::default() };
        let mut ranks = vec![runs; 1 << 16];
        bound(&mut ranks);
        assert!(ranks.iter().map(|rank| rank.runs.len()).sum::<usize>() <= MAX_RECORDS);
    }
}
