//! What ranks show to other hosts: certificates of the job's authority.

use std::collections::HashMap;

use tpurun_collectives::network::authority::{Authority, Credentials, RankKey};

/// Who has them.
#[derive(Debug)]
pub(crate) enum Identities {
    /// All hosts of the job are this one, and so is the authority; it is made when a rank asks.
    Own(Option<Authority>),
    /// By rank, from node 0.
    Given(HashMap<u32, Credentials>),
}

impl Identities {
    /// # Errors
    /// Why there are none for this rank.
    pub(crate) fn of(&mut self, rank: u32) -> Result<Credentials, String> {
        match self {
            Identities::Given(all) => {
                all.get(&rank).cloned().ok_or_else(|| format!("rank {rank} is on another node"))
            }
            Identities::Own(authority) => {
                let made = match authority.take() {
                    Some(authority) => Ok(authority),
                    None => Authority::new(),
                };
                let authority = authority.insert(made.map_err(|failure| failure.to_string())?);
                let key = RankKey::new().map_err(|failure| failure.to_string())?;
                let certificate = authority.certify(rank, key.public());
                let certificate = certificate.map_err(|failure| failure.to_string())?;
                Ok(key.certified(authority.certificate(), &certificate))
            }
        }
    }
}

impl Default for Identities {
    fn default() -> Identities {
        Identities::Own(None)
    }
}
