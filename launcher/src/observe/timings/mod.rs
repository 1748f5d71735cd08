//! `--timings`: where the time from the command to the first collective of every rank goes.
//!
//! Pure: moments go in, phases come out, `table.rs` words them, `cost.rs` measures what it took. All moments
//! are CLOCK_MONOTONIC, whoever told them; one that can not be is as good as none.

pub(crate) mod cost;
mod table;

use serde::{Serialize, Serializer};

use cost::Cost;
pub(crate) use table::render;

/// A step on the way, in the order in which they are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Understood,
    AgentReady,
    PythonStarted,
    TorchImported,
    ServerReady,
    StoreReady,
    /// The steps of each rank begin here. This one is the moment before its process was made.
    RankStarted,
    ScriptEntered,
    GroupCreated,
    FirstPosted,
    FirstDone,
}

/// When the job reached its steps, as far as that is known.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    begun_ns: u64,
    /// The moments of the job as a whole; one for each of [`Step::OF_JOB`].
    job: [Option<u64>; Step::OF_JOB.len()],
    /// By rank; one for each of [`Step::OF_RANKS`].
    ranks: Vec<[Option<u64>; Step::OF_RANKS.len()]>,
}

/// One line of the table: when the first and the last rank were there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Phase {
    #[serde(serialize_with = "name")]
    phase: Step,
    /// Since the command was started; None when nobody was.
    #[serde(rename = "first_s", serialize_with = "seconds")]
    first_ns: Option<u64>,
    #[serde(rename = "last_s", serialize_with = "seconds")]
    last_ns: Option<u64>,
    /// How many ranks were there; None of a phase that is the whole job's.
    ranks: Option<u32>,
}

/// All there is to say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Timings {
    format: u32,
    ranks: u32,
    phases: Vec<Phase>,
    /// None when nobody asked.
    cost: Option<Cost>,
}

impl Step {
    pub(crate) const OF_JOB: [Step; 6] = [
        Step::Understood,
        Step::AgentReady,
        Step::PythonStarted,
        Step::TorchImported,
        Step::ServerReady,
        Step::StoreReady,
    ];
    pub(crate) const OF_RANKS: [Step; 5] =
        [Step::RankStarted, Step::ScriptEntered, Step::GroupCreated, Step::FirstPosted, Step::FirstDone];

    fn name(self) -> &'static str {
        match self {
            Step::Understood => "command understood",
            Step::AgentReady => "agent ready",
            Step::PythonStarted => "fork server started",
            Step::TorchImported => "torch imported",
            Step::ServerReady => "fork server ready",
            Step::StoreReady => "store ready",
            Step::RankStarted => "ranks started",
            Step::ScriptEntered => "script entered",
            Step::GroupCreated => "group created",
            Step::FirstPosted => "first collective called",
            Step::FirstDone => "first collective done",
        }
    }
}

impl Moments {
    /// The command was started at `begun_ns`.
    pub(crate) fn new(begun_ns: u64, ranks: u32) -> Moments {
        Moments {
            begun_ns,
            job: [None; Step::OF_JOB.len()],
            ranks: vec![[None; Step::OF_RANKS.len()]; ranks as usize],
        }
    }

    /// The job as a whole has reached a step; only the first time counts.
    pub(crate) fn reached(&mut self, step: Step, at_ns: Option<u64>) {
        let index = Step::OF_JOB.iter().position(|known| *known == step).expect("a step of the job");
        self.job[index] = self.job[index].or(at_ns);
    }

    /// A rank has reached a step.
    pub(crate) fn rank_reached(&mut self, rank: u32, step: Step, at_ns: Option<u64>) {
        let index = Step::OF_RANKS.iter().position(|known| *known == step).expect("a step of ranks");
        if let Some(steps) = self.ranks.get_mut(rank as usize) {
            steps[index] = steps[index].or(at_ns);
        }
    }

    /// Steps of the job that it did not take are left out, and those that no rank took unless they are
    /// `expected` of it.
    pub(crate) fn timings(&self, until_ns: u64, expected: &[Step], cost: Option<Cost>) -> Timings {
        let since = |ns: u64| (self.begun_ns..=until_ns).contains(&ns).then(|| ns - self.begun_ns);
        let of_job = Step::OF_JOB.iter().zip(&self.job).filter_map(|(step, at)| {
            let at = at.and_then(since)?;
            Some(Phase { phase: *step, first_ns: Some(at), last_ns: Some(at), ranks: None })
        });
        let of_ranks = (0..).zip(Step::OF_RANKS).filter_map(|(index, step): (usize, Step)| {
            let reached: Vec<u64> =
                self.ranks.iter().filter_map(|steps| steps[index].and_then(since)).collect();
            let is_shown = !reached.is_empty() || expected.contains(&step);
            is_shown.then(|| Phase {
                phase: step,
                first_ns: reached.iter().min().copied(),
                last_ns: reached.iter().max().copied(),
                ranks: Some(reached.len() as u32),
            })
        });
        let phases = of_job.chain(of_ranks).collect();
        Timings { format: FORMAT, ranks: self.ranks.len() as u32, phases, cost }
    }
}

impl Timings {
    /// One object, for programs.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and names")
    }

    /// When the last rank had its first collective done; None when not all have.
    fn total_ns(&self) -> Option<u64> {
        let done = self.phases.iter().find(|phase| phase.phase == Step::FirstDone)?;
        done.last_ns.filter(|_| done.ranks == Some(self.ranks))
    }
}

fn name<S: Serializer>(step: &Step, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(step.name())
}

/// In microseconds: no moment is known better.
fn seconds<S: Serializer>(ns: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
    match ns {
        Some(ns) => to.serialize_some(&((ns / 1000) as f64 / 1e6)),
        None => to.serialize_none(),
    }
}

/// In the run directory.
pub(crate) const FILE: &str = "timings.json";
/// The version of the document; a later one may have more fields.
const FORMAT: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::{Expect, expect};

    fn two_ranks() -> Moments {
        let mut moments = Moments::new(1_000_000_000, 2);
        let ms = |ms: u64| Some(1_000_000_000 + ms * 1_000_000);
        for (step, at) in Step::OF_JOB.iter().zip([4, 21, 110, 1950, 1990, 2020]) {
            moments.reached(*step, ms(at));
        }
        for (step, [first, second]) in
            Step::OF_RANKS[..4].iter().zip([[2021, 2030], [2060, 2050], [2300, 2301], [2302, 2400]])
        {
            moments.rank_reached(0, *step, ms(first));
            moments.rank_reached(1, *step, ms(second));
        }
        moments
    }

    fn check(moments: &Moments, expected: &[Step], cost: Option<Cost>, table: Expect, json: Expect) {
        let timings = moments.timings(100_000_000_000, expected, cost);
        table.assert_eq(&render(&timings));
        json.assert_eq(&String::from_utf8(timings.to_json()).unwrap());
    }

    #[test]
    fn a_job_that_got_there() {
        let mut moments = two_ranks();
        moments.rank_reached(0, Step::FirstDone, Some(3_402_000_999));
        moments.rank_reached(1, Step::FirstDone, Some(3_401_000_000));
        // Nobody is first twice.
        moments.rank_reached(1, Step::FirstDone, Some(4_000_000_000));
        moments.reached(Step::AgentReady, Some(4_000_000_000));
        let memory = cost::JobMemory { pss_bytes: 400 << 20, processes: 6 };
        let cost = Cost { cpu_ms: 2345, memory: Some(memory) };
        check(
            &moments,
            &Step::OF_RANKS,
            Some(cost),
            expect![[r#"
                tpurun: timings               first s  last s  took s
                  command understood                    0.004   0.004
                  agent ready                           0.021   0.017
                  fork server started                   0.110   0.089
                  torch imported                        1.950   1.840
                  fork server ready                     1.990   0.040
                  store ready                           2.020   0.030
                  ranks started                 2.021   2.030   0.010
                  script entered                2.050   2.060   0.030
                  group created                 2.300   2.301   0.241
                  first collective called       2.302   2.400   0.099
                  first collective done         2.401   2.402   0.002
                  2 ranks in 2.402 s: 2.3 s of CPU, 400 MiB (PSS of 6 processes)
            "#]],
            expect![[
                r#"{"format":1,"ranks":2,"phases":[{"phase":"command understood","first_s":0.004,"last_s":0.004,"ranks":null},{"phase":"agent ready","first_s":0.021,"last_s":0.021,"ranks":null},{"phase":"fork server started","first_s":0.11,"last_s":0.11,"ranks":null},{"phase":"torch imported","first_s":1.95,"last_s":1.95,"ranks":null},{"phase":"fork server ready","first_s":1.99,"last_s":1.99,"ranks":null},{"phase":"store ready","first_s":2.02,"last_s":2.02,"ranks":null},{"phase":"ranks started","first_s":2.021,"last_s":2.03,"ranks":2},{"phase":"script entered","first_s":2.05,"last_s":2.06,"ranks":2},{"phase":"group created","first_s":2.3,"last_s":2.301,"ranks":2},{"phase":"first collective called","first_s":2.302,"last_s":2.4,"ranks":2},{"phase":"first collective done","first_s":2.401,"last_s":2.402,"ranks":2}],"cost":{"cpu_s":2.345,"pss_bytes":419430400,"processes":6}}"#
            ]],
        );
    }

    #[test]
    fn a_job_that_ended_before() {
        let mut moments = Moments::new(0, 2);
        moments.reached(Step::Understood, Some(3_000_000));
        moments.rank_reached(0, Step::RankStarted, Some(20_000_000));
        moments.rank_reached(1, Step::RankStarted, Some(21_000_000));
        moments.rank_reached(1, Step::ScriptEntered, Some(90_000_000));
        // From before the command, from the future, of a rank that is none.
        moments.rank_reached(0, Step::FirstDone, Some(u64::MAX));
        moments.rank_reached(2, Step::FirstDone, Some(95_000_000));
        check(
            &moments,
            &Step::OF_RANKS,
            Some(Cost { cpu_ms: 80, memory: None }),
            expect![[r#"
                tpurun: timings               first s  last s  took s
                  command understood                    0.003   0.003
                  ranks started                 0.020   0.021   0.018
                  script entered                0.090   0.090          1 of 2 ranks
                  group created                                        0 of 2 ranks
                  first collective called                              0 of 2 ranks
                  first collective done                                0 of 2 ranks
                  ended before every rank had a collective done: 0.1 s of CPU
            "#]],
            expect![[
                r#"{"format":1,"ranks":2,"phases":[{"phase":"command understood","first_s":0.003,"last_s":0.003,"ranks":null},{"phase":"ranks started","first_s":0.02,"last_s":0.021,"ranks":2},{"phase":"script entered","first_s":0.09,"last_s":0.09,"ranks":1},{"phase":"group created","first_s":null,"last_s":null,"ranks":0},{"phase":"first collective called","first_s":null,"last_s":null,"ranks":0},{"phase":"first collective done","first_s":null,"last_s":null,"ranks":0}],"cost":{"cpu_s":0.08,"pss_bytes":null,"processes":null}}"#
            ]],
        );
    }

    #[test]
    fn programs_that_are_not_python_have_fewer_steps() {
        let mut moments = Moments::new(5, 1);
        // A moment before the command is none.
        moments.reached(Step::Understood, Some(4));
        moments.rank_reached(0, Step::RankStarted, Some(2_000_005));
        check(
            &moments,
            &[Step::RankStarted],
            None,
            expect![[r#"
                tpurun: timings               first s  last s  took s
                  ranks started                 0.002   0.002   0.002
                  ended before every rank had a collective done
            "#]],
            expect![[
                r#"{"format":1,"ranks":1,"phases":[{"phase":"ranks started","first_s":0.002,"last_s":0.002,"ranks":1}],"cost":null}"#
            ]],
        );
    }
}
