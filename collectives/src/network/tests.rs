use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const ANY: Greeting = Greeting { communicator: 7, host: 0 };

fn running() -> Arc<Running> {
    Running::start(HERE).unwrap()
}

fn expect(who: &Running, expected: &[&Running]) {
    let certificates = expected.iter().map(|other| other.address.certificate.clone());
    who.expected.lock().unwrap().extend(certificates);
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
        // The one who connects may be done before the other has looked at who that is.
        let refused = match stranger.connection(&other.address).await {
            Ok(connection) => connection.closed().await.to_string(),
            Err(error) => error,
        };
        assert!(refused.contains("certificate"), "{refused}");
    });
}

#[test]
fn who_answers_must_be_who_was_meant() {
    let (one, other, third) = (running(), running(), running());
    expect(&other, &[&one]);
    let elsewhere = Address { certificate: third.address.certificate.clone(), ..other.address.clone() };
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
    roots.add(other.address.certificate.der().to_vec().into()).unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"tpurun/1".to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(config).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    one.handle.block_on(async {
        let connecting = one.endpoint.connect_with(config, other.address.socket, tls::name()).unwrap();
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
    let address = one.address.clone();
    let refused = other.handle.spawn({
        let other = other.clone();
        async move { connect(&other, 1, 0, ANY.communicator, &address).await.is_none() }
    });
    liar.handle.block_on(async {
        liar.open(&other.address, ANY).await.expect_err("it is of the job, but not that host");
        assert!(refused.await.unwrap(), "it was taken for another");
    });
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
        let address = Address { socket: SocketAddr::new(HERE, port), certificate };
        prop_assert_eq!(Address::parse(&address.to_string()), Some(address));
    }

    #[test]
    fn any_text_is_an_address_or_none(text in "[0-9a-f:. ]{0,40}") {
        if let Some(address) = Address::parse(&text) {
            prop_assert_eq!(Address::parse(&address.to_string()), Some(address));
        }
    }
}
