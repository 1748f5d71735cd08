//! The sizes of small blocks: multiples of 512 bytes up to 4 KiB, then eight steps per doubling up to 64 KiB,
//! so that at most an eighth of a block is lost to rounding.

/// Every block starts at a multiple of this, and its size is one.
pub(crate) const UNIT: u64 = 512;
/// The largest size class.
pub(crate) const SMALL: u64 = 64 << 10;
pub(crate) const COUNT: usize = 40;

/// A size class, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct SizeClass(u8);

impl SizeClass {
    /// The smallest one that holds `bytes`, if one does.
    pub(crate) fn of(bytes: u64) -> Option<Self> {
        (bytes <= SMALL).then(|| Self(CLASS_OF[bytes.div_ceil(UNIT) as usize]))
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    pub(crate) fn bytes(self) -> u32 {
        BYTES[self.index()]
    }
}

const BYTES: [u32; COUNT] = {
    let mut bytes = [0; COUNT];
    let mut index = 0;
    while index < COUNT {
        bytes[index] = if index < 8 {
            UNIT as u32 * (index as u32 + 1)
        } else {
            let doubling = (index - 8) / 8;
            let step = (index - 8) % 8;
            (UNIT as u32 * (8 + step as u32 + 1)) << doubling
        };
        index += 1;
    }
    bytes
};

/// By the number of units, rounded up.
const CLASS_OF: [u8; (SMALL / UNIT) as usize + 1] = {
    let mut classes = [0; (SMALL / UNIT) as usize + 1];
    let (mut units, mut class) = (1, 0);
    while units < classes.len() {
        while (BYTES[class] as usize) < units * UNIT as usize {
            class += 1;
        }
        classes[units] = class as u8;
        units += 1;
    }
    classes
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_small_size_has_the_tightest_class() {
        assert_eq!(BYTES[COUNT - 1], SMALL as u32);
        assert!(BYTES.is_sorted_by(|a, b| a < b) && BYTES.iter().all(|bytes| bytes % UNIT as u32 == 0));
        for bytes in 1..=SMALL {
            let class = SizeClass::of(bytes).expect("small");
            let fits = u64::from(class.bytes());
            assert!(fits >= bytes);
            assert!(class.index() == 0 || u64::from(BYTES[class.index() - 1]) < bytes);
            assert!(fits - bytes < UNIT.max(fits / 8), "{bytes} bytes in a block of {fits}");
        }
        assert_eq!(SizeClass::of(SMALL + 1), None);
    }
}
