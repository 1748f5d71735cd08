//! A network in memory and a clock that only the simulation moves: every run is a function of its seed, up to what TLS
//! draws at random, which changes no length and no order.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use quinn_proto::EcnCodepoint;

use super::mesh::Mesh;
use super::tls::{Expected, Identity};
use super::{Address, SILENCE};

/// What happens to datagrams on their way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Weather {
    pub(super) delay: Duration,
    /// Up to so much more, so that some overtake others.
    pub(super) jitter: Duration,
    /// Of this many, one is lost; 0 for none.
    pub(super) lost_of: u64,
    /// Of this many, one comes twice.
    pub(super) twice_of: u64,
}

struct Datagram {
    from: SocketAddr,
    to: SocketAddr,
    ecn: Option<EcnCodepoint>,
    bytes: Vec<u8>,
}

/// Numbers that a seed determines: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014).
pub(super) struct Chance(pub(super) u64);

impl Chance {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Processes, and the network between them.
pub(super) struct Sky {
    pub(super) now: Instant,
    pub(super) meshes: Vec<Option<Mesh>>,
    pub(super) weather: Weather,
    /// Pairs between which nothing goes any more.
    cut: BTreeSet<(usize, usize)>,
    flying: BTreeMap<(Instant, u64), Datagram>,
    /// How many have been sent.
    pub(super) sent: u64,
    pub(super) chance: Chance,
}

impl Sky {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            now: Instant::now(),
            meshes: vec![],
            weather: Weather { delay: Duration::from_micros(100), ..Weather::default() },
            cut: BTreeSet::new(),
            flying: BTreeMap::new(),
            sent: 0,
            chance: Chance(seed),
        }
    }

    /// A process, and where it is reached.
    pub(super) fn add(&mut self, identity: Identity, expected: Expected, rank: u32) -> Address {
        let (socket, who) = (socket(self.meshes.len()), identity.known_as(rank));
        let seed: Vec<u8> = (0..4).flat_map(|_| self.chance.next().to_le_bytes()).collect();
        let seed = seed.try_into().expect("4 times 8");
        self.meshes.push(Some(Mesh::new(identity, expected, Some(seed)).expect("a mesh")));
        Address { socket, who }
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

    /// Goes on to whatever happens next, at most until then. Whether there was something.
    pub(super) fn step(&mut self, until: Instant) -> bool {
        self.send();
        let deadlines = self.meshes.iter().flatten().filter_map(Mesh::deadline);
        let next = deadlines.chain(self.flying.first_key_value().map(|((at, _), _)| *at)).min();
        let Some(next) = next.filter(|next| *next <= until) else {
            self.now = self.now.max(until);
            return false;
        };
        self.now = self.now.max(next);
        while let Some(entry) = self.flying.first_entry()
            && entry.key().0 <= self.now
        {
            let Datagram { from, to, ecn, bytes } = entry.remove();
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

    /// Until something is so, which it must be before this time is over.
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
        let Weather { delay, jitter, lost_of, twice_of } = self.weather;
        let mut happens = |of: u64| of > 0 && self.chance.below(of) == 0;
        let (is_lost, comes_twice) = (happens(lost_of), happens(twice_of));
        if is_lost || self.cut.contains(&(index(datagram.from), index(datagram.to))) {
            return;
        }
        let copies = if comes_twice { 2 } else { 1 };
        for _ in 0..copies {
            let at = self.now + delay + Duration::from_nanos(self.chance.below(jitter.as_nanos() as u64 + 1));
            self.sent += 1;
            let Datagram { from, to, ecn, ref bytes } = datagram;
            self.flying.insert((at, self.sent), Datagram { from, to, ecn, bytes: bytes.clone() });
        }
    }
}

fn socket(index: usize) -> SocketAddr {
    (Ipv4Addr::new(10, 0, 0, 1), 1000 + index as u16).into()
}

fn index(socket: SocketAddr) -> usize {
    usize::from(socket.port()) - 1000
}

/// Longer than a silence may be, and than what follows from one.
pub(super) const LONG: Duration = Duration::from_secs(2 * SILENCE.as_secs());
