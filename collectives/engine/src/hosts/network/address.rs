//! Where a process is reached over the network, as others read it in the store of the job.

use std::fmt;
use std::net::SocketAddr;

use super::certificate::{Certificate, Who};
use super::invitation::Invitation;
use tpurun_memory::text::{hex, unhex};
use tpurun_protocol::network::{Bulk, MOST_CONNECTIONS};

/// Where a process is reached, how others know it, and which invitation connections to it must prove.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    pub(super) socket: SocketAddr,
    pub(super) who: Who,
    pub(super) invitation: Invitation,
}

/// The address of a process that takes several connections, each at a port of its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Addresses {
    pub(super) first: Address,
    pub(super) more_ports: Vec<u16>,
    /// The protocols that its ports take: TCP as well as QUIC, or QUIC alone.
    pub(super) bulk: Bulk,
}

impl Addresses {
    /// Connections that it takes.
    pub(super) fn count(&self) -> usize {
        1 + self.more_ports.len()
    }

    /// Where it takes each of them.
    pub(super) fn each(&self) -> impl Iterator<Item = Address> {
        let first = &self.first;
        let ports = std::iter::once(first.socket.port()).chain(self.more_ports.iter().copied());
        ports.map(|port| Address { socket: SocketAddr::new(first.socket.ip(), port), ..first.clone() })
    }
}

/// The text has the certificate, unless the authority says who the process is.
impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first.socket)?;
        self.more_ports.iter().try_for_each(|port| write!(f, ",{port}"))?;
        if self.bulk == Bulk::Tcp {
            write!(f, "/tcp")?;
        }
        write!(f, " {}", self.first.invitation)?;
        let Who::Shows(certificate) = &self.first.who else { return Ok(()) };
        write!(f, " ")?;
        hex(certificate.der(), f)
    }
}

impl Addresses {
    /// Reads the text that [`Display`](fmt::Display) wrote of this rank of the world.
    pub(crate) fn parse(text: &str, rank: u32) -> Option<Self> {
        let mut words = text.split(' ');
        let (sockets, invitation) = (words.next()?, Invitation::parse(words.next()?)?);
        let tcp = sockets.strip_suffix("/tcp");
        let bulk = if tcp.is_some() { Bulk::Tcp } else { Bulk::Quic };
        let mut sockets = tcp.unwrap_or(sockets).split(',');
        let socket = sockets.next()?.parse().ok()?;
        let more_ports: Vec<u16> = sockets.map(str::parse).collect::<Result<_, _>>().ok()?;
        let who = match words.next() {
            None => Who::Rank(rank),
            Some(hex) => Who::Shows(Certificate::from_der(unhex(hex)?)),
        };
        let first = Address { socket, who, invitation };
        let is_one = words.next().is_none() && more_ports.len() < MOST_CONNECTIONS;
        is_one.then_some(Self { first, more_ports, bulk })
    }
}
