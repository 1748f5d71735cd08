//! The command line as people type it. Its meaning is decided in `decide/`.

use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

/// Runs a program as many ranks on this host, joined by checked collectives.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "tpurun",
    version,
    after_help = EXAMPLES,
    styles = STYLES,
    max_term_width = 100,
    override_usage = "tpurun [OPTIONS] <PROGRAM> [ARGS]... [: [OPTIONS] <PROGRAM> [ARGS]...]...
       tpurun [OPTIONS] --job <FILE>
       tpurun [OPTIONS] <COMMAND>",
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) options: Options,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// A Python script, a module (-m) or any other program, and its arguments
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, help_heading = "Arguments")]
    pub(crate) program: Vec<String>,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Check this machine (cores, memory, limits, torch, fork server, cgroup) and say what to do
    Doctor {
        /// Ranks that the machine shall run [default: 64]
        #[arg(short = 'n', value_name = "N")]
        ranks: Option<String>,
        /// Print one JSON object per finding
        #[arg(long)]
        json: bool,
    },
    /// Show what the ranks of a job are doing, or did when it failed
    #[command(after_help = STATUS_EXAMPLES)]
    Status(StatusOptions),
    /// Write what the ranks of a job have posted as a trace for Perfetto or PyTorch's flight recorder
    #[command(after_help = TRACE_EXAMPLES)]
    Trace(TraceOptions),
    /// Measure the collectives, alone or in turn with another backend
    #[command(args_override_self = true, after_help = BENCH_EXAMPLES)]
    Bench(Bench),
    /// Show the processes that stay after jobs with --warm, or end them
    #[command(after_help = WARM_EXAMPLES)]
    Warm(WarmOptions),
    /// Print a new token for the nodes of a job of several hosts
    Token,
    /// Print a completion script for a shell
    Completions {
        /// bash, zsh, fish, elvish or powershell
        shell: Shell,
    },
    /// Print the manual page (roff)
    Man,
}

/// The options of `tpurun status`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct StatusOptions {
    /// A run directory, its name, or the beginning or end of it [default: the newest that runs]
    #[arg(value_name = "JOB")]
    pub(crate) job: Option<String>,
    /// One line for each rank instead of one for all that do the same
    #[arg(long)]
    pub(crate) ranks: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Show it again every 2 seconds, or as often as said, until the job ends
    #[arg(long, value_name = "2s", num_args = 0..=1, require_equals = true, default_missing_value = "2s")]
    pub(crate) watch: Option<String>,
}

/// The options of `tpurun warm`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct WarmOptions {
    /// Show them, which is what it does unless told otherwise
    #[arg(long, conflicts_with = "stop")]
    pub(crate) status: bool,
    /// End them; jobs that run go on
    #[arg(long)]
    pub(crate) stop: bool,
}

/// The options of `tpurun trace`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TraceOptions {
    /// A run directory, its name, or the beginning or end of it [default: the newest that runs]
    #[arg(value_name = "JOB")]
    pub(crate) job: Option<String>,
    /// File, - for stdout, or with --format torch a new directory [default: in RUN/flight]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[arg(help = "What to write", long, value_enum, default_value_t)]
    pub(crate) format: TraceFormat,
}

/// Formats of `tpurun trace`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum TraceFormat {
    /// For Perfetto (ui.perfetto.dev)
    #[default]
    Perfetto,
    /// The document itself
    Json,
    #[value(help = "Of PyTorch's flight recorder, for torchfrtrace")]
    Torch,
}

/// The options of `tpurun bench`; all but the ranks go to `python -m tpurun.bench` as they are, or to `tpurun.tune`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Bench {
    /// Numbers of ranks, one job after the other [default: 2,8]
    #[arg(short = 'n', long, value_name = "N,..")]
    pub(crate) ranks: Option<String>,
    /// all_reduce, all_gather, .. [default: the five that move most in training]
    #[arg(long, value_name = "NAMES")]
    pub(crate) collectives: Option<String>,
    /// Sizes, such as 8,64K,1M [default: 8,64K,1M,16M]
    #[arg(long, value_name = "BYTES")]
    pub(crate) sizes: Option<String>,
    /// Element type [default: float32]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) dtype: Option<String>,
    /// Where tensors are: staged (copied through shared memory), mapped (of tpurun.empty) [default: staged]
    #[arg(long, value_name = "KINDS")]
    pub(crate) memory: Option<String>,
    #[arg(help = "What to measure [default: tpu_dist]", long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,
    /// Measure the same on this backend in turn, and print the ratio
    #[arg(long, value_name = "BACKEND")]
    pub(crate) against: Option<String>,
    /// Time for each collective, size and backend [default: 2, with --tune 0.25]
    #[arg(long, value_name = "S")]
    pub(crate) seconds: Option<String>,
    /// Measure the thresholds of this machine instead, and write them to a file for `tpurun --tuning` [ranks: 8]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["collectives", "sizes", "dtype", "memory", "backend", "against", "json"])]
    pub(crate) tune: Option<String>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

impl Bench {
    /// The module that its ranks run, and its arguments.
    pub(crate) fn words(&self) -> Vec<String> {
        if let Some(file) = &self.tune {
            let seconds = self.seconds.iter().flat_map(|seconds| ["--seconds".into(), seconds.clone()]);
            return ["tpurun.tune".into(), file.clone()].into_iter().chain(seconds).collect();
        }
        let options = [
            ("--collectives", &self.collectives),
            ("--sizes", &self.sizes),
            ("--dtype", &self.dtype),
            ("--memory", &self.memory),
            ("--backend", &self.backend),
            ("--against", &self.against),
            ("--seconds", &self.seconds),
        ];
        let given = options.into_iter().filter_map(|(name, value)| Some([name.into(), value.clone()?]));
        let json = self.json.then(|| "--json".into());
        std::iter::once("tpurun.bench".into()).chain(given.flatten()).chain(json).collect()
    }
}

const BENCH_EXAMPLES: &str = "\
Examples:
  tpurun bench                                          the usual collectives on 2 and 8 ranks
  tpurun bench --ranks 64 --sizes 8,64K --against gloo  how much faster than Gloo
  tpurun bench --memory staged,mapped --sizes 16M       tensors that are copied, and that are not
  tpurun bench --collectives all_reduce --json          one JSON object per line
  tpurun bench --ranks 8 --tune this-machine.toml       thresholds of this machine, for `tpurun --tuning`";

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Ranks to start: a number, `auto` or `cpu` (one per usable core) [default: 1]
    #[arg(
        short = 'n',
        allow_hyphen_values = true,
        long = "nproc-per-node",
        alias = "nproc_per_node",
        env = "PET_NPROC_PER_NODE",
        hide_env = true,
        value_name = "N"
    )]
    pub(crate) ranks: Option<String>,
    /// PROGRAM is a Python module, as in `python -m`
    #[arg(short = 'm', long, env = "PET_MODULE", hide_env = true)]
    pub(crate) module: bool,
    /// PROGRAM is executed as it is, without Python
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", hide_env = true, conflicts_with = "module")]
    pub(crate) no_python: bool,
    /// Read the programs, and options of the job, from a TOML file
    #[arg(long, value_name = "FILE")]
    pub(crate) job: Option<PathBuf>,
    /// Start one interpreter per rank instead of forking them from one that has imported torch
    #[arg(long)]
    pub(crate) spawn: bool,
    /// Give each rank a hash seed of its own, and so an order of sets; starts one interpreter per rank, as --spawn [default: forked ranks share one]
    #[arg(long, value_name = "per-rank", conflicts_with = "preload")]
    pub(crate) hash_seed: Option<String>,
    /// Load what each rank executes for itself at random addresses; off: at the same in all ranks, faster with many on a core [default: off with 16 ranks or more to a core]
    #[arg(long, value_name = "on|off")]
    pub(crate) aslr: Option<String>,
    /// Modules to import once, before the ranks are forked
    #[arg(long, value_name = "A,B", value_delimiter = ',', conflicts_with = "spawn")]
    pub(crate) preload: Vec<String>,
    /// Fork the ranks from a process that stays for the next job, so that it starts at once: see tpurun warm --help
    #[arg(long, env = "TPURUN_WARM", hide_env = true)]
    pub(crate) warm: bool,
    /// The interpreter [default: beside tpurun, in $VIRTUAL_ENV, PATH]
    #[arg(long, env = "TPURUN_PYTHON", hide_env = true, value_name = "PATH")]
    pub(crate) python: Option<String>,
    /// Run directory for logs, events and the report [default: a new one in ./tpurun-runs or $TPURUN_RUNS]
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR", hide_env = true, value_name = "DIR")]
    pub(crate) log_dir: Option<String>,
    /// Show the output of these ranks only; all are logged
    #[arg(
        long,
        alias = "local-ranks-filter",
        alias = "local_ranks_filter",
        env = "PET_LOCAL_RANKS_FILTER",
        hide_env = true,
        value_name = "0-3,7"
    )]
    pub(crate) only_ranks: Option<String>,
    /// The rank that reads the standard input of tpurun; that of all others is empty
    #[arg(long, value_name = "K", default_value_t = 0, hide_default_value = true)]
    pub(crate) stdin_rank: u32,
    /// Show in full what ranks print that fail only because another one did, instead of one line for all
    #[arg(long)]
    pub(crate) show_victims: bool,
    /// Torus that the ranks are placed on
    #[arg(long, env = "TPURUN_TOPOLOGY", hide_env = true, value_name = "4x4x4")]
    pub(crate) topology: Option<String>,
    /// Algorithm of all collectives instead of the planner's choice
    #[arg(long, env = "TPURUN_ALGORITHM", hide_env = true, value_name = "flat|ring|bucket")]
    pub(crate) algorithm: Option<String>,
    /// File of the thresholds by which collectives are planned, as `tpurun bench --tune` writes it [default: ours]
    #[arg(long, env = "TPURUN_TUNING", hide_env = true, value_name = "FILE")]
    pub(crate) tuning: Option<String>,
    /// Compare results that must be equal on all ranks after every collective: finds memory written by others
    #[arg(long, env = "TPURUN_VERIFY_RESULTS", hide_env = true)]
    pub(crate) verify_results: bool,
    /// Give every rank device tpu, or none, whether or not its program names it [default: when it does]
    #[arg(long, env = "TPURUN_DEVICE", hide_env = true, value_name = "tpu|cpu")]
    pub(crate) device: Option<String>,
    /// Serve groups that a program asks Gloo for, or no backend, as those of tpu_dist: checked, and faster [default: leave them to Gloo]
    #[arg(long, env = "TPURUN_BACKEND_FOR", hide_env = true, value_name = "gloo")]
    pub(crate) backend_for: Option<String>,
    /// Memory of device tpu that each rank may use, as 512MiB or 16GiB [default: all that the host has]
    #[arg(long, env = "TPURUN_HBM", hide_env = true, value_name = "16GiB")]
    pub(crate) hbm: Option<String>,
    /// Longest wait in a collective, whatever timeout its group has, as 500ms, 30s or 10m [default: that of the group]
    #[arg(long, env = "TPURUN_TIMEOUT_MS", hide_env = true, value_name = "30s")]
    pub(crate) timeout: Option<String>,
    /// After Ctrl-C or SIGTERM, time for the ranks to end by themselves [default: 30s]
    #[arg(
        long,
        alias = "shutdown_timeout",
        env = "PET_SHUTDOWN_TIMEOUT",
        hide_env = true,
        value_name = "30s"
    )]
    pub(crate) shutdown_timeout: Option<String>,
    /// File with the token that all nodes of --nnodes share [default: $TPURUN_TOKEN]
    #[arg(long, env = "TPURUN_TOKEN", hide_env = true, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// How long the nodes wait for each other [default: 10m]
    #[arg(long, value_name = "10m")]
    pub(crate) rdzv_timeout: Option<String>,
    /// Run the ranks on these hosts, by ssh; a number: pretend that they are on so many
    #[arg(long, value_name = "N0,N1|N", conflicts_with = "nnodes")]
    pub(crate) hosts: Option<String>,
    #[arg(
        help = "What stands before the name of a host instead of `ssh` and our options for it",
        long,
        value_name = "ssh -p 2222"
    )]
    pub(crate) ssh: Option<String>,
    #[arg(
        help = "What the network between hosts does to what this one sends: delay, jitter, loss, duplicate, rate",
        long,
        env = "TPURUN_LINK",
        hide_env = true,
        value_name = "delay=2ms,loss=1%"
    )]
    pub(crate) link: Option<String>,
    /// Connections between each two hosts, each with a thread at both ends [default: up to 4, by the cores]
    #[arg(long, env = "TPURUN_CONNECTIONS", hide_env = true, value_name = "4")]
    pub(crate) connections: Option<String>,
    #[arg(
        help = "What large tensors go over between hosts: TLS over TCP, or QUIC as all else, where TCP is closed [default: tcp]",
        long,
        env = "TPURUN_BULK",
        hide_env = true,
        value_name = "tcp|quic"
    )]
    pub(crate) bulk: Option<String>,
    /// When a rank fails: stop the job, or leave the others alone (docs/failures.md) [default: stop]
    #[arg(long, value_name = "stop|continue", conflicts_with = "elastic")]
    pub(crate) on_failure: Option<String>,
    /// Start MAX ranks, go on without lost ones while MIN are there, else start again with those left
    #[arg(long, value_name = "MIN:MAX")]
    pub(crate) elastic: Option<String>,
    /// Print what would run, where and how, and stop
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Show when each step from the command to the first collective was reached, and what it took
    #[arg(long, env = "TPURUN_TIMINGS", hide_env = true)]
    pub(crate) timings: bool,
    #[command(flatten, next_help_heading = "Options of torchrun")]
    pub(crate) torchrun: TorchrunOptions,
}

/// The options that torchrun takes, too, and that mean the same here, or nothing on one host.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct TorchrunOptions {
    /// Hosts of the job, each with a tpurun of its own; -n counts the ranks of this one [default: 1]
    #[arg(long, env = "PET_NNODES", hide_env = true, value_name = "N")]
    pub(crate) nnodes: Option<String>,
    /// Which of them this one is, from 0 on
    #[arg(long, alias = "node_rank", env = "PET_NODE_RANK", hide_env = true, value_name = "R")]
    pub(crate) node_rank: Option<String>,
    /// Where node 0 is reached [default: --master-addr and --master-port; port 29400]
    #[arg(
        long = "rdzv",
        visible_alias = "rdzv-endpoint",
        alias = "rdzv_endpoint",
        env = "PET_RDZV_ENDPOINT",
        hide_env = true,
        value_name = "HOST:PORT"
    )]
    pub(crate) rendezvous: Option<String>,
    /// This host alone, whatever a scheduler's variables say of others
    #[arg(long, env = "PET_STANDALONE", hide_env = true)]
    pub(crate) standalone: bool,
    /// Address of the rendezvous store [default: 127.0.0.1]
    #[arg(long, alias = "master_addr", env = "PET_MASTER_ADDR", hide_env = true, value_name = "ADDR")]
    pub(crate) master_addr: Option<String>,
    /// Port of the rendezvous store [default: a free one]
    #[arg(long, alias = "master_port", env = "PET_MASTER_PORT", hide_env = true, value_name = "PORT")]
    pub(crate) master_port: Option<String>,
    /// TORCHELASTIC_RUN_ID [default: the name of the run directory]
    #[arg(long, alias = "rdzv_id", env = "PET_RDZV_ID", hide_env = true, value_name = "ID")]
    pub(crate) rdzv_id: Option<String>,
    /// Name of the program, ROLE_NAME [default: default; one of several: as the program is called]
    #[arg(long, env = "PET_ROLE", hide_env = true, value_name = "NAME")]
    pub(crate) role: Option<String>,
    /// How often all ranks are started again after a failure [default: 0, with --elastic 3]
    #[arg(
        long,
        alias = "max_restarts",
        allow_hyphen_values = true,
        env = "PET_MAX_RESTARTS",
        hide_env = true,
        value_name = "K"
    )]
    pub(crate) max_restarts: Option<String>,
    #[command(flatten)]
    pub(crate) ignored: IgnoredOptions,
}

/// Accepted so that scripts written for torchrun keep working; here they have nothing to change.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct IgnoredOptions {
    #[arg(long, alias = "rdzv_backend", env = "PET_RDZV_BACKEND", hide = true)]
    rdzv_backend: Option<String>,
    #[arg(long, alias = "rdzv_conf", env = "PET_RDZV_CONF", hide = true)]
    rdzv_conf: Option<String>,
    #[arg(long, alias = "local_addr", env = "PET_LOCAL_ADDR", hide = true)]
    local_addr: Option<String>,
    #[arg(long, alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", hide = true)]
    monitor_interval: Option<String>,
    #[arg(long, alias = "start_method", env = "PET_START_METHOD", hide = true)]
    start_method: Option<String>,
    #[arg(long, alias = "event_log_handler", env = "PET_EVENT_LOG_HANDLER", hide = true)]
    event_log_handler: Option<String>,
    #[arg(long, alias = "logs_specs", env = "PET_LOGS_SPECS", hide = true)]
    logs_specs: Option<String>,
    #[arg(long, alias = "signals_to_handle", env = "PET_SIGNALS_TO_HANDLE", hide = true)]
    signals_to_handle: Option<String>,
    #[arg(long, alias = "run_path", env = "PET_RUN_PATH", hide = true)]
    run_path: bool,
    #[arg(short = 'r', long, env = "PET_REDIRECTS", hide = true)]
    redirects: Option<String>,
    #[arg(short = 't', long, env = "PET_TEE", hide = true)]
    tee: Option<String>,
}

/// Whether somebody has typed the option of this id.
pub(crate) fn is_typed(matches: &ArgMatches, id: &str) -> bool {
    source(matches, id) == Some(ValueSource::CommandLine)
}

/// Help and version end the parsing: they have no source.
fn source(matches: &ArgMatches, id: &str) -> Option<ValueSource> {
    matches.try_contains_id(id).ok().and_then(|_| matches.value_source(id))
}

/// The error of clap about a wrong command line, in one line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let mut parts = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let first = parts.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    let rest: Vec<&str> = parts.filter(|line| !line.is_empty() && !line.starts_with("For more")).collect();
    let rest = if rest.is_empty() { String::new() } else { format!(" ({})", rest.join("; ")) };
    format!("{first}{rest}")
}

/// Options that each program has for itself; all others belong to the job.
pub(crate) const OF_PROGRAM: [&str; 4] = ["ranks", "module", "no_python", "role"];

const EXAMPLES: &str = r#"Examples:
  tpurun -n 8 train.py --epochs 3         8 ranks of a script written for torchrun
  tpurun -n 64 --topology 4x4x4 train.py  64 ranks placed on a torus
  tpurun -n 8 -m pkg.train                a module
  tpurun -n 4 ./solver input.txt          a program that is not Python
  tpurun -n 8 --only-ranks 0 train.py     show rank 0 only, log all
  tpurun -n 64 --dry-run train.py         say what would run
  tpurun -n 8 --max-restarts 3 train.py   start all ranks again when one fails
  tpurun --elastic 4:8 train.py           8 ranks, and on with 4 to 7 when some are lost
  tpurun -n 1 eval.py : -n 7 train.py     two programs in one world: rank 0, ranks 1 to 7
  tpurun --job job.toml                   the programs that a file lists
  tpurun -n 64 --timings train.py         where the time until the first collective goes
  tpurun -n 8 --hosts n0,n1 train.py      ranks 0-3 on host n0, 4-7 on n1, both started from here by ssh
  tpurun -n 8 --hosts 2 train.py          as if ranks 0-3 and 4-7 were on different hosts
  tpurun -n 8 --hosts 2 --link delay=2ms,jitter=1ms,loss=1%,duplicate=0.1%,rate=1Gbit train.py
                                          and the network between them were a bad one
  tpurun --nnodes 2 --node-rank 0 --rdzv n0:29400 -n 4 train.py
                                          on host n0, with --node-rank 1 on the other; see Several hosts
  tpurun status                           say what the ranks of a running job do
  tpurun bench --ranks 8 --against gloo   measure the collectives

A program that is called like a command is run with its path: ./doctor
Options of torchrun are taken with dashes, underscores, or from PET_<OPTION>; many others from
TPURUN_<OPTION>, which docs/configuration.md lists. The command line beats a variable, and that
beats the [job] of a job file.

Several programs:
After a word `:` of its own, the next program: -n, -m, --no-python and --role are its own, all other
options belong to the job and stand before the first one. A `:` that is an argument needs a job file:
  [job]
  timeout = "30s"                         # options of the job, as they are called here
  [[program]]
  name = "train"                          # as --role
  ranks = 7
  command = ["train.py", "--ratio", ":"]  # or ["-m", "pkg.train"]
  env = { LR = "0.1" }                    # for its ranks only
  cwd = "."                               # relative to this file; default: where tpurun is started

Several hosts:
--hosts n0,n1 or n0:4,user@n1:2 (HOST:RANKS) starts all from here, where ssh asks for no password. They need
tpurun, Python and the program in the same places; the environment goes along, but not what belongs to a login
(HOME, SSH_*, TMPDIR, ..). What all write is shown here, and Ctrl-C ends all.
Or start tpurun on each with the same --nnodes and --rdzv and its own --node-rank, and with the same token in
$TPURUN_TOKEN or --token-file: `tpurun token` makes one. Everything between hosts is encrypted; the ports are
the one of --rdzv on node 0 and a free one of each rank that speaks to other hosts, all UDP."#;

const STATUS_EXAMPLES: &str = "\
Examples:
  tpurun status             what the ranks of the newest job do now
  tpurun status --watch=5s  every 5 seconds, until it ends
  tpurun status 7f3a        of the run whose name ends so";

const WARM_EXAMPLES: &str = "\
Examples:
  tpurun --warm -n 4 train.py       the first start is as slow as ever, the next ones are not
  export TPURUN_WARM=1              the same for every tpurun from here on
  tpurun warm                       what stays: idle or with jobs, since when, how much memory
  tpurun warm --stop                nothing stays
A process stays for each interpreter, --preload list, environment, control group and set of limits. It ends after
10 idle minutes ($TPURUN_WARM_IDLE, as 30m), when memory is short, and when a file of what it has imported has
changed, and is of use to nobody but the user who has started it.";

const TRACE_EXAMPLES: &str = "\
Examples:
  tpurun trace -o hang.perfetto-trace       open it in https://ui.perfetto.dev
  tpurun trace 7f3a --format torch -o dump  then: torchfrtrace dump";

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use expect_test::expect_file;

    fn parse(line: &str) -> Cli {
        Cli::try_parse_from(line.split_whitespace()).unwrap()
    }

    fn error(line: &str) -> String {
        one_line(&Cli::try_parse_from(line.split_whitespace()).unwrap_err())
    }

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_reads_well() {
        expect_file!["../../tests/help.txt"]
            .assert_eq(&Cli::command().term_width(100).render_help().to_string());
    }

    #[test]
    fn torchrun_spellings_mean_the_same() {
        for line in [
            "tpurun -n 4 train.py --lr 1",
            "tpurun --nproc-per-node 4 train.py --lr 1",
            "tpurun --nproc_per_node=4 train.py --lr 1",
            "tpurun --standalone --nnodes=1 --nproc_per_node 4 --rdzv_backend c10d train.py --lr 1",
            "tpurun --nproc-per-node=4 --max_restarts=0 --monitor-interval 5 -t 3 -r 1 train.py --lr 1",
        ] {
            let cli = parse(line);
            assert_eq!(cli.options.ranks.as_deref(), Some("4"), "{line}");
            assert_eq!(cli.program, ["train.py", "--lr", "1"], "{line}");
        }
        let cli = parse(
            "tpurun --master_addr 127.0.0.1 --master-port=29500 --node_rank 0 --role trainer -m pkg.train",
        );
        assert_eq!(cli.options.torchrun.master_port.as_deref(), Some("29500"));
        assert_eq!(cli.options.torchrun.role.as_deref(), Some("trainer"));
        assert!(cli.options.module);
    }

    #[test]
    fn what_follows_the_program_is_its_own() {
        let cli = parse("tpurun -n 2 train.py -n 9 --help doctor --nnodes 3 -- x");
        assert_eq!(cli.options.ranks.as_deref(), Some("2"));
        assert_eq!(cli.program, ["train.py", "-n", "9", "--help", "doctor", "--nnodes", "3", "--", "x"]);
        assert_eq!(parse("tpurun -m pkg.train -x").program, ["pkg.train", "-x"]);
        assert_eq!(parse("tpurun ./doctor").program, ["./doctor"]);
    }

    #[test]
    fn commands_take_options_before_them() {
        let Some(Command::Bench(bench)) = parse("tpurun bench --ranks 2,8 --against gloo --json").command
        else {
            panic!("no command")
        };
        assert_eq!(bench.ranks.as_deref(), Some("2,8"));
        assert_eq!(bench.words(), ["tpurun.bench", "--against", "gloo", "--json"]);
        // The front appends one number of ranks for each job.
        let Some(Command::Bench(bench)) = parse("tpurun bench --ranks 2,8 --sizes 1M --ranks 2").command
        else {
            panic!("no command")
        };
        assert_eq!(bench.ranks.as_deref(), Some("2"));
        let cli = parse("tpurun -n 64 bench --sizes 1M");
        assert_eq!(cli.options.ranks.as_deref(), Some("64"));
        assert!(matches!(cli.command, Some(Command::Bench(Bench { ranks: None, .. }))));
        assert!(matches!(parse("tpurun doctor").command, Some(Command::Doctor { ranks: None, json: false })));
        assert!(matches!(
            parse("tpurun completions zsh").command,
            Some(Command::Completions { shell: Shell::Zsh })
        ));
    }

    #[test]
    fn errors_are_one_line() {
        for line in ["tpurun --ranks 3 train.py", "tpurun --nproc-per-node", "tpurun completions tcsh"] {
            let text = error(line);
            assert!(!text.contains('\n') && !text.contains("Usage"), "{text}");
        }
        assert_eq!(
            error("tpurun -n"),
            "a value is required for '--nproc-per-node <N>' but none was supplied"
        );
    }
}
