//! This process's end of the network: a UDP socket, QUIC connections to other processes over it, a stream for each
//! communicator on them. One thread drives all of it (`driver.rs`); it exists while there are communicators that need
//! it, and the last one of them joins it. Code without a socket and a clock decides what is said and heard
//! (`sessions.rs`, with `mesh.rs` and `connections.rs` for QUIC). Large pieces go over TCP beside that
//! (`tcp_sessions.rs`), or over QUIC, too. Where one thread may be too slow there are several. Each has all of that, so
//! there are several connections to every other process.

mod address;
mod certificate;
mod communicators;
mod connections;
mod driver;
mod emulated_link;
mod failures;
mod flow;
mod greeting;
mod heard;
mod invitation;
mod mesh;
mod protocol;
mod purposes;
mod quic_settings;
mod quic_streams;
mod records;
mod session;
mod sessions;
mod streams;
mod tcp_connection;
mod tcp_sessions;
mod tcp_streams;
mod timeouts;
pub(crate) mod tls;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::net::sockopt;

use crate::hosts::bridge::{Bridge, Shares};
use address::Address;
pub(crate) use address::Addresses;
use certificate::Who;
use driver::{Added, Commands, Driver, Over};
use failures::refused;
#[cfg(any(test, fuzzing))]
pub(crate) use greeting::Greeting;
use heard::BellRings;
use mesh::Mesh;
use protocol::Protocol;
use tcp_sessions::TcpSessions;
use tls::{Expected, Identity};
use tpurun_memory::failure::Failure;
use tpurun_memory::invalid_usage;
use tpurun_memory::joined::Joined;
use tpurun_memory::process::Owner;
use tpurun_protocol::authority::Credentials;
use tpurun_protocol::config::usable_cpus;
use tpurun_protocol::network::{Bulk, Link, parse_connections};
use tpurun_protocol::segment::Segment;
use tpurun_protocol::segment::bell::Ears;

const SOCKET_BUFFER: usize = 16 << 20;
/// The variable that describes a [`Link`].
const LINK: &str = "TPURUN_LINK";
/// The variable that says how many connections there are between each two processes.
const CONNECTIONS: &str = "TPURUN_CONNECTIONS";
/// The variable that names a [`Bulk`].
const BULK: &str = "TPURUN_BULK";
/// Ports that are tried until one is free for both UDP and TCP.
const PORTS: usize = 64;
/// Connections that the system takes before this process has looked at them. Linux allows 4096 by default.
const QUEUED: i32 = 4096;
/// Connections to each other process that are made unasked, at most.
const MANY_CONNECTIONS: usize = 4;
/// Processors for each connection that is made unasked: ranks need processors, too.
const CORES: usize = 4;

/// The network of one process; nothing happens before it is needed.
#[derive(Debug)]
pub struct Network {
    /// The running network, which communicators own. A fork does not take over that of its parent.
    running: Mutex<Weak<Running>>,
    /// How many connections there are to each other process, and what carries large rounds, where the environment does
    /// not decide that.
    given: Option<(usize, Bulk)>,
}

#[derive(Debug)]
pub(crate) struct Running {
    threads: Vec<Driving>,
    expected: Expected,
    addresses: Addresses,
    owner: Owner,
}

/// All threads end at the same time, and not one after the other.
impl Drop for Running {
    fn drop(&mut self) {
        if self.owner.is_here() {
            self.threads.iter().for_each(|thread| thread.commands.end());
        }
    }
}

/// A thread with its driver, which ends with this.
#[derive(Debug)]
struct Driving {
    commands: Arc<Commands>,
    /// Joined after the thread was told to end.
    _thread: Joined,
    owner: Owner,
}

impl Driving {
    fn start(driver: Driver, commands: Arc<Commands>) -> Result<Self, Failure> {
        let thread = thread::Builder::new().name("tpurun-net".to_owned()).spawn(move || driver.run());
        let thread = thread.map_err(|error| refused("start a thread", &error))?;
        Ok(Self { commands, _thread: Joined::new(thread), owner: Owner::here() })
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        // A fork shares what wakes the thread of its parent, and may have a copy of a lock that is never released.
        if self.owner.is_here() {
            self.commands.end();
        }
    }
}

impl Network {
    /// A network that is not in use yet.
    pub const fn new() -> Self {
        Self { running: Mutex::new(Weak::new()), given: None }
    }

    /// A network with at most `count` connections to each other process.
    pub const fn of_connections(count: usize, bulk: Bulk) -> Self {
        Self { running: Mutex::new(Weak::new()), given: Some((count, bulk)) }
    }

    /// This process's end on a host that others reach at `ip`. The process is `rank` of the world, if an authority has
    /// given it `credentials`. The first call opens the end.
    pub(crate) fn open(
        &self,
        ip: IpAddr,
        rank: u32,
        credentials: impl FnOnce() -> Result<Option<Credentials>, Failure>,
    ) -> Result<Arc<Running>, Failure> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = running.upgrade()
            && running.owner.is_here()
        {
            return Ok(running);
        }
        let started = Running::start(ip, rank, credentials()?, self.given)?;
        *running = Arc::downgrade(&started);
        Ok(started)
    }
}

impl Running {
    /// Where this process is reached.
    pub(crate) fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Has bridges talk to the other hosts of a communicator, whose first ranks are at `addresses`, by host. There are
    /// as many connections as all of them take.
    pub(crate) fn cross(
        self: &Arc<Self>,
        segment: &Arc<Segment>,
        ears: Ears,
        id: u64,
        addresses: &[Addresses],
    ) -> Crossing {
        self.expect(addresses);
        let (shares, at) = self.distribute(addresses);
        let connections = at.iter().map(|(driver, _)| driver + 1).max().unwrap_or(0);
        let drivers: Vec<Arc<Commands>> =
            self.threads[..connections].iter().map(|thread| thread.commands.clone()).collect();
        let each: Vec<Vec<Address>> = addresses.iter().map(|addresses| addresses.each().collect()).collect();
        let mut heard = Some(BellRings::new(ears, segment.clone()));
        let mut ways = vec![];
        for (bridge, (driver, carrier)) in Bridge::all(segment, shares).into_iter().zip(at) {
            // The bridge of the first driver calls all others, and each of these calls the first.
            let calls = match (ways.len(), driver) {
                (0, _) => &drivers[1..],
                (_, 0) => &[],
                _ => &drivers[..1],
            };
            let addresses = each.iter().map(|each| each[driver].clone()).collect();
            let over = Arc::<Over>::default();
            let (heard, calls) = (heard.take(), calls.to_vec());
            let added = Added { id, carrier, bridge, heard, addresses, calls, over: over.clone() };
            ways.push((drivers[driver].clone(), over, added));
        }
        // The first driver comes last: those that it calls are there by then.
        let ways = ways.into_iter().rev().map(|(driver, over, added)| {
            driver.add(added);
            (driver, over)
        });
        Crossing { id, ways: ways.collect(), running: self.clone() }
    }

    /// Lets in the processes at these addresses.
    fn expect(&self, addresses: &[Addresses]) {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        for Addresses { first, .. } in addresses {
            if let Who::Shows(certificate) = &first.who
                && !expected.contains(certificate)
            {
                expected.push(certificate.clone());
            }
        }
    }

    /// The shares of the bridges to these addresses, and by bridge, the driver that it is at and its protocol.
    fn distribute(&self, addresses: &[Addresses]) -> (Shares, Vec<(usize, Protocol)>) {
        let connections = addresses.iter().map(Addresses::count).fold(self.threads.len(), usize::min);
        let each_over = |protocol| (0..connections).map(move |driver| (driver, protocol));
        match addresses.iter().chain([&self.addresses]).all(|addresses| addresses.bulk == Bulk::Tcp) {
            false => (Shares::All(connections), each_over(Protocol::Quic).collect()),
            true => {
                let first = std::iter::once((0, Protocol::Quic));
                (Shares::AllButFirst(connections), first.chain(each_over(Protocol::Tcp)).collect())
            }
        }
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::new()
    }
}

/// A communicator's way to other hosts. The way ends with this value, after everything has been told that was to be
/// told.
#[derive(Debug)]
pub struct Crossing {
    id: u64,
    /// The way over each connection: its driver, and whether it has ended.
    ways: Vec<(Arc<Commands>, Arc<Over>)>,
    /// The last one ends the threads.
    running: Arc<Running>,
}

impl Crossing {
    /// Waits until all ranks here have left and the other hosts know, at most so long.
    pub(crate) fn wait(self, timeout: Duration) {
        let until = Instant::now() + timeout;
        for (_, over) in &self.ways {
            over.wait(until.saturating_duration_since(Instant::now()));
        }
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        if self.running.owner.is_here() {
            self.ways.iter().for_each(|(driver, _)| driver.stop(self.id));
        }
    }
}

impl Running {
    fn start(
        ip: IpAddr,
        rank: u32,
        credentials: Option<Credentials>,
        given: Option<(usize, Bulk)>,
    ) -> Result<Arc<Self>, Failure> {
        // The link between hosts that is to be emulated, worse than the real one.
        let link: Option<Link> = setting(LINK, str::parse)?;
        let (connections, bulk) = match given {
            Some(given) => given,
            None => (self::connections(link)?, bulk_beside(link, setting(BULK, str::parse)?)?),
        };
        // All connections share one emulated link.
        let link = link.map(|link| Link { rate: link.rate.div_ceil(connections as u64), ..link });
        let identity = Arc::new(Identity::new(credentials)?);
        let expected = Expected::default();
        let made: Vec<_> = (0..connections)
            .map(|_| make_driver(ip, &identity, &expected, link, bulk))
            .collect::<Result<_, Failure>>()?;
        let (mut threads, mut ports) = (vec![], vec![]);
        for (driver, commands, port) in made {
            threads.push(Driving::start(driver, commands)?);
            ports.push(port);
        }
        let more_ports = ports.split_off(1);
        let first = identity.at(SocketAddr::new(ip, ports[0]), rank);
        let (addresses, owner) = (Addresses { first, more_ports, bulk }, Owner::here());
        Ok(Arc::new(Self { threads, expected, addresses, owner }))
    }
}

/// Everything that one thread drives, the commands that it takes, and the port of its sockets.
fn make_driver(
    ip: IpAddr,
    identity: &Arc<Identity>,
    expected: &Expected,
    link: Option<Link>,
    bulk: Bulk,
) -> Result<(Driver, Arc<Commands>, u16), Failure> {
    let (socket, listener) = bind(ip, bulk).map_err(|error| refused("open a socket", &error))?;
    enlarge(&socket);
    let port = socket.local_addr().map_err(|error| refused("open a socket", &error))?.port();
    let mesh = Mesh::new(identity.clone(), expected.clone(), None)?;
    let commands = Arc::new(Commands::new().map_err(|error| refused("make an event", &error))?);
    let epoll =
        epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| refused("watch a socket", &error))?;
    let epoll = Arc::new(epoll);
    let lanes = listener
        .map(|listener| TcpSessions::new(listener, epoll.clone(), identity.clone(), expected.clone()));
    let driver = Driver::new(mesh, lanes.transpose()?, socket, epoll, commands.clone(), link);
    Ok((driver.map_err(|error| refused("watch a socket", &error))?, commands, port))
}

/// A port for QUIC, and the same one for TCP if that is wanted.
fn bind(ip: IpAddr, bulk: Bulk) -> io::Result<(UdpSocket, Option<TcpListener>)> {
    let mut tries = 0;
    loop {
        let socket = UdpSocket::bind((ip, 0))?;
        if bulk == Bulk::Quic {
            return Ok((socket, None));
        }
        match TcpListener::bind((ip, socket.local_addr()?.port())) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                // Strangers that come faster than they are sent away must not fill the queue.
                rustix::net::listen(&listener, QUEUED)?;
                return Ok((socket, Some(listener)));
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && tries < PORTS => tries += 1,
            Err(error) => return Err(error),
        }
    }
}

/// The number that is given, or what suits the processors here.
fn connections(link: Option<Link>) -> Result<usize, Failure> {
    Ok(setting(CONNECTIONS, parse_connections)?.unwrap_or_else(|| match link {
        // An emulated link is the same everywhere, whatever the processors are.
        Some(_) => 1,
        None => (usable_cpus() as usize / CORES).clamp(1, MANY_CONNECTIONS),
    }))
}

/// The protocol that is asked for, or TCP. An emulated link carries datagrams, and so needs QUIC.
fn bulk_beside(link: Option<Link>, given: Option<Bulk>) -> Result<Bulk, Failure> {
    match (link, given) {
        (Some(_), Some(Bulk::Tcp)) => {
            Err(invalid_usage!("{BULK}: expected quic beside {LINK}, which is one of datagrams, given tcp"))
        }
        (Some(_), _) => Ok(Bulk::Quic),
        (None, given) => Ok(given.unwrap_or(Bulk::Tcp)),
    }
}

/// The value of a variable of the environment, unless it is not set.
fn setting<T, E: fmt::Display>(name: &str, parse: fn(&str) -> Result<T, E>) -> Result<Option<T>, Failure> {
    let given = std::env::var(name).ok().filter(|text| !text.is_empty());
    given.map(|text| parse(&text).map_err(|error| invalid_usage!("{name}: {error}"))).transpose()
}

/// Makes the buffers of a socket hold bursts, as rounds come as a whole. Only a privileged process gets more than the
/// system allows.
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

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
