//! Every number by which the engine chooses how an operation is run, in one table.
//!
//! The defaults were measured on a guest with 2 cores, with 2 to 96 ranks (`docs/performance.md`). `tpurun bench
//! --tune` measures another machine and writes a file for `TPURUN_TUNING`. Rank 0 of a communicator decides for all
//! its ranks: its numbers go with the [`Settings`](crate::segment::Settings).

use std::fmt::{self, Write};
use std::ops::RangeInclusive;
use std::path::Path;

/// A number of the table, as a file has it.
#[derive(Clone, Debug)]
pub struct TuningField {
    /// Its key.
    pub name: &'static str,
    /// Its value, unless a file has another one.
    pub default: usize,
    /// The values that it may have.
    pub range: RangeInclusive<usize>,
}

macro_rules! tuning {
    ($($(#[doc = $doc:literal])+ $name:ident: $default:expr, $range:expr;)+) => {
        /// The numbers by which the engine chooses how an operation is run. Sizes are in bytes.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub struct Tuning {
            $($(#[doc = $doc])+ pub $name: usize,)+
        }

        impl Default for Tuning {
            fn default() -> Self {
                Self { $($name: $default,)+ }
            }
        }

        impl Tuning {
            /// How many numbers there are.
            pub const COUNT: usize = [$(stringify!($name)),+].len();
            /// The facts of each, in order.
            pub const FIELDS: [TuningField; Self::COUNT] =
                [$(TuningField { name: stringify!($name), default: $default, range: $range },)+];

            /// All of them, in the order of [`FIELDS`](Self::FIELDS).
            pub fn values(&self) -> [usize; Self::COUNT] {
                [$(self.$name),+]
            }

            fn of([$($name),+]: [usize; Self::COUNT]) -> Self {
                Self { $($name),+ }
            }
        }
    };
}

/// Most bytes of a threshold: with as many, what it is the threshold of is never done. A product of it and of ranks
/// is still a number.
const MOST: usize = 1 << 40;
/// Any threshold.
const BYTES: RangeInclusive<usize> = 0..=MOST;
/// Bytes of a piece that goes through memory that all share.
const PIECE: RangeInclusive<usize> = 4 << 10..=64 << 20;

tuning! {
    /// All-reduces of at most this size may share one meeting, and are staged for that wherever they are. Larger ones
    /// take longer to move than to meet for.
    small_bytes: 8 << 10, 0..=64 << 10;

    /// Tensors in arenas are used where they are from this size on. To read smaller ones there takes longer than to
    /// copy them twice.
    in_place_bytes: 16 << 10, BYTES;
    /// As `in_place_bytes`, for each rank, of tensors that are folded: a rank that folds needs pages of every rank.
    in_place_fold_part: 4 << 10, BYTES;
    /// As `in_place_bytes`, for each rank, of tensors that all get from one rank.
    in_place_broadcast_part: 8 << 10, BYTES;
    /// As `in_place_bytes`, for each rank, of a chunk that is only copied.
    in_place_chunk_part: 512, BYTES;

    /// In place, with more ranks than cores, every rank does its share from this size on. With less, the last to
    /// arrive and its helpers do all: a second meeting would take longer.
    shares_bytes: 64 << 10, BYTES;
    /// As `shares_bytes`, for each rank, of tensors that are folded for all ranks: a few pages of every rank.
    shares_fold_part: 64 << 10, BYTES;
    /// As `shares_bytes`, of tensors that are folded for all ranks, however many these are: each helper would come to
    /// know all pages first.
    shares_fold_bytes: 1 << 20, BYTES;
    /// As `shares_bytes`, of tensors that all get from one rank.
    shares_broadcast_bytes: 512 << 10, BYTES;

    /// With more ranks than cores, what is folded goes through a pipeline from this size on.
    pipeline_bytes: 1 << 20, BYTES;
    /// As `pipeline_bytes`, where as many ranks as `pipeline_many` share a core.
    pipeline_bytes_many: 512 << 10, BYTES;
    /// The ranks on a core that are many for a pipeline.
    pipeline_many: 32, 1..=MOST;
    /// Bytes of a piece of a pipeline at least.
    pipeline_piece_least: 64 << 10, PIECE;
    /// Bytes of a piece at most where each rank has a core.
    pipeline_piece_alone: 128 << 10, PIECE;
    /// Bytes of a piece at most where fewer than `pipeline_piece_ranks` share a core.
    pipeline_piece: 256 << 10, PIECE;
    /// Bytes of a piece at most where more share one: each does more in its turn then.
    pipeline_piece_many: 512 << 10, PIECE;
    /// The ranks on a core that are many for the pieces.
    pipeline_piece_ranks: 16, 1..=MOST;
    /// Pieces on their way for each core: while one is folded, another one is ready.
    pipeline_pieces: 2, 1..=16;
    /// Bytes of a piece that is folded while another one is taken, where data outgrows the caches.
    pipeline_long_piece: 512 << 10, PIECE;
    /// The ranks on a core from which on pieces are taken so. With fewer, results are written over what the caches
    /// still hold.
    pipeline_long_ranks: 4, 1..=MOST;
    /// Most bytes that all ranks together have folded and not taken yet, and that still stay in the caches.
    pipeline_kept_bytes: 8 << 20, BYTES;

    /// Between hosts, what is folded goes in two halves from this size on: first over the ranks of each host.
    hierarchical_bytes: 16 << 10, BYTES;
    /// Between hosts, each host does a part of the second half from this size on. Below it a meeting costs more than
    /// the bytes.
    scattered_bytes: 128 << 10, BYTES;
    /// The hosts from which on that is so. Two send each other as many bytes either way.
    scattered_hosts: 3, 2..=MOST;
    /// Between hosts, rounds go over several connections from this size on: waking other threads takes longer than to
    /// send less.
    striped_bytes: 256 << 10, BYTES;

    /// The bytes that all ranks of a host can hope to have in caches. Measured on a guest of a processor that says it
    /// has 480 MiB: copies past the caches and the reads after them take two thirds of the time from there on.
    cache_bytes: 64 << 20, 1 << 10..=MOST;
    /// Data that several ranks of a host read is staged past the caches from this size on: all have what was there
    /// before in theirs.
    read_by_many_bytes: 128 << 10, BYTES;
    /// Bytes of memory whose folding takes as long as to wake a helper.
    help_bytes: 64 << 10, 1 << 10..=MOST;

    /// Bytes of the windows of all ranks.
    windows_bytes: 64 << 20, 1 << 20..=4 << 30;
    /// Bytes of a rank's window at least.
    window_least: 64 << 10, 16 << 10..=64 << 20;
    /// Bytes of a rank's window at most.
    window_most: 512 << 10, 16 << 10..=64 << 20;
    /// Bytes of a rank's window at least where ranks are on several hosts: each round costs the way there and back.
    window_between_hosts: 4 << 20, 16 << 10..=64 << 20;

    /// Nanoseconds that a message takes to start, by which ring and bucket are compared with flat.
    message_ns: 5_000, 1..=1_000_000_000;
    /// Bytes that go over a link in a second, for the same.
    link_bytes_per_s: 5_000_000_000, 1..=MOST;
    /// Nanoseconds from waking a rank until it runs, for the same.
    wake_ns: 3_000, 1..=1_000_000_000;
    /// Bytes that all ranks of a host read and write in a second, for the same.
    memory_bytes_per_s: 15_000_000_000, 1..=MOST;
}

/// Most bytes of a file.
const MOST_FILE: u64 = 64 << 10;

impl Tuning {
    /// Reads the value of `TPURUN_TUNING`: the name of a TOML file, or what would be in one, in braces.
    ///
    /// # Errors
    /// A text with what was expected and given.
    pub fn from_variable(value: &str) -> Result<Self, String> {
        if value.starts_with('{') {
            return Self::parse(&format!("tuning = {value}")).map_err(|error| format!("{value}: {error}"));
        }
        let text = read_file(Path::new(value)).map_err(|error| format!("{value}: {error}"))?;
        Self::parse(&text).map_err(|error| format!("{value}: {error}"))
    }

    /// Reads a file: `name = number` lines, at its top or in a table `[tuning]`. A number that it does not have keeps
    /// its default.
    ///
    /// # Errors
    /// A text with what was expected and given.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut table: toml::Table =
            text.parse().map_err(|error: toml::de::Error| format!("expected TOML: {}", error.message()))?;
        if let Some(toml::Value::Table(inner)) = table.remove("tuning") {
            table.extend(inner);
        }
        let mut values = Self::default().values();
        for (name, value) in &table {
            let index = Self::FIELDS.iter().position(|field| field.name == name);
            let index = index.ok_or_else(|| unknown(name))?;
            let number = value.as_integer().and_then(|number| usize::try_from(number).ok());
            values[index] = number.ok_or_else(|| out_of_range(&Self::FIELDS[index], &value.to_string()))?;
        }
        Self::checked(values)
    }

    /// These numbers, if they are ones that the engine can work with. Another process may have written them.
    ///
    /// # Errors
    /// A text with what was expected and given.
    pub fn checked(values: [usize; Self::COUNT]) -> Result<Self, String> {
        for (field, value) in Self::FIELDS.iter().zip(values) {
            if !field.range.contains(&value) {
                return Err(out_of_range(field, &value.to_string()));
            }
        }
        let tuning = Self::of(values);
        let Self { window_least, window_most, .. } = tuning;
        if window_least > window_most {
            return Err(format!(
                "window_least: expected at most window_most ({window_most}), given {window_least}"
            ));
        }
        Ok(tuning)
    }
}

/// As `TPURUN_TUNING` has it: what is not as by default, in braces.
impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changed = Self::FIELDS.iter().zip(self.values()).filter(|(field, value)| field.default != *value);
        f.write_char('{')?;
        for (index, (field, value)) in changed.enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma} {} = {value}", field.name)?;
        }
        f.write_str(" }")
    }
}

fn read_file(path: &Path) -> Result<String, String> {
    let failed = |error: std::io::Error| format!("cannot read the file: {error}");
    let metadata = std::fs::metadata(path).map_err(failed)?;
    // To read a pipe would block.
    if !metadata.is_file() || metadata.len() > MOST_FILE {
        return Err(format!("expected a file of at most {MOST_FILE} bytes"));
    }
    std::fs::read_to_string(path).map_err(failed)
}

fn out_of_range(field: &TuningField, given: &str) -> String {
    let (least, most) = (field.range.start(), field.range.end());
    format!("{}: expected a number from {least} to {most}, given {given}", field.name)
}

fn unknown(name: &str) -> String {
    let names: Vec<&str> = Tuning::FIELDS.iter().map(|field| field.name).collect();
    format!("expected one of {}, given {name}", names.join(", "))
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_file_changes_what_it_names() {
        let expected = Tuning { pipeline_bytes: 5 << 20, cache_bytes: 1 << 20, ..Tuning::default() };
        let lines = "# of this machine\npipeline_bytes = 5_242_880\ncache_bytes = 0x100000\n";
        assert_eq!(Tuning::parse(lines), Ok(expected));
        assert_eq!(Tuning::parse(&format!("[tuning]\n{lines}")), Ok(expected));
        assert_eq!(Tuning::parse(""), Ok(Tuning::default()));
        assert_eq!(Tuning::from_variable(&expected.to_string()), Ok(expected));
        assert_eq!(Tuning::from_variable(&Tuning::default().to_string()), Ok(Tuning::default()));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let wrong = |text: &str| Tuning::parse(text).expect_err("it is wrong");
        assert!(wrong("pipeline_byte = 1").starts_with("expected one of small_bytes, in_place_bytes,"));
        assert!(wrong("pipeline_byte = 1").ends_with("given pipeline_byte"));
        assert_eq!(wrong("pipeline_pieces = 0"), "pipeline_pieces: expected a number from 1 to 16, given 0");
        assert!(wrong("pipeline_pieces = -1").ends_with("given -1"));
        assert!(wrong("pipeline_pieces = \"2\"").ends_with("given \"2\""));
        assert!(wrong("pipeline_pieces").starts_with("expected TOML: "));
        assert_eq!(
            wrong("window_least = 1048576"),
            "window_least: expected at most window_most (524288), given 1048576"
        );
        let missing = Tuning::from_variable("/nowhere/at/all").expect_err("there is no file");
        assert!(missing.starts_with("/nowhere/at/all: cannot read the file: "), "{missing}");
        let folder = Tuning::from_variable("/").expect_err("it is a folder");
        assert_eq!(folder, "/: expected a file of at most 65536 bytes");
        let inline = Tuning::from_variable("{ a = 1 ").expect_err("it does not end");
        assert!(inline.starts_with("{ a = 1 : expected TOML: "), "{inline}");
    }

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(Tuning::checked(Tuning::default().values()), Ok(Tuning::default()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// A file may hold any text.
        #[test]
        fn any_text_is_a_tuning_or_is_refused(text in ".{0,40}|[a-z_]{1,20} = [0-9_-]{1,20}|\\{.{0,20}\\}") {
            for tuning in [Tuning::parse(&text), Tuning::from_variable(&text)].into_iter().flatten() {
                prop_assert_eq!(Tuning::from_variable(&tuning.to_string()), Ok(tuning));
            }
        }
    }
}
