//! Which ranks a waiting rank looks at in /proc, so that all that wait see all that are waited for.
//!
//! A look at a process costs some ten microseconds. If each of n waiting ranks looked at each of n others, 512 of
//! them would do nothing else. So they share: each has a stretch of the ranks in question, twice as long as it would
//! have to be, and takes another stretch at every look, so that a waiter that is stopped leaves no gap for long.

/// Ranks that each waiter looks at whatever the others do: groups up to this size are looked at as a whole.
const LEAST: usize = 16;

/// Picks, from `needed`, the ranks that a waiter looks at in its look number `look`, while `waiting` ranks
/// wait and `before` of them come before it.
pub fn share(needed: &[u32], before: usize, waiting: usize, look: u32) -> impl Iterator<Item = u32> {
    let count = (2 * needed.len()).div_ceil(waiting.max(1)).max(LEAST).min(needed.len());
    let start = (before.wrapping_add(look as usize)).wrapping_mul(count);
    (0..count).map(move |step| needed[start.wrapping_add(step) % needed.len()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shares(needed: &[u32], waiting: usize, look: u32) -> Vec<Vec<u32>> {
        (0..waiting).map(|before| share(needed, before, waiting, look).collect()).collect()
    }

    fn distinct(mut ranks: Vec<u32>) -> Vec<u32> {
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    proptest! {
        #[test]
        fn waiters_see_all_together_and_look_at_few(needed in 0_u32..600, waiting in 1_usize..600, look in 0_u32..9) {
            let needed: Vec<u32> = (0..needed).map(|rank| 3 * rank).collect();
            let shares = shares(&needed, waiting, look);
            let total: usize = shares.iter().map(Vec::len).sum();
            prop_assert!(total <= 2 * needed.len() + (LEAST + 1) * waiting);
            prop_assert_eq!(distinct(shares.into_iter().flatten().collect()), needed);
        }

        #[test]
        fn a_waiter_whose_fellows_are_stopped_sees_all_in_time(needed in 1_u32..600, waiting in 1_usize..600) {
            let needed: Vec<u32> = (0..needed).collect();
            let looks = needed.len().div_ceil(LEAST) as u32;
            let seen = (0..looks).flat_map(|look| share(&needed, 0, waiting, look)).collect();
            prop_assert_eq!(distinct(seen), needed);
        }
    }

    #[test]
    fn a_small_group_is_looked_at_as_a_whole() {
        let needed: Vec<u32> = (0..16).collect();
        for share in shares(&needed, 16, 7) {
            assert_eq!(distinct(share), needed);
        }
    }
}
