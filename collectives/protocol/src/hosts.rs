//! Which ranks of a communicator share a host, and so memory.

use std::io;
use std::net::{IpAddr, UdpSocket};

/// The hosts of a communicator, in the order of their first ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// By rank.
    of: Vec<u32>,
    /// By host: its name and its ranks, in order.
    hosts: Vec<(String, Vec<u32>)>,
}

/// Ranks for which this differs share no memory: hosts that are only pretended.
pub const HOST: &str = "TPURUN_HOST";

/// Returns the name of this host in messages.
pub fn shown_name() -> String {
    let given = std::env::var(HOST).ok().filter(|name| !name.is_empty());
    let name = given.unwrap_or_else(own_name);
    name.replace(char::is_control, "")
}

/// Returns the name that this host calls itself.
pub fn own_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl Hosts {
    /// All ranks on this one.
    pub fn one(ranks: u32) -> Self {
        Self::new(vec![0; ranks as usize], vec![own_name()])
    }

    fn new(of: Vec<u32>, names: Vec<String>) -> Self {
        let mut hosts: Vec<(String, Vec<u32>)> = names.into_iter().map(|name| (name, vec![])).collect();
        for (rank, host) in (0..).zip(&of) {
            hosts[*host as usize].1.push(rank);
        }
        Self { of, hosts }
    }

    /// By what each rank says of where it is: a name to show, and what differs where memory is not shared.
    pub fn by_places(places: &[(String, String)]) -> Self {
        let mut known: Vec<&(String, String)> = vec![];
        let mut of = Vec::with_capacity(places.len());
        for place in places {
            let host = known.iter().position(|other| other.1 == place.1).unwrap_or(known.len());
            if host == known.len() {
                known.push(place);
            }
            of.push(host as u32);
        }
        let name = |host: usize| {
            let (name, _) = known[host];
            match known[..host].iter().filter(|(other, _)| other == name).count() {
                0 => name.clone(),
                // Containers may be called alike.
                before => format!("{name}({})", before + 1),
            }
        };
        let names = (0..known.len()).map(name).collect();
        Self::new(of, names)
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// Where a rank is.
    pub fn of(&self, rank: u32) -> u32 {
        self.of[rank as usize]
    }

    /// Returns the name of a host.
    pub fn name(&self, host: u32) -> &str {
        &self.hosts[host as usize].0
    }

    /// The ranks of one host, in order.
    pub fn ranks(&self, host: u32) -> &[u32] {
        &self.hosts[host as usize].1
    }

    /// The rank of a host that makes its segment and speaks for it.
    pub fn first(&self, host: u32) -> u32 {
        self.ranks(host)[0]
    }
}

/// One word for each rank, then one line for each host.
impl std::fmt::Display for Hosts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of: Vec<String> = self.of.iter().map(u32::to_string).collect();
        write!(f, "{}", of.join(" "))?;
        self.hosts.iter().try_for_each(|(name, _)| write!(f, "\n{name}"))
    }
}

impl Hosts {
    /// Reads what [`Display`](std::fmt::Display) wrote, for `ranks` ranks; `None` when it is something else.
    pub fn parse(text: &str, ranks: u32) -> Option<Self> {
        let mut lines = text.lines();
        let of: Vec<u32> = lines.next()?.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let names: Vec<String> = lines.map(str::to_owned).collect();
        // Numbered by their first ranks, so each host has one.
        let mut next = 0;
        let is_in_order = of.iter().all(|host| {
            let is_new = *host == next;
            next += u32::from(is_new);
            *host < next
        });
        (of.len() == ranks as usize && is_in_order && next as usize == names.len())
            .then(|| Self::new(of, names))
    }
}

/// The address that this host has on its way to another. Nothing is sent: connecting a datagram socket only looks
/// up the route.
///
/// # Errors
/// That there is no way.
pub fn address_towards(to: IpAddr) -> io::Result<IpAddr> {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect((to, 9))?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hosts_are_numbered_by_their_first_ranks() {
        let place = |name: &str, id: &str| (name.to_owned(), id.to_owned());
        let hosts = Hosts::by_places(&[place("b", "7"), place("a", "3"), place("b", "7"), place("a", "4")]);
        assert_eq!((hosts.of.as_slice(), hosts.count()), (&[0, 1, 0, 2][..], 3));
        assert_eq!([0, 1, 2].map(|host| hosts.name(host)), ["b", "a", "a(2)"]);
        assert_eq!(hosts.ranks(0), [0, 2]);
        assert_eq!([0, 1, 2].map(|host| hosts.first(host)), [0, 1, 3]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_written_is_read(places in proptest::collection::vec(("[a-c]", "[0-3]"), 1..20)) {
            let hosts = Hosts::by_places(&places);
            prop_assert_eq!(Hosts::parse(&hosts.to_string(), places.len() as u32), Some(hosts));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-3 \na]{0,20}") {
            if let Some(hosts) = Hosts::parse(&text, 3) {
                prop_assert!(!hosts.ranks(hosts.count() - 1).is_empty());
            }
        }
    }
}
