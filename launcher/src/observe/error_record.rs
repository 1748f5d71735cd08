//! How a rank's program failed, as its error file says; ranks write what they like there.

use serde::Deserialize;
use serde_json::Value;

/// How a rank's program failed, in its own words.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub(crate) struct ErrorRecord {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) message: String,
    pub(crate) file: String,
    pub(crate) line: u32,
    pub(crate) function: String,
    pub(crate) source: String,
    /// The guilty ranks, when the error itself knows them.
    pub(crate) ranks: Vec<u32>,
    /// The traceback as Python prints it.
    #[serde(skip)]
    pub(crate) traceback: String,
    /// The error of the engine that it was raised from, or while that one was handled.
    pub(crate) engine: Option<EngineError>,
}

/// An error of a collective that another exception wraps.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub(crate) struct EngineError {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) message: String,
    pub(crate) ranks: Vec<u32>,
    /// The program said `raise ... from` it, all the way.
    pub(crate) explicit: bool,
    /// From the one to the other.
    pub(crate) age_ms: u64,
}

impl ErrorRecord {
    /// The engine's error behind this one. A program that raises while it handles an old one may have gone on in the
    /// handler: then it has handled the old one, if it `went_on`.
    pub(crate) fn wrapped(&self, went_on: bool) -> Option<ErrorRecord> {
        let engine = self.engine.as_ref()?;
        (engine.explicit || engine.age_ms <= HANDLED_AFTER_MS && !went_on).then(|| ErrorRecord {
            kind: engine.kind.clone(),
            message: engine.message.clone(),
            ranks: engine.ranks.clone(),
            ..ErrorRecord::default()
        })
    }

    /// Ours, or what the `record` decorator of torchelastic writes.
    pub(crate) fn parse(file: &[u8]) -> Option<ErrorRecord> {
        let entry: Value = serde_json::from_slice(file).ok()?;
        if let Ok(record) = ErrorRecord::deserialize(&entry["exception"]) {
            let traceback = entry["message"]["extraInfo"]["py_callstack"].as_str().unwrap_or_default().into();
            return Some(ErrorRecord { traceback, ..record });
        }
        let message = entry["message"]["message"].as_str().or(entry["message"].as_str())?;
        let (kind, message) = message.split_once(": ").unwrap_or(("", message));
        Some(ErrorRecord { kind: kind.into(), message: message.into(), ..ErrorRecord::default() })
    }
}

/// Milliseconds after which an exception raised in a handler is the handler's own.
const HANDLED_AFTER_MS: u64 = 10_000;

/// Any content of the file is a record or it is not.
#[cfg(any(test, fuzzing))]
pub(crate) fn survives(file: &[u8]) {
    if let Some(record) = ErrorRecord::parse(file) {
        assert!(record.message.len() <= file.len() && record.ranks.len() <= file.len());
    }
}
