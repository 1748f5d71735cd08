use std::net::UdpSocket;

use tpurun_protocol::supervise::MessagesBetween;

use super::said::{WaitSays, WaitsFor};
use super::*;

const WORD: &str = "a token that is long enough";

fn plan(count: u32, node: u32, at: &str, token: &str) -> Plan {
    let token = TokenSource::Known(Token::new(token).unwrap());
    Plan {
        count,
        node,
        rendezvous: at.into(),
        token,
        patience: Duration::from_secs(10),
        is_one_terminal: false,
        max_restarts: 0,
    }
}

fn token_of(plan: &Plan) -> &Token {
    let TokenSource::Known(token) = &plan.token else { panic!("{plan:?}") };
    token
}

fn free() -> String {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Runs node 0 and a future beside it, on one thread as the agent does.
fn beside_node_0<T>(
    patience: Duration,
    count: u32,
    at: &str,
    other: impl Future<Output = T>,
) -> (Result<Nodes, String>, Vec<String>, T) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut said = vec![];
        let plan = Plan { patience, ..plan(count, 0, at, WORD) };
        let mut say = |line: &str| said.push(line.to_owned());
        let (met, other) = tokio::join!(Nodes::meet(&plan, token_of(&plan), "n0", 2, &mut say), other);
        (met, said, other)
    })
}

async fn joined(plan: Plan, ranks: u32) -> Result<Nodes, String> {
    Nodes::meet(&plan, token_of(&plan), "n", ranks, &mut |_| ()).await
}

/// Two nodes that have met, of a rank each.
async fn pair() -> (Nodes, Nodes) {
    let at = free();
    let plan0 = plan(2, 0, &at, WORD);
    let mut say = |_: &str| ();
    let first = Nodes::meet(&plan0, token_of(&plan0), "n0", 1, &mut say);
    let (first, second) = tokio::join!(first, joined(plan(2, 1, &at, WORD), 1));
    (first.unwrap(), second.unwrap())
}

#[test]
fn nodes_meet_and_know_who_has_which_ranks() {
    let at = free();
    let others = async {
        let (one, two) = tokio::join!(joined(plan(3, 2, &at, WORD), 3), joined(plan(3, 1, &at, WORD), 1));
        let mut nodes = [one.unwrap(), two.unwrap()];
        let mut first = nodes[0].take_events();
        nodes[0].tell(&Frame::Done);
        nodes[1].tell(&Frame::Stop { signal: 2 });
        (nodes, first.recv().await)
    };
    let told = async {
        let (node0, _, other) = {
            let mut said = |_: &str| ();
            let plan = plan(3, 0, &at, WORD);
            let door = async {
                let mut node0 = Nodes::meet(&plan, token_of(&plan), "n0", 2, &mut said).await.unwrap();
                let mut events = node0.take_events();
                let mut came = [events.recv().await.unwrap(), events.recv().await.unwrap()];
                came.sort_by_key(|event| matches!(event, NodeEvent::Frame(2, _)));
                assert!(matches!(came[0], NodeEvent::Frame(1, Frame::Stop { signal: 2 })), "{came:?}");
                assert!(matches!(came[1], NodeEvent::Frame(2, Frame::Done)), "{came:?}");
                node0.tell(&Frame::Over);
                node0
            };
            let (node0, other) = tokio::join!(door, others);
            (node0, (), other)
        };
        let (nodes, event) = other;
        assert!(matches!(event, Some(NodeEvent::Frame(0, Frame::Over))), "{event:?}");
        for node in [&node0, &nodes[0], &nodes[1]] {
            assert_eq!(node.table, node0.table);
            assert_eq!([0, 1, 2].map(|node| node0.ranks_of(node)), [0..2, 2..3, 3..6]);
            let mut ranks: Vec<u32> = node.credentials().keys().copied().collect();
            ranks.sort_unstable();
            assert_eq!(ranks, node.ranks_of(node.node).collect::<Vec<_>>());
            assert_eq!(node.credentials()[&ranks[0]].authority, node0.credentials()[&0].authority);
        }
        assert_eq!([0, 1, 2].map(|node| node0.host(node).to_owned()), ["n0", "n", "n(2)"]);
        node0.close().await;
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(told);
}

#[test]
fn the_store_is_reached_through_the_nodes() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (node0, node1) = pair().await;
        let store = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = node1.store_port().unwrap();
        // It comes before the store is known.
        let mut rank = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        rank.write_all(b"question").await.unwrap();
        node0.store_is_at(store.local_addr().unwrap().port());
        let (mut served, _) = store.accept().await.unwrap();
        let mut bytes = [0; 8];
        served.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"question");
        served.write_all(b"answer").await.unwrap();
        drop(served);
        let mut answer = String::new();
        rank.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "answer");
    });
}

#[test]
fn who_does_not_fit_is_told_why_and_node_0_says_so() {
    let other = "another token, long enough as well";
    for (given, reason, said) in [
        ((2, 1, other), "node 0 refuses this node: another token", "another token"),
        ((3, 1, WORD), "node 0 refuses this node: --nnodes 3, expected 2", "--nnodes 3, expected 2"),
    ] {
        let at = free();
        let stranger = joined(plan(given.0, given.1, &at, given.2), 1);
        let (met, lines, refused) = beside_node_0(Duration::from_secs(1), 2, &at, stranger);
        assert_eq!(refused.unwrap_err(), reason);
        assert!(lines[0].starts_with("refused 127.0.0.1:") && lines[0].ends_with(said), "{lines:?}");
        assert_eq!(met.unwrap_err(), format!("node 1 of 2 did not come to {at} within 1 s"));
    }
}

/// Connects as somebody who does not know the token, from a first packet to a stream that is used.
async fn knock(endpoint: &quinn::Endpoint, at: SocketAddr) -> Option<(quinn::Connection, quinn::SendStream)> {
    let id = door::random_id().to_le_bytes();
    let connection = link::connect(endpoint, at, move || quinn::ConnectionId::new(&id)).await.ok()?;
    let (mut send, _) = connection.open_bi().await.ok()?;
    send.write_all(&[16, 0, 0]).await.ok()?;
    Some((connection, send))
}

/// Whether something does not come about at once.
async fn waits(something: impl Future) -> bool {
    let mut something = std::pin::pin!(something);
    std::future::poll_fn(|context| std::task::Poll::Ready(something.as_mut().poll(context).is_pending()))
        .await
}

#[test]
fn a_stranger_has_one_stream_and_a_few_bytes() {
    let at = free();
    let socket: SocketAddr = at.parse().unwrap();
    let stranger = async {
        let endpoint = link::endpoint(None, socket).unwrap();
        let (connection, mut send) = knock(&endpoint, socket).await.unwrap();
        let second_waits = waits(connection.open_bi()).await;
        let written = send.write(&vec![0; 4 << 20]).await.unwrap();
        (second_waits, written)
    };
    let (_, _, (second_waits, written)) = beside_node_0(Duration::from_millis(300), 2, &at, stranger);
    assert!(second_waits, "the second stream of a stranger is open");
    assert!(written <= 8 << 10, "{written} bytes of a stranger are on their way");
}

#[test]
fn a_node_joins_through_a_flood_that_one_line_tells_of() {
    let at = free();
    let socket: SocketAddr = at.parse().unwrap();
    let join = async {
        let endpoint = link::endpoint(None, socket).unwrap();
        let mut flood = tokio::task::JoinSet::new();
        for _ in 0..500 {
            let endpoint = endpoint.clone();
            flood.spawn(async move { knock(&endpoint, socket).await });
        }
        // One that was taken up shows that node 0 has seen the flood.
        let held = flood.join_next().await;
        let joined = joined(plan(2, 1, &at, WORD), 1).await;
        drop((held, flood));
        joined
    };
    let (met, lines, joined) = beside_node_0(Duration::from_secs(20), 2, &at, join);
    joined.unwrap();
    assert_eq!(met.unwrap().ranks(), 3);
    let refused = lines.iter().filter(|line| line.starts_with("refused")).count();
    assert!(refused <= 1, "{lines:?}");
}

#[test]
fn a_node_comes_once() {
    let at = free();
    let twice = async {
        let [first, second] = [(), ()].map(|()| joined(plan(3, 1, &at, WORD), 1));
        tokio::select! {
            first = first => first,
            second = second => second,
        }
    };
    let (_, lines, refused) = beside_node_0(Duration::from_secs(1), 3, &at, twice);
    assert_eq!(refused.unwrap_err(), "node 0 refuses this node: node 1 is there already");
    assert!(lines.iter().any(|line| line.ends_with(": node 1 is there already")), "{lines:?}");
}

/// A listener can pass on no code that it was shown: this one shows back the code that it got.
#[test]
fn who_listens_must_know_the_token() {
    let at = free();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let socket: SocketAddr = at.parse().unwrap();
        let endpoint = link::endpoint(Some(socket), socket).unwrap();
        let mirror = async {
            let connection = endpoint.accept().await.unwrap().await.unwrap();
            let (mut send, mut receive) = connection.accept_bi().await.unwrap();
            let hello = link::read_frame(&mut receive, link::MOST).await.unwrap();
            let Frame::Hello { code, .. } = hello else { panic!("{hello:?}") };
            link::write_frame(&mut send, &Frame::Accepted { code }).await.unwrap();
            connection.closed().await;
        };
        let (refused, ()) = tokio::join!(joined(plan(2, 1, &at, WORD), 1), mirror);
        assert_eq!(refused.unwrap_err(), format!("who listens at {at} does not know the token"));
    });
}

#[test]
fn a_node_that_is_gone_is_told_of() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (mut node0, node1) = pair().await;
        let mut events = node0.take_events();
        node1.close().await;
        let event = events.recv().await;
        let Some(NodeEvent::Gone(1, why)) = event else { panic!("{event:?}") };
        assert_eq!(why, "its tpurun has ended");
    });
}

/// The frames that fuzzing starts from.
#[test]
fn seeds_are_frames() {
    let told = JobFailure {
        culprit: Some(3),
        exit_code: 1,
        is_echo: false,
        who: vec!["rank 3 (host n1, pid 7)  raised ValueError".into()],
        why: vec!["first of 4 to fail".into()],
        last_line: Some("step 9".into()),
    };
    let node = Node { host: "n1".into(), ranks: 1, address: "10.0.0.2".into() };
    let wait =
        WaitSays { token: 9, for_ns: 5, comm_id: 7, what: WaitsFor::Recv { from: 1 }, python_threads: 1 };
    let says = RankSays { rank: 3, pid: 7, waits: vec![wait], lanes: vec![] };
    let between = MessagesBetween { sends: 1, receives: 2, any_receives: 0, in_flight: true };
    let said = LookAnswer {
        ranks: vec![says.clone()],
        groups: vec![GroupSays { comm_id: 7, members: vec![0, 3], has_failed: false }],
        messages: vec![MessagesSays::new(7, 0, 1, between)],
    };
    let frames = [
        (
            "hello",
            Frame::Hello { version: "0.1.0".into(), node: 1, nodes: 2, max_restarts: 3, code: [7; 32] },
        ),
        ("join", Frame::Join { node: node.clone(), keys: vec![vec![4; 65]] }),
        (
            "welcome",
            Frame::Welcome {
                id: "7f3a".into(),
                table: vec![node],
                authority: vec![1; 99],
                certificates: vec![vec![2; 99]],
            },
        ),
        ("ended", Frame::Ended { code: Some(0), signal: None, left: says }),
        ("lost", Frame::Lost { rank: 1, kind: 3, text: "rank 1 was killed by SIGKILL".into() }),
        ("stands", Frame::Stands { told: told.clone(), again: true }),
        ("proposed", Frame::Proposed(told)),
        ("no_restart", Frame::NoRestart { why: "host n1 (node 1) is gone".into() }),
        ("over", Frame::Over),
        ("look", Frame::Look { number: 7 }),
        ("seen", Frame::Seen { number: 7, node: 1, said }),
        (
            "deadlock",
            Frame::Deadlock(DeadlockProof {
                groups: vec![7],
                guilty: vec![3],
                finished: vec![],
                text: "deadlock: ranks wait for each other in a circle".into(),
            }),
        ),
        ("watched", Frame::Watched { by: 1 }),
        ("flight", Frame::Flight { of: 1, to: 0, document: b"{\"format\":1}".to_vec() }),
        ("suspects", Frame::Suspects { node: 1, lines: vec![(3, "rank 3 (pid 7) is sleeping".into())] }),
    ];
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/node_frame");
    for (name, frame) in frames {
        let (path, bytes) = (folder.join(name), frame.encode()[4..].to_vec());
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{name}: UPDATE_EXPECT=1 writes it anew");
    }
}
