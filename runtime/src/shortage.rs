//! The text of an out-of-memory error: it says who holds what.

use std::fmt;
use std::sync::Arc;

use crate::sites::Held;
use crate::units::{Bytes, Count};

/// Why an allocation did not fit.
#[derive(Clone, Debug)]
pub struct Shortage {
    pub(crate) limit: u64,
    pub(crate) asked: u64,
    pub(crate) site: Option<String>,
    pub(crate) allocated: u64,
    pub(crate) live: u64,
    /// Those that hold most first.
    pub(crate) sites: Vec<(Arc<str>, Held)>,
    pub(crate) largest_free: u64,
}

/// The number of lines of the program that the message names.
const NAMED: usize = 5;

impl Shortage {
    /// One line, with the number of the device.
    pub fn text(&self, device: u32) -> String {
        let (limit, asked) = (Bytes(self.limit), Bytes(self.asked));
        let at = self.site.as_ref().map_or_else(String::new, |site| format!(" at {site}"));
        let free = self.limit - self.allocated;
        format!(
            "expected at most {limit} on tpu:{device} (--hbm), asked {asked}{at} with {}; {} free, largest \
             free block {}",
            self.held(),
            Bytes(free),
            Bytes(self.largest_free.min(free)),
        )
    }

    fn held(&self) -> String {
        if self.live == 0 {
            return "nothing held".to_owned();
        }
        let tensors = if self.live == 1 { "tensor" } else { "tensors" };
        format!("{} held by {} {tensors}: {}", Bytes(self.allocated), Count(self.live), self.holders())
    }

    /// `8.00 GiB at model.py:33 (12), ..`
    fn holders(&self) -> String {
        let line = |bytes, place: fmt::Arguments<'_>, blocks| {
            format!("{} {place} ({})", Bytes(bytes), Count(blocks))
        };
        let sum = |held: &[(Arc<str>, Held)]| {
            held.iter().fold((0, 0), |(bytes, blocks), (_, held)| (bytes + held.bytes, blocks + held.blocks))
        };
        let (named, others) = self.sites.split_at(self.sites.len().min(NAMED));
        let mut parts: Vec<String> = named
            .iter()
            .map(|(site, held)| line(held.bytes, format_args!("at {site}"), held.blocks))
            .collect();
        if !others.is_empty() {
            let (bytes, blocks) = sum(others);
            parts.push(line(bytes, format_args!("at {} other lines", Count(others.len() as u64)), blocks));
        }
        let (large_bytes, large_blocks) = sum(&self.sites);
        if self.live > large_blocks {
            let (bytes, blocks) = (self.allocated - large_bytes, self.live - large_blocks);
            parts.push(line(bytes, format_args!("smaller than 1 MiB each"), blocks));
        }
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn held(bytes: u64, blocks: u64) -> Held {
        Held { bytes, blocks }
    }

    #[test]
    fn it_says_who_holds_what() {
        let shortage = Shortage {
            limit: 16 * GIB,
            asked: GIB / 2,
            site: Some("train.py:12".to_owned()),
            allocated: 15 * GIB + GIB / 2,
            live: 1234,
            sites: vec![("model.py:33".into(), held(8 * GIB, 12)), ("model.py:40".into(), held(4 * GIB, 3))],
            largest_free: GIB / 4,
        };
        assert_eq!(
            shortage.text(0),
            "expected at most 16.00 GiB on tpu:0 (--hbm), asked 512.00 MiB at train.py:12 with 15.50 GiB \
             held by 1,234 tensors: 8.00 GiB at model.py:33 (12), 4.00 GiB at model.py:40 (3), 3.50 GiB \
             smaller than 1 MiB each (1,219); 512.00 MiB free, largest free block 256.00 MiB"
        );
    }

    #[test]
    fn many_lines_are_summed_and_none_are_left_out() {
        let sites = (0..7).map(|n| (format!("a.py:{n}").into(), held(GIB, 1))).collect();
        let shortage = Shortage {
            limit: 8 * GIB,
            asked: 2 * GIB,
            site: None,
            allocated: 7 * GIB,
            live: 7,
            sites,
            largest_free: GIB,
        };
        let text = shortage.text(3);
        assert!(
            text.contains(" on tpu:3 (--hbm), asked 2.00 GiB with 7.00 GiB held by 7 tensors: "),
            "{text}"
        );
        assert!(
            text.contains("1.00 GiB at a.py:4 (1), 2.00 GiB at 2 other lines (2); 1.00 GiB free"),
            "{text}"
        );
    }

    #[test]
    fn nothing_held_is_said_so() {
        let shortage = Shortage {
            limit: GIB,
            asked: 2 * GIB,
            site: None,
            allocated: 0,
            live: 0,
            sites: vec![],
            largest_free: GIB,
        };
        assert!(
            shortage.text(0).contains("asked 2.00 GiB with nothing held; 1.00 GiB free, largest free block")
        );
    }
}
