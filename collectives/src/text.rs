//! Cutting text to a number of bytes, at a character.

/// The first `bytes` of `text`, or a little less.
pub(crate) fn head(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The last `bytes` of `text`, or a little less.
pub(crate) fn tail(text: &str, bytes: usize) -> &str {
    let mut start = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
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
