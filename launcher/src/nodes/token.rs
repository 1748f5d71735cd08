//! The secret that the nodes of a job share, and how they show each other that they know it.
//!
//! Each end sends a code (HMAC-SHA256) under the token over what is particular to this TLS connection (exported
//! keying material, RFC 8446, section 7.5), so that a code is worth nothing on any other: who sits between two nodes
//! has a connection with each, and can pass no code on.

use std::fmt;
use std::io::Write;
use std::path::Path;

use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

/// Comparing and printing it is left out on purpose.
#[derive(Clone)]
pub(crate) struct Token(hmac::Key);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Which end says it.
#[derive(Clone, Copy)]
pub(crate) enum End {
    /// Node 0, which listens.
    Listens,
    Connects,
}

/// A code over a connection.
pub(crate) type Code = [u8; 32];

impl Token {
    /// From the file that is given, else from the environment.
    ///
    /// # Errors
    /// One line that says how to make one; never the token.
    pub(crate) fn find(file: Option<&Path>) -> Result<Token, String> {
        match (file, std::env::var(VARIABLE)) {
            (Some(file), _) => Token::read(file),
            (None, Ok(text)) => Token::new(&text).map_err(|error| format!("{VARIABLE}: {error}")),
            (None, Err(_)) => Err(format!(
                "expected the same token on every node, in {VARIABLE} or --token-file, given none (make one with \
                 `tpurun token`)"
            )),
        }
    }

    fn read(file: &Path) -> Result<Token, String> {
        let wrong = |error: &dyn fmt::Display| format!("--token-file {}: {error}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| wrong(&error))?;
        Token::new(&text).map_err(|error| wrong(&error))
    }

    pub(crate) fn new(text: &str) -> Result<Token, String> {
        let text = text.trim();
        if text.len() < LEAST_CHARS {
            // Who listens in may try all short ones.
            return Err(format!(
                "expected a token of at least {LEAST_CHARS} characters, given {} (make one with `tpurun token`)",
                text.len()
            ));
        }
        Ok(Token(hmac::Key::new(hmac::HMAC_SHA256, text.as_bytes())))
    }

    /// What this end sends.
    pub(crate) fn code(&self, connection: &quinn::Connection, end: End) -> Option<Code> {
        let tag = hmac::sign(&self.0, &transcript(connection, end)?);
        tag.as_ref().try_into().ok()
    }

    /// Whether the other end knows the token; takes as long whatever it sent.
    pub(crate) fn is_known_to(&self, connection: &quinn::Connection, end: End, code: &Code) -> bool {
        transcript(connection, end).is_some_and(|text| hmac::verify(&self.0, &text, code).is_ok())
    }
}

fn transcript(connection: &quinn::Connection, end: End) -> Option<Vec<u8>> {
    let name: &[u8] = match end {
        End::Listens => b"node 0",
        End::Connects => b"another node",
    };
    let mut bound = [0; 32];
    connection.export_keying_material(&mut bound, b"EXPORTER-tpurun-token", name).ok()?;
    Some([name, &bound].concat())
}

/// `tpurun token`: a new one, on a line.
pub(crate) fn print_new(out: &mut dyn Write) -> Result<(), String> {
    let mut bytes = [0; 24];
    SystemRandom::new().fill(&mut bytes).map_err(|_| "the host has no randomness")?;
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(out, "{text}").map_err(|error| error.to_string())
}

/// Where it is; no rank inherits this.
pub(crate) const VARIABLE: &str = "TPURUN_TOKEN";
const LEAST_CHARS: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_tokens_are_refused_and_none_is_shown() {
        let error = Token::new("secret\n").unwrap_err();
        assert_eq!(
            error,
            "expected a token of at least 20 characters, given 6 (make one with `tpurun token`)"
        );
        let mut made = Vec::new();
        print_new(&mut made).unwrap();
        let made = String::from_utf8(made).unwrap();
        assert_eq!(made.trim().len(), 48);
        assert_eq!(format!("{:?}", Token::new(&made).unwrap()), "Token(..)");
    }
}
