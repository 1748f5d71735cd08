//! How a process tells processes of the job from strangers before it spends anything on them.
//!
//! Each process has a random key, which it puts beside its address in the store of the job. The first bytes of every
//! connection to it prove that key. A process that does not know it gets no handshake, no answer and no memory.
//! Certificates show who is at the other end (`tls.rs`), as if there were no such key.

use std::fmt;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac::{self, HMAC_SHA256};
use aws_lc_rs::rand::{SecureRandom, SystemRandom};

use super::protocol::Protocol;
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::text::{hex, unhex};

const KEY_BYTES: usize = 16;
/// Bytes that nobody has used before.
const NONCE_BYTES: usize = 8;
/// Bytes of a proof, as many as the id of a QUIC connection can hold (RFC 9000, section 17.2). 12 of them are the
/// code, which nobody guesses online.
pub(super) const PROOF_BYTES: usize = 20;

/// A nonce, and a code over it.
pub(super) type InvitationProof = [u8; PROOF_BYTES];

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Invitation([u8; KEY_BYTES]);

/// The text has no key, as a log is no place for it.
impl fmt::Debug for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Invitation(..)")
    }
}

/// The text is for the store.
impl fmt::Display for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(&self.0, f)
    }
}

impl Invitation {
    /// A new invitation.
    ///
    /// # Errors
    /// When the host has no randomness.
    pub(super) fn new() -> Result<Self, Failure> {
        let mut key = [0; KEY_BYTES];
        SystemRandom::new().fill(&mut key).map_err(|_| {
            let text = "the host has no randomness for a key that others connect with";
            Failure::new(FailureKind::Transport, text.to_owned())
        })?;
        Ok(Self(key))
    }

    /// Reads the text that [`Display`](fmt::Display) wrote.
    pub(super) fn parse(text: &str) -> Option<Self> {
        unhex(text)?.try_into().ok().map(Self)
    }

    /// The proof that a connection to the process of this invitation begins with.
    pub(super) fn proof(&self, carrier: Protocol) -> InvitationProof {
        let mut nonce = [0; NONCE_BYTES];
        // Without randomness the proof is as good, but an eavesdropper can tell two connections of one process.
        let _ = SystemRandom::new().fill(&mut nonce);
        self.over(nonce, carrier)
    }

    /// Whether a connection begins with a proof of this invitation. The check takes the same time for every proof.
    pub(super) fn is_proven_by(&self, carrier: Protocol, proof: &[u8]) -> bool {
        let Some(nonce) = proof.first_chunk() else { return false };
        verify_slices_are_equal(&self.over(*nonce, carrier), proof).is_ok()
    }

    fn over(&self, nonce: [u8; NONCE_BYTES], carrier: Protocol) -> InvitationProof {
        let name: &[u8] = match carrier {
            Protocol::Quic => b"tpurun quic",
            Protocol::Tcp => b"tpurun tcp",
        };
        let code = hmac::sign(&hmac::Key::new(HMAC_SHA256, &self.0), &[name, &nonce].concat());
        let mut proof = [0; PROOF_BYTES];
        proof[..NONCE_BYTES].copy_from_slice(&nonce);
        proof[NONCE_BYTES..].copy_from_slice(&code.as_ref()[..PROOF_BYTES - NONCE_BYTES]);
        proof
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_one_invitation_and_one_carrier() {
        let (own, other) = (Invitation::new().unwrap(), Invitation::new().unwrap());
        let proof = own.proof(Protocol::Quic);
        assert!(own.is_proven_by(Protocol::Quic, &proof));
        assert_ne!(proof, own.proof(Protocol::Quic));
        assert!(!own.is_proven_by(Protocol::Tcp, &proof) && !other.is_proven_by(Protocol::Quic, &proof));
        for cut in [&[][..], &proof[..7], &proof[..19], &[&proof[..], &[0]].concat()] {
            assert!(!own.is_proven_by(Protocol::Quic, cut));
        }
        for at in 0..PROOF_BYTES {
            let mut changed = proof;
            changed[at] ^= 1;
            assert!(!own.is_proven_by(Protocol::Quic, &changed));
        }
    }

    #[test]
    fn an_invitation_survives_the_store_and_is_not_shown() {
        let own = Invitation::new().unwrap();
        assert_eq!(Invitation::parse(&own.to_string()), Some(own.clone()));
        assert_eq!(format!("{own:?}"), "Invitation(..)");
        for wrong in ["", "00", "xyz", &"0".repeat(31), &"0".repeat(33), &"é".repeat(16)] {
            assert_eq!(Invitation::parse(wrong), None);
        }
    }
}
