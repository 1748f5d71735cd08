//! The certificate authority of one job, which says of a key that it is a certain rank's.
//!
//! The launcher makes one for each job and keeps its key to itself. The key of a rank is made on the rank's host and
//! never leaves it: only the public half is certified. The name in a certificate is the rank's in the world.

use std::fmt;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm,
};

use tpurun_memory::failure::{Failure, FailureKind};

/// The certificate that a rank shows to other hosts, and the authority that it believes: DER.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The certificate of the authority.
    pub authority: Vec<u8>,
    /// The certificate of the rank.
    pub certificate: Vec<u8>,
    /// The private key of the rank, PKCS #8.
    pub key: Vec<u8>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

/// The key pair of a rank.
#[derive(Debug)]
pub struct RankKey(KeyPair);

impl RankKey {
    /// A new key pair of the curve P-256.
    ///
    /// # Errors
    /// When the host has no randomness.
    pub fn new() -> Result<Self, Failure> {
        KeyPair::generate().map(Self).map_err(|error| refused(&error))
    }

    /// The public half, an uncompressed point (SEC 1, section 2.3.3).
    pub fn public(&self) -> &[u8] {
        self.0.der_bytes()
    }

    /// The key pair with the certificate that the authority has made of its public half.
    pub fn certified(&self, authority: &[u8], certificate: &[u8]) -> Credentials {
        let (authority, certificate) = (authority.to_vec(), certificate.to_vec());
        Credentials { authority, certificate, key: self.0.serialize_der() }
    }
}

/// The authority whose word counts in one job.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// A new authority, with a key of its own.
    ///
    /// # Errors
    /// When the host has no randomness.
    pub fn new() -> Result<Self, Failure> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().map_err(|error| refused(&error))?;
        CertifiedIssuer::self_signed(params, key).map(Self).map_err(|error| refused(&error))
    }

    /// Its certificate, DER.
    pub fn certificate(&self) -> &[u8] {
        self.0.der()
    }

    /// The certificate of a rank of the world, for its public key.
    ///
    /// # Errors
    /// When the key is no point of the curve's length.
    pub fn certify(&self, rank: u32, public_key: &[u8]) -> Result<Vec<u8>, Failure> {
        if public_key.len() != POINT_BYTES || public_key[0] != UNCOMPRESSED {
            let text = format!("the public key of rank {rank} is no uncompressed point of P-256");
            return Err(Failure::new(FailureKind::Transport, text));
        }
        let params = CertificateParams::new([name_of(rank)]).map_err(|error| refused(&error))?;
        let key = Point(public_key);
        let certificate = params.signed_by(&key, &self.0).map_err(|error| refused(&error))?;
        Ok(certificate.der().to_vec())
    }
}

/// The name in a rank's certificate.
pub fn name_of(rank: u32) -> String {
    format!("rank-{rank}.tpurun")
}

struct Point<'a>(&'a [u8]);

impl PublicKeyData for Point<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

fn refused(error: &rcgen::Error) -> Failure {
    Failure::new(FailureKind::Transport, format!("cannot make a certificate: {error}"))
}

const POINT_BYTES: usize = 65;
const UNCOMPRESSED: u8 = 4;
