//! The shapes of machines and the schedules of collectives, with the cost and the proof of each schedule.
//!
//! This crate decides and never acts: it has no I/O, clock, thread, randomness or logging, and the same
//! question gets the same answer on every rank. Its rooms, from the ground up: [`shape`] and [`schedule`],
//! [`machine`], [`algorithm`] and [`verify`](mod@verify), [`planner`]. The model:
//!
//! - A [`Torus`] has chips in one to three dimensions, each of which wraps or is open, and dead links and
//!   chips. World ranks fill the working chips. A [`Topology`] is a torus that may be a real slice.
//! - A [`Placement`] is one communicator on the torus. Ranks that are a box of it form a [`Grid`]; any others
//!   form a ring in rank order.
//! - A [`Schedule`] is what one rank does in one [`Collective`]: channels that run beside each other, each a
//!   list of [`Step`]s. Ranks send and receive blocks through queues with room for one block, one for each
//!   channel and pair of ranks, or read each other's windows in shared memory.
//! - [`algorithm`] has the generators. Each makes the schedule of one rank without looking at those of the
//!   others, in time proportional to its steps, and has formulas for what it moves.
//! - [`cost`] tells what an algorithm costs on a [`Machine`] and what no algorithm can beat; [`plan`] takes
//!   the cheapest.
//! - [`verify()`] proves schedules before anything runs them: every contribution is reduced exactly once,
//!   every rank ends with what it must, nobody waits in a circle, and the bytes are those of the formulas.
//!
//! ```
//! use tpurun_topology::{Algorithm, Collective, Placement, Tensor, Torus, algorithm, verify};
//! let torus: Torus = "4x4".parse()?;
//! let placement = Placement::new(&torus, &(0..16).collect::<Vec<_>>())?;
//! let of_rank = |rank| algorithm::schedule(Algorithm::Bucket, Collective::AllReduce, &placement, rank);
//! let proof = verify(&(0..16).map(of_rank).collect::<Vec<_>>(), Tensor::of_bytes(1 << 20))?;
//! assert_eq!(proof.rounds, 30);
//! assert_eq!(proof.traffic.busiest(), (1 << 20) * 15 / 16 / 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod algorithm;
pub mod machine;
pub mod planner;
pub mod schedule;
pub mod shape;
pub mod verify;

pub use machine::{Machine, SharedMemory, Topology};
pub use planner::{PlanError, Request, cost, plan};
pub use schedule::{
    Action, Algorithm, Block, Collective, Schedule, ScheduleTraffic, Source, Step, Table, Tensor,
    UnknownAlgorithm,
};
pub use shape::{
    Arrangement, Coordinates, Dimension, Grid, Link, MAX_DIMENSIONS, Placement, PlacementError,
    TopologyError, Torus,
};
pub use verify::{Proof, VerifyError, verify};
