//! Decides one job from a command line, with the job file and the variables that it has taken in.

mod several_hosts;

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use crate::command_line::definition::{Cli, Command, Options};
use crate::command_line::words::CommandLine;
use crate::job::policy::Policy;
use crate::job::program::{GivenProgram, Programs, Start};
use crate::job::target::{TargetKind, find_python};
use crate::job::values::{
    MAX_RANKS, parse_algorithm, parse_aslr, parse_backend_for, parse_count, parse_device, parse_duration,
    parse_hash_seed, parse_only, parse_port, parse_ranks, parse_size, parse_topology, parse_tuning,
};
use crate::job::{Job, threads_per_rank};
use crate::place::cluster;
use crate::place::schedulers;
use crate::place::ssh_hosts;
use crate::processes::cpus::usable_cpus;

use several_hosts::{
    BetweenHosts, parse_between_hosts, parse_hosts, parse_nodes, parse_remote, refuse_standalone_of_several,
};

/// The job of a command line.
///
/// # Errors
/// One line: what was expected and what was given.
pub(crate) fn job(cli: &CommandLine) -> Result<Job, String> {
    decide(cli).map_err(|error| cli.locate(error))
}

fn decide(cli: &CommandLine) -> Result<Job, String> {
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
    let total = several.as_ref().map(|several| several.iter().map(|given| given.ranks.unwrap_or(1)).sum());
    refuse_standalone_of_several(&options)?;
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
            remote = Some(parse_remote(&named, &options, total)?);
        }
    }
    if options.ssh.is_some() && remote.is_none() && cluster.is_none() {
        return Err("--ssh: expected --hosts with the names of hosts, given none".into());
    }
    // Each node would have to say which ranks of which program are its own.
    let is_of_nodes = options.torchrun.nnodes.as_deref().and_then(parse_count).is_some_and(|nodes| nodes > 1);
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
            let placed = |only: &GivenProgram| GivenProgram { ranks: placed.or(only.ranks), ..only.clone() };
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
    // For several nodes these options say where the nodes meet; the store is reached on the loopback of each.
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
        tuning: options.tuning.as_deref().map(parse_tuning).transpose()?,
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

/// The programs of a command line, in its order.
fn typed_programs(
    options: &Options,
    words: Vec<String>,
    others: &[Cli],
) -> Result<Vec<GivenProgram>, String> {
    let others = others.iter().map(|other| (&other.options, other.program.clone()));
    let typed = std::iter::once((options, words)).chain(others);
    typed.map(|(options, words)| typed_program(options, words)).collect()
}

fn typed_program(options: &Options, words: Vec<String>) -> Result<GivenProgram, String> {
    let kind = match (options.module, options.no_python) {
        (true, _) => TargetKind::Module,
        (_, true) => TargetKind::Executable,
        _ => TargetKind::Guess,
    };
    let ranks = options.ranks.as_deref().map(parse_ranks).transpose()?;
    Ok(GivenProgram { role: options.torchrun.role.clone(), ranks, kind, words, ..GivenProgram::default() })
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
fn fit_elastic(given: &mut [GivenProgram], max: u32) -> Result<(), String> {
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

const FAILURE_GRACE: Duration = Duration::from_millis(1200);
const STOP_GRACE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::command_line::words;

    fn job(line: &str) -> Result<Job, String> {
        let words: Vec<OsString> = line.split_whitespace().skip(1).map(OsString::from).collect();
        super::job(&words::read(&words).unwrap())
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
}
