//! Who may connect: processes whose certificates this one was told of, and nobody else (contract C8).
//!
//! Each process makes a key and a certificate of its own, which live as long as it does and never leave it. What
//! it tells others is the certificate, through the store of the job, from where they know whom to expect. TLS 1.3
//! proves on both sides that who connects has the key of a certificate that is expected.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    ServerConfig, SignatureScheme,
};

use crate::failure::{Failure, FailureKind};

/// Spoken over connections; another version speaks another one.
const PROTOCOL: &[u8] = b"tpurun/1";
/// Certificates are known by themselves, not by the name in them.
const NAME: &str = "tpurun";

/// A process, as others know it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Certificate(CertificateDer<'static>);

impl Certificate {
    pub(crate) fn from_der(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }

    pub(crate) fn der(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certificate({} bytes)", self.0.len())
    }
}

/// Those who may connect to this process.
pub(crate) type Expected = Arc<Mutex<Vec<Certificate>>>;

/// This process's certificate, and its key.
pub(crate) struct Identity {
    certificate: Certificate,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl Identity {
    pub(crate) fn new() -> Result<Self, Failure> {
        let made = rcgen::generate_simple_self_signed([NAME.to_owned()]).map_err(|error| refused(&error))?;
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        // The suite with the shortest key is the fastest one; the other is for CPUs without AES instructions.
        let provider = CryptoProvider {
            cipher_suites: vec![
                ring::cipher_suite::TLS13_AES_128_GCM_SHA256,
                ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
            ],
            ..ring::default_provider()
        };
        Ok(Self { certificate: Certificate(made.cert.der().clone()), key, provider: Arc::new(provider) })
    }

    pub(crate) fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// For connections from any of those expected.
    pub(crate) fn server(&self, expected: Expected) -> Result<QuicServerConfig, Failure> {
        let verifier = Arc::new(Verifier { expected, algorithms: self.algorithms() });
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| refused(&error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.0.clone()], self.key.clone_key())
            .map_err(|error| refused(&error))?;
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        QuicServerConfig::try_from(config).map_err(|error| refused(&error))
    }

    /// For a connection to this one process.
    pub(crate) fn client(&self, to: &Certificate) -> Result<QuicClientConfig, Failure> {
        let expected = Arc::new(Mutex::new(vec![to.clone()]));
        let verifier = Arc::new(Verifier { expected, algorithms: self.algorithms() });
        let mut config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| refused(&error))?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_auth_cert(vec![self.certificate.0.clone()], self.key.clone_key())
            .map_err(|error| refused(&error))?;
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        QuicClientConfig::try_from(config).map_err(|error| refused(&error))
    }

    fn algorithms(&self) -> WebPkiSupportedAlgorithms {
        self.provider.signature_verification_algorithms
    }
}

/// The name that connections are made to.
pub(crate) fn name() -> &'static str {
    NAME
}

/// Who is at the other end of a connection.
pub(crate) fn other_end(connection: &quinn::Connection) -> Option<Certificate> {
    let identity = connection.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    identity.first().cloned().map(Certificate)
}

fn refused(error: &dyn fmt::Display) -> Failure {
    Failure::new(FailureKind::Transport, format!("cannot set up encryption between hosts: {error}"))
}

/// Takes the certificates it knows, byte by byte: that there is no authority above them needs no rustls check.
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

/// QUIC is never spoken over it.
fn no_tls12() -> Error {
    Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic)
}

/// What both kinds of verifier ask for.
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
