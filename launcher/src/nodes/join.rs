//! Every node but node 0: it connects, shows that it knows the token, and is told what the job is.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use quinn::{Connection, RecvStream, SendStream};
use tokio::sync::mpsc;
use tpurun_protocol::authority::RankKey;
use tpurun_protocol::hosts::address_towards;

use super::door::{QUEUED, TELL_EVERY, VERSION};
use super::frame::{Frame, Node};
use super::link::{self, Link, MOST, MOST_BEFORE};
use super::token::{End, Token};
use super::{Nodes, Plan, Store, resolve, shown, tunnel};

/// The reason why a node is not in the job.
enum Trouble {
    /// The trouble may be over in a moment.
    NotYet(String),
    Never(String),
}

pub(super) async fn join(
    plan: &Plan,
    token: &Token,
    name: &str,
    ranks: u32,
    say: &mut dyn FnMut(&str),
) -> Result<Nodes, String> {
    let began = Instant::now();
    let mut told = began;
    let keys = (0..ranks).map(|_| RankKey::new()).collect::<Result<Vec<_>, _>>();
    let keys = keys.map_err(|failure| failure.to_string())?;
    let most = plan.patience.as_secs();
    loop {
        match tokio::time::timeout(plan.patience, try_once(plan, token, name, &keys)).await {
            Ok(Ok(nodes)) => return Ok(nodes),
            Ok(Err(Trouble::Never(reason))) => return Err(reason),
            Ok(Err(Trouble::NotYet(reason))) => {
                let waited = began.elapsed();
                if waited >= plan.patience {
                    return Err(format!(
                        "cannot join node 0 at {} within {most} s: {reason}",
                        plan.rendezvous
                    ));
                }
                if told.elapsed() >= TELL_EVERY {
                    told = Instant::now();
                    let seconds = waited.as_secs();
                    say(&format!(
                        "waiting for node 0 at {}, {seconds} s of {most}: {reason}",
                        plan.rendezvous
                    ));
                }
                tokio::time::sleep(AGAIN).await;
            }
            Err(_) => return Err(format!("not all nodes came to {} within {most} s", plan.rendezvous)),
        }
    }
}

async fn try_once(plan: &Plan, token: &Token, name: &str, keys: &[RankKey]) -> Result<Nodes, Trouble> {
    let mut reason = String::new();
    for at in resolve(&plan.rendezvous).map_err(Trouble::NotYet)? {
        let endpoint = link::endpoint(None, at).map_err(Trouble::NotYet)?;
        let first = token.clone();
        match link::connect(&endpoint, at, move || first.first_id()).await {
            Ok(connection) => return enter(plan, token, name, keys, endpoint, connection).await,
            Err(why) => reason = why,
        }
    }
    Err(Trouble::NotYet(reason))
}

async fn enter(
    plan: &Plan,
    token: &Token,
    name: &str,
    keys: &[RankKey],
    endpoint: quinn::Endpoint,
    connection: Connection,
) -> Result<Nodes, Trouble> {
    let (mut send, mut receive) = show_token(plan, token, &connection).await?;
    let address = address_towards(connection.remote_address().ip())
        .map_err(|error| Trouble::Never(error.to_string()))?;
    let node = Node { host: name.to_owned(), ranks: keys.len() as u32, address: shown(address) };
    let public = keys.iter().map(|key| key.public().to_vec()).collect();
    link::write_frame(&mut send, &Frame::Join { node, keys: public }).await.map_err(Trouble::NotYet)?;
    let welcome = link::read_frame(&mut receive, MOST).await;
    let (id, table, authority, certificates) = match welcome {
        Ok(Frame::Welcome { id, table, authority, certificates }) => (id, table, authority, certificates),
        Ok(Frame::Refused { reason }) => return Err(refused(&reason)),
        Ok(_) => return Err(Trouble::Never("node 0 answers something else".into())),
        Err(why) => return Err(Trouble::NotYet(why)),
    };
    let is_whole = table.len() == plan.count as usize
        && table[plan.node as usize].ranks as usize == keys.len()
        && certificates.len() == keys.len()
        && table.iter().map(|node| u64::from(node.ranks)).sum::<u64>() <= MOST_RANKS;
    if !is_whole {
        return Err(Trouble::Never("node 0 tells of another job than this one".into()));
    }
    let port = tunnel::enter(connection).await.map_err(|error| Trouble::Never(error.to_string()))?;
    let (events_tx, events) = mpsc::channel(QUEUED);
    let links = HashMap::from([(0, Link::new(0, send, receive, events_tx))]);
    let mut nodes = Nodes {
        node: plan.node,
        table,
        id,
        credentials: HashMap::new(),
        links,
        events: Some(events),
        endpoint,
        store: Store::There(port),
    };
    let own = keys.iter().zip(&certificates).map(|(key, own)| key.certified(&authority, own));
    nodes.credentials = nodes.ranks_of(plan.node).zip(own).collect();
    Ok(nodes)
}

async fn show_token(
    plan: &Plan,
    token: &Token,
    connection: &Connection,
) -> Result<(SendStream, RecvStream), Trouble> {
    let (mut send, mut receive) =
        connection.open_bi().await.map_err(|error| Trouble::NotYet(link::why(&error)))?;
    let no_keys = || Trouble::Never("a connection without keys".into());
    let code = token.code(connection, End::Connects).ok_or_else(no_keys)?;
    let Plan { node, count: nodes, max_restarts, .. } = *plan;
    let hello = Frame::Hello { version: VERSION.into(), node, nodes, max_restarts, code };
    link::write_frame(&mut send, &hello).await.map_err(Trouble::NotYet)?;
    match link::read_frame(&mut receive, MOST_BEFORE).await {
        Ok(Frame::Accepted { code }) if token.is_known_to(connection, End::Listens, &code) => {
            Ok((send, receive))
        }
        Ok(Frame::Accepted { .. }) => {
            Err(Trouble::Never(format!("who listens at {} does not know the token", plan.rendezvous)))
        }
        Ok(Frame::Refused { reason }) => Err(refused(&reason)),
        Ok(_) => Err(Trouble::Never("node 0 answers something else".into())),
        Err(why) => Err(Trouble::NotYet(why)),
    }
}

fn refused(reason: &str) -> Trouble {
    let clean: String = reason.chars().filter(|c| !c.is_control()).take(MOST_CHARS).collect();
    Trouble::Never(format!("node 0 refuses this node: {clean}"))
}

const AGAIN: Duration = Duration::from_millis(200);
const MOST_CHARS: usize = 400;
const MOST_RANKS: u64 = tpurun_protocol::board::MAX_RANKS as u64;
