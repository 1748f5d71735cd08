//! The fuzz targets of `launcher/fuzz` as ordinary tests: their seeds, and variations of them.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::nodes;
use crate::observe::error_record;
use crate::processes::proc_stat;
use crate::ranks::server_events;

fn smoke(target: &str, survives: fn(&[u8])) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
    let files = fs::read_dir(folder).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
    let seeds: Vec<Vec<u8>> = files.collect();
    seeds.iter().for_each(|seed| survives(seed));
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    let varied = (prop::sample::select(seeds), changes, any::<prop::sample::Index>());
    let inputs = varied.prop_map(|(mut bytes, changes, end)| {
        for (at, byte) in changes.into_iter().filter(|_| !bytes.is_empty()).collect::<Vec<_>>() {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        // Cut about as often as not.
        let end = end.index(2 * bytes.len() + 1);
        bytes.truncate(end);
        bytes
    });
    let config = Config { cases: 3000, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&inputs, |bytes| {
            survives(&bytes);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{target}: {error}"));
}

/// The targets take parsers in as files: these can name nothing of the launcher, and have no modules below.
#[test]
fn what_the_targets_take_in_stands_alone() {
    for name in ["observe/error_record", "nodes/frame", "processes/proc_stat", "ranks/server_events"] {
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src").join(name).with_extension("rs");
        let source = fs::read_to_string(source).unwrap();
        for line in source.lines() {
            let is_module = line.starts_with("mod ") && line.ends_with(';');
            assert!(!is_module && !line.contains("crate::"), "{name}: {line}");
        }
    }
}

#[test]
fn error_record() {
    smoke("error_record", error_record::survives);
}

#[test]
fn node_frame() {
    smoke("node_frame", nodes::survives);
}

#[test]
fn proc_stat() {
    smoke("proc_stat", proc_stat::survives);
}

#[test]
fn server_events() {
    smoke("server_events", server_events::survives);
}
