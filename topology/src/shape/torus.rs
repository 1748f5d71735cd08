//! Shapes: a torus or mesh of chips in one to three dimensions, with what is broken in it.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// The most dimensions a torus can have.
pub const MAX_DIMENSIONS: usize = 3;

/// The most chips a torus can have; beyond it a typing error is more likely than a machine.
pub const MAX_CHIPS: u64 = 1 << 24;

/// Where a chip sits; entries beyond the last dimension are 0.
pub type Coordinates = [u32; MAX_DIMENSIONS];

/// One dimension of a torus: how many chips it has and whether its ends are joined.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Dimension {
    size: u32,
    joined: bool,
}

impl Dimension {
    /// A dimension whose last chip is linked to its first.
    pub const fn ring(size: u32) -> Self {
        // Two chips have one link between them, and one chip has none: joining their ends adds nothing.
        Self { size, joined: size >= 3 }
    }

    /// A dimension with two open ends.
    pub const fn line(size: u32) -> Self {
        Self { size, joined: false }
    }

    /// How many chips lie along it.
    pub const fn size(self) -> u32 {
        self.size
    }

    /// Whether a link joins the last chip to the first; never so below three chips.
    pub const fn wraps(self) -> bool {
        self.joined
    }

    /// Links along one line of this dimension.
    pub const fn links(self) -> u32 {
        if self.joined { self.size } else { self.size - 1 }
    }

    /// The coordinate after `at`, if there is one.
    pub fn up(self, at: u32) -> Option<u32> {
        match at + 1 {
            next if next < self.size => Some(next),
            _ if self.joined => Some(0),
            _ => None,
        }
    }

    /// The coordinate before `at`, if there is one.
    pub fn down(self, at: u32) -> Option<u32> {
        match at.checked_sub(1) {
            Some(before) => Some(before),
            None if self.joined => Some(self.size - 1),
            None => None,
        }
    }

    /// Hops between two coordinates.
    pub fn distance(self, a: u32, b: u32) -> u32 {
        let straight = a.abs_diff(b);
        if self.joined { straight.min(self.size - straight) } else { straight }
    }

    /// The longest distance between two coordinates.
    pub fn diameter(self) -> u32 {
        if self.joined { self.size / 2 } else { self.size - 1 }
    }
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = if self.size >= 3 && !self.joined { "o" } else { "" };
        write!(f, "{}{open}", self.size)
    }
}

/// A cable between two neighbouring chips, both directions of it; the lower chip comes first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Link {
    low: u32,
    high: u32,
}

impl Link {
    /// The link between two chips, in either order.
    pub fn new(a: u32, b: u32) -> Self {
        Self { low: a.min(b), high: a.max(b) }
    }

    /// Its two ends, the lower chip first.
    pub fn ends(self) -> (u32, u32) {
        (self.low, self.high)
    }
}

/// A torus (or mesh) of chips in one to three dimensions.
///
/// Written `4x4x4`: every dimension wraps unless an `o` (open) follows its size, as in `4x4ox2`. A wrap only
/// means something from three chips on: a dimension of 2 has one link. Chips are numbered row major, the
/// last dimension fastest.
///
/// ```
/// let torus: tpurun_topology::Torus = "4x4ox2".parse()?;
/// assert_eq!(torus.coordinates(11), [1, 1, 1]);
/// assert_eq!(torus.to_string(), "4x4ox2");
/// # Ok::<(), tpurun_topology::TopologyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Torus {
    dimensions: Vec<Dimension>,
    dead_links: BTreeSet<Link>,
    dead_chips: BTreeSet<u32>,
}

impl Torus {
    /// A torus without faults.
    ///
    /// # Errors
    /// When there are not 1 to 3 dimensions, one of them is empty, or the chips are more than [`MAX_CHIPS`].
    pub fn new(dimensions: &[Dimension]) -> Result<Self, TopologyError> {
        if dimensions.is_empty() || dimensions.len() > MAX_DIMENSIONS {
            return Err(TopologyError::DimensionCount { given: dimensions.len() });
        }
        if dimensions.iter().any(|d| d.size == 0) {
            return Err(TopologyError::EmptyDimension { topology: shape_text(dimensions) });
        }
        let chips = dimensions.iter().map(|d| u128::from(d.size)).product::<u128>();
        if chips > u128::from(MAX_CHIPS) {
            return Err(TopologyError::TooManyChips { topology: shape_text(dimensions), chips });
        }
        Ok(Self { dimensions: dimensions.to_vec(), dead_links: BTreeSet::new(), dead_chips: BTreeSet::new() })
    }

    /// The same torus with these links taken out.
    ///
    /// # Errors
    /// When two chips of a pair are not neighbours.
    pub fn without_links(mut self, dead: impl IntoIterator<Item = Link>) -> Result<Self, TopologyError> {
        for link in dead {
            let (low, high) = link.ends();
            if high >= self.chips() || !self.cabled(low).any(|n| n == high) {
                return Err(TopologyError::NoSuchLink { topology: self.to_string(), low, high });
            }
            self.dead_links.insert(link);
        }
        Ok(self)
    }

    /// The same torus with these chips, and so all their links, taken out.
    ///
    /// # Errors
    /// When a chip does not exist.
    pub fn without_chips(mut self, dead: impl IntoIterator<Item = u32>) -> Result<Self, TopologyError> {
        for chip in dead {
            if chip >= self.chips() {
                let (topology, last) = (self.to_string(), self.chips() - 1);
                return Err(TopologyError::NoSuchChip { topology, chip, last });
            }
            self.dead_chips.insert(chip);
        }
        Ok(self)
    }

    /// Its dimensions, slowest first.
    pub fn dimensions(&self) -> &[Dimension] {
        &self.dimensions
    }

    /// Positions in the shape, dead chips included.
    pub fn chips(&self) -> u32 {
        self.dimensions.iter().map(|d| d.size).product()
    }

    /// Chips that work.
    pub fn live_chips(&self) -> u32 {
        self.chips() - self.dead_chips.len() as u32
    }

    /// Chips that do not work.
    pub fn dead_chips(&self) -> &BTreeSet<u32> {
        &self.dead_chips
    }

    /// Links that do not work although both their chips may.
    pub fn dead_links(&self) -> &BTreeSet<Link> {
        &self.dead_links
    }

    /// Whether every chip and link works.
    pub fn is_whole(&self) -> bool {
        self.dead_chips.is_empty() && self.dead_links.is_empty()
    }

    /// Checks that `ranks` ranks find a working chip each.
    ///
    /// # Errors
    /// When there are fewer working chips.
    pub fn check_ranks(&self, ranks: u32) -> Result<(), TopologyError> {
        let chips = self.live_chips();
        if chips < ranks {
            return Err(TopologyError::TooFewChips { topology: self.to_string(), chips, ranks });
        }
        Ok(())
    }

    /// The chip of a world rank: ranks fill the working chips in index order.
    pub fn chip_of_rank(&self, rank: u32) -> Option<u32> {
        if rank >= self.live_chips() {
            return None;
        }
        Some(self.dead_chips.iter().fold(rank, |chip, &dead| chip + u32::from(dead <= chip)))
    }

    /// Where a chip sits.
    pub fn coordinates(&self, chip: u32) -> Coordinates {
        coordinates_of(&self.dimensions, chip)
    }

    /// The chip at a place.
    pub fn chip_at(&self, at: &Coordinates) -> u32 {
        index_of(&self.dimensions, at)
    }

    /// Hops between two chips when nothing is dead.
    pub fn distance(&self, a: u32, b: u32) -> u32 {
        let (a, b) = (self.coordinates(a), self.coordinates(b));
        self.dimensions.iter().enumerate().map(|(d, dimension)| dimension.distance(a[d], b[d])).sum()
    }

    /// The working chips one working link away from a working chip.
    pub fn neighbours(&self, chip: u32) -> impl Iterator<Item = u32> + '_ {
        self.cabled(chip).filter(move |&other| self.is_live(Link::new(chip, other)))
    }

    /// Every working link once, in the order of its lower chip.
    pub fn links(&self) -> impl Iterator<Item = Link> + '_ {
        (0..self.chips()).flat_map(move |chip| {
            self.neighbours(chip).filter(move |&other| other > chip).map(move |other| Link::new(chip, other))
        })
    }

    /// Whether a link and the chips at its ends work.
    pub fn is_live(&self, link: Link) -> bool {
        !self.dead_links.contains(&link)
            && !self.dead_chips.contains(&link.low)
            && !self.dead_chips.contains(&link.high)
    }

    fn cabled(&self, chip: u32) -> impl Iterator<Item = u32> + '_ {
        let at = self.coordinates(chip);
        self.dimensions.iter().enumerate().flat_map(move |(d, dimension)| {
            [dimension.down(at[d]), dimension.up(at[d])].into_iter().flatten().map(move |coordinate| {
                let mut other = at;
                other[d] = coordinate;
                self.chip_at(&other)
            })
        })
    }
}

impl fmt::Display for Torus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shape_text(&self.dimensions))
    }
}

impl FromStr for Torus {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, TopologyError> {
        let dimensions = text.split('x').map(parse_dimension).collect::<Result<Vec<_>, _>>()?;
        Self::new(&dimensions)
    }
}

/// Why a topology cannot be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A part of the text is not a size.
    #[error("topology dimension {given:?} is not a number, expected one such as 4 or 4o")]
    NotANumber {
        /// The part as written.
        given: String,
    },
    /// Too few or too many dimensions.
    #[error("topology has {given} dimensions, expected 1 to {MAX_DIMENSIONS}")]
    DimensionCount {
        /// How many were given.
        given: usize,
    },
    /// A dimension of no chips.
    #[error("topology {topology} has a dimension of 0 chips, expected at least 1")]
    EmptyDimension {
        /// The shape as given.
        topology: String,
    },
    /// More chips than anybody has.
    #[error("topology {topology} has {chips} chips, expected at most {MAX_CHIPS}")]
    TooManyChips {
        /// The shape as given.
        topology: String,
        /// Its chips.
        chips: u128,
    },
    /// Fewer working chips than ranks.
    #[error("topology {topology} has {chips} chips, expected at least {ranks} ranks")]
    TooFewChips {
        /// The shape.
        topology: String,
        /// Its working chips.
        chips: u32,
        /// The ranks to be placed.
        ranks: u32,
    },
    /// A chip outside the shape.
    #[error("topology {topology} has no chip {chip}, expected 0 to {last}")]
    NoSuchChip {
        /// The shape.
        topology: String,
        /// The chip as given.
        chip: u32,
        /// The highest chip.
        last: u32,
    },
    /// A link between chips that are not neighbours.
    #[error("topology {topology} has no link between chips {low} and {high}, expected neighbours")]
    NoSuchLink {
        /// The shape.
        topology: String,
        /// The lower chip as given.
        low: u32,
        /// The higher chip as given.
        high: u32,
    },
    /// A preset name that is not known.
    #[error("topology preset {given:?} is unknown, expected one of {known}")]
    UnknownPreset {
        /// The name as written.
        given: String,
        /// The names there are.
        known: String,
    },
    /// A shape that no slice of the chip has.
    #[error("topology {given} is no slice of {preset}, expected {expected}")]
    NoSuchSlice {
        /// The preset's name.
        preset: &'static str,
        /// The shape as given.
        given: String,
        /// The shapes that the chip offers.
        expected: String,
    },
}

pub(crate) fn coordinates_of(dimensions: &[Dimension], index: u32) -> Coordinates {
    let mut at = Coordinates::default();
    let mut rest = index;
    for (d, dimension) in dimensions.iter().enumerate().rev() {
        at[d] = rest % dimension.size;
        rest /= dimension.size;
    }
    at
}

pub(crate) fn index_of(dimensions: &[Dimension], at: &Coordinates) -> u32 {
    dimensions.iter().zip(at).fold(0, |index, (dimension, coordinate)| index * dimension.size + coordinate)
}

fn parse_dimension(text: &str) -> Result<Dimension, TopologyError> {
    let (digits, open) = match text.strip_suffix('o') {
        Some(digits) => (digits, true),
        None => (text, false),
    };
    // `u32::from_str` takes a leading plus sign; a size has none.
    let size = digits.parse::<u32>().ok().filter(|_| !digits.starts_with('+'));
    let size = size.ok_or_else(|| TopologyError::NotANumber { given: text.to_owned() })?;
    Ok(if open { Dimension::line(size) } else { Dimension::ring(size) })
}

fn shape_text(dimensions: &[Dimension]) -> String {
    dimensions.iter().map(Dimension::to_string).collect::<Vec<_>>().join("x")
}
