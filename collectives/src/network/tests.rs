use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::authority::{Authority, RankKey};
use super::*;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const ANY: Greeting = Greeting { communicator: 7, host: 0 };

fn running() -> Arc<Running> {
    Running::start(HERE, 0, None).unwrap()
}

/// Of a job with an authority.
fn ranked(authority: &Authority, rank: u32) -> Arc<Running> {
    let key = RankKey::new().unwrap();
    let certificate = authority.certify(rank, key.public()).unwrap();
    Running::start(HERE, rank, Some(key.certified(authority.certificate(), &certificate))).unwrap()
}

fn expect(who: &Running, expected: &[&Running]) {
    let certificates = expected.iter().map(|other| shown(other));
    who.expected.lock().unwrap().extend(certificates);
}

fn shown(who: &Running) -> Certificate {
    who.identity.certificate().clone()
}

/// Whether a connection comes to be, or the reason why not. The one who connects may be done before the other has
/// looked at who that is.
async fn try_to_connect(from: &Running, to: &Address) -> Result<(), String> {
    let connection = from.connection(to).await?;
    let silence = tokio::time::timeout(Duration::from_millis(500), connection.closed()).await;
    silence.map_or(Ok(()), |error| Err(error.to_string()))
}

#[test]
fn who_is_expected_is_let_in() {
    let (one, other) = (running(), running());
    expect(&other, &[&one]);
    let address = one.address.clone();
    let met = other.handle.spawn({
        let other = other.clone();
        async move { connect(&other, 1, 0, ANY.communicator, &address).await.is_some() }
    });
    one.handle.block_on(async {
        let _stream = one.open(&other.address, ANY).await.expect("it is expected");
        assert!(met.await.unwrap(), "it comes");
    });
}

#[test]
fn a_stranger_is_refused() {
    let (one, other, stranger) = (running(), running(), running());
    expect(&other, &[&one]);
    stranger.handle.block_on(async {
        let refused = try_to_connect(&stranger, &other.address).await.unwrap_err();
        assert!(refused.contains("certificate"), "{refused}");
    });
}

#[test]
fn who_answers_must_be_who_was_meant() {
    let (one, other, third) = (running(), running(), running());
    expect(&other, &[&one]);
    let elsewhere = Address { who: Who::Shows(shown(&third)), ..other.address.clone() };
    one.handle.block_on(async {
        let error = one.connection(&elsewhere).await.expect_err("another process is there");
        assert!(error.contains("certificate"), "{error}");
    });
}

#[test]
fn without_a_certificate_nobody_is_let_in() {
    let (one, other) = (running(), running());
    expect(&other, &[&one]);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(shown(&other).der().to_vec().into()).unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"tpurun/1".to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(config).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    one.handle.block_on(async {
        let connecting = one.endpoint.connect_with(config, other.address.socket, "tpurun").unwrap();
        let refused = match connecting.await {
            Ok(connection) => connection.closed().await.to_string(),
            Err(error) => error.to_string(),
        };
        assert!(refused.contains("ertificate"), "{refused}");
    });
}

/// A process of the job that says it is the first rank of a host, and is not.
#[test]
fn a_stream_of_another_host_is_refused() {
    let (one, other, liar) = (running(), running(), running());
    expect(&other, &[&one, &liar]);
    refuse_the_liar(&one, &other, &liar);
}

/// As above: it has the authority's certificate, of another rank.
#[test]
fn a_stream_of_another_rank_is_refused() {
    let authority = Authority::new().unwrap();
    let [one, other, liar] = [0, 1, 2].map(|rank| ranked(&authority, rank));
    refuse_the_liar(&one, &other, &liar);
}

/// And the stream of who it says it is comes through all the same.
fn refuse_the_liar(one: &Arc<Running>, other: &Arc<Running>, liar: &Arc<Running>) {
    let address = one.address.clone();
    let (to_one, comes) = std::sync::mpsc::channel();
    let met = other.handle.spawn({
        let other = other.clone();
        async move { to_one.send(connect(&other, 1, 0, ANY.communicator, &address).await.is_some()) }
    });
    liar.handle.block_on(async {
        liar.open(&other.address, ANY).await.expect_err("it is of the job, but not that host");
    });
    assert!(comes.try_recv().is_err(), "it was taken for another");
    one.handle.block_on(async {
        let _stream = one.open(&other.address, ANY).await.expect("it is expected");
        met.await.unwrap().unwrap();
    });
    assert!(comes.recv().unwrap());
}

#[test]
fn ranks_of_one_authority_know_each_other_and_nobody_else() {
    let (authority, elsewhere) = (Authority::new().unwrap(), Authority::new().unwrap());
    let (one, other, stranger) = (ranked(&authority, 0), ranked(&authority, 1), ranked(&elsewhere, 0));
    let alone = running();
    one.handle.block_on(async {
        try_to_connect(&one, &other.address).await.expect("both are of the job");
        let mistaken = Address { who: Who::Rank(2), ..other.address.clone() };
        // Not over the connection that is there.
        one.connections.lock().await.clear();
        let refused = try_to_connect(&one, &mistaken).await.unwrap_err();
        assert!(refused.contains("certificate"), "{refused}");
    });
    for stranger in [stranger, alone] {
        stranger.handle.block_on(async {
            let to = match stranger.identity.has_authority() {
                true => other.address.clone(),
                false => Address { who: Who::Shows(shown(&other)), ..other.address.clone() },
            };
            let refused = try_to_connect(&stranger, &to).await.unwrap_err();
            assert!(refused.contains("certificate"), "{refused}");
        });
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
    fn addresses_survive(port: u16, certificate in proptest::collection::vec(any::<u8>(), 0..99)) {
        let certificate = Certificate::from_der(certificate);
        for who in [Who::Shows(certificate), Who::Rank(7)] {
            let address = Address { socket: SocketAddr::new(HERE, port), who };
            prop_assert_eq!(Address::parse(&address.to_string(), 7), Some(address));
        }
    }

    #[test]
    fn any_text_is_an_address_or_none(text in "[0-9a-f:. ]{0,40}") {
        if let Some(address) = Address::parse(&text, 7) {
            prop_assert_eq!(Address::parse(&address.to_string(), 7), Some(address));
        }
    }
}
