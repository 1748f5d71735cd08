//! Node 0 until all nodes have come: it listens, checks that a node knows the token, numbers the ranks and certifies
//! their keys.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use quinn::{Connection, Endpoint, Incoming, RecvStream, SendStream};
use tokio::sync::{mpsc, watch};
use tpurun_protocol::authority::{Authority, Credentials, RankKey};
use tpurun_protocol::refusals::{PERIOD, Refusals};

use super::admission::{Admission, Visitor};
use super::frame::{Frame, Node};
use super::link::{self, Link, MOST, MOST_BEFORE};
use super::token::{End, Token};
use super::{NodeEvent, Nodes, Plan, Store, resolve, shown, tunnel, unique};
use crate::base::rank_set::RankSet;

/// A node that has shown that it is of this job.
struct Guest {
    number: u32,
    node: Node,
    keys: Vec<Vec<u8>>,
    connection: Connection,
    send: SendStream,
    receive: RecvStream,
}

pub(super) async fn open(
    plan: &Plan,
    token: &Token,
    name: &str,
    ranks: u32,
    say: &mut dyn FnMut(&str),
) -> Result<Nodes, String> {
    let (endpoint, own_ip) = listen(&plan.rendezvous)?;
    let (guests, mut came) = mpsc::channel(1);
    let (events_tx, events) = mpsc::channel(QUEUED);
    let watching = watch_the_door(endpoint.clone(), plan.clone(), token.clone(), guests, events_tx.clone());
    tokio::spawn(watching);
    let guests = wait_for_all(plan, &mut came, say).await?;
    let own_ip = own_ip.or_else(|| guests.values().find_map(|guest| guest.connection.local_ip()));
    let own = Node { host: name.to_owned(), ranks, address: own_ip.map_or_else(|| LOOPBACK.into(), shown) };
    let table = table(own, &guests)?;
    let authority = Authority::new().map_err(failed)?;
    let id = format!("{:016x}", random_id());
    let (store, store_at) = watch::channel(None);
    let mut links = HashMap::new();
    let mut first = ranks;
    for (number, mut guest) in guests {
        let certify = |(rank, key): (u32, &Vec<u8>)| authority.certify(rank, key).map_err(failed);
        let certificates = (first..).zip(&guest.keys).map(certify).collect::<Result<_, _>>()?;
        first += guest.node.ranks;
        let (table, authority) = (table.clone(), authority.certificate().to_vec());
        let welcome = Frame::Welcome { id: id.clone(), table, authority, certificates };
        link::write_frame(&mut guest.send, &welcome)
            .await
            .map_err(|error| format!("node {number}: {error}"))?;
        tokio::spawn(tunnel::lead_on(guest.connection, store_at.clone()));
        links.insert(number, Link::new(number, guest.send, guest.receive, events_tx.clone()));
    }
    let credentials = own_credentials(&authority, ranks)?;
    let (events, store) = (Some(events), Store::Here(store));
    Ok(Nodes { node: 0, table, id, credentials, links, events, endpoint, store })
}

/// All nodes in the order of their numbers, with names that are their own.
fn table(own: Node, guests: &BTreeMap<u32, Guest>) -> Result<Vec<Node>, String> {
    let nodes: Vec<&Node> = std::iter::once(&own).chain(guests.values().map(|guest| &guest.node)).collect();
    let names = unique(&nodes.iter().map(|node| node.host.clone()).collect::<Vec<_>>());
    let table: Vec<Node> =
        nodes.into_iter().cloned().zip(names).map(|(node, host)| Node { host, ..node }).collect();
    let world: u64 = table.iter().map(|node| u64::from(node.ranks)).sum();
    if world > u64::from(tpurun_protocol::board::MAX_RANKS) {
        return Err(format!("expected at most 65536 ranks on all nodes together, given {world}"));
    }
    Ok(table)
}

/// The keys of the ranks of this node, which are the first ones, and their certificates.
fn own_credentials(authority: &Authority, ranks: u32) -> Result<HashMap<u32, Credentials>, String> {
    let mut credentials = HashMap::new();
    for rank in 0..ranks {
        let key = RankKey::new().map_err(failed)?;
        let certificate = authority.certify(rank, key.public()).map_err(failed)?;
        credentials.insert(rank, key.certified(authority.certificate(), &certificate));
    }
    Ok(credentials)
}

fn failed(failure: tpurun_memory::Failure) -> String {
    failure.to_string()
}

/// Listens at the address that the other nodes are given if this host has it, else wherever they reach this host.
fn listen(rendezvous: &str) -> Result<(Endpoint, Option<IpAddr>), String> {
    let addresses = resolve(rendezvous).map_err(|error| format!("--rdzv {error}"))?;
    for at in addresses.iter().filter(|at| is_meant(rendezvous, at.ip())) {
        if let Ok(endpoint) = link::endpoint(Some(*at), *at) {
            return Ok((endpoint, Some(at.ip())));
        }
    }
    let anywhere = match addresses[0] {
        SocketAddr::V4(at) => SocketAddr::from(([0, 0, 0, 0], at.port())),
        SocketAddr::V6(at) => SocketAddr::from(([0_u16; 8], at.port())),
    };
    let endpoint = link::endpoint(Some(anywhere), anywhere);
    endpoint
        .map(|endpoint| (endpoint, None))
        .map_err(|error| format!("cannot listen at {rendezvous}: {error}"))
}

/// Whether others may reach node 0 at an address that its name has here: many hosts know themselves by one of the
/// loopback, where nobody else would come.
fn is_meant(rendezvous: &str, address: IpAddr) -> bool {
    let host = rendezvous.rsplit_once(':').map_or(rendezvous, |(host, _)| host);
    let is_literal = host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok() || host == "localhost";
    is_literal || !address.is_loopback()
}

async fn wait_for_all(
    plan: &Plan,
    came: &mut mpsc::Receiver<Result<Guest, String>>,
    say: &mut dyn FnMut(&str),
) -> Result<BTreeMap<u32, Guest>, String> {
    let began = Instant::now();
    let mut told = began;
    let mut guests: BTreeMap<u32, Guest> = BTreeMap::new();
    while guests.len() + 1 < plan.count as usize {
        let came = tokio::time::timeout(LOOK, came.recv()).await;
        guests.retain(|number, guest| {
            let is_there = guest.connection.close_reason().is_none();
            if !is_there {
                say(&format!("node {number} ({}) has left before all had come", guest.node.host));
            }
            is_there
        });
        match came {
            Ok(Some(Ok(guest))) if guests.contains_key(&guest.number) => {
                let reason = format!("node {} is there already", guest.number);
                say(&format!("refused {}: {reason}", guest.connection.remote_address()));
                tokio::spawn(turn_away(guest.connection, guest.send, reason, None));
            }
            Ok(Some(Ok(guest))) => drop(guests.insert(guest.number, guest)),
            Ok(Some(Err(refusal))) => say(&refusal),
            Ok(None) => return Err("the door is closed".into()),
            Err(_) => {}
        }
        let missing: RankSet = (1..plan.count).filter(|node| !guests.contains_key(node)).collect();
        let (waited, noun) = (began.elapsed(), if missing.len() == 1 { "node" } else { "nodes" });
        if waited >= plan.patience && !missing.is_empty() {
            return Err(format!(
                "{noun} {missing} of {} did not come to {} within {} s",
                plan.count,
                plan.rendezvous,
                plan.patience.as_secs()
            ));
        }
        if told.elapsed() >= TELL_EVERY && !missing.is_empty() {
            told = Instant::now();
            let (seconds, most) = (waited.as_secs(), plan.patience.as_secs());
            say(&format!(
                "waiting at {} for {noun} {missing} of {}, {seconds} s of {most}",
                plan.rendezvous, plan.count
            ));
        }
    }
    Ok(guests)
}

/// The reason why a connection leads to no node.
enum Refusal {
    /// The other end has not shown the token.
    Stranger(String),
    Node(String),
}

/// The receivers of the door's news: node 0 as it waits, the running job later.
#[derive(Clone)]
struct Listeners {
    guests: mpsc::Sender<Result<Guest, String>>,
    events: mpsc::Sender<NodeEvent>,
}

impl Listeners {
    /// Tells the job of a refusal without holding up the door, however late the job reads it.
    fn tell_later(&self, line: Option<String>) {
        let Some(line) = line else { return };
        let listeners = self.clone();
        tokio::spawn(async move { listeners.tell(Err(line)).await });
    }

    async fn tell(&self, came: Result<Guest, String>) {
        if let Err(unheard) = self.guests.send(came).await
            && let Err(refusal) = unheard.0
        {
            // All have come; the job goes on.
            let _ = self.events.send(NodeEvent::Refused(refusal)).await;
        }
    }
}

/// Lets in the nodes that know the token; for all others it tells why they are refused.
async fn watch_the_door(
    endpoint: Endpoint,
    plan: Plan,
    token: Token,
    guests: mpsc::Sender<Result<Guest, String>>,
    events: mpsc::Sender<NodeEvent>,
) {
    let listeners = Listeners { guests, events };
    let mut admission = Admission::new(token.clone(), Instant::now());
    let refusals = Arc::new(Mutex::new(Refusals::default()));
    let mut tick = tokio::time::interval(PERIOD);
    loop {
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            _ = tick.tick() => {
                listeners.tell_later(lock(&refusals).rest(Instant::now()));
                continue;
            }
        };
        let Some(incoming) = incoming else { return };
        let from = incoming.remote_address();
        let Some(visitor) = admission.admit(incoming.orig_dst_cid(), Instant::now()) else {
            incoming.ignore();
            let refusal = format!("refused {from}: too many strangers");
            listeners.tell_later(lock(&refusals).add(refusal, Instant::now()));
            continue;
        };
        let (plan, token) = (plan.clone(), token.clone());
        let (listeners, refusals) = (listeners.clone(), refusals.clone());
        tokio::spawn(async move {
            let greeted = tokio::time::timeout(GREETING, greet(incoming, visitor, &plan, &token)).await;
            let silent = || Err(Refusal::Stranger("it did not say who it is".into()));
            let came = match greeted.unwrap_or_else(|_| silent()) {
                Ok(guest) => Some(Ok(guest)),
                Err(Refusal::Node(reason)) => Some(Err(format!("refused {from}: {reason}"))),
                Err(Refusal::Stranger(reason)) => {
                    lock(&refusals).add(format!("refused {from}: {reason}"), Instant::now()).map(Err)
                }
            };
            if let Some(came) = came {
                listeners.tell(came).await;
            }
        });
    }
}

fn lock(refusals: &Mutex<Refusals>) -> MutexGuard<'_, Refusals> {
    refusals.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn greet(incoming: Incoming, visitor: Visitor, plan: &Plan, token: &Token) -> Result<Guest, Refusal> {
    let lost = |error: quinn::ConnectionError| Refusal::Stranger(link::why(&error));
    let connection = incoming.await.map_err(lost)?;
    let (mut send, mut receive) = connection.accept_bi().await.map_err(lost)?;
    let hello = link::read_frame(&mut receive, MOST_BEFORE).await.map_err(Refusal::Stranger)?;
    let Frame::Hello { version, node: number, nodes, max_restarts, code } = hello else {
        return Err(Refusal::Stranger("it did not say who it is".into()));
    };
    if !token.is_known_to(&connection, End::Connects, &code) {
        let reason = "another token".to_owned();
        // A node that is turned away may end before it says that it knows why.
        tokio::spawn(turn_away(connection, send, reason.clone(), Some(visitor)));
        return Err(Refusal::Stranger(reason));
    }
    // The other end knows the token and is no stranger any more.
    drop(visitor);
    let reason = if version != VERSION {
        format!("tpurun {version}, expected {VERSION}")
    } else if nodes != plan.count {
        format!("--nnodes {nodes}, expected {}", plan.count)
    } else if max_restarts != plan.max_restarts {
        format!("--max-restarts {max_restarts}, expected {}", plan.max_restarts)
    } else if number == 0 || number >= plan.count {
        format!("--node-rank {number}, expected 1 to {}", plan.count - 1)
    } else {
        String::new()
    };
    if !reason.is_empty() {
        tokio::spawn(turn_away(connection, send, reason.clone(), None));
        return Err(Refusal::Node(reason));
    }
    let no_keys = || Refusal::Node("a connection without keys".into());
    let code = token.code(&connection, End::Listens).ok_or_else(no_keys)?;
    link::trust(&connection, 0);
    link::write_frame(&mut send, &Frame::Accepted { code }).await.map_err(Refusal::Node)?;
    let join = link::read_frame(&mut receive, MOST).await.map_err(Refusal::Node)?;
    let Frame::Join { node, keys } = join else {
        return Err(Refusal::Node("it did not say what it runs".into()));
    };
    if keys.len() != node.ranks as usize || node.ranks == 0 {
        return Err(Refusal::Node(format!("{} keys for {} ranks", keys.len(), node.ranks)));
    }
    let is_plain = |text: &str| !text.is_empty() && text.len() < 256 && !text.contains(char::is_control);
    if !is_plain(&node.host) || node.address.parse::<IpAddr>().is_err() {
        return Err(Refusal::Node("a host that has no name or no address".into()));
    }
    link::trust(&connection, node.ranks);
    Ok(Guest { number, node, keys, connection, send, receive })
}

/// Tells the other end why it is refused, and keeps the connection until that is known there, for a while at most.
async fn turn_away(connection: Connection, mut send: SendStream, reason: String, visitor: Option<Visitor>) {
    let told = async {
        let _ = link::write_frame(&mut send, &Frame::Refused { reason }).await;
        if send.finish().is_ok() {
            let _ = send.stopped().await;
        }
    };
    let _ = tokio::time::timeout(GREETING, told).await;
    drop((connection, visitor));
}

pub(crate) fn random_id() -> u64 {
    use aws_lc_rs::rand::{SecureRandom, SystemRandom};
    let mut bytes = [0; 8];
    // It only tells jobs apart for people.
    let _ = SystemRandom::new().fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
pub(super) const QUEUED: usize = 1024;
pub(super) const TELL_EVERY: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(200);
const GREETING: Duration = Duration::from_secs(10);
const LOOPBACK: &str = "127.0.0.1";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_the_loopback_is_not_where_others_come() {
        let loopback: IpAddr = "127.0.1.1".parse().unwrap();
        assert!(!is_meant("n0:29400", loopback));
        assert!(is_meant("n0:29400", "10.0.0.1".parse().unwrap()));
        assert!(is_meant("127.0.1.1:29400", loopback) && is_meant("localhost:29400", loopback));
        assert!(is_meant("[::1]:29400", "::1".parse().unwrap()));
    }
}
