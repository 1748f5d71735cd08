//! The secret that the nodes of a job share, and how they show each other that they know it.
//!
//! Each end sends a code (HMAC-SHA256) under the token over what is particular to this TLS connection (exported
//! keying material, RFC 8446, section 7.5), so that a code is worth nothing on any other: an attacker between two
//! nodes has a connection with each, and can pass no code on.

use std::fmt;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac;
use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use quinn::ConnectionId;

/// Comparing and printing it is left out on purpose.
#[derive(Clone)]
pub(crate) struct Token(Box<hmac::Key>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The end that sends a code.
#[derive(Clone, Copy)]
pub(crate) enum End {
    /// Node 0, which listens.
    Listens,
    Connects,
}

/// A code over a connection.
pub(crate) type Code = [u8; 32];

/// The place that a token comes from.
#[derive(Clone, Debug)]
pub(crate) enum TokenSource {
    Known(Token),
    /// Node 0 writes one into this file, which the other nodes see; it is there only until all have come.
    Shared(PathBuf),
}

impl TokenSource {
    /// The file that is given, else the environment, else what a scheduler's nodes share.
    ///
    /// # Errors
    /// One line that says how to make one; never the token.
    pub(crate) fn find(file: Option<&Path>, shared: Option<PathBuf>) -> Result<TokenSource, String> {
        match (file, std::env::var(VARIABLE), shared) {
            (Some(file), ..) => Token::read(file).map(TokenSource::Known),
            (None, Ok(text), _) => {
                Token::new(&text).map(TokenSource::Known).map_err(|error| format!("{VARIABLE}: {error}"))
            }
            (None, Err(_), Some(shared)) => Ok(TokenSource::Shared(shared)),
            (None, Err(_), None) => Err(format!(
                "expected the same token on every node, in {VARIABLE} or --token-file, given none (make one with \
                 `tpurun token`)"
            )),
        }
    }

    /// Makes the token, on node 0, or waits for it.
    ///
    /// # Errors
    /// One line: that it can not be written, or did not come in time.
    pub(crate) async fn token(&self, is_first: bool, patience: Duration) -> Result<Token, String> {
        let path = match self {
            TokenSource::Known(token) => return Ok(token.clone()),
            TokenSource::Shared(path) => path,
        };
        let wrong = |error: &dyn fmt::Display| format!("the token of the nodes, {}: {error}", path.display());
        if is_first {
            return share(path).map_err(|error| wrong(&error));
        }
        let began = Instant::now();
        loop {
            match read_shared(path) {
                Ok(token) => return Ok(token),
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(wrong(&error)),
                Err(_) if began.elapsed() >= patience => {
                    let text = "node 0 did not write it; where nodes share no home directory, set";
                    return Err(wrong(&format!("{text} {VARIABLE} for all of them (see `tpurun token`)")));
                }
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        }
    }

    /// Removes the file once all nodes have come.
    pub(crate) fn forget(&self) {
        if let TokenSource::Shared(path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Makes a new token, in a file of this user alone.
fn share(path: &Path) -> io::Result<Token> {
    let mut line = Vec::new();
    print_new(&mut line).map_err(io::Error::other)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // Others see all of it or nothing. A file that an earlier run left behind is nobody's.
    let begun = path.with_extension("new");
    let _ = std::fs::remove_file(&begun);
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(&begun)?.write_all(&line)?;
    std::fs::rename(&begun, path)?;
    Token::new(&String::from_utf8_lossy(&line)).map_err(io::Error::other)
}

/// Reads a file that the user names. Anybody who can write that file chooses who is let in.
fn read_own(path: &Path) -> io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let found = file.metadata()?;
    let own = rustix::process::getuid().as_raw();
    if found.uid() != own && found.uid() != 0 {
        let text =
            format!("expected a file of uid {own} or of root, given one of uid {} (copy it)", found.uid());
        return Err(io::Error::other(text));
    }
    if found.is_file() && found.mode() & 0o002 != 0 {
        let mode = found.mode() & 0o777;
        let text = format!("expected a file that others cannot write, given mode {mode:04o} (chmod 600 it)");
        return Err(io::Error::other(text));
    }
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(text)
}

fn read_shared(path: &Path) -> io::Result<Token> {
    let found = path.symlink_metadata()?;
    if !found.is_file() || found.uid() != rustix::process::getuid().as_raw() || found.mode() & 0o077 != 0 {
        return Err(io::Error::other("expected a file that only this user can read"));
    }
    Token::new(&std::fs::read_to_string(path)?).map_err(io::Error::other)
}

impl Token {
    fn read(file: &Path) -> Result<Token, String> {
        let wrong = |error: &dyn fmt::Display| format!("--token-file {}: {error}", file.display());
        let text = read_own(file).map_err(|error| wrong(&error))?;
        Token::new(&text).map_err(|error| wrong(&error))
    }

    pub(crate) fn new(text: &str) -> Result<Token, String> {
        let text = text.trim();
        if text.len() < LEAST_CHARS {
            // Somebody who listens in may try all short tokens.
            return Err(format!(
                "expected a token of at least {LEAST_CHARS} characters, given {} (make one with `tpurun token`)",
                text.len()
            ));
        }
        Ok(Token(Box::new(hmac::Key::new(hmac::HMAC_SHA256, text.as_bytes()))))
    }

    /// The code that this end sends.
    pub(crate) fn code(&self, connection: &quinn::Connection, end: End) -> Option<Code> {
        let tag = hmac::sign(&self.0, &transcript(connection, end)?);
        tag.as_ref().try_into().ok()
    }

    /// The id of a connection's first packet, which shows node 0 that a node of the job sends it: a random half, and
    /// a code over it.
    pub(crate) fn first_id(&self) -> ConnectionId {
        let mut id = [0; MAX_CID_SIZE];
        // Without randomness the id is one that was used before, and counts as a stranger's.
        let _ = SystemRandom::new().fill(&mut id[..NONCE_BYTES]);
        let tag = hmac::sign(&self.0, &first_text(&id[..NONCE_BYTES]));
        id[NONCE_BYTES..].copy_from_slice(&tag.as_ref()[..MAX_CID_SIZE - NONCE_BYTES]);
        ConnectionId::new(&id)
    }

    /// Whether an id is one of [`first_id`](Self::first_id); takes as long whatever it is.
    pub(crate) fn made(&self, id: &ConnectionId) -> bool {
        if id.len() != MAX_CID_SIZE {
            return false;
        }
        let (nonce, shown) = id.split_at(NONCE_BYTES);
        let tag = hmac::sign(&self.0, &first_text(nonce));
        verify_slices_are_equal(&tag.as_ref()[..shown.len()], shown).is_ok()
    }

    /// Whether the other end knows the token; takes as long whatever it sent.
    pub(crate) fn is_known_to(&self, connection: &quinn::Connection, end: End, code: &Code) -> bool {
        transcript(connection, end).is_some_and(|text| hmac::verify(&self.0, &text, code).is_ok())
    }
}

fn first_text(nonce: &[u8]) -> Vec<u8> {
    [&b"first packet"[..], nonce].concat()
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

/// `tpurun token`: prints a new token, on a line.
pub(crate) fn print_new(out: &mut dyn Write) -> Result<(), String> {
    let mut bytes = [0; 24];
    SystemRandom::new().fill(&mut bytes).map_err(|_| "the host has no randomness")?;
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(out, "{text}").map_err(|error| error.to_string())
}

/// The variable with the token; no rank inherits it.
pub(crate) const VARIABLE: &str = "TPURUN_TOKEN";
/// Bytes of the longest connection id (RFC 9000, section 17.2).
const MAX_CID_SIZE: usize = 20;
/// The other 12 bytes are the code, which nobody guesses online.
const NONCE_BYTES: usize = 8;
const LEAST_CHARS: usize = 20;
const AGAIN: Duration = Duration::from_millis(100);

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

    #[test]
    fn a_file_that_everybody_can_write_is_no_secret() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "a token that is long enough").unwrap();
        let with_mode = |mode| {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(&file, permissions).unwrap();
            Token::read(&file)
        };
        with_mode(0o600).unwrap();
        with_mode(0o644).unwrap();
        let open = with_mode(0o666).unwrap_err();
        let text = "expected a file that others cannot write, given mode 0666 (chmod 600 it)";
        assert_eq!(open, format!("--token-file {}: {text}", file.display()));
    }

    #[tokio::test]
    async fn a_shared_token_is_of_this_user_alone() {
        let folder = tempfile::tempdir().unwrap();
        let source = TokenSource::Shared(folder.path().join("a/job.token"));
        let patience = Duration::from_millis(50);
        let late = source.token(false, patience).await.unwrap_err();
        assert!(late.contains("node 0 did not write it"), "{late}");
        source.token(true, patience).await.unwrap();
        source.token(false, patience).await.unwrap();
        let path = folder.path().join("a/job.token");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        let open = source.token(false, patience).await.unwrap_err();
        assert!(open.ends_with("expected a file that only this user can read"), "{open}");
        source.forget();
        assert!(!path.exists());
    }
}
