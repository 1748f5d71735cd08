//! The fuzz targets as ordinary tests: the checked-in seeds, and variations of them.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::{TARGETS, Target};

fn folder(target: &Target) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target.name)
}

/// With `UPDATE_EXPECT` set, the files are written instead.
#[test]
fn the_seeds_are_what_this_build_encodes() {
    for target in TARGETS {
        let folder = folder(target);
        for (index, seed) in (target.seeds)().into_iter().enumerate() {
            let path = folder.join(format!("seed-{index:02}"));
            if std::env::var_os("UPDATE_EXPECT").is_some() {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&path, &seed).unwrap();
            }
            let found = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(found == seed, "{} is out of date: run with UPDATE_EXPECT=1", path.display());
        }
        assert!(fs::read_dir(&folder).unwrap().count() > 0, "{} has no seeds", target.name);
    }
}

/// Replaces, cuts, doubles and inserts bytes.
fn varied(seed: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let change = (0..5_u8, any::<prop::sample::Index>(), any::<u64>());
    prop::collection::vec(change, 0..6).prop_map(move |changes| {
        let mut bytes = seed.clone();
        for (kind, at, value) in changes {
            let at = at.index(bytes.len() + 1);
            match kind {
                0 => bytes.truncate(at),
                1 => bytes.extend_from_within(at..),
                2 => drop(bytes.splice(at..at, value.to_le_bytes())),
                _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = value as u8),
            }
            bytes.truncate(4096);
        }
        bytes
    })
}

fn smoke(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of this name");
    let files = fs::read_dir(folder(target)).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
    let seeds: Vec<Vec<u8>> = files.collect();
    seeds.iter().for_each(|seed| (target.run)(seed));
    let inputs = prop_oneof![
        4 => prop::sample::select(seeds).prop_flat_map(varied),
        1 => prop::collection::vec(any::<u8>(), 0..400),
    ];
    let config = Config { cases: 3000, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&inputs, |bytes| {
            (target.run)(&bytes);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{name}: {error}"));
}

macro_rules! smoke {
    ($($name:ident)*) => {
        $(#[test] fn $name() { smoke(stringify!($name)); })*

        #[test]
        fn every_target_has_its_smoke_test() {
            let tested = [$(stringify!($name)),*];
            assert_eq!(TARGETS.iter().map(|target| target.name).collect::<Vec<_>>(), tested);
        }
    };
}

smoke!(arena_export board_image bridge_frames control_frames mapped_tensors match_keys meeting message_lane proc_text segment_join wire_segments);
