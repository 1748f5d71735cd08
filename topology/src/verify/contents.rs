//! The contents of a block: whose inputs it holds, folded in which order.

use std::collections::BTreeMap;

/// The symbolic contents of a block.
#[derive(Clone, Debug)]
pub(super) struct Contents {
    pub(super) ranks: Contributors,
    pub(super) order: FoldOrder,
}

/// The order of folding: equal for contents folded alike, different for all others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum FoldOrder {
    Input(u32),
    Fold(usize),
}

/// Every fold made so far, so that equal folds get equal names.
#[derive(Default)]
pub(super) struct Folds {
    names: BTreeMap<(FoldOrder, FoldOrder), usize>,
}

impl Contents {
    /// The input of one rank.
    pub(super) fn input(rank: u32) -> Self {
        Self { ranks: Contributors::of(rank), order: FoldOrder::Input(rank) }
    }
}

impl Folds {
    /// Folds `first` into `second`, unless a rank is in both: then that rank is the error.
    pub(super) fn fold(&mut self, first: &Contents, second: &mut Contents) -> Result<(), u32> {
        second.ranks.add(&first.ranks)?;
        let name = self.names.len();
        second.order = FoldOrder::Fold(*self.names.entry((first.order, second.order)).or_insert(name));
        Ok(())
    }
}

/// The ranks whose inputs are in a block, one bit each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Contributors {
    words: Vec<u64>,
}

impl Contributors {
    /// The set of one rank.
    pub(super) fn of(rank: u32) -> Self {
        let mut words = vec![0; rank as usize / 64 + 1];
        words[rank as usize / 64] = 1 << (rank % 64);
        Self { words }
    }

    /// The set of ranks 0..`ranks`.
    pub(super) fn of_all(ranks: u32) -> Self {
        let mut all = Self { words: vec![] };
        (0..ranks).for_each(|rank| all.add(&Self::of(rank)).expect("the ranks differ"));
        all
    }

    /// The ranks in it, lowest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.words).flat_map(|(index, &word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }

    fn add(&mut self, other: &Self) -> Result<(), u32> {
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
}
