//! Real slices: how the chips of each generation are linked.
//!
//! Bandwidths are those usable in practice, 0.9 of the nominal ones. A slice of chips with three dimensions
//! wraps when it is made of whole cubes of 4x4x4, joined by optical switches; one of chips with two
//! dimensions wraps only along a full dimension of 16.

use std::fmt;
use std::str::FromStr;

use super::fabric::Machine;
use crate::shape::{Dimension, TopologyError, Torus};

/// The known properties of the links of one generation of chips.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Chip {
    /// The name that presets are written with.
    pub name: &'static str,
    /// Dimensions of its slices.
    pub dimensions: usize,
    /// Chips of the largest slice that one job gets.
    pub largest_slice: u32,
    /// Bytes per second of one link, in one direction.
    pub link_bytes_per_s: f64,
}

/// Every generation there is a preset for.
pub const CHIPS: [Chip; 5] = [
    Chip { name: "v4", dimensions: 3, largest_slice: 4096, link_bytes_per_s: 45e9 },
    Chip { name: "v5e", dimensions: 2, largest_slice: 256, link_bytes_per_s: 45e9 },
    Chip { name: "v5p", dimensions: 3, largest_slice: 6144, link_bytes_per_s: 90e9 },
    Chip { name: "v6e", dimensions: 2, largest_slice: 256, link_bytes_per_s: 90e9 },
    Chip { name: "tpu7x", dimensions: 3, largest_slice: 9216, link_bytes_per_s: 90e9 },
];

/// Chips along each side of the cubes that three-dimensional slices are joined from.
const CUBE: u32 = 4;
/// Chips along a full dimension of a two-dimensional slice.
const FULL: u32 = 16;
/// Seconds from one chip to the next.
const HOP_S: f64 = 1e-6;

/// A torus, and which chips it is made of when it is a real slice.
///
/// ```
/// use tpurun_topology::Topology;
/// let slice: Topology = "v5e:8x16".parse()?;
/// assert_eq!(slice.torus().to_string(), "8ox16");
/// let plain: Topology = "4x4x4".parse()?;
/// assert!(plain.chip().is_none());
/// # Ok::<(), tpurun_topology::TopologyError>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct Topology {
    torus: Torus,
    chip: Option<Chip>,
}

impl Topology {
    /// Parses a shape such as `4x4x4`, or a real slice such as `v5p:4x4x4`, whose chip decides what wraps.
    ///
    /// # Errors
    /// When the shape is none, or no slice of the chip.
    pub fn parse(text: &str) -> Result<Self, TopologyError> {
        let Some((name, shape)) = text.split_once(':') else {
            return Ok(Self { torus: text.parse()?, chip: None });
        };
        let chip = CHIPS.into_iter().find(|chip| chip.name == name).ok_or_else(|| {
            let known = CHIPS.map(|chip| chip.name).join(", ");
            TopologyError::UnknownPreset { given: name.to_owned(), known }
        })?;
        Ok(Self { torus: chip.slice(&shape.parse()?)?, chip: Some(chip) })
    }

    /// Its shape.
    pub fn torus(&self) -> &Torus {
        &self.torus
    }

    /// The chips of a real slice.
    pub fn chip(&self) -> Option<&Chip> {
        self.chip.as_ref()
    }

    /// The machine that a real slice is.
    pub fn machine(&self) -> Option<Machine> {
        let link_bytes_per_s = self.chip?.link_bytes_per_s;
        Some(Machine { alpha_s: HOP_S, link_bytes_per_s, shared: None })
    }
}

impl FromStr for Topology {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Self, TopologyError> {
        Self::parse(text)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.chip {
            Some(chip) => write!(f, "{}:{}", chip.name, self.torus),
            None => self.torus.fmt(f),
        }
    }
}

impl Chip {
    fn slice(&self, shape: &Torus) -> Result<Torus, TopologyError> {
        let dimensions = shape.dimensions();
        let too_long = self.dimensions == 2 && dimensions.iter().any(|d| d.size() > FULL);
        if dimensions.len() != self.dimensions || shape.chips() > self.largest_slice || too_long {
            return Err(TopologyError::NoSuchSlice {
                preset: self.name,
                given: shape.to_string(),
                expected: self.offer(),
            });
        }
        let cubes = dimensions.iter().all(|d| d.size() % CUBE == 0);
        let joined = |d: &Dimension| d.wraps() && if self.dimensions == 2 { d.size() == FULL } else { cubes };
        let linked = |d: &Dimension| {
            if joined(d) { Dimension::ring(d.size()) } else { Dimension::line(d.size()) }
        };
        Torus::new(&dimensions.iter().map(linked).collect::<Vec<_>>())
    }

    fn offer(&self) -> String {
        match self.dimensions {
            2 => format!("2 dimensions of at most {FULL} chips"),
            count => format!("{count} dimensions and at most {} chips", self.largest_slice),
        }
    }
}
