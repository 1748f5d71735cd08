//! Offsets of the words of a segment, within its header, the record of a member, and the failure.

use crate::layout::{EXPORTS_END, MEMBER_BYTES};
use crate::tuning::Tuning;

use super::header::{HEADER_BYTES, Nonce};

// Header words.
pub(super) const H_MAGIC: usize = 0;
pub(super) const H_VERSION: usize = 8;
pub(super) const H_RANKS: usize = 12;
pub(super) const H_WINDOW: usize = 16;
pub(super) const H_CPUS: usize = 24;
pub(super) const H_STRICT: usize = 28;
pub(super) const H_VERIFY: usize = 32;
pub(super) const H_EPOCH: usize = 36;
pub(super) const H_ATTACHED: usize = 64;
pub(super) const H_NAME_BYTES: usize = 128;
pub(super) const H_NAME: usize = 136;
pub(super) const NAME_BYTES: usize = 512;
pub(super) const H_DEPARTURES: usize = 704;
// Where ranks are on several hosts.
pub(super) const H_LOCAL: usize = 768;
pub(super) const H_RUNG: usize = 832;
pub(super) const H_BELL_PID: usize = 836;
pub(super) const H_BELL: usize = 840;
pub(super) const H_MOVES: usize = 896;
pub(super) const H_DECIDED: usize = 960;
pub(super) const H_READY: usize = 1024;
pub(super) const H_STAGED: usize = 1088;
/// The numbers of [`Tuning`], in order.
pub(crate) const H_TUNING: usize = 1152;
pub(super) const TUNING_END: usize = H_TUNING + Tuning::COUNT * 8;
pub(super) const H_HOSTS: usize = 40;
pub(super) const H_NONCE: usize = 48;
const _: () = assert!(H_NONCE + size_of::<Nonce>() <= HEADER_BYTES);
// Member words.
pub(super) const M_PID: usize = 0;
pub(super) const M_START: usize = 8;
pub(super) const M_WORLD_RANK: usize = 16;
pub(super) const M_CLOSED: usize = 20;
pub(super) const M_ARRIVED: usize = 24;
pub(super) const M_LOST: usize = 32;
pub(super) const M_DOORBELL: usize = 64;
/// A writer of the failure that is none of the ranks.
pub(super) const OUTSIDER: u32 = u32::MAX >> 2;
pub(super) const M_POSTED: usize = 128;
pub(super) const M_LEFT: usize = 136;
pub(super) const M_HANDS: usize = 144;
pub(super) const M_WISH: usize = 192;
pub(super) const M_OFFER: usize = 200;
/// Behind what there is of the rank's arenas; one of each parity.
pub(super) const M_PLACE: usize = 320;
pub(super) const PLACE_BYTES: usize = 24;
const _: () = assert!(EXPORTS_END <= M_PLACE && M_PLACE + 2 * PLACE_BYTES <= MEMBER_BYTES);
// Failure words, behind the word of its publication.
pub(super) const F_KIND: usize = 4;
pub(super) const F_BYTES: usize = 8;
pub(super) const F_TEXT: usize = 64;
