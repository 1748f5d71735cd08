//! Segments that should not be: refused, and without a trace.

use proptest::prelude::*;
use tpurun_topology::{Algorithm, Collective};

use super::world::{Case, World};
use crate::execute::execution::{Delivery, ExecutionError};
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_protocol::wire::{Form, Header};

fn world(collective: Collective, seed: u64) -> World {
    let (ranks, shape, dtype, op) = (4, "2x2", Dtype::Bf16, ReduceOp::Sum);
    let case = Case { collective, algorithm: Algorithm::Bucket, ranks, shape, dtype, op, seed };
    World::new(&case, 61)
}

/// A first segment of some rank: sender, receiver, header and payload.
fn first_segment(world: &mut World, from: usize) -> (usize, Header, Vec<u8>) {
    let transmit = world.ranks[from].execution.poll_transmit().expect("every rank begins with a send");
    (transmit.to as usize, transmit.header, transmit.payload.to_vec())
}

fn header() -> impl Strategy<Value = Header> {
    let small = |bound: u32| prop_oneof![4 => 0..bound, 1 => any::<u32>()];
    let form = prop_oneof![Just(Form::Whole), Just(Form::Partial)];
    let place = (small(20), small(5), prop_oneof![Just(0), 0..100u64, any::<u64>()], small(100));
    let when = (prop_oneof![3 => Just(3), 1 => any::<u32>()], prop_oneof![3 => 40..43u64, 1 => any::<u64>()]);
    (form, small(5), place, when).prop_map(|(form, channel, (chunk, part, offset, bytes), (epoch, seq))| {
        Header { form, epoch, channel, seq, chunk, part, offset, bytes }
    })
}

/// Changes one field.
fn mutation() -> impl Strategy<Value = (usize, u64)> {
    (0..8usize, prop_oneof![1..4u64, any::<u64>().prop_map(|delta| delta | 1)])
}

fn mutate(header: Header, (field, delta): (usize, u64)) -> Header {
    let mut header = header;
    match field {
        0 => header.form = if header.form == Form::Whole { Form::Partial } else { Form::Whole },
        1 => header.epoch = header.epoch.wrapping_add(delta as u32),
        2 => header.channel = header.channel.wrapping_add(delta as u32),
        3 => header.seq = header.seq.wrapping_add(delta),
        4 => header.chunk = header.chunk.wrapping_add(delta as u32),
        5 => header.part = header.part.wrapping_add(delta as u32),
        6 => header.offset = header.offset.wrapping_add(delta),
        _ => header.bytes = header.bytes.wrapping_add(delta as u32),
    }
    header
}

fn collective() -> impl Strategy<Value = Collective> {
    prop_oneof![Just(Collective::AllReduce), Just(Collective::ReduceScatter), Just(Collective::AllToAll)]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_changed_header_changes_nothing(
        collective in collective(), seed: u64, from in 0..4usize, mutation in mutation(), wrong_from: bool,
    ) {
        let mut world = world(collective, seed);
        let (to, header, payload) = first_segment(&mut world, from);
        let mutated = mutate(header, mutation);
        prop_assume!(mutated != header);
        let from = if wrong_from { 3 - to as u32 } else { from as u32 };
        let receiver = &mut world.ranks[to].execution;
        match receiver.handle_segment(from, &mutated, &payload) {
            // The operation after this one.
            Ok(delivery) => {
                prop_assert_eq!(delivery, Delivery::Later);
                prop_assert!(mutated.seq > header.seq);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
        world.run();
        world.check();
    }

    #[test]
    fn any_segments_in_any_number_are_survived(
        collective in collective(),
        segments in prop::collection::vec(
            (0..6u32, header(), prop::collection::vec(any::<u8>(), 0..200), any::<bool>()), 0..40,
        ),
    ) {
        let mut world = world(collective, 5);
        let mut done = 0;
        for (from, mut header, mut bytes, fit) in segments {
            if fit {
                bytes.resize(header.bytes.min(200) as usize, 0);
                header.bytes = bytes.len() as u32;
            }
            done += usize::from(world.ranks[0].execution.handle_segment(from, &header, &bytes).is_ok());
        }
        // Guards around the memory are looked at, whatever the numbers are now.
        prop_assert!(done <= 40);
        world.check_guards();
    }

    #[test]
    fn a_payload_of_another_length_is_refused(seed: u64, extra in 0..64usize) {
        let mut world = world(Collective::AllReduce, seed);
        let (to, header, mut payload) = first_segment(&mut world, 0);
        prop_assume!(extra != payload.len());
        payload.resize(extra, 0);
        let error = world.ranks[to].execution.handle_segment(0, &header, &payload).expect_err("it is too long");
        let length = matches!(error, ExecutionError::Length { from: 0, .. });
        prop_assert!(length);
    }
}

#[test]
fn errors_name_the_sender_and_what_was_expected() {
    let mut world = world(Collective::AllReduce, 1);
    let (to, header, payload) = first_segment(&mut world, 0);
    let receiver = &mut world.ranks[to].execution;
    let error =
        |header: Header| receiver.handle_segment(0, &header, &payload).expect_err("it is wrong").to_string();
    let mut error = error;
    let stale = error(Header { seq: 40, ..header });
    assert_eq!(stale, "rank 0 sent a segment of epoch 3 seq 40 during epoch 3 seq 41");
    let wrong = Header { part: header.part + 1, ..header };
    let unexpected = error(wrong);
    assert!(unexpected.starts_with(&format!("rank 0 sent {wrong:?}, expected {header:?}")), "{unexpected}");
    let nowhere = error(Header { channel: 77, ..header });
    assert!(nowhere.ends_with("expected nothing more on that channel"), "{nowhere}");
}
