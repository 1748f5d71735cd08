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
    MAX_RANKS, parse_algorithm, parse_aslr, parse_backend_for, parse_device, parse_duration, parse_hash_seed,
    parse_only, parse_port, parse_ranks, parse_size, parse_topology, parse_tuning,
};
use crate::job::{Job, threads_per_rank};
use crate::nodes::Plan;
use crate::place::cluster;
use crate::place::hosts::JobHosts;
use crate::processes::cpus::usable_cpus;

use several_hosts::{BetweenHosts, Location, parse_between_hosts, parse_hosts, parse_nodes};

/// The job of a command line.
///
/// # Errors
/// One line: what was expected and what was given.
pub(crate) fn job(cli: &CommandLine) -> Result<Job, String> {
    decide(cli).map_err(|error| cli.locate(error))
}

fn decide(cli: &CommandLine) -> Result<Job, String> {
    let (mut options, words) = options_and_words(cli);
    let several = several_programs(cli, &options, &words)?;
    let location = Location::find(&mut options, several.as_deref())?;
    let policy = parse_policy(&options)?;
    let cluster = location.cluster.as_ref();
    let nodes = parse_nodes(&options, cluster, policy.max_restarts, &cluster::environment)?;
    options.ranks = location.ranks(options.ranks.take());
    let given = given_programs(cli, &options, several, words)?;
    let programs = decide_programs(&options, &policy, given)?;
    // On this node, until all have come.
    let ranks = match (&nodes, cluster) {
        (Some(_), Some(cluster)) if programs.are_several() => cluster.own_ranks(programs.ranks()),
        _ => programs.ranks(),
    };
    let hosts = parsed(options.hosts.as_deref(), |text| parse_hosts(text, ranks))?;
    let is_spread =
        nodes.is_some() || location.remote.is_some() || hosts.as_ref().is_some_and(|hosts| hosts.count() > 1);
    let between = parse_between_hosts(cli, &options, is_spread)?;
    let most = if nodes.is_some() { MAX_RANKS } else { ranks };
    expect_reader(options.stdin_rank, most)?;
    let hosts = hosts.unwrap_or_default();
    let job =
        assemble(cli, &options, Decided { ranks, most, programs, policy, hosts, nodes, location, between })?;
    if job.nodes.is_none() {
        job.check_size()?;
    }
    Ok(job)
}

/// The options and the words of a command line, with those that `tpurun bench` stands for, and the number of ranks of a
/// job file's only program.
fn options_and_words(cli: &CommandLine) -> (Options, Vec<String>) {
    let (mut options, mut words) = (cli.options.clone(), cli.program.clone());
    if let Some(Command::Bench(bench)) = &cli.command {
        // The front makes one job of each.
        options.ranks = bench.ranks.clone().or(options.ranks);
        options.only_ranks = Some("0".into());
        options.module = true;
        words = bench.words();
    }
    if let Some(file) = &cli.job_file
        && let [only] = &file.programs[..]
    {
        options.ranks = options.ranks.or(only.ranks.map(|ranks| ranks.to_string()));
    }
    (options, words)
}

/// The programs of the job file or the command line, where there are several.
fn several_programs(
    cli: &CommandLine,
    options: &Options,
    words: &[String],
) -> Result<Option<Vec<GivenProgram>>, String> {
    match &cli.job_file {
        Some(file) if file.programs.len() > 1 => Ok(Some(file.programs.clone())),
        None if !cli.others.is_empty() => typed_programs(options, words.to_vec(), &cli.others).map(Some),
        _ => Ok(None),
    }
}

/// All programs, with the ranks that they are given.
fn given_programs(
    cli: &CommandLine,
    options: &Options,
    several: Option<Vec<GivenProgram>>,
    words: Vec<String>,
) -> Result<Vec<GivenProgram>, String> {
    match (several, &cli.job_file) {
        (Some(several), _) => Ok(several),
        (None, Some(file)) => {
            let placed = parsed(options.ranks.as_deref(), parse_ranks)?;
            let placed = |only: &GivenProgram| GivenProgram { ranks: placed.or(only.ranks), ..only.clone() };
            Ok(file.programs.iter().map(placed).collect())
        }
        (None, None) => Ok(vec![typed_program(options, words)?]),
    }
}

/// The programs with the numbers of their ranks, and how these start.
fn decide_programs(
    options: &Options,
    policy: &Policy,
    mut given: Vec<GivenProgram>,
) -> Result<Programs, String> {
    if let Some(max) = policy.ranks() {
        fit_elastic(&mut given, max)?;
    }
    let has_own_hash_seeds = parsed(options.hash_seed.as_deref(), parse_hash_seed)?.is_some();
    let start = if options.spawn || has_own_hash_seeds { Start::Spawn } else { Start::ForkServer };
    Programs::new(given, start)
}

/// The parts of a job that are decided together.
struct Decided {
    ranks: u32,
    /// The number of ranks that the job may turn out to have once all nodes have come.
    most: u32,
    programs: Programs,
    policy: Policy,
    hosts: JobHosts,
    nodes: Option<Plan>,
    location: Location,
    between: BetweenHosts,
}

/// The job of the parts that are decided, and of options that each stand for themselves. Options are read in the order
/// of the fields, so that the first one that is wrong is the one that is named.
fn assemble(cli: &CommandLine, options: &Options, decided: Decided) -> Result<Job, String> {
    let Decided { ranks, most, programs, policy, hosts, nodes, location, between } = decided;
    let python = programs.has_python().then(|| find_python(options.python.as_deref())).transpose()?;
    let cores = usable_cpus();
    let (master_addr, master_port) = store_address(options, nodes.as_ref())?;
    let stop_grace =
        parsed(options.shutdown_timeout.as_deref(), |text| parse_duration("--shutdown-timeout", text))?;
    Ok(Job {
        ranks,
        here: 0..ranks,
        hosts,
        link: between.link,
        connections: between.connections,
        bulk: between.bulk,
        nodes,
        cluster: location.cluster,
        remote: location.remote,
        wants_server: programs.are_any_forked() || programs.are_several() && python.is_some(),
        programs,
        python,
        preload: options.preload.iter().filter(|name| !name.is_empty()).cloned().collect(),
        is_warm: options.warm,
        has_own_hash_seeds: options.hash_seed.is_some(),
        aslr: parsed(options.aslr.as_deref(), parse_aslr)?,
        cores,
        threads: env::var_os("OMP_NUM_THREADS").is_none().then(|| threads_per_rank(cores, ranks)),
        master_addr,
        master_port,
        run_id: options.torchrun.rdzv_id.clone(),
        log_dir: options.log_dir.as_ref().map(PathBuf::from),
        labels: !matches!(cli.command, Some(Command::Bench(_))),
        only: parse_only(options.only_ranks.as_deref(), most)?,
        stdin_rank: options.stdin_rank,
        shows_victims: options.show_victims,
        topology: parsed(options.topology.as_deref(), parse_topology)?,
        algorithm: parsed(options.algorithm.as_deref(), parse_algorithm)?,
        verify_results: options.verify_results,
        tuning: parsed(options.tuning.as_deref(), parse_tuning)?,
        device: parsed(options.device.as_deref(), parse_device)?,
        serves_gloo: parsed(options.backend_for.as_deref(), parse_backend_for)?.is_some(),
        hbm: parsed(options.hbm.as_deref(), |text| parse_size("--hbm", text))?,
        timeout: parsed(options.timeout.as_deref(), |text| parse_duration("--timeout", text))?,
        policy,
        failure_grace: stop_grace.unwrap_or(FAILURE_GRACE),
        stop_grace: stop_grace.unwrap_or(STOP_GRACE),
        dry_run: options.dry_run,
        timings: options.timings,
    })
}

/// The value of an option, if it is given.
fn parsed<T>(
    option: Option<&str>,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    option.map(parse).transpose()
}

fn expect_reader(reader: u32, most: u32) -> Result<(), String> {
    if reader < most {
        return Ok(());
    }
    Err(format!("--stdin-rank: expected a rank below {most}, given {reader}"))
}

/// The address and the port of the store. For several nodes these options say where the nodes meet; the store is
/// reached on the loopback of each.
fn store_address(options: &Options, nodes: Option<&Plan>) -> Result<(String, u16), String> {
    let port = parse_port(options.torchrun.master_port.as_deref())?;
    let (address, port) = match nodes {
        Some(_) => (None, 0),
        None => (options.torchrun.master_addr.clone(), port),
    };
    Ok((address.unwrap_or_else(|| "127.0.0.1".into()), port))
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
