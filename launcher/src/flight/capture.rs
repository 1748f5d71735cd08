//! Makes the document from the board and the process table. Every byte of the board may be nonsense.

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use tpurun_collectives::board::{self, Board, LaneView, OpView, RECORDS, WaitKind, WaitView};
use tpurun_topology::Algorithm;

use crate::flight::notice::Notice;
use crate::flight::processes::{self, RankStory};
use crate::flight::{
    Communicator, FORMAT, Flight, JobFacts, LaneFlight, Outcome, RankFlight, RankState, Record, Wait,
};
use crate::op_text;

/// What is known of a job besides its board.
#[derive(Debug)]
pub(crate) struct Known<'a> {
    pub(crate) notice: &'a Notice,
    /// By rank.
    pub(crate) stories: &'a [RankStory],
    /// Processes that a rank can be a child of.
    pub(crate) parents: &'a [i32],
}

/// Reads everything once. No rank is asked, held up or waited for.
pub(crate) fn take(board: &Board, known: &Known<'_>, reason: &'static str) -> Flight {
    let world = board.world();
    let mut communicators = Communicators::default();
    let mut ranks: Vec<RankFlight> = (0..world).map(|rank| rank_of(board, known, rank)).collect();
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let taken_ns = board::now_ns();
    for rank in &mut ranks {
        let views = board.records(rank.rank).into_iter().filter(|(lane, _)| lane.size <= world);
        rank.lanes = views.map(|(lane, records)| communicators.lane(rank.rank, lane, records)).collect();
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

/// Of a job that left no dump: how its ranks ended.
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

fn rank_of(board: &Board, known: &Known<'_>, rank: u32) -> RankFlight {
    let story = known.stories.get(rank as usize).cloned().unwrap_or_default();
    // What the board says of its pid is the rank's own word, and nothing is done with that.
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

    fn wait(&self, view: &WaitView) -> Wait {
        let peer = |peer: u32| format!("rank {peer}");
        let (text, seq) = match view.wait.kind {
            WaitKind::Collective { seq } => (format!("collective #{seq}"), Some(seq)),
            WaitKind::Send { to } => (format!("send to {}", peer(to)), None),
            WaitKind::Recv { from } => (format!("recv from {}", from.map_or("any rank".into(), peer)), None),
            WaitKind::Creation => ("creation of the group".into(), None),
        };
        Wait { communicator: self.by_id.get(&view.wait.comm_id).copied(), text, seq, since_ns: view.since_ns }
    }
}

fn record(view: &OpView) -> Record {
    let moment = |ns: u64| Some(ns).filter(|ns| *ns != 0);
    let algorithm = Algorithm::ALL.get(usize::from(view.algorithm));
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
        algorithm: algorithm.map(|algorithm| algorithm.to_string().into()),
        site: view.site.clone(),
        posted_ns: view.posted_ns,
        matched_ns: moment(view.matched_ns),
        first_byte_ns: moment(view.first_byte_ns),
        done_ns: moment(view.done_ns),
        outcome: match view.outcome {
            board::Outcome::Pending => Outcome::Pending,
            board::Outcome::Done => Outcome::Done,
            board::Outcome::Failed => Outcome::Failed,
        },
    }
}

/// Keeps the newest records of each lane, as many as there is room for with this many lanes.
fn bound(ranks: &mut [RankFlight]) {
    let lanes = ranks.iter().map(|rank| rank.lanes.len()).sum::<usize>().max(1);
    let kept = (MAX_RECORDS / lanes).clamp(1, RECORDS);
    for lane in ranks.iter_mut().flat_map(|rank| &mut rank.lanes) {
        lane.records.drain(..lane.records.len().saturating_sub(kept));
    }
}

/// The reason of what is no dump.
pub(crate) const NO_DUMP: &str = "no dump";
/// All lanes of 64 ranks; about 50 MB of JSON.
const MAX_RECORDS: usize = 64 * board::LANES * RECORDS;
