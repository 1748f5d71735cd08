//! The least cost of large messages between two hosts, both ends together, on one core: `cargo bench --bench
//! packets [-- PAYLOAD]`, with so many bytes in a datagram.
//!
//! Encrypted in datagrams as QUIC has them, with everything left out that is not copying, AES-128-GCM, protection of
//! headers and system calls: no streams, acknowledgements, congestion control. And in plain text over TCP.

use std::io::{IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use rustls::Side;
use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::quic::{Keys, Version};

const BLOCKS: usize = 9;
const BLOCK: Duration = Duration::from_millis(300);
/// The bytes of one system call, as in the transport.
const BATCH: usize = 65_000;
/// Flags, a connection's id, and a packet number of four bytes.
const HEADER: usize = 13;
const TAG: usize = 16;
/// From the packet number on: where the sample for its protection is.
const SAMPLE: usize = HEADER - 4 + 4;

struct Encrypted {
    sender: UdpSocket,
    receiver: UdpSocket,
    states: [UdpSocketState; 2],
    keys: [Keys; 2],
    datagram: usize,
    sent: Vec<u8>,
    received: Vec<u8>,
    number: u64,
}

impl Encrypted {
    fn new(datagram: usize) -> Self {
        let [sender, receiver] =
            [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("the loopback is there"));
        let states = [&sender, &receiver]
            .map(|socket| UdpSocketState::new(socket.into()).expect("sockets have these options"));
        let suite = TLS13_AES_128_GCM_SHA256.tls13().expect("it is one of TLS 1.3");
        let algorithm = suite.quic.expect("it is one of QUIC");
        let keys = [Side::Client, Side::Server]
            .map(|side| Keys::initial(Version::V1, suite, algorithm, &[7; 8], side));
        let most = BATCH / datagram * datagram;
        let (sent, received) = (vec![0; most], vec![0; 1 << 16]);
        Self { sender, receiver, states, keys, datagram, sent, received, number: 0 }
    }

    fn payload(&self) -> usize {
        self.datagram - HEADER - TAG
    }

    fn packets(&self) -> usize {
        self.sent.len() / self.datagram
    }

    /// Sends a batch of them and receives it.
    fn pass(&mut self, from: &[u8], to: &mut [u8]) {
        let payload = self.payload();
        let first = self.number;
        for (packet, part) in self.sent.chunks_exact_mut(self.datagram).zip(from.chunks_exact(payload)) {
            let (header, rest) = packet.split_at_mut(HEADER);
            header[0] = 0x43;
            header[HEADER - 4..].copy_from_slice(&(self.number as u32).to_be_bytes());
            let (text, tag) = rest.split_at_mut(payload);
            text.copy_from_slice(part);
            let local = &self.keys[0].local;
            let sealed =
                local.packet.encrypt_in_place(self.number, header, text).expect("it is short enough");
            tag.copy_from_slice(sealed.as_ref());
            let (head, sample) = packet.split_at_mut(SAMPLE);
            let (flags, number) = head.split_at_mut(HEADER - 4);
            local
                .header
                .encrypt_in_place(&sample[..16], &mut flags[0], number)
                .expect("a sample is long enough");
            self.number += 1;
        }
        let transmit = Transmit {
            destination: self.receiver.local_addr().expect("it is bound"),
            ecn: None,
            contents: &self.sent,
            segment_size: Some(self.datagram),
            src_ip: None,
        };
        self.states[0].send((&self.sender).into(), &transmit).expect("the socket has room for one batch");
        let mut parts = to.chunks_exact_mut(payload);
        let mut number = first;
        while number < self.number {
            let mut metas = [RecvMeta::default()];
            let mut buffers = [IoSliceMut::new(&mut self.received)];
            let Ok(1) = self.states[1].recv((&self.receiver).into(), &mut buffers, &mut metas) else {
                continue;
            };
            for packet in self.received[..metas[0].len].chunks_exact_mut(metas[0].stride) {
                let remote = &self.keys[1].remote;
                let (head, sample) = packet.split_at_mut(SAMPLE);
                let (flags, protected) = head.split_at_mut(HEADER - 4);
                remote
                    .header
                    .decrypt_in_place(&sample[..16], &mut flags[0], protected)
                    .expect("a sample is long enough");
                let (header, text) = packet.split_at_mut(HEADER);
                let text = remote.packet.decrypt_in_place(number, header, text).expect("nobody changed it");
                parts.next().expect("no more come than were sent").copy_from_slice(text);
                number += 1;
            }
        }
    }
}

/// Seconds that one call takes: the least, the median and the most of some blocks.
fn measure(mut pass: impl FnMut()) -> [f64; 3] {
    let mut block = || {
        let (start, mut passes) = (Instant::now(), 0);
        while start.elapsed() < BLOCK {
            (0..16).for_each(|_| pass());
            passes += 16;
        }
        start.elapsed().as_secs_f64() / f64::from(passes)
    };
    block();
    let mut times: Vec<f64> = (0..BLOCKS).map(|_| block()).collect();
    times.sort_by(f64::total_cmp);
    [times[0], times[BLOCKS / 2], times[BLOCKS - 1]]
}

fn show(what: &str, times: [f64; 3], bytes: usize, packets: Option<usize>) {
    let [least, median, most] = times.map(|time| bytes as f64 / time / 1e9);
    let each = packets.map(|packets| format!(", {:.2} us a packet", times[1] * 1e6 / packets as f64));
    println!("{what}: {median:.2} GB/s ({most:.2} to {least:.2}){}", each.unwrap_or_default());
}

fn main() {
    let given = std::env::args().find_map(|word| word.parse().ok());
    let mut encrypted = Encrypted::new(given.unwrap_or(1472));
    let (packets, bytes) = (encrypted.packets(), encrypted.packets() * encrypted.payload());
    let (from, mut to) = (vec![1; 1 << 16], vec![0; 1 << 16]);
    let times = measure(|| encrypted.pass(&from[..bytes], &mut to[..bytes]));
    assert!(to[..bytes] == from[..bytes]);
    show("encrypted datagrams", times, bytes, Some(packets));

    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is there");
    let mut out = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it listens");
    let (mut into, _) = listener.accept().expect("one has connected");
    let times = measure(|| {
        out.write_all(&from[..bytes]).expect("the other end is there");
        into.read_exact(&mut to[..bytes]).expect("as much was sent");
    });
    show("plain TCP", times, bytes, None);
}
