//! Ranks as people read them: `0-1,3-63`.

use std::fmt;

/// Displays sorted ranks as ranges.
#[derive(Clone, Copy, Debug)]
pub struct RankList<'a>(pub &'a [u32]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranks = self.0.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        for (index, run) in ranks.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if index == 0 { "" } else { "," };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => unreachable!("chunk_by gives no empty chunk"),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_become_ranges() {
        assert_eq!(RankList(&[5, 0, 1, 3, 4, 9]).to_string(), "0-1,3-5,9");
        assert_eq!(RankList(&[]).to_string(), "");
    }
}
