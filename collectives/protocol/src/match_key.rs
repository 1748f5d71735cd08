//! Match keys: what every rank says about its operation before any byte of a
//! tensor is written (law I2 of `docs/invariants.md`).
//!
//! A rank writes its key and the details a message needs into its slot, then arrives. The last to arrive
//! reads one cache line per rank; only when keys differ are the details read, to say who did what where.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::config::Matching;
use crate::op::{MAX_DIMS, Op, OpKind, Shape};
use crate::strategy::Strategy;
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_memory::arena::ArenaKind;
use tpurun_memory::region::Region;
use tpurun_memory::sync::{AtomicU64, Ordering};
use tpurun_memory::text::tail;

/// Words of a slot that are compared, in this order, and the bits that count; the call site only in strict
/// matching.
const FIELDS: [(usize, u64, &str); 7] = [
    (KIND, u64::MAX, "collective"),
    (COUNT, u64::MAX, "element count"),
    (SIZES, u64::MAX, "shape or split sizes"),
    (SCALE, u64::MAX, "scale"),
    (PLAN, u64::MAX, "topology"),
    (ROUNDS, EPOCH_BITS, "epoch"),
    (SITE, u64::MAX, "call site"),
];
const KIND: usize = 0;
const COUNT: usize = 1;
const SIZES: usize = 2;
const SCALE: usize = 3;
const SITE: usize = 4;
const SEQ: usize = 5;
/// In the lower half rounds, then how many operations are offered behind this one, and in which arena tensors
/// are; the epoch in the upper half.
const ROUNDS: usize = 6;
const EPOCH_BITS: u64 = 0xffff_ffff << 32;
const MAPPED: u32 = 1 << 31;
const IN_HOST_ARENA: u32 = 1 << 30;
const BEHIND_SHIFT: u32 = 24;
const BEHIND_BITS: u32 = (IN_HOST_ARENA >> BEHIND_SHIFT) - 1;
const ROUND_BITS: u32 = (1 << BEHIND_SHIFT) - 1;
const PLAN: usize = 7;
// The second cache line on: details.
const NDIM: usize = 8;
const DIMS: usize = 9;
const ELEMENTS: usize = DIMS + MAX_DIMS;
const RESULT: usize = ELEMENTS + 1;
const SITE_BYTES: usize = RESULT + 1;
const SITE_TEXT: usize = SITE_BYTES + 1;
const SITE_TEXT_BYTES: usize = SLOT_BYTES - SITE_TEXT * 8;
const NO_REDUCE_OP: u8 = 0xff;
/// The words that tell one operation of a rank from the next.
const KEY_WORDS: usize = SITE + 1;

/// Most operations that are offered behind the one of a slot.
pub const MAX_BEHIND: usize = 31;
const _: () = assert!(MAX_BEHIND <= BEHIND_BITS as usize);
/// The bytes of a slot: one cache line of key, the rest details for messages.
pub const SLOT_BYTES: usize = 384;
/// Bytes of the key of one operation that is offered behind another.
pub const OFFER_BYTES: usize = 64;
/// Those of one rank.
pub const OFFERS_BYTES: usize = MAX_BEHIND * OFFER_BYTES;

/// How this rank is going to run an operation.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    /// The number of the operation in its communicator.
    pub seq: u64,
    /// The epoch of the communicator.
    pub epoch: u32,
    /// Rounds it takes, as far as this rank knows.
    pub rounds: u32,
    /// The arena where its tensors are to be used.
    pub mapped: Option<ArenaKind>,
    /// How it stages; `None` where ranks only meet.
    pub strategy: Option<Strategy>,
    /// Differs where plans can not fit together.
    pub print: u64,
    /// Operations that it offers behind this one, at most [`MAX_BEHIND`].
    pub behind: usize,
    /// The same on all ranks of a communicator.
    pub matching: Matching,
}

/// One slot in the segment.
#[derive(Clone, Copy, Debug)]
pub struct Slot<'a>(&'a [AtomicU64; SLOT_BYTES / 8]);

impl<'a> Slot<'a> {
    /// The slot at this offset of a segment.
    #[inline]
    pub fn new(region: &'a Region, offset: usize) -> Self {
        Self(region.at(offset))
    }

    fn store(&self, index: usize, value: u64) {
        // Relaxed: the arrival publishes the slot.
        self.0[index].store(value, Ordering::Relaxed);
    }

    fn load(&self, index: usize) -> u64 {
        self.0[index].load(Ordering::Relaxed)
    }

    /// Writes the key of an operation.
    pub fn write(&self, op: &Op, planned: &Planned) {
        for (index, word) in key(op, planned.strategy, planned.matching).into_iter().enumerate() {
            self.store(index, word);
        }
        self.store(SEQ, planned.seq);
        let mapped = match planned.mapped {
            None => 0,
            Some(ArenaKind::Device) => MAPPED,
            Some(ArenaKind::Host) => MAPPED | IN_HOST_ARENA,
        };
        let rounds = planned.rounds & ROUND_BITS | (planned.behind as u32) << BEHIND_SHIFT | mapped;
        self.store(ROUNDS, u64::from(rounds) | u64::from(planned.epoch) << 32);
        self.store(PLAN, planned.print);
        self.store(NDIM, u64::from(op.shape.ndim()));
        for (index, dim) in op.shape.dims().iter().enumerate() {
            self.store(DIMS + index, *dim as u64);
        }
        self.store(ELEMENTS, op.count());
        let site = tail(&op.site, SITE_TEXT_BYTES);
        self.store(SITE_BYTES, site.len() as u64);
        for (index, bytes) in site.as_bytes().chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.store(SITE_TEXT + index, u64::from_le_bytes(word));
        }
    }

    /// How much of it is written.
    #[inline]
    pub fn bytes(&self) -> usize {
        SITE_TEXT * 8 + (self.load(SITE_BYTES) as usize).min(SITE_TEXT_BYTES)
    }

    /// Rounds this rank needs; the last to arrive takes the maximum over all.
    #[inline]
    pub fn rounds(&self) -> u32 {
        self.load(ROUNDS) as u32 & ROUND_BITS
    }

    /// Operations that this rank offers behind this one.
    #[inline]
    pub fn behind(&self) -> usize {
        ((self.load(ROUNDS) as u32 >> BEHIND_SHIFT & BEHIND_BITS) as usize).min(MAX_BEHIND)
    }

    /// The arena where this rank's tensors are to be used.
    #[inline]
    pub fn mapped(&self) -> Option<ArenaKind> {
        let word = self.load(ROUNDS) as u32;
        let kind = if word & IN_HOST_ARENA == 0 { ArenaKind::Device } else { ArenaKind::Host };
        (word & MAPPED != 0).then_some(kind)
    }

    /// Writes the hash of an operation's result, for the meeting that compares results.
    #[inline]
    pub fn write_result(&self, hash: u64) {
        self.store(RESULT, hash);
    }

    /// The hash that [`write_result`](Self::write_result) wrote.
    #[inline]
    pub fn result(&self) -> u64 {
        self.load(RESULT)
    }

    fn differs(&self, other: &Slot<'_>, matching: Matching) -> bool {
        compared(matching).iter().any(|(index, bits, _)| (self.load(*index) ^ other.load(*index)) & bits != 0)
    }

    /// Returns what the slot says, for messages. Another process wrote it, so any value must do.
    pub fn posted(&self) -> Posted {
        let codes = self.load(KIND);
        let [kind, dtype, reduce_op, _] = (codes as u32).to_le_bytes();
        let mut dims = [0; MAX_DIMS];
        for (index, dim) in dims.iter_mut().enumerate() {
            *dim = self.load(DIMS + index) as i64;
        }
        let site_bytes = (self.load(SITE_BYTES) as usize).min(SITE_TEXT_BYTES);
        let mut site: Vec<u8> = (0..site_bytes.div_ceil(8))
            .flat_map(|index| self.load(SITE_TEXT + index).to_le_bytes())
            .collect();
        site.truncate(site_bytes);
        Posted {
            kind: OpKind::from_code(u32::from(kind)),
            dtype: Dtype::try_from(u32::from(dtype)).ok(),
            reduce_op: ReduceOp::try_from(u32::from(reduce_op)).ok(),
            scale: f64::from_bits(self.load(SCALE)),
            root: u32::try_from(codes >> 32).ok().filter(|root| *root != u32::MAX),
            shape: Shape::from_parts(dims, self.load(NDIM) as u32),
            elements: self.load(ELEMENTS),
            site: String::from_utf8_lossy(&site).into_owned(),
        }
    }
}

/// The key of an operation that a rank has queued behind the one in its slot.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a>(&'a [AtomicU64; KEY_WORDS]);

impl<'a> Offer<'a> {
    /// Number `index` of those at `offset`.
    #[inline]
    pub fn new(region: &'a Region, offset: usize, index: usize) -> Self {
        assert!(index < MAX_BEHIND, "offer {index} is not one of {MAX_BEHIND}");
        Self(region.at(offset + index * OFFER_BYTES))
    }

    /// Writes the key of an operation.
    #[inline]
    pub fn write(&self, op: &Op, strategy: Option<Strategy>, matching: Matching) {
        for (word, value) in self.0.iter().zip(key(op, strategy, matching)) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn key(&self) -> [u64; KEY_WORDS] {
        self.0.each_ref().map(|word| word.load(Ordering::Relaxed))
    }
}

/// Whether these, of all ranks, are of one operation. The difference shows when it is in the slots.
#[inline]
pub fn all_agree<'a>(mut offers: impl Iterator<Item = Offer<'a>>) -> bool {
    let Some(first) = offers.next().map(|offer| offer.key()) else { return true };
    offers.all(|offer| offer.key() == first)
}

/// The words up to the call site, which is none but in strict matching.
fn key(op: &Op, strategy: Option<Strategy>, matching: Matching) -> [u64; KEY_WORDS] {
    let reduce_op = if op.kind.reduces() { op.reduce_op as u8 } else { NO_REDUCE_OP };
    let root = op.root.map_or(u32::MAX, |root| root);
    let strategy = strategy.map_or(u8::MAX, |strategy| strategy as u8);
    let codes = u32::from_le_bytes([op.kind as u8, op.dtype as u8, reduce_op, strategy]);
    let (count, sizes) = matched_sizes(op);
    let scale = if reduce_op == ReduceOp::PremulSum as u8 { op.scale.to_bits() } else { 0 };
    let site = if matching == Matching::Strict { hash(&*op.site) } else { 0 };
    [u64::from(codes) | u64::from(root) << 32, count, sizes, scale, site]
}

/// One rank's operation, as its slot tells it.
#[derive(Clone, PartialEq, Debug)]
pub struct Posted {
    kind: Option<OpKind>,
    dtype: Option<Dtype>,
    reduce_op: Option<ReduceOp>,
    scale: f64,
    root: Option<u32>,
    shape: Shape,
    elements: u64,
    site: String,
}

impl Posted {
    /// The key of an operation that this rank has posted.
    pub fn of(op: &Op) -> Self {
        Self {
            kind: Some(op.kind),
            dtype: Some(op.dtype),
            reduce_op: op.kind.reduces().then_some(op.reduce_op),
            scale: op.scale,
            root: op.root,
            shape: op.shape,
            elements: op.count(),
            site: op.site.to_string(),
        }
    }

    fn site(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.site.is_empty() { Ok(()) } else { write!(f, " at {}", self.site) }
    }
}

impl fmt::Display for Posted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(kind) = self.kind else { return f.write_str("an unknown operation") };
        if kind == OpKind::Barrier {
            f.write_str("barrier()")?;
            return self.site(f);
        }
        let dtype = self.dtype.map_or("?".to_owned(), |dtype| dtype.to_string());
        let scalar = self.shape.ndim() == 0 && self.elements != 1;
        let shape = if scalar { format!("[{}]", self.elements) } else { self.shape.to_string() };
        write!(f, "{kind}({dtype}{shape}")?;
        match self.reduce_op {
            Some(ReduceOp::PremulSum) => write!(f, ", premul_sum by {}", self.scale)?,
            Some(op) => write!(f, ", {op}")?,
            None => {}
        }
        match (kind, self.root) {
            (OpKind::Send, Some(peer)) => write!(f, ", to rank {peer}")?,
            (OpKind::Recv, Some(peer)) => write!(f, ", from rank {peer}")?,
            (OpKind::Recv, None) => write!(f, ", from any rank")?,
            (_, Some(root)) => write!(f, ", root {root}")?,
            (_, None) => {}
        }
        f.write_str(")")?;
        self.site(f)
    }
}

fn compared(matching: Matching) -> &'static [(usize, u64, &'static str)] {
    match matching {
        Matching::Normal => &FIELDS[..FIELDS.len() - 1],
        Matching::Strict => &FIELDS,
    }
}

/// The fields that the ranks of a communicator differ in, for the verdict.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// `reduce op, element count`.
    pub fields: String,
    /// The ranks of the group that said the same, and what that is; the largest class first.
    pub classes: Vec<KeyClass>,
}

/// Ranks with one key. They may have posted it from several lines, which are texts of their own.
pub type KeyClass = Vec<(Vec<u32>, String)>;

/// Compares the keys in `slots`, one per rank of the group.
pub fn compare(slots: &[Slot<'_>], matching: Matching) -> Result<(), Difference> {
    let first = &slots[0];
    if slots.iter().all(|slot| !slot.differs(first, matching)) {
        return Ok(());
    }
    let mut fields: Vec<String> = compared(matching)
        .iter()
        .filter(|(index, bits, _)| {
            slots.iter().any(|slot| (slot.load(*index) ^ first.load(*index)) & bits != 0)
        })
        .flat_map(
            |(index, _, name)| if *index == KIND { code_fields(slots) } else { vec![(*name).to_owned()] },
        )
        .collect();
    // Ranks that differ in their sizes may well run them in different ways.
    if fields.len() > 1 {
        fields.retain(|field| field != STRATEGY);
    }
    let fields = fields.join(", ");
    let mut keys: BTreeMap<Vec<u64>, Vec<u32>> = BTreeMap::new();
    for (rank, slot) in (0..).zip(slots) {
        let key = compared(matching).iter().map(|(index, bits, _)| slot.load(*index) & bits).collect();
        keys.entry(key).or_default().push(rank);
    }
    let mut keys: Vec<Vec<u32>> = keys.into_values().collect();
    keys.sort_by_key(|ranks| (usize::MAX - ranks.len(), ranks[0]));
    let mut classes: Vec<KeyClass> = vec![];
    for ranks in keys {
        let mut by_text: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for rank in ranks {
            by_text.entry(slots[rank as usize].posted().to_string()).or_default().push(rank);
        }
        let class = by_text.into_iter().map(|(text, ranks)| {
            // The differing field is not in every text, such as the sizes of an all-gather.
            let hidden = classes.iter().flatten().any(|(_, other)| *other == text);
            (ranks, if hidden { format!("{text} with other {fields}") } else { text })
        });
        let class = class.collect();
        classes.push(class);
    }
    Err(Difference { fields, classes })
}

/// How ranks run what they have posted, which follows from the other fields.
const STRATEGY: &str = "strategy";

/// Which of the packed codes differ.
fn code_fields(slots: &[Slot<'_>]) -> Vec<String> {
    let names = ["collective", "dtype", "reduce op", STRATEGY, "root"];
    let codes = |slot: &Slot<'_>| {
        let word = slot.load(KIND);
        let [kind, dtype, reduce_op, strategy] = (word as u32).to_le_bytes().map(u32::from);
        [kind, dtype, reduce_op, strategy, (word >> 32) as u32]
    };
    let first = codes(&slots[0]);
    (0..names.len())
        .filter(|field| slots.iter().any(|slot| codes(slot)[*field] != first[*field]))
        .map(|field| names[field].to_owned())
        .collect()
}

/// Returns what must be equal about the sizes: a count, and a hash of shapes or of the sizes per rank.
/// All-to-all, gather and scatter are checked pair by pair instead, see `splits.rs`.
fn matched_sizes(op: &Op) -> (u64, u64) {
    let elements = |bytes: usize| (bytes / op.dtype.size()) as u64;
    let (count, splits) = match op.kind {
        OpKind::AllGather => (elements(op.outputs.total()), op.outputs.chunk_sizes()),
        OpKind::ReduceScatter => (elements(op.inputs.total()), op.inputs.chunk_sizes()),
        OpKind::AllReduce | OpKind::Broadcast | OpKind::Reduce => (op.count(), vec![]),
        OpKind::AllToAll | OpKind::Gather | OpKind::Scatter | OpKind::Barrier => (0, vec![]),
        OpKind::Send | OpKind::Recv => (op.count(), vec![]),
    };
    let has_sizes = !splits.is_empty() || op.shape_hash.is_some();
    (count, if has_sizes { hash(&(splits, op.shape_hash)) } else { 0 })
}

fn hash(value: &(impl Hash + ?Sized)) -> u64 {
    // The same on every rank: DefaultHasher::new has fixed keys, and all ranks of a host run one build.
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing as memory;
    use tpurun_memory::buffer::Spans;

    fn op(site: &str) -> Op {
        let nothing = Spans::empty;
        Op { site: site.into(), ..memory::op(OpKind::AllReduce, Dtype::F32, nothing(), nothing()) }
    }

    /// Returns what is found when each of four ranks posts what `key` says.
    fn difference(matching: Matching, key: impl Fn(usize) -> (Op, u32)) -> Option<Difference> {
        let (region, _fd) = Region::create("test", 4 * SLOT_BYTES).expect("memfds work here");
        let slots: Vec<Slot<'_>> = (0..4).map(|rank| Slot::new(&region, rank * SLOT_BYTES)).collect();
        for (rank, slot) in slots.iter().enumerate() {
            let (op, epoch) = key(rank);
            // Rounds may differ: they follow from sizes that are compared elsewhere.
            let rounds = rank as u32 + 1;
            slot.write(
                &op,
                &Planned {
                    seq: 7,
                    epoch,
                    rounds,
                    mapped: None,
                    strategy: None,
                    print: 0,
                    behind: rank,
                    matching: Matching::Strict,
                },
            );
            assert_eq!((slot.rounds(), slot.behind()), (rounds, rank));
        }
        compare(&slots, matching).err()
    }

    fn ranks(difference: &Difference) -> Vec<Vec<u32>> {
        let class = |class: &KeyClass| class.iter().flat_map(|(ranks, _)| ranks.clone()).collect();
        difference.classes.iter().map(class).collect()
    }

    #[test]
    fn another_epoch_is_another_operation() {
        assert_eq!(difference(Matching::Normal, |_| (op("a.py:1"), 3)), None);
        let found = difference(Matching::Normal, |rank| (op("a.py:1"), if rank == 1 { 2 } else { 3 }));
        let found = found.expect("the epochs differ");
        assert_eq!((found.fields.as_str(), ranks(&found)), ("epoch", vec![vec![0, 2, 3], vec![1]]));
    }

    #[test]
    fn call_sites_count_in_strict_matching_only() {
        let sites = |rank: usize| (op(if rank == 1 { "b.py:2" } else { "a.py:1" }), 0);
        assert_eq!(difference(Matching::Normal, sites), None);
        let found = difference(Matching::Strict, sites).expect("the call sites differ");
        assert_eq!((found.fields.as_str(), ranks(&found)), ("call site", vec![vec![0, 2, 3], vec![1]]));
        assert!(found.classes[1][0].1.ends_with(" at b.py:2"), "{found:?}");
    }

    /// One class of ranks, though it has posted from several lines.
    #[test]
    fn a_class_is_what_the_ranks_posted_not_where() {
        let keys = |rank: usize| {
            let reduce_op = if rank == 3 { ReduceOp::Max } else { ReduceOp::Sum };
            (Op { reduce_op, ..op(if rank == 0 { "a.py:1" } else { "b.py:2" }) }, 0)
        };
        let found = difference(Matching::Normal, keys).expect("the reduce ops differ");
        assert_eq!((found.fields.as_str(), ranks(&found)), ("reduce op", vec![vec![0, 1, 2], vec![3]]));
        assert_eq!(found.classes[0].len(), 2);
    }
}
