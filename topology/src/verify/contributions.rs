//! The set of ranks whose input is in a block.

/// A set of ranks, one bit each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Contributions {
    words: Vec<u64>,
}

impl Contributions {
    /// The set of one rank.
    pub(super) fn of(rank: u32) -> Self {
        let mut words = vec![0; rank as usize / 64 + 1];
        words[rank as usize / 64] = 1 << (rank % 64);
        Self { words }
    }

    /// The set of ranks 0..`ranks`.
    pub(super) fn of_all(ranks: u32) -> Self {
        let mut all = Self { words: vec![] };
        (0..ranks).for_each(|rank| all.fold(&Self::of(rank)).expect("the ranks differ"));
        all
    }

    /// Adds another set, unless a rank is in both: then that rank is the error.
    pub(super) fn fold(&mut self, other: &Self) -> Result<(), u32> {
        for (index, (mine, theirs)) in (0..).zip(self.words.iter().zip(&other.words)) {
            let twice = mine & theirs;
            if twice != 0 {
                return Err(index * 64 + twice.trailing_zeros());
            }
        }
        self.words.resize(self.words.len().max(other.words.len()), 0);
        self.words.iter_mut().zip(&other.words).for_each(|(mine, theirs)| *mine |= theirs);
        Ok(())
    }

    /// The ranks in it, lowest first.
    pub(super) fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.words).flat_map(|(index, &word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }
}
