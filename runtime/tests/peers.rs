//! Ranks that are processes: one allocates, the other reads and writes in place.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use tpurun_memory::FailureKind;
use tpurun_memory::arena::{Export, PeerArena};
use tpurun_runtime::ArenaMemory;

const OWNER: &str = "TPURUN_TEST_OWNER";
const BYTES: u64 = 3 << 20;
/// A process that is just being started has the memory of who starts it.
static STARTS: Mutex<()> = Mutex::new(());

/// A process that has said what it exports.
struct Owner {
    process: Child,
    said: BufReader<ChildStdout>,
    export: Export,
    offset: u64,
}

impl Owner {
    fn start() -> Self {
        let this = std::env::current_exe().expect("a test has a path");
        let mut process = Command::new(this)
            .args(["--exact", "the_owner", "--nocapture", "--test-threads=1"])
            .env(OWNER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test runs again");
        let mut said = BufReader::new(process.stdout.take().expect("piped"));
        let line = next(&mut said);
        let words: Vec<&str> = line.split(' ').collect();
        let bytes: Vec<u8> = words[0].split(',').map(|byte| byte.parse().expect("a byte")).collect();
        let export = Export::from_bytes(&bytes.try_into().expect("32 bytes"));
        Self { process, said, export, offset: words[1].parse().expect("an offset") }
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.process.stdin.as_ref().expect("piped"), "{what}").expect("the owner reads");
        next(&mut self.said)
    }

    fn kill(&mut self) {
        self.process.kill().expect("our own child");
        self.process.wait().expect("our own child");
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The next line that begins with our mark: the harness prints, too.
fn next(said: &mut BufReader<ChildStdout>) -> String {
    let lines = said.by_ref().lines().map(|line| line.expect("text"));
    let mut marked = lines.filter_map(|line| line.rsplit_once("owner: ").map(|(_, said)| said.to_owned()));
    marked.next().expect("the owner answers")
}

/// Not a test by itself: what the other process runs.
#[test]
fn the_owner() {
    if std::env::var_os(OWNER).is_none() {
        return;
    }
    let memory = ArenaMemory::open(0, 64 << 20).expect("memfds work here");
    let block = memory.allocate(BYTES, Some("owner.py:1")).expect("there is room").as_ptr();
    let offset = memory.arena().offset_of(block, BYTES).expect("it is in the arena");
    // Through a mapping of its own, as everybody else writes.
    let own = PeerArena::open(&memory.arena().export()).expect("its own arena");
    own.write(offset, &vec![1; BYTES as usize]).expect("in range");
    let export = memory.arena().export().to_bytes().map(|byte| byte.to_string()).join(",");
    println!("owner: {export} {offset}");
    for line in std::io::stdin().lines() {
        let mut found = vec![0; BYTES as usize];
        own.read(offset, &mut found).expect("in range");
        println!("owner: {} {}", line.expect("text"), found.iter().map(|byte| u64::from(*byte)).sum::<u64>());
    }
}

#[test]
fn a_peer_reads_and_writes_in_place() {
    let _alone = STARTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut owner = Owner::start();
    let peer = PeerArena::open(&owner.export).expect("it is exported");
    assert_eq!(peer.bytes(), 64 << 20);
    let mut found = vec![0; BYTES as usize];
    peer.read(owner.offset, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 1));
    peer.write(owner.offset + 5, &[9]).unwrap();
    assert_eq!(owner.ask("sum"), format!("sum {}", BYTES + 8));
}

#[test]
fn a_killed_process_leaves_nothing_behind() {
    let _alone = STARTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut owner = Owner::start();
    let arena = inode(&format!("/proc/{}/fd/{}", owner.export.pid, owner.export.fd));
    let peer = PeerArena::open(&owner.export).expect("it is exported");
    assert_eq!(who_has(arena), [std::process::id(), owner.export.pid].into());
    owner.kill();
    assert_eq!(who_has(arena), [std::process::id()].into());
    let mut found = [0; 100];
    peer.read(owner.offset, &mut found).expect("what is mapped outlives its owner");
    assert_eq!(found, [1; 100]);
    drop(peer);
    assert_eq!(who_has(arena), [].into(), "the memory is nobody's");
    let lost = PeerArena::open(&owner.export).expect_err("the process is gone");
    assert_eq!(lost.kind(), FailureKind::RankLost);
    assert!(
        lost.text().starts_with(&format!("cannot open the arena of process {} at ", owner.export.pid)),
        "{lost}"
    );
}

fn inode(path: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).expect("the owner has it open").ino()
}

/// The processes that have the memory with this inode open or mapped.
fn who_has(inode: u64) -> std::collections::BTreeSet<u32> {
    let processes = std::fs::read_dir("/proc").expect("there is a /proc").flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mapped = |pid: &u32| {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        maps.lines().any(|line| line.contains("tpurun-arena") && line.contains(&format!(" {inode} ")))
    };
    pids.filter(mapped).collect()
}
