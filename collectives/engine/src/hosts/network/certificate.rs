//! The certificate that a process shows, and how others know by it which process that is.

use std::fmt;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

use tpurun_protocol::authority;

/// The name in certificates that are known by themselves, not by a name.
pub(super) const NAME: &str = "tpurun";

/// A process, as others know it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Certificate(pub(super) CertificateDer<'static>);

impl Certificate {
    pub(crate) fn from_der(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }

    /// The certificate of the process that has shown this chain.
    pub(crate) fn of_chain(chain: &[CertificateDer<'static>]) -> Option<Self> {
        chain.first().cloned().map(Self)
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

/// How a process is known to be the one that is meant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Who {
    /// The process shows this certificate.
    Shows(Certificate),
    /// The job's authority says that the process is this rank of the world.
    Rank(u32),
}

impl Who {
    /// Whether this is the process that has shown a certificate, which TLS has found to be good.
    pub(crate) fn has_shown(&self, certificate: &Certificate) -> bool {
        match self {
            Self::Shows(own) => own == certificate,
            Self::Rank(_) => {
                let name = ServerName::try_from(self.name());
                let parsed = ParsedCertificate::try_from(&certificate.0);
                parsed
                    .ok()
                    .zip(name.ok())
                    .is_some_and(|(parsed, name)| verify_server_name(&parsed, &name).is_ok())
            }
        }
    }

    /// The name that connections are made to.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Shows(_) => NAME.to_owned(),
            Self::Rank(rank) => authority::name_of(*rank),
        }
    }
}
