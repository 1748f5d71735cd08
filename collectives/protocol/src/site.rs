//! Where a program called, as far as messages show it.

use std::fmt;
use std::ops::Deref;

use smallvec::SmallVec;

/// A call site, `train.py:28`; may be empty. One of usual length takes no memory of its own.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Site(SmallVec<[u8; 32]>);

impl Site {
    /// Makes a site of bytes; those that are not UTF-8 are replaced.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => text.into(),
            Err(_) => (&*String::from_utf8_lossy(bytes)).into(),
        }
    }
}

impl From<&str> for Site {
    fn from(text: &str) -> Self {
        Self(SmallVec::from_slice(text.as_bytes()))
    }
}

impl Deref for Site {
    type Target = str;

    fn deref(&self) -> &str {
        std::str::from_utf8(&self.0).expect("it was made of text")
    }
}

impl fmt::Debug for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_of_any_length_are_kept() {
        for text in ["", "train.py:28", &"ü".repeat(99)] {
            assert_eq!(&*Site::from(text), text);
            assert_eq!(Site::from_bytes(text.as_bytes()), text.into());
        }
        assert_eq!(&*Site::from_bytes(b"a\xff.py:1"), "a\u{fffd}.py:1");
    }
}
