//! The agent's end of the control sockets: one per rank, read as its frames come.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tpurun_memory::FailureKind;
use tpurun_protocol::authority::Credentials;
use tpurun_protocol::control::{
    AgentFrame, ControlError, Message, RankFrame, Sender, ask_for_senders, receive, send,
};

use crate::control::exchange::{Exchange, Orphan, SegmentDelivery};
use crate::control::identities::Identities;
use crate::control::supervisor::{Spread, Supervisor};
use crate::judge::last_words::in_group;
use crate::processes;

/// Something came from a rank, or it will send no more.
#[derive(Debug)]
pub(crate) struct ControlEvent {
    rank: u32,
    message: Result<Message, ControlError>,
}

/// Answers the ranks.
#[derive(Debug)]
pub(crate) struct ControlServer {
    sockets: Vec<Option<Socket>>,
    exchange: Exchange<Offered>,
    supervisor: Supervisor,
    /// Ranks that will not come any more, and what those who wait for them raise.
    lost: HashMap<u32, (FailureKind, String)>,
    identities: Identities,
}

/// The outcome of the promise of a rank to make a segment.
#[derive(Debug)]
enum Offered {
    Segment(OwnedFd),
    /// It cannot.
    Nothing {
        rank: u32,
        text: String,
    },
}

/// The socket of one rank, and the task that reads it. To tokio a packet socket is a datagram socket.
#[derive(Debug)]
struct Socket {
    stream: Arc<UnixDatagram>,
    reader: AbortHandle,
    /// The process that was last seen to be one of the job's.
    known: Option<Sender>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // It owns a share of the socket, which the rank would take for an agent that listens.
        self.reader.abort();
    }
}

impl ControlServer {
    pub(crate) fn new(ranks: u32, identities: Identities, spread: Spread) -> ControlServer {
        ControlServer {
            sockets: (0..ranks).map(|_| None).collect(),
            exchange: Exchange::new(),
            supervisor: Supervisor::new(ranks, spread),
            lost: HashMap::new(),
            identities,
        }
    }

    /// For who follows it.
    pub(crate) fn take_identities(&mut self) -> Identities {
        std::mem::take(&mut self.identities)
    }

    /// The communicators that the ranks have made.
    pub(crate) fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    pub(crate) fn supervisor_mut(&mut self) -> &mut Supervisor {
        &mut self.supervisor
    }

    /// Lets go of communicators that nobody uses any more.
    pub(crate) fn forget(&mut self, has_ended: impl Fn(u32) -> bool) {
        self.supervisor.forget(has_ended);
    }

    /// Fails every communicator that needs this rank, those that are made later, too.
    pub(crate) fn lose(&mut self, rank: u32, kind: FailureKind, text: &str) {
        for group in self.supervisor.of_rank(rank) {
            group.fail_blaming(kind, &in_group(text, group.name()), &[rank]);
        }
        self.refuse_all_of(rank, kind, text);
    }

    /// Nobody gets from this rank what it has not offered yet.
    pub(crate) fn refuse_all_of(&mut self, rank: u32, kind: FailureKind, text: &str) {
        for orphan in self.exchange.lose(rank) {
            self.fail(&orphan, kind, text, rank);
        }
        self.lost.entry(rank).or_insert((kind, text.to_owned()));
    }

    /// Opens the socket of a rank and returns the end that it inherits; `events` gets what it sends.
    pub(crate) fn open(&mut self, rank: u32, events: mpsc::Sender<ControlEvent>) -> io::Result<OwnedFd> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        ask_for_senders(ours.as_fd())?;
        let stream = Arc::new(UnixDatagram::from_std(ours.into())?);
        let reader = tokio::spawn(read(rank, stream.clone(), events)).abort_handle();
        self.sockets[rank as usize] = Some(Socket { stream, reader, known: None });
        Ok(theirs)
    }

    /// Serves one event. A rank that breaks the protocol loses its socket, and nobody else does.
    pub(crate) fn handle(&mut self, event: ControlEvent) {
        let ControlEvent { rank, message } = event;
        // The rank is not to blame for what others do with its socket.
        if message.as_ref().is_ok_and(|message| !self.is_of_the_job(rank, message.sender)) {
            return;
        }
        let served = message.and_then(|message| self.serve(rank, message));
        if served.is_err() {
            self.sockets[rank as usize] = None;
            self.exchange.leave(rank);
        }
    }

    /// Whether it comes from a process that this one has started, or one of those, of the same user; root may have
    /// started some of other users. Whoever else has come by the socket gets nothing, and nobody maps what it offers.
    fn is_of_the_job(&mut self, rank: u32, sender: Option<Sender>) -> bool {
        let (Some(socket), Some(sender)) = (&mut self.sockets[rank as usize], sender) else { return false };
        if socket.known != Some(sender) && is_trusted(sender, rustix::process::geteuid().as_raw()) {
            socket.known = Some(sender);
        }
        socket.known == Some(sender)
    }

    fn serve(&mut self, rank: u32, message: Message) -> Result<(), ControlError> {
        match RankFrame::decode(&message.bytes)? {
            RankFrame::Want { key, request, from } => match self.exchange.want(&key, rank, request, from) {
                Ok(Some(delivery)) => self.deliver(&key, &delivery),
                Ok(None) => {
                    if let Some((kind, text)) = self.lost.get(&from).cloned() {
                        self.refuse_all_of(from, kind, &text);
                    }
                }
                Err(reason) => self.refuse(&key, rank, request, reason),
            },
            RankFrame::Identify { request } => match self.identities.of(rank) {
                Ok(Credentials { authority, certificate, key }) => {
                    self.send(rank, &AgentFrame::Identity { request, authority, certificate, key }, None);
                }
                Err(reason) => self.refuse("of credentials", rank, request, reason),
            },
            RankFrame::Offer { key, readers } => {
                let Some(segment) = message.fd else {
                    return Err(ControlError::Malformed("an offer without its descriptor"));
                };
                if let Some(group) = self.supervisor.add(&segment) {
                    let lost = group.world_ranks().iter().find_map(|rank| self.lost.get_key_value(rank));
                    if let Some((rank, (kind, text))) = lost {
                        group.fail_blaming(*kind, &in_group(text, group.name()), &[*rank]);
                    }
                }
                self.offer(&key, readers, Offered::Segment(segment));
            }
            RankFrame::GiveUp { key, readers: 0, text } => {
                let comm_id = key.rsplit_once('/').and_then(|(_, id)| u64::from_str_radix(id, 16).ok());
                if let Some(comm_id) = comm_id {
                    self.supervisor.fail_creation(comm_id, rank, &text);
                }
            }
            RankFrame::GiveUp { key, readers, text } => {
                self.offer(&key, readers, Offered::Nothing { rank, text });
            }
        }
        Ok(())
    }

    fn offer(&mut self, key: &str, readers: u32, offered: Offered) {
        // Those who wait for a refused offer run into their own deadline.
        for delivery in self.exchange.offer(key, readers, offered).unwrap_or_default() {
            self.deliver(key, &delivery);
        }
    }

    fn deliver(&mut self, key: &str, delivery: &SegmentDelivery<Offered>) {
        let (key, request) = (key.to_owned(), delivery.request);
        match &*delivery.segment {
            Offered::Segment(segment) => {
                self.send(delivery.rank, &AgentFrame::Segment { key, request }, Some(segment));
            }
            Offered::Nothing { rank, text } => {
                let (kind, text, ranks) = (FailureKind::Aborted as u32, text.clone(), vec![*rank]);
                self.send(delivery.rank, &AgentFrame::Failed { key, request, kind, text, ranks }, None);
            }
        }
    }

    fn fail(&mut self, orphan: &Orphan, kind: FailureKind, text: &str, lost: u32) {
        let group = orphan.key.rsplit_once('/').map_or(orphan.key.as_str(), |(group, _)| group);
        let frame = AgentFrame::Failed {
            key: orphan.key.clone(),
            request: orphan.request,
            kind: kind as u32,
            text: in_group(text, group),
            ranks: vec![lost],
        };
        self.send(orphan.rank, &frame, None);
    }

    fn refuse(&mut self, key: &str, rank: u32, request: u64, reason: String) {
        self.send(rank, &AgentFrame::Refused { key: key.to_owned(), request, reason }, None);
    }

    fn send(&mut self, rank: u32, frame: &AgentFrame, segment: Option<&OwnedFd>) {
        let Some(socket) = &self.sockets[rank as usize] else { return };
        // A rank that reads nothing until its socket is full is not waiting for this either.
        if send(socket.stream.as_fd(), &frame.encode(), segment.map(AsFd::as_fd)).is_err() {
            self.sockets[rank as usize] = None;
            self.exchange.leave(rank);
        }
    }
}

fn is_trusted(sender: Sender, own: u32) -> bool {
    (sender.uid == own || own == 0) && processes::is_ours(sender.pid)
}

async fn read(rank: u32, stream: Arc<UnixDatagram>, events: mpsc::Sender<ControlEvent>) {
    loop {
        let message = next(&stream).await;
        let is_last = message.is_err();
        if events.send(ControlEvent { rank, message }).await.is_err() || is_last {
            return;
        }
    }
}

async fn next(socket: &UnixDatagram) -> Result<Message, ControlError> {
    let io_error = |error| ControlError::Io(Arc::new(error));
    loop {
        socket.readable().await.map_err(io_error)?;
        // Told in tokio's terms, so that it waits again when the socket was empty after all.
        let mut received = Err(ControlError::Closed);
        let attempt = socket.try_io(Interest::READABLE, || {
            received = receive(socket.as_fd());
            match &received {
                Err(ControlError::Io(error)) if error.kind() == ErrorKind::WouldBlock => {
                    Err(ErrorKind::WouldBlock.into())
                }
                _ => Ok(()),
            }
        });
        if attempt.is_ok() {
            return received;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};
    use tpurun_protocol::control::ControlClient;

    /// Serves until every rank has closed its end, then returns what the ranks returned.
    fn serve<T: Send + 'static>(programs: Vec<Box<dyn FnOnce(ControlClient) -> T + Send>>) -> Vec<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (tx, mut rx) = mpsc::channel(16);
            let mut server =
                ControlServer::new(programs.len() as u32, Identities::default(), Spread::default());
            let threads: Vec<_> = programs
                .into_iter()
                .enumerate()
                .map(|(rank, program)| {
                    let socket = server.open(rank as u32, tx.clone()).unwrap();
                    std::thread::spawn(move || program(ControlClient::new(socket)))
                })
                .collect();
            drop(tx);
            while let Some(event) = rx.recv().await {
                server.handle(event);
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn deadline() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    fn segment(size: u64) -> OwnedFd {
        let fd = rustix::fs::memfd_create("segment", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        fd
    }

    fn size(fd: &OwnedFd) -> i64 {
        rustix::fs::fstat(fd).unwrap().st_size
    }

    #[test]
    fn every_rank_gets_the_segment_of_its_life_of_the_communicator() {
        let mut programs: Vec<Box<dyn FnOnce(ControlClient) -> Vec<i64> + Send>> = vec![Box::new(|client| {
            for life in 1..=3 {
                client.offer("world", 3, segment(life * 100).as_fd()).unwrap();
            }
            Vec::new()
        })];
        for _ in 0..3 {
            programs.push(Box::new(|client| {
                (0..3).map(|_| size(&client.fetch("world", 0, deadline()).unwrap())).collect()
            }));
        }
        assert_eq!(serve(programs)[1..], [[100, 200, 300], [100, 200, 300], [100, 200, 300]]);
    }

    #[test]
    fn who_waits_for_what_cannot_be_made_is_told_why_and_gets_the_next_one() {
        let mut programs: Vec<Box<dyn FnOnce(ControlClient) -> Vec<String> + Send>> =
            vec![Box::new(|client| {
                client.give_up("world", 2, "rank 0 cannot").unwrap();
                client.offer("world", 2, segment(100).as_fd()).unwrap();
                Vec::new()
            })];
        for _ in 0..2 {
            programs.push(Box::new(|client| {
                let Err(ControlError::Failed(failure)) = client.fetch("world", 0, deadline()) else {
                    return Vec::new();
                };
                let (ranks, text) = (failure.ranks().to_vec(), failure.text().to_owned());
                vec![
                    format!("{ranks:?} {text}"),
                    size(&client.fetch("world", 0, deadline()).unwrap()).to_string(),
                ]
            }));
        }
        assert_eq!(serve(programs)[1..], [["[0] rank 0 cannot", "100"], ["[0] rank 0 cannot", "100"]]);
    }

    #[test]
    fn only_processes_of_the_job_are_heard() {
        let own = rustix::process::geteuid().as_raw();
        let this = std::process::id() as i32;
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        for (pid, uid, agent, is_heard) in [
            (this, own, own, true),
            (child.id() as i32, own, own, true),
            // Another user's, unless root has started it.
            (child.id() as i32, own + 1, own, own == 0),
            (child.id() as i32, 1000, 1001, false),
            (child.id() as i32, 1000, 0, true),
            // The process is of the same user, but of no rank of this job.
            (rustix::process::getppid().unwrap().as_raw_nonzero().get(), own, own, false),
            (1, own, own, false),
            (0, own, own, false),
            (i32::MAX, own, own, false),
        ] {
            assert_eq!(is_trusted(Sender { pid, uid }, agent), is_heard, "{pid} of {uid} to {agent}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn what_a_stranger_sends_is_dropped_and_the_rank_goes_on() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (tx, mut rx) = mpsc::channel(16);
            let mut server = ControlServer::new(1, Identities::default(), Spread::default());
            let client = ControlClient::new(server.open(0, tx).unwrap());
            client.offer("k", 1, segment(100).as_fd()).unwrap();
            let mut event = rx.recv().await.unwrap();
            let sender = event.message.as_ref().unwrap().sender.unwrap();
            assert_eq!(
                (sender.pid, sender.uid),
                (std::process::id() as i32, rustix::process::geteuid().as_raw())
            );
            event.message.as_mut().unwrap().sender = Some(Sender { pid: 1, ..sender });
            server.handle(event);
            client.offer("k", 1, segment(200).as_fd()).unwrap();
            server.handle(rx.recv().await.unwrap());
            let fetched = std::thread::spawn(move || client.fetch("k", 0, deadline()).unwrap());
            server.handle(rx.recv().await.unwrap());
            assert_eq!(size(&fetched.join().unwrap()), 200);
        });
    }

    #[test]
    fn a_rank_that_talks_nonsense_is_cut_off_alone() {
        let results = serve::<bool>(vec![
            Box::new(|client| {
                let offer = client.offer("k", 1, segment(1).as_fd());
                offer.is_ok()
            }),
            Box::new(|client| client.fetch(&"k".repeat(600), 0, deadline()).is_err()),
            Box::new(|client| client.fetch("k", 0, deadline()).is_ok()),
        ]);
        assert_eq!(results, [true, true, true]);
    }
}
