//! Messages between nodes: four bytes of length (little endian), then an rkyv archive that is validated before use.

use rkyv::util::AlignedVec;

pub(crate) use archived::{DeadlockProof, Frame, JobFailure, Node};

mod archived {
    // The derive macros write items of their own, which no comment can reach.
    #![allow(missing_docs, unreachable_pub)]

    use rkyv::{Archive, Deserialize, Serialize};

    use super::super::said::{LookAnswer, RankSays};

    /// A node of the job.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct Node {
        /// The name of its host.
        pub(crate) host: String,
        /// The number of ranks there.
        pub(crate) ranks: u32,
        /// The IP address where the others reach it.
        pub(crate) address: String,
    }

    /// One message.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) enum Frame {
        /// The first frame, to node 0: the node that comes, and its code.
        Hello { version: String, node: u32, nodes: u32, max_restarts: u32, code: [u8; 32] },
        /// The answer, with the code of node 0.
        Accepted { code: [u8; 32] },
        /// The answer instead of that: why the node is refused.
        Refused { reason: String },
        /// The ranks that will run on this node, with their public keys.
        Join { node: Node, keys: Vec<Vec<u8>> },
        /// All nodes have come: the job, and the certificates of the ranks on the node that gets this.
        Welcome { id: String, table: Vec<Node>, authority: Vec<u8>, certificates: Vec<Vec<u8>> },
        /// A rank has ended; if in order, also where its communicators stood.
        Ended { code: Option<i32>, signal: Option<i32>, left: RankSays },
        /// The text that ranks raise that need this rank.
        Lost { rank: u32, kind: u32, text: String },
        /// To node 0: why the job fails, as far as this node knows.
        Proposed(JobFailure),
        /// By node 0: why the job has failed, and whether all ranks are started again.
        Stands { told: JobFailure, again: bool },
        /// To node 0: nothing is left here of the ranks that have failed.
        Cleared,
        /// By node 0: nothing is left of them anywhere; the next world begins.
        Again,
        /// To node 0: all frames from here are from now on of that world.
        Begun,
        /// There is no next world, for this reason.
        NoRestart { why: String },
        /// Somebody asked for the end, by this signal.
        Stop { signal: i32 },
        /// To node 0: ranks here have waited for a while.
        Uneasy,
        /// By node 0: all nodes are to say what their ranks do.
        Look { number: u64 },
        /// The views of a node's ranks, to node 0, which passes them on.
        Seen { number: u64, node: u32, said: LookAnswer },
        /// By node 0: all nodes have answered.
        Complete { number: u64 },
        /// By node 0: ranks wait in vain.
        Deadlock(DeadlockProof),
        /// Ranks of this node that keep others waiting, with the line that a timeout adds for each.
        Suspects { node: u32, lines: Vec<(u32, String)> },
        /// Somebody looks at the job on this node, and is to see the ranks of all.
        Watched { by: u32 },
        /// The ranks of a node, for another node: a document of the flight recorder, by way of node 0.
        Flight { of: u32, to: u32, document: Vec<u8> },
        /// To node 0: all ranks here have ended well.
        Done,
        /// By node 0: all ranks have ended well.
        Over,
    }

    /// Why a job has failed, in the words of the node that knows it best.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct JobFailure {
        pub(crate) culprit: Option<u32>,
        pub(crate) exit_code: i32,
        /// The failure may only follow from one that another node knows.
        pub(crate) is_echo: bool,
        pub(crate) who: Vec<String>,
        pub(crate) why: Vec<String>,
        pub(crate) last_line: Option<String>,
    }

    /// The proof that operations can never complete.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct DeadlockProof {
        /// Communicators that can not go on.
        pub(crate) groups: Vec<u64>,
        /// The ranks that are to blame.
        pub(crate) guilty: Vec<u32>,
        /// Ranks that have finished, and are waited for.
        pub(crate) finished: Vec<u32>,
        /// The text that all ranks raise that wait in these communicators.
        pub(crate) text: String,
    }
}

impl Frame {
    /// Returns the bytes of a frame, with its length.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let archive = rkyv::to_bytes::<rkyv::rancor::Error>(self).expect("a frame in memory can be archived");
        [&(archive.len() as u32).to_le_bytes()[..], &archive].concat()
    }

    /// Reads a frame from its bytes, without its length.
    ///
    /// # Errors
    /// When the bytes are no frame.
    pub(crate) fn decode(archive: &[u8]) -> Result<Frame, &'static str> {
        let mut aligned: AlignedVec = AlignedVec::with_capacity(archive.len());
        aligned.extend_from_slice(archive);
        rkyv::from_bytes::<_, rkyv::rancor::Error>(&aligned).map_err(|_| "bytes that are no frame")
    }
}

/// Checks that any bytes are a frame or are refused.
#[cfg(any(test, fuzzing))]
pub(crate) fn survives(archive: &[u8]) {
    if let Ok(frame) = Frame::decode(archive) {
        // Bytes of an archive that nothing points to are not written again.
        assert_eq!(Frame::decode(&frame.encode()[4..]), Ok(frame));
    }
}
