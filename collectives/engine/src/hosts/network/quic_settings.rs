//! The settings of QUIC connections, with the limits that each side keeps the other one to.

use quinn_proto::{MtuDiscoveryConfig, TransportConfig, VarInt};

use super::timeouts::SILENCE;

/// Streams that a process may open to another before some have ended. Each takes 80 bytes at once, used or not.
pub(super) const MOST_STREAMS: u32 = 4096;
/// The same limit before TLS has shown who the other process is.
pub(super) const MOST_STREAMS_BEFORE: u32 = 16;
/// Bytes that one host may have on the way to another in one communicator.
const STREAM_WINDOW: u32 = 4 << 20;
/// Bytes of the largest datagram, as an Ethernet frame of 9000 bytes holds it. QUIC finds out whether the way allows
/// so many.
pub(super) const MOST_DATAGRAM: u16 = 8_952;

/// The settings of a connection on which the other side may have so many streams at a time.
pub(super) fn transport(streams: u32) -> TransportConfig {
    let mut discovery = MtuDiscoveryConfig::default();
    // The search goes on almost to the byte. Otherwise it may end 20 bytes below what fits, 1.5 % of a packet of 1500.
    discovery.upper_bound(MOST_DATAGRAM).minimum_change(2);
    let mut transport = TransportConfig::default();
    transport
        .mtu_discovery_config(Some(discovery))
        .max_idle_timeout(Some(SILENCE.try_into().expect("it is short")))
        .keep_alive_interval(Some(SILENCE / 4))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .receive_window(VarInt::from_u32(STREAM_WINDOW))
        .send_window(u64::from(2 * STREAM_WINDOW))
        .max_concurrent_bidi_streams(VarInt::from_u32(streams))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None);
    transport
}
