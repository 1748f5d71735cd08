//! The choices of the planner.

use expect_test::expect;
use tpurun_topology::planner::choose;
use tpurun_topology::{
    Algorithm, Collective, Machine, Placement, Request, SharedMemory, Tensor, plan, verify,
};

use crate::{collectives, placed};

const LINKS: Machine = Machine { alpha_s: 1e-6, link_bytes_per_s: 45e9, shared: None };

fn host(cores: u32) -> Machine {
    let memory = SharedMemory { cores, wake_s: 2.5e-6, memory_bytes_per_s: 40e9 };
    Machine { alpha_s: 0.5e-6, link_bytes_per_s: 1e9, shared: Some(memory) }
}

fn request<'a>(collective: Collective, placement: &'a Placement, machine: &'a Machine) -> Request<'a> {
    Request { collective, bytes: 1 << 20, placement, rank: 0, machine, forced: None }
}

#[test]
fn one_host_takes_flat() {
    for cores in [1, 2, 8, 64] {
        let machine = host(cores);
        for ranks in (1..=17).chain([64, 256]) {
            for placement in [Placement::ring(ranks), placed(&format!("2x{ranks}"))] {
                for collective in collectives([0]) {
                    for bytes in [0, 8, 4096, 1 << 20, 1 << 30] {
                        let request = Request { bytes, ..request(collective, &placement, &machine) };
                        assert_eq!(
                            choose(&request),
                            Ok(Algorithm::Flat),
                            "{collective} {ranks} {bytes} {cores}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_torus_takes_bucket_for_what_is_large() {
    let placement = placed("4x4x4");
    for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
        let request = Request { bytes: 1 << 30, ..request(collective, &placement, &LINKS) };
        assert_eq!(choose(&request), Ok(Algorithm::Bucket));
    }
}

#[test]
fn scattered_ranks_take_the_ring() {
    let torus = "8x8".parse().unwrap();
    let placement = Placement::new(&torus, &[0, 1, 10, 11, 20, 37, 63]).unwrap();
    assert_eq!(choose(&request(Collective::AllReduce, &placement, &LINKS)), Ok(Algorithm::Ring));
}

#[test]
fn the_forced_algorithm_is_taken() {
    let (placement, machine) = (placed("4x4"), host(2));
    for algorithm in Algorithm::ALL {
        let request =
            Request { forced: Some(algorithm), ..request(Collective::AllReduce, &placement, &machine) };
        assert_eq!(plan(&request).unwrap().algorithm, algorithm);
    }
}

#[test]
fn the_plans_of_all_ranks_fit_together() {
    for machine in [LINKS, host(2)] {
        for placement in [placed("3x4"), Placement::ring(7), placed("1")] {
            for collective in collectives([0]) {
                let of_rank =
                    |rank| plan(&Request { rank, ..request(collective, &placement, &machine) }).unwrap();
                let schedules: Vec<_> = (0..placement.ranks()).map(of_rank).collect();
                verify(&schedules, Tensor::of_bytes(1 << 20)).unwrap();
            }
        }
    }
}

#[test]
fn what_cannot_be_planned_is_said_in_one_line() {
    let placement = placed("2x2");
    let base = request(Collective::AllReduce, &placement, &LINKS);
    let error = |request: &Request<'_>| plan(request).unwrap_err().to_string();
    expect!["rank 4 is not in the communicator, expected a rank below 4"]
        .assert_eq(&error(&Request { rank: 4, ..base }));
    expect!["broadcast root 9 is not in the communicator, expected a rank below 4"]
        .assert_eq(&error(&Request { collective: Collective::Broadcast { root: 9 }, ..base }));
    expect!["algorithm flat needs all 4 ranks on one host, expected ring or bucket"]
        .assert_eq(&error(&Request { forced: Some(Algorithm::Flat), ..base }));
    let many = Placement::ring(70_000);
    expect!["all_to_all has 70000 ranks, expected at most 65535"].assert_eq(&error(&Request {
        collective: Collective::AllToAll,
        placement: &many,
        ..base
    }));
}

#[test]
fn algorithms_have_names() {
    for algorithm in Algorithm::ALL {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
    }
    let error = "tree".parse::<Algorithm>().unwrap_err();
    expect![[r#"algorithm "tree" is unknown, expected flat, ring or bucket"#]].assert_eq(&error.to_string());
}
