//! `--hosts n0,n1`: one command starts a tpurun on each of several hosts by ssh, shows what all of them write, passes
//! signals on and returns how the job has ended.
//!
//! On the command line of ssh there is nothing of the job: what to run, where and with which environment goes over its
//! standard input, and so does every signal. When that ends, so does the job on that host.

mod conductor;
mod follower;
mod order;

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use crate::cluster::{Cluster, Lookup};
use crate::hosts::{self, own_name};

pub(crate) use conductor::{Remote, SSH, conduct};
pub(crate) use follower::follow;

/// Only argument of the command that ssh runs.
pub(crate) const FOLLOW: &str = "--follow";

/// What a node is told of its place by the command that has had it started; no rank inherits this.
pub(crate) const PLACE: &str = "TPURUN_PLACE";

/// A host of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteHost {
    /// As ssh takes it: a name, perhaps with a user.
    pub(crate) destination: String,
    pub(crate) ranks: u32,
}

impl RemoteHost {
    /// Without the user.
    pub(crate) fn name(&self) -> &str {
        self.destination.rsplit_once('@').map_or(&self.destination, |(_, name)| name)
    }

    /// Whether it is this one, which needs no ssh.
    fn is_here(&self) -> bool {
        self.destination == "localhost" || self.destination == own_name()
    }
}

/// As a shell counts it.
fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Whether the value of `--hosts` names hosts; else it says how many are to be pretended.
pub(crate) fn are_named(text: &str) -> bool {
    !text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Of `n0,user@n1` or `n0:4,n1:2`; `ranks` is how many they have together, if that is said.
///
/// # Errors
/// One line: what is no host, or numbers that do not fit.
pub(crate) fn parse(text: &str, ranks: Option<&str>) -> Result<Vec<RemoteHost>, String> {
    let wrong =
        || format!("--hosts: expected names such as n0,user@n1 or n0:4,n1:2 (HOST:RANKS), given {text}");
    let of = |part: &str| -> Option<(String, Option<u32>)> {
        let (destination, ranks) = match part.split_once(':') {
            Some((destination, ranks)) => (destination, Some(ranks.parse().ok().filter(|ranks| *ranks > 0)?)),
            None => (part, None),
        };
        is_destination(destination).then(|| (destination.to_owned(), ranks))
    };
    let parts: Option<Vec<_>> = text.split(',').map(of).collect();
    let parts = parts.ok_or_else(wrong)?;
    let count = parts.len() as u32;
    let total = ranks.map(|text| {
        let known = text.parse::<u32>().ok().filter(|ranks| *ranks >= count);
        known.ok_or_else(|| {
            format!("-n: expected at least {count}, one rank for each of --hosts, given {text}")
        })
    });
    let total = total.transpose()?;
    let own: Vec<u32> = parts.iter().filter_map(|(_, ranks)| *ranks).collect();
    let sum: u64 = own.iter().map(|ranks| u64::from(*ranks)).sum();
    let shares: Vec<u32> = match (own.len(), total) {
        (0, total) => hosts::shares(total.unwrap_or(count), count).collect(),
        (known, _) if known < parts.len() => return Err(wrong()),
        (_, Some(total)) if u64::from(total) != sum => {
            return Err(format!(
                "-n: expected {sum}, the ranks of --hosts together, or nothing, given {total}"
            ));
        }
        _ => own,
    };
    let host = |((destination, _), ranks)| RemoteHost { destination, ranks };
    Ok(parts.into_iter().zip(shares).map(host).collect())
}

/// Nothing that ssh could take for an option, and nothing that a shell would read.
fn is_destination(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with(['-', '@'])
        && !text.ends_with('@')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_@".contains(&byte))
}

/// The value of [`PLACE`].
fn place(node: u32, nodes: u32, ranks: u32, rendezvous: &str) -> String {
    format!("{node},{nodes},{ranks},{rendezvous}")
}

/// The place that this process was given.
///
/// # Errors
/// One line: a variable of somebody else.
pub(crate) fn placed(lookup: Lookup<'_>) -> Result<Option<Cluster>, String> {
    let Some(text) = lookup(PLACE) else { return Ok(None) };
    let mut parts = text.splitn(4, ',');
    let mut number = || parts.next().and_then(|part| part.parse::<u32>().ok());
    let numbers = (number(), number(), number());
    let (Some(node), Some(nodes), Some(ranks @ 1..), Some(rendezvous)) =
        (numbers.0, numbers.1, numbers.2, parts.next())
    else {
        return Err(format!("{PLACE}: expected to be set by tpurun itself, given {text}"));
    };
    Ok(Some(Cluster {
        scheduler: "ssh",
        variable: None,
        nodes,
        node,
        rendezvous: rendezvous.to_owned(),
        tasks: 1,
        task: 0,
        ranks: Some(ranks),
        job: String::new(),
        token_file: None,
        is_one_terminal: true,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, ranks: Option<&str>) -> Result<String, String> {
        let hosts = parse(text, ranks)?;
        let one = |host: &RemoteHost| format!("{}={}", host.destination, host.ranks);
        Ok(hosts.iter().map(one).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn ranks_are_shared_or_said() {
        assert_eq!(shown("n0,me@n1", None).unwrap(), "n0=1 me@n1=1");
        assert_eq!(shown("n0,n1,n2", Some("8")).unwrap(), "n0=3 n1=3 n2=2");
        assert_eq!(shown("n0:4,n1:2", None).unwrap(), "n0=4 n1=2");
        assert_eq!(shown("n0:4,n1:2", Some("6")).unwrap(), "n0=4 n1=2");
        assert_eq!(parse("me@n1", None).unwrap()[0].name(), "n1");
        assert!(are_named("n0") && are_named("4,n1") && !are_named("4"));
    }

    #[test]
    fn what_is_no_host_is_refused_in_one_line() {
        for text in ["", "n0,", "-oProxyCommand=x", "n0;rm", "n 0", "n0:0", "n0:4,n1", "n0:2:3", "me@", "@n0"]
        {
            let error = shown(text, None).unwrap_err();
            assert_eq!(
                error,
                format!("--hosts: expected names such as n0,user@n1 or n0:4,n1:2 (HOST:RANKS), given {text}")
            );
        }
        assert_eq!(
            shown("n0,n1", Some("1")).unwrap_err(),
            "-n: expected at least 2, one rank for each of --hosts, given 1"
        );
        assert_eq!(
            shown("n0,n1", Some("auto")).unwrap_err(),
            "-n: expected at least 2, one rank for each of --hosts, given auto"
        );
        assert_eq!(
            shown("n0:4,n1:2", Some("8")).unwrap_err(),
            "-n: expected 6, the ranks of --hosts together, or nothing, given 8"
        );
    }

    #[test]
    fn a_node_knows_its_place() {
        let text = place(1, 3, 4, "[::1]:29400");
        let found = placed(&|name| (name == PLACE).then(|| text.clone())).unwrap().unwrap();
        assert_eq!((found.node, found.nodes, found.ranks), (1, 3, Some(4)));
        assert_eq!(found.rendezvous, "[::1]:29400");
        assert_eq!(placed(&|_| None), Ok(None));
        assert!(placed(&|_| Some("1,2".into())).is_err());
    }
}
