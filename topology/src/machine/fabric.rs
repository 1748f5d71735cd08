//! The machine that ranks run on: what its links and its memory take.

/// The machine that the ranks of a communicator run on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Machine {
    /// Seconds from a rank to its neighbour for a message of no bytes.
    pub alpha_s: f64,
    /// Bytes per second over one link, in one direction.
    pub link_bytes_per_s: f64,
    /// Present when all ranks of the communicator share the memory of one host; links do not count then.
    pub shared: Option<SharedMemory>,
}

/// The memory and the cores that the ranks of one host share.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedMemory {
    /// Cores that the ranks may run on, at least 1.
    pub cores: u32,
    /// Seconds to wake one waiting rank.
    pub wake_s: f64,
    /// Bytes per second that all cores together read and write.
    pub memory_bytes_per_s: f64,
}
