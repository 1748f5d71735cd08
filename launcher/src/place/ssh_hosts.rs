//! The hosts that a person names with `--hosts`, to be reached by ssh.

use crate::place::hosts::{self, own_name};

/// The options of the command line about the hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) hosts: Vec<RemoteHost>,
    /// The address of node 0, if it is given: `host:port`.
    pub(crate) rendezvous: Option<String>,
    /// The words before the name of a host; none: those of [`SSH`].
    pub(crate) ssh: Option<String>,
    /// Whether each node finds the token in a file.
    pub(crate) has_token_file: bool,
}

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
    pub(crate) fn is_here(&self) -> bool {
        self.destination == "localhost" || self.destination == own_name()
    }
}

/// Whether the value of `--hosts` names hosts; else it says how many are to be pretended.
pub(crate) fn are_named(text: &str) -> bool {
    !text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Reads hosts such as `n0,user@n1` or `n0:4,n1:2`; `ranks` is how many they have together, if that is said.
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

/// Asks nobody for a password, and notices a host that is gone.
pub(crate) const SSH: &str =
    "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=2";

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
}
