//! Where the ranks of a job are to be: its nodes, the hosts that somebody has named or wants pretended, and the network
//! between them.

use std::time::Duration;

use tpurun_protocol::network::{Bulk, Link, parse_connections};

use crate::command_line::definition::{Options, TorchrunOptions};
use crate::command_line::words::CommandLine;
use crate::job::program::GivenProgram;
use crate::job::values::{MAX_RANKS, parse_count, parse_duration};
use crate::nodes::{Plan, TokenSource};
use crate::place::cluster::{self, Cluster};
use crate::place::hosts::JobHosts;
use crate::place::schedulers;
use crate::place::ssh_hosts::{self, Remote};

/// Where the ranks are to be.
pub(super) struct Location {
    /// The scheduler that has placed this tpurun.
    pub(super) cluster: Option<Cluster>,
    /// The hosts that are named, where this tpurun starts the others.
    pub(super) remote: Option<Remote>,
}

impl Location {
    /// Finds where the programs, `several` if there are several, are to be. Names of hosts are taken out of the options.
    ///
    /// # Errors
    /// One line: what was expected and what was given.
    pub(super) fn find(options: &mut Options, several: Option<&[GivenProgram]>) -> Result<Location, String> {
        refuse_standalone_of_several(options)?;
        let is_alone = options.torchrun.standalone;
        let mut cluster = match options.torchrun.nnodes {
            None if !is_alone => schedulers::detect(&cluster::environment)?,
            _ => None,
        };
        let mut remote = None;
        if let Some(named) = options.hosts.take_if(|text| ssh_hosts::are_named(text)) {
            // By a tpurun that was given the same names, or now.
            let is_placed = cluster.as_ref().is_some_and(|cluster| cluster.ranks.is_some());
            if !is_placed {
                cluster = None;
                let total = several.map(|several| several.iter().map(|given| given.ranks.unwrap_or(1)).sum());
                remote = Some(parse_remote(&named, options, total)?);
            }
        }
        if options.ssh.is_some() && remote.is_none() && cluster.is_none() {
            return Err("--ssh: expected --hosts with the names of hosts, given none".into());
        }
        // Each node would have to say which ranks of which program are its own.
        let is_of_nodes =
            options.torchrun.nnodes.as_deref().and_then(parse_count).is_some_and(|nodes| nodes > 1);
        if several.is_some() && is_of_nodes {
            return Err("--nnodes: expected one program, given several, which --hosts or srun place".into());
        }
        Ok(Location { cluster, remote })
    }

    /// The number of ranks, of which `asked` are asked for.
    pub(super) fn ranks(&self, asked: Option<String>) -> Option<String> {
        let placed = self.cluster.as_ref().and_then(|cluster| cluster.ranks);
        let named = self.remote.as_ref().map(|remote| remote.hosts.iter().map(|host| host.ranks).sum());
        let tasks = || self.cluster.as_ref().map(|cluster| cluster.tasks);
        match placed.or(named) {
            Some(ranks) => Some(u32::to_string(&ranks)),
            None => asked.or_else(|| tasks().map(|tasks| tasks.to_string())),
        }
    }
}

/// `--standalone` is this host alone, so it overrides what schedulers say, but nothing that a person says.
fn refuse_standalone_of_several(options: &Options) -> Result<(), String> {
    let nodes = options.torchrun.nnodes.as_deref().filter(|text| parse_count(text) != Some(1));
    let hosts = options.hosts.as_deref().filter(|text| ssh_hosts::are_named(text));
    let given = nodes.map(|nodes| format!("--nnodes {nodes}"));
    match given.or(hosts.map(|hosts| format!("--hosts {hosts}"))) {
        Some(given) if options.torchrun.standalone => {
            Err(format!("--standalone: expected this host alone, given {given}"))
        }
        _ => Ok(()),
    }
}

pub(super) fn parse_nodes(
    options: &Options,
    cluster: Option<&Cluster>,
    max_restarts: u32,
    lookup: cluster::Lookup<'_>,
) -> Result<Option<Plan>, String> {
    let torchrun = &options.torchrun;
    let count = match torchrun.nnodes.as_deref() {
        None => cluster.map_or(1, |cluster| cluster.nodes),
        Some(text) => parse_count(text).ok_or_else(|| {
            format!("--nnodes: expected a number of hosts from 1 to {MAX_RANKS}, given {text}")
        })?,
    };
    if count == 1 {
        return match torchrun.node_rank.as_deref() {
            None | Some("0") => Ok(None),
            Some(given) => Err(format!("--node-rank: expected 0, since --nnodes is 1, given {given}")),
        };
    }
    let wanted = format!("--node-rank: expected 0 to {}, which of the {count} nodes this is", count - 1);
    let placed = cluster.map(|cluster| cluster.node.to_string());
    let node = torchrun.node_rank.clone().or(placed).map(|node| (node, None));
    let node = node.or_else(|| schedulers::node_rank(lookup).map(|(variable, node)| (node, Some(variable))));
    let (node, variable) = node.ok_or_else(|| format!("{wanted}, given none"))?;
    let from = variable.map(|variable| format!(" by {variable}")).unwrap_or_default();
    let node = node
        .parse()
        .ok()
        .filter(|node| *node < count)
        .ok_or_else(|| format!("{wanted}, given {node}{from}"))?;
    let given = match cluster.and_then(|cluster| cluster.variable) {
        Some(variable) => format!("{count} nodes by {variable} (--standalone: this host alone)"),
        None => format!("--nnodes {count}"),
    };
    refuse_recovery(options, &given)?;
    let patience = options.rdzv_timeout.as_deref().map(|text| parse_duration("--rdzv-timeout", text));
    Ok(Some(Plan {
        count,
        node,
        rendezvous: rendezvous(torchrun, cluster)?,
        token: TokenSource::find(
            options.token_file.as_deref(),
            cluster.and_then(|one| one.token_file.clone()),
        )?,
        patience: patience.transpose()?.unwrap_or(RENDEZVOUS_PATIENCE),
        is_one_terminal: cluster.is_some_and(|cluster| cluster.is_one_terminal),
        max_restarts,
    }))
}

/// Refuses the options that do not work on several hosts yet.
fn refuse_recovery(options: &Options, given: &str) -> Result<(), String> {
    for (is_given, flag) in [
        (options.elastic.is_some(), "--elastic"),
        (options.on_failure.as_deref().is_some_and(|policy| policy != "stop"), "--on-failure"),
    ] {
        if is_given {
            return Err(format!("{flag}: expected one host; not yet with {given}"));
        }
    }
    Ok(())
}

/// Hosts that are named, as `list` has them.
fn parse_remote(list: &str, options: &Options, total: Option<u32>) -> Result<Remote, String> {
    refuse_recovery(options, "--hosts of several names")?;
    if options.ssh.as_deref().is_some_and(|words| words.trim().is_empty()) {
        return Err("--ssh: expected a command such as \"ssh -p 2222\", given nothing".into());
    }
    let torchrun = &options.torchrun;
    let is_placed = torchrun.rendezvous.is_some() || torchrun.master_addr.is_some();
    Ok(Remote {
        hosts: ssh_hosts::parse(
            list,
            total.map(|total| total.to_string()).or(options.ranks.clone()).as_deref(),
        )?,
        rendezvous: is_placed.then(|| rendezvous(torchrun, None)).transpose()?,
        ssh: options.ssh.clone(),
        has_token_file: options.token_file.is_some(),
    })
}

/// Where node 0 is, with a port.
pub(super) fn rendezvous(torchrun: &TorchrunOptions, cluster: Option<&Cluster>) -> Result<String, String> {
    let given = torchrun.rendezvous.clone().filter(|given| !given.is_empty());
    let master = torchrun.master_addr.clone().map(|host| match &torchrun.master_port {
        Some(port) => format!("{host}:{port}"),
        None => host,
    });
    let placed = cluster.map(|cluster| cluster.rendezvous.clone());
    let at =
        given.or(master).or(placed).ok_or("--rdzv: expected where node 0 is, as HOST:PORT, given none")?;
    match at.rsplit_once(':') {
        // The end of an IPv6 address without brackets is no port.
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => match port.parse::<u16>() {
            Ok(1..) => Ok(at),
            _ => Err(format!("--rdzv: expected HOST:PORT with a port from 1 to 65535, given {at}")),
        },
        Some(_) => Ok(format!("[{at}]:{RENDEZVOUS_PORT}")),
        None => Ok(format!("{at}:{RENDEZVOUS_PORT}")),
    }
}

pub(super) fn parse_hosts(text: &str, ranks: u32) -> Result<JobHosts, String> {
    let count = text.parse().ok().filter(|count| (1..=ranks.min(MAX_PRETENDED)).contains(count));
    let count = count.ok_or_else(|| {
        format!(
            "--hosts: expected names, or a number of pretended hosts from 1 to {}, given {text}",
            ranks.min(MAX_PRETENDED)
        )
    })?;
    Ok(if count == 1 { JobHosts::default() } else { JobHosts::pretended(count, ranks) })
}

/// The options about the network between hosts.
#[derive(Default)]
pub(super) struct BetweenHosts {
    pub(super) link: Option<Link>,
    pub(super) connections: Option<usize>,
    pub(super) bulk: Option<Bulk>,
}

pub(super) fn parse_between_hosts(
    cli: &CommandLine,
    options: &Options,
    is_spread: bool,
) -> Result<BetweenHosts, String> {
    let given = [("link", &options.link), ("connections", &options.connections), ("bulk", &options.bulk)];
    // A variable may be there for other jobs of the same shell.
    let is_asked = |(id, text): &&(&str, &Option<String>)| text.is_some() && !cli.variables.give(id);
    if let Some((id, _)) = given.iter().find(is_asked).filter(|_| !is_spread) {
        return Err(format!("--{id}: expected several hosts, of --hosts or --nnodes, given one"));
    }
    let link = options.link.as_deref().map(|text| said("--link", text.parse())).transpose()?;
    let connections = options.connections.as_deref().map(parse_connections);
    let connections = connections.map(|read| said("--connections", read)).transpose()?;
    let bulk = options.bulk.as_deref().map(|text| said("--bulk", text.parse())).transpose()?;
    match (link, bulk) {
        _ if !is_spread => Ok(BetweenHosts::default()),
        (Some(_), Some(Bulk::Tcp)) => {
            Err("--bulk: expected quic beside --link, which is one of datagrams, given tcp".to_owned())
        }
        _ => Ok(BetweenHosts { link, connections, bulk }),
    }
}

fn said<T>(flag: &str, read: Result<T, impl std::fmt::Display>) -> Result<T, String> {
    read.map_err(|error| format!("{flag}: {error}"))
}

/// As long as torchrun waits.
const RENDEZVOUS_PATIENCE: Duration = Duration::from_secs(600);
/// torchrun's.
const RENDEZVOUS_PORT: u16 = 29400;
/// Each has an address on the loopback.
const MAX_PRETENDED: u32 = 60_000;

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::command_line::words;

    #[test]
    fn node_0_is_where_it_is_said() {
        let of = |line: &str| {
            let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            rendezvous(&words::read(&words).unwrap().options.torchrun, None).unwrap()
        };
        assert_eq!(of("--rdzv n0:1 true"), "n0:1");
        assert_eq!(of("--rdzv-endpoint n0 true"), "n0:29400");
        assert_eq!(of("--rdzv ::1 true"), "[::1]:29400");
        assert_eq!(of("--rdzv [::1]:2 true"), "[::1]:2");
        assert_eq!(of("--master-addr n0 --master-port 3 true"), "n0:3");
    }
}
