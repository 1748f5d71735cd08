//! The nodes of one job, each with an agent of its own: how they find each other, and what they tell each other.
//!
//! Node 0 listens; the others connect to it over QUIC and stay connected. Both ends prove that they know the job's
//! token, over this very connection (`token.rs`); before that nothing is believed and nothing told. Node 0 numbers
//! the ranks, and is the authority whose certificates ranks show to each other. Everything between two nodes
//! goes through node 0: a star is enough for what agents have to say, and gives it one order.

mod admission;
mod door;
mod frame;
mod join;
mod link;
mod said;
mod token;
mod tunnel;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use tokio::sync::mpsc;
use tpurun_protocol::authority::Credentials;

pub(crate) use door::random_id;
#[cfg(test)]
pub(crate) use frame::survives;
pub(crate) use frame::{DeadlockProof, Frame, JobFailure, Node};
pub(crate) use link::OVER;
pub(crate) use said::{GroupSays, LookAnswer, MessagesSays, RankSays};
pub(crate) use token::{Token, TokenSource, VARIABLE as TOKEN, print_new};

use link::Link;

/// The words of the command line about the nodes.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) count: u32,
    /// Which one this is.
    pub(crate) node: u32,
    /// Where node 0 listens: `host:port`.
    pub(crate) rendezvous: String,
    pub(crate) token: TokenSource,
    /// How long to wait for the others.
    pub(crate) patience: Duration,
    /// Whether what all nodes write is shown in one place.
    pub(crate) is_one_terminal: bool,
    /// The same on all nodes.
    pub(crate) max_restarts: u32,
}

/// Something came from another node.
#[derive(Debug)]
pub(crate) enum NodeEvent {
    Frame(u32, Frame),
    /// Nothing more will come; why.
    Gone(u32, String),
    /// Somebody who is not of this job wanted in.
    Refused(String),
}

/// This node among the others.
pub(crate) struct Nodes {
    pub(crate) node: u32,
    /// By number.
    pub(crate) table: Vec<Node>,
    /// The name of the job.
    pub(crate) id: String,
    /// The keys of the ranks here, by their rank in the world.
    credentials: HashMap<u32, Credentials>,
    /// To the nodes this one is connected to.
    links: HashMap<u32, Link>,
    /// Until somebody takes them.
    events: Option<mpsc::Receiver<NodeEvent>>,
    endpoint: quinn::Endpoint,
    store: Store,
}

/// The way to the rendezvous store, which node 0 has.
enum Store {
    /// Where it listens here, once it does.
    Here(tokio::sync::watch::Sender<Option<SocketAddr>>),
    /// A port of this host that leads there.
    There(u16),
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nodes").field("node", &self.node).field("table", &self.table).finish_non_exhaustive()
    }
}

impl Nodes {
    /// Waits until all nodes have come; `ranks` are to run here, on a host of this `name`.
    ///
    /// # Errors
    /// One line: who did not come, or why this node is refused.
    pub(crate) async fn meet(
        plan: &Plan,
        token: &Token,
        name: &str,
        ranks: u32,
        say: &mut dyn FnMut(&str),
    ) -> Result<Nodes, String> {
        if plan.node == 0 {
            door::open(plan, token, name, ranks, say).await
        } else {
            join::join(plan, token, name, ranks, say).await
        }
    }

    pub(crate) fn count(&self) -> u32 {
        self.table.len() as u32
    }

    pub(crate) fn is_first(&self) -> bool {
        self.node == 0
    }

    pub(crate) fn ranks_of(&self, node: u32) -> std::ops::Range<u32> {
        let first: u32 = self.table[..node as usize].iter().map(|node| node.ranks).sum();
        first..first + self.table[node as usize].ranks
    }

    /// The number of ranks on all nodes.
    pub(crate) fn ranks(&self) -> u32 {
        self.table.iter().map(|node| node.ranks).sum()
    }

    /// The name of the host of a node.
    pub(crate) fn host(&self, node: u32) -> &str {
        &self.table[node as usize].host
    }

    pub(crate) fn credentials(&self) -> &HashMap<u32, Credentials> {
        &self.credentials
    }

    /// The port that leads to the store, if that is elsewhere.
    pub(crate) fn store_port(&self) -> Option<u16> {
        match self.store {
            Store::Here(_) => None,
            Store::There(port) => Some(port),
        }
    }

    /// The store listens here now, for the ranks of other nodes, too.
    pub(crate) fn store_is_at(&self, port: u16) {
        if let Store::Here(at) = &self.store {
            at.send_replace(Some(SocketAddr::from(([127, 0, 0, 1], port))));
        }
    }

    /// There is no store until the next one listens.
    pub(crate) fn store_is_gone(&self) {
        if let Store::Here(at) = &self.store {
            at.send_replace(None);
        }
    }

    /// Tells all nodes that this one is connected to; who is gone hears nothing.
    pub(crate) fn tell(&self, frame: &Frame) {
        self.tell_but(frame, None);
    }

    /// As [`tell`](Self::tell), but one.
    pub(crate) fn tell_but(&self, frame: &Frame, but: Option<u32>) {
        let bytes = frame.encode();
        self.links
            .iter()
            .filter(|(node, _)| Some(**node) != but)
            .for_each(|(_, link)| link.send(bytes.clone()));
    }

    /// Tells one node, by way of node 0 if need be, unless too much waits on the way there.
    pub(crate) fn tell_if_room(&self, node: u32, frame: &Frame) {
        let link = self.links.get(&node).or_else(|| self.links.get(&0));
        if let Some(link) = link.filter(|link| link.has_room()) {
            link.send(frame.encode());
        }
    }

    /// The events from other nodes.
    ///
    /// # Panics
    /// At the second time.
    pub(crate) fn take_events(&mut self) -> mpsc::Receiver<NodeEvent> {
        self.events.take().expect("taken once")
    }

    /// Says farewell: what was told is delivered, unless that takes longer than a moment.
    pub(crate) async fn close(self) {
        let Nodes { links, endpoint, .. } = self;
        let _ = tokio::time::timeout(FAREWELL, async {
            for (_, link) in links {
                link.finish().await;
            }
            endpoint.close(0_u32.into(), b"over");
            endpoint.wait_idle().await;
        })
        .await;
    }
}

/// The addresses of `host:port`; the name is looked up anew each time, since it may not be known yet.
fn resolve(rendezvous: &str) -> Result<Vec<SocketAddr>, String> {
    let found = rendezvous.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{rendezvous} has no address")),
        Err(error) => Err(format!("{rendezvous}: {error}")),
    }
}

/// Names of hosts, by node: those that are alike get a number, as in `n0(2)`.
fn unique(names: &[String]) -> Vec<String> {
    let number = |index: usize| names[..index].iter().filter(|name| **name == names[index]).count() + 1;
    let shown = |(index, name): (usize, &String)| match number(index) {
        1 => name.clone(),
        number => format!("{name}({number})"),
    };
    names.iter().enumerate().map(shown).collect()
}

/// Where a node is reached, as far as its connection tells.
fn shown(address: IpAddr) -> String {
    address.to_canonical().to_string()
}

/// So long nothing may come from a node before it counts as lost; each says something five times as often.
pub(crate) const SILENCE: Duration = Duration::from_secs(5);
const FAREWELL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
