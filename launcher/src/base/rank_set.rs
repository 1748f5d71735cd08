//! A set of ranks as people write it: `0-3,7`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Ranks as sorted ranges that neither touch nor overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankSet {
    ranges: Vec<RangeInclusive<u32>>,
}

impl RankSet {
    /// The first `ranks` ranks.
    pub(crate) fn all(ranks: u32) -> RankSet {
        (0..ranks).collect()
    }

    pub(crate) fn contains(&self, rank: u32) -> bool {
        let after = self.ranges.partition_point(|range| *range.end() < rank);
        self.ranges.get(after).is_some_and(|range| range.contains(&rank))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many ranks are in it.
    pub(crate) fn len(&self) -> usize {
        self.ranges.iter().map(|range| (range.end() - range.start()) as usize + 1).sum()
    }

    /// The smallest one.
    pub(crate) fn first(&self) -> Option<u32> {
        self.ranges.first().map(|range| *range.start())
    }

    /// The largest one.
    pub(crate) fn last(&self) -> Option<u32> {
        self.ranges.last().map(|range| *range.end())
    }

    /// These ranks and more.
    pub(crate) fn union_with(&self, more: impl IntoIterator<Item = u32>) -> RankSet {
        let more = more.into_iter().map(|rank| rank..=rank);
        RankSet::from_ranges(self.ranges.iter().cloned().chain(more).collect())
    }

    /// One after the other.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().cloned().flatten()
    }

    fn from_ranges(mut ranges: Vec<RangeInclusive<u32>>) -> RankSet {
        ranges.sort_by_key(|range| *range.start());
        let mut merged: Vec<RangeInclusive<u32>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match merged.last_mut() {
                Some(last) if *range.start() <= last.end().saturating_add(1) => {
                    *last = *last.start()..=*last.end().max(range.end());
                }
                _ => merged.push(range),
            }
        }
        RankSet { ranges: merged }
    }
}

impl FromIterator<u32> for RankSet {
    fn from_iter<I: IntoIterator<Item = u32>>(ranks: I) -> RankSet {
        RankSet::from_ranges(ranks.into_iter().map(|rank| rank..=rank).collect())
    }
}

impl FromStr for RankSet {
    type Err = String;

    fn from_str(text: &str) -> Result<RankSet, String> {
        let wrong = || format!("expected ranks such as 0-3,7, given {text:?}");
        let number = |digits: &str| digits.trim().parse::<u32>().map_err(|_| wrong());
        let range = |part: &str| match part.split_once('-') {
            None => number(part).map(|rank| rank..=rank),
            Some((start, end)) => Ok(number(start)?..=number(end)?),
        };
        let ranges = text.split(',').map(range).collect::<Result<Vec<_>, _>>()?;
        if ranges.iter().any(RangeInclusive::is_empty) {
            Err(wrong())
        } else {
            Ok(RankSet::from_ranges(ranges))
        }
    }
}

impl fmt::Display for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            match (range.start(), range.end()) {
                (start, end) if start == end => write!(f, "{comma}{start}")?,
                (start, end) => write!(f, "{comma}{start}-{end}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_print_as_ranges() {
        for (ranks, text) in [
            (&[][..], ""),
            (&[5], "5"),
            (&[0, 1], "0-1"),
            (&[3, 1, 0, 2, 2], "0-3"),
            (&[0, 1, 3, 4, 5, 9], "0-1,3-5,9"),
        ] {
            assert_eq!(ranks.iter().copied().collect::<RankSet>().to_string(), text);
        }
    }

    #[test]
    fn what_is_printed_is_read_back() {
        for text in ["0", "0-3,7", "1,3-63", "4294967295"] {
            assert_eq!(text.parse::<RankSet>().unwrap().to_string(), text);
        }
        assert_eq!("7,0-2, 2-4".parse::<RankSet>().unwrap().to_string(), "0-4,7");
    }

    #[test]
    fn membership_follows_the_ranges() {
        let set: RankSet = "0-1,3-5,9".parse().unwrap();
        let inside: Vec<u32> = (0..12).filter(|rank| set.contains(*rank)).collect();
        assert_eq!(inside, [0, 1, 3, 4, 5, 9]);
        assert_eq!((set.len(), set.last(), set.is_empty()), (6, Some(9), false));
        assert_eq!(RankSet::all(64).to_string(), "0-63");
        assert!(RankSet::all(0).is_empty());
    }

    #[test]
    fn nonsense_is_refused_in_one_line() {
        for text in ["", "a", "1-", "-1", "3-1", "1,,2", "4294967296"] {
            let error = text.parse::<RankSet>().unwrap_err();
            assert_eq!(error, format!("expected ranks such as 0-3,7, given {text:?}"));
        }
    }
}
