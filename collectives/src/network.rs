//! This process's end of the network: one UDP socket, QUIC connections to other processes over it, a stream for each
//! communicator on them. One thread drives all of it (`driver.rs`); it exists from the first communicator on that
//! needs it. What it says and hears is decided without a socket and a clock (`mesh.rs`, `connections.rs`).

pub mod authority;
pub(crate) mod bell;
mod connections;
mod driver;
mod greeting;
mod link;
mod mesh;
pub(crate) mod tls;

use std::fmt;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use quinn_proto::{MtuDiscoveryConfig, TransportConfig, VarInt};
use rustix::net::sockopt;

use crate::bridge::Bridge;
use crate::failure::{Failure, FailureKind, invalid_usage};
use authority::Credentials;
use bell::Heard;
use driver::{Command, Commands, Driver, Over};
#[cfg(any(test, fuzzing))]
pub(crate) use greeting::Greeting;
pub use link::{Link, NoLink};
use mesh::Mesh;
use tls::{Certificate, Expected, Identity, Who};

/// So long nothing may come from a host before it counts as lost. Each says something four times as often.
const SILENCE: Duration = Duration::from_secs(10);
/// Streams that a process may open to another before some have ended.
const MOST_STREAMS: u32 = 4096;
/// Bytes that one host may have on the way to another in one communicator.
const STREAM_WINDOW: u32 = 4 << 20;
/// Largest datagram where the way allows it, which is found out: what an Ethernet frame of 9000 bytes holds.
const MOST_DATAGRAM: u16 = 8_952;
const SOCKET_BUFFER: usize = 16 << 20;
/// A [`Link`].
const LINK: &str = "TPURUN_LINK";

/// Where a process is reached, and how it is known there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    socket: SocketAddr,
    who: Who,
}

/// With the certificate, unless the authority says who it is.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.socket)?;
        let Who::Shows(certificate) = &self.who else { return Ok(()) };
        write!(f, " ")?;
        certificate.der().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Address {
    /// Reads what [`Display`](fmt::Display) wrote, of this rank of the world.
    pub(crate) fn parse(text: &str, rank: u32) -> Option<Self> {
        let Some((socket, hex)) = text.split_once(' ') else {
            return Some(Self { socket: text.parse().ok()?, who: Who::Rank(rank) });
        };
        let digits: Vec<u32> = hex.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
        let bytes = digits.chunks(2).map(|pair| Some((pair[0] << 4 | pair.get(1)?) as u8));
        let certificate = Certificate::from_der(bytes.collect::<Option<Vec<u8>>>()?);
        Some(Self { socket: socket.parse().ok()?, who: Who::Shows(certificate) })
    }
}

/// The network of one process; nothing happens before it is needed.
#[derive(Debug)]
pub struct Network {
    /// Of the process with this number: one that it forks begins anew.
    running: Mutex<Option<(u32, Arc<Running>)>>,
}

#[derive(Debug)]
pub(crate) struct Running {
    commands: Arc<Commands>,
    expected: Expected,
    address: Address,
}

impl Network {
    /// Not in use yet.
    pub const fn new() -> Self {
        Self { running: Mutex::new(None) }
    }

    /// This process's end on a host that others reach at `ip`; `rank` of the world, if an authority has given it
    /// `credentials`. It is opened at the first time.
    pub(crate) fn open(
        &self,
        ip: IpAddr,
        rank: u32,
        credentials: impl FnOnce() -> Result<Option<Credentials>, Failure>,
    ) -> Result<Arc<Running>, Failure> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((pid, running)) = &*running
            && *pid == std::process::id()
        {
            return Ok(running.clone());
        }
        let started = Running::start(ip, rank, credentials()?)?;
        // A fork's copy of its parent's is left alone: its thread is not here.
        std::mem::forget(running.replace((std::process::id(), started.clone())));
        Ok(started)
    }
}

impl Running {
    /// Where this process is reached.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Has `bridge` talk to the other hosts of its communicator, whose first ranks are at `addresses`, by host.
    pub(crate) fn cross(&self, bridge: Bridge, heard: Heard, id: u64, addresses: Vec<Address>) -> Crossing {
        {
            let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
            for address in &addresses {
                if let Who::Shows(certificate) = &address.who
                    && !expected.contains(certificate)
                {
                    expected.push(certificate.clone());
                }
            }
        }
        let over = Arc::<Over>::default();
        let bridge = Box::new(bridge);
        self.commands.send(Command::Add { id, bridge, heard, addresses, over: over.clone() });
        Crossing { commands: self.commands.clone(), id, over }
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::new()
    }
}

/// A communicator's way to other hosts, which ends with this: what was to be told by then is.
#[derive(Debug)]
pub struct Crossing {
    commands: Arc<Commands>,
    id: u64,
    over: Arc<Over>,
}

impl Crossing {
    /// Waits until all ranks here have left and the other hosts know, at most so long.
    pub(crate) fn wait(self, timeout: Duration) {
        self.over.wait(timeout);
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        self.commands.send(Command::Stop(self.id));
    }
}

impl Running {
    fn start(ip: IpAddr, rank: u32, credentials: Option<Credentials>) -> Result<Arc<Self>, Failure> {
        let refused = |what: &str, error: &dyn fmt::Display| {
            Failure::new(FailureKind::Transport, format!("cannot {what} for other hosts: {error}"))
        };
        let socket = UdpSocket::bind((ip, 0)).map_err(|error| refused("open a socket", &error))?;
        enlarge(&socket);
        let port = socket.local_addr().map_err(|error| refused("open a socket", &error))?.port();
        let identity = Identity::new(credentials)?;
        let expected = Expected::default();
        let address = Address { socket: SocketAddr::new(ip, port), who: identity.known_as(rank) };
        let mesh = Mesh::new(identity, expected.clone(), None)?;
        let commands = Arc::new(Commands::new().map_err(|error| refused("make an event", &error))?);
        let driver = Driver::new(mesh, socket, commands.clone(), given_link()?);
        let driver = driver.map_err(|error| refused("watch a socket", &error))?;
        thread::Builder::new()
            .name("tpurun-net".to_owned())
            .spawn(move || driver.run())
            .map_err(|error| refused("start a thread", &error))?;
        Ok(Arc::new(Self { commands, expected, address }))
    }
}

/// The link that is to be between hosts, worse than the one there is.
fn given_link() -> Result<Option<Link>, Failure> {
    let given = std::env::var(LINK).ok().filter(|text| !text.is_empty());
    given.map(|text| text.parse().map_err(|error| invalid_usage!("{LINK}: {error}"))).transpose()
}

/// What bursts fit into: rounds come as a whole. More than the system allows is for who may.
fn enlarge(socket: &UdpSocket) {
    for bytes in [SOCKET_BUFFER, SOCKET_BUFFER / 4] {
        let _ = sockopt::set_socket_recv_buffer_size_force(socket, bytes)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(socket, bytes));
        let _ = sockopt::set_socket_send_buffer_size(socket, bytes);
        if sockopt::socket_recv_buffer_size(socket).is_ok_and(|now| now >= bytes) {
            return;
        }
    }
}

fn transport() -> TransportConfig {
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(MOST_DATAGRAM);
    let mut transport = TransportConfig::default();
    transport
        .mtu_discovery_config(Some(discovery))
        .max_idle_timeout(Some(SILENCE.try_into().expect("it is short")))
        .keep_alive_interval(Some(SILENCE / 4))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .receive_window(VarInt::from_u32(STREAM_WINDOW))
        .send_window(u64::from(2 * STREAM_WINDOW))
        .max_concurrent_bidi_streams(VarInt::from_u32(MOST_STREAMS))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None);
    transport
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
