//! Reads what a rank wrote about its stacks: a header of ours, then what Python's faulthandler prints.
//!
//! The program may have written anything there. A line that is not understood is skipped, every text is cut
//! and cleaned, and there is a bound on everything that is kept.

/// The header that a rank writes when it can be asked for the first time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StacksHeader {
    /// Number of the descriptor that it writes to.
    pub(crate) fd: i32,
    /// The number that Python gives its main thread.
    pub(crate) main: u64,
    /// The folder of torch; empty without one.
    pub(crate) torch: String,
}

/// One answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dump {
    /// Whether the thread that answered held the interpreter's lock; None when nobody could tell.
    pub(crate) holds_gil: Option<bool>,
    pub(crate) threads: Vec<Thread>,
    /// The answer breaks off: a frame could not be read, because it was just being made.
    pub(crate) is_cut: bool,
}

/// The stack of one thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Thread {
    pub(crate) id: u64,
    /// It is the one that answered.
    pub(crate) is_current: bool,
    /// Innermost first.
    pub(crate) frames: Vec<StackFrame>,
}

/// One line of a stack.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StackFrame {
    pub(crate) file: String,
    /// 0 when Python does not know it.
    pub(crate) line: u32,
    pub(crate) function: String,
}

impl Dump {
    /// The stack of the main thread, which is also the one that answers if it can.
    pub(crate) fn main(&self, header: Option<&StacksHeader>) -> Option<&Thread> {
        let is_main = |thread: &&Thread| header.is_some_and(|header| thread.id == header.main);
        let mut threads = self.threads.iter();
        threads.clone().find(is_main).or_else(|| threads.find(|thread| thread.is_current))
    }
}

/// The last header of a file that process `pid` wrote: one of an earlier process is none.
pub(crate) fn header(text: &str, pid: i32) -> Option<StacksHeader> {
    text.lines().rev().find_map(|line| {
        let mut words = line.strip_prefix("tpurun: pid ")?.split_ascii_whitespace();
        if words.next()?.parse() != Ok(pid) {
            return None;
        }
        let fd = words.next().filter(|word| *word == "fd").and(words.next())?.parse().ok()?;
        let main = words.next().filter(|word| *word == "main").and(words.next())?;
        let torch = line.split_once(" torch ").map_or("", |(_, path)| path);
        Some(StacksHeader { fd, main: number(main)?, torch: clean(torch) })
    })
}

/// One answer, from its first line on.
pub(crate) fn dump(bytes: &[u8]) -> Dump {
    let mut dump = Dump::default();
    for line in String::from_utf8_lossy(bytes).lines() {
        match line {
            "tpurun: GIL held" => dump.holds_gil = Some(true),
            "tpurun: GIL free" => dump.holds_gil = Some(false),
            "tpurun: cut" => dump.is_cut = true,
            _ => read_line(line, &mut dump.threads),
        }
    }
    dump
}

fn read_line(line: &str, threads: &mut Vec<Thread>) {
    if let Some(thread) = thread(line) {
        if threads.len() < MAX_THREADS {
            threads.push(thread);
        }
    } else if let Some(frame) = frame(line)
        && let Some(last) = threads.last_mut()
        && last.frames.len() < MAX_FRAMES
    {
        last.frames.push(frame);
    }
}

/// `Current thread 0x00007f32 (most recent call first):`, from Python 3.14 on with a name before the bracket.
fn thread(line: &str) -> Option<Thread> {
    let (is_current, rest) = match line.strip_prefix("Current thread ") {
        Some(rest) => (true, rest),
        None => (false, line.strip_prefix("Thread ")?),
    };
    rest.ends_with("(most recent call first):").then_some(())?;
    let id = number(rest.split_ascii_whitespace().next()?)?;
    Some(Thread { id, is_current, frames: Vec::new() })
}

/// `  File "/home/me/data.py", line 7 in load`; the line is `???` where there is none.
fn frame(line: &str) -> Option<StackFrame> {
    let (file, rest) = line.strip_prefix("  File \"")?.rsplit_once("\", line ")?;
    let (line, function) = rest.split_once(" in ")?;
    Some(StackFrame { file: clean(file), line: line.parse().unwrap_or(0), function: clean(function) })
}

fn number(word: &str) -> Option<u64> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

/// The end of a long text, which is the part of a path that says more.
fn clean(text: &str) -> String {
    let chars = text.chars().count();
    text.chars()
        .skip(chars.saturating_sub(MAX_CHARS))
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

const MAX_THREADS: usize = 128;
/// Frames that faulthandler prints of one stack.
const MAX_FRAMES: usize = 100;
const MAX_CHARS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ANSWER: &str = "tpurun: GIL held
Thread 0x00007f11e0fff6c0 (most recent call first):
  File \"/usr/lib/python3.11/threading.py\", line 320 in wait
  ...

Current thread 0x00007f32d1fdb740 [python3] (most recent call first):
  File \"/home/me/odd \", line 3 in name.py\", line 7 in load
  File \"<frozen runpy>\", line ??? in <module>
tpurun: end
";

    #[test]
    fn an_answer_is_read() {
        let dump = dump(ANSWER.as_bytes());
        assert_eq!((dump.holds_gil, dump.threads.len(), dump.is_cut), (Some(true), 2, false));
        let main = dump.main(None).unwrap();
        assert_eq!((main.id, main.is_current, main.frames.len()), (0x7f32_d1fd_b740, true, 2));
        assert_eq!(main.frames[0].file, "/home/me/odd \", line 3 in name.py");
        assert_eq!((main.frames[0].line, main.frames[0].function.as_str()), (7, "load"));
        assert_eq!(main.frames[1].line, 0);
        assert!(super::dump(ANSWER.replace("tpurun: end", "tpurun: cut\ntpurun: end").as_bytes()).is_cut);
        let other = StacksHeader { fd: 5, main: 0x7f11_e0ff_f6c0, torch: String::new() };
        assert_eq!(dump.main(Some(&other)).unwrap().frames[0].function, "wait");
    }

    #[test]
    fn a_header_belongs_to_its_process() {
        let text = "tpurun: pid 7 fd 900 main 0x0000000000000010 torch /a b/torch\nnoise\ntpurun: pid 8 fd 901 main 0x20\ntpurun: pid";
        assert_eq!(header(text, 7), Some(StacksHeader { fd: 900, main: 16, torch: "/a b/torch".into() }));
        assert_eq!(header(text, 8), Some(StacksHeader { fd: 901, main: 32, torch: String::new() }));
        assert_eq!(header(text, 9), None);
        for wrong in ["tpurun: pid 7 fd", "tpurun: pid 7 fd x main 0x1", "tpurun: pid 7 fd 9 main 10", ""] {
            assert_eq!(header(wrong, 7), None, "{wrong}");
        }
    }

    #[test]
    fn what_programs_write_there_is_bounded_and_clean() {
        let long =
            format!("Current thread 0x1 (most recent call first):\n  File \"{}\x1b[2J\", line 1 in f", {
                "a".repeat(10_000)
            });
        let frame = dump(long.as_bytes()).threads.remove(0).frames.remove(0);
        assert!(frame.file.chars().count() == MAX_CHARS && !frame.file.contains('\x1b'), "{}", frame.file);
        let many = "Thread 0x1 (most recent call first):\n  File \"a\", line 1 in f\n".repeat(5000);
        assert_eq!(dump(many.as_bytes()).threads.len(), MAX_THREADS);
        let deep =
            "Thread 0x1 (most recent call first):\n".to_owned() + &"  File \"a\", line 1 in f\n".repeat(5000);
        assert_eq!(dump(deep.as_bytes()).threads[0].frames.len(), MAX_FRAMES);
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_strange(bytes: Vec<u8>, cut in 0..ANSWER.len(), at in 0..ANSWER.len(), pid: i32) {
            let mut torn = ANSWER.as_bytes()[..cut].to_vec();
            torn.splice(at.min(cut)..at.min(cut), bytes.iter().copied());
            for text in [bytes.as_slice(), &torn] {
                let dump = dump(text);
                let _ = dump.main(header(&String::from_utf8_lossy(text), pid).as_ref());
                for frame in dump.threads.iter().flat_map(|thread| &thread.frames) {
                    prop_assert!(!frame.file.chars().chain(frame.function.chars()).any(char::is_control));
                }
            }
        }

        #[test]
        fn what_python_prints_is_read_back(file in "[^\\x00-\\x1f\\x7f-\\x9f]{1,80}", line in 1u32.., function in "[a-z_<>]{1,40}") {
            let text = format!("Current thread 0x7f (most recent call first):\n  File \"{file}\", line {line} in {function}\n");
            let frame = StackFrame { file: file.clone(), line, function: function.clone() };
            // A path that looks like the rest of its line is cut elsewhere.
            prop_assume!(!file.contains("\", line "));
            prop_assert_eq!(&dump(text.as_bytes()).threads[0].frames, &[frame]);
        }
    }
}
