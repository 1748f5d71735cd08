//! Cuts the bytes of one stream of one rank into lines and progress-bar states.
//!
//! Knows nothing about other ranks, time or terminals. Holds at most two pieces of [`PIECE_BYTES`].

/// A line that grows beyond this is passed on in pieces instead of being held.
pub(super) const PIECE_BYTES: usize = 64 * 1024;

/// Ends a piece, so that a reader sees that the line goes on.
pub(super) const PIECE_MARK: &[u8] = b" [continues]";

/// The unfinished line of one stream.
///
/// A carriage return starts the line over, as it does on a terminal: what was before it is one state of a
/// progress bar, and only the last state that has text is kept.
#[derive(Debug, Default)]
pub(super) struct LineBuffer {
    current: Vec<u8>,
    previous_state: Vec<u8>,
    is_bar: bool,
    /// How much of `current` is on the screen already (a prompt).
    shown_bytes: usize,
}

impl LineBuffer {
    /// Takes bytes in and calls `on_line` for each line that they complete, without its line ending.
    pub(super) fn push(&mut self, mut bytes: &[u8], mut on_line: impl FnMut(Line<'_>)) {
        while let Some(&first) = bytes.first() {
            match first {
                b'\n' => {
                    self.end_line(&mut on_line);
                    bytes = &bytes[1..];
                }
                b'\r' => {
                    self.start_over();
                    bytes = &bytes[1..];
                }
                _ => {
                    let room = PIECE_BYTES - self.current.len();
                    let text = bytes.iter().position(|b| matches!(b, b'\n' | b'\r')).unwrap_or(bytes.len());
                    let taken = text.min(room);
                    self.current.extend_from_slice(&bytes[..taken]);
                    bytes = &bytes[taken..];
                    // A full buffer is cut only when more text follows, so that the mark never lies.
                    if taken == room && taken < text {
                        self.cut(&mut on_line);
                    }
                }
            }
        }
    }

    /// Ends the line that the rank never ended.
    pub(super) fn finish(&mut self, mut on_line: impl FnMut(Line<'_>)) {
        if !self.text().is_empty() || self.shown_bytes > 0 {
            self.end_line(&mut on_line);
        }
        *self = Self::default();
    }

    /// The latest state of the progress bar, if the unfinished line is one.
    pub(super) fn bar(&self) -> Option<&[u8]> {
        (self.is_bar && !self.text().is_empty()).then(|| self.text())
    }

    /// The part of an unfinished ordinary line that was not shown yet.
    pub(super) fn unshown(&self) -> Option<&[u8]> {
        (!self.is_bar && self.current.len() > self.shown_bytes).then(|| &self.current[self.shown_bytes..])
    }

    /// Remembers that all of the unfinished line is on the screen.
    pub(super) fn mark_shown(&mut self) {
        self.shown_bytes = self.current.len();
    }

    fn text(&self) -> &[u8] {
        if self.current.is_empty() { &self.previous_state } else { &self.current }
    }

    fn start_over(&mut self) {
        self.is_bar = true;
        self.shown_bytes = 0;
        if !self.current.is_empty() {
            std::mem::swap(&mut self.current, &mut self.previous_state);
            self.current.clear();
        }
    }

    fn end_line(&mut self, on_line: &mut impl FnMut(Line<'_>)) {
        on_line(Line { text: self.text(), shown_bytes: self.shown_bytes, ending: LineEnd::Newline });
        self.reset();
    }

    fn cut(&mut self, on_line: &mut impl FnMut(Line<'_>)) {
        on_line(Line { text: &self.current, shown_bytes: self.shown_bytes, ending: LineEnd::Cut });
        self.reset();
    }

    fn reset(&mut self) {
        self.current.clear();
        self.previous_state.clear();
        self.is_bar = false;
        self.shown_bytes = 0;
        // One very long line should not hold its memory for the rest of the run.
        self.current.shrink_to(4096);
        self.previous_state.shrink_to(4096);
    }
}

/// One complete line, or one piece of a very long one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Line<'a> {
    pub(super) text: &'a [u8],
    /// How much of the start of `text` was shown before the line was complete.
    pub(super) shown_bytes: usize,
    pub(super) ending: LineEnd,
}

/// Why a line ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LineEnd {
    /// The rank ended it, or ended itself.
    Newline,
    /// It reached [`PIECE_BYTES`] and goes on.
    Cut,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(chunks: &[&[u8]]) -> Vec<String> {
        let mut buffer = LineBuffer::default();
        let mut lines = Vec::new();
        for chunk in chunks {
            buffer.push(chunk, |line| lines.push(String::from_utf8_lossy(line.text).into_owned()));
        }
        buffer.finish(|line| lines.push(String::from_utf8_lossy(line.text).into_owned()));
        lines
    }

    #[test]
    fn lines_end_at_newlines_wherever_the_chunks_are_cut() {
        assert_eq!(lines_of(&[b"one\ntw", b"o\n", b"\nthree"]), ["one", "two", "", "three"]);
        assert_eq!(lines_of(&[b"dos\r\n", b"split\r", b"\n"]), ["dos", "split"]);
        assert_eq!(lines_of(&[]), [""; 0]);
    }

    #[test]
    fn only_the_last_state_of_a_bar_is_a_line() {
        assert_eq!(lines_of(&[b"\r10%", b"\r20%", b"\r100%\nnext\n"]), ["100%", "next"]);
        assert_eq!(lines_of(&[b"10%\r20%\r"]), ["20%"]);
        assert_eq!(lines_of(&[b"\r90%\r\r\n"]), ["90%"]);
    }

    #[test]
    fn a_very_long_line_comes_in_pieces() {
        let mut buffer = LineBuffer::default();
        let mut pieces = Vec::new();
        let long = vec![b'x'; 2 * PIECE_BYTES + 5];
        for chunk in long.chunks(1000) {
            buffer.push(chunk, |line| pieces.push((line.text.len(), line.ending)));
        }
        buffer.push(b"\n", |line| pieces.push((line.text.len(), line.ending)));
        assert_eq!(pieces, [(PIECE_BYTES, LineEnd::Cut), (PIECE_BYTES, LineEnd::Cut), (5, LineEnd::Newline)]);
    }

    #[test]
    fn a_line_of_exactly_one_piece_is_not_cut() {
        let mut line = vec![b'x'; PIECE_BYTES];
        line.push(b'\n');
        assert_eq!(lines_of(&[&line]).len(), 1);
    }
}
