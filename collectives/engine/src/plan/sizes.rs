//! Into which pieces the work of an operation is cut, and how large windows are.

use tpurun_protocol::layout::PLACES;
use tpurun_protocol::tuning::Tuning;

/// Pieces of a pipeline that are on their way where one is taken while another one is folded; as many are whole. With
/// fewer of them, or smaller ones, cores wait for each other; the last ones are taken alone.
pub(crate) const BEHIND: usize = 4;

/// When a rank takes a piece of a pipeline.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taking {
    /// At once: that frees its place, and it is in the caches.
    AtOnce,
    /// Past the caches, while it folds the piece [`BEHIND`] later, which is begun once that one is whole.
    WhileFolding,
}

/// The operation that goes through a pipeline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow {
    pub(crate) ranks: usize,
    /// Those that ranks run on, at most one for each.
    pub(crate) cores: usize,
    /// Bytes of all its partial results.
    pub(crate) bytes: usize,
    /// Its operands are more than caches keep.
    pub(crate) outgrows_caches: bool,
}

/// How it is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PipelinePieces {
    pub(crate) taking: Taking,
    /// Pieces that there is room for at a time.
    pub(crate) places: usize,
    /// Bytes of a piece at most.
    pub(crate) bytes: usize,
    /// Ranks between a piece and a rank at which that rank begins to look for it.
    pub(crate) near: u32,
    /// Results that are not taken yet stay in the caches.
    pub(crate) is_kept: bool,
}

impl PipelinePieces {
    /// The pieces of what goes through `room` bytes of memory.
    pub(crate) fn of(flow: Flow, room: usize, tuning: &Tuning) -> Self {
        let Flow { ranks, cores, bytes, outgrows_caches } = flow;
        let ranks_on_core = ranks / cores;
        let long = tuning.pipeline_long_piece;
        let is_long =
            outgrows_caches && bytes >= 2 * BEHIND * long && ranks_on_core >= tuning.pipeline_long_ranks;
        let taking = if is_long { Taking::WhileFolding } else { Taking::AtOnce };
        let (places, most, awake) = match taking {
            Taking::AtOnce => {
                let each = tuning.pipeline_pieces;
                let places = (each * cores).clamp(2 * each, PLACES);
                let (most, awake) = in_turn(ranks_on_core, tuning);
                (places, most, awake)
            }
            Taking::WhileFolding => (2 * BEHIND, long, 1),
        };
        let bytes = (bytes / places).max(tuning.pipeline_piece_least).min(most).min(room / places);
        let is_kept = taking == Taking::AtOnce && ranks * places * bytes <= tuning.pipeline_kept_bytes;
        Self { taking, places, bytes, near: awake * cores as u32, is_kept }
    }
}

/// Bytes of a piece that is taken at once, and ranks for each core that are awake before it comes to them. The more
/// ranks share a core, the more each does in its turn, and the fewer look for a piece while others could fold one.
fn in_turn(ranks_on_core: usize, tuning: &Tuning) -> (usize, u32) {
    if ranks_on_core < 2 {
        (tuning.pipeline_piece_alone, 4)
    } else if ranks_on_core < tuning.pipeline_piece_ranks {
        (tuning.pipeline_piece, 4)
    } else {
        (tuning.pipeline_piece_many, 1)
    }
}

/// Pieces of the work of a meeting that are worth waking a helper for: a wake-up costs some microseconds, as does
/// folding `help_bytes`.
pub(crate) fn helped_pieces(work: usize, cpus: u32, ranks: u32, tuning: &Tuning) -> u32 {
    let each = tuning.help_bytes;
    if cpus < 2 || ranks < 2 || work < 4 * each {
        return 1;
    }
    (work / (2 * each)).clamp(2, 64) as u32
}

/// Bytes of each rank's window: its share of `staging_bytes`, if the user gives it, which is for two windows.
pub(crate) fn window_bytes(staging_bytes: Option<usize>, ranks: u32, tuning: &Tuning) -> usize {
    const LEAST_GIVEN: usize = 16 << 10;
    let ranks = ranks as usize;
    let most = tuning.window_most;
    let bytes = match staging_bytes {
        None => (tuning.windows_bytes / ranks).clamp(tuning.window_least, most),
        Some(bytes) => (bytes / (2 * ranks)).clamp(LEAST_GIVEN, most),
    };
    // Every peer needs a cache line, for the collectives that address each of them.
    bytes.max(64 * ranks)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pieces_of_a_pipeline() {
        let room = 64 << 20;
        let pieces = |ranks, cores, bytes, outgrows_caches| {
            let flow = Flow { ranks, cores, bytes, outgrows_caches };
            let found = PipelinePieces::of(flow, room, &Tuning::default());
            (found.taking, found.places, found.bytes >> 10, found.near, found.is_kept)
        };
        for (ranks, cores, bytes, outgrows, expected) in [
            // Few bytes are cut into as many pieces as there are places.
            (8, 2, 1 << 20, false, (Taking::AtOnce, 4, 256, 8, true)),
            (8, 2, 512 << 10, false, (Taking::AtOnce, 4, 128, 8, true)),
            (8, 2, 16 << 10, false, (Taking::AtOnce, 4, 64, 8, true)),
            // The more ranks share a core, the more each does in its turn.
            (3, 2, 16 << 20, false, (Taking::AtOnce, 4, 128, 8, true)),
            (31, 2, 16 << 20, false, (Taking::AtOnce, 4, 256, 8, false)),
            (32, 2, 16 << 20, false, (Taking::AtOnce, 4, 512, 2, false)),
            (64, 16, 16 << 20, false, (Taking::AtOnce, PLACES.min(32), 256, 64, false)),
            // A tensor that outgrows the caches is taken while the next one is folded, if ranks take turns.
            (8, 2, 16 << 20, true, (Taking::WhileFolding, 8, 512, 2, false)),
            (7, 2, 16 << 20, true, (Taking::AtOnce, 4, 256, 8, true)),
            (8, 2, (4 << 20) - 1, true, (Taking::AtOnce, 4, 256, 8, true)),
        ] {
            assert_eq!(pieces(ranks, cores, bytes, outgrows), expected, "{ranks} {cores} {bytes} {outgrows}");
        }
        let flow = Flow { ranks: 8, cores: 2, bytes: 1 << 20, outgrows_caches: false };
        assert_eq!(PipelinePieces::of(flow, 64 << 10, &Tuning::default()).bytes, 16 << 10);
    }

    #[test]
    fn pieces_worth_a_helper() {
        let pieces = |work, cpus, ranks| helped_pieces(work, cpus, ranks, &Tuning::default());
        assert_eq!([pieces(1 << 30, 1, 8), pieces(1 << 30, 8, 1), pieces((256 << 10) - 1, 2, 2)], [1; 3]);
        assert_eq!([pieces(256 << 10, 2, 2), pieces(1 << 20, 2, 2), pieces(1 << 30, 2, 2)], [2, 8, 64]);
    }

    #[test]
    fn windows_share_what_there_is() {
        let bytes = |given, ranks| window_bytes(given, ranks, &Tuning::default());
        assert_eq!([bytes(None, 1), bytes(None, 128), bytes(None, 256)], [512 << 10, 512 << 10, 256 << 10]);
        assert_eq!([bytes(None, 4096), bytes(Some(256 << 10), 2)], [256 << 10, 64 << 10]);
        assert_eq!([bytes(Some(256 << 10), 64), bytes(Some(4 << 30), 2)], [16 << 10, 512 << 10]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Pieces fit where they go, whatever a file says.
        #[test]
        fn pieces_fit(
            (ranks, cores) in (1usize..4096, 1usize..256).prop_map(|(ranks, cores)| (ranks, cores.min(ranks))),
            bytes in 1usize..1 << 40,
            room in (128usize << 10)..1 << 30,
            outgrows_caches in any::<bool>(),
            numbers in prop::array::uniform4(0usize..16),
        ) {
            let tuning = Tuning {
                pipeline_piece: (4 << 10) << (numbers[0] % 14),
                pipeline_piece_many: (4 << 10) << (numbers[1] % 14),
                pipeline_pieces: numbers[2] + 1,
                pipeline_piece_least: (4 << 10) << (numbers[3] % 14),
                ..Tuning::default()
            };
            let pieces = PipelinePieces::of(Flow { ranks, cores, bytes, outgrows_caches }, room, &tuning);
            prop_assert!((2..=PLACES).contains(&pieces.places), "{pieces:?}");
            prop_assert!(pieces.bytes >= 1 && pieces.bytes * pieces.places <= room, "{pieces:?}");
        }
    }
}
