//! Two strangers flood the port of node 0 while another node joins: their cost in memory, and in time.
//!
//! `TPURUN_FLOOD_RUNS=20 cargo test --release -p tpurun-launcher --test flood -- --nocapture` prints the figures of
//! docs/security.md; without the variable there is one run with a flood and one without. Strangers are on other
//! machines: here they have a CPU of their own, and the nodes have the others. The time is printed only, as neighbours
//! take their part of it.

use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use quinn::crypto::rustls::QuicClientConfig;
use rustix::thread::CpuSet;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};

/// Time between two connections of a flooder.
const BETWEEN_CONNECTIONS: Duration = Duration::from_millis(2);
/// Time for which strangers come before the node joins.
const BEFORE: Duration = Duration::from_secs(1);
const FLOODERS: usize = 2;
const MOST_MEMORY_KB: u64 = 1024;
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn two_flooders_cost_little_memory() {
    let runs: u64 = std::env::var("TPURUN_FLOOD_RUNS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (mut quiet, mut flooded, mut grown, mut knocks) = (vec![], vec![], vec![], 0);
    // Runs with and without a flood take turns, as the machine is not always as fast.
    for _ in 0..runs {
        quiet.push(join(0).0);
        let (time, growth, came) = join(FLOODERS);
        flooded.push(time);
        grown.push(growth);
        knocks += came;
    }
    let (quiet, flooded) = (median(quiet), median(flooded));
    let (ratio, most) = (flooded.as_secs_f64() / quiet.as_secs_f64(), grown.into_iter().max().unwrap_or(0));
    println!(
        "{runs} runs each: a node joins in {quiet:.2?}, under a flood in {flooded:.2?} ({ratio:.2} times); \
         {knocks} connections of strangers; node 0 grows by {most} kB at most"
    );
    assert!(knocks > 100 * runs, "{knocks} strangers are no flood");
    assert!(most <= MOST_MEMORY_KB, "strangers took {most} kB of node 0");
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Returns the time that node 1 takes from its start to its end, the growth of node 0 before that, and the number
/// of connections that strangers began.
fn join(flooders: usize) -> (Duration, u64, u64) {
    let folder = tempfile::tempdir().unwrap();
    let at = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    have_cpus(|all| &all[..(all.len() - 1).max(1)]);
    let mut node0 = node(folder.path(), at, 0);
    let agent =
        wait_for("node 0 listens", || children(node0.id()).into_iter().find(|pid| listens(*pid, at.port())));
    let before = resident_kb(agent);
    let flood: Vec<Flooder> = (0..flooders).map(|_| Flooder::start(at)).collect();
    if flooders > 0 {
        thread::sleep(BEFORE);
    }
    let growth = resident_kb(agent).saturating_sub(before);
    let began = Instant::now();
    let mut node1 = node(folder.path(), at, 1);
    let ended = [node1.wait().unwrap(), node0.wait().unwrap()];
    let time = began.elapsed();
    let came = flood.into_iter().map(Flooder::stop).sum();
    assert!(ended.iter().all(|status| status.success()), "{ended:?}");
    (time, growth, came)
}

/// Gives this thread, and what it starts, some of the machine's CPUs.
fn have_cpus(chosen: impl Fn(&[usize]) -> &[usize]) {
    let machine = rustix::thread::sched_getaffinity(None).unwrap();
    static ALL: OnceLock<Vec<usize>> = OnceLock::new();
    let all = ALL.get_or_init(|| (0..CpuSet::MAX_CPU).filter(|cpu| machine.is_set(*cpu)).collect());
    let mut own = CpuSet::new();
    chosen(all).iter().for_each(|cpu| own.set(*cpu));
    rustix::thread::sched_setaffinity(None, &own).unwrap();
}

fn node(folder: &Path, at: SocketAddr, number: u32) -> Child {
    let (number, at) = (number.to_string(), at.to_string());
    let logs = folder.join(format!("logs-{number}"));
    let options = ["--nnodes", "2", "--node-rank", &number, "--rdzv", &at, "-n", "1"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_tpurun"));
    command.args(options).arg("--log-dir").arg(logs).arg("true");
    command.current_dir(folder).env("TPURUN_TOKEN", "a token that is long enough");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn wait_for<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "waited too long until {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Whether a process has the socket of that UDP port.
fn listens(pid: u32, port: u16) -> bool {
    let table = fs::read_to_string(format!("/proc/{pid}/net/udp")).unwrap_or_default();
    let line = table.lines().find(|line| line.contains(&format!(":{port:04X} ")));
    let Some(inode) = line.and_then(|line| line.split_ascii_whitespace().nth(9)) else { return false };
    let socket = format!("socket:[{inode}]");
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.into_iter().any(|file| fs::read_link(file.path()).is_ok_and(|link| link == Path::new(&socket)))
}

/// Memory of a process without the pages of its file, which the first handshake reads in.
fn resident_kb(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok()).expect("node 0 is there")
}

/// A stranger that begins connections, and keeps and uses those that it gets.
struct Flooder {
    is_over: Arc<AtomicBool>,
    begun: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Flooder {
    fn start(at: SocketAddr) -> Flooder {
        let (is_over, begun) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over, count) = (is_over.clone(), begun.clone());
        let thread = thread::spawn(move || {
            have_cpus(|all| &all[all.len() - 1..]);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(flood(at, &over, &count));
        });
        Flooder { is_over, begun, thread }
    }

    fn stop(self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.begun.load(Ordering::Relaxed)
    }
}

async fn flood(at: SocketAddr, is_over: &AtomicBool, begun: &AtomicU64) {
    let mut endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
    endpoint.set_default_client_config(stranger());
    let mut all = tokio::task::JoinSet::new();
    let mut turns = tokio::time::interval(BETWEEN_CONNECTIONS);
    while !is_over.load(Ordering::Relaxed) {
        turns.tick().await;
        let connecting = endpoint.connect(at, "node-0.tpurun").unwrap();
        begun.fetch_add(1, Ordering::Relaxed);
        all.spawn(async move {
            let connection = connecting.await.ok()?;
            let (mut send, receive) = connection.open_bi().await.ok()?;
            // The stranger sends as much as it may.
            let _ = send.write_all(&vec![0; 1 << 20]).await;
            Some((connection, send, receive))
        });
    }
}

fn stranger() -> quinn::ClientConfig {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider)))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"tpurun-nodes/1".to_vec()];
    quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(config).unwrap()))
}

#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
