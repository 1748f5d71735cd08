//! Which ranks of the job are on which host, as far as the launcher decides or is told.

use std::ops::Range;

/// One host of a job of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) name: String,
    /// The IP address where other hosts reach it.
    pub(crate) address: String,
    pub(crate) ranks: Range<u32>,
}

/// The hosts of a job in the order of their ranks; none where it has only this one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct JobHosts(Vec<Host>);

impl JobHosts {
    /// `parts` have a name, an address and a number of ranks.
    pub(crate) fn new(parts: impl IntoIterator<Item = (String, String, u32)>) -> JobHosts {
        let mut first = 0;
        let host = |(name, address, ranks): (String, String, u32)| {
            let range = first..first + ranks;
            first = range.end;
            Host { name, address, ranks: range }
        };
        JobHosts(parts.into_iter().map(host).collect())
    }

    /// This number of hosts that are only pretended, with `ranks` ranks on this one. Each has an address of its own on
    /// the loopback.
    pub(crate) fn pretended(count: u32, ranks: u32) -> JobHosts {
        let part = |(host, own): (u32, u32)| {
            let [high, low] = ((host + 1) as u16).to_be_bytes();
            (format!("h{host}"), format!("127.0.{high}.{low}"), own)
        };
        JobHosts::new((0..).zip(shares(ranks, count)).map(part))
    }

    /// At least one.
    pub(crate) fn count(&self) -> u32 {
        self.0.len().max(1) as u32
    }

    /// The number of the host of a rank, and the host, where there are several.
    pub(crate) fn of(&self, rank: u32) -> Option<(u32, &Host)> {
        let after = self.0.partition_point(|host| host.ranks.start <= rank);
        let host = after.checked_sub(1)?;
        Some((host as u32, &self.0[host]))
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Host> {
        self.0.iter()
    }
}

/// The name that this machine calls itself.
pub(crate) fn own_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// How many ranks each of `count` hosts has, the first ones one more where that does not divide.
pub(crate) fn shares(ranks: u32, count: u32) -> impl Iterator<Item = u32> {
    (0..count).map(move |host| ranks / count + u32::from(host < ranks % count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pretended_hosts_share_the_ranks() {
        let hosts = JobHosts::pretended(3, 8);
        let ranges: Vec<Range<u32>> = hosts.iter().map(|host| host.ranks.clone()).collect();
        assert_eq!(ranges, [0..3, 3..6, 6..8]);
        let (number, host) = hosts.of(6).unwrap();
        assert_eq!((number, host.name.as_str(), host.address.as_str()), (2, "h2", "127.0.0.3"));
        assert!(JobHosts::default().of(0).is_none());
        assert_eq!(JobHosts::default().count(), 1);
    }
}
