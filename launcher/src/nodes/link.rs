//! A node's end of the connection to another one: frames go out in order, and come in as events.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    Connection, ConnectionId, Endpoint, EndpointConfig, RecvStream, SendStream, TransportConfig, VarInt,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, PeerIncompatible, SignatureScheme};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tpurun_protocol::authority::{Authority, RankKey};

use super::frame::Frame;
use super::{NodeEvent, SILENCE};

/// The connection to one node.
pub(super) struct Link {
    frames: mpsc::UnboundedSender<Vec<u8>>,
    /// Bytes that are not on their way yet.
    waiting: Arc<AtomicUsize>,
    writer: JoinHandle<()>,
}

impl Link {
    /// Takes over the stream to a node that has shown who it is.
    pub(super) fn new(
        node: u32,
        mut send: SendStream,
        receive: RecvStream,
        events: mpsc::Sender<NodeEvent>,
    ) -> Link {
        let (frames, mut queue) = mpsc::unbounded_channel::<Vec<u8>>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let written = waiting.clone();
        let writer = tokio::spawn(async move {
            while let Some(bytes) = queue.recv().await {
                if send.write_all(&bytes).await.is_err() {
                    return;
                }
                // Relaxed, as the count protects nothing.
                written.fetch_sub(bytes.len(), Ordering::Relaxed);
            }
            // Waits until the other end has all of it.
            if send.finish().is_ok() {
                let _ = send.stopped().await;
            }
        });
        tokio::spawn(read(node, receive, events));
        Link { frames, waiting, writer }
    }

    pub(super) fn send(&self, bytes: Vec<u8>) {
        self.waiting.fetch_add(bytes.len(), Ordering::Relaxed);
        // The reader tells of a node that is gone.
        let _ = self.frames.send(bytes);
    }

    /// Whether so little waits to be sent that something large may wait, too, without making later frames late.
    pub(super) fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < MOST_WAITING
    }

    /// Waits until the other end has everything.
    pub(super) async fn finish(self) {
        drop(self.frames);
        let _ = self.writer.await;
    }
}

/// Reads a frame of at most `limit` bytes.
///
/// # Errors
/// As a line: the connection ended, or bytes came that are wrong.
pub(super) async fn read_frame(stream: &mut RecvStream, limit: usize) -> Result<Frame, String> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await.map_err(|error| ended(&error))?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(format!("it sent a frame of {length} bytes, expected at most {limit}"));
    }
    let mut archive = vec![0; length];
    stream.read_exact(&mut archive).await.map_err(|error| ended(&error))?;
    Frame::decode(&archive).map_err(|wrong| format!("it sent {wrong}"))
}

/// # Errors
/// As a line.
pub(super) async fn write_frame(stream: &mut SendStream, frame: &Frame) -> Result<(), String> {
    stream.write_all(&frame.encode()).await.map_err(|error| error.to_string())
}

fn ended(error: &quinn::ReadExactError) -> String {
    match error {
        quinn::ReadExactError::FinishedEarly(_) => OVER.into(),
        quinn::ReadExactError::ReadError(quinn::ReadError::ConnectionLost(lost)) => why(lost),
        quinn::ReadExactError::ReadError(error) => error.to_string(),
    }
}

/// Why a connection is over, for people.
pub(super) fn why(lost: &quinn::ConnectionError) -> String {
    match lost {
        quinn::ConnectionError::TimedOut => format!("nothing came from it for {} s", SILENCE.as_secs()),
        quinn::ConnectionError::ApplicationClosed(_) | quinn::ConnectionError::ConnectionClosed(_) => {
            OVER.into()
        }
        other => other.to_string(),
    }
}

/// The reason when a node has closed its connection.
pub(crate) const OVER: &str = "its tpurun has ended";
/// Bytes of the largest frame before a node has shown that it knows the token.
pub(super) const MOST_BEFORE: usize = 4 << 10;
/// Bytes of the largest frame after that: the keys of all ranks of a node, or the words of a report.
pub(super) const MOST: usize = 16 << 20;

async fn read(node: u32, mut receive: RecvStream, events: mpsc::Sender<NodeEvent>) {
    loop {
        let (event, is_last) = match read_frame(&mut receive, MOST).await {
            Ok(frame) => (NodeEvent::Frame(node, frame), false),
            Err(why) => (NodeEvent::Gone(node, why), true),
        };
        if events.send(event).await.is_err() || is_last {
            return;
        }
    }
}

/// Opens an end; one that listens has `at`.
pub(super) fn endpoint(at: Option<SocketAddr>, towards: SocketAddr) -> Result<Endpoint, String> {
    let anywhere = match towards.ip() {
        IpAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        IpAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(at.unwrap_or(anywhere)).map_err(|error| error.to_string())?;
    let server = at.map(|_| server()).transpose()?;
    let runtime = Arc::new(quinn::TokioRuntime);
    let endpoint = Endpoint::new(EndpointConfig::default(), server, socket, runtime);
    endpoint.map_err(|error| error.to_string())
}

/// The certificate says nothing: the token shows who is there.
fn server() -> Result<quinn::ServerConfig, String> {
    let authority = Authority::new().map_err(|failure| failure.to_string())?;
    let key = RankKey::new().map_err(|failure| failure.to_string())?;
    let certificate = authority.certify(0, key.public()).map_err(|failure| failure.to_string())?;
    let own = key.certified(authority.certificate(), &certificate);
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(vec![own.certificate.into()], PrivateKeyDer::Pkcs8(own.key.into()))
        .map_err(|error| error.to_string())?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    let crypto = QuicServerConfig::try_from(config).map_err(|error| error.to_string())?;
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    server
        .transport_config(Arc::new(strangers()))
        .migration(false)
        // A packet is taken up or dropped as it comes: nothing waits for long.
        .max_incoming(MOST_INCOMING)
        .incoming_buffer_size(u64::from(STRANGER_WINDOW))
        .incoming_buffer_size_total(u64::from(STRANGER_WINDOW) * 4);
    Ok(server)
}

/// Connects to node 0, which has not shown yet that it is node 0.
pub(super) async fn connect(
    endpoint: &Endpoint,
    to: SocketAddr,
    first_id: impl Fn() -> ConnectionId + Send + Sync + 'static,
) -> Result<Connection, String> {
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider())))
        .with_no_client_auth();
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    let crypto = QuicClientConfig::try_from(config).map_err(|error| error.to_string())?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    config.transport_config(Arc::new(transport())).initial_dst_cid_provider(Arc::new(first_id));
    let connecting = endpoint.connect_with(config, to, "node-0.tpurun");
    connecting.map_err(|error| error.to_string())?.await.map_err(|error| why(&error))
}

fn transport() -> TransportConfig {
    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(Some(SILENCE.try_into().expect("it is short")))
        .keep_alive_interval(Some(SILENCE / 5))
        // The nodes that connect open all streams.
        .max_concurrent_bidi_streams(VarInt::from_u32(0))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None);
    transport
}

/// Limits of node 0 until the other end has shown the token: one stream, and a few bytes on it. Each stream that is
/// allowed takes 80 bytes at once, whether it is used or not.
fn strangers() -> TransportConfig {
    let mut transport = transport();
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .receive_window(VarInt::from_u32(STRANGER_WINDOW))
        .crypto_buffer_size(STRANGER_WINDOW as usize);
    transport
}

/// Lifts these limits when the other end has shown the token; its number of ranks decides the number of streams.
pub(super) fn trust(connection: &Connection, ranks: u32) {
    connection.set_receive_window(VarInt::MAX);
    let streams = ranks.saturating_mul(STREAMS_OF_A_RANK).saturating_add(STREAMS_OF_A_NODE);
    connection.set_max_concurrent_bi_streams(VarInt::from_u32(streams.min(MOST_STREAMS)));
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Checks that the other end has the key of the certificate that it shows, and leaves it to the token who that is.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Name of the protocol; another version has another name.
const PROTOCOL: &[u8] = b"tpurun-nodes/1";
const MOST_WAITING: usize = 1 << 20;
/// Streams of one node: one for each connection of a rank to the store.
const MOST_STREAMS: u32 = 1 << 17;
const STREAMS_OF_A_RANK: u32 = 64;
const STREAMS_OF_A_NODE: u32 = 256;
/// Bytes that a stranger may send before it has shown the token: a `Hello` has at most `MOST_BEFORE`.
const STRANGER_WINDOW: u32 = 8 << 10;
/// First packets that wait to be looked at.
const MOST_INCOMING: usize = 64;
