//! The events of the fork server: one JSON object per line.

use serde::Deserialize;

/// One line.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum ServerEvent {
    /// Everything is imported; since when it runs, and when torch was there, CLOCK_MONOTONIC.
    Ready { python_ns: Option<u64>, torch_ns: Option<u64> },
    /// It can not fork ranks; quiet when nobody would want to know why.
    Refuse { reason: String, quiet: bool },
    /// The rendezvous store serves on this port, or did not start.
    Store {
        port: Option<u16>,
        reason: String,
        /// The process that holds it, if that is another one than the server.
        #[serde(default)]
        pid: Option<i32>,
    },
    /// That process has ended; the signal is 0 when it exited.
    StoreEnded { code: i32, signal: i32 },
    /// A rank runs; it was forked just after this moment.
    Started { rank: u32, pid: i32, ns: Option<u64> },
    /// A rank could not be forked.
    Failed { rank: u32, reason: String },
    /// A rank has ended; the signal is 0 when it exited.
    Exited { rank: u32, code: i32, signal: i32 },
    /// Nothing is left of what it has forked, and all of it was told.
    Cleared,
    /// The server is gone.
    #[serde(skip)]
    Closed,
    /// A warm server has forked it as this process.
    #[serde(skip)]
    Forked { pid: i32 },
    /// No warm server forks it.
    #[serde(skip)]
    NotForked { reason: String },
}

/// Takes the complete lines out of `pending`. A line that is no event comes from no server of ours.
pub(crate) fn take_events(pending: &mut Vec<u8>) -> Vec<ServerEvent> {
    let Some(end) = pending.iter().rposition(|byte| *byte == b'\n') else { return Vec::new() };
    let rest = pending.split_off(end + 1);
    let lines = std::mem::replace(pending, rest);
    lines.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// However the bytes are cut, the same events come out, and an unfinished line stays.
#[cfg(any(test, fuzzing))]
pub(crate) fn survives(bytes: &[u8]) {
    let mut whole = bytes.to_vec();
    let events = take_events(&mut whole);
    assert!(!whole.contains(&b'\n'));
    let (mut pending, mut again) = (Vec::new(), Vec::new());
    for piece in bytes.chunks(7) {
        pending.extend_from_slice(piece);
        again.extend(take_events(&mut pending));
    }
    assert_eq!(format!("{events:?}"), format!("{again:?}"));
    assert_eq!(whole, pending);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_the_server_writes_them() {
        let parse = |text: &str| serde_json::from_str::<ServerEvent>(text).unwrap();
        assert!(matches!(parse(r#"{"event": "ready"}"#), ServerEvent::Ready { torch_ns: None, .. }));
        let started = parse(r#"{"event": "started", "rank": 1, "pid": 9, "ns": 77}"#);
        assert!(matches!(started, ServerEvent::Started { rank: 1, pid: 9, ns: Some(77) }));
        let store = parse(r#"{"event": "store", "port": null, "reason": "in use"}"#);
        assert!(matches!(store, ServerEvent::Store { port: None, reason, pid: None } if reason == "in use"));
        let ended = parse(r#"{"event": "storeended", "code": 0, "signal": 9}"#);
        assert!(matches!(ended, ServerEvent::StoreEnded { code: 0, signal: 9 }));
        let exited = parse(r#"{"event": "exited", "rank": 3, "code": 0, "signal": 9}"#);
        assert!(matches!(exited, ServerEvent::Exited { rank: 3, code: 0, signal: 9 }));
        assert!(matches!(parse(r#"{"event": "cleared"}"#), ServerEvent::Cleared));
    }
}
