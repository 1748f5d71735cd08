//! Cutting text to a number of bytes, at a character; bytes as text.

use std::fmt;

/// The first `bytes` of `text`, or a little less.
pub fn head(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The last `bytes` of `text`, or a little less.
pub fn tail(text: &str, bytes: usize) -> &str {
    let mut start = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// Writes bytes as [`unhex`] reads them.
pub fn hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// Bytes that are written with two digits each.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
    digits.chunks(2).map(|pair| Some((pair[0] << 4 | pair.get(1)?) as u8)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_stay_whole() {
        assert_eq!((head("a\u{e9}b", 2), tail("a\u{e9}b", 2)), ("a", "b"));
        assert_eq!((head("ab", 9), tail("ab", 9)), ("ab", "ab"));
    }
}
