//! The verifier: proves what the schedules of all ranks do together.
//!
//! It runs the schedules on symbols instead of numbers: a block is the set of ranks whose input is folded
//! into it, and the order of folding. A queue holds one block, and steps that can go on do, in any order: as
//! every queue has one sender and one receiver, and channels of a rank touch different blocks, the order
//! changes nothing, so one run stands for all of them.
//!
//! This room knows schedules alone: no generator, so that it cannot share a mistake with one.

mod contents;
mod error;
mod proof;
mod run;

use std::collections::BTreeMap;

pub use error::{Need, StepSite, StuckStep, VerifyError};
pub use proof::Proof;

use crate::schedule::{Block, Collective, Schedule, Source, Step, Tensor};
use contents::Contributors;
use run::SymbolicRun;

/// Proves the schedules of all ranks, in rank order, for a tensor.
///
/// That is: every rank ends with exactly what the collective promises, each contribution folded in once, and
/// in the same order on all ranks that end with the same block; no step waits for ever with room for one
/// block in each queue; no message is left; steps name ranks and blocks that exist; channels of a rank touch
/// different blocks; what is read from a window was published before a meeting.
///
/// # Errors
/// The first thing found wrong.
pub fn verify(schedules: &[Schedule], tensor: Tensor) -> Result<Proof, VerifyError> {
    check_agreement(schedules)?;
    schedules.iter().try_for_each(check_steps)?;
    schedules.iter().try_for_each(check_channels)?;
    let run = SymbolicRun::new(schedules, tensor).finish()?;
    schedules.iter().try_for_each(|schedule| check_result(schedule, &run))?;
    Ok(run.proof)
}

fn check_agreement(schedules: &[Schedule]) -> Result<(), VerifyError> {
    let given = schedules.len();
    let first = schedules.first().ok_or(VerifyError::Incomplete { ranks: 1, given })?;
    let ranks = first.ranks;
    if given != ranks as usize {
        return Err(VerifyError::Incomplete { ranks, given });
    }
    if let Collective::Broadcast { root } = first.collective
        && root >= ranks
    {
        return Err(VerifyError::NoSuchRoot { root, ranks });
    }
    for (index, schedule) in (0..).zip(schedules) {
        let differences = [
            ("rank", schedule.rank != index),
            ("ranks", schedule.ranks != ranks),
            ("collective", schedule.collective != first.collective),
            ("algorithm", schedule.algorithm != first.algorithm),
            ("parts", schedule.parts != first.parts || schedule.parts == 0),
            ("channels", schedule.channels.len() != first.channels.len()),
        ];
        if let Some((field, _)) = differences.into_iter().find(|&(_, differs)| differs) {
            return Err(VerifyError::Differs { index, field });
        }
    }
    Ok(())
}

fn sites(schedule: &Schedule) -> impl Iterator<Item = (StepSite, &Step)> {
    (0..).zip(&schedule.channels).flat_map(move |(channel, steps)| {
        let site = move |step| StepSite { rank: schedule.rank, channel, step };
        (0..).zip(steps).map(move |(step, what)| (site(step), what))
    })
}

fn check_steps(schedule: &Schedule) -> Result<(), VerifyError> {
    let (ranks, chunks, parts) = (schedule.ranks, schedule.chunks(), schedule.parts);
    for (site, step) in sites(schedule) {
        let other = match step {
            Step::Send { to, .. } => Some(*to),
            Step::Receive { from, .. } => Some(*from),
            Step::Fetch { from: Source::Rank(from), .. } => Some(*from).filter(|&from| from != site.rank),
            _ => None,
        };
        if let Some(given) = other.filter(|&other| other >= ranks || other == schedule.rank) {
            return Err(VerifyError::NoSuchRank { site, given, ranks });
        }
        if let Some(&block) = step.blocks().iter().find(|block| block.chunk >= chunks || block.part >= parts)
        {
            return Err(VerifyError::NoSuchBlock { site, block, chunks, parts });
        }
    }
    Ok(())
}

/// The way a channel touches a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Touch {
    Read,
    Write,
}

fn check_channels(schedule: &Schedule) -> Result<(), VerifyError> {
    let mut touched: BTreeMap<Block, (u32, Touch)> = BTreeMap::new();
    for (site, step) in sites(schedule) {
        let (block, touch) = match step {
            Step::Send { block, .. } | Step::Publish { block } => (*block, Touch::Read),
            Step::Receive { block, .. } | Step::Fetch { block, .. } => (*block, Touch::Write),
            Step::Meet { .. } => continue,
        };
        let (channel, before) = touched.entry(block).or_insert((site.channel, touch));
        if *channel != site.channel && (*before).max(touch) == Touch::Write {
            let (rank, first, second) = (schedule.rank, *channel, site.channel);
            return Err(VerifyError::SharedBlock { rank, block, first, second });
        }
        *before = (*before).max(touch);
    }
    Ok(())
}

fn check_result(schedule: &Schedule, run: &SymbolicRun<'_>) -> Result<(), VerifyError> {
    let Schedule { rank, ranks, .. } = *schedule;
    for chunk in (0..schedule.chunks()).filter(|&chunk| schedule.is_output(chunk)) {
        let expected = match schedule.collective {
            Collective::AllReduce | Collective::ReduceScatter => Contributors::of_all(ranks),
            Collective::AllGather => Contributors::of(chunk),
            Collective::Broadcast { root } => Contributors::of(root),
            Collective::AllToAll => Contributors::of(chunk / ranks),
        };
        for part in 0..schedule.parts {
            let block = Block { chunk, part };
            let given = run.working_copy(rank, block).filter(|given| given.ranks == expected);
            let Some(given) = given else {
                let given =
                    run.working_copy(rank, block).map_or(vec![], |given| given.ranks.iter().collect());
                let expected = expected.iter().collect();
                return Err(VerifyError::WrongResult { rank, block, expected, given });
            };
            let other = (0..rank).find(|_| schedule.collective == Collective::AllReduce);
            if let Some(other) = other
                && run.working_copy(other, block).is_some_and(|theirs| theirs.order != given.order)
            {
                return Err(VerifyError::OrderDiffers { rank, other, block });
            }
        }
    }
    Ok(())
}
