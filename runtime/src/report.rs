//! The figures that `torch.tpu.memory_summary()` and `memory_snapshot()` are made from.

use serde::Serialize;

use crate::accounts::Stats;
use crate::heap::Heap;

/// A report of who holds what. Sizes are in bytes; blocks are counted with the bytes they take after
/// rounding.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The number of the device.
    pub device: u32,
    /// The bytes that blocks may take in all.
    pub limit: u64,
    /// By live blocks.
    pub allocated: u64,
    /// The most there ever was, or was since the last reset.
    pub allocated_peak: u64,
    /// The bytes of the host's memory that are taken at most: live blocks, and free ones kept for reuse.
    pub reserved: u64,
    /// As `allocated_peak`.
    pub reserved_peak: u64,
    /// Live blocks, a count.
    pub live: u64,
    /// Allocations that did not fit, a count.
    pub refused: u64,
    /// The largest block that could be allocated now.
    pub largest_free: u64,
    /// Live blocks of 1 MiB and more by the line that allocated them, those that hold most first.
    pub sites: Vec<SiteBlocks>,
    /// All smaller live blocks.
    pub smaller: BlockTotal,
    /// Live blocks by size, in powers of two: each row those above the row before, up to `up_to` bytes.
    pub sizes: Vec<Size>,
}

/// The live blocks of one line.
#[derive(Clone, Debug, Serialize)]
pub struct SiteBlocks {
    /// `train.py:28`
    pub site: String,
    /// A count.
    pub blocks: u64,
    /// The bytes they take.
    pub bytes: u64,
}

/// Some live blocks.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct BlockTotal {
    /// A count.
    pub blocks: u64,
    /// The bytes they take.
    pub bytes: u64,
}

/// The live blocks of about one size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Size {
    /// The size of the largest that would be in this row.
    pub up_to: u64,
    /// A count.
    pub blocks: u64,
    /// The bytes they take.
    pub bytes: u64,
}

impl Report {
    /// Makes the report of all that is live now; free slabs become ranges on the way.
    pub(crate) fn new(device: u32, heap: &mut Heap) -> Self {
        heap.coalesce();
        let sites: Vec<SiteBlocks> = heap
            .sites()
            .into_iter()
            .map(|(site, held)| SiteBlocks { site: site.to_string(), blocks: held.blocks, bytes: held.bytes })
            .collect();
        let Stats { limit, allocated, allocated_peak, reserved, reserved_peak, live, refused, .. } =
            *heap.stats();
        let smaller = BlockTotal {
            blocks: live - sites.iter().map(|site| site.blocks).sum::<u64>(),
            bytes: allocated - sites.iter().map(|site| site.bytes).sum::<u64>(),
        };
        Self {
            device,
            limit,
            allocated,
            allocated_peak,
            reserved,
            reserved_peak,
            live,
            refused,
            largest_free: heap.largest_free().min(limit - allocated),
            sites,
            smaller,
            sizes: sizes(heap.live()),
        }
    }
}

fn sizes(live: impl Iterator<Item = (u64, u64)>) -> Vec<Size> {
    let mut rows = [BlockTotal::default(); 64];
    for (bytes, blocks) in live {
        let row = &mut rows[bytes.next_power_of_two().ilog2() as usize];
        row.blocks += blocks;
        row.bytes += bytes * blocks;
    }
    let row =
        |(power, sum): (usize, &BlockTotal)| Size { up_to: 1 << power, blocks: sum.blocks, bytes: sum.bytes };
    rows.iter().enumerate().filter(|(_, sum)| sum.blocks > 0).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_adds_up() {
        let mut heap = Heap::new(64 << 20);
        heap.allocate(600, None).unwrap();
        heap.allocate(1000, None).unwrap();
        heap.allocate(700 << 10, Some("small.py:1")).unwrap();
        heap.allocate(3 << 20, Some("a.py:1")).unwrap();
        heap.allocate(3 << 20, Some("a.py:1")).unwrap();
        heap.allocate(4 << 20, None).unwrap();
        let report = Report::new(2, &mut heap);
        let text = serde_json::to_string(&report).unwrap();
        let expected = concat!(
            r#"{"device":2,"limit":67108864,"allocated":11204608,"allocated_peak":11204608,"#,
            r#""reserved":13299712,"reserved_peak":13299712,"live":6,"refused":0,"largest_free":53809152,"#,
            r#""sites":[{"site":"a.py:1","blocks":2,"bytes":6291456},"#,
            r#"{"site":"an unknown line","blocks":1,"bytes":4194304}],"#,
            r#""smaller":{"blocks":3,"bytes":718848},"#,
            r#""sizes":[{"up_to":1024,"blocks":2,"bytes":2048},{"up_to":1048576,"blocks":1,"bytes":716800},"#,
            r#"{"up_to":4194304,"blocks":3,"bytes":10485760}]}"#
        );
        assert_eq!(text, expected);
    }
}
