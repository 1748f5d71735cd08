//! The right to connect: processes of the job have it, and nobody else (law I14 of `docs/invariants.md`).
//!
//! Under the launcher the job has an authority. A process that connects shows its certificate, which has the rank's
//! name. Elsewhere each process makes a certificate of its own, and others learn from the store of the job which
//! certificates to expect. Either way keys never leave the host. TLS 1.3 proves on both sides that a process has the
//! key of the certificate that it shows.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use quinn_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    RootCertStore, ServerConfig, SignatureScheme,
};

use super::address::Address;
use super::certificate::{Certificate, NAME, Who};
use super::invitation::Invitation;
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_protocol::authority::Credentials;

/// The protocol that is spoken over connections; another version speaks another one.
const QUIC: &[u8] = b"tpurun/1";
const TCP: &[u8] = b"tpurun-bulk/1";
/// The certificates of processes that may connect to this one, where no authority says so.
pub(crate) type Expected = Arc<Mutex<Vec<Certificate>>>;

/// This process's certificate, its key, and the authority that it believes.
pub(crate) struct Identity {
    certificate: Certificate,
    key: PrivateKeyDer<'static>,
    authority: Option<Arc<RootCertStore>>,
    provider: Arc<CryptoProvider>,
    invitation: Invitation,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl Identity {
    /// The identity that the authority has given, or one that this process makes.
    pub(crate) fn new(credentials: Option<Credentials>) -> Result<Self, Failure> {
        // The suite with the shortest key is the fastest one; the other is for CPUs without AES instructions.
        let provider = Arc::new(CryptoProvider {
            cipher_suites: vec![
                aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
                aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
            ],
            ..aws_lc_rs::default_provider()
        });
        let invitation = Invitation::new()?;
        let Some(Credentials { authority, certificate, key }) = credentials else {
            let made = rcgen::generate_simple_self_signed([NAME.to_owned()]);
            let made = made.map_err(|error| refused(&error))?;
            let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
            return Ok(Self {
                certificate: Certificate(made.cert.der().clone()),
                key,
                authority: None,
                provider,
                invitation,
            });
        };
        let mut roots = RootCertStore::empty();
        roots.add(authority.into()).map_err(|error| refused(&error))?;
        let key = PrivateKeyDer::Pkcs8(key.into());
        Ok(Self {
            certificate: Certificate::from_der(certificate),
            key,
            authority: Some(roots.into()),
            provider,
            invitation,
        })
    }

    /// How others are to know this process, which is a rank of the world.
    pub(crate) fn known_as(&self, rank: u32) -> Who {
        match self.authority {
            Some(_) => Who::Rank(rank),
            None => Who::Shows(self.certificate.clone()),
        }
    }

    /// Where others reach this process.
    pub(super) fn at(&self, socket: SocketAddr, rank: u32) -> Address {
        Address { socket, who: self.known_as(rank), invitation: self.invitation.clone() }
    }

    /// The invitation that connections must prove first.
    pub(super) fn invitation(&self) -> &Invitation {
        &self.invitation
    }

    /// The settings for QUIC connections from any expected process, or any of the job.
    pub(crate) fn quic_server(&self, expected: Expected) -> Result<QuicServerConfig, Failure> {
        QuicServerConfig::try_from(self.server(expected, QUIC)?).map_err(|error| refused(&error))
    }

    /// The same settings for TCP.
    pub(crate) fn tcp_server(&self, expected: Expected) -> Result<ServerConfig, Failure> {
        let mut config = self.server(expected, TCP)?;
        // Each connection proves who is at its ends.
        config.send_tls13_tickets = 0;
        config.enable_secret_extraction = true;
        Ok(config)
    }

    fn server(&self, expected: Expected, protocol: &[u8]) -> Result<ServerConfig, Failure> {
        let verifier: Arc<dyn ClientCertVerifier> = match &self.authority {
            None => Arc::new(Verifier { expected, algorithms: self.algorithms() }),
            Some(roots) => WebPkiClientVerifier::builder_with_provider(roots.clone(), self.provider.clone())
                .build()
                .map_err(|error| refused(&error))?,
        };
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| refused(&error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.0.clone()], self.key.clone_key())
            .map_err(|error| refused(&error))?;
        config.alpn_protocols = vec![protocol.to_vec()];
        Ok(config)
    }

    /// The settings for a QUIC connection to this one process.
    pub(crate) fn quic_client(&self, to: &Who) -> Result<QuicClientConfig, Failure> {
        QuicClientConfig::try_from(self.client(to, QUIC)?).map_err(|error| refused(&error))
    }

    /// The same settings for TCP.
    pub(crate) fn tcp_client(&self, to: &Who) -> Result<ClientConfig, Failure> {
        let mut config = self.client(to, TCP)?;
        config.resumption = Resumption::disabled();
        config.enable_secret_extraction = true;
        Ok(config)
    }

    fn client(&self, to: &Who, protocol: &[u8]) -> Result<ClientConfig, Failure> {
        let verifier: Arc<dyn ServerCertVerifier> = match (&self.authority, to) {
            (Some(roots), Who::Rank(_)) => {
                WebPkiServerVerifier::builder_with_provider(roots.clone(), self.provider.clone())
                    .build()
                    .map_err(|error| refused(&error))?
            }
            (None, Who::Shows(certificate)) => {
                let expected = Arc::new(Mutex::new(vec![certificate.clone()]));
                Arc::new(Verifier { expected, algorithms: self.algorithms() })
            }
            _ => return Err(refused(&"one process has an authority and the other has none")),
        };
        let mut config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| refused(&error))?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(vec![self.certificate.0.clone()], self.key.clone_key())
            .map_err(|error| refused(&error))?;
        config.alpn_protocols = vec![protocol.to_vec()];
        Ok(config)
    }

    fn algorithms(&self) -> WebPkiSupportedAlgorithms {
        self.provider.signature_verification_algorithms
    }
}

/// The certificate of the process at the other end of a connection.
pub(crate) fn other_end(connection: &quinn_proto::Connection) -> Option<Certificate> {
    let identity =
        connection.crypto_session().peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    Certificate::of_chain(&identity)
}

fn refused(error: &dyn fmt::Display) -> Failure {
    Failure::new(FailureKind::Transport, format!("cannot set up encryption between hosts: {error}"))
}

/// The verifier that takes the certificates it knows, byte by byte. They have no authority above them that rustls
/// could check.
#[derive(Debug)]
struct Verifier {
    expected: Expected,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if expected.iter().any(|known| known.der() == certificate.as_ref()) {
            return Ok(());
        }
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }

    fn check_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }
}

/// The error for TLS 1.2, which no connection is configured for.
fn no_tls12() -> Error {
    Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic)
}

/// The checks of signatures that both kinds of verifier need.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(no_tls12())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.check_signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    };
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(certificate).map(|()| ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(certificate).map(|()| ClientCertVerified::assertion())
    }

    signatures!();
}
