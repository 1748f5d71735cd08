//! A network in memory and a clock that only the simulation moves: every run is a function of its seed, up to what TLS
//! draws at random, which changes no length and no order.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use quinn_proto::EcnCodepoint;

use super::address::Address;
use super::emulated_link::{Chance, InFlight};
use super::mesh::Mesh;
use super::timeouts::SILENCE;
use super::tls::{Expected, Identity};
use tpurun_protocol::network::Link;

#[derive(Clone)]
struct Datagram {
    from: SocketAddr,
    to: SocketAddr,
    ecn: Option<EcnCodepoint>,
    bytes: Vec<u8>,
}

/// Processes, and the network between them.
pub(super) struct Sky {
    pub(super) now: Instant,
    pub(super) meshes: Vec<Option<Mesh>>,
    /// Pairs between which nothing goes any more.
    cut: BTreeSet<(usize, usize)>,
    flight: InFlight<Datagram>,
}

impl Sky {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            now: Instant::now(),
            meshes: vec![],
            cut: BTreeSet::new(),
            flight: InFlight::new(Link { delay: Duration::from_micros(100), ..Link::default() }, seed),
        }
    }

    pub(super) fn chance(&mut self) -> &mut Chance {
        &mut self.flight.chance
    }

    /// Sets all links, from now on.
    pub(super) fn links(&mut self, link: Link) {
        self.flight.become_like(link);
    }

    /// Datagrams so far that were not lost.
    pub(super) fn sent(&self) -> u64 {
        self.flight.sent()
    }

    /// Adds a process; returns where it is reached.
    pub(super) fn add(&mut self, identity: Arc<Identity>, expected: Expected, rank: u32) -> Address {
        let address = identity.at(socket(self.meshes.len()), rank);
        let seed: Vec<u8> = (0..4).flat_map(|_| self.flight.chance.next().to_le_bytes()).collect();
        let seed = seed.try_into().expect("4 times 8");
        self.meshes.push(Some(Mesh::new(identity, expected, Some(seed)).expect("a mesh")));
        address
    }

    pub(super) fn mesh(&mut self, index: usize) -> &mut Mesh {
        self.meshes[index].as_mut().expect("it is alive")
    }

    pub(super) fn kill(&mut self, index: usize) {
        self.meshes[index] = None;
    }

    pub(super) fn part(&mut self, one: usize, other: usize) {
        self.cut.extend([(one, other), (other, one)]);
    }

    pub(super) fn heal(&mut self) {
        self.cut.clear();
    }

    /// Goes on to the next thing that happens, at most until that time. Returns whether there was one.
    pub(super) fn step(&mut self, until: Instant) -> bool {
        self.send();
        let deadlines = self.meshes.iter().flatten().filter_map(Mesh::deadline);
        let next = deadlines.chain(self.flight.next()).min();
        let Some(next) = next.filter(|next| *next <= until) else {
            self.now = self.now.max(until);
            return false;
        };
        self.now = self.now.max(next);
        while let Some(Datagram { from, to, ecn, bytes }) = self.flight.arrived(self.now) {
            if let Some(Some(mesh)) = self.meshes.get_mut(index(to)) {
                mesh.datagram(self.now, from, ecn, BytesMut::from(&bytes[..]));
            }
        }
        for mesh in self.meshes.iter_mut().flatten() {
            mesh.settle(self.now);
            mesh.tick(self.now);
            mesh.settle(self.now);
        }
        true
    }

    /// Goes on until a condition holds, which must be before this time is over.
    pub(super) fn until(&mut self, limit: Duration, mut is_so: impl FnMut(&mut Self) -> bool) -> bool {
        let until = self.now + limit;
        while !is_so(self) {
            if !self.step(until) {
                return is_so(self);
            }
        }
        true
    }

    fn send(&mut self) {
        for from in 0..self.meshes.len() {
            let mut bytes = vec![];
            while let Some(mesh) = &mut self.meshes[from]
                && let Some(transmit) = mesh.transmit(self.now, 10, &mut bytes)
            {
                let size = transmit.segment_size.unwrap_or(transmit.size);
                for datagram in bytes[..transmit.size].chunks(size) {
                    self.fly(Datagram {
                        from: socket(from),
                        to: transmit.destination,
                        ecn: transmit.ecn,
                        bytes: datagram.to_vec(),
                    });
                }
                bytes.clear();
                let mesh = self.meshes[from].as_mut().expect("it was just there");
                mesh.settle(self.now);
            }
        }
    }

    fn fly(&mut self, datagram: Datagram) {
        if !self.cut.contains(&(index(datagram.from), index(datagram.to))) {
            self.flight.send(self.now, datagram.bytes.len(), datagram);
        }
    }
}

fn socket(index: usize) -> SocketAddr {
    (Ipv4Addr::new(10, 0, 0, 1), 1000 + index as u16).into()
}

fn index(socket: SocketAddr) -> usize {
    usize::from(socket.port()) - 1000
}

/// A time longer than a silence may be, and than what follows from one.
pub(super) const LONG: Duration = Duration::from_secs(2 * SILENCE.as_secs());
