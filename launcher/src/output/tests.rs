use std::time::{Duration, Instant};

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;
use crate::job::program::{GivenProgram, Programs, Start};

const MS: Duration = Duration::from_millis(1);

/// Drives an [`Output`] by a clock that only the test moves, and collects what it shows.
struct Harness {
    output: Output,
    now: Instant,
    out: Vec<u8>,
    err: Vec<u8>,
}

fn config(ranks: u32) -> OutputConfig {
    OutputConfig {
        ranks,
        labels: Labels::default(),
        prefix: true,
        only: (0..ranks).collect(),
        reader: 0,
        fold: true,
        victims: None,
        log_dir: None,
        color: false,
        terminal: false,
    }
}

impl Harness {
    fn new(config: OutputConfig) -> Self {
        Self { output: Output::new(config), now: Instant::now(), out: Vec::new(), err: Vec::new() }
    }

    fn feed(&mut self, rank: u32, text: &str) -> &mut Self {
        self.feed_bytes(rank, Stream::Out, text.as_bytes())
    }

    fn feed_bytes(&mut self, rank: u32, stream: Stream, bytes: &[u8]) -> &mut Self {
        self.output.feed(rank, stream, bytes, self.now);
        self.drain()
    }

    /// Lets time pass, waking the output exactly when it asks for it.
    fn wait(&mut self, time: Duration) -> &mut Self {
        let end = self.now + time;
        while let Some(at) = self.output.poll_deadline().filter(|&at| at <= end) {
            self.now = self.now.max(at);
            self.output.tick(self.now);
            let is_stuck = self.output.poll_deadline().is_some_and(|next| next <= self.now);
            assert!(!is_stuck, "a tick at the deadline must move the deadline");
        }
        self.now = end;
        self.drain()
    }

    fn finish(&mut self) -> &mut Self {
        for rank in 0..u32::try_from(self.output.sources.len()).unwrap() {
            self.output.finish(rank, self.now);
        }
        assert_eq!(self.output.poll_deadline(), None, "nothing may be held after the end");
        self.drain()
    }

    fn drain(&mut self) -> &mut Self {
        self.output.drain(&mut self.out, &mut self.err).unwrap();
        self
    }

    /// Compares the text on stdout, behind a margin that keeps the alignment, with escapes made visible.
    fn shows(&self, expected: Expect) {
        let text = String::from_utf8_lossy(&self.out).replace('\x1b', "<ESC>").replace('\r', "<CR>");
        expected.assert_eq(&text.split_inclusive('\n').map(|line| format!(">{line}")).collect::<String>());
    }
}

#[test]
fn lines_say_whose_they_are() {
    let mut h = Harness::new(config(12));
    h.feed(3, "loss 2").feed(11, "hello\n").feed(3, ".5\n").wait(50 * MS);
    h.shows(expect![[r#"
        >  11| hello
        >   3| loss 2.5
    "#]]);
}

#[test]
fn identical_lines_of_all_ranks_are_one_line_at_once() {
    let mut h = Harness::new(config(64));
    for rank in 0..64 {
        h.feed(rank, "ready\n");
    }
    h.shows(expect![[r#"
        >0-63| ready
    "#]]);
}

#[test]
fn lines_of_several_programs_say_which_one() {
    let program = |role: &str, ranks| GivenProgram {
        role: Some(role.into()),
        ranks: Some(ranks),
        words: vec!["true".into()],
        ..GivenProgram::default()
    };
    let programs = Programs::new(vec![program("eval", 1), program("train", 7)], Start::Spawn).unwrap();
    let mut h = Harness::new(OutputConfig { labels: Labels::new(&programs), ..config(8) });
    for rank in 0..8 {
        h.feed(rank, "ready\n").feed(rank, if rank == 0 { "score 1\n" } else { "loss 2.5\n" });
    }
    h.feed(3, "odd\n").wait(50 * MS);
    // A line that both programs write is labelled with neither of them.
    h.shows(expect![[r#"
        >      0-7| ready
        >   eval 0| score 1
        >train 1-7| loss 2.5
        >  train 3| odd
    "#]]);
}

#[test]
fn a_rank_that_differs_stays_apart_and_in_order() {
    let mut h = Harness::new(config(8));
    for rank in 0..8 {
        h.feed(rank, "start\n");
        h.feed(rank, if rank == 2 { "loss nan\n" } else { "loss 2.5\n" });
        h.feed(rank, "end\n");
    }
    h.wait(50 * MS);
    h.shows(expect![[r#"
        >0-7| start
        >0-1,3-7| loss 2.5
        >0-1,3-7| end
        >  2| loss nan
        >  2| end
    "#]]);
}

#[test]
fn a_line_of_the_same_text_later_is_another_line() {
    let mut h = Harness::new(config(2));
    h.feed(0, "step\nstep\n").wait(10 * MS).feed(1, "step\n").wait(50 * MS).feed(1, "step\n").wait(50 * MS);
    h.shows(expect![[r#"
        >0-1| step
        >  0| step
        >  1| step
    "#]]);
}

#[test]
fn ranks_that_end_are_not_waited_for() {
    let mut h = Harness::new(config(3));
    h.feed(0, "bye\n");
    h.output.finish(0, h.now);
    h.feed(1, "bye\n");
    h.output.finish(1, h.now);
    h.drain().shows(expect![[""]]);
    h.feed(2, "bye");
    h.output.finish(2, h.now);
    h.drain().shows(expect![[r#"
        >0-2| bye
    "#]]);
}

#[test]
fn a_long_list_of_ranks_is_cut_short() {
    let mut h = Harness::new(config(64));
    for rank in (0..64).step_by(2) {
        h.feed(rank, "even\n");
    }
    h.wait(50 * MS).shows(expect![[r#"
        >0,2,4,6,8,10,12,+25| even
    "#]]);
}

#[test]
fn streams_are_kept_apart() {
    let mut h = Harness::new(config(2));
    h.feed_bytes(0, Stream::Out, b"result\n").feed_bytes(1, Stream::Err, b"result\n").wait(50 * MS);
    h.shows(expect![[r#"
        >  0| result
    "#]]);
    assert_eq!(h.err, b"  1| result\n");
}

#[test]
fn only_some_ranks_are_shown_and_all_are_logged() {
    let dir = tempfile::tempdir().unwrap();
    let log_dir = Some(dir.path().to_path_buf());
    let mut h = Harness::new(OutputConfig { only: [1].into_iter().collect(), log_dir, ..config(3) });
    h.feed(0, "\r10%\r20%\n").feed(1, "shown\n").feed_bytes(0, Stream::Err, b"no newline").finish();
    h.shows(expect![[r#"
        >  1| shown
    "#]]);
    let log = |rank: u32| std::fs::read(dir.path().join(format!("rank-{rank:04}.log")));
    assert_eq!(log(0).unwrap(), b"\r10%\r20%\nno newline");
    assert_eq!(log(1).unwrap(), b"shown\n");
    assert!(log(2).is_err(), "a rank that wrote nothing has no file");
    assert!(h.output.log_error().is_none());
    assert_eq!(h.output.last_line(0), Some("no newline"));
    assert_eq!(h.output.last_line(2), None);
}

#[test]
fn one_rank_alone_passes_through() {
    let mut h = Harness::new(OutputConfig { terminal: true, ..config(1) });
    h.feed(0, "name? ").feed(0, "\r10%").feed_bytes(0, Stream::Err, b"\xff\n").finish();
    h.shows(expect![">name? <CR>10%"]);
    assert_eq!(h.err, b"\xff\n");
}

#[test]
fn without_prefix_lines_still_do_not_tear() {
    let mut h = Harness::new(OutputConfig { prefix: false, ..config(2) });
    h.feed(0, "one ").feed(1, "two\n").feed(0, "line\n").feed(1, "one line\n");
    h.shows(expect![[r#"
        >two
        >one line
        >one line
    "#]]);
}

#[test]
fn in_a_file_a_bar_is_its_last_state() {
    let mut h = Harness::new(config(2));
    for percent in 0..=100 {
        h.feed(1, &format!("\r{percent}%")).wait(20 * MS);
    }
    h.feed(1, "\ndone\n").wait(50 * MS);
    h.shows(expect![[r#"
        >  1| 100%
        >  1| done
    "#]]);
}

#[test]
fn on_a_terminal_a_bar_moves_in_place_and_makes_way_for_lines() {
    let mut h = Harness::new(OutputConfig { terminal: true, ..config(2) });
    h.feed(0, "\r1%").wait(10 * MS).feed(0, "\r2%").wait(10 * MS).feed(0, "\r3%").wait(100 * MS);
    h.feed(1, "hello\n").wait(100 * MS).feed(0, "\r100%\n").wait(50 * MS);
    h.shows(expect![[r#"
        ><ESC>[?7l  0| 1%<ESC>[?7h<CR><ESC>[2K<ESC>[?7l  0| 3%<ESC>[?7h<CR><ESC>[2K  1| hello
        ><ESC>[?7l  0| 3%<ESC>[?7h<CR><ESC>[2K  0| 100%
    "#]]);
}

#[test]
fn the_bar_of_one_rank_is_drawn_at_most_ten_times_a_second() {
    let mut h = Harness::new(OutputConfig { terminal: true, ..config(8) });
    for step in 0..1000 {
        for rank in 0..8 {
            h.feed(rank, &format!("\rstep {step}"));
        }
        h.wait(MS);
    }
    h.finish();
    let text = String::from_utf8(h.out).unwrap();
    let draws = text.matches("\x1b[?7l").count();
    assert!((9..=11).contains(&draws), "{draws} draws in one second");
    assert!(text.ends_with("0-7| step 999\n"));
}

#[test]
fn a_prompt_of_rank_0_shows_on_a_terminal() {
    let mut h = Harness::new(OutputConfig { terminal: true, ..config(4) });
    h.feed(0, "name? ").feed(1, "name? ").wait(199 * MS).shows(expect![""]);
    h.wait(MS).shows(expect![">  0| name? "]);
    h.feed(0, "hello\n").wait(50 * MS).feed(0, "again? ").wait(200 * MS);
    h.feed(2, "noise\n").wait(50 * MS).feed(0, "yes\n").feed(1, "\n").wait(50 * MS);
    h.shows(expect![[r#"
        >  0| name? hello
        >  0| again? 
        >  2| noise
        >  0| yes
        >  1| name? 
    "#]]);
}

#[test]
fn a_note_of_the_launcher_leaves_the_bar_whole() {
    let mut h = Harness::new(OutputConfig { terminal: true, ..config(2) });
    h.feed(0, "\r1%").wait(10 * MS);
    h.output.note("tpurun: stopping");
    h.wait(200 * MS).feed(0, "\r2%\n").wait(50 * MS);
    h.shows(expect![[r#"
        ><ESC>[?7l  0| 1%<ESC>[?7h<CR><ESC>[2K<ESC>[?7l  0| 1%<ESC>[?7h<CR><ESC>[2K  0| 2%
    "#]]);
}

#[test]
fn a_shown_prompt_that_goes_on_is_not_repeated() {
    let mut h = Harness::new(OutputConfig { terminal: true, ..config(4) });
    h.feed(0, "loading").wait(200 * MS).feed(0, " ...").wait(200 * MS).feed(0, " done\n").wait(50 * MS);
    h.shows(expect![[r#"
        >  0| loading ... done
    "#]]);
}

#[test]
fn colors_mark_ranks_and_end_what_a_line_left_open() {
    let mut h = Harness::new(OutputConfig { color: true, ..config(2) });
    h.feed(0, "a\n").feed(1, "\x1b[31mb\n").feed(0, "c\n").feed(1, "c\n").wait(50 * MS);
    h.shows(expect![[r#"
        ><ESC>[0;36m  0|<ESC>[0m a
        ><ESC>[0;33m  1|<ESC>[0m <ESC>[31mb
        ><ESC>[0;1m0-1|<ESC>[0m c
    "#]]);
}

#[test]
fn memory_is_bounded_whatever_ranks_write() {
    let mut h = Harness::new(OutputConfig { terminal: true, ..config(4) });
    // No newline, no time passing: everything beyond the bounds must be on its way out.
    let endless = vec![b'x'; 1024 * 1024];
    for rank in 0..4 {
        for _ in 0..4 {
            h.feed_bytes(rank, Stream::Out, &endless);
        }
    }
    let marked = String::from_utf8_lossy(&h.out).matches(" [continues]\n").count();
    assert_eq!(marked, 4 * (4 * 1024 / 64 - 1), "all but the last piece of each rank");

    h.out.clear();
    let mut fed = 0;
    for line in 0..100_000 {
        let text = format!("line {line} {}\n", "y".repeat(100));
        fed += text.len();
        h.feed(0, &text);
    }
    let held = fed - h.out.iter().filter(|&&b| b == b'y').count();
    assert!(held < 2 * 1024 * 1024, "{held} bytes held of {fed}");
}

#[test]
fn a_closed_pipe_does_not_stop_the_other_stream() {
    let mut output = Output::new(config(2));
    let now = Instant::now();
    for stream in [Stream::Out, Stream::Err] {
        output.feed(0, stream, b"text\n", now);
    }
    output.tick(now + 50 * MS);
    let mut closed: &mut [u8] = &mut [];
    let mut err = Vec::new();
    assert!(output.drain(&mut closed, &mut err).is_err());
    assert_eq!(err, b"  0| text\n");
}

/// One thing that happens to the output.
#[derive(Debug, Clone)]
enum Event {
    Feed { rank: u32, stream: Stream, bytes: Vec<u8> },
    Wait(u8),
}

const RANKS: u32 = 5;

fn events() -> impl Strategy<Value = Vec<Event>> {
    // A small alphabet, so that ranks repeat one another; bytes that are not UTF-8; many newlines.
    let byte = prop_oneof![Just(b'\n'), Just(b'a'), Just(b'|'), Just(b' '), Just(0xff)];
    let stream = prop_oneof![Just(Stream::Out), Just(Stream::Err)];
    let feed = (0..RANKS, stream, prop::collection::vec(byte, 1..8))
        .prop_map(|(rank, stream, bytes)| Event::Feed { rank, stream, bytes });
    prop::collection::vec(prop_oneof![5 => feed, 1 => (0..250u8).prop_map(Event::Wait)], 0..80)
}

fn run(events: &[Event], config: OutputConfig) -> Harness {
    let mut h = Harness::new(config);
    for event in events {
        match event {
            Event::Feed { rank, stream, bytes } => h.feed_bytes(*rank, *stream, bytes),
            Event::Wait(ms) => h.wait(u32::from(*ms) * MS),
        };
    }
    h.finish();
    h
}

fn written(events: &[Event], of_rank: u32, to: Stream) -> Vec<u8> {
    let mut all = Vec::new();
    for event in events {
        if let Event::Feed { rank, stream, bytes } = event
            && (*rank, *stream) == (of_rank, to)
        {
            all.extend_from_slice(bytes);
        }
    }
    all
}

/// The lines of each rank, read back from what was shown. Fails on a line without an owner.
fn read_back(shown: &[u8]) -> Vec<Vec<Vec<u8>>> {
    let mut lines_of = vec![Vec::new(); RANKS as usize];
    let Some(shown) = shown.strip_suffix(b"\n") else {
        assert!(shown.is_empty(), "the last line is not complete");
        return lines_of;
    };
    for line in shown.split(|&b| b == b'\n') {
        let bar = line.iter().position(|&b| b == b'|').expect("every line has a prefix");
        let label = std::str::from_utf8(&line[..bar]).expect("a prefix is text").trim_start();
        let text = line[bar + 1..].strip_prefix(b" ").expect("a space follows the prefix");
        for range in label.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let range = first.parse::<usize>().unwrap()..=last.parse::<usize>().unwrap();
            for lines in &mut lines_of[range] {
                lines.push(text.to_vec());
            }
        }
    }
    lines_of
}

proptest! {
    #[test]
    fn no_line_is_lost_torn_or_reordered(events in events(), fold: bool) {
        let h = run(&events, OutputConfig { fold, ..config(RANKS) });
        for (stream, shown) in [(Stream::Out, &h.out), (Stream::Err, &h.err)] {
            for (rank, lines) in read_back(shown).iter().enumerate() {
                let mut bytes = written(&events, u32::try_from(rank).unwrap(), stream);
                if bytes.last().is_some_and(|&last| last != b'\n') {
                    bytes.push(b'\n');
                }
                let shown: Vec<u8> = lines.iter().flat_map(|line| [line, &b"\n"[..]].concat()).collect();
                prop_assert_eq!(shown, bytes);
            }
        }
    }

    /// A prompt may be cut from the rest of its line by others, but nothing is lost or reordered.
    #[test]
    fn prompts_lose_no_byte(mut events in events()) {
        for event in &mut events {
            if let Event::Feed { stream, .. } = event {
                *stream = Stream::Out;
            }
        }
        let h = run(&events, OutputConfig { terminal: true, ..config(RANKS) });
        for (rank, lines) in read_back(&h.out).iter().enumerate() {
            let mut bytes = written(&events, u32::try_from(rank).unwrap(), Stream::Out);
            bytes.retain(|&b| b != b'\n');
            prop_assert_eq!(lines.concat(), bytes);
        }
    }
}

const LOST: &str = "Traceback (most recent call last):\n  File \"x.py\", line 3, in <module>\n    all_reduce(x)\n\
                    tpurun.errors.RankLostError: rank 3 is gone\n  last output: step 9\n";

/// Ranks 0 to 2 have left word of the same error.
fn with_victims() -> Harness {
    let find = |rank| {
        (rank < 3).then(|| Victim {
            is_interrupt: false,
            traceback: LOST.into(),
            summary: "RankLostError: gone".into(),
        })
    };
    Harness::new(OutputConfig { victims: Some(VictimLookup::new(find)), ..config(4) })
}

fn printed_by(rank: u32, text: &str) -> String {
    let underlined = text.replace("(x)\n", "(x)\n    ~~~~^^^\n");
    underlined.lines().map(|line| format!("[rank{rank}]: {line}\n")).collect()
}

#[test]
fn a_traceback_that_echoes_another_ranks_failure_is_one_line() {
    let mut h = with_victims();
    for rank in [2, 0, 1, 3] {
        h.feed_bytes(rank, Stream::Err, printed_by(rank, LOST).as_bytes()).wait(100 * MS);
    }
    assert!(!String::from_utf8_lossy(&h.err).contains("0-2|"), "others may still come");
    h.wait(1000 * MS).finish();
    let shown = String::from_utf8_lossy(&h.err);
    assert_eq!(shown.matches("0-2| RankLostError: gone\n").count(), 1, "{shown}");
    // The culprit's own is complete.
    assert_eq!(shown.lines().count(), 1 + LOST.lines().count() + 1, "{shown}");
}

#[test]
fn what_only_begins_like_a_victims_traceback_is_shown() {
    let mut h = with_victims();
    let other = LOST.replace("all_reduce", "broadcast");
    h.feed_bytes(0, Stream::Err, other.as_bytes()).feed(1, LOST).wait(1000 * MS);
    h.feed_bytes(2, Stream::Err, LOST.split_inclusive('\n').take(2).collect::<String>().as_bytes()).finish();
    let (shown, out) = (String::from_utf8_lossy(&h.err), String::from_utf8_lossy(&h.out));
    assert!(!shown.contains("RankLostError: gone\n"), "{shown}");
    assert_eq!(shown.lines().filter(|line| line.starts_with("  0|")).count(), LOST.lines().count());
    assert_eq!(shown.lines().filter(|line| line.starts_with("  2|")).count(), 2, "{shown}");
    assert_eq!(out.lines().count(), LOST.lines().count(), "stdout is the program's: {out}");
}
