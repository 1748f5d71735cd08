//! Numbers as people read them.

use std::fmt;

/// Bytes with two decimals in the largest unit that they fill: `16.00 GiB`, `512 B`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut unit = ((self.0.ilog2() / 10) as usize).min(UNITS.len());
        let scaled = |unit: usize| self.0 as f64 / (1_u64 << (10 * unit)) as f64;
        // 1023.999 MiB would print as 1024.00.
        if unit < UNITS.len() && scaled(unit) >= 1023.995 {
            unit += 1;
        }
        write!(f, "{:.2} {}", scaled(unit), UNITS[unit - 1])
    }
}

/// A count with its thousands apart: `1,234`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Count(pub(crate) u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                f.write_str(",")?;
            }
            write!(f, "{digit}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let bytes = [0, 1023, 1024, 1536, (1 << 20) - 1, 512 << 20, 16 << 30, 3 << 40, u64::MAX];
        let read = bytes.map(|bytes| Bytes(bytes).to_string());
        let expected =
            ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "1.00 MiB", "512.00 MiB", "16.00 GiB", "3.00 TiB"];
        assert_eq!(read[..8], expected);
        assert_eq!(read[8], "16777216.00 TiB");
        let counts = [0, 12, 123, 1234, 123_456, 1_234_567].map(|count| Count(count).to_string());
        assert_eq!(counts, ["0", "12", "123", "1,234", "123,456", "1,234,567"]);
    }
}
