//! All communicators that go over one protocol, and what their sessions have for others to know.

use std::collections::BTreeMap;

use super::session::{Communicator, Session, SessionId, State};
use crate::hosts::bridge::Bridge;

pub(super) struct Communicators<Stream> {
    by_id: BTreeMap<u64, Communicator<Stream>>,
    /// Communicators that are over, which nobody has been told yet.
    over: Vec<u64>,
    /// Communicators whose other bridges on this host must look, and have not been told yet.
    calls: Vec<u64>,
}

impl<Stream> Communicators<Stream> {
    pub(super) const fn new() -> Self {
        Self { by_id: BTreeMap::new(), over: vec![], calls: vec![] }
    }

    pub(super) fn add(&mut self, id: u64, communicator: Communicator<Stream>) {
        self.by_id.insert(id, communicator);
    }

    pub(super) fn knows(&self, id: u64) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn ids(&self) -> Vec<u64> {
        self.by_id.keys().copied().collect()
    }

    pub(super) fn get(&self, id: u64) -> Option<&Communicator<Stream>> {
        self.by_id.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Communicator<Stream>> {
        self.by_id.get_mut(&id)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub(super) fn any(&self, wanted: impl Fn(&Communicator<Stream>) -> bool) -> bool {
        self.by_id.values().any(wanted)
    }

    pub(super) fn session(&mut self, at: SessionId) -> Option<&mut Session<Stream>> {
        self.get_mut(at.communicator).map(|communicator| &mut communicator.sessions[at.host as usize])
    }

    pub(super) fn sessions_where(&self, wanted: impl Fn(&Session<Stream>) -> bool) -> Vec<SessionId> {
        let all = self.by_id.iter().flat_map(|(id, communicator)| {
            (0_u32..)
                .zip(&communicator.sessions)
                .map(move |(host, session)| (SessionId { communicator: *id, host }, session))
        });
        all.filter(|(_, session)| wanted(session)).map(|(at, _)| at).collect()
    }

    /// Nothing more will come from a host, as `end` has its bridge know where anything could come.
    pub(super) fn ended(&mut self, at: SessionId, end: fn(&mut Bridge, u32)) {
        let Some(communicator) = self.get_mut(at.communicator) else { return };
        let session = &mut communicator.sessions[at.host as usize];
        let is_open = matches!(session.state, State::Open(_) | State::Finishing(..));
        if is_open && std::mem::replace(&mut session.is_reading, false) {
            end(&mut communicator.bridge, at.host);
        }
    }

    /// Takes note if other bridges of a communicator must look.
    pub(super) fn note_calls(&mut self, id: u64) {
        if self.by_id.get_mut(&id).is_some_and(|communicator| communicator.bridge.calls()) {
            self.calls.push(id);
        }
    }

    /// Takes out a communicator that is over.
    pub(super) fn take_if_over(&mut self, id: u64) -> Option<Communicator<Stream>> {
        if !self.by_id.get(&id)?.is_over() {
            return None;
        }
        self.over.push(id);
        self.by_id.remove(&id)
    }

    /// Communicators that are over.
    pub(super) fn over(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.over)
    }

    /// Communicators whose other bridges on this host must look.
    pub(super) fn calls(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.calls)
    }
}
