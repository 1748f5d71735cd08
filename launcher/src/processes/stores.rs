//! Finds ranks that wait for an answer of the torch.distributed store that a process holds, as the kernel sees it.
//! Programs that choose where to meet have the store in a rank, and the board says nothing of it.

use std::collections::HashSet;
use std::fs;
use std::io::{Read, Seek, SeekFrom};

use crate::base::rank_set::RankSet;

/// Whether a process holds a store: torch gives the thread that serves it such a name.
pub(crate) fn holds_store(pid: i32) -> bool {
    threads(pid).any(|thread| {
        let name = fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm"));
        name.is_ok_and(|name| name.starts_with("pt_tcpstore"))
    })
}

/// Returns the ranks among `others`, ranks and their processes, of which a thread waits on a connection to `server`.
pub(crate) fn waiting_for(server: i32, others: impl Iterator<Item = (u32, i32)>) -> RankSet {
    let table: Vec<Connection> = ["tcp", "tcp6"]
        .iter()
        .filter_map(|name| fs::read_to_string(format!("/proc/{server}/net/{name}")).ok())
        .flat_map(|text| text.lines().filter_map(Connection::parse).collect::<Vec<_>>())
        .collect();
    let own = sockets(server);
    let is_own = |connection: &&Connection| connection.is_listening && own.contains(&connection.inode);
    let ports: HashSet<String> = table.iter().filter(is_own).map(|own| port(&own.local).to_owned()).collect();
    let served: HashSet<(&str, &str)> = table
        .iter()
        .filter(|end| !end.is_listening && ports.contains(port(&end.local)))
        .map(|end| (end.remote.as_str(), end.local.as_str()))
        .collect();
    let asks = |pid: i32| {
        let waited: HashSet<u64> = waited_for(pid).filter_map(|fd| socket(pid, fd)).collect();
        table.iter().any(|end| {
            waited.contains(&end.inode) && served.contains(&(end.local.as_str(), end.remote.as_str()))
        })
    };
    others.filter(|(_, pid)| *pid != server && asks(*pid)).map(|(rank, _)| rank).collect()
}

/// One end of a TCP connection.
#[derive(Debug, PartialEq, Eq)]
struct Connection {
    /// Address and port as the kernel writes them.
    local: String,
    remote: String,
    is_listening: bool,
    inode: u64,
}

impl Connection {
    /// A line of /proc/net/tcp or tcp6.
    fn parse(line: &str) -> Option<Connection> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, local, remote, state, _, _, _, _, _, inode, ..] = words[..] else { return None };
        let inode = inode.parse().ok()?;
        Some(Connection { local: plain(local), remote: plain(remote), is_listening: state == LISTENS, inode })
    }
}

/// An IPv4 address has two forms, of which the ends of one connection may have one each.
fn plain(address: &str) -> String {
    address.strip_prefix(MAPPED).unwrap_or(address).to_owned()
}

fn port(address: &str) -> &str {
    address.rsplit_once(':').map_or("", |(_, port)| port)
}

/// Descriptors on which threads of a process wait for something to read.
fn waited_for(pid: i32) -> impl Iterator<Item = i32> {
    threads(pid).flat_map(move |thread| {
        let call = fs::read_to_string(format!("/proc/{pid}/task/{thread}/syscall")).unwrap_or_default();
        match Call::parse(&call) {
            Some(Call::Read(fd)) => vec![fd],
            Some(Call::Poll { at, count }) => polled(pid, at, count).unwrap_or_default(),
            None => Vec::new(),
        }
    })
}

/// A system call that waits for a descriptor.
#[derive(Debug, PartialEq, Eq)]
enum Call {
    Read(i32),
    /// A list of `count` descriptors in the memory of the process.
    Poll {
        at: u64,
        count: u64,
    },
}

impl Call {
    /// The file `syscall` of a thread, whose first word is a number or `running`.
    fn parse(text: &str) -> Option<Call> {
        let mut words = text.split_ascii_whitespace();
        let number: u32 = words.next()?.parse().ok()?;
        let mut argument = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
        let (first, second) = (argument()?, argument()?);
        if READS.contains(&number) {
            return i32::try_from(first).ok().map(Call::Read);
        }
        (POLLS.contains(&number) && second <= MOST_POLLED).then_some(Call::Poll { at: first, count: second })
    }
}

/// The descriptors of a list for poll: each takes 8 bytes, and begins with its number.
fn polled(pid: i32, at: u64, count: u64) -> Option<Vec<i32>> {
    let mut memory = fs::File::open(format!("/proc/{pid}/mem")).ok()?;
    let mut list = vec![0; 8 * count as usize];
    memory.seek(SeekFrom::Start(at)).ok()?;
    memory.read_exact(&mut list).ok()?;
    Some(list.chunks(8).filter_map(|entry| entry.first_chunk().copied().map(i32::from_le_bytes)).collect())
}

/// The sockets of a process.
fn sockets(pid: i32) -> HashSet<u64> {
    numbers(format!("/proc/{pid}/fd")).filter_map(|fd| socket(pid, fd)).collect()
}

/// The socket of a descriptor.
fn socket(pid: i32, fd: i32) -> Option<u64> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

fn threads(pid: i32) -> impl Iterator<Item = i32> {
    numbers(format!("/proc/{pid}/task"))
}

fn numbers(folder: String) -> impl Iterator<Item = i32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// TCP_LISTEN.
const LISTENS: &str = "0A";
/// The beginning of an IPv4 address that is written as one of IPv6.
const MAPPED: &str = "0000000000000000FFFF0000";
/// A thread that waits for a store polls one socket.
const MOST_POLLED: u64 = 64;
// read, recvfrom and recvmsg; poll and ppoll.
#[cfg(target_arch = "x86_64")]
const READS: [u32; 3] = [0, 45, 47];
#[cfg(target_arch = "x86_64")]
const POLLS: [u32; 2] = [7, 271];
// The numbers that other architectures have in common (asm-generic/unistd.h).
#[cfg(not(target_arch = "x86_64"))]
const READS: [u32; 3] = [63, 207, 212];
#[cfg(not(target_arch = "x86_64"))]
const POLLS: [u32; 1] = [73];

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn the_kernels_lines_are_read() {
        let line = "   3: 0000000000000000FFFF00000100007F:AD72 0000000000000000FFFF00000100007F:B1B3 01 \
                    00000000:00000000 00:00000000 00000000     0        0 1404710 1 00000000c739970d 20 4 0 18 -1";
        let end = Connection::parse(line).unwrap();
        let (local, remote) = ("0100007F:AD72".to_owned(), "0100007F:B1B3".to_owned());
        assert_eq!(end, Connection { local, remote, is_listening: false, inode: 1_404_710 });
        assert_eq!(Connection::parse("  sl  local_address rem_address   st tx_queue rx_queue"), None);
        for wrong in ["", "running", "-1 0x7ffd5eb0d0e0 0x7f22bb31a26f", "7", "7 0x1 1"] {
            assert_eq!(Call::parse(wrong), None, "{wrong}");
        }
        let [read, poll] = [READS[1], POLLS[0]];
        assert_eq!(Call::parse(&format!("{read} 0x3 0x7f 0x10 0x0")), Some(Call::Read(3)));
        let polls = Call::Poll { at: 0x7ffd, count: 1 };
        assert_eq!(Call::parse(&format!("{poll} 0x7ffd 0x1 0x4e20")), Some(polls));
        assert_eq!(Call::parse(&format!("{poll} 0x7ffd 0xffff 0x4e20")), None);
    }

    /// A process that waits for what comes from its standard input.
    fn reader(input: TcpStream) -> Child {
        let input = Stdio::from(std::os::fd::OwnedFd::from(input));
        Command::new("cat").stdin(input).stdout(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn who_waits_for_an_answer_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = |to: &TcpListener| TcpStream::connect(to.local_addr().unwrap()).unwrap();
        let (mut asks, mut other) = (reader(connect(&listener)), reader(connect(&elsewhere)));
        let (_accepted, _) = listener.accept().unwrap();
        // A port of another process does not count, although its connections are in the same table.
        let mut idle = Command::new("sleep").arg("60").spawn().unwrap();
        let ranks = [(0, std::process::id()), (1, asks.id()), (2, idle.id())].map(|(r, pid)| (r, pid as i32));
        let began = Instant::now();
        let found = loop {
            let found = waiting_for(std::process::id() as i32, ranks.into_iter());
            if !found.is_empty() || began.elapsed() > Duration::from_secs(20) {
                break found;
            }
            std::thread::yield_now();
        };
        assert_eq!(found.to_string(), "1");
        assert!(waiting_for(other.id() as i32, ranks.into_iter()).is_empty());
        assert!(!holds_store(std::process::id() as i32));
        for child in [&mut asks, &mut other, &mut idle] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_store_has_a_name() {
        let (held, is_held) = std::sync::mpsc::channel();
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        let serve = move || {
            held.send(()).unwrap();
            let _ = is_done.recv();
        };
        let thread = std::thread::Builder::new().name("pt_tcpstore_uv".into()).spawn(serve).unwrap();
        is_held.recv().unwrap();
        assert!(holds_store(std::process::id() as i32));
        drop(done);
        thread.join().unwrap();
    }
}
