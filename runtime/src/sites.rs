//! The holders of device memory: blocks from 1 MiB on by the line that allocated them, smaller ones as a
//! sum.

use std::collections::HashMap;
use std::sync::Arc;

/// From this size on, a block remembers its line (`TPURUN_SITE_BYTES`).
pub(crate) const SITE_BYTES: u64 = 1 << 20;

/// Live blocks of one line.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Held {
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

/// Live blocks by line. Lines that hold nothing any more are forgotten.
#[derive(Debug, Default)]
pub(crate) struct Sites {
    held: HashMap<Arc<str>, Held>,
}

impl Sites {
    /// A block of this line is live; the name that is kept with it.
    pub(crate) fn add(&mut self, site: &str, bytes: u64) -> Arc<str> {
        let name = self.held.get_key_value(site).map_or_else(|| site.into(), |(name, _)| name.clone());
        let held = self.held.entry(name.clone()).or_default();
        *held = Held { bytes: held.bytes + bytes, blocks: held.blocks + 1 };
        name
    }

    /// It no longer is.
    pub(crate) fn remove(&mut self, site: &Arc<str>, bytes: u64) {
        let held = self.held.get_mut(site).expect("a live block's line is known");
        *held = Held { bytes: held.bytes - bytes, blocks: held.blocks - 1 };
        if held.blocks == 0 {
            self.held.remove(site);
        }
    }

    /// All lines, those that hold most first.
    pub(crate) fn most_first(&self) -> Vec<(Arc<str>, Held)> {
        let mut all: Vec<_> = self.held.iter().map(|(site, held)| (site.clone(), *held)).collect();
        all.sort_unstable_by(|(a, x), (b, y)| y.bytes.cmp(&x.bytes).then_with(|| a.cmp(b)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_hold_nothing_are_forgotten() {
        let mut sites = Sites::default();
        let a = sites.add("a.py:1", 10);
        let again = sites.add("a.py:1", 5);
        assert!(Arc::ptr_eq(&a, &again));
        let b = sites.add("b.py:2", 40);
        let listed = sites.most_first();
        assert_eq!(listed[0], (b.clone(), Held { bytes: 40, blocks: 1 }));
        assert_eq!(listed[1], (a.clone(), Held { bytes: 15, blocks: 2 }));
        sites.remove(&b, 40);
        sites.remove(&a, 10);
        assert_eq!(sites.most_first(), [(a.clone(), Held { bytes: 5, blocks: 1 })]);
        sites.remove(&a, 5);
        assert!(sites.held.is_empty());
    }
}
