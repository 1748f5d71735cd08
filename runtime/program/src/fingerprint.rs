use twox_hash::XxHash3_64;

use crate::program::Program;

impl Program {
    /// 64 bits that are equal for equal streams, on every rank and in every run: of operations, values, views,
    /// writes and results. Lines of the user's program do not count.
    pub fn fingerprint(&self) -> u64 {
        XxHash3_64::oneshot(self.text().as_bytes())
    }
}
