//! The identities that ranks show to other hosts: certificates of the job's authority.

use std::collections::HashMap;

use tpurun_memory::Failure;
use tpurun_protocol::authority::{Authority, Credentials, RankKey};

/// The holder of the identities.
#[derive(Debug, Default)]
pub(crate) struct Identities {
    /// By rank, from node 0, if there are other nodes.
    given: Option<HashMap<u32, Credentials>>,
    /// Else this node is the authority, from when a rank asks.
    own: Option<Authority>,
}

impl Identities {
    pub(crate) fn new(given: Option<HashMap<u32, Credentials>>) -> Identities {
        Identities { given, own: None }
    }

    /// # Errors
    /// Why there are none for this rank.
    pub(crate) fn of(&mut self, rank: u32) -> Result<Credentials, String> {
        let failed = |failure: Failure| failure.to_string();
        if let Some(given) = &self.given {
            return given.get(&rank).cloned().ok_or_else(|| format!("rank {rank} is on another node"));
        }
        let authority = match self.own.take() {
            Some(authority) => authority,
            None => Authority::new().map_err(failed)?,
        };
        let authority = self.own.insert(authority);
        let key = RankKey::new().map_err(failed)?;
        let certificate = authority.certify(rank, key.public()).map_err(failed)?;
        Ok(key.certified(authority.certificate(), &certificate))
    }
}
