//! Between the ranks of a host: one byte ring per channel and ordered pair, in the communicator's segment.

use super::{Sending, Transport};
use crate::execute::execution::Delivery;
use tpurun_memory::sync::Ring;
use tpurun_protocol::layout::P2P_CHANNEL;
use tpurun_protocol::segment::Segment;
use tpurun_protocol::wire::{HEADER_BYTES, Header};

/// This rank's ends of the rings that schedules use.
#[derive(Debug)]
pub(crate) struct ShmTransport<'a> {
    segment: &'a Segment,
    channels: u32,
    /// The ring a search for segments begins with, so that none waits for ever behind a busy one.
    next: u32,
    /// A segment as it came out of a ring, which may wrap around.
    staging: Vec<u8>,
    /// A value that a peer wrote and that can not be: the execution can not go on.
    corrupt: Option<(u32, String)>,
}

impl<'a> ShmTransport<'a> {
    /// For a schedule of so many channels.
    pub(crate) fn new(segment: &'a Segment, channels: usize) -> Self {
        let channels = u32::try_from(channels).unwrap_or(u32::MAX);
        assert!(
            channels <= P2P_CHANNEL,
            "a schedule has {channels} channels, expected at most {P2P_CHANNEL}"
        );
        Self { segment, channels, next: 0, staging: Vec::new(), corrupt: None }
    }

    /// Most bytes of a segment's payload: two fit a ring, so that one is filled while the other is drained.
    pub(crate) fn segment_bytes(segment: &Segment) -> usize {
        segment.layout().ring_bytes() as usize / 2 - HEADER_BYTES
    }

    /// The first nonsense a peer wrote, and who.
    pub(crate) fn corrupt(&mut self) -> Option<(u32, String)> {
        self.corrupt.take()
    }

    fn ring(&self, channel: u32, from: u32, to: u32) -> (Ring<'a>, usize) {
        (self.segment.rings().ring(channel, from, to), self.segment.layout().ring_data(channel, from, to))
    }

    /// Reads the segment at the front of a ring into `staging`.
    fn front(&mut self, channel: u32, from: u32) -> Result<Option<Header>, String> {
        let (ring, data) = self.ring(channel, from, self.segment.rank());
        let run = ring.readable().map_err(|error| error.to_string())?;
        if (run.bytes as usize) < HEADER_BYTES {
            return Ok(None);
        }
        let mut bytes = [0; HEADER_BYTES];
        self.segment.rings().read_run(data, run, &mut bytes);
        let header = Header::decode(&bytes).map_err(|error| error.to_string())?;
        let rest = run.after(HEADER_BYTES as u32);
        if header.bytes > rest.bytes {
            // A segment is published whole, with its header.
            return Err(format!("a segment of {} bytes has {} in its ring", header.bytes, rest.bytes));
        }
        self.staging.resize(header.bytes as usize, 0);
        self.segment.rings().read_run(data, rest, &mut self.staging);
        Ok(Some(header))
    }
}

impl Transport for ShmTransport<'_> {
    fn try_send(&mut self, to: u32, header: &Header, payload: &[u8]) -> Sending {
        let me = self.segment.rank();
        let (ring, data) = self.ring(header.channel, me, to);
        let run = match ring.writable() {
            Ok(run) => run,
            Err(error) => {
                self.corrupt.get_or_insert((to, error.to_string()));
                return Sending::Lost;
            }
        };
        let bytes = (HEADER_BYTES + payload.len()) as u32;
        if run.bytes < bytes {
            return Sending::Full;
        }
        self.segment.rings().write_run(data, run, &header.encode());
        self.segment.rings().write_run(data, run.after(HEADER_BYTES as u32), payload);
        ring.publish(bytes);
        self.segment.rings().notify(to);
        Sending::Sent
    }

    fn try_receive(&mut self, deliver: &mut dyn FnMut(u32, &Header, &[u8]) -> Delivery) -> bool {
        let rings = self.channels * self.segment.size();
        for step in 0..rings {
            let index = (self.next + step) % rings;
            let (channel, from) = (index % self.channels, index / self.channels);
            let header = match self.front(channel, from) {
                Ok(Some(header)) => header,
                Ok(None) => continue,
                Err(what) => {
                    self.corrupt.get_or_insert((from, what));
                    continue;
                }
            };
            if deliver(from, &header, &self.staging) == Delivery::Taken {
                let (ring, _) = self.ring(channel, from, self.segment.rank());
                ring.consume((HEADER_BYTES + self.staging.len()) as u32);
                self.segment.rings().notify(from);
                self.next = (index + 1) % rings;
                return true;
            }
        }
        false
    }
}
