//! This process's end of the network: one UDP socket, QUIC connections to other processes over it, a stream for each
//! communicator on them. One thread drives all of it; it exists from the first communicator on that needs it.
//!
//! A stream begins with a greeting that says which communicator it is of and from which host. Nothing is
//! believed before TLS has shown who is at the other end (`tls.rs`), and that is where the host's first rank is.

pub mod authority;
pub(crate) mod bell;
pub(crate) mod tls;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use quinn::{Connection, Endpoint, MtuDiscoveryConfig, RecvStream, SendStream, TransportConfig, VarInt};
use rustix::net::sockopt;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{mpsc, oneshot, watch};

use crate::bridge::{Bridge, Frames, Outbox};
use crate::failure::{Failure, FailureKind};
use authority::Credentials;
use bell::Heard;
use tls::{Certificate, Expected, Identity, Who};

/// So long nothing may come from a host before it counts as lost. Each says something four times as often.
const SILENCE: Duration = Duration::from_secs(10);
/// A bridge looks so often whether anything changed that nobody rang for.
const LOOK: Duration = Duration::from_millis(100);
/// Between two tries to connect.
const AGAIN: Duration = Duration::from_millis(100);
/// A stream that does not say what it is for this long is closed.
const GREETING: Duration = Duration::from_secs(5);
/// Streams of communicators that are not made here yet.
const MOST_EARLY: usize = 4096;
/// Of these, that say they are for the same.
const MOST_ALIKE: usize = 8;
/// Bytes that one host may have on the way to another in one communicator.
const STREAM_WINDOW: u32 = 4 << 20;
/// Largest datagram where the way allows it, which is found out: ten of them, sent by one call, are below 64 KiB.
const MOST_DATAGRAM: u16 = 6_400;
const SOCKET_BUFFER: usize = 16 << 20;

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

/// The first words of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Greeting {
    /// The same on all hosts of one communicator, another one for each that is made.
    pub(crate) communicator: u64,
    /// Whose stream it is.
    pub(crate) host: u32,
}

const GREETING_BYTES: usize = 16;
const GREETING_MAGIC: u32 = u32::from_le_bytes(*b"TPNB");

impl Greeting {
    pub(crate) fn encode(self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..4].copy_from_slice(&GREETING_MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.host.to_le_bytes());
        bytes[8..].copy_from_slice(&self.communicator.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; GREETING_BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
        let communicator = u64::from_le_bytes(bytes[8..].try_into().expect("eight"));
        (word(0) == GREETING_MAGIC).then_some(Self { communicator, host: word(4) })
    }
}

/// A stream that another process has opened, and which one that is.
struct Incoming {
    send: SendStream,
    receive: RecvStream,
    from: Certificate,
}

/// Streams by what they are for: one side comes first.
#[derive(Default)]
struct Meetings {
    /// Whoever they are from.
    early: HashMap<Greeting, Vec<Incoming>>,
    waiting: HashMap<Greeting, (Who, oneshot::Sender<Incoming>)>,
}

/// The network of one process; nothing happens before it is needed.
#[derive(Debug)]
pub struct Network {
    /// Of the process with this number: one that it forks begins anew.
    running: Mutex<Option<(u32, Arc<Running>)>>,
}

pub(crate) struct Running {
    handle: Handle,
    endpoint: Endpoint,
    identity: Identity,
    expected: Expected,
    address: Address,
    meetings: Mutex<Meetings>,
    connections: tokio::sync::Mutex<HashMap<SocketAddr, Connection>>,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("address", &self.address).finish_non_exhaustive()
    }
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
    pub(crate) fn cross(
        self: &Arc<Self>,
        bridge: Bridge,
        heard: Heard,
        communicator: u64,
        addresses: Vec<Address>,
    ) -> Crossing {
        let own = bridge.segment().host();
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
        let (over, is_over) = watch::channel(false);
        let (stop, stopped) = watch::channel(());
        let task = Task { network: self.clone(), bridge: Arc::new(Mutex::new(bridge)), communicator, own };
        self.handle.spawn(async move {
            task.run(heard, addresses, stopped).await;
            over.send_replace(true);
        });
        Crossing { is_over, handle: self.handle.clone(), _stop: stop }
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
    is_over: watch::Receiver<bool>,
    handle: Handle,
    /// Closed when dropped.
    _stop: watch::Sender<()>,
}

impl Crossing {
    /// Waits until all ranks here have left and the other hosts know, at most so long.
    pub(crate) fn wait(mut self, timeout: Duration) {
        let is_over = &mut self.is_over;
        let _ = self.handle.block_on(async {
            tokio::time::timeout(timeout, is_over.wait_for(|over| *over)).await.map(drop)
        });
    }
}

impl Running {
    fn start(ip: IpAddr, rank: u32, credentials: Option<Credentials>) -> Result<Arc<Self>, Failure> {
        let refused = |what: &str, error: &dyn fmt::Display| {
            Failure::new(FailureKind::Transport, format!("cannot {what} for other hosts: {error}"))
        };
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| refused("start a runtime", &error))?;
        let socket = UdpSocket::bind((ip, 0)).map_err(|error| refused("open a socket", &error))?;
        enlarge(&socket);
        let port = socket.local_addr().map_err(|error| refused("open a socket", &error))?.port();
        let identity = Identity::new(credentials)?;
        let expected = Expected::default();
        let transport = Arc::new(transport());
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(identity.server(expected.clone())?));
        server.transport_config(transport).migration(false);
        let endpoint = {
            let _inside = runtime.enter();
            let mut config = quinn::EndpointConfig::default();
            config.max_udp_payload_size(MOST_DATAGRAM).map_err(|error| refused("open a socket", &error))?;
            Endpoint::new(config, Some(server), socket, Arc::new(quinn::TokioRuntime))
                .map_err(|error| refused("open a socket", &error))?
        };
        let who = match identity.has_authority() {
            true => Who::Rank(rank),
            false => Who::Shows(identity.certificate().clone()),
        };
        let address = Address { socket: SocketAddr::new(ip, port), who };
        let running = Arc::new(Self {
            handle: runtime.handle().clone(),
            endpoint: endpoint.clone(),
            identity,
            expected,
            address,
            meetings: Mutex::default(),
            connections: tokio::sync::Mutex::default(),
        });
        let accepting = running.clone();
        thread::Builder::new()
            .name("tpurun-net".to_owned())
            .spawn(move || runtime.block_on(accepting.accept()))
            .map_err(|error| refused("start a thread", &error))?;
        Ok(running)
    }

    /// Takes connections, and the streams on them, as long as the process lives.
    async fn accept(self: Arc<Self>) {
        while let Some(incoming) = self.endpoint.accept().await {
            let running = self.clone();
            tokio::spawn(async move {
                let from = incoming.remote_address();
                match incoming.await {
                    Ok(connection) => running.serve(connection).await,
                    Err(error) => tracing::warn!(%from, %error, "refused a connection"),
                }
            });
        }
    }

    async fn serve(self: Arc<Self>, connection: Connection) {
        let Some(from) = tls::other_end(&connection) else { return };
        while let Ok((send, mut receive)) = connection.accept_bi().await {
            let (running, from) = (self.clone(), from.clone());
            tokio::spawn(async move {
                let mut bytes = [0; GREETING_BYTES];
                let read = tokio::time::timeout(GREETING, receive.read_exact(&mut bytes)).await;
                match (read, Greeting::decode(&bytes)) {
                    (Ok(Ok(())), Some(greeting)) => {
                        running.introduce(greeting, Incoming { send, receive, from });
                    }
                    _ => tracing::warn!("closed a stream that does not say what it is for"),
                }
            });
        }
    }

    fn meetings(&self) -> MutexGuard<'_, Meetings> {
        self.meetings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn introduce(&self, greeting: Greeting, incoming: Incoming) {
        let mut meetings = self.meetings();
        match meetings.waiting.remove(&greeting) {
            // Who waited may have gone.
            Some((who, waiting)) if who.has_shown(&incoming.from) => drop(waiting.send(incoming)),
            Some(waits) => {
                // It is of this job, but not who it says.
                tracing::warn!(
                    host = greeting.host,
                    "refused a stream from another process than the host's first rank"
                );
                meetings.waiting.insert(greeting, waits);
            }
            None if meetings.early.len() < MOST_EARLY => {
                let early = meetings.early.entry(greeting).or_default();
                if early.len() < MOST_ALIKE {
                    early.push(incoming);
                }
            }
            None => {}
        }
    }

    /// The stream that `who` opens.
    async fn meet(&self, greeting: Greeting, who: &Who) -> Option<Incoming> {
        let waiting = {
            let mut meetings = self.meetings();
            let early = meetings.early.remove(&greeting).into_iter().flatten();
            if let Some(incoming) = early.into_iter().find(|incoming| who.has_shown(&incoming.from)) {
                return Some(incoming);
            }
            let (sender, waiting) = oneshot::channel();
            meetings.waiting.insert(greeting, (who.clone(), sender));
            waiting
        };
        waiting.await.ok()
    }

    /// A stream to another process, once that has taken it.
    async fn open(&self, to: &Address, greeting: Greeting) -> Result<(SendStream, RecvStream), String> {
        let connection = self.connection(to).await?;
        let (mut send, mut receive) = connection.open_bi().await.map_err(|error| error.to_string())?;
        send.write_all(&greeting.encode()).await.map_err(|error| error.to_string())?;
        // It comes when the other side has made the communicator, too. Until then that side may not even have
        // looked at who we are: this one has its half of the handshake first.
        let mut answer = [0; GREETING_BYTES];
        receive.read_exact(&mut answer).await.map_err(|error| error.to_string())?;
        if Greeting::decode(&answer) != Some(greeting) {
            return Err("it answers another greeting".to_owned());
        }
        Ok((send, receive))
    }

    async fn connection(&self, to: &Address) -> Result<Connection, String> {
        // Held while connecting: all communicators share one connection.
        let mut connections = self.connections.lock().await;
        if let Some(known) = connections.get(&to.socket)
            && known.close_reason().is_none()
        {
            return Ok(known.clone());
        }
        let crypto = self.identity.client(&to.who).map_err(|failure| failure.to_string())?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::new(transport()));
        let connecting = self.endpoint.connect_with(config, to.socket, &to.who.name());
        let connection = connecting.map_err(|error| error.to_string())?.await;
        let connection = connection.map_err(|error| error.to_string())?;
        connections.insert(to.socket, connection.clone());
        Ok(connection)
    }
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
        .max_concurrent_bidi_streams(VarInt::from_u32(MOST_EARLY as u32))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None);
    transport
}

/// The way of one communicator, on the thread of the network.
struct Task {
    network: Arc<Running>,
    bridge: Arc<Mutex<Bridge>>,
    communicator: u64,
    own: u32,
}

impl Task {
    async fn run(self, mut heard: Heard, addresses: Vec<Address>, mut stopped: watch::Receiver<()>) {
        let mut links = vec![];
        let mut outgoing = vec![];
        for (host, address) in (0_u32..).zip(addresses) {
            let (sender, frames) = mpsc::unbounded_channel();
            outgoing.push(sender);
            if host != self.own {
                let link = self.link(host, address, frames, stopped.clone());
                links.push(tokio::spawn(link));
            }
        }
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let (out, is_over) = tokio::select! {
                _ = stopped.changed() => (lock(&self.bridge).look_closely(), true),
                () = heard.ring() => {
                    let mut bridge = lock(&self.bridge);
                    (bridge.look(), bridge.is_over())
                }
                _ = look.tick() => {
                    let mut bridge = lock(&self.bridge);
                    (bridge.look_closely(), bridge.is_over())
                }
            };
            send(&outgoing, out);
            if is_over {
                break;
            }
        }
        // Each link ends when what it was given has been received.
        drop(outgoing);
        for link in links {
            let _ = link.await;
        }
    }

    /// Connects to one host, and carries frames both ways until either end is over.
    fn link(
        &self,
        host: u32,
        address: Address,
        mut frames: mpsc::UnboundedReceiver<Vec<u8>>,
        mut stopped: watch::Receiver<()>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (network, bridge) = (self.network.clone(), self.bridge.clone());
        let (own, communicator) = (self.own, self.communicator);
        async move {
            let streams = tokio::select! {
                streams = connect(&network, own, host, communicator, &address) => streams,
                _ = stopped.changed() => None,
            };
            let Some((mut send, receive)) = streams else { return };
            // Goes on as long as the other host has something to say.
            let reading = tokio::spawn(read(host, bridge, receive));
            while let Some(bytes) = frames.recv().await {
                if send.write_chunk(bytes.into()).await.is_err() {
                    break;
                }
            }
            // Until the other host has it all, or needs none of it any more: it may be gone by now.
            if send.finish().is_ok() {
                let received = async {
                    tokio::select! {
                        _ = send.stopped() => {}
                        _ = reading => {}
                    }
                };
                let _ = tokio::time::timeout(SILENCE, received).await;
            }
        }
    }
}

async fn connect(
    network: &Running,
    own: u32,
    host: u32,
    communicator: u64,
    address: &Address,
) -> Option<(SendStream, RecvStream)> {
    if host < own {
        let greeting = Greeting { communicator, host };
        let mut incoming = network.meet(greeting, &address.who).await?;
        incoming.send.write_all(&greeting.encode()).await.ok()?;
        return Some((incoming.send, incoming.receive));
    }
    let mut told = Instant::now();
    loop {
        match network.open(address, Greeting { communicator, host: own }).await {
            Ok(streams) => return Some(streams),
            Err(error) => {
                if told.elapsed() > SILENCE {
                    tracing::warn!(to = %address.socket, %error, "cannot connect yet");
                    told = Instant::now();
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
}

async fn read(host: u32, bridge: Arc<Mutex<Bridge>>, mut receive: RecvStream) {
    let mut frames = Frames::default();
    while let Ok(Some(chunk)) = receive.read_chunk(usize::MAX, true).await {
        let mut bridge = lock(&bridge);
        let taken = frames.feed(&chunk.bytes, |header, payload| bridge.take(host, header, payload));
        if let Err(wrong) = taken {
            bridge.refuse(host, wrong);
            return;
        }
    }
    lock(&bridge).lose(host);
}

fn send(outgoing: &[mpsc::UnboundedSender<Vec<u8>>], out: Outbox) {
    for (link, bytes) in outgoing.iter().zip(out) {
        if !bytes.is_empty() {
            // Its host is lost.
            let _ = link.send(bytes);
        }
    }
}

fn lock(bridge: &Mutex<Bridge>) -> MutexGuard<'_, Bridge> {
    bridge.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
