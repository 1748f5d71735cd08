mod hosts;
mod tcp_sessions;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;

use quinn_proto::ConnectionId;

use super::certificate::Certificate;
use super::invitation::Invitation;
use super::simulation::{LONG, Sky};
use super::*;
use tpurun_protocol::authority::{Authority, RankKey};
use tpurun_protocol::hosts::Hosts;
use tpurun_protocol::network::MOST_CONNECTIONS;
use tpurun_protocol::segment::Segment;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Some communicator.
const ID: u64 = 7;

/// Two hosts of one rank, as the first rank of one of them sees them.
fn bridge(rank: u32) -> Bridge {
    let hosts = Hosts::parse("0 1\nn0\nn1", 2).unwrap();
    let segment = Arc::new(Segment::alone("dp0", 2, 4096).with_hosts(hosts).of_rank(rank));
    Bridge::all(&segment, Shares::All(1)).remove(0)
}

/// A process with a certificate of its own, and whom it expects.
fn alone(sky: &mut Sky) -> (Address, Expected) {
    let expected = Expected::default();
    (sky.add(Identity::new(None).unwrap().into(), expected.clone(), 0), expected)
}

/// A process of a job with an authority.
fn ranked(sky: &mut Sky, authority: &Authority, rank: u32) -> Address {
    let key = RankKey::new().unwrap();
    let certificate = authority.certify(rank, key.public()).unwrap();
    let identity = Identity::new(Some(key.certified(authority.certificate(), &certificate))).unwrap();
    sky.add(identity.into(), Expected::default(), rank)
}

fn expect(who: &Expected, expected: &[&Address]) {
    who.lock().unwrap().extend(expected.iter().map(|address| match &address.who {
        Who::Shows(certificate) => certificate.clone(),
        Who::Rank(_) => panic!("it has no certificate of its own"),
    }));
}

/// Makes this process the host of that number, with the other one at `to`.
fn be(sky: &mut Sky, process: usize, host: u32, to: &Address) {
    let now = sky.now;
    sky.mesh(process).sessions.add(now, ID, bridge(host), vec![to.clone(), to.clone()]);
}

fn is_open(sky: &mut Sky, process: usize) -> bool {
    (0..2).any(|host| sky.mesh(process).sessions.is_open(ID, host))
}

/// Whether both ends come together before a silence is over.
fn meet(sky: &mut Sky, one: usize, other: usize) -> bool {
    sky.until(LONG, |sky| is_open(sky, one) && is_open(sky, other))
}

#[test]
fn who_is_expected_is_let_in() {
    let mut sky = Sky::new(0);
    let ((one, known_to_one), (other, known_to_other)) = (alone(&mut sky), alone(&mut sky));
    expect(&known_to_one, &[&other]);
    expect(&known_to_other, &[&one]);
    be(&mut sky, 0, 0, &other);
    be(&mut sky, 1, 1, &one);
    assert!(meet(&mut sky, 0, 1));
}

/// The other side may make the communicator much later.
#[test]
fn who_comes_early_waits() {
    let mut sky = Sky::new(0);
    let ((one, known_to_one), (other, known_to_other)) = (alone(&mut sky), alone(&mut sky));
    expect(&known_to_one, &[&other]);
    expect(&known_to_other, &[&one]);
    be(&mut sky, 0, 0, &other);
    assert!(!meet(&mut sky, 0, 0), "nobody answers yet");
    be(&mut sky, 1, 1, &one);
    assert!(meet(&mut sky, 0, 1));
}

/// A process connects with a certificate that nobody was told of.
#[test]
fn a_stranger_is_refused() {
    let mut sky = Sky::new(0);
    let ((one, _), (other, known_to_other), _stranger) = (alone(&mut sky), alone(&mut sky), alone(&mut sky));
    expect(&known_to_other, &[&one]);
    be(&mut sky, 2, 0, &other);
    be(&mut sky, 1, 1, &one);
    assert!(!meet(&mut sky, 1, 1) && !is_open(&mut sky, 2));
}

/// Another process is where one was to be.
#[test]
fn who_answers_must_be_who_was_meant() {
    let mut sky = Sky::new(0);
    let ((one, _), (other, known_to_other), (third, _)) = (alone(&mut sky), alone(&mut sky), alone(&mut sky));
    expect(&known_to_other, &[&one]);
    be(&mut sky, 0, 0, &Address { who: third.who, ..other });
    be(&mut sky, 1, 1, &one);
    assert!(!meet(&mut sky, 0, 1));
}

#[test]
fn without_a_certificate_nobody_is_let_in() {
    let mut sky = Sky::new(0);
    let (other, _) = alone(&mut sky);
    let Who::Shows(certificate) = &other.who else { panic!("it has one of its own") };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate.der().to_vec().into()).unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"tpurun/1".to_vec()];
    let crypto = quinn_proto::crypto::rustls::QuicClientConfig::try_from(config).unwrap();
    let mut config = quinn_proto::ClientConfig::new(Arc::new(crypto));
    let invitation = other.invitation;
    config.initial_dst_cid_provider(Arc::new(move || ConnectionId::new(&invitation.proof(Protocol::Quic))));
    let mut endpoint = quinn_proto::Endpoint::new(Arc::default(), None, true, None);
    let (_, mut connection) = endpoint.connect(sky.now, config, other.socket, "tpurun").unwrap();
    // Each turn is one flight, each way after the other.
    let why = (0..10).find_map(|_| {
        let (mut bytes, from) = (vec![], (HERE, 5).into());
        while let Some(transmit) = connection.poll_transmit(sky.now, 1, &mut bytes) {
            let now = sky.now;
            sky.mesh(0).datagram(now, from, transmit.ecn, bytes.drain(..).as_slice().into());
        }
        let now = sky.now;
        sky.mesh(0).settle(now);
        let mut bytes = vec![];
        while let Some(transmit) = sky.mesh(0).transmit(now, 1, &mut bytes) {
            let answer = bytes.drain(..).as_slice().into();
            let event = endpoint.handle(now, other.socket, None, transmit.ecn, answer, &mut vec![]);
            if let Some(quinn_proto::DatagramEvent::ConnectionEvent(_, event)) = event {
                connection.handle_event(event);
            }
        }
        std::iter::from_fn(|| connection.poll()).find_map(|event| match event {
            quinn_proto::Event::ConnectionLost { reason } => Some(reason.to_string()),
            _ => None,
        })
    });
    assert!(why.as_ref().is_some_and(|why| why.contains("ertificate")), "{why:?}");
}

/// The first datagram of a connection to there, by somebody who does not know the invitation.
fn knock(sky: &Sky, identity: &Identity, to: &Address) -> Vec<u8> {
    let crypto = identity.quic_client(&to.who).unwrap();
    let config = quinn_proto::ClientConfig::new(Arc::new(crypto));
    let mut endpoint = quinn_proto::Endpoint::new(Arc::default(), None, true, None);
    let (_, mut connection) = endpoint.connect(sky.now, config, to.socket, "tpurun").unwrap();
    let mut bytes = vec![];
    assert!(connection.poll_transmit(sky.now, 1, &mut bytes).is_some());
    bytes
}

/// The stranger even has a certificate that is expected. It gets no answer, and nothing is kept of it.
#[test]
fn who_is_not_invited_costs_nothing() {
    let mut sky = Sky::new(0);
    let ((one, known_to_one), (other, known_to_other)) = (alone(&mut sky), alone(&mut sky));
    expect(&known_to_one, &[&other]);
    let identity = Identity::new(None).unwrap();
    let stranger = identity.at((HERE, 9).into(), 0);
    expect(&known_to_other, &[&one, &stranger]);
    let now = sky.now;
    for port in 0..300 {
        let bytes = knock(&sky, &identity, &other);
        sky.mesh(1).datagram(now, (HERE, port).into(), None, bytes[..].into());
        sky.mesh(1).settle(now);
    }
    assert!(sky.mesh(1).transmit(now, 1, &mut vec![]).is_none(), "a stranger is answered");
    assert_eq!(sky.mesh(1).count(), 0);
    be(&mut sky, 0, 0, &other);
    be(&mut sky, 1, 1, &one);
    assert!(meet(&mut sky, 0, 1));
}

/// Each datagram asks for a version that nobody speaks, which is answered without a connection.
#[test]
fn answers_to_strangers_are_few() {
    let mut sky = Sky::new(0);
    let (other, _) = alone(&mut sky);
    let mut bytes = knock(&sky, &Identity::new(None).unwrap(), &other);
    bytes[1..5].copy_from_slice(&[0x1a; 4]);
    let now = sky.now;
    for port in 0..1000 {
        sky.mesh(0).datagram(now, (HERE, port).into(), None, bytes[..].into());
    }
    let answers = (0..1000).take_while(|_| sky.mesh(0).transmit(now, 1, &mut vec![]).is_some()).count();
    assert!((1..=64).contains(&answers), "{answers} of 1000 are answered");
}

/// A process of the job says that it is the first rank of a host, and is not. The stream of the real first rank comes
/// through all the same.
fn refuse_the_liar(sky: &mut Sky, one: &Address, other: &Address) {
    be(sky, 2, 0, other);
    be(sky, 1, 1, one);
    assert!(!meet(sky, 1, 1) && !is_open(sky, 2), "it was taken for another");
    be(sky, 0, 0, other);
    assert!(meet(sky, 0, 1));
}

#[test]
fn a_stream_of_another_host_is_refused() {
    let mut sky = Sky::new(0);
    let ((one, known_to_one), (other, known_to_other), (liar, _)) =
        (alone(&mut sky), alone(&mut sky), alone(&mut sky));
    expect(&known_to_one, &[&other]);
    expect(&known_to_other, &[&one, &liar]);
    refuse_the_liar(&mut sky, &one, &other);
}

/// The liar has the authority's certificate, of another rank.
#[test]
fn a_stream_of_another_rank_is_refused() {
    let (authority, mut sky) = (Authority::new().unwrap(), Sky::new(0));
    let [one, other, _liar] = [0, 1, 2].map(|rank| ranked(&mut sky, &authority, rank));
    refuse_the_liar(&mut sky, &one, &other);
}

#[test]
fn ranks_of_one_authority_know_each_other_and_nobody_else() {
    let (authority, elsewhere) = (Authority::new().unwrap(), Authority::new().unwrap());
    let job = |sky: &mut Sky| [0, 1].map(|rank| ranked(sky, &authority, rank));
    let mut sky = Sky::new(0);
    let [one, other] = job(&mut sky);
    be(&mut sky, 0, 0, &other);
    be(&mut sky, 1, 1, &one);
    assert!(meet(&mut sky, 0, 1), "both are of the job");

    let mut sky = Sky::new(0);
    let [one, other] = job(&mut sky);
    be(&mut sky, 0, 0, &Address { who: Who::Rank(2), ..other });
    be(&mut sky, 1, 1, &one);
    assert!(!meet(&mut sky, 0, 1), "another rank was meant");

    for has_authority in [true, false] {
        let mut sky = Sky::new(0);
        let [one, other] = job(&mut sky);
        // The stranger cannot know the authority, so it takes any process that answers for the one it means.
        let _stranger = match has_authority {
            true => ranked(&mut sky, &elsewhere, 0),
            false => alone(&mut sky).0,
        };
        be(&mut sky, 2, 0, &other);
        be(&mut sky, 1, 1, &one);
        assert!(!meet(&mut sky, 1, 1) && !is_open(&mut sky, 2));
    }
}

/// A process that opens a stream and says nothing, or nonsense, does not keep it.
#[test]
fn a_stream_that_does_not_say_what_it_is_for_is_closed() {
    for said in [&b""[..], b"TPNB", b"sixteen bytes of nothing"] {
        let mut sky = Sky::new(0);
        let ((one, known_to_one), (other, known_to_other)) = (alone(&mut sky), alone(&mut sky));
        expect(&known_to_one, &[&other]);
        expect(&known_to_other, &[&one]);
        be(&mut sky, 0, 0, &other);
        be(&mut sky, 1, 1, &one);
        assert!(meet(&mut sky, 0, 1));
        let before = sky.mesh(1).sessions.purposes.streams().count();
        sky.mesh(0).say(ID, 1, Bytes::copy_from_slice(said));
        assert!(
            said.is_empty()
                || sky.until(LONG, |sky| sky.mesh(1).sessions.purposes.streams().count() > before)
                || said.len() > 16
        );
        assert!(sky.until(LONG, |sky| sky.mesh(1).sessions.purposes.streams().count() == before), "{said:?}");
    }
}

#[test]
fn only_keys_are_certified() {
    let authority = Authority::new().unwrap();
    for key in [&[][..], &[4; 64], &[2; 65]] {
        let error = authority.certify(3, key).expect_err("it is none");
        assert_eq!(error.text(), "the public key of rank 3 is no uncompressed point of P-256");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn greetings_survive(communicator: u64, host: u32) {
        let greeting = Greeting { communicator, host };
        prop_assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
    }

    #[test]
    fn addresses_survive(
        port: u16,
        more_ports in proptest::collection::vec(any::<u16>(), 0..MOST_CONNECTIONS),
        certificate in proptest::collection::vec(any::<u8>(), 0..99),
    ) {
        let (certificate, invitation) = (Certificate::from_der(certificate), Invitation::new().unwrap());
        for (who, bulk) in [(Who::Shows(certificate), Bulk::Tcp), (Who::Rank(7), Bulk::Tcp), (Who::Rank(7), Bulk::Quic)] {
            let first = Address { socket: SocketAddr::new(HERE, port), who, invitation: invitation.clone() };
            let addresses = Addresses { first, more_ports: more_ports.clone(), bulk };
            prop_assert_eq!(addresses.each().count(), addresses.count());
            prop_assert_eq!(Addresses::parse(&addresses.to_string(), 7), Some(addresses));
        }
    }

    #[test]
    fn any_text_is_addresses_or_none(text in "[0-9a-f:., ]{0,40}(/tcp)?( [0-9a-f]{32})?[0-9a-f ]{0,9}") {
        if let Some(addresses) = Addresses::parse(&text, 7) {
            prop_assert_eq!(Addresses::parse(&addresses.to_string(), 7), Some(addresses));
        }
    }

    #[test]
    fn any_bytes_are_a_greeting_or_are_refused(bytes: [u8; 16], is_one: bool) {
        let mut bytes = bytes;
        if is_one {
            bytes[..4].copy_from_slice(b"TPNB");
        }
        let greeting = greeting::Greeting::decode(&bytes);
        prop_assert_eq!(greeting.is_some(), bytes.starts_with(b"TPNB"));
        prop_assert_eq!(greeting.map_or(bytes, greeting::Greeting::encode), bytes);
    }
}

#[test]
fn a_pretended_link_is_one_of_datagrams() {
    let link: Option<Link> = Some("loss=1%".parse().expect("a link"));
    let of = |link, bulk| bulk_beside(link, bulk).map_err(|error| error.to_string());
    assert_eq!(of(None, None), Ok(Bulk::Tcp));
    assert_eq!(of(None, Some(Bulk::Quic)), Ok(Bulk::Quic));
    assert_eq!((of(link, None), of(link, Some(Bulk::Quic))), (Ok(Bulk::Quic), Ok(Bulk::Quic)));
    assert_eq!(
        of(link, Some(Bulk::Tcp)).unwrap_err(),
        "TPURUN_BULK: expected quic beside TPURUN_LINK, which is one of datagrams, given tcp"
    );
}
