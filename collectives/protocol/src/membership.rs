//! The members of a communicator, and what messages call it.

use std::hash::{DefaultHasher, Hash, Hasher};

/// The members of a communicator.
#[derive(Clone, Debug)]
pub struct Membership {
    /// The process group's name, shown in messages.
    pub name: String,
    /// This rank in the group.
    pub rank: u32,
    /// The ranks of the group by their rank in the world.
    pub world_ranks: Vec<u32>,
    /// Which generation of the group this is: one more each time that survivors go on without the lost.
    pub epoch: u32,
}

impl Membership {
    /// Ranks of the group.
    pub fn size(&self) -> u32 {
        self.world_ranks.len() as u32
    }

    /// Returns the name in messages: most names are numbers or digests, which torch makes and nobody knows as
    /// groups.
    pub fn title(&self) -> String {
        let is_made_up = self.name.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'_');
        if is_made_up { format!("group {}", self.name) } else { self.name.clone() }
    }

    /// A number for the group: the same on all its ranks, different for other names, ranks or epochs.
    pub fn id(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.name, &self.world_ranks, self.epoch).hash(&mut hasher);
        hasher.finish()
    }
}
