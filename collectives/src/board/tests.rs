use super::*;

fn op<'a>(site: &'a str, shape: &'a [i64]) -> OpRecord<'a> {
    OpRecord { collective: 0, dtype: 11, reduce_op: 0, root: -1, tag: 7, count: 1024, shape, site }
}

#[test]
fn a_second_mapping_reads_what_the_rank_wrote() {
    let (board, fd) = Board::create(4).unwrap();
    let reader = Board::open(&fd).unwrap();
    let lane = board.rank(2).claim_lane(99, "dp0", 3, 1).unwrap();
    lane.posted(11, &op("train.py:28", &[2, -1]));
    lane.blocked(500);
    let view = reader.read(2);
    assert_eq!(view.pid, std::process::id());
    let [seen] = &view.lanes[..] else { panic!("{view:?}") };
    assert_eq!((seen.comm_id, seen.name.as_str(), seen.size, seen.comm_rank), (99, "dp0", 3, 1));
    assert_eq!((seen.posted, seen.completed, seen.blocked_since_ns), (12, 0, Some(500)));
    let read = seen.op.as_ref().unwrap();
    assert_eq!((read.seq, read.root, read.tag, read.count), (11, -1, 7, 1024));
    assert_eq!((read.shape.as_slice(), read.site.as_str()), (&[2, -1][..], "train.py:28"));
    lane.unblocked();
    lane.completed(11);
    lane.close();
    let seen = reader.read(2).lanes.remove(0);
    assert_eq!((seen.completed, seen.blocked_since_ns, seen.closed), (12, None, true));
    assert_eq!(reader.read(3), RankView::default());
    assert_eq!(reader.read(4), RankView::default());
}

#[test]
fn the_first_collective_counts_and_a_send_does_not() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = board.rank(0).claim_lane(1, "g", 1, 0).unwrap();
    let posted = || board.read(0).lanes[0].posted;
    assert_eq!(posted(), 0);
    lane.posted(0, &OpRecord { collective: 9, ..op("", &[]) });
    assert_eq!(posted(), 0);
    lane.posted(0, &op("", &[]));
    assert_eq!(posted(), 1);
}

#[test]
fn long_texts_keep_the_telling_end_and_whole_characters() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = board.rank(0).claim_lane(1, &"é".repeat(40), 1, 0).unwrap();
    lane.posted(1, &op(&format!("{}/train.py:28", "ü".repeat(100)), &[1; 9]));
    let seen = board.read(0).lanes.remove(0);
    assert_eq!(seen.name, "é".repeat(16));
    let read = seen.op.unwrap();
    assert!(read.site.ends_with("ü/train.py:28") && read.site.len() <= SITE_BYTES, "{}", read.site);
    assert_eq!(read.shape, [1; MAX_DIMS]);
    lane.posted(2, &op("a.py:1", &[]));
    assert_eq!(board.read(0).lanes[0].op.as_ref().unwrap().site, "a.py:1");
}

#[test]
fn lanes_run_out_and_closed_ones_come_back() {
    let (board, _fd) = Board::create(1).unwrap();
    let rank = board.rank(0);
    let mut lanes: Vec<Lane> = (0..LANES as u64).map(|id| rank.claim_lane(id, "g", 1, 0).unwrap()).collect();
    assert!(rank.claim_lane(100, "g", 1, 0).is_none());
    lanes.remove(5).close();
    let again = rank.claim_lane(101, "g", 1, 0).unwrap();
    assert!(rank.claim_lane(102, "g", 1, 0).is_none());
    assert_eq!(board.read(0).lanes[5].comm_id, 101);
    assert_eq!(board.read(0).lanes[5].op, None);
    drop(again);
}

#[test]
fn a_reader_never_sees_half_of_a_record() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = board.rank(0).claim_lane(1, "g", 1, 0).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for seq in 1..20_000 {
                let dim = seq as i64;
                lane.posted(seq, &op(&format!("{seq:040}"), &[dim, dim, dim]));
            }
        });
        while !writer.is_finished() {
            let Some(read) = board.read(0).lanes.remove(0).op else { continue };
            assert_eq!(read.site, format!("{:040}", read.seq));
            assert_eq!(read.shape, [read.seq as i64; 3]);
        }
    });
}

#[test]
fn two_threads_of_a_rank_lose_a_record_but_tear_none() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = &board.rank(0).claim_lane(1, "g", 1, 0).unwrap();
    let write = |start: u64| {
        for seq in (start..20_000).step_by(2) {
            lane.posted(seq, &op(&format!("{seq:040}"), &[seq as i64]));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(move || write(1));
        scope.spawn(move || write(2));
    });
    let seen = board.read(0).lanes.remove(0);
    let read = seen.op.unwrap();
    assert_eq!(seen.posted, 20_000);
    assert_eq!((read.site, read.shape), (format!("{:040}", read.seq), vec![read.seq as i64]));
}

#[test]
fn hostile_bytes_are_clamped() {
    let (board, _fd) = Board::create(2).unwrap();
    for seed in 1..200_u64 {
        let mut random = seed;
        for index in HEADER_WORDS..board.map.words {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            board.map.word(index).store(random >> (random % 64), Relaxed);
        }
        for lane in 0..LANES {
            board.map.word(lane_at(1, lane) + STATE).store(STATE_OPEN, Relaxed);
            board.map.word(lane_at(1, lane) + SIZE_RANK).store(pack(2, seed as u32 % 4), Relaxed);
            board.map.word(lane_at(1, lane) + GENERATION).store(seed, Relaxed);
        }
        for lane in board.read(1).lanes {
            assert!(lane.comm_rank < lane.size);
            assert!(!lane.name.chars().any(char::is_control));
            assert!(lane.op.is_none_or(|op| op.shape.len() <= MAX_DIMS));
        }
    }
}

#[test]
fn what_is_no_board_is_refused() {
    let plain = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    assert!(Board::open(&plain).unwrap_err().to_string().contains("can shrink"));
    rustix::fs::ftruncate(&plain, 4096).unwrap();
    rustix::fs::fcntl_add_seals(&plain, SealFlags::SHRINK).unwrap();
    assert!(Board::open(&plain).unwrap_err().to_string().contains("another layout"));
    let (board, fd) = Board::create(2).unwrap();
    board.map.word(HEADER_WORLD).store(3, Relaxed);
    assert!(Board::open(&fd).unwrap_err().to_string().contains("does not fit"));
    assert!(Board::create(0).unwrap_err().to_string().contains("given 0"));
    assert!(Board::open(std::fs::File::open("/dev/null").unwrap()).is_err());
}
