//! One job as decided from the command line: every value checked, nothing started yet.

use std::env;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use tpurun_protocol::network::{Bulk, Link, parse_connections};
use tpurun_topology::{Algorithm, Topology};

use crate::addresses;
use crate::cli::{Cli, Command, Options, TorchrunOptions};
use crate::cluster::{self, Cluster};
use crate::cpus::usable_cpus;
use crate::hosts::Hosts;
use crate::nodes::{Plan, Source};
use crate::policy::Policy;
use crate::program::{Given, Programs, Start};
use crate::rank_set::RankSet;
use crate::remote::{self, Remote};
use crate::target::{Kind, find_python};

/// What will run and how.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Of all hosts.
    pub(crate) ranks: u32,
    /// Those that this tpurun runs.
    pub(crate) here: Range<u32>,
    /// Where the ranks are, or are pretended to be.
    pub(crate) hosts: Hosts,
    /// What the network between them is to do to what ranks here send.
    pub(crate) link: Option<Link>,
    pub(crate) connections: Option<usize>,
    pub(crate) bulk: Option<Bulk>,
    /// How to find the other nodes, when there are any.
    pub(crate) nodes: Option<Plan>,
    /// The scheduler that has placed this tpurun.
    pub(crate) cluster: Option<Cluster>,
    /// The hosts on which this tpurun only starts others.
    pub(crate) remote: Option<Remote>,
    pub(crate) programs: Programs,
    /// None when no program is Python.
    pub(crate) python: Option<PathBuf>,
    /// The fork server is needed: for ranks to fork, or for a store that outlives every rank.
    ///
    /// Of several programs the one of rank 0 may hold no store, or be done long before the others.
    pub(crate) wants_server: bool,
    pub(crate) preload: Vec<String>,
    /// Whether the fork server is that of a process which stays for the next job.
    pub(crate) is_warm: bool,
    /// Whether each rank has a hash seed of its own, whatever PYTHONHASHSEED says here.
    pub(crate) has_own_hash_seeds: bool,
    /// Whether what each rank executes for itself is at random addresses; None when the number of ranks decides.
    pub(crate) aslr: Option<bool>,
    pub(crate) cores: usize,
    /// OMP_NUM_THREADS of each rank; None when the user has set it.
    pub(crate) threads: Option<usize>,
    pub(crate) master_addr: String,
    /// 0: any free one.
    pub(crate) master_port: u16,
    pub(crate) run_id: Option<String>,
    pub(crate) log_dir: Option<PathBuf>,
    /// Whether lines say which rank they are from.
    pub(crate) labels: bool,
    pub(crate) only: RankSet,
    /// The rank that reads our standard input.
    pub(crate) stdin_rank: u32,
    /// Whether tracebacks that only echo another rank's failure are shown in full.
    pub(crate) shows_victims: bool,
    pub(crate) topology: Option<Topology>,
    pub(crate) algorithm: Option<Algorithm>,
    /// Whether ranks compare results that must be equal.
    pub(crate) verify_results: bool,
    /// Whether each rank has device tpu; None when its program decides.
    pub(crate) device: Option<bool>,
    /// Whether groups of Gloo are those of this backend.
    pub(crate) serves_gloo: bool,
    /// Bytes of device memory of each rank.
    pub(crate) hbm: Option<u64>,
    pub(crate) timeout: Option<Duration>,
    /// What happens when a rank fails.
    pub(crate) policy: Policy,
    /// Between SIGTERM and SIGKILL after a failure.
    pub(crate) failure_grace: Duration,
    /// Between SIGINT or SIGTERM and SIGKILL when somebody asked the job to stop.
    pub(crate) stop_grace: Duration,
    pub(crate) dry_run: bool,
    /// Whether to show where the time until the first collective goes.
    pub(crate) timings: bool,
}

impl Job {
    /// # Errors
    /// One line: what was expected and what was given.
    pub(crate) fn new(cli: &Cli) -> Result<Job, String> {
        Job::decide(cli).map_err(|error| cli.locate(error))
    }

    /// What can be checked only when it is known how many ranks the other nodes have.
    fn check_size(&self) -> Result<(), String> {
        match &self.topology {
            Some(topology) if topology.torus().live_chips() != self.ranks => Err(format!(
                "--topology {topology}: expected {} {}, one rank per chip, given {}",
                if self.nodes.is_some() { "in all" } else { "-n" },
                topology.torus().live_chips(),
                self.ranks
            )),
            _ => Ok(()),
        }
    }

    /// The job of which the ranks `here` are on this node.
    pub(crate) fn spread(&mut self, hosts: Hosts, here: Range<u32>) -> Result<(), String> {
        let ranks = hosts.iter().map(|host| host.ranks.end).max().unwrap_or(self.ranks);
        (self.ranks, self.here, self.hosts) = (ranks, here, hosts);
        self.programs.resize(ranks);
        if self.programs.ranks() != ranks {
            let wanted = self.programs.ranks();
            return Err(format!(
                "-n: expected {ranks}, the ranks of all nodes together, given {wanted} in all programs"
            ));
        }
        self.check_size()
    }

    fn decide(cli: &Cli) -> Result<Job, String> {
        let mut options = cli.options.clone();
        let mut words = cli.program.clone();
        let bench = match &cli.command {
            Some(Command::Bench(bench)) => Some(bench),
            _ => None,
        };
        if let Some(bench) = bench {
            // The front makes one job of each.
            options.ranks = bench.ranks.clone().or(options.ranks);
            options.only_ranks = Some("0".into());
            options.module = true;
            words = ["tpurun.bench".into()].into_iter().chain(bench.arguments()).collect();
        }
        if let Some(file) = &cli.job_file
            && let [only] = &file.programs[..]
        {
            options.ranks = options.ranks.or(only.ranks.map(|ranks| ranks.to_string()));
        }
        let several = match &cli.job_file {
            Some(file) if file.programs.len() > 1 => Some(file.programs.clone()),
            None if !cli.others.is_empty() => Some(typed_programs(&options, words.clone(), &cli.others)?),
            _ => None,
        };
        let total =
            several.as_ref().map(|several| several.iter().map(|given| given.ranks.unwrap_or(1)).sum());
        refuse_standalone_of_several(&options)?;
        let is_alone = options.torchrun.standalone;
        let mut cluster = match options.torchrun.nnodes {
            None if !is_alone => cluster::detect(&cluster::environment)?,
            _ => None,
        };
        let mut remote = None;
        if let Some(named) = options.hosts.take_if(|text| remote::are_named(text)) {
            // By a tpurun that was given the same names, or now.
            let is_placed = cluster.as_ref().is_some_and(|cluster| cluster.ranks.is_some());
            if !is_placed {
                cluster = None;
                remote = Some(parse_remote(&named, &options, total)?);
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
        let policy = parse_policy(&options)?;
        let nodes = parse_nodes(&options, cluster.as_ref(), policy.max_restarts, &cluster::environment)?;
        let placed = cluster.as_ref().and_then(|cluster| cluster.ranks);
        let named = remote.as_ref().map(|remote| remote.hosts.iter().map(|host| host.ranks).sum());
        if let Some(ranks) = placed.or(named) {
            options.ranks = Some(u32::to_string(&ranks));
        } else if let Some(cluster) = &cluster {
            options.ranks = options.ranks.or(Some(cluster.tasks.to_string()));
        }
        let mut given = match (several, &cli.job_file) {
            (Some(several), _) => several,
            (None, Some(file)) => {
                let placed = options.ranks.as_deref().map(parse_ranks).transpose()?;
                let placed = |only: &Given| Given { ranks: placed.or(only.ranks), ..only.clone() };
                file.programs.iter().map(placed).collect()
            }
            (None, None) => vec![typed_program(&options, words)?],
        };
        if let Some(max) = policy.ranks() {
            fit_elastic(&mut given, max)?;
        }
        let has_own_hash_seeds = options.hash_seed.as_deref().map(parse_hash_seed).transpose()?.is_some();
        let start = if options.spawn || has_own_hash_seeds { Start::Spawn } else { Start::ForkServer };
        let programs = Programs::new(given, start)?;
        // On this node, until all have come.
        let ranks = match (&nodes, &cluster) {
            (Some(_), Some(cluster)) if programs.are_several() => cluster.own_ranks(programs.ranks()),
            _ => programs.ranks(),
        };
        let hosts = options.hosts.as_deref().map(|text| parse_hosts(text, ranks)).transpose()?;
        let is_spread =
            nodes.is_some() || remote.is_some() || hosts.as_ref().is_some_and(|hosts| hosts.count() > 1);
        let BetweenHosts { link, connections, bulk } = parse_between_hosts(cli, &options, is_spread)?;
        let (reader, most) = (options.stdin_rank, if nodes.is_some() { MAX_RANKS } else { ranks });
        if reader >= most {
            return Err(format!("--stdin-rank: expected a rank below {most}, given {reader}"));
        }
        let python = programs.has_python().then(|| find_python(options.python.as_deref())).transpose()?;
        let cores = usable_cpus();
        let master_port = parse_port(options.torchrun.master_port.as_deref())?;
        // Of several nodes they say where these meet; the store is reached on the loopback of each.
        let master_addr = options.torchrun.master_addr.clone().filter(|_| nodes.is_none());
        let stop_grace =
            options.shutdown_timeout.as_deref().map(|text| parse_duration("--shutdown-timeout", text));
        let stop_grace = stop_grace.transpose()?;
        let job = Job {
            ranks,
            here: 0..ranks,
            hosts: hosts.unwrap_or_default(),
            link,
            connections,
            bulk,
            wants_server: programs.are_any_forked() || programs.are_several() && python.is_some(),
            programs,
            python,
            preload: options.preload.iter().filter(|name| !name.is_empty()).cloned().collect(),
            is_warm: options.warm,
            has_own_hash_seeds,
            aslr: options.aslr.as_deref().map(parse_aslr).transpose()?,
            cores,
            threads: env::var_os("OMP_NUM_THREADS").is_none().then(|| threads_per_rank(cores, ranks)),
            master_addr: master_addr.unwrap_or_else(|| "127.0.0.1".into()),
            master_port: if nodes.is_some() { 0 } else { master_port },
            run_id: options.torchrun.rdzv_id.clone(),
            log_dir: options.log_dir.as_ref().map(PathBuf::from),
            labels: bench.is_none(),
            only: parse_only(options.only_ranks.as_deref(), if nodes.is_some() { MAX_RANKS } else { ranks })?,
            stdin_rank: options.stdin_rank,
            shows_victims: options.show_victims,
            topology: options.topology.as_deref().map(parse_topology).transpose()?,
            nodes,
            cluster,
            remote,
            verify_results: options.verify_results,
            algorithm: options.algorithm.as_deref().map(parse_algorithm).transpose()?,
            device: options.device.as_deref().map(parse_device).transpose()?,
            serves_gloo: options.backend_for.as_deref().map(parse_backend_for).transpose()?.is_some(),
            hbm: options.hbm.as_deref().map(|text| parse_size("--hbm", text)).transpose()?,
            timeout: options.timeout.as_deref().map(|text| parse_duration("--timeout", text)).transpose()?,
            policy,
            failure_grace: stop_grace.unwrap_or(FAILURE_GRACE),
            stop_grace: stop_grace.unwrap_or(STOP_GRACE),
            dry_run: options.dry_run,
            timings: options.timings,
        };
        if job.nodes.is_none() {
            job.check_size()?;
        }
        Ok(job)
    }
}

/// The programs of a command line, in its order.
fn typed_programs(options: &Options, words: Vec<String>, others: &[Cli]) -> Result<Vec<Given>, String> {
    let others = others.iter().map(|other| (&other.options, other.program.clone()));
    let typed = std::iter::once((options, words)).chain(others);
    typed.map(|(options, words)| typed_program(options, words)).collect()
}

fn typed_program(options: &Options, words: Vec<String>) -> Result<Given, String> {
    let kind = match (options.module, options.no_python) {
        (true, _) => Kind::Module,
        (_, true) => Kind::Executable,
        _ => Kind::Guess,
    };
    let ranks = options.ranks.as_deref().map(parse_ranks).transpose()?;
    Ok(Given { role: options.torchrun.role.clone(), ranks, kind, words, ..Given::default() })
}

impl Job {
    /// Another number of ranks, which share the cores anew.
    pub(crate) fn resize(&mut self, ranks: u32) {
        (self.ranks, self.here) = (ranks, 0..ranks);
        self.programs.resize(ranks);
        self.threads = self.threads.map(|_| threads_per_rank(self.cores, ranks));
    }

    /// Whether what each rank executes for itself is at the same addresses in all of them.
    pub(crate) fn has_same_addresses(&self) -> bool {
        let is_crowded = self.here.len() >= addresses::MANY as usize * self.cores;
        !self.aslr.unwrap_or(!is_crowded)
    }
}

fn threads_per_rank(cores: usize, ranks: u32) -> usize {
    (cores / ranks as usize).max(1)
}

/// `--standalone` is this host alone, so it overrides what schedulers say, but nothing that a person says.
fn refuse_standalone_of_several(options: &Options) -> Result<(), String> {
    let nodes = options.torchrun.nnodes.as_deref().filter(|text| parse_count(text) != Some(1));
    let hosts = options.hosts.as_deref().filter(|text| remote::are_named(text));
    let given = nodes.map(|nodes| format!("--nnodes {nodes}"));
    match given.or(hosts.map(|hosts| format!("--hosts {hosts}"))) {
        Some(given) if options.torchrun.standalone => {
            Err(format!("--standalone: expected this host alone, given {given}"))
        }
        _ => Ok(()),
    }
}

fn parse_nodes(
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
    let node = node.or_else(|| cluster::node_rank(lookup).map(|(variable, node)| (node, Some(variable))));
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
        token: Source::find(options.token_file.as_deref(), cluster.and_then(|one| one.token_file.clone()))?,
        patience: patience.transpose()?.unwrap_or(RENDEZVOUS_PATIENCE),
        is_one_terminal: cluster.is_some_and(|cluster| cluster.is_one_terminal),
        max_restarts,
    }))
}

/// What does not work on several hosts yet.
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
        hosts: remote::parse(
            list,
            total.map(|total| total.to_string()).or(options.ranks.clone()).as_deref(),
        )?,
        rendezvous: is_placed.then(|| rendezvous(torchrun, None)).transpose()?,
        ssh: options.ssh.clone(),
        has_token_file: options.token_file.is_some(),
    })
}

/// `2`, or `2:2` as torchrun has it.
fn parse_count(text: &str) -> Option<u32> {
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    least.parse().ok().filter(|count| least == most && (1..=MAX_RANKS).contains(count))
}

/// Where node 0 is, with a port.
fn rendezvous(torchrun: &TorchrunOptions, cluster: Option<&Cluster>) -> Result<String, String> {
    let given = torchrun.rendezvous.clone().filter(|given| !given.is_empty());
    let master = torchrun.master_addr.clone().map(|host| match &torchrun.master_port {
        Some(port) => format!("{host}:{port}"),
        None => host,
    });
    let placed = cluster.map(|cluster| cluster.rendezvous.clone());
    let at =
        given.or(master).or(placed).ok_or("--rdzv: expected where node 0 is, as HOST:PORT, given none")?;
    match at.rsplit_once(':') {
        // Of an IPv6 address without brackets the end is no port.
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => match port.parse::<u16>() {
            Ok(1..) => Ok(at),
            _ => Err(format!("--rdzv: expected HOST:PORT with a port from 1 to 65535, given {at}")),
        },
        Some(_) => Ok(format!("[{at}]:{RENDEZVOUS_PORT}")),
        None => Ok(format!("{at}:{RENDEZVOUS_PORT}")),
    }
}

fn parse_hosts(text: &str, ranks: u32) -> Result<Hosts, String> {
    let count = text.parse().ok().filter(|count| (1..=ranks.min(MAX_PRETENDED)).contains(count));
    let count = count.ok_or_else(|| {
        format!(
            "--hosts: expected names, or a number of pretended hosts from 1 to {}, given {text}",
            ranks.min(MAX_PRETENDED)
        )
    })?;
    Ok(if count == 1 { Hosts::default() } else { Hosts::pretended(count, ranks) })
}

/// What is said of the network between hosts.
#[derive(Default)]
struct BetweenHosts {
    link: Option<Link>,
    connections: Option<usize>,
    bulk: Option<Bulk>,
}

fn parse_between_hosts(cli: &Cli, options: &Options, is_spread: bool) -> Result<BetweenHosts, String> {
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

fn parse_policy(options: &Options) -> Result<Policy, String> {
    if options.elastic.is_some() && options.topology.is_some() {
        return Err("--elastic: expected no --topology, which needs all of its ranks".into());
    }
    if options.elastic.is_some() && options.hosts.is_some() {
        return Err("--elastic: expected no --hosts, whose ranks can not shrink yet".into());
    }
    let max_restarts = options.torchrun.max_restarts.as_deref();
    Policy::new(options.on_failure.as_deref(), options.elastic.as_deref(), max_restarts)
}

/// As many as `--elastic` says at most; `-n` may say so, too.
fn fit_elastic(given: &mut [Given], max: u32) -> Result<(), String> {
    let [only] = given else {
        let programs = given.len();
        return Err(format!(
            "--elastic: expected one program, given {programs}: each needs all of its ranks"
        ));
    };
    match only.ranks.replace(max) {
        _ if max > MAX_RANKS => Err(format!("--elastic: expected at most {MAX_RANKS} ranks, given {max}")),
        Some(ranks) if ranks != max => {
            Err(format!("-n: expected {max}, the most that --elastic allows, or nothing, given {ranks}"))
        }
        _ => Ok(()),
    }
}

/// The value of `-n`.
pub(crate) fn parse_ranks(text: &str) -> Result<u32, String> {
    ranks_from(text).map_err(|error| format!("-n: {error}"))
}

/// A number of ranks as people write it.
pub(crate) fn ranks_from(text: &str) -> Result<u32, String> {
    match text {
        "auto" | "cpu" => Ok(u32::try_from(usable_cpus()).unwrap_or(MAX_RANKS)),
        _ => text.parse().ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks)).ok_or_else(|| {
            format!("expected a number of ranks from 1 to {MAX_RANKS}, auto or cpu, given {text}")
        }),
    }
}

fn parse_port(text: Option<&str>) -> Result<u16, String> {
    let Some(text) = text else { return Ok(0) };
    text.parse().map_err(|_| format!("--master-port: expected a port from 0 (any) to 65535, given {text}"))
}

fn parse_only(text: Option<&str>, ranks: u32) -> Result<RankSet, String> {
    let Some(text) = text else { return Ok(RankSet::all(ranks)) };
    let only: RankSet = text.parse().map_err(|error| format!("--only-ranks: {error}"))?;
    match only.last() {
        Some(last) if last >= ranks => {
            Err(format!("--only-ranks: expected ranks below {ranks}, given {text}"))
        }
        _ => Ok(only),
    }
}

fn parse_topology(text: &str) -> Result<Topology, String> {
    text.parse().map_err(|error| format!("--topology {text}: {error}"))
}

fn parse_algorithm(text: &str) -> Result<Algorithm, String> {
    text.parse().map_err(|_| {
        let known = Algorithm::ALL.map(|algorithm| algorithm.to_string()).join(", ");
        format!("--algorithm: expected {known}, given {text}")
    })
}

/// `500ms`, `30s`, `10m`, `1h`; a bare number is seconds, as in torchrun.
pub(crate) fn parse_duration(flag: &str, text: &str) -> Result<Duration, String> {
    let wrong = || format!("{flag}: expected a time such as 500ms, 30s, 10m or 1h, given {text}");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let millis_per_unit = match &text[digits.len()..] {
        "ms" => 1.0,
        "" | "s" => 1e3,
        "m" | "min" => 6e4,
        "h" => 3.6e6,
        _ => return Err(wrong()),
    };
    let millis = digits.parse::<f64>().map_err(|_| wrong())? * millis_per_unit;
    // A year: what is longer is a mistake, and what is not finite is not a time.
    if (1.0..=3.2e10).contains(&millis) { Ok(Duration::from_millis(millis as u64)) } else { Err(wrong()) }
}

fn parse_backend_for(text: &str) -> Result<(), String> {
    match text {
        "gloo" => Ok(()),
        _ => Err(format!("--backend-for: expected gloo, given {text}")),
    }
}

/// `tpu` or `cpu`: whether ranks have the device.
fn parse_device(text: &str) -> Result<bool, String> {
    match text {
        "tpu" => Ok(true),
        "cpu" => Ok(false),
        _ => Err(format!("--device: expected tpu or cpu, given {text}")),
    }
}

/// `on` or `off`: whether programs are loaded at random addresses.
/// A forked interpreter has the seed of the one that it was forked from, and nothing can change it.
fn parse_hash_seed(text: &str) -> Result<(), String> {
    match text {
        "per-rank" => Ok(()),
        _ => Err(format!("--hash-seed: expected per-rank, given {text} (PYTHONHASHSEED fixes one for all)")),
    }
}

fn parse_aslr(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("--aslr: expected on or off, given {text}")),
    }
}

/// `512MiB`, `16GiB`, `16G`: powers of two; a bare number is bytes. `python/tpurun/_variables.py` reads the same.
fn parse_size(flag: &str, text: &str) -> Result<u64, String> {
    let wrong = || format!("{flag}: expected a size of 1MiB to 16TiB such as 512MiB or 16GiB, given {text}");
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let unit = text[number.len()..].split_at_checked(1).unwrap_or_default();
    let shift = match unit {
        ("", "") | ("B", "") => 0,
        ("K", "" | "B" | "i" | "iB") => 10,
        ("M", "" | "B" | "i" | "iB") => 20,
        ("G", "" | "B" | "i" | "iB") => 30,
        ("T", "" | "B" | "i" | "iB") => 40,
        _ => return Err(wrong()),
    };
    let number = number.parse::<f64>().ok().filter(|_| are_digits(whole) && are_digits(part));
    let bytes = number.ok_or_else(wrong)? * (1u64 << shift) as f64;
    let sizes = (1u64 << 20) as f64..=(1u64 << 44) as f64;
    if sizes.contains(&bytes) { Ok(bytes as u64) } else { Err(wrong()) }
}

const MAX_RANKS: u32 = tpurun_protocol::board::MAX_RANKS;
const FAILURE_GRACE: Duration = Duration::from_millis(1200);
/// As long as torchrun waits.
const RENDEZVOUS_PATIENCE: Duration = Duration::from_secs(600);
/// torchrun's.
const RENDEZVOUS_PORT: u16 = 29400;
/// Each has an address on the loopback.
const MAX_PRETENDED: u32 = 60_000;
const STOP_GRACE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::words;
    use std::ffi::OsString;

    fn job(line: &str) -> Result<Job, String> {
        let words: Vec<OsString> = line.split_whitespace().skip(1).map(OsString::from).collect();
        Job::new(&words::read(&words).unwrap())
    }

    #[test]
    fn a_job_has_sane_defaults() {
        let job = job("tpurun true x").unwrap();
        assert_eq!((job.ranks, job.wants_server, job.python), (1, false, None));
        assert_eq!((job.master_addr.as_str(), job.master_port), ("127.0.0.1", 0));
        assert_eq!(job.failure_grace, Duration::from_millis(1200));
        assert_eq!(job.only.to_string(), "0");
    }

    #[test]
    fn programs_are_at_the_same_addresses_with_many_ranks_to_a_core_or_when_asked() {
        let is_same = |line: &str| {
            let mut job = job(line).unwrap();
            job.cores = 2;
            job.has_same_addresses()
        };
        for (ranks, same) in [(1, false), (31, false), (32, true), (64, true)] {
            assert_eq!(is_same(&format!("tpurun -n {ranks} true")), same, "{ranks}");
            assert!(!is_same(&format!("tpurun --aslr on -n {ranks} true")), "{ranks}");
            assert!(is_same(&format!("tpurun --aslr off -n {ranks} true")), "{ranks}");
        }
        assert_eq!(job("tpurun --aslr no true").unwrap_err(), "--aslr: expected on or off, given no");
    }

    #[test]
    fn ranks_with_hash_seeds_of_their_own_are_not_forked() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("a.py");
        std::fs::write(&script, "").unwrap();
        let of = |options: &str| job(&format!("tpurun {options} {}", script.display())).unwrap();
        assert!(of("").programs.are_all_forked());
        let own = of("--hash-seed per-rank -n 2");
        assert!(own.has_own_hash_seeds && !own.programs.are_any_forked() && !own.wants_server);
        assert!(!of("--spawn").has_own_hash_seeds);
        assert_eq!(
            job("tpurun --hash-seed 7 true").unwrap_err(),
            "--hash-seed: expected per-rank, given 7 (PYTHONHASHSEED fixes one for all)"
        );
    }

    #[test]
    fn groups_of_gloo_are_served_where_that_is_asked_for() {
        assert!(!job("tpurun true").unwrap().serves_gloo);
        assert!(job("tpurun --backend-for gloo true").unwrap().serves_gloo);
        assert_eq!(
            job("tpurun --backend-for nccl true").unwrap_err(),
            "--backend-for: expected gloo, given nccl"
        );
    }

    #[test]
    fn what_can_not_work_is_said_in_one_line() {
        for (line, expected) in [
            ("tpurun -n 0 true", "-n: expected a number of ranks from 1 to 65536, auto or cpu, given 0"),
            ("tpurun -n gpu true", "-n: expected a number of ranks from 1 to 65536, auto or cpu, given gpu"),
            (
                "tpurun --nnodes 2 true",
                "--node-rank: expected 0 to 1, which of the 2 nodes this is, given none",
            ),
            ("tpurun --nnodes 2:4 true", "--nnodes: expected a number of hosts from 1 to 65536, given 2:4"),
            ("tpurun --node-rank 1 true", "--node-rank: expected 0, since --nnodes is 1, given 1"),
            (
                "tpurun --nnodes 2 --node-rank 2 true",
                "--node-rank: expected 0 to 1, which of the 2 nodes this is, given 2",
            ),
            (
                "tpurun --nnodes 2 --node-rank 1 true",
                "--rdzv: expected where node 0 is, as HOST:PORT, given none",
            ),
            (
                "tpurun --nnodes 2 --node-rank 1 --rdzv n0:x true",
                "--rdzv: expected HOST:PORT with a port from 1 to 65535, given n0:x",
            ),
            (
                "tpurun --nnodes 2 --node-rank 1 --rdzv n0 --on-failure continue true",
                "--on-failure: expected one host; not yet with --nnodes 2",
            ),
            (
                "tpurun --nnodes 2 --node-rank 1 --rdzv n0 true",
                "expected the same token on every node, in TPURUN_TOKEN or --token-file, given none (make one with \
                 `tpurun token`)",
            ),
            (
                "tpurun -n 4 --hosts 5 true",
                "--hosts: expected names, or a number of pretended hosts from 1 to 4, given 5",
            ),
            (
                "tpurun --hosts n0,n1 --elastic 1:2 true",
                "--elastic: expected one host; not yet with --hosts of several names",
            ),
            (
                "tpurun --hosts n0,n1,n2 true : true",
                "-n: expected at least 3, one rank for each of --hosts, given 2",
            ),
            (
                "tpurun --nnodes 2 --node-rank 1 --rdzv n0:1 true : true",
                "--nnodes: expected one program, given several, which --hosts or srun place",
            ),
            ("tpurun --ssh rsh true", "--ssh: expected --hosts with the names of hosts, given none"),
            (
                "tpurun --hosts n0,n1 --ssh= true",
                "--ssh: expected a command such as \"ssh -p 2222\", given nothing",
            ),
            (
                "tpurun -n 4 --link loss=1% true",
                "--link: expected several hosts, of --hosts or --nnodes, given one",
            ),
            (
                "tpurun -n 4 --connections 2 true",
                "--connections: expected several hosts, of --hosts or --nnodes, given one",
            ),
            (
                "tpurun -n 4 --hosts 2 --connections 0 true",
                "--connections: expected a number from 1 to 16, given \"0\"",
            ),
            (
                "tpurun -n 4 --bulk quic true",
                "--bulk: expected several hosts, of --hosts or --nnodes, given one",
            ),
            ("tpurun -n 4 --hosts 2 --bulk udp true", "--bulk: expected tcp or quic, given \"udp\""),
            (
                "tpurun -n 4 --hosts 2 --link loss=1% --bulk tcp true",
                "--bulk: expected quic beside --link, which is one of datagrams, given tcp",
            ),
            (
                "tpurun -n 4 --hosts 2 --link loss=1 true",
                "--link: expected words such as delay=2ms,jitter=500us,loss=1%,duplicate=0.1%,rate=100Mbit, given loss=1",
            ),
            (
                "tpurun --max-restarts -1 true",
                "--max-restarts: expected a number of restarts from 0, given -1",
            ),
            (
                "tpurun -n 4 --elastic 2:8 true",
                "-n: expected 8, the most that --elastic allows, or nothing, given 4",
            ),
            ("tpurun --elastic 1:70000 true", "--elastic: expected at most 65536 ranks, given 70000"),
            (
                "tpurun --elastic 2:8 --topology 2x2x2 true",
                "--elastic: expected no --topology, which needs all of its ranks",
            ),
            ("tpurun -n 4 --only-ranks 2-4 true", "--only-ranks: expected ranks below 4, given 2-4"),
            ("tpurun -n 4 --only-ranks x true", "--only-ranks: expected ranks such as 0-3,7, given \"x\""),
            (
                "tpurun -n 9 --topology 2x2x2 true",
                "--topology 2x2x2: expected -n 8, one rank per chip, given 9",
            ),
            ("tpurun --algorithm magic true", "--algorithm: expected flat, ring, bucket, given magic"),
            (
                "tpurun --timeout soon true",
                "--timeout: expected a time such as 500ms, 30s, 10m or 1h, given soon",
            ),
            ("tpurun --master-port x true", "--master-port: expected a port from 0 (any) to 65535, given x"),
        ] {
            assert_eq!(job(line).unwrap_err(), expected, "{line}");
        }
        assert!(
            job("tpurun --topology 2xx2 true")
                .unwrap_err()
                .starts_with("--topology 2xx2: topology dimension")
        );
    }

    #[test]
    fn an_elastic_job_starts_with_all_it_may_have() {
        let mut elastic = job("tpurun --elastic 2:6 true").unwrap();
        assert_eq!((elastic.ranks, elastic.policy.max_restarts), (6, 3));
        assert_eq!(job("tpurun -n 6 --elastic 2:6 --max_restarts 1 true").unwrap().policy.max_restarts, 1);
        elastic.cores = 8;
        elastic.threads = Some(1);
        elastic.resize(2);
        assert_eq!((elastic.ranks, elastic.threads), (2, Some(4)));
    }

    #[test]
    fn named_hosts_share_the_ranks() {
        let job = job("tpurun --hosts n0,me@n1 -n 5 --topology 5 true").unwrap();
        let remote = job.remote.unwrap();
        let ranks: Vec<u32> = remote.hosts.iter().map(|host| host.ranks).collect();
        assert_eq!((job.ranks, ranks, remote.rendezvous), (5, vec![3, 2], None));
    }

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

    #[test]
    fn times_have_units() {
        let of = |text| parse_duration("--timeout", text);
        assert_eq!(of("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(of("30").unwrap(), Duration::from_secs(30));
        assert_eq!(of("1.5s").unwrap(), Duration::from_millis(1500));
        assert_eq!(of("10m").unwrap(), Duration::from_secs(600));
        for text in ["", "s", "-1s", "0", "1e99h", "NaN", "3 s", "3d"] {
            assert!(of(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_as_ranks_read_them() {
        let table = include_str!("../../tests/variables/sizes.json");
        let table: serde_json::Value = serde_json::from_str(table).unwrap();
        for (text, bytes) in table["accepted"].as_object().unwrap() {
            assert_eq!(parse_size("--hbm", text).ok(), bytes.as_u64(), "{text}");
        }
        for text in table["refused"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()) {
            let said =
                format!("--hbm: expected a size of 1MiB to 16TiB such as 512MiB or 16GiB, given {text}");
            assert_eq!(parse_size("--hbm", text), Err(said));
        }
        assert!(parse_size("--hbm", "").is_err());
    }
}
