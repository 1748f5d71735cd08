//! One row for each class of ranks that do the same.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Serialize;

use crate::base::rank_set::RankSet;
use crate::observe::flight::{Flight, Outcome, RankFlight, RankState};

/// Ranks that do the same, and their state.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    /// As `0-3,7`.
    pub(crate) ranks: String,
    pub(crate) state: RankState,
    pub(crate) ending: Option<String>,
    pub(crate) program: Option<String>,
    /// Name of the communicator.
    pub(crate) group: Option<String>,
    pub(crate) operation: Option<String>,
    /// How the operation is run, once all ranks have come to it.
    pub(crate) strategy: Option<Cow<'static, str>>,
    /// Outcome of the operation; null while a rank waits for something else.
    pub(crate) outcome: Option<Outcome>,
    pub(crate) site: Option<String>,
    /// Time for which the ranks have done this: the longest of several ranks.
    pub(crate) for_ms: Option<u64>,
    /// Operations in that communicator: the least and the most of the ranks.
    pub(crate) completed: [u64; 2],
    pub(crate) posted: [u64; 2],
    /// Operations per second in all communicators, mean of the ranks.
    pub(crate) ops_per_s: f64,
    /// Percent of one core, mean of the ranks.
    pub(crate) cpu_percent: Option<f64>,
    /// Resident memory: the largest of the ranks.
    pub(crate) rss_bytes: Option<u64>,
}

/// The facts that are the same for all ranks of a row.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct RowFacts {
    program: Option<String>,
    state: RankState,
    ending: Option<String>,
    communicator: Option<usize>,
    operation: Option<String>,
    strategy: Option<Cow<'static, str>>,
    outcome: Option<Outcome>,
    site: Option<String>,
}

/// Makes one row for each class, or one for each rank, in the order of their first ranks.
pub(crate) fn rows(flight: &Flight, grouping: Grouping) -> Vec<Row> {
    let mut classes: BTreeMap<(Option<u32>, RowFacts), Vec<&RankFlight>> = BTreeMap::new();
    for rank in &flight.ranks {
        let own = (grouping == Grouping::Rank).then_some(rank.rank);
        classes.entry((own, class(rank))).or_default().push(rank);
    }
    let mut rows: Vec<(u32, Row)> = classes
        .into_iter()
        .map(|((_, class), members)| (members[0].rank, row(flight, class, &members)))
        .collect();
    rows.sort_by_key(|(first, _)| *first);
    rows.into_iter().map(|(_, row)| row).collect()
}

/// The choice between one row for each class and one for each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grouping {
    Class,
    Rank,
}

fn class(rank: &RankFlight) -> RowFacts {
    let doing = rank.doing();
    let record = doing.as_ref().and_then(|doing| doing.record);
    let wait = doing.as_ref().and_then(|doing| doing.wait);
    let operation = record.map(|record| record.text.clone()).or(wait.map(|wait| wait.text.clone()));
    RowFacts {
        program: rank.program.clone(),
        state: rank.state,
        ending: rank.ending.clone(),
        communicator: doing.as_ref().and_then(|doing| doing.communicator()),
        operation,
        strategy: record.and_then(|record| record.strategy.clone()),
        outcome: record.map(|record| record.outcome),
        site: record.map(|record| record.site.clone()).filter(|site| !site.is_empty()),
    }
}

fn row(flight: &Flight, class: RowFacts, members: &[&RankFlight]) -> Row {
    let counts = |count: &dyn Fn(&RankFlight) -> Option<u64>| {
        let counts = || members.iter().filter_map(|rank| count(rank));
        [counts().min().unwrap_or(0), counts().max().unwrap_or(0)]
    };
    let lane = |rank: &RankFlight| rank.doing().and_then(|doing| doing.lane.cloned());
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let cpu: Vec<f64> = members.iter().filter_map(|rank| rank.cpu_percent).collect();
    let since = members.iter().filter_map(|rank| rank.doing()?.since_ns()).min();
    Row {
        ranks: members.iter().map(|rank| rank.rank).collect::<RankSet>().to_string(),
        state: class.state,
        ending: class.ending,
        program: class.program,
        group: class.communicator.map(|index| flight.communicators[index].name.clone()),
        operation: class.operation,
        strategy: class.strategy,
        outcome: class.outcome,
        site: class.site,
        for_ms: since.map(|since| flight.taken_ns.saturating_sub(since) / 1_000_000),
        completed: counts(&|rank| Some(lane(rank)?.completed)),
        posted: counts(&|rank| Some(lane(rank)?.posted)),
        ops_per_s: mean(members.iter().map(|rank| rank.ops_per_second(flight.taken_ns)).collect()),
        cpu_percent: (!cpu.is_empty()).then(|| mean(cpu)),
        rss_bytes: members.iter().filter_map(|rank| rank.rss_bytes).max(),
    }
}
